//! Checkpoints, snapshots and blob stores under damage, kills, full disks and broken networks.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests fail by panicking, and print what they skip"
)]

#[cfg(feature = "storage")]
mod buckets;
mod damage;
mod disk_full;
mod kill;
mod names;
#[allow(unreachable_pub, reason = "other tests share this file")]
#[path = "../../../tests/src/skip.rs"]
mod skip;
#[cfg(feature = "storage")]
mod snapshots;
mod support;
