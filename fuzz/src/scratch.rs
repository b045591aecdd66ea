//! A file in memory, for code that reads only from files.

use std::fs;
use std::path::{Path, PathBuf};

/// Calls `read` with the path of a file that contains these bytes. Each target and thread has a file of its own.
pub fn with_file<T>(name: &str, bytes: &[u8], read: impl FnOnce(&Path) -> T) -> T {
    let shared = PathBuf::from("/dev/shm");
    let folder = if shared.is_dir() { shared } else { std::env::temp_dir() };
    let thread = std::thread::current().id();
    let path = folder.join(format!("aitk-fuzz-{}-{thread:?}-{name}", std::process::id()));
    fs::write(&path, bytes).expect("the file is written");
    let result = read(&path);
    let _ = fs::remove_file(&path);
    result
}
