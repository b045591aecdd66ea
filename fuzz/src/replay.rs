//! Runs every input of a corpus through the function that the fuzzer calls, for the ordinary tests.

use flate2::read::GzDecoder;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The root folder of the repository; the folder of each crate that replays a corpus is one level below it.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Names the input that a panic is about.
struct Input<'a>(&'a str);

impl Drop for Input<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the input is {}", self.0);
        }
    }
}

/// Runs a target once for each file of its archive `fuzz/corpus/<target>.tar.gz`, on all cores.
pub fn replay(target: &str, run: fn(&[u8])) {
    let path = repository().join("fuzz/corpus").join(format!("{target}.tar.gz"));
    let file = File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut archive = tar::Archive::new(GzDecoder::new(file));
    let mut inputs = Vec::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        if !entry.header().entry_type().is_file() {
            continue;
        }
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        inputs.push((entry.path().unwrap().display().to_string(), bytes));
    }
    assert!(!inputs.is_empty(), "{} has no inputs", path.display());
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((name, bytes)) = inputs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let _input = Input(name);
                    run(bytes);
                }
            });
        }
    });
}
