//! For the ordinary tests: every kept input through the function that the fuzzer calls.

use std::path::{Path, PathBuf};

/// The folder of the whole repository: every crate lies one below it.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Runs a target over its corpus.
pub fn replay(target: &str, run: fn(&[u8])) {
    let folder = repository().join("fuzz/corpus").join(target);
    let mut inputs: Vec<PathBuf> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .collect();
    inputs.sort();
    assert!(!inputs.is_empty(), "{} is empty", folder.display());
    for input in inputs {
        // Shown only when the test fails: the last one is to blame.
        eprintln!("{}", input.display());
        run(&std::fs::read(&input).unwrap());
    }
}
