//! Spans of an attempt for a trace collector: `attempt`, in it `staging`, `checkpoint` with its upload and its
//! commit, and the phases of the child.
//!
//! The child has no exporter of its own, so it needs no address and no secret of the collector: the daemon records
//! its phases from its events. The child's spans still have a service name of their own.

use aitk_common::attempt::Outcome;
use aitk_common::control_plane::Assignment;
use aitk_common::telemetry::context::{SpanId, TraceContext, TraceId};
use aitk_common::telemetry::traces::{Service, Span, Tracer, Traces};
use serde::Deserialize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// The most phases of an attempt that get spans. A training that samples every few steps for days has more.
const MAX_PHASE_SPANS: usize = 1000;

/// Records spans for all attempts of a worker.
#[derive(Clone, Debug)]
pub(crate) struct SpanRecorder {
    worker: Tracer,
    child: Tracer,
    name: String,
}

impl SpanRecorder {
    /// Makes a recorder for the worker with this name.
    pub(crate) fn new(traces: &Traces, name: &str) -> Self {
        Self {
            worker: traces.tracer(Service::Worker),
            child: traces.tracer(Service::Attempt),
            name: name.to_owned(),
        }
    }
}

/// The span of one attempt. It ends when the last clone is dropped.
#[derive(Clone)]
pub(crate) struct AttemptTrace(Option<Arc<AttemptSpan>>);

struct AttemptSpan {
    spans: SpanRecorder,
    context: TraceContext,
    parent: Option<SpanId>,
    start: SystemTime,
    job: String,
    attempt: String,
    number: u64,
    device: String,
    profile: &'static str,
    process_types: String,
    state: Mutex<SpanState>,
}

#[derive(Default)]
struct SpanState {
    /// The child's current phase, and when it began.
    phase: Option<(String, SystemTime)>,
    phases: usize,
    ended: Option<SpanEnd>,
}

struct SpanEnd {
    at: SystemTime,
    outcome: &'static str,
    error: Option<String>,
}

impl AttemptTrace {
    /// Starts the span of an attempt.
    pub(crate) fn begin(spans: &SpanRecorder, assignment: &Assignment) -> Self {
        if !spans.worker.is_on() {
            return Self(None);
        }
        let from = assignment.trace;
        let trace = trace_id_of(assignment);
        if !spans.worker.is_sampled(trace, from) {
            return Self(None);
        }
        let device = assignment.device;
        Self(Some(Arc::new(AttemptSpan {
            spans: spans.clone(),
            context: TraceContext {
                trace,
                span: SpanId::random(),
                sampled: true,
            },
            parent: from.map(|from| from.span),
            start: SystemTime::now(),
            job: assignment.job.to_string(),
            attempt: assignment.attempt.to_string(),
            number: assignment.epoch.0,
            device: format!("{}:{}", device.kind.name(), device.index),
            profile: assignment.profile.name(),
            process_types: process_types(&assignment.job_json),
            state: Mutex::default(),
        })))
    }

    /// Starts the span of a step of the attempt.
    pub(crate) fn start_step(&self, name: &'static str) -> StepSpan {
        let parent = self.0.as_ref().map(|attempt_span| attempt_span.context.span);
        StepSpan::begin(self.0.clone(), name, parent)
    }

    /// Starts a phase of the child, and ends the one before.
    pub(crate) fn start_phase(&self, name: &str) {
        if let Some(attempt_span) = &self.0 {
            attempt_span.next_phase(Some(name.to_owned()));
        }
    }

    /// Ends the current phase: the child has exited.
    pub(crate) fn end_phase(&self) {
        if let Some(attempt_span) = &self.0 {
            attempt_span.next_phase(None);
        }
    }

    /// Sets the outcome of the attempt. A span without one is recorded as cut off.
    pub(crate) fn set_outcome(&self, outcome: &Outcome) {
        let Some(attempt_span) = &self.0 else { return };
        let (outcome, error) = match outcome {
            Outcome::Completed => ("completed", None),
            Outcome::Stopped { .. } => ("stopped", None),
            Outcome::Failed { message, .. } => ("failed", Some(message.clone())),
        };
        attempt_span.end(outcome, error);
    }

    /// Sets the outcome of a fenced attempt.
    pub(crate) fn set_fenced(&self) {
        if let Some(attempt_span) = &self.0 {
            attempt_span.end(
                "fenced",
                Some("the coordinator took the job from this worker".to_owned()),
            );
        }
    }
}

/// The id of the trace that an attempt belongs to, even if it is not recorded.
pub(crate) fn trace_id_of(assignment: &Assignment) -> TraceId {
    assignment
        .trace
        .map_or_else(|| TraceId::of_job(&assignment.job), |from| from.trace)
}

