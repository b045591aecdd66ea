//! How a task is laid out on a device.

pub mod profile;
