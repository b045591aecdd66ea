//! Trace spans of submissions, and the trace context that a job inherits from them.

use aitk_common::id::JobId;
use aitk_common::telemetry::context::{SpanId, TRACEPARENT, TraceContext, TraceId};
use aitk_common::telemetry::traces::{Service, Span, Tracer, Traces};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

/// How long the program waits for the collector before it exits.
const LAST_SPANS: Duration = Duration::from_secs(1);

/// One exporter per process: an embedded coordinator and worker use the same one.
static TRACES: OnceLock<Traces> = OnceLock::new();

/// Returns the exporter of this process, configured by the environment.
pub fn traces() -> &'static Traces {
    TRACES.get_or_init(Traces::from_environment)
}

/// Sends the remaining spans. Call it last.
pub(crate) fn finish() {
    if let Some(traces) = TRACES.get() {
        traces.finish(LAST_SPANS);
    }
}

/// The span of a submission. It is recorded when the value is dropped.
pub(crate) struct SubmitSpan {
    tracer: Tracer,
    /// The parent span from `TRACEPARENT`.
    parent: Option<TraceContext>,
    context: TraceContext,
    start: SystemTime,
    job: Option<JobId>,
}

impl SubmitSpan {
    /// Starts the span.
    pub(crate) fn start() -> Self {
        let parent = crate::context::env(&TRACEPARENT.to_uppercase());
        Self::new(
            traces().tracer(Service::Client),
            parent.and_then(|text| text.parse().ok()),
        )
    }

    fn new(tracer: Tracer, parent: Option<TraceContext>) -> Self {
        let trace = parent.map_or_else(TraceId::random, |parent| parent.trace);
        let context = TraceContext {
            trace,
            span: SpanId::random(),
            sampled: tracer.is_sampled(trace, parent),
        };
        Self {
            tracer,
            parent,
            context,
            start: SystemTime::now(),
            job: None,
        }
    }

    /// Returns the parent span for the job: this submission, or without a collector the parent of this program.
    pub(crate) fn context(&self) -> Option<TraceContext> {
        if self.tracer.is_on() {
            Some(self.context)
        } else {
            self.parent
        }
    }

    /// Records the upload of inputs, from `start` until now.
    pub(crate) fn record_upload(&self, start: SystemTime, bytes: u64) {
        if !self.tracer.is_on() {
            return;
        }
        let context = TraceContext {
            span: SpanId::random(),
            ..self.context
        };
        let span = Span::new("upload", context, (start, SystemTime::now()))
            .within(self.context.span)
            .with("aitk.upload.bytes", i64::try_from(bytes).unwrap_or(i64::MAX));
        self.tracer.record(span);
    }

    /// Records the id of the submitted job, and ends the span.
    pub(crate) fn submitted(mut self, job: &JobId) {
        self.job = Some(job.clone());
    }
}

impl Drop for SubmitSpan {
    fn drop(&mut self) {
        if !self.tracer.is_on() {
            return;
        }
        let mut span = Span::new("submit", self.context, (self.start, SystemTime::now())).calls();
        if let Some(parent) = self.parent {
            span = span.within(parent.span);
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
    fn without_a_collector_the_job_inherits_the_parent_of_the_command() {
        assert_eq!(SubmitSpan::new(Tracer::default(), None).context(), None);
        let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".parse().ok();
        assert_eq!(SubmitSpan::new(Tracer::default(), parent).context(), parent);
    }
}
