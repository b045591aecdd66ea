//! Chroma as a [`Model`].

use super::text::{CONTEXT, ChromaTextEncoder, LENGTHS};
use crate::checkpointing::Checkpointing;
use crate::error::{EngineError, Result};
use crate::families::conditioning::{Conditioning, Prompt};
use crate::families::model::{Family, Model, ModelWriter, SaveOptions};
use crate::families::options::LoadOptions;
use crate::families::part::{AdapterNames, Part, PartInfo};
use crate::families::part_role::PartRole;
use crate::families::text_source::TextSource;
use crate::families::transformer_folder::{TransformerSource, TransformerWriter, read_saved};
use crate::models::chroma::ChromaTransformer2DModel;
use crate::models::codec::Codec;
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
    block_lists: &["transformer_blocks", "single_transformer_blocks"],
};

/// Chroma1-HD, Chroma1-Base and models with the same tensors.
#[derive(Clone, Debug)]
pub struct ChromaModel {
    pub(super) family: &'static dyn Family,
    pub(super) text: TextSource<ChromaTextEncoder>,
    /// Predicts the velocity.
    pub transformer: ChromaTransformer2DModel,
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
    pub(super) frozen_transformer: Option<ChromaTransformer2DModel>,
    /// Where the transformer was loaded from, for saving it.
    pub(super) source: Arc<TransformerSource>,
    pub(super) dtype: DType,
    pub(super) device: Device,
}

impl ChromaModel {
    /// Tokens of a prompt, with its end and padding: 512. `None` if prompts were encoded before.
    #[must_use]
    pub fn max_sequence_length(&self) -> Option<usize> {
        self.text.encoders().map(|encoder| encoder.max_sequence_length)
    }

    /// Sets the tokens of a prompt. Prompts that were encoded before keep theirs.
    pub fn set_max_sequence_length(&mut self, tokens: usize) {
        if let Some(encoder) = self.text.encoders_mut() {
            encoder.max_sequence_length = tokens;
        }
    }
}

impl Model for ChromaModel {
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
        vec![DENOISER.with(&mut self.transformer)]
    }

    fn encode_prompts(&self, prompts: &[Prompt]) -> Result<Conditioning> {
        self.text.encode_prompts(prompts, &self.device)
    }

    fn predict(&self, latents: &[Tensor], timesteps: &Tensor, conditioning: &Conditioning) -> Result<Vec<Tensor>> {
        let [latents] = latents else {
            return Err(EngineError::Internal("Chroma takes one latent tensor".into()));
        };
        let lengths: Vec<u32> = conditioning.get(LENGTHS)?.to_vec1()?;
        let lengths: Vec<usize> = lengths.into_iter().map(|length| length as usize).collect();
        let context = conditioning.get(CONTEXT)?.to_dtype(self.dtype)?;
        let latents = latents.to_dtype(self.dtype)?;
        let prediction = self.transformer.forward(&latents, timesteps, &context, &lengths)?;
        Ok(vec![prediction.to_dtype(DType::F32)?])
    }

    fn codec(&self) -> &dyn Codec {
        &self.vae
    }

    fn size_multiple(&self) -> usize {
        2 * self.vae.scale_factor()
    }

    fn image_tokens(&self, latent_shape: &[usize]) -> usize {
        let sides = latent_shape.iter().rev().take(2);
        sides.map(|side| side / 2).product()
    }

    fn scheduler_config(&self) -> &Value {
        &self.scheduler_config
    }

    fn sequential_cfg(&self) -> bool {
        self.sequential_cfg
    }

    fn default_size(&self) -> (usize, usize) {
        (1024, 1024)
    }

    fn set_checkpointing(&mut self, checkpointing: Checkpointing) {
        self.transformer.checkpointing = checkpointing;
        if let Some(encoder) = self.text.encoders_mut() {
            encoder.model.checkpointing = checkpointing;
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
