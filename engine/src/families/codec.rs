//! The codec of a model without its other parts.

use super::conditioning::{Conditioning, Prompt};
use super::model::Model;
use super::options::{LoadOptions, LoadedParts};
use super::text_embeddings::TextEmbeddings;
use crate::error::{EngineError, Result};
use crate::models::codec::Codec;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The codec of a model that was loaded without its other parts.
pub struct LoadedCodec {
    /// Its other parts have no weights.
    model: Box<dyn Model>,
    path: PathBuf,
}

impl LoadedCodec {
    /// The codec of `model`, which was loaded from `path`, or replaced by that of `vae_path`.
    pub(super) fn new(model: Box<dyn Model>, path: &Path, vae_path: Option<&Path>) -> Self {
        let path = vae_path.or(model.codec_path()).unwrap_or(path).to_path_buf();
        Self { model, path }
    }

    /// The codec.
    #[must_use]
    pub fn codec(&self) -> &dyn Codec {
        self.model.codec()
    }

    /// The file or folder that it is in: its own, or that of the whole model.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The options to load only the codec of a model.
pub(super) fn options(mut options: LoadOptions) -> LoadOptions {
    options.loaded = LoadedParts::Codec;
    options.prompts = Some(Arc::new(NoPrompts));
    options.denoiser_quantization = None;
    options.text_encoder_quantization = None;
    options.memory_options.denoiser_streamed = 0.0;
    options
}

/// The prompts of a model that encodes none.
#[derive(Debug)]
struct NoPrompts;

impl TextEmbeddings for NoPrompts {
    fn get(&self, _: &Prompt) -> Result<Conditioning> {
        Err(EngineError::Internal(
            "a model that was loaded for its codec was given a prompt".into(),
        ))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::families::{self, LoadOptions};
    use crate::testing::{fixtures, zimage_folder};
    use aitk_common::job::arch::ArchName;
    use candle_core::{Device, Tensor};

    /// A codec that was loaded alone gives the latents of the model's own.
    #[test]
    fn a_codec_alone_encodes_like_that_of_the_model() {
        let zimage = zimage_folder(false);
        let cases = [
            (ArchName::Sd1, fixtures().join("tiny_sd")),
            (ArchName::Sdxl, fixtures().join("tiny_sdxl")),
            (ArchName::Flux, fixtures().join("tiny_flux")),
            (ArchName::Sd3, fixtures().join("tiny_sd35")),
            (ArchName::Zimage, zimage.path().to_path_buf()),
        ];
        let numbers: Vec<f32> = (0..3 * 64 * 64).map(|i| (i as f32 * 0.37).sin()).collect();
        let image = Tensor::from_vec(numbers, (1, 3, 64, 64), &Device::Cpu).unwrap();
        let latents = |codec: &dyn crate::models::codec::Codec| {
            let mut noise = |shape: &[usize]| Ok(Tensor::zeros(shape, candle_core::DType::F32, &Device::Cpu)?);
            let latents = codec.encode(&image, &mut noise).unwrap();
            latents[0].flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        for (arch, path) in cases {
            let model = families::load(&path, arch, &LoadOptions::cpu()).unwrap();
            let alone = families::load_codec(&path, arch, None, LoadOptions::cpu()).unwrap();
            assert_eq!(latents(alone.codec()), latents(model.codec()), "{arch}");
            assert_eq!(alone.path(), model.codec_path().unwrap_or(&path), "{arch}");
            let other = families::load_codec(&path, arch, Some(alone.path()), LoadOptions::cpu()).unwrap();
            assert_eq!(
                latents(other.codec()),
                latents(model.codec()),
                "{arch}, given by `vae_path`"
            );
        }
    }
}
