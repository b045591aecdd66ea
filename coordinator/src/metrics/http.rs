//! `/metrics`, `/healthz` and `/readyz`, on a port of their own.

use super::{Metrics, look};
use crate::connection_limiter::{Connection, ConnectionLimiter};
use crate::runner::Core;
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

/// A core that takes longer to answer is not ready.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a connection lasts: as long as the slowest answer, and some more.
const CONNECTION: Duration = Duration::from_secs(20);
/// Connections at once.
const CONNECTIONS: usize = 64;
/// The content type of the format.
pub(crate) const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Nobody shows a token here, so no connection lasts: whoever looks again opens another one.
struct Doored {
    listener: TcpListener,
    limiter: ConnectionLimiter,
}

impl Listener for Doored {
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
    let listener = Doored {
        listener,
        limiter: ConnectionLimiter::new(CONNECTION, CONNECTIONS),
    };
    if let Err(error) = axum::serve(listener, router).with_graceful_shutdown(stopped).await {
        tracing::error!(%error, "metrics are not served any more");
    }
}

async fn show(State(served): State<Served>) -> Response {
    match tokio::time::timeout(PATIENCE, served.core.query(|state, _| look(state))).await {
        Ok(Ok(now)) => ([(header::CONTENT_TYPE, OPENMETRICS)], served.metrics.text(now)).into_response(),
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
