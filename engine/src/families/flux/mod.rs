//! FLUX.1 (Black Forest Labs): dev, schnell, Krea-dev, Kontext, and Flex.1, which has the same blocks in other numbers.

mod family;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod file_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod save_tests;
mod text;

use super::transformer_model::TransformerModel;
use aitk_common::job::arch::ArchName;

/// FLUX.1, with or without a control image.
#[derive(Clone, Debug)]
pub struct FluxFamily {
    arch: ArchName,
}

/// FLUX.1.
pub static FLUX: FluxFamily = FluxFamily { arch: ArchName::Flux };

/// FLUX.1 Kontext: dev with a control image, whose tokens follow those of the image.
pub static FLUX_KONTEXT: FluxFamily = FluxFamily {
    arch: ArchName::FluxKontext,
};

/// FLUX.1, or FLUX.1 Kontext, which has the same tensors and takes a control image.
pub type FluxModel = TransformerModel<FluxFamily>;
