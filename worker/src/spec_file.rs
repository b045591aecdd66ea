//! The file through which the daemon tells a child process what to run.

use aitk_common::attempt::AttemptSpec;
use std::io::{self, Read};
use std::path::Path;

/// The name of the file in the attempt's folder.
pub(crate) const SPEC_FILE: &str = "spec.json";
/// The largest specification that is read: a config of a few MiB in several forms.
const SPEC_BYTES: u64 = 64 << 20;

/// Reads the specification of an attempt.
pub(crate) fn read_spec(path: &Path) -> io::Result<AttemptSpec> {
    let mut text = Vec::new();
    std::fs::File::open(path)?.take(SPEC_BYTES).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}
