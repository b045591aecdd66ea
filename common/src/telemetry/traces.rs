//! Exports spans to a collector by OTLP over HTTP, configured by OpenTelemetry's environment variables.
//!
//! The spans of a job outlive single programs: a job may be submitted by one command, run for days, and end under a
//! different coordinator than the one that accepted it. So spans are not held open. A span is recorded when it ends, with
//! ids that are known in advance ([`super::context`]).
//!
//! Without these variables a [`Tracer`] is disabled and costs nothing; callers check [`Tracer::is_on`] before they build a
//! span. A collector that is down or slow never delays jobs: a thread exports the spans from a bounded queue, and spans that
//! do not fit are dropped.

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

/// The service that a span belongs to, unless `OTEL_SERVICE_NAME` is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// The command line.
    Client,
    /// The coordinator, standalone or embedded.
    Coordinator,
    /// The worker, standalone or embedded.
    Worker,
    /// The child process of an attempt. Its worker creates the spans from the child's events.
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

/// A span of finished work.
#[derive(Clone, Debug)]
pub struct Span {
    /// The span's own trace context.
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
    /// Creates a span from `start` to `end`.
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
            // `end` is earlier if the clock was set back.
            end: end.max(start),
            attributes: Vec::new(),
            links: Vec::new(),
            status: Status::Unset,
        }
    }

    /// Makes it a child of another span of this program.
    #[must_use]
    pub fn within(mut self, parent: SpanId) -> Self {
        self.parent = Some(parent);
        self
    }

    /// Makes it a server span, with a parent in the program that made the call.
    #[must_use]
    pub fn serves(mut self, parent: Option<SpanId>) -> Self {
        (self.parent, self.parent_is_remote, self.kind) = (parent, parent.is_some(), SpanKind::Server);
        self
    }

    /// Makes it a client span: it waited for another program.
    #[must_use]
    pub fn calls(mut self) -> Self {
        self.kind = SpanKind::Client;
        self
    }

    /// Adds a link to a span of another trace.
    #[must_use]
    pub fn linked(mut self, other: TraceContext) -> Self {
        self.links.push(Link::with_context(span_context(other, true)));
        self
    }

    /// Adds an attribute.
    #[must_use]
    pub fn with(mut self, key: &'static str, value: impl Into<Value>) -> Self {
        self.attributes.push(KeyValue::new(key, value));
        self
    }

    /// Sets the status to an error with this message.
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

/// The span exporters of this program. Cheap to clone; disabled by default.
#[derive(Clone, Default)]
pub struct Traces(Option<Arc<Shared>>);

struct Shared {
    /// The endpoint, unless it comes from the environment.
    endpoint: Option<String>,
    outage: Arc<Outage>,
    sampler: Box<dyn ShouldSample>,
    /// The batch processor of each service; none if it could not be set up.
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
    /// Configures export from the environment: enabled if `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or `OTEL_EXPORTER_OTLP_ENDPOINT`
    /// is set, unless `OTEL_SDK_DISABLED=true` or `OTEL_TRACES_EXPORTER=none`. OpenTelemetry's SDK reads the other variables.
    /// No connection is made before the first [`Self::tracer`].
    #[must_use]
    pub fn from_environment() -> Self {
        let env = |name: &str| std::env::var(name).ok();
        let Some(endpoint) = endpoint_from(&env) else {
            return Self::default();
        };
        let protocol = env("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL").or_else(|| env("OTEL_EXPORTER_OTLP_PROTOCOL"));
        if let Some(other) = protocol.filter(|name| !matches!(name.as_str(), "" | "http/protobuf")) {
            tracing::warn!(
                "OTEL_EXPORTER_OTLP_PROTOCOL: {other:?} is not supported, so http/protobuf is used; collectors listen for it on port 4318"
            );
        }
        Self::open(None, &endpoint)
    }

    /// Exports to the collector at this URL, which includes `/v1/traces`. Ignores the environment.
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

    /// Whether spans are exported.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Returns a tracer for a service. It is disabled if no collector is configured, or if the exporter could not be set up,
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

    /// The numbers of recorded, sent and lost spans of all services in this program.
    #[must_use]
    pub fn counts(&self) -> SpanCounts {
        self.0.as_ref().map(|shared| shared.outage.counts()).unwrap_or_default()
    }

