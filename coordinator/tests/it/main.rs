//! The coordinator from outside: one program, because each more takes a minute to build. A module is one story.

#![allow(clippy::large_futures, reason = "a test is one future and is moved nowhere")]
#![allow(clippy::unwrap_used, reason = "a test may stop where it stands")]

mod access;
mod arrays;
mod cluster;
mod connections;
mod full;
mod hostile;
mod metrics;
mod pki;
mod revisions;
mod rules;
mod server;
mod stored;
mod stores;
mod support;
mod traces;

#[allow(dead_code, reason = "other tests share this file")]
#[path = "../../../common/tests/storage/buckets/server.rs"]
mod s3;
#[allow(unreachable_pub, reason = "other tests share this file")]
#[path = "../../../tests/src/skip.rs"]
mod skip;
