//! The aitk worker: probes a machine, runs attempts in child processes, stages their inputs and syncs their results.

pub mod probe;
pub mod runner;
