//! Spans for a collector: OTLP over HTTP, set up by OpenTelemetry's own environment variables.
//!
//! The spans of a job outlive the programs that see them: a job may be submitted by one command, run for days, and end
//! under another coordinator than the one that took it. So a span is not held open here. It is written down when it is
//! over, from what is known then, with ids that were known before ([`super::context`]).
//!
//! Nothing set, nothing done: then a [`Tracer`] is an empty option, and whoever has one asks it before anything is
//! put together. A collector that is down, slow or wrong costs spans, never work: the queue to it is bounded, a thread
//! of its own empties it, and what does not fit is dropped.

mod exporter;

use super::context::{SpanId, TraceContext, TraceId};
use exporter::Outage;
pub use exporter::SpanCounts;
use opentelemetry::trace::{Link, SpanContext, SpanKind, Status, TraceContextExt, TraceFlags, TraceState};
use opentelemetry::{Context, InstrumentationScope, KeyValue, Value};
use opentelemetry_sdk::trace::{
    BatchSpanProcessor, Config, SamplingDecision, ShouldSample, SpanData, SpanEvents, SpanLinks, SpanProcessor,
};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

/// Who a span is from, unless `OTEL_SERVICE_NAME` says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// The command line.
    Client,
    /// The coordinator, also inside another program.
    Coordinator,
    /// The worker, also inside another program.
    Worker,
    /// The child process of an attempt, whose spans its worker makes from what it says.
    Attempt,
}

impl Service {
    fn name(self) -> &'static str {
        match self {
            Self::Client => "aitk",
            Self::Coordinator => "aitk-coordinator",
            Self::Worker => "aitk-worker",
            Self::Attempt => "aitk-attempt",
        }
    }
}

/// A piece of work that is over.
#[derive(Clone, Debug)]
pub struct Span {
    /// Its own place.
    context: TraceContext,
    parent: Option<SpanId>,
    parent_is_remote: bool,
    kind: SpanKind,
    name: Cow<'static, str>,
    start: SystemTime,
    end: SystemTime,
    attributes: Vec<KeyValue>,
    links: Vec<Link>,
    status: Status,
}

impl Span {
    /// A span of this name from `start` to `end`.
    #[must_use]
    pub fn new(
        name: impl Into<Cow<'static, str>>,
        context: TraceContext,
        (start, end): (SystemTime, SystemTime),
    ) -> Self {
        Self {
            context,
            parent: None,
            parent_is_remote: false,
            kind: SpanKind::Internal,
            name: name.into(),
            start,
            // A clock that was set back.
            end: end.max(start),
            attributes: Vec::new(),
            links: Vec::new(),
            status: Status::Unset,
        }
    }

    /// Part of another span of this program.
    #[must_use]
    pub fn within(mut self, parent: SpanId) -> Self {
        self.parent = Some(parent);
        self
    }

    /// Part of a span of another program, that waited for this one.
    #[must_use]
    pub fn serves(mut self, parent: Option<SpanId>) -> Self {
        (self.parent, self.parent_is_remote, self.kind) = (parent, parent.is_some(), SpanKind::Server);
        self
    }

    /// It waited for another program.
    #[must_use]
    pub fn calls(mut self) -> Self {
        self.kind = SpanKind::Client;
        self
    }

    /// It has to do with another trace.
    #[must_use]
    pub fn linked(mut self, other: TraceContext) -> Self {
        self.links.push(Link::with_context(span_context(other, true)));
        self
    }

    /// A fact about it.
    #[must_use]
    pub fn with(mut self, key: &'static str, value: impl Into<Value>) -> Self {
        self.attributes.push(KeyValue::new(key, value));
        self
    }

    /// It failed, and why.
    #[must_use]
    pub fn failed(mut self, why: impl Into<Cow<'static, str>>) -> Self {
        self.status = Status::error(why);
        self
    }
}

fn span_context(context: TraceContext, is_remote: bool) -> SpanContext {
    SpanContext::new(
        opentelemetry::trace::TraceId::from_bytes(context.trace.to_bytes()),
        opentelemetry::trace::SpanId::from_bytes(context.span.to_bytes()),
        TraceFlags::default().with_sampled(context.sampled),
        is_remote,
        TraceState::NONE,
    )
}

/// Where this program's spans go. Cheap to clone; by default nowhere.
#[derive(Clone, Default)]
pub struct Traces(Option<Arc<Shared>>);

