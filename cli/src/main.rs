//! The `aitk` program. Everything lives in the library, where tests reach it.

use std::process::ExitCode;

/// Weights and activations come and go by the thousand: the system's allocator gives each large one back to the kernel
/// and takes it again page by page.
#[cfg(feature = "embedded")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    aitk_cli::main()
}
