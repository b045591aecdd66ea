//! A trace collector for tests: receives spans by OTLP over HTTP and stores them.

use axum::Router;
use axum::body::Bytes;
use axum::http::StatusCode;
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value};
use opentelemetry_proto::tonic::trace::v1::{Span, status::StatusCode as Status};
use prost::Message;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

/// A received span. Ids are hexadecimal.
#[derive(Clone, Debug)]
pub struct ReceivedSpan {
    /// `service.name` of the sender.
    pub service: String,
    /// The span's name.
    pub name: String,
    /// The trace id.
    pub trace: String,
    /// The span id.
    pub span: String,
    /// The parent's span id; empty for a root span.
    pub parent: String,
    /// The start time in nanoseconds since 1970.
    pub start: u64,
    /// The end time in nanoseconds since 1970.
    pub end: u64,
    /// The attributes as text.
    pub attributes: BTreeMap<String, String>,
    /// The trace ids of its links.
    pub links: Vec<String>,
    /// The error message, if its status is an error.
    pub error: Option<String>,
}

/// The collector. It listens until the runtime ends.
#[derive(Clone, Debug)]
pub struct TraceCollector {
    address: SocketAddr,
    received: Arc<Mutex<Vec<ReceivedSpan>>>,
}

impl TraceCollector {
    /// Starts a collector on a free local port.
    ///
    /// # Errors
    /// When no port can be bound.
    pub async fn start() -> io::Result<Self> {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let collector = Self {
            address: listener.local_addr()?,
            received: Arc::default(),
        };
        let shared = collector.clone();
        let receive = move |body: Bytes| async move {
            match ExportTraceServiceRequest::decode(body) {
                Ok(request) => {
                    shared.store(request);
                    StatusCode::OK
                }
                Err(_) => StatusCode::BAD_REQUEST,
            }
        };
        let router = Router::new().route("/v1/traces", post(receive));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Ok(collector)
    }

    /// The value for `OTEL_EXPORTER_OTLP_ENDPOINT`.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The value for `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`.
    #[must_use]
    pub fn traces_endpoint(&self) -> String {
        format!("http://{}/v1/traces", self.address)
    }

    /// The spans received so far.
    #[must_use]
    pub fn received(&self) -> Vec<ReceivedSpan> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn store(&self, request: ExportTraceServiceRequest) {
        let mut received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        for of_service in request.resource_spans {
            let resource = of_service.resource.map(|resource| attributes(resource.attributes));
            let service = resource.and_then(|mut resource| resource.remove("service.name"));
            let service = service.unwrap_or_default();
            let spans = of_service.scope_spans.into_iter().flat_map(|scope| scope.spans);
            received.extend(spans.map(|span| decode(&service, span)));
        }
    }
}

fn decode(service: &str, span: Span) -> ReceivedSpan {
    let status = span.status.filter(|status| status.code() == Status::Error);
    ReceivedSpan {
        service: service.to_owned(),
        name: span.name,
        trace: hex::encode(span.trace_id),
        span: hex::encode(span.span_id),
        parent: hex::encode(span.parent_span_id),
        start: span.start_time_unix_nano,
        end: span.end_time_unix_nano,
        attributes: attributes(span.attributes),
        links: span.links.into_iter().map(|link| hex::encode(link.trace_id)).collect(),
        error: status.map(|status| status.message),
    }
}

fn attributes(list: Vec<KeyValue>) -> BTreeMap<String, String> {
    let text = |pair: KeyValue| {
        let value = match pair.value?.value? {
            any_value::Value::StringValue(text) => text,
            any_value::Value::IntValue(number) => number.to_string(),
            other => format!("{other:?}"),
        };
        Some((pair.key, value))
    };
    list.into_iter().filter_map(text).collect()
}
