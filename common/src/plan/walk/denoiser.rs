//! The denoisers of all families.

use super::build::Builder;
use super::chroma::Chroma;
use super::conditions::Conditions;
use super::flux::Flux;
use super::meter::MetaTensor;
use super::sd3::Sd3;
use super::tape::Walk;
use super::unet::UNet;
use super::zimage::ZImage;
use crate::plan::shapes::{ModelShapes, TransformerKind};

/// A U-Net or a transformer.
pub(in crate::plan) enum Denoiser {
    UNet(Box<UNet>),
    Chroma(Box<Chroma>),
    Flux(Box<Flux>),
    Sd3(Box<Sd3>),
    ZImage(Box<ZImage>),
}

impl Denoiser {
    pub(in crate::plan) fn new(b: &mut Builder, shapes: &ModelShapes) -> Self {
        let transformer = &shapes.transformer;
        match transformer.kind {
            TransformerKind::None => Self::UNet(Box::new(UNet::new(b, &shapes.unet))),
            TransformerKind::Chroma => Self::Chroma(Box::new(Chroma::new(b, transformer))),
            TransformerKind::Flux => Self::Flux(Box::new(Flux::new(b, transformer))),
            TransformerKind::Sd3 => Self::Sd3(Box::new(Sd3::new(b, transformer))),
            TransformerKind::ZImage => Self::ZImage(Box::new(ZImage::new(b, transformer))),
        }
    }

    /// A pass over latents [batch, channels, height, width].
    pub(in crate::plan) fn forward(
        &self,
        walk: &Walk,
        latents: &MetaTensor,
        conditions: &Conditions,
        checkpointed: bool,
    ) -> Option<MetaTensor> {
        match self {
            Self::UNet(unet) => unet.forward(walk, latents, (&conditions.text, &conditions.residuals), checkpointed),
            Self::Chroma(chroma) => chroma.forward(walk, latents, conditions, checkpointed),
            Self::Flux(flux) => flux.forward(walk, latents, conditions, checkpointed),
            Self::Sd3(sd3) => sd3.forward(walk, latents, conditions, checkpointed),
            Self::ZImage(zimage) => zimage.forward(walk, latents, conditions, checkpointed),
        }
    }
}
