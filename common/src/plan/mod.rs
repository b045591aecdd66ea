//! How a task is laid out on a device: memory profiles, what a job needs under each of them, and how much work it is.
//! Pure arithmetic, the same in the coordinator and on the command line.

pub mod anatomy;
pub mod choices;
pub mod demand;
pub mod family;
mod headers;
mod layout;
pub mod need;
pub mod output;
pub mod profile;
pub mod qtype;
