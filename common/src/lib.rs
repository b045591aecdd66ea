//! The vocabulary of aitk: what coordinator, worker, engine and command line say to each other.
//!
//! Everything here is plain data, pure functions and local files, except `storage` (feature `storage`),
//! which puts our nouns on top of `object_store`, `hub` (feature `hub`), which reads the small files of models on Hugging Face, and
//! `webhook` (feature `webhook`), which posts a few words to an address that a user chose.

pub mod attempt;
pub mod capability;
pub mod checkpoint;
pub mod confinement;
pub mod control;
pub mod fsutil;
pub mod gguf;
pub mod hash;
#[cfg(feature = "hub")]
pub mod hub;
pub mod id;
pub mod job;
pub mod model_files;
pub mod plan;
#[cfg(feature = "plot")]
pub mod plot;
pub mod security;
pub mod step_metrics;
#[cfg(feature = "storage")]
pub mod storage;
pub mod telemetry;
#[cfg(feature = "webhook")]
pub mod webhook;
