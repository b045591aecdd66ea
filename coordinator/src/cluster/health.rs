//! `/healthz`, `/readyz` and `/metrics` of a standby coordinator.

use super::forward::Upstream;
use crate::metrics::OPENMETRICS;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::watch;

type LeaderReceiver = watch::Receiver<Option<Arc<Upstream>>>;

/// Serves until `ended` turns true.
pub(super) async fn serve(listener: TcpListener, leader: LeaderReceiver, mut ended: watch::Receiver<bool>) {
    let router = Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .with_state(leader);
    let shutdown = async move {
        let _ = ended.wait_for(|ended| *ended).await;
    };
    if let Err(error) = axum::serve(listener, router).with_graceful_shutdown(shutdown).await {
        tracing::error!(%error, "metrics are not served any more");
    }
}

/// Ready when calls can be forwarded.
async fn ready(State(leader): State<LeaderReceiver>) -> Response {
    match &*leader.borrow() {
        Some(upstream) => format!("standing by; {} leads\n", upstream.address).into_response(),
        None => (StatusCode::SERVICE_UNAVAILABLE, "standing by; no coordinator leads\n").into_response(),
    }
}

async fn metrics() -> Response {
    let text =
        "# HELP aitk_leading Whether this coordinator leads.\n# TYPE aitk_leading gauge\naitk_leading 0\n# EOF\n";
    ([(header::CONTENT_TYPE, OPENMETRICS)], text).into_response()
}
