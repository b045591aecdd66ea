//! Long tests, which are left out by default.

#![allow(clippy::print_stdout, reason = "a test says that it is left out")]

/// Whether a long test, or the long form of one, is left out: with `AITK_CASES`, which `.ci/run` sets, it runs.
pub fn skips_long_tests() -> bool {
    let skips_long_tests = std::env::var_os("AITK_CASES").is_none();
    if skips_long_tests {
        println!("left out: AITK_CASES=half runs this test in full");
    }
    skips_long_tests
}
