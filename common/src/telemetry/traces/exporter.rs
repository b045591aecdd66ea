//! The connection to the collector, and log messages about its outages.

use opentelemetry::Key;
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{self, BatchSpanProcessor, SpanData, SpanProcessor};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Starts a batch processor: a queue and a thread that exports it. None if that fails, which is logged.
pub(super) fn processor(
    service: &'static str,
    endpoint: Option<&str>,
    outage: &Arc<Outage>,
) -> Option<Arc<BatchSpanProcessor>> {
    match exporter(endpoint) {
        Ok(exporter) => {
            let exporter = MonitoredExporter {
                exporter,
                outage: outage.clone(),
            };
            let mut processor = BatchSpanProcessor::builder(exporter).build();
            processor.set_resource(&resource(service));
            Some(Arc::new(processor))
        }
        Err(error) => {
            outage.start(&error.to_string());
            None
        }
    }
}

fn exporter(endpoint: Option<&str>) -> Result<SpanExporter, ExporterBuildError> {
    // TLS uses ring, as in all of aitk. Fails if a provider is installed already, which is fine.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let builder = SpanExporter::builder().with_http();
    match endpoint {
        Some(endpoint) => builder.with_endpoint(endpoint),
        None => builder,
    }
    .build()
}

/// The resource of the spans. `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` take precedence over `service`.
fn resource(service: &'static str) -> Resource {
    let from_env = Resource::builder().build();
    let name = from_env.get(&Key::from_static_str("service.name"));
    if name.is_some_and(|name| !name.as_str().starts_with("unknown_service")) {
        return from_env;
    }
    Resource::builder().with_service_name(service).build()
}

/// Numbers of spans so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpanCounts {
    /// Recorded spans.
    pub recorded: u64,
    /// Spans that the collector accepted.
    pub sent: u64,
    /// Spans whose export failed. Recorded spans that are neither sent nor lost are queued, or were dropped because the queue
    /// was full.
    pub lost: u64,
}

/// Tracks whether exports succeed. Logs one message when they begin to fail and one when they succeed again.
#[derive(Debug)]
pub(super) struct Outage {
    endpoint: String,
    /// User name and password in the endpoint URL, if any.
    secret: Option<String>,
    is_active: AtomicBool,
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
            is_active: AtomicBool::new(false),
            recorded: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            lost: AtomicU64::new(0),
        }
    }

    pub(super) fn note_recorded(&self) {
        self.recorded.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn counts(&self) -> SpanCounts {
        // `recorded` is read last, so that it is never smaller than `sent`.
        let (sent, lost) = (self.sent.load(Ordering::Relaxed), self.lost.load(Ordering::Relaxed));
        SpanCounts {
            recorded: self.recorded.load(Ordering::Relaxed),
            sent,
            lost,
        }
    }

    /// Notes a failed export. The first one of an outage is logged.
    pub(super) fn start(&self, why: &str) {
        if !self.is_active.swap(true, Ordering::Relaxed) {
            let message = format!(
                "traces do not reach {}: {why}; they are dropped, jobs continue",
                self.endpoint
            );
            tracing::warn!("{}", self.without_secret(message));
        }
    }

    /// Notes a successful export. The first one after an outage is logged.
    fn end(&self) {
        if self.is_active.swap(false, Ordering::Relaxed) {
            let message = format!("traces reach {} again", self.endpoint);
            tracing::info!("{}", self.without_secret(message));
        }
    }

    fn without_secret(&self, text: String) -> String {
        match &self.secret {
            Some(secret) if !secret.is_empty() => text.replace(secret, "…"),
            _ => text,
        }
    }
}

/// A [`SpanExporter`] that reports its results to an [`Outage`].
#[derive(Debug)]
struct MonitoredExporter {
    exporter: SpanExporter,
    outage: Arc<Outage>,
}

impl trace::SpanExporter for MonitoredExporter {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len() as u64;
        let sent = trace::SpanExporter::export(&self.exporter, batch).await;
        match &sent {
            Ok(()) => {
                self.outage.sent.fetch_add(spans, Ordering::Relaxed);
                self.outage.end();
            }
            Err(error) => {
                self.outage.lost.fetch_add(spans, Ordering::Relaxed);
                self.outage.start(&error.to_string());
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
    fn a_password_in_the_endpoint_is_not_logged() {
        let outage = Outage::new("https://anna:s3cret@tempo.lab/v1/traces");
        let text = outage.without_secret("https://anna:s3cret@tempo.lab refused".to_owned());
        assert_eq!(text, "https://…@tempo.lab refused");
        let plain = Outage::new("http://tempo.lab:4318/a@b");
        assert_eq!(plain.without_secret("as it is".to_owned()), "as it is");
    }
}
