//! Forwards calls to the leading coordinator unchanged, with the client's address.

use crate::api::peer_address;
use crate::connection_limiter::ConnectionLimiter;
use aitk_proto::{FORWARDED_HEADER, LEADER_HEADER, PROOF_HEADER};
use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::sync::watch;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::transport::Channel;

/// The leader as a standby coordinator knows it.
pub(super) struct Upstream {
    pub(super) epoch: u64,
    pub(super) address: String,
    /// Proves to the leader that the forwarded client address is genuine.
    pub(super) forwarding_secret: String,
    pub(super) channel: Channel,
}

/// The service of a standby coordinator.
#[derive(Clone)]
pub(super) struct Forward {
    leader: watch::Receiver<Option<Arc<Upstream>>>,
    limiter: ConnectionLimiter,
}

impl Forward {
    pub(super) fn new(leader: watch::Receiver<Option<Arc<Upstream>>>, limiter: ConnectionLimiter) -> Self {
        Self { leader, limiter }
    }

    /// Returns the leader and the call to forward, or the status to answer directly.
    fn prepare(&self, mut request: http::Request<Body>) -> Result<(Arc<Upstream>, http::Request<Body>), Status> {
        let leader = self.leader.borrow().clone();
        let Some(leader) = leader else {
            return Err(unavailable_with_leader(
                "no coordinator leads at the moment; another one takes over within seconds, try again",
                "none",
            ));
        };
        // Worker calls are not forwarded: their certificates end at this connection. The worker knows all addresses
        // and connects to the leader.
        let is_worker =
            request.uri().path().starts_with("/aitk.v1.Workers/") || !request.headers().contains_key("authorization");
        if is_worker {
            let text = format!("this coordinator stands by; {} leads", leader.address);
            return Err(unavailable_with_leader(&text, &leader.address));
        }
        // The other coordinator considers us the leader, which we are not. One of us learns the leader within a
        // second.
        if request.headers().contains_key(FORWARDED_HEADER) {
            return Err(unavailable_with_leader(
                "this coordinator does not lead any more; try again",
                &leader.address,
            ));
        }
        let from = peer_address(&request).map(|from| from.to_string()).unwrap_or_default();
        let headers = request.headers_mut();
        let (Ok(from), Ok(forwarding_secret)) = (from.parse(), leader.forwarding_secret.parse::<http::HeaderValue>())
        else {
            return Err(Status::internal("cannot forward the call to the leader"));
        };
        headers.insert(FORWARDED_HEADER, from);
        let mut forwarding_secret = forwarding_secret;
        forwarding_secret.set_sensitive(true);
        headers.insert(PROOF_HEADER, forwarding_secret);
        Ok((leader, request))
    }
}

/// Status that tells the client to try another coordinator.
fn unavailable_with_leader(text: &str, leader: &str) -> Status {
    let mut status = Status::unavailable(text);
    if let Ok(leader) = leader.parse() {
        status.metadata_mut().insert(LEADER_HEADER, leader);
    }
    status
}

impl Service<http::Request<axum::body::Body>> for Forward {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<axum::body::Body>) -> Self::Future {
        let (from, limiter) = (peer_address(&request), self.limiter.clone());
        let prepared = self.prepare(request.map(Body::new));
        Box::pin(async move {
            let (leader, request) = match prepared {
                Ok(prepared) => prepared,
                Err(status) => return Ok(status.into_http()),
            };
            let mut channel = leader.channel.clone();
            let answer = async {
                std::future::poll_fn(|context| channel.poll_ready(context)).await?;
                channel.call(request).await
            }
            .await;
            // Only the leader knows whether the token is valid; a refusal has `grpc-status` in its headers.
            if let (Ok(answer), Some(from)) = (&answer, from)
                && !answer.headers().contains_key("grpc-status")
            {
                limiter.mark_authenticated(from);
            }
            Ok(answer.unwrap_or_else(|error: tonic::transport::Error| {
                tracing::debug!(error = %aitk_common::error_chain::error_chain(&error), leader = leader.address, "cannot forward a call to the leader");
                let text = format!(
                    "the leading coordinator {} does not answer; another one takes over within seconds, try again",
                    leader.address
                );
                unavailable_with_leader(&text, "none").into_http()
            }))
        })
    }
}
