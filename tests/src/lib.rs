//! Support code of the whole-system tests: real processes, a real S3 server, real signals.
//!
//! Each test starts the processes that it needs. Dropping a [`processes::Process`] kills it. Each process writes its output to
//! a file, whose last lines are printed when a wait times out.

pub mod breaking_proxy;
pub mod chaos;
pub mod cluster;
pub mod coordinators;
pub mod disks;
pub mod faulty_server;
pub mod follower;
pub mod hub;
pub mod hub_server;
pub mod jobs;
pub mod long_tests;
pub mod namespaces;
pub mod network;
pub mod postgres;
pub mod processes;
pub mod programs;
pub mod s3;
pub mod s3_server;
pub mod server_fault;
pub mod skip;
pub mod trace_collector;
pub mod upload_hub;

pub use processes::eventually;

/// The exit code of a command that could not reach a coordinator.
const UNREACHABLE: i32 = 5;
