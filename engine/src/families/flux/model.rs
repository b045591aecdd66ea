//! FLUX.1 as a [`Model`].

use super::text::{CONTEXT, FluxTextEncoders, LENGTHS, POOLED};
use crate::checkpointing::Checkpointing;
use crate::error::{EngineError, Result};
use crate::families::conditioning::{Conditioning, Prompt};
use crate::families::model::{Family, GuidanceKind, Model, ModelWriter, SaveOptions, no_control};
use crate::families::options::LoadOptions;
use crate::families::part::{AdapterNames, Part, PartInfo};
use crate::families::part_role::PartRole;
use crate::families::text_source::TextSource;
use crate::families::transformer_folder::{TransformerSource, TransformerWriter, read_saved};
use crate::models::codec::Codec;
use crate::models::flux::{FluxConditions, FluxTransformer2DModel};
use crate::models::vae::AutoencoderKl;
use aitk_common::job::arch::ArchName;
use candle_core::{DType, Device, Tensor, Var};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The guidance scale in the conditioning.
const GUIDANCE: &str = "guidance";
/// The transformer, to whose layers adapters are added.
pub(super) const DENOISER: PartInfo = PartInfo {
    id: "transformer",
    role: PartRole::Denoiser,
    lora_prefix: "transformer",
    lora_names: AdapterNames::Peft,
    block_lists: &["transformer_blocks", "single_transformer_blocks"],
};
/// The latents of the control image in the conditioning.
const CONTROL: &str = "control";
/// The guidance scale where none is given: training, as in ai-toolkit.
const PLAIN_GUIDANCE: f64 = 1.0;

/// FLUX.1, or FLUX.1 Kontext, which has the same tensors and takes a control image.
#[derive(Clone, Debug)]
pub struct FluxModel {
    pub(super) family: &'static dyn Family,
    pub(super) text: TextSource<FluxTextEncoders>,
    /// Predicts the velocity.
    pub transformer: FluxTransformer2DModel,
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
    pub(super) frozen_transformer: Option<FluxTransformer2DModel>,
    /// Where the transformer was loaded from, for saving it.
    pub(super) source: Arc<TransformerSource>,
    pub(super) dtype: DType,
    pub(super) device: Device,
}

impl FluxModel {
    /// How many tokens of a prompt T5 gets: 512 for dev, 256 for schnell. `None` if prompts were encoded before.
    #[must_use]
    pub fn max_sequence_length(&self) -> Option<usize> {
        self.text.encoders().map(|encoders| encoders.max_sequence_length)
    }

    /// Sets how many tokens of a prompt T5 gets. Prompts that were encoded before keep theirs.
    pub fn set_max_sequence_length(&mut self, tokens: usize) {
        if let Some(encoders) = self.text.encoders_mut() {
            encoders.max_sequence_length = tokens;
        }
    }
}

impl Model for FluxModel {
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
        self.with_guidance(self.text.encode_prompts(prompts, &self.device)?, &[PLAIN_GUIDANCE])
    }

    fn predict(&self, latents: &[Tensor], timesteps: &Tensor, conditioning: &Conditioning) -> Result<Vec<Tensor>> {
        let [latents] = latents else {
            return Err(EngineError::Internal("FLUX.1 takes one latent tensor".into()));
        };
        let guidance = conditioning.find(GUIDANCE);
        let guidance = guidance.map(|scale| scale.to_dtype(DType::F32)).transpose()?;
        let control = conditioning.find(CONTROL);
        let control = control.map(|latents| latents.to_dtype(self.dtype)).transpose()?;
        let lengths = conditioning.find(LENGTHS).map(Tensor::to_vec1::<u32>).transpose()?;
        let lengths: Option<Vec<usize>> =
            lengths.map(|lengths| lengths.into_iter().map(|length| length as usize).collect());
        let conditions = FluxConditions {
            text: &conditioning.get(CONTEXT)?.to_dtype(self.dtype)?,
            text_lengths: lengths.as_deref(),
            pooled: &conditioning.get(POOLED)?.to_dtype(self.dtype)?,
            guidance: guidance.as_ref(),
            control: control.as_ref(),
        };
        let prediction = self
            .transformer
            .forward(&latents.to_dtype(self.dtype)?, timesteps, &conditions)?;
        Ok(vec![prediction.to_dtype(DType::F32)?])
    }

    fn takes_control(&self) -> bool {
        self.family.arch() == ArchName::FluxKontext
    }

    fn with_control(&self, conditioning: Conditioning, latents: &[Tensor]) -> Result<Conditioning> {
        match (self.takes_control(), latents) {
            (true, [latents]) => Ok(conditioning.with(CONTROL, latents.clone())),
            (true, _) => Err(EngineError::Internal(
                "FLUX.1 Kontext takes one latent tensor of a control image".into(),
            )),
            (false, _) => Err(no_control(self.family.arch())),
        }
    }

    fn guidance(&self) -> GuidanceKind {
        GuidanceKind::Distilled
    }

    fn with_guidance(&self, conditioning: Conditioning, scales: &[f64]) -> Result<Conditioning> {
        let count = conditioning.batch();
        let scales: Vec<f32> = match scales {
            [scale] => vec![*scale as f32; count],
            scales => scales.iter().map(|scale| *scale as f32).collect(),
        };
        Ok(conditioning.with(GUIDANCE, Tensor::from_vec(scales, count, &self.device)?))
    }

    fn without_guidance(&self, conditioning: Conditioning) -> Conditioning {
        conditioning.without(GUIDANCE)
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
        if let Some(encoders) = self.text.encoders_mut() {
            encoders.clip.checkpointing = checkpointing;
            encoders.t5.checkpointing = checkpointing;
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
