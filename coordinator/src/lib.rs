//! The aitk coordinator: queue, leases, store and gRPC API.
//!
//! [`core`] decides (pure, sans-io), `runner` owns it and stores every change before anybody hears of it, [`store`]
//! keeps it, `api` speaks gRPC, `server` starts and ends it all. It never computes and never depends on the engine.

mod api;
pub mod core;
mod runner;
mod server;
pub mod store;
mod submit;

pub use server::{Config, RunError, Running, StartError, TlsFiles, start};
