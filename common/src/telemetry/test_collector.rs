//! A collector for tests: takes spans by OTLP over HTTP on a socket of its own, and keeps them.

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

/// A span as it arrived. Ids are hexadecimal.
#[derive(Clone, Debug)]
pub struct Seen {
    /// `service.name` of whoever sent it.
    pub service: String,
    /// Its name.
    pub name: String,
    /// Its trace.
    pub trace: String,
    /// Itself.
    pub span: String,
    /// What it is part of; empty: nothing.
    pub parent: String,
    /// When it began, in nanoseconds since 1970.
    pub start: u64,
    /// When it ended.
    pub end: u64,
    /// What is said of it, as text.
    pub attributes: BTreeMap<String, String>,
    /// Traces that it has to do with.
    pub links: Vec<String>,
    /// Why it failed, if it did.
    pub error: Option<String>,
}

/// The collector. Listens until the runtime ends.
#[derive(Clone, Debug)]
pub struct TestCollector {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl TestCollector {
    /// Starts one on any free port of this machine.
    ///
    /// # Errors
    /// When there is none.
    pub async fn start() -> io::Result<Self> {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let collector = Self {
            address: listener.local_addr()?,
            seen: Arc::default(),
        };
        let keeper = collector.clone();
        let take = move |body: Bytes| async move {
            match ExportTraceServiceRequest::decode(body) {
                Ok(request) => {
                    keeper.keep(request);
                    StatusCode::OK
                }
                Err(_) => StatusCode::BAD_REQUEST,
            }
        };
        let router = Router::new().route("/v1/traces", post(take));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Ok(collector)
    }

    /// For `OTEL_EXPORTER_OTLP_ENDPOINT`.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// For `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`.
    #[must_use]
    pub fn traces_endpoint(&self) -> String {
        format!("http://{}/v1/traces", self.address)
    }

    /// What has arrived so far.
    #[must_use]
    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn keep(&self, request: ExportTraceServiceRequest) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        for of_service in request.resource_spans {
            let resource = of_service.resource.map(|resource| attributes(resource.attributes));
            let service = resource.and_then(|mut resource| resource.remove("service.name"));
            let service = service.unwrap_or_default();
            let spans = of_service.scope_spans.into_iter().flat_map(|scope| scope.spans);
            seen.extend(spans.map(|span| one(&service, span)));
        }
    }
}

fn one(service: &str, span: Span) -> Seen {
    let status = span.status.filter(|status| status.code() == Status::Error);
    Seen {
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
