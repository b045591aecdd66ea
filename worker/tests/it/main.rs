//! Tests of the worker from outside. They are one program, because each further program takes a minute to link.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

#[cfg(target_os = "linux")]
mod confined;
mod hostile_coordinator;
mod hostile_jobs;
mod joining;
#[cfg(target_os = "linux")]
mod orphan;
mod program;
mod runner;
#[cfg(target_os = "linux")]
mod sandboxed;
mod service_files;
mod session;
#[allow(unreachable_pub, reason = "other tests share this file")]
#[path = "../../../tests/src/skip.rs"]
mod skip;
mod support;
mod tokens;
mod traces;
