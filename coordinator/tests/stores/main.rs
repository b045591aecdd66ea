//! What is stored stays as it should: in both databases, in object storage, over kills, in backups.

#![allow(clippy::large_futures, reason = "a test is one future and is moved nowhere")]
#![allow(clippy::unwrap_used, reason = "a test may stop where it stands")]

mod backup;
mod crash;
mod garbage;
mod postgres;
mod races;
mod store;
#[path = "../support/mod.rs"]
mod support;
mod upgrade;

#[allow(dead_code, clippy::print_stdout, reason = "it is shared with other tests")]
#[path = "../../../common/tests/storage/buckets/server.rs"]
mod s3;
