//! One file in memory for the whole run, for what is only read from files.

use std::fs;
use std::path::{Path, PathBuf};

/// Runs `look` over a file with these bytes. Each target has a file of its own, in every process.
pub fn with_file<T>(name: &str, bytes: &[u8], look: impl FnOnce(&Path) -> T) -> T {
    let shared = PathBuf::from("/dev/shm");
    let folder = if shared.is_dir() { shared } else { std::env::temp_dir() };
    let path = folder.join(format!("aitk-fuzz-{}-{name}", std::process::id()));
    fs::write(&path, bytes).expect("the file is written");
    let seen = look(&path);
    let _ = fs::remove_file(&path);
    seen
}