impl AttemptSpan {
    fn lock(&self) -> MutexGuard<'_, SpanState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn context(&self, span: SpanId) -> TraceContext {
        TraceContext { span, ..self.context }
    }

    fn end(&self, outcome: &'static str, error: Option<String>) {
        let at = SystemTime::now();
        self.lock().ended.get_or_insert(SpanEnd { at, outcome, error });
    }

    fn next_phase(&self, next: Option<String>) {
        let at = SystemTime::now();
        let mut now = self.lock();
        let before = std::mem::replace(&mut now.phase, next.map(|name| (name, at)));
        let Some((name, since)) = before.filter(|_| now.phases < MAX_PHASE_SPANS) else {
            return;
        };
        now.phases += 1;
        drop(now);
        let span = Span::new(name, self.context(SpanId::random()), (since, at))
            .within(self.context.span)
            .with("aitk.job.id", self.job.clone())
            .with("aitk.attempt.id", self.attempt.clone())
            .with("aitk.process.type", self.process_types.clone());
        self.spans.child.record(span);
    }
}

impl Drop for AttemptSpan {
    fn drop(&mut self) {
        self.next_phase(None);
        let SpanEnd { at, outcome, error } = self.lock().ended.take().unwrap_or_else(|| SpanEnd {
            at: SystemTime::now(),
            outcome: "cut off",
            error: Some("the worker ended it, or ended itself".to_owned()),
        });
        let mut span = Span::new("attempt", self.context, (self.start, at))
            .serves(self.parent)
            .with("aitk.job.id", self.job.clone())
            .with("aitk.attempt.id", self.attempt.clone())
            .with("aitk.attempt.number", i64::try_from(self.number).unwrap_or(i64::MAX))
            .with("aitk.worker.name", self.spans.name.clone())
            .with("aitk.device", self.device.clone())
            .with("aitk.memory_profile", self.profile)
            .with("aitk.process.type", self.process_types.clone())
            .with("aitk.outcome", outcome);
        if let Some(error) = error {
            span = span.failed(error);
        }
        self.spans.worker.record(span);
    }
}

/// The span of a step of an attempt. It ends when it is dropped.
#[must_use]
pub(crate) struct StepSpan {
    attempt_span: Option<Arc<AttemptSpan>>,
    name: &'static str,
    span_id: Option<SpanId>,
    parent: Option<SpanId>,
    start: SystemTime,
    training_step: Option<u64>,
    error: Option<String>,
}

impl StepSpan {
    fn begin(attempt_span: Option<Arc<AttemptSpan>>, name: &'static str, parent: Option<SpanId>) -> Self {
        Self {
            span_id: attempt_span.as_ref().map(|_| SpanId::random()),
            attempt_span,
            name,
            parent,
            start: SystemTime::now(),
            training_step: None,
            error: None,
        }
    }

    /// Starts the span of a part of this step.
    pub(crate) fn start_step(&self, name: &'static str) -> Self {
        Self::begin(self.attempt_span.clone(), name, self.span_id)
    }

    /// Sets the training step that this span is about.
    pub(crate) fn with_training_step(mut self, step: u64) -> Self {
        self.training_step = Some(step);
        self
    }

    /// Marks the span as failed.
    pub(crate) fn set_error(&mut self, why: impl Into<String>) {
        self.error = Some(why.into());
    }
}

impl Drop for StepSpan {
    fn drop(&mut self) {
        let (Some(attempt_span), Some(span_id), Some(parent)) = (&self.attempt_span, self.span_id, self.parent) else {
            return;
        };
        let mut span = Span::new(
            self.name,
            attempt_span.context(span_id),
            (self.start, SystemTime::now()),
        )
        .within(parent)
        .with("aitk.job.id", attempt_span.job.clone())
        .with("aitk.attempt.id", attempt_span.attempt.clone());
        if let Some(step) = self.training_step {
            span = span.with("aitk.step", i64::try_from(step).unwrap_or(i64::MAX));
        }
        if let Some(error) = self.error.take() {
            span = span.failed(error);
        }
        attempt_span.spans.worker.record(span);
    }
}

/// The types of a job's processes, separated by commas.
fn process_types(job_json: &str) -> String {
    #[derive(Deserialize)]
    struct Job {
        #[serde(default)]
        process: Vec<Process>,
    }
    #[derive(Deserialize)]
    struct Process {
        #[serde(rename = "type", default)]
        kind: String,
    }
    // The child reports the errors of an unreadable job.
    let job: Option<Job> = serde_json::from_str(job_json).ok();
    let kinds = job.into_iter().flat_map(|job| job.process).map(|process| process.kind);
    kinds.take(16).collect::<Vec<_>>().join(",")
}
