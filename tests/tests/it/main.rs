//! Several programs together. One test program, so that tests that wait do so at the same time; `chaos` is one of its own, because it
//! freezes processes and needs the machine for itself.

mod code_models;
mod dataset;
mod dead_machine;
mod disk_full;
mod leader;
mod network;
mod requested_outputs;
mod storage_refused;
mod whole_path;
