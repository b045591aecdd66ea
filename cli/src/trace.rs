//! Submissions as spans for a collector, and the trace that a job inherits from them.

use aitk_common::id::JobId;
use aitk_common::telemetry::context::{SpanId, TRACEPARENT, TraceContext, TraceId};
use aitk_common::telemetry::traces::{Service, Span, Tracer, Traces};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

/// How long a person waits for a collector at the end of a command.
const LAST_SPANS: Duration = Duration::from_secs(1);

/// One per process: what runs inside this program sends its spans the same way.
static TRACES: OnceLock<Traces> = OnceLock::new();

/// Where this program's spans go, as the environment says.
pub fn traces() -> &'static Traces {
    TRACES.get_or_init(Traces::from_environment)
}

/// Sends what waits. The last thing of all.
pub(crate) fn finish() {
    if let Some(traces) = TRACES.get() {
        traces.finish(LAST_SPANS);
    }
}

/// A submission that is under way.
pub(crate) struct Submitting {
    tracer: Tracer,
    /// What this program runs for, by `TRACEPARENT`.
    from: Option<TraceContext>,
    own: TraceContext,
    start: SystemTime,
    job: Option<JobId>,
}

impl Submitting {
    /// Begins one.
    pub(crate) fn begin() -> Self {
        let from = crate::context::env(&TRACEPARENT.to_uppercase());
        Self::with(
            traces().tracer(Service::Client),
            from.and_then(|text| text.parse().ok()),
        )
    }

    fn with(tracer: Tracer, from: Option<TraceContext>) -> Self {
        let trace = from.map_or_else(TraceId::random, |from| from.trace);
        let own = TraceContext {
            trace,
            span: SpanId::random(),
            sampled: tracer.is_sampled(trace, from),
        };
        Self {
            tracer,
            from,
            own,
            start: SystemTime::now(),
            job: None,
        }
    }

    /// What the job is part of: this submission, or without a collector what this program itself is part of.
    pub(crate) fn context(&self) -> Option<TraceContext> {
        if self.tracer.is_on() { Some(self.own) } else { self.from }
    }

    /// Inputs were sent, from `start` until now.
    pub(crate) fn sent(&self, start: SystemTime, bytes: u64) {
        if !self.tracer.is_on() {
            return;
        }
        let context = TraceContext {
            span: SpanId::random(),
            ..self.own
        };
        let span = Span::new("upload", context, (start, SystemTime::now()))
            .within(self.own.span)
            .with("aitk.upload.bytes", i64::try_from(bytes).unwrap_or(i64::MAX));
        self.tracer.record(span);
    }

    /// The coordinator has the job.
    pub(crate) fn submitted(mut self, job: &JobId) {
        self.job = Some(job.clone());
    }
}

impl Drop for Submitting {
    fn drop(&mut self) {
        if !self.tracer.is_on() {
            return;
        }
        let mut span = Span::new("submit", self.own, (self.start, SystemTime::now())).calls();
        if let Some(from) = self.from {
            span = span.within(from.span);
        }
        span = match &self.job {
            Some(job) => span.with("aitk.job.id", job.to_string()),
            None => span.failed("nothing was submitted"),
        };
        self.tracer.record(span);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_collector_the_job_is_part_of_what_the_command_is_part_of() {
        assert_eq!(Submitting::with(Tracer::default(), None).context(), None);
        let from = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".parse().ok();
        assert_eq!(Submitting::with(Tracer::default(), from).context(), from);
    }
}
