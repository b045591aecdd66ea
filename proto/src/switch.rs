//! One of several coordinators at a time.

use crate::LEADER_HEADER;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::transport::{Channel, Error};

/// Speaks to one coordinator until it does not answer, or says that it does not lead; from then on to the next one. The call
/// that found out fails: only its caller knows whether it may be made twice.
#[derive(Clone, Debug)]
pub struct Switch {
    channels: Arc<[Channel]>,
    now: Arc<AtomicUsize>,
}

impl Switch {
    /// Begins with the one at `first`.
    pub(crate) fn new(channels: Vec<Channel>, first: usize) -> Self {
        Self {
            channels: channels.into(),
            now: Arc::new(AtomicUsize::new(first)),
        }
    }

    /// Leaves the one that failed, unless another call did so before.
    fn leave(now: &AtomicUsize, failed: usize) {
        let _ = now.compare_exchange(failed, failed.wrapping_add(1), Ordering::Relaxed, Ordering::Relaxed);
    }
}

impl Service<http::Request<Body>> for Switch {
    type Response = http::Response<Body>;
    type Error = Error;
    type Future = BoxFuture<Self::Response, Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Error>> {
        // Each call waits for its own channel.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let (now, at) = (self.now.clone(), self.now.load(Ordering::Relaxed));
        // There is at least one: `connect` made a channel for each address, and there is no empty list of addresses.
        let mut channel = self.channels[at % self.channels.len()].clone();
        Box::pin(async move {
            let answer = async {
                std::future::poll_fn(|context| channel.poll_ready(context)).await?;
                channel.call(request).await
            }
            .await;
            match &answer {
                Err(_) => Self::leave(&now, at),
                Ok(response) if response.headers().contains_key(LEADER_HEADER) => Self::leave(&now, at),
                Ok(_) => {}
            }
            answer
        })
    }
}
