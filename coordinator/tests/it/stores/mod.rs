//! What is stored stays as it should: in both databases, in object storage, over kills, in backups.

mod backup;
mod crash;
mod garbage;
mod postgres;
mod races;
mod store;
mod upgrade;
