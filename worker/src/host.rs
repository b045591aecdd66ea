//! The machine that the worker runs on.

/// Returns the name of this machine, or `worker` when the system has none.
#[must_use]
pub fn host_name() -> String {
    sysinfo::System::host_name()
        .ok()
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| "worker".to_owned())
}
