//! The vocabulary of aitk: what coordinator, worker, engine and command line say to each other.
//!
//! Everything here is plain data, pure functions and local files, except `storage` (feature `storage`),
//! which puts our nouns on top of `object_store`.

pub mod attempt;
pub mod capability;
pub mod checkpoint;
pub mod confinement;
pub mod control;
pub mod fsutil;
pub mod gguf;
pub mod hash;
pub mod id;
pub mod job;
pub mod plan;
pub mod security;
#[cfg(feature = "storage")]
pub mod storage;
pub mod telemetry;
