//! The aitk coordinator: queue, leases, store and gRPC API.
//!
//! [`aitk_scheduler`] decides (a state machine without IO), `scheduler_task` owns its state and stores every change before any
//! effect is sent, [`store`] persists it, `cluster` elects a leader among several coordinators, `garbage` deletes
//! unneeded blobs, `pki` manages certificates, `blob_access` decides who sees which blob, `api` implements the gRPC
//! services, and `server` starts and stops it all. The coordinator never depends on the engine.

mod access;
mod address;
mod api;
mod assign;
mod backup;
mod blob_access;
mod clock;
mod cluster;
mod config;
mod connection_limiter;
mod data_folder;
mod disk_reserve;
mod garbage;
mod job_config_cache;
mod job_size_limit;
mod metrics;
mod pki;
mod scheduler_task;
mod server;
mod spans;
mod storage_monitor;
pub mod store;
mod submit;
mod training_fit;
mod transfer_limit;

pub use address::{ClientAddress, https_address};
pub use backup::{CopyError, backup, restore};
pub use cluster::{ClusterNode, ClusterNodeError};
pub use config::{Cluster, Config, Limits, PkiConfig, TlsFiles};
pub use data_folder::DataFolderError;
pub use garbage::Retention;
pub use pki::{InitOutcome, PkiError, ca_folder, init};
pub use server::{CoordinatorHandle, RunError, StartError, start};
pub use store::{AuditLine, DatabaseUrl};
pub use submit::check_submission;