struct Shared {
    /// Given here, and not by the environment.
    endpoint: Option<String>,
    outage: Arc<Outage>,
    sampler: Box<dyn ShouldSample>,
    /// One per service; none where it could not be set up.
    open: Mutex<BTreeMap<&'static str, Option<Arc<BatchSpanProcessor>>>>,
}

impl fmt::Debug for Traces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Traces").field(&self.is_on()).finish()
    }
}

impl PartialEq for Traces {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (None, None) => true,
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }
}

impl Eq for Traces {}

impl Traces {
    /// As the environment says: on when `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or `OTEL_EXPORTER_OTLP_ENDPOINT` is set, and
    /// neither `OTEL_SDK_DISABLED=true` nor `OTEL_TRACES_EXPORTER=none`. What else the variables say is
    /// OpenTelemetry's SDK's to read. Nothing is opened before the first [`Self::tracer`].
    #[must_use]
    pub fn from_environment() -> Self {
        let env = |name: &str| std::env::var(name).ok();
        let Some(endpoint) = asked_for(&env) else {
            return Self::default();
        };
        let protocol = env("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL").or_else(|| env("OTEL_EXPORTER_OTLP_PROTOCOL"));
        if let Some(other) = protocol.filter(|name| !matches!(name.as_str(), "" | "http/protobuf")) {
            tracing::warn!(
                "OTEL_EXPORTER_OTLP_PROTOCOL: {other:?} is not spoken here, http/protobuf is; collectors listen for it on port 4318"
            );
        }
        Self::open(None, &endpoint)
    }

    /// To the collector at this URL, `/v1/traces` included, whatever the environment says.
    #[must_use]
    pub fn to(endpoint: &str) -> Self {
        Self::open(Some(endpoint.to_owned()), endpoint)
    }

    fn open(endpoint: Option<String>, shown: &str) -> Self {
        Self(Some(Arc::new(Shared {
            endpoint,
            outage: Arc::new(Outage::new(shown)),
            sampler: Config::default().sampler,
            open: Mutex::default(),
        })))
    }

    /// Whether spans go anywhere.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Writes down the spans of a service. Off when there is nowhere to send them, or when that could not be set up,
    /// which is logged once.
    #[must_use]
    pub fn tracer(&self, service: Service) -> Tracer {
        let Some(shared) = &self.0 else {
            return Tracer::default();
        };
        let mut open = shared.open.lock().unwrap_or_else(PoisonError::into_inner);
        let processor = open
            .entry(service.name())
            .or_insert_with(|| exporter::processor(service.name(), shared.endpoint.as_deref(), &shared.outage));
        let processor = processor.clone();
        drop(open);
        Tracer(processor.map(|processor| {
            Arc::new(Inner {
                shared: shared.clone(),
                processor,
                scope: InstrumentationScope::builder("aitk")
                    .with_version(env!("CARGO_PKG_VERSION"))
                    .build(),
            })
        }))
    }

    /// What became of the spans of all services in this program.
    #[must_use]
    pub fn counts(&self) -> SpanCounts {
        self.0.as_ref().map(|shared| shared.outage.counts()).unwrap_or_default()
    }

    /// Sends what waits, for at most this long, and ends. Blocks; for the end of a program.
    pub fn finish(&self, patience: Duration) {
        let Some(shared) = &self.0 else { return };
        let open = std::mem::take(&mut *shared.open.lock().unwrap_or_else(PoisonError::into_inner));
        // At the same time: one collector that does not answer holds up all of them.
        std::thread::scope(|scope| {
            for processor in open.into_values().flatten() {
                scope.spawn(move || {
                    if processor.shutdown_with_timeout(patience).is_err() {
                        shared
                            .outage
                            .begins(&format!("no answer within {} s", patience.as_secs_f32()));
                    }
                });
            }
        });
    }
}

/// The endpoint that the environment names, if spans are wanted.
fn asked_for(env: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let given = |name: &str| {
        env(name)
            .map(|text| text.trim().to_owned())
            .filter(|text| !text.is_empty())
    };
    let off = given("OTEL_SDK_DISABLED").is_some_and(|text| text.eq_ignore_ascii_case("true"))
        || given("OTEL_TRACES_EXPORTER").is_some_and(|text| text.eq_ignore_ascii_case("none"));
    let endpoint = given("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT").or_else(|| given("OTEL_EXPORTER_OTLP_ENDPOINT"));
    endpoint.filter(|_| !off)
}

