//! The paths of the programs under test. They are built once per test run, in the same target folder and profile.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The root of the repository.
#[must_use]
pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the tests crate lies in the repository")
}

/// The path of one of our programs: `aitk`, `aitk-coordinator` or `aitk-worker`.
///
/// Cargo builds the programs of a package only for that package's own tests, so the first call
/// builds them here. If `AITK_TEST_PROGRAMS` is set, it names a folder with the built programs.
///
/// # Panics
/// When they do not build.
#[must_use]
pub fn program(name: &str) -> PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let find_folder = || match std::env::var_os("AITK_TEST_PROGRAMS") {
        Some(folder) if !folder.is_empty() => PathBuf::from(folder),
        _ => build(),
    };
    FOLDER.get_or_init(find_folder).join(name)
}

fn build() -> PathBuf {
    // …/target/<profile>/deps/<test binary>
    let test = std::env::current_exe().expect("a test knows its own path");
    let folder = test
        .ancestors()
        .nth(2)
        .expect("a test lies in target/<profile>/deps")
        .to_path_buf();
    let target = folder.parent().expect("target/<profile> has a parent");
    let profile = match folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(other) => other,
    };
    let mut cargo = Command::new(env!("CARGO"));
    // Cargo sets variables about the test's own package. Build scripts that watch them (ring's does) would run again, and
    // everything that depends on them would be rebuilt.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        let prefixes = [
            "CARGO_PKG_",
            "CARGO_MANIFEST_",
            "CARGO_BIN_",
            "CARGO_CRATE_",
            "CARGO_PRIMARY_",
            "OUT_DIR",
        ];
        if prefixes.iter().any(|prefix| text.starts_with(prefix)) {
            cargo.env_remove(&name);
        }
    }
    let status = cargo
        .current_dir(repository())
        // The same selection as `cargo test --workspace`: another one would have other features of the shared
        // dependencies and rebuild them.
        .args([
            "build",
            "--quiet",
            "--locked",
            "--workspace",
            "--bins",
            "--tests",
            "--profile",
            profile,
        ])
        .arg("--target-dir")
        .arg(target)
        .status()
        .expect("cargo starts");
    assert!(status.success(), "the programs under test do not build");
    folder
}
