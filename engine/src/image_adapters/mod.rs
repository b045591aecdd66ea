//! Networks beside a U-Net that condition it on images (ai-toolkit's `adapter`): T2I-Adapter, ControlNet. They are trained alone. A type is a
//! file here and a line in [`KINDS`]; models, pipelines and trainings see it only as an [`ImageAdapter`].

mod adapter;
mod control_net;
mod identity;
mod t2i;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod test_weights;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

pub use adapter::{AdapterRequest, AdapterTarget, ImageAdapter, ImageAdapterKind};

use crate::checkpointing::Checkpointing;
use crate::error::{EngineError, Result};
use aitk_common::job::adapter::{AdapterConfig, AdapterType};
use aitk_common::job::arch::ArchName;
use std::path::Path;

/// Every type of adapter that this release trains.
static KINDS: [&dyn ImageAdapterKind; 2] = [&t2i::T2iAdapters, &control_net::ControlNets];

/// Checks the files of an adapter to start from, without the model that it is for. Reads configs and headers alone.
///
/// # Errors
/// When this release does not train the type, or the files are of something else or cannot be read.
pub fn check_files(config: &AdapterConfig, path: &Path, arch: ArchName) -> Result<()> {
    let kind = find(config.kind)?;
    let request = AdapterRequest {
        config,
        arch,
        path: Some(path),
        seed: 0,
        checkpointing: Checkpointing::Off,
    };
    request.check_files(kind.class_name())
}

/// The type of adapter with this name.
///
/// # Errors
/// When this release does not train it.
pub fn find(kind: AdapterType) -> Result<&'static dyn ImageAdapterKind> {
    let found = KINDS.iter().find(|known| known.kind() == kind);
    found
        .copied()
        .ok_or_else(|| EngineError::Unsupported(format!("adapter.type: `{kind}` is not supported")))
}
