//! Stable Diffusion 3.5 as a [`Model`].

use super::text::{CONTEXT, POOLED, Sd3TextEncoders};
use crate::checkpointing::Checkpointing;
use crate::error::{EngineError, Result};
use crate::families::conditioning::{Conditioning, Prompt};
use crate::families::model::{Family, Model, ModelWriter, SaveOptions};
use crate::families::options::LoadOptions;
use crate::families::part::{AdapterNames, Part, PartInfo};
use crate::families::part_role::PartRole;
use crate::families::text_source::TextSource;
use crate::families::transformer_folder::{TransformerSource, TransformerWriter, read_saved};
use crate::models::codec::Codec;
use crate::models::sd3::{SD3Transformer2DModel, Sd3Conditions};
use crate::models::vae::AutoencoderKl;
use candle_core::{DType, Device, Tensor, Var};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The transformer, to whose layers adapters are added.
pub(super) const DENOISER: PartInfo = PartInfo {
    id: "transformer",
    role: PartRole::Denoiser,
    lora_prefix: "transformer",
    lora_names: AdapterNames::Peft,
    block_lists: &["transformer_blocks"],
};

/// Stable Diffusion 3.5.
#[derive(Clone, Debug)]
pub struct Sd3Model {
    pub(super) family: &'static dyn Family,
    pub(super) text: TextSource<Sd3TextEncoders>,
    /// Predicts the velocity.
    pub transformer: SD3Transformer2DModel,
    /// Encodes images to latents and decodes them.
    pub vae: AutoencoderKl,
    /// The file or folder of the VAE.
    pub(super) vae_path: PathBuf,
    /// `scheduler_config.json`.
    pub scheduler_config: Value,
    pub(super) sequential_cfg: bool,
    pub(super) quantised_in_file: Vec<(PartRole, Vec<&'static str>)>,
    /// The trained tensors, with part and name, sorted.
    pub(super) trained: Vec<(String, Var)>,
    /// If the transformer is trained: a copy that shares its memory and has no variables.
    pub(super) frozen_transformer: Option<SD3Transformer2DModel>,
    /// Where the transformer was loaded from, for saving it.
    pub(super) source: Arc<TransformerSource>,
    pub(super) dtype: DType,
    pub(super) device: Device,
}

impl Sd3Model {
    /// Whether T5 is loaded. Without it, and if no prompts were encoded before, its tokens are zeros.
    #[must_use]
    pub fn has_t5(&self) -> bool {
        self.text.encoders().is_some_and(|encoders| encoders.t5.is_some())
    }

    /// Tokens of a prompt for T5: 256. `None` if prompts were encoded before.
    #[must_use]
    pub fn max_sequence_length(&self) -> Option<usize> {
        self.text.encoders().map(|encoders| encoders.max_sequence_length)
    }

    /// Encodes prompts with the text encoders of another model from now on.
    #[cfg(test)]
    pub(crate) fn share_text_encoders(&mut self, other: &Self) {
        self.text = other.text.clone();
    }

    /// Sets the tokens of a prompt for T5 (`max_sequence_length` of diffusers). Prompts that were encoded before keep theirs.
    pub fn set_max_sequence_length(&mut self, tokens: usize) {
        if let Some(encoders) = self.text.encoders_mut() {
            encoders.max_sequence_length = tokens;
        }
    }
}

impl Model for Sd3Model {
    fn family(&self) -> &'static dyn Family {
        self.family
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn parts(&mut self) -> Vec<Part<'_>> {
        let mut parts = self.text.parts();
        parts.push(DENOISER.with(&mut self.transformer));
        parts
    }

    fn encode_prompts(&self, prompts: &[Prompt]) -> Result<Conditioning> {
        self.text.encode_prompts(prompts, &self.device)
    }

    fn predict(&self, latents: &[Tensor], timesteps: &Tensor, conditioning: &Conditioning) -> Result<Vec<Tensor>> {
        self.predict_skipping(latents, timesteps, conditioning, &[])
    }

    fn predict_skipping(
        &self,
        latents: &[Tensor],
        timesteps: &Tensor,
        conditioning: &Conditioning,
        skipped: &[usize],
    ) -> Result<Vec<Tensor>> {
        let [latents] = latents else {
            return Err(EngineError::Internal(
                "Stable Diffusion 3.5 takes one latent tensor".into(),
            ));
        };
        let conditions = Sd3Conditions {
            text: &conditioning.get(CONTEXT)?.to_dtype(self.dtype)?,
            pooled: &conditioning.get(POOLED)?.to_dtype(self.dtype)?,
        };
        let latents = latents.to_dtype(self.dtype)?;
        let prediction = self.transformer.forward(&latents, timesteps, &conditions, skipped)?;
        Ok(vec![prediction.to_dtype(DType::F32)?])
    }

    fn skippable_blocks(&self) -> usize {
        self.transformer.block_count()
    }

    fn codec(&self) -> &dyn Codec {
        &self.vae
    }

    fn size_multiple(&self) -> usize {
        self.transformer.patch_size() * self.vae.scale_factor()
    }

    fn max_size(&self) -> Option<(usize, usize)> {
        let (rows, columns) = self.transformer.max_tokens();
        let token = self.size_multiple();
        Some((columns.saturating_mul(token), rows.saturating_mul(token)))
    }

    fn image_tokens(&self, latent_shape: &[usize]) -> usize {
        let sides = latent_shape.iter().rev().take(2);
        sides.map(|side| side / self.transformer.patch_size()).product()
    }

    fn scheduler_config(&self) -> &Value {
        &self.scheduler_config
    }

    fn sequential_cfg(&self) -> bool {
        self.sequential_cfg
    }

    fn default_size(&self) -> (usize, usize) {
        let side = self.transformer.sample_size() * self.vae.scale_factor();
        (side, side)
    }

    fn set_checkpointing(&mut self, checkpointing: Checkpointing) {
        self.transformer.checkpointing = checkpointing;
        if let Some(encoders) = self.text.encoders_mut() {
            encoders.set_checkpointing(checkpointing);
        }
    }

    fn trained(&self) -> &[(String, Var)] {
        &self.trained
    }

    fn detach(&self) -> Option<Box<dyn Model>> {
        let transformer = self.frozen_transformer.clone()?;
        Some(Box::new(Self {
            transformer,
            ..self.clone()
        }))
    }

    fn quantised_in_file(&self) -> &[(PartRole, Vec<&'static str>)] {
        &self.quantised_in_file
    }

    fn replace_codec(&mut self, path: &Path, options: &LoadOptions) -> Result<()> {
        self.replace_vae(path, options)
    }

    fn codec_path(&self) -> Option<&Path> {
        Some(&self.vae_path)
    }

    fn read_saved(
        &self,
        path: &Path,
        like: &[(String, Tensor)],
        found: &mut dyn FnMut(usize, Tensor) -> Result<()>,
    ) -> Result<()> {
        read_saved(path, like, found)
    }

    fn check_single_file(&self) -> Result<()> {
        Err(self.source.no_single_file())
    }

    fn writer<'a>(
        &'a self,
        trained: &'a BTreeMap<String, Tensor>,
        options: SaveOptions,
    ) -> Result<Box<dyn ModelWriter + 'a>> {
        Ok(Box::new(TransformerWriter::new(&self.source, trained, options)?))
    }
}
