//! Persistence: both databases, object storage, kills and backups.

mod backup;
mod crash;
mod garbage;
mod postgres;
mod races;
mod store;
mod upgrade;
