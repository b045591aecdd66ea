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
    // `eprintln!` is captured by the test harness, and shown only when a test fails.
    let _ = writeln!(std::io::stderr(), "SKIPPED {test} (requires {requirement}): {why}");
}
