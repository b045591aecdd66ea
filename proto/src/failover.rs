//! A channel to one of several coordinators, with failover.

use crate::LEADER_HEADER;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::transport::{Channel, Error};

/// A channel that uses one coordinator until a call to it fails or it responds that it is not the leader, and then the next one.
/// That call fails: only its caller knows whether it is safe to repeat.
#[derive(Clone, Debug)]
pub struct FailoverChannel {
    channels: Arc<[Channel]>,
    current: Arc<AtomicUsize>,
}

impl FailoverChannel {
    /// Starts with the channel at index `first`.
    pub(crate) fn new(channels: Vec<Channel>, first: usize) -> Self {
        Self {
            channels: channels.into(),
            current: Arc::new(AtomicUsize::new(first)),
        }
    }

    /// Switches to the next channel, unless another call has done so already.
    fn advance(current: &AtomicUsize, failed: usize) {
        let _ = current.compare_exchange(failed, failed.wrapping_add(1), Ordering::Relaxed, Ordering::Relaxed);
    }
}

impl Service<http::Request<Body>> for FailoverChannel {
    type Response = http::Response<Body>;
    type Error = Error;
    type Future = BoxFuture<Self::Response, Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Error>> {
        // Each call waits for its own channel.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let (current, at) = (self.current.clone(), self.current.load(Ordering::Relaxed));
        // There is at least one channel, because the list of addresses is never empty.
        let mut channel = self.channels[at % self.channels.len()].clone();
        Box::pin(async move {
            let response = async {
                std::future::poll_fn(|context| channel.poll_ready(context)).await?;
                channel.call(request).await
            }
            .await;
            match &response {
                Err(_) => Self::advance(&current, at),
                Ok(reply) if reply.headers().contains_key(LEADER_HEADER) => Self::advance(&current, at),
                Ok(_) => {}
            }
            response
        })
    }
}
