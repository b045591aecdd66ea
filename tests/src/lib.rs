//! The scaffolding of the whole-system tests: real programs, a real S3 server, real signals.
//!
//! Every process is started by the test that needs it, stopped by its id when its guard is dropped, and writes
//! its output to a file whose tail is shown when a wait times out.

pub mod chaos;
pub mod disks;
pub mod faulty;
pub mod follower;
pub mod hub;
pub mod hub_server;
pub mod jobs;
pub mod members;
pub mod network;
pub mod place;
pub mod pool;
pub mod postgres;
pub mod processes;
pub mod programs;
pub mod s3;
pub mod s3_server;
pub mod server_fault;
pub mod skip;

use std::time::{Duration, Instant};

/// The exit code of a command that reached nobody.
const UNREACHABLE: i32 = 5;

/// Waits until `ready` gives a value; panics with `what` and the given logs' tails after `limit`.
///
/// # Panics
/// When the time is over.
pub fn eventually<T>(
    what: &str,
    limit: Duration,
    logs: &[&processes::Process],
    mut ready: impl FnMut() -> Option<T>,
) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = ready() {
            return value;
        }
        if start.elapsed() > limit {
            let tails: Vec<String> = logs.iter().map(|process| process.tail()).collect();
            panic!("waited {limit:?} in vain for: {what}\n{}", tails.join("\n"));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
