//! The way to the collector, and what is said when it is broken.

use opentelemetry::Key;
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{self, BatchSpanProcessor, SpanData, SpanProcessor};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// A queue with a thread that empties it. None when it could not be set up; then that is logged.
pub(super) fn processor(
    service: &'static str,
    endpoint: Option<&str>,
    outage: &Arc<Outage>,
) -> Option<Arc<BatchSpanProcessor>> {
    match exporter(endpoint) {
        Ok(exporter) => {
            let watched = Watched {
                exporter,
                outage: outage.clone(),
            };
            let mut processor = BatchSpanProcessor::builder(watched).build();
            processor.set_resource(&resource(service));
            Some(Arc::new(processor))
        }
        Err(error) => {
            outage.begins(&error.to_string());
            None
        }
    }
}

fn exporter(endpoint: Option<&str>) -> Result<SpanExporter, ExporterBuildError> {
    // As everywhere here: TLS by ring. Somebody else may have said so before.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let builder = SpanExporter::builder().with_http();
    match endpoint {
        Some(endpoint) => builder.with_endpoint(endpoint),
        None => builder,
    }
    .build()
}

/// Who the spans are from. `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` go before the name we would give.
fn resource(service: &'static str) -> Resource {
    let given = Resource::builder().build();
    let named = given.get(&Key::from_static_str("service.name"));
    if named.is_some_and(|name| !name.as_str().starts_with("unknown_service")) {
        return given;
    }
    Resource::builder().with_service_name(service).build()
}

/// What became of spans so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpanCounts {
    /// Written down.
    pub recorded: u64,
    /// The collector has them.
    pub sent: u64,
    /// Sent, and not taken by the collector. What is in none of the two waits, or found no room in the queue.
    pub lost: u64,
}

/// Whether spans arrive: said once when they do not, and once when they do again.
#[derive(Debug)]
pub(super) struct Outage {
    endpoint: String,
    /// Name and password that stand in the address, if they do.
    secret: Option<String>,
    lasts: AtomicBool,
    /// Spans that were written down, that arrived, and that were sent and did not arrive.
    recorded: AtomicU64,
    sent: AtomicU64,
    lost: AtomicU64,
}

impl Outage {
    pub(super) fn new(endpoint: &str) -> Self {
        let authority = endpoint.split_once("://").map_or(endpoint, |(_, rest)| rest);
        let authority = authority.split('/').next().unwrap_or_default();
        let secret = authority.rsplit_once('@').map(|(secret, _)| secret.to_owned());
        Self {
            endpoint: endpoint.to_owned(),
            secret,
            lasts: AtomicBool::new(false),
            recorded: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            lost: AtomicU64::new(0),
        }
    }

    pub(super) fn note_recorded(&self) {
        self.recorded.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn counts(&self) -> SpanCounts {
        // The order matters: what is sent was recorded before.
        let (sent, lost) = (self.sent.load(Ordering::Relaxed), self.lost.load(Ordering::Relaxed));
        SpanCounts {
            recorded: self.recorded.load(Ordering::Relaxed),
            sent,
            lost,
        }
    }

    /// They do not arrive, and why.
    pub(super) fn begins(&self, why: &str) {
        if !self.lasts.swap(true, Ordering::Relaxed) {
            let said = format!(
                "traces do not reach {}: {why}; they are dropped, jobs go on",
                self.endpoint
            );
            tracing::warn!("{}", self.without_secret(said));
        }
    }

    fn ends(&self) {
        if self.lasts.swap(false, Ordering::Relaxed) {
            let said = format!("traces reach {} again", self.endpoint);
            tracing::info!("{}", self.without_secret(said));
        }
    }

    fn without_secret(&self, text: String) -> String {
        match &self.secret {
            Some(secret) if !secret.is_empty() => text.replace(secret, "…"),
            _ => text,
        }
    }
}

/// An exporter whose failures are told once.
#[derive(Debug)]
struct Watched {
    exporter: SpanExporter,
    outage: Arc<Outage>,
}

impl trace::SpanExporter for Watched {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len() as u64;
        let sent = trace::SpanExporter::export(&self.exporter, batch).await;
        match &sent {
            Ok(()) => {
                self.outage.sent.fetch_add(spans, Ordering::Relaxed);
                self.outage.ends();
            }
            Err(error) => {
                self.outage.lost.fetch_add(spans, Ordering::Relaxed);
                self.outage.begins(&error.to_string());
            }
        }
        sent
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_in_the_address_is_not_said() {
        let outage = Outage::new("https://anna:s3cret@tempo.lab/v1/traces");
        let text = outage.without_secret("https://anna:s3cret@tempo.lab refused".to_owned());
        assert_eq!(text, "https://…@tempo.lab refused");
        let plain = Outage::new("http://tempo.lab:4318/a@b");
        assert_eq!(plain.without_secret("as it is".to_owned()), "as it is");
    }
}
