//! Trace spans of jobs: `job` from submission to end, and in it `queued` and `assigned` for each attempt. Each is
//! recorded when it is over, from the stored state.
//!
//! Ids are derived (`aitk_common::telemetry::context`), so no span is held in memory, and a job's spans fit together
//! even if its coordinator was killed in between or another one took over.

use aitk_common::control_plane::{AttemptState, AttemptView, EventBody, JobEvent, JobState, UnixMillis};
use aitk_common::id::{AttemptId, JobId};
use aitk_common::telemetry::context::{SpanId, TraceContext, TraceId};
use aitk_common::telemetry::traces::{Service, Span, Tracer, Traces};
use aitk_scheduler::{Job, Record};
use std::collections::HashMap;
use std::time::{Duration, SystemTime};

/// Records spans of jobs, if a collector is configured.
#[derive(Clone, Debug, Default)]
pub(crate) struct Spans {
    tracer: Tracer,
}

/// Position of a job in its trace.
struct JobTrace {
    /// The job's own span.
    own: TraceContext,
    /// The span of the submission, in the same trace.
    parent: Option<SpanId>,
    /// The span of the submission, in another trace.
    link: Option<TraceContext>,
}

impl Spans {
    pub(crate) fn new(traces: &Traces) -> Self {
        Self {
            tracer: traces.tracer(Service::Coordinator),
        }
    }

    /// Returns the trace context for the worker of an attempt.
    pub(crate) fn of_attempt(&self, job: &Job, attempt: &AttemptId) -> Option<TraceContext> {
        if !self.tracer.is_on() {
            // Without a collector, the attempt belongs directly to the submitting span.
            return submitter(job);
        }
        let own = self.job_trace(job).own;
        Some(TraceContext {
            span: SpanId::of_assignment(own.trace, attempt),
            ..own
        })
    }

    /// Records the spans that ended with the records of one transaction.
    pub(crate) fn record_commit(&self, records: &[Record]) {
        if !self.tracer.is_on() {
            return;
        }
        // A job's record follows its events. A transaction may have those of a thousand jobs.
        let mut happened: HashMap<&JobId, Vec<&JobEvent>> = HashMap::new();
        for record in records {
            match record {
                Record::Event { job, event, .. }
                    if matches!(event.body, EventBody::State { .. } | EventBody::Attempt { .. }) =>
                {
                    happened.entry(job).or_default().push(event);
                }
                Record::Job(job) => {
                    for event in happened.remove(&job.id).into_iter().flatten() {
                        self.record_event(job, event);
                    }
                }
                _ => {}
            }
        }
    }

    fn record_event(&self, job: &Job, event: &JobEvent) {
        match &event.body {
            EventBody::State { state, reason, .. } if state.is_ended() => {
                self.record_job_span(job, *state, reason, event.time)
            }
            EventBody::Attempt { state, message, .. } => {
                let id = event.attempt.as_ref();
                let Some(at) = job.attempts.iter().rposition(|attempt| Some(&attempt.id) == id) else {
                    return;
                };
                let (before, attempt) = (at.checked_sub(1).map(|at| &job.attempts[at]), &job.attempts[at]);
                match state {
                    AttemptState::Assigned => self.record_queued_span(job, before, attempt),
                    AttemptState::Running => {}
                    ended => self.record_assigned_span(job, attempt, *ended, message, event.time),
                }
            }
            _ => {}
        }
    }

    /// Records the span of an ended job. A resumed job ends again and sends its span again, longer.
    fn record_job_span(&self, job: &Job, state: JobState, reason: &str, now: UnixMillis) {
        let JobTrace { own, parent, link } = self.job_trace(job);
        if !own.sampled {
            return;
        }
        let mut span = Span::new("job", own, (time(job.created), time(now)))
            .serves(parent)
            .with("aitk.job.id", job.id.to_string())
            .with("aitk.job.name", job.name.clone())
            .with("aitk.job.kind", job.kind.clone())
            .with("aitk.job.owner", job.requirements.owner.to_string())
            .with("aitk.attempts", i64::try_from(job.attempts.len()).unwrap_or(i64::MAX))
            .with("aitk.outcome", state.name());
        if let Some(array) = &job.array {
            span = span
                .with("aitk.array.id", array.id.to_string())
                .with("aitk.array.index", i64::from(array.index));
        }
        if let Some(link) = link {
            span = span.linked(link);
        }
        if state == JobState::Failed {
            span = span.failed(reason.to_owned());
        }
        self.tracer.record(span);
    }

    /// Records the time in the queue: without the pause before a retry and the time before `not_before`.
    fn record_queued_span(&self, job: &Job, before: Option<&AttemptView>, attempt: &AttemptView) {
        let own = self.job_trace(job).own;
        if !own.sampled {
            return;
        }
        let free = before.and_then(|before| before.ended).unwrap_or(job.created);
        let since = free.max(job.not_before).min(attempt.created);
        let context = TraceContext {
            span: SpanId::random(),
            ..own
        };
        let span = Span::new("queued", context, (time(since), time(attempt.created)))
            .within(own.span)
            .with("aitk.job.id", job.id.to_string())
            .with("aitk.attempt.id", attempt.id.to_string());
        self.tracer.record(span);
    }

    fn record_assigned_span(
        &self,
        job: &Job,
        attempt: &AttemptView,
        state: AttemptState,
        message: &str,
        now: UnixMillis,
    ) {
        let own = self.job_trace(job).own;
        if !own.sampled {
            return;
        }
        let context = TraceContext {
            span: SpanId::of_assignment(own.trace, &attempt.id),
            ..own
        };
        let device = attempt.device;
        let mut span = Span::new("assigned", context, (time(attempt.created), time(now)))
            .within(own.span)
            .calls()
            .with("aitk.job.id", job.id.to_string())
            .with("aitk.attempt.id", attempt.id.to_string())
            .with(
                "aitk.attempt.number",
                i64::try_from(attempt.epoch.0).unwrap_or(i64::MAX),
            )
            .with("aitk.worker.name", attempt.worker_name.clone())
            .with("aitk.device", format!("{}:{}", device.kind.name(), device.index))
            .with("aitk.memory_profile", attempt.profile.name())
            .with("aitk.outcome", state.name());
        if matches!(state, AttemptState::Failed | AttemptState::Lost) {
            span = span.failed(message.to_owned());
        }
        self.tracer.record(span);
    }

    fn job_trace(&self, job: &Job) -> JobTrace {
        let parent = submitter(job);
        let trace = parent.map_or_else(|| TraceId::of_job(&job.id), |parent| parent.trace);
        let own = TraceContext {
            trace,
            span: SpanId::of_job(trace, &job.id),
            sampled: self.tracer.is_sampled(trace, parent),
        };
        JobTrace {
            own,
            parent: parent.map(|parent| parent.span),
            link: job.trace.as_deref().copied().filter(|_| parent.is_none()),
        }
    }
}

/// Returns the submitting span if the job belongs to its trace. Members of a sweep are up to a thousand jobs, too many
/// for one trace: each has its own trace, linked to the submission.
fn submitter(job: &Job) -> Option<TraceContext> {
    let alone = job.array.as_ref().is_none_or(|array| array.split);
    job.trace.as_deref().copied().filter(|_| alone)
}

fn time(moment: UnixMillis) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_millis(moment.0)
}
