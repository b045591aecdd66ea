//! What a running training is asked for, on its way to the child process.

use aitk_common::requested_outputs::RequestedOutputs;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::Notify;

/// The outputs that an attempt is asked for and that its child process has not been told of. Clones share them. Each output is
/// pending once at most, however often it is asked for.
#[derive(Clone, Debug, Default)]
pub struct PendingOutputs(Arc<Pending>);

#[derive(Debug, Default)]
struct Pending {
    outputs: Mutex<RequestedOutputs>,
    changed: Notify,
}

impl PendingOutputs {
    /// Nothing is asked for.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks for outputs, in addition to those that are pending.
    pub fn request(&self, outputs: RequestedOutputs) {
        let mut pending = self.0.outputs.lock().unwrap_or_else(PoisonError::into_inner);
        *pending = pending.or(outputs);
        drop(pending);
        self.0.changed.notify_one();
    }

    /// Waits until something is asked for, and takes it.
    async fn next(&self) -> RequestedOutputs {
        loop {
            let outputs = {
                let mut pending = self.0.outputs.lock().unwrap_or_else(PoisonError::into_inner);
                std::mem::take(&mut *pending)
            };
            if !outputs.is_empty() {
                return outputs;
            }
            self.0.changed.notified().await;
        }
    }

    /// Writes each request as a line of JSON to the standard input of a child, and keeps it open. Never returns.
    pub(super) async fn send_to(self, mut stdin: impl AsyncWrite + Unpin) {
        loop {
            let outputs = self.next().await;
            let Ok(mut line) = serde_json::to_vec(&outputs) else {
                continue;
            };
            line.push(b'\n');
            if let Err(error) = stdin.write_all(&line).await {
                // The child has ended, or ends.
                tracing::debug!(%error, "a request for outputs did not reach its attempt");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncBufReadExt, BufReader};

    #[tokio::test]
    async fn requests_that_wait_are_one_line() {
        let pending = PendingOutputs::new();
        for _ in 0..1000 {
            pending.request(RequestedOutputs::SAVE);
            pending.request(RequestedOutputs::SAMPLES);
        }
        let (stdin, child) = tokio::io::duplex(256);
        let sending = tokio::spawn(pending.clone().send_to(stdin));
        let mut lines = BufReader::new(child).lines();
        assert_eq!(
            lines.next_line().await.unwrap().unwrap(),
            r#"{"save":true,"samples":true}"#
        );
        pending.request(RequestedOutputs::SAVE);
        assert_eq!(
            lines.next_line().await.unwrap().unwrap(),
            r#"{"save":true,"samples":false}"#
        );
        sending.abort();
        assert_eq!(lines.next_line().await.unwrap(), None, "the pipe closes with the task");
    }
}
