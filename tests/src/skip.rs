//! Reports a test that this machine cannot run. Files of other crates include this one with `#[path]`.

use std::fmt::Display;
use std::io::Write;

/// Writes to standard error that the current test is skipped, and why.
///
/// `requirement` is one of the words that `.ci/run` knows; it counts these lines and fails where the machine has what the test
/// requires.
pub fn skip(requirement: &str, why: impl Display) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    let line = format!("SKIPPED {test} (requires {requirement}): {why}\n");
    // `eprintln!` is captured by the test harness, and shown only when a test fails. Standard error has no buffer, so a formatting
    // macro would write the line in pieces, with other tests' lines between them, and `.ci/run` could not read it.
    let _ = std::io::stderr().write_all(line.as_bytes());
}
