//! `/metrics`, `/healthz` and `/readyz`, on a port of their own.

use super::Metrics;
use crate::runner::Core;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;

/// A core that takes longer to answer is not ready.
const PATIENCE: Duration = Duration::from_secs(5);
/// The content type of the format.
pub(crate) const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Clone)]
struct Served {
    metrics: Metrics,
    core: Core,
}

/// Answers until the coordinator shuts down.
pub(crate) async fn serve(listener: TcpListener, metrics: Metrics, core: Core, mut stopping: watch::Receiver<bool>) {
    let router = Router::new()
        .route("/metrics", get(show))
        .route("/healthz", get(alive))
        .route("/readyz", get(ready))
        .with_state(Served { metrics, core });
    let stopped = async move {
        let _ = stopping.wait_for(|stop| *stop).await;
    };
    if let Err(error) = axum::serve(listener, router).with_graceful_shutdown(stopped).await {
        tracing::error!(%error, "metrics are not served any more");
    }
}

async fn show(State(served): State<Served>) -> Response {
    match tokio::time::timeout(PATIENCE, served.metrics.text(&served.core)).await {
        Ok(Ok(text)) => ([(header::CONTENT_TYPE, OPENMETRICS)], text).into_response(),
        _ => not_ready(),
    }
}

/// The process answers.
async fn alive() -> &'static str {
    "ok\n"
}

/// The queue answers, which it does between two transactions of the store.
async fn ready(State(served): State<Served>) -> Response {
    match tokio::time::timeout(PATIENCE, served.core.query(|_, _| ())).await {
        Ok(Ok(())) => "ready\n".into_response(),
        _ => not_ready(),
    }
}

fn not_ready() -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, "the queue does not answer\n").into_response()
}