    /// Exports the queued spans, for at most `timeout`, and shuts down. Blocks; call it when the program ends.
    pub fn finish(&self, timeout: Duration) {
        let Some(shared) = &self.0 else { return };
        let open = std::mem::take(&mut *shared.open.lock().unwrap_or_else(PoisonError::into_inner));
        // In parallel, so that a collector that does not answer costs the timeout only once.
        std::thread::scope(|scope| {
            for processor in open.into_values().flatten() {
                scope.spawn(move || {
                    if processor.shutdown_with_timeout(timeout).is_err() {
                        shared
                            .outage
                            .start(&format!("no answer within {} s", timeout.as_secs_f32()));
                    }
                });
            }
        });
    }
}

/// The endpoint in the environment, unless traces are disabled there.
fn endpoint_from(env: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let value = |name: &str| {
        env(name)
            .map(|text| text.trim().to_owned())
            .filter(|text| !text.is_empty())
    };
    let disabled = value("OTEL_SDK_DISABLED").is_some_and(|text| text.eq_ignore_ascii_case("true"))
        || value("OTEL_TRACES_EXPORTER").is_some_and(|text| text.eq_ignore_ascii_case("none"));
    let endpoint = value("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT").or_else(|| value("OTEL_EXPORTER_OTLP_ENDPOINT"));
    endpoint.filter(|_| !disabled)
}

/// Records the spans of a service. Cheap to clone; disabled by default.
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
    /// Whether spans are exported. Check it before building a span.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Whether a trace is sampled (`OTEL_TRACES_SAMPLER`). `parent` is the context that the program received with it. The
    /// result is always the same for the same trace.
    #[must_use]
    pub fn is_sampled(&self, trace: TraceId, parent: Option<TraceContext>) -> bool {
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

    /// Records a span if its trace is sampled. Never blocks: the span is dropped if the queue is full.
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
    fn the_environment_sets_the_endpoint() {
        let endpoint = |set: &[(&str, &str)]| {
            endpoint_from(&|name| {
                set.iter()
                    .find(|(key, _)| *key == name)
                    .map(|(_, value)| (*value).to_owned())
            })
        };
        let (one, other) = (
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://one"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://other"),
        );
        assert_eq!(endpoint(&[]), None);
        assert_eq!(endpoint(&[one]).as_deref(), Some("http://one"));
        assert_eq!(endpoint(&[one, other]).as_deref(), Some("http://other"));
        assert_eq!(endpoint(&[("OTEL_EXPORTER_OTLP_ENDPOINT", " ")]), None);
        assert_eq!(endpoint(&[one, ("OTEL_SDK_DISABLED", "true")]), None);
        assert_eq!(endpoint(&[other, ("OTEL_TRACES_EXPORTER", "none")]), None);
        assert!(endpoint(&[one, ("OTEL_SDK_DISABLED", "false"), ("OTEL_TRACES_EXPORTER", "otlp")]).is_some());
    }

    #[test]
    fn without_a_collector_tracers_are_disabled() {
        let traces = Traces::default();
        let tracer = traces.tracer(Service::Worker);
        let trace = TraceId::random();
        assert!(!traces.is_on() && !tracer.is_on() && !tracer.is_sampled(trace, None));
        traces.finish(Duration::from_secs(1));
    }

    #[test]
    fn a_received_trace_context_decides_whether_the_trace_is_sampled() {
        // Nothing listens on port 9, and nothing is sent.
        let traces = Traces::to("http://127.0.0.1:9/v1/traces");
        let tracer = traces.tracer(Service::Client);
        let context = |sampled| TraceContext {
            trace: TraceId::random(),
            span: SpanId::random(),
            sampled,
        };
        assert!(tracer.is_sampled(TraceId::random(), None));
        assert!(tracer.is_sampled(TraceId::random(), Some(context(true))));
        assert!(!tracer.is_sampled(TraceId::random(), Some(context(false))));
        let now = SystemTime::now();
        tracer.record(Span::new("not sampled", context(false), (now, now)));
    }

    #[test]
    fn an_invalid_endpoint_disables_traces() {
        assert!(!Traces::to("no address").tracer(Service::Client).is_on());
    }
}
