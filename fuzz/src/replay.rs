//! Runs every input of a corpus through the function that the fuzzer calls, for the ordinary tests.

use flate2::read::GzDecoder;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The root folder of the repository; the folder of each crate that replays a corpus is one level below it.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Runs a target once for each file of its archive `fuzz/corpus/<target>.tar.gz`, in the archive's order.
pub fn replay(target: &str, run: fn(&[u8])) {
    let path = repository().join("fuzz/corpus").join(format!("{target}.tar.gz"));
    let file = File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut archive = tar::Archive::new(GzDecoder::new(file));
    let mut count = 0;
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        if !entry.header().entry_type().is_file() {
            continue;
        }
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        // Printed only when the test fails; the last name is the input that failed.
        eprintln!("{}", entry.path().unwrap().display());
        run(&bytes);
        count += 1;
    }
    assert!(count > 0, "{} has no inputs", path.display());
}
