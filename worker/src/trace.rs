//! What an attempt does, as spans for a collector: `attempt`, in it `staging`, `checkpoint` with its upload and its
//! commit, and the phases of the child.
//!
//! The child has no exporter of its own, and so no address and no secret of the collector: what it says about its phases
//! is enough. Its spans appear under a service name of their own all the same.

use aitk_common::attempt::Outcome;
use aitk_common::control::Assignment;
use aitk_common::telemetry::context::{SpanId, TraceContext, TraceId};
use aitk_common::telemetry::traces::{Service, Span, Tracer, Traces};
use serde::Deserialize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// Phases of an attempt that get spans. A training that draws samples every few steps for days has more.
const PHASES_MOST: usize = 1000;

/// Writes spans down, for all attempts of a worker.
#[derive(Clone, Debug)]
pub(crate) struct Spans {
    worker: Tracer,
    child: Tracer,
    name: String,
}

impl Spans {
    /// For a worker of this name.
    pub(crate) fn to(traces: &Traces, name: &str) -> Self {
        Self {
            worker: traces.tracer(Service::Worker),
            child: traces.tracer(Service::Attempt),
            name: name.to_owned(),
        }
    }
}

/// The trace of one attempt. Its own span is over when the last clone is gone.
#[derive(Clone)]
pub(crate) struct AttemptTrace(Option<Arc<Open>>);

struct Open {
    spans: Spans,
    own: TraceContext,
    parent: Option<SpanId>,
    start: SystemTime,
    job: String,
    attempt: String,
    number: u64,
    device: String,
    profile: &'static str,
    processes: String,
    now: Mutex<Now>,
}

#[derive(Default)]
struct Now {
    /// What the child does, since when.
    phase: Option<(String, SystemTime)>,
    phases: usize,
    ended: Option<Ended>,
}

struct Ended {
    at: SystemTime,
    outcome: &'static str,
    error: Option<String>,
}

impl AttemptTrace {
    /// Begins an attempt.
    pub(crate) fn begin(spans: &Spans, assignment: &Assignment) -> Self {
        if !spans.worker.is_on() {
            return Self(None);
        }
        let from = assignment.trace;
        let trace = trace_of(assignment);
        if !spans.worker.is_sampled(trace, from) {
            return Self(None);
        }
        let device = assignment.device;
        Self(Some(Arc::new(Open {
            spans: spans.clone(),
            own: TraceContext {
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
            processes: processes(&assignment.job_json),
            now: Mutex::default(),
        })))
    }

    /// A piece of the attempt's work, which begins now.
    pub(crate) fn step(&self, name: &'static str) -> Step {
        let parent = self.0.as_ref().map(|open| open.own.span);
        Step::begin(self.0.clone(), name, parent)
    }

    /// The child began something else.
    pub(crate) fn phase(&self, name: &str) {
        if let Some(open) = &self.0 {
            open.next_phase(Some(name.to_owned()));
        }
    }

    /// The child is gone.
    pub(crate) fn no_phase(&self) {
        if let Some(open) = &self.0 {
            open.next_phase(None);
        }
    }

    /// The attempt ended so. What is not said to have ended was cut off.
    pub(crate) fn ended(&self, outcome: &Outcome) {
        let Some(open) = &self.0 else { return };
        let (outcome, error) = match outcome {
            Outcome::Completed => ("completed", None),
            Outcome::Stopped { .. } => ("stopped", None),
            Outcome::Failed { message, .. } => ("failed", Some(message.clone())),
        };
        open.end(outcome, error);
    }

    /// It is somebody else's now.
    pub(crate) fn fenced(&self) {
        if let Some(open) = &self.0 {
            open.end(
                "fenced",
                Some("the coordinator gave the job to somebody else, or to nobody".to_owned()),
            );
        }
    }
}

/// The trace that an attempt belongs to, whether it is written down or not.
pub(crate) fn trace_of(assignment: &Assignment) -> TraceId {
    assignment
        .trace
        .map_or_else(|| TraceId::of_job(&assignment.job), |from| from.trace)
}

impl Open {
    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn context(&self, span: SpanId) -> TraceContext {
        TraceContext { span, ..self.own }
    }

