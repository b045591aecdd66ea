//! What jobs do, as spans for a collector: `job` from its submission to its end, in it `queued` and `assigned` for each
//! attempt. Each is written down when it is over, out of what is stored then.
//!
//! Ids are derived (`aitk_common::telemetry::context`), so nothing is held in memory, and a job's spans fit together
//! although its coordinator was killed in between, or another one took over.

use aitk_common::control::{AttemptState, AttemptView, EventBody, JobEvent, JobState, UnixMillis};
use aitk_common::id::{AttemptId, JobId};
use aitk_common::telemetry::context::{SpanId, TraceContext, TraceId};
use aitk_common::telemetry::traces::{Service, Span, Tracer, Traces};
use aitk_scheduler::{Job, Record};
use std::time::{Duration, SystemTime};

/// Writes down what jobs do, if there is a collector.
#[derive(Clone, Debug, Default)]
pub(crate) struct Spans {
    tracer: Tracer,
}

/// Where a job stands in its trace.
struct Place {
    /// Its own span.
    own: TraceContext,
    /// The span that submitted it.
    parent: Option<SpanId>,
    /// The span that submitted it, of another trace.
    link: Option<TraceContext>,
}

impl Spans {
    pub(crate) fn to(traces: &Traces) -> Self {
        Self {
            tracer: traces.tracer(Service::Coordinator),
        }
    }

    /// What an attempt is part of, for its worker.
    pub(crate) fn of_attempt(&self, job: &Job, attempt: &AttemptId) -> Option<TraceContext> {
        if !self.tracer.is_on() {
            // Nothing of ours is between who submitted it and who runs it.
            return submitter(job);
        }
        let own = self.place(job).own;
        Some(TraceContext {
            span: SpanId::of_assignment(own.trace, attempt),
            ..own
        })
    }

    /// What became durable in one transaction.
    pub(crate) fn stored(&self, records: &[Record]) {
        if !self.tracer.is_on() {
            return;
        }
        // A job follows what happened to it.
        let mut happened: Vec<(&JobId, &JobEvent)> = Vec::new();
        for record in records {
            match record {
                Record::Event { job, event, .. }
                    if matches!(event.body, EventBody::State { .. } | EventBody::Attempt { .. }) =>
                {
                    happened.push((job, event));
                }
                Record::Job(job) => happened.retain(|(id, event)| {
                    let this = **id == job.id;
                    if this {
                        self.happened(job, event);
                    }
                    !this
                }),
                _ => {}
            }
        }
    }

    fn happened(&self, job: &Job, event: &JobEvent) {
        match &event.body {
            EventBody::State { state, reason, .. } if state.is_ended() => self.ended(job, *state, reason, event.time),
            EventBody::Attempt { state, message, .. } => {
                let id = event.attempt.as_ref();
                let Some(at) = job.attempts.iter().rposition(|attempt| Some(&attempt.id) == id) else {
                    return;
                };
                let (before, attempt) = (at.checked_sub(1).map(|at| &job.attempts[at]), &job.attempts[at]);
                match state {
                    AttemptState::Assigned => self.queued(job, before, attempt),
                    AttemptState::Running => {}
                    ended => self.assigned(job, attempt, *ended, message, event.time),
                }
            }
            _ => {}
        }
    }

    /// A job that is resumed ends again, and its span is sent again, longer.
    fn ended(&self, job: &Job, state: JobState, reason: &str, now: UnixMillis) {
        let Place { own, parent, link } = self.place(job);
        if !own.sampled {
            return;
        }
        let mut span = Span::new("job", own, (time(job.created), time(now)))
            .serves(parent)
            .with("aitk.job.id", job.id.to_string())
            .with("aitk.job.name", job.name.clone())
            .with("aitk.job.kind", job.kind.clone())
            .with("aitk.job.owner", job.wants.owner.to_string())
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

    /// From when it could have started: not the pause before another try, nor the time before `not_before`.
    fn queued(&self, job: &Job, before: Option<&AttemptView>, attempt: &AttemptView) {
        let own = self.place(job).own;
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

    fn assigned(&self, job: &Job, attempt: &AttemptView, state: AttemptState, message: &str, now: UnixMillis) {
        let own = self.place(job).own;
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

    fn place(&self, job: &Job) -> Place {
        let parent = submitter(job);
        let trace = parent.map_or_else(|| TraceId::of_job(&job.id), |parent| parent.trace);
        let own = TraceContext {
            trace,
            span: SpanId::of_job(trace, &job.id),
            sampled: self.tracer.is_sampled(trace, parent),
        };
        Place {
            own,
            parent: parent.map(|parent| parent.span),
            link: job.trace.as_deref().copied().filter(|_| parent.is_none()),
        }
    }
}

/// The span that submitted a job, if both are of one trace. Members of a sweep are up to a thousand jobs, which nobody
/// could read in one trace: each has its own, linked to the one that submitted them.
fn submitter(job: &Job) -> Option<TraceContext> {
    let alone = job.array.as_ref().is_none_or(|array| array.split);
    job.trace.as_deref().copied().filter(|_| alone)
}

fn time(moment: UnixMillis) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_millis(moment.0)
}
