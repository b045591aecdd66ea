//! Copies the files of the demo (`config/demo`) to where the program includes them from.

use std::path::{Path, PathBuf};

#[path = "src/demo/shipped.rs"]
mod shipped;

const DEMO: &str = "../config/demo";

fn main() -> std::io::Result<()> {
    for path in ["build.rs", "src/demo/shipped.rs", DEMO] {
        println!("cargo::rerun-if-changed={path}");
    }
    let target = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default()).join("demo");
    // Of an earlier build.
    if target.exists() {
        std::fs::remove_dir_all(&target)?;
    }
    shipped::copy_demo(Path::new(DEMO), &target)
}