    fn end(&self, outcome: &'static str, error: Option<String>) {
        let at = SystemTime::now();
        self.now().ended.get_or_insert(Ended { at, outcome, error });
    }

    fn next_phase(&self, next: Option<String>) {
        let at = SystemTime::now();
        let mut now = self.now();
        let before = std::mem::replace(&mut now.phase, next.map(|name| (name, at)));
        let Some((name, since)) = before.filter(|_| now.phases < PHASES_MOST) else {
            return;
        };
        now.phases += 1;
        drop(now);
        let span = Span::new(name, self.context(SpanId::random()), (since, at))
            .within(self.own.span)
            .with("aitk.job.id", self.job.clone())
            .with("aitk.attempt.id", self.attempt.clone())
            .with("aitk.process.type", self.processes.clone());
        self.spans.child.record(span);
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.next_phase(None);
        let Ended { at, outcome, error } = self.now().ended.take().unwrap_or_else(|| Ended {
            at: SystemTime::now(),
            outcome: "cut off",
            error: Some("the worker ended it, or ended itself".to_owned()),
        });
        let mut span = Span::new("attempt", self.own, (self.start, at))
            .serves(self.parent)
            .with("aitk.job.id", self.job.clone())
            .with("aitk.attempt.id", self.attempt.clone())
            .with("aitk.attempt.number", i64::try_from(self.number).unwrap_or(i64::MAX))
            .with("aitk.worker.name", self.spans.name.clone())
            .with("aitk.device", self.device.clone())
            .with("aitk.memory_profile", self.profile)
            .with("aitk.process.type", self.processes.clone())
            .with("aitk.outcome", outcome);
        if let Some(error) = error {
            span = span.failed(error);
        }
        self.spans.worker.record(span);
    }
}

/// A piece of an attempt's work. It is over when this is dropped.
#[must_use]
pub(crate) struct Step {
    open: Option<Arc<Open>>,
    name: &'static str,
    own: Option<SpanId>,
    parent: Option<SpanId>,
    start: SystemTime,
    training_step: Option<u64>,
    error: Option<String>,
}

impl Step {
    fn begin(open: Option<Arc<Open>>, name: &'static str, parent: Option<SpanId>) -> Self {
        Self {
            own: open.as_ref().map(|_| SpanId::random()),
            open,
            name,
            parent,
            start: SystemTime::now(),
            training_step: None,
            error: None,
        }
    }

    /// A part of it, which begins now.
    pub(crate) fn step(&self, name: &'static str) -> Self {
        Self::begin(self.open.clone(), name, self.own)
    }

    /// It is about this step of a training.
    pub(crate) fn of_training(mut self, step: u64) -> Self {
        self.training_step = Some(step);
        self
    }

    /// It failed, and why.
    pub(crate) fn failed(&mut self, why: impl Into<String>) {
        self.error = Some(why.into());
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        let (Some(open), Some(own), Some(parent)) = (&self.open, self.own, self.parent) else {
            return;
        };
        let mut span = Span::new(self.name, open.context(own), (self.start, SystemTime::now()))
            .within(parent)
            .with("aitk.job.id", open.job.clone())
            .with("aitk.attempt.id", open.attempt.clone());
        if let Some(step) = self.training_step {
            span = span.with("aitk.step", i64::try_from(step).unwrap_or(i64::MAX));
        }
        if let Some(error) = self.error.take() {
            span = span.failed(error);
        }
        open.spans.worker.record(span);
    }
}

/// The types of a job's processes, with commas between.
fn processes(job_json: &str) -> String {
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
    // A job that cannot be read is the child's to explain.
    let job: Option<Job> = serde_json::from_str(job_json).ok();
    let kinds = job.into_iter().flat_map(|job| job.process).map(|process| process.kind);
    kinds.take(16).collect::<Vec<_>>().join(",")
}
