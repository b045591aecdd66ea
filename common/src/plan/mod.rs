//! Predicts a job's memory need under each memory profile, its amount of work, and the size of its output.
//! Pure functions, used by the coordinator and the command line.

pub mod demand;
pub mod family;
mod headers;
mod layout;
pub mod memory_options;
pub mod need;
pub mod output;
pub mod parameter_counts;
pub mod profile;
pub mod qtype;
