//! A thread that starts every child.
//!
//! A child asks Linux for a signal when its parent *thread* ends (see `child`). A thread of the async runtime may end
//! at any time; this one ends with the daemon.

use std::io;
use tokio::process::{Child, Command};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

type Request = (Command, oneshot::Sender<io::Result<Child>>);

/// Starts processes on a thread that lives as long as this value and its clones.
#[derive(Clone, Debug)]
pub struct Spawner {
    requests: std::sync::mpsc::Sender<Request>,
}

impl Spawner {
    /// Starts the thread.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn start(runtime: Handle) -> io::Result<Self> {
        // Each caller waits for its answer, so there are never more requests than attempts, of which each device has one.
        let (requests, queue) = std::sync::mpsc::channel::<Request>();
        std::thread::Builder::new()
            .name("aitk-spawner".to_owned())
            .spawn(move || {
                let _inside = runtime.enter();
                while let Ok((mut command, reply)) = queue.recv() {
                    // If the receiver is gone, dropping the child kills it (`kill_on_drop`).
                    let _ = reply.send(command.spawn());
                }
            })?;
        Ok(Self { requests })
    }

    /// Starts a process.
    ///
    /// # Errors
    /// The error of starting the process.
    pub async fn spawn(&self, command: Command) -> io::Result<Child> {
        let (reply, answer) = oneshot::channel();
        let gone = || io::Error::other("the thread that starts processes is gone");
        self.requests.send((command, reply)).map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}
