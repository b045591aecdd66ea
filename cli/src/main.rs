//! The `aitk` program. Everything lives in the library, where tests reach it.

use std::process::ExitCode;

fn main() -> ExitCode {
    aitk_cli::main()
}
