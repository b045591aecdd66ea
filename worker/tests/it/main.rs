//! The worker from outside: one program, because each more takes a minute to build. A module is one story.

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
mod session;
mod support;
mod tokens;
mod traces;
mod units;
