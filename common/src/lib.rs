//! Types and functions that coordinator, worker, engine and command line share.
//!
//! Everything here is plain data, pure functions and access to local files, except three modules behind features: `storage`
//! (content-addressed blobs on top of `object_store`), `hub` (reads the small files of models on Hugging Face, and uploads results) and `webhook`
//! (posts a short JSON message to a URL that a user configured).

pub mod attempt;
pub mod backoff;
pub mod capability;
pub mod caption_metadata;
pub mod checkpoint;
pub mod confinement;
pub mod control_plane;
pub mod error_chain;
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
pub mod requested_outputs;
pub mod sd_scripts;
pub mod security;
pub mod step_metrics;
#[cfg(feature = "storage")]
pub mod storage;
pub mod telemetry;
#[cfg(feature = "plot")]
pub mod tensorboard;
#[cfg(feature = "webhook")]
pub mod webhook;
