//! A model of a [`TransformerFamily`].

use super::conditioning::{Conditioning, Prompt};
use super::model::{Family, GuidanceKind, Model, ModelWriter, SaveOptions, no_decorator, no_skippable_blocks};
use super::options::LoadOptions;
use super::part::Part;
use super::part_files::load_other_vae;
use super::part_role::PartRole;
use super::text_source::TextSource;
use super::transformer_family::{TransformerFamily, TransformerText};
use super::transformer_folder::{TransformerSource, TransformerWriter, read_saved};
use crate::checkpointing::Checkpointing;
use crate::error::{EngineError, Result};
use crate::models::codec::Codec;
use crate::models::vae::AutoencoderKl;
use candle_core::{DType, Device, Tensor, Var};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The guidance scale of a conditioning where none is given: training, as in ai-toolkit.
const PLAIN_GUIDANCE: f64 = 1.0;

/// A model of a [`TransformerFamily`]: text encoders, or prompts that were encoded before, a transformer and a VAE.
#[derive(Clone, Debug)]
pub struct TransformerModel<F: TransformerFamily> {
    pub(super) family: &'static F,
    pub(super) text: TextSource<F::Text>,
    /// Predicts the velocity.
    pub transformer: F::Transformer,
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
    pub(super) frozen_transformer: Option<F::Transformer>,
    /// The tokens that follow the text of every prompt.
    pub(super) decorator: Option<Tensor>,
    /// Where the transformer was loaded from, for saving it.
    pub(super) source: Arc<TransformerSource>,
    pub(super) dtype: DType,
    pub(super) device: Device,
}

impl<F: TransformerFamily> TransformerModel<F> {
    /// How many tokens of a prompt the text encoder with the longest texts gets. `None` if prompts were encoded before.
    #[must_use]
    pub fn max_sequence_length(&self) -> Option<usize> {
        self.text.encoders().map(F::Text::max_sequence_length)
    }

    /// Sets how many tokens of a prompt it gets (`max_sequence_length` of diffusers). Prompts that were encoded before keep theirs.
    pub fn set_max_sequence_length(&mut self, tokens: usize) {
        if let Some(encoders) = self.text.encoders_mut() {
            encoders.set_max_sequence_length(tokens);
        }
    }

    /// Encodes prompts with the text encoders of another model from now on.
    #[cfg(test)]
    pub(crate) fn share_text_encoders(&mut self, other: &Self) {
        self.text = other.text.clone();
    }
}

impl<F> Model for TransformerModel<F>
where
    F: TransformerFamily + Family,
{
    fn family(&self) -> &'static dyn Family {
        self.family
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn noise_dtype(&self) -> DType {
        F::noise_dtype(self.dtype)
    }

    fn parts(&mut self) -> Vec<Part<'_>> {
        let mut parts = self.text.parts();
        parts.push(F::DENOISER.with(&mut self.transformer));
        parts
    }

    fn encode_prompts(&self, prompts: &[Prompt]) -> Result<Conditioning> {
        self.with_guidance(self.text.encode_prompts(prompts, &self.device)?, &[PLAIN_GUIDANCE])
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
        if !skipped.is_empty() && self.skippable_blocks() == 0 {
            return Err(no_skippable_blocks(self.family.arch_name()));
        }
        let [latents] = latents else {
            return Err(EngineError::Internal(format!("{} takes one latent tensor", F::NAME)));
        };
        let latents = latents.to_dtype(self.dtype)?;
        let prediction = F::predict(&self.transformer, &latents, timesteps, conditioning, skipped)?;
        Ok(vec![prediction.to_dtype(DType::F32)?])
    }

    fn skippable_blocks(&self) -> usize {
        F::skippable_blocks(&self.transformer)
    }

    fn guidance(&self) -> GuidanceKind {
        F::GUIDANCE
    }

    fn cfg_factor(&self, guidance_scale: f64) -> f64 {
        F::cfg_factor(guidance_scale)
    }

    fn with_guidance(&self, conditioning: Conditioning, scales: &[f64]) -> Result<Conditioning> {
        F::with_guidance(conditioning, scales, &self.device)
    }

    fn without_guidance(&self, conditioning: Conditioning) -> Conditioning {
        F::without_guidance(conditioning)
    }

    fn takes_control(&self) -> bool {
        self.family.takes_control()
    }

    fn with_control(&self, conditioning: Conditioning, latents: &[Tensor]) -> Result<Conditioning> {
        self.family.with_control(conditioning, latents)
    }

    fn decorator_width(&self) -> Option<usize> {
        F::decorator_width(&self.transformer)
    }

    fn set_decorator(&mut self, tokens: Tensor) -> Result<()> {
        if self.decorator_width().is_none() {
            return Err(no_decorator(self.family.arch_name()));
        }
        self.decorator = Some(tokens);
        Ok(())
    }

    fn has_decorator(&self) -> bool {
        self.decorator.is_some()
    }

    fn with_decorator(&self, conditioning: Conditioning, is_unconditional: bool) -> Result<Conditioning> {
        match &self.decorator {
            Some(tokens) if is_unconditional => self.family.with_tokens(conditioning, &tokens.zeros_like()?),
            Some(tokens) => self.family.with_tokens(conditioning, tokens),
            None => Ok(conditioning),
        }
    }

    fn codec(&self) -> &dyn Codec {
        &self.vae
    }

    fn size_multiple(&self) -> usize {
        F::patch_size(&self.transformer) * self.vae.scale_factor()
    }

    fn max_size(&self) -> Option<(usize, usize)> {
        let (rows, columns) = F::max_tokens(&self.transformer)?;
        let token = self.size_multiple();
        Some((columns.saturating_mul(token), rows.saturating_mul(token)))
    }

    fn image_tokens(&self, latent_shape: &[usize]) -> usize {
        let sides = latent_shape.iter().rev().take(2);
        sides.map(|side| side / F::patch_size(&self.transformer)).product()
    }

    fn scheduler_config(&self) -> &Value {
        &self.scheduler_config
    }

    fn sequential_cfg(&self) -> bool {
        self.sequential_cfg
    }

    fn default_size(&self) -> (usize, usize) {
        let side = F::default_side(&self.transformer, self.vae.scale_factor());
        (side, side)
    }

    fn set_checkpointing(&mut self, checkpointing: Checkpointing) {
        *F::checkpointing(&mut self.transformer) = checkpointing;
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
        if let Some((vae, path)) = load_other_vae(F::ARCH, path, F::VAE, options)? {
            (self.vae, self.vae_path) = (vae, path);
        }
        Ok(())
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
