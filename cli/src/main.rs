//! The `aitk` program. All code is in the library, so that tests can call it.

use std::process::ExitCode;

/// Training allocates and frees thousands of large tensors. The system's allocator returns each of them to the kernel,
/// and the next allocation has to fault in every page again; mimalloc reuses the memory.
#[cfg(feature = "embedded")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    aitk_cli::main()
}
