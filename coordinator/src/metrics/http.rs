//! `/metrics`, `/healthz` and `/readyz`, on a port of their own.

use super::{Metrics, gauge_values};
use crate::connection_limiter::{Connection, ConnectionLimiter};
use crate::scheduler_task::SchedulerHandle;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::serve::Listener;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;

/// The coordinator is not ready when the scheduler takes longer to answer.
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum lifetime of a connection: more than the slowest answer.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum concurrent connections.
const MAX_CONNECTIONS: usize = 64;
/// Content type of the OpenMetrics text format.
pub(crate) const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A listener without authentication: every connection is closed after [`CONNECTION_TIMEOUT`].
struct LimitedListener {
    listener: TcpListener,
    limiter: ConnectionLimiter,
}

impl Listener for LimitedListener {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        self.limiter.accept(&self.listener).await
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

#[derive(Clone)]
struct MetricsState {
    metrics: Metrics,
    scheduler: SchedulerHandle,
}

/// Serves until the coordinator shuts down.
pub(crate) async fn serve(
    listener: TcpListener,
    metrics: Metrics,
    scheduler: SchedulerHandle,
    mut stopping: watch::Receiver<bool>,
) {
    let router = Router::new()
        .route("/metrics", get(metrics_text))
        .route("/healthz", get(alive))
        .route("/readyz", get(ready))
        .with_state(MetricsState { metrics, scheduler });
    let stopped = async move {
        let _ = stopping.wait_for(|stop| *stop).await;
    };
    let listener = LimitedListener {
        listener,
        limiter: ConnectionLimiter::new(CONNECTION_TIMEOUT, MAX_CONNECTIONS),
    };
    if let Err(error) = axum::serve(listener, router).with_graceful_shutdown(stopped).await {
        tracing::error!(%error, "metrics are not served any more");
    }
}

async fn metrics_text(State(served): State<MetricsState>) -> Response {
    match tokio::time::timeout(QUERY_TIMEOUT, served.scheduler.query(|state, _| gauge_values(state))).await {
        Ok(Ok(now)) => ([(header::CONTENT_TYPE, OPENMETRICS)], served.metrics.text(now)).into_response(),
        _ => not_ready(),
    }
}

/// Liveness: the process answers.
async fn alive() -> &'static str {
    "ok\n"
}

/// Readiness: the scheduler answers, which it does between two transactions of the store.
async fn ready(State(served): State<MetricsState>) -> Response {
    match tokio::time::timeout(QUERY_TIMEOUT, served.scheduler.query(|_, _| ())).await {
        Ok(Ok(())) => "ready\n".into_response(),
        _ => not_ready(),
    }
}

fn not_ready() -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, "the queue does not answer\n").into_response()
}