/// Writes down the spans of a service. Cheap to clone; by default off.
#[derive(Clone, Default)]
pub struct Tracer(Option<Arc<Inner>>);

struct Inner {
    shared: Arc<Shared>,
    processor: Arc<BatchSpanProcessor>,
    scope: InstrumentationScope,
}

impl fmt::Debug for Tracer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Tracer").field(&self.is_on()).finish()
    }
}

impl Tracer {
    /// Whether spans go anywhere. Ask before something is put together for one.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Whether the spans of a trace are kept (`OTEL_TRACES_SAMPLER`): asked where the trace comes into this program,
    /// with what it came from. The answer is always the same for the same trace.
    #[must_use]
    pub fn keeps(&self, trace: TraceId, parent: Option<TraceContext>) -> bool {
        let Some(inner) = &self.0 else { return false };
        let context = match parent {
            Some(parent) => Context::new().with_remote_span_context(span_context(parent, true)),
            None => Context::new(),
        };
        let trace = opentelemetry::trace::TraceId::from_bytes(trace.to_bytes());
        let sampled = inner
            .shared
            .sampler
            .should_sample(Some(&context), trace, "job", &SpanKind::Server, &[], &[]);
        sampled.decision == SamplingDecision::RecordAndSample
    }

    /// Writes a span down, if its trace is kept. Never waits: when the collector is behind, it is dropped.
    pub fn record(&self, span: Span) {
        let Some(inner) = self.0.as_ref().filter(|_| span.context.sampled) else {
            return;
        };
        inner.shared.outage.note_recorded();
        let mut links = SpanLinks::default();
        links.links = span.links;
        inner.processor.on_end(SpanData {
            span_context: span_context(span.context, false),
            parent_span_id: span.parent.map_or(opentelemetry::trace::SpanId::INVALID, |parent| {
                opentelemetry::trace::SpanId::from_bytes(parent.to_bytes())
            }),
            parent_span_is_remote: span.parent_is_remote,
            span_kind: span.kind,
            name: span.name,
            start_time: span.start,
            end_time: span.end,
            attributes: span.attributes,
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links,
            status: span.status,
            instrumentation_scope: inner.scope.clone(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_decides() {
        let asked = |set: &[(&str, &str)]| {
            asked_for(&|name| {
                set.iter()
                    .find(|(key, _)| *key == name)
                    .map(|(_, value)| (*value).to_owned())
            })
        };
        let (one, other) = (
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://one"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://other"),
        );
        assert_eq!(asked(&[]), None);
        assert_eq!(asked(&[one]).as_deref(), Some("http://one"));
        assert_eq!(asked(&[one, other]).as_deref(), Some("http://other"));
        assert_eq!(asked(&[("OTEL_EXPORTER_OTLP_ENDPOINT", " ")]), None);
        assert_eq!(asked(&[one, ("OTEL_SDK_DISABLED", "true")]), None);
        assert_eq!(asked(&[other, ("OTEL_TRACES_EXPORTER", "none")]), None);
        assert!(asked(&[one, ("OTEL_SDK_DISABLED", "false"), ("OTEL_TRACES_EXPORTER", "otlp")]).is_some());
    }

    #[test]
    fn without_a_collector_there_is_nothing() {
        let traces = Traces::default();
        let tracer = traces.tracer(Service::Worker);
        let trace = TraceId::random();
        assert!(!traces.is_on() && !tracer.is_on() && !tracer.keeps(trace, None));
        traces.finish(Duration::from_secs(1));
    }

    #[test]
    fn who_sent_the_trace_decides_whether_it_is_kept() {
        // Nobody answers at port 9; nothing is sent either.
        let traces = Traces::to("http://127.0.0.1:9/v1/traces");
        let tracer = traces.tracer(Service::Client);
        let context = |sampled| TraceContext {
            trace: TraceId::random(),
            span: SpanId::random(),
            sampled,
        };
        assert!(tracer.keeps(TraceId::random(), None));
        assert!(tracer.keeps(TraceId::random(), Some(context(true))));
        assert!(!tracer.keeps(TraceId::random(), Some(context(false))));
        let now = SystemTime::now();
        tracer.record(Span::new("not kept", context(false), (now, now)));
    }

    #[test]
    fn an_address_that_is_none_switches_them_off() {
        assert!(!Traces::to("no address").tracer(Service::Client).is_on());
    }
}
