//! Tests of the coordinator through its public interface. They are one test program, because each further one takes a minute to build.

#![allow(clippy::large_futures, reason = "a test is one future, which is never moved")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod access;
mod arrays;
mod broken_uploads;
mod cluster;
mod connections;
mod disk_full;
mod hostile;
mod metrics;
mod pki;
mod program;
mod queue_rules;
mod random_uploads;
mod revisions;
mod server;
mod stores;
mod support;
mod traces;
mod upload_quota;

#[allow(dead_code, reason = "other tests share this file")]
#[path = "../../../common/tests/storage/buckets/server.rs"]
mod s3;
#[allow(unreachable_pub, reason = "other tests share this file")]
#[path = "../../../tests/src/skip.rs"]
mod skip;
