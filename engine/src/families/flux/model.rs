//! FLUX.1 as a [`Model`].

use crate::error::{EngineError, Result};
use crate::families::conditioning::{Conditioning, Prompt};
use crate::families::model::{Family, GuidanceKind, Model, ModelWriter, Part, PartRole, SaveOptions};
use crate::families::options::LoadOptions;
use crate::models::clip::{ClipTextModel, ClipTokenizer};
use crate::models::codec::Codec;
use crate::models::flux::{FluxConditions, FluxTransformer2DModel};
use crate::models::t5::{T5EncoderModel, T5Tokenizer};
use crate::models::vae::AutoencoderKl;
use crate::residency::Residency;
use candle_core::{DType, Device, Tensor, Var};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// The names in the conditioning: the encoded text (T5), the pooled text (CLIP), and the guidance scale.
const CONTEXT: &str = "context";
const POOLED: &str = "pooled";
const GUIDANCE: &str = "guidance";
/// The guidance scale where none is given: training, as in ai-toolkit.
const PLAIN_GUIDANCE: f64 = 1.0;

/// FLUX.1.
#[derive(Clone, Debug)]
pub struct FluxModel {
    pub(super) family: &'static dyn Family,
    pub(super) clip_tokenizer: ClipTokenizer,
    pub(super) clip: ClipTextModel,
    pub(super) t5_tokenizer: T5Tokenizer,
    pub(super) t5: T5EncoderModel,
    /// Predicts the velocity.
    pub transformer: FluxTransformer2DModel,
    /// Encodes images to latents and decodes them.
    pub vae: AutoencoderKl,
    /// `scheduler_config.json`.
    pub scheduler_config: Value,
    /// Tokens of a prompt for T5: 512 for dev, 256 for schnell.
    pub max_sequence_length: usize,
    pub(super) sequential_cfg: bool,
    pub(super) quantised_in_file: Vec<(PartRole, Vec<&'static str>)>,
    pub(super) dtype: DType,
    pub(super) device: Device,
}

/// Nothing of the model is trained, so nothing is saved or resumed.
fn not_saved() -> EngineError {
    EngineError::Unsupported("this release generates with FLUX.1; it does not save the whole model yet".into())
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
        vec![
            Part {
                id: "text_encoder",
                role: PartRole::TextEncoder,
                lora_prefix: "lora_te1",
                layers: &mut self.clip,
            },
            Part {
                id: "transformer",
                role: PartRole::Denoiser,
                lora_prefix: "lora_transformer",
                layers: &mut self.transformer,
            },
        ]
    }

    fn encode_prompts(&self, prompts: &[Prompt]) -> Result<Conditioning> {
        let first: Vec<&str> = prompts.iter().map(|prompt| prompt.text.as_str()).collect();
        let second: Vec<&str> = prompts
            .iter()
            .map(|prompt| prompt.text_2.as_deref().unwrap_or(&prompt.text))
            .collect();
        let clip_ids = self.clip_tokenizer.encode(&first)?.to_device(&self.device)?;
        let t5_ids = self.t5_tokenizer.encode(&second, self.max_sequence_length)?;
        let conditioning = Conditioning::default()
            .with(CONTEXT, self.t5.forward(&t5_ids.to_device(&self.device)?)?)
            .with(POOLED, self.clip.pooled(&clip_ids)?);
        self.with_guidance(conditioning, PLAIN_GUIDANCE)
    }

    fn predict(&self, latents: &[Tensor], timesteps: &Tensor, conditioning: &Conditioning) -> Result<Vec<Tensor>> {
        let [latents] = latents else {
            return Err(EngineError::Internal("FLUX.1 takes one latent tensor".into()));
        };
        let conditions = FluxConditions {
            text: &conditioning.get(CONTEXT)?.to_dtype(self.dtype)?,
            pooled: &conditioning.get(POOLED)?.to_dtype(self.dtype)?,
            guidance: &conditioning.get(GUIDANCE)?.to_dtype(DType::F32)?,
        };
        let prediction = self
            .transformer
            .forward(&latents.to_dtype(self.dtype)?, timesteps, &conditions)?;
        Ok(vec![prediction.to_dtype(DType::F32)?])
    }

    fn guidance(&self) -> GuidanceKind {
        GuidanceKind::Distilled
    }

    fn with_guidance(&self, conditioning: Conditioning, scale: f64) -> Result<Conditioning> {
        let count = conditioning.batch();
        Ok(conditioning.with(GUIDANCE, Tensor::full(scale as f32, count, &self.device)?))
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

    fn set_residency(&mut self, residency: Residency) {
        self.transformer.residency = residency;
        self.clip.residency = residency;
        self.t5.residency = residency;
    }

    fn trained(&self) -> &[(String, Var)] {
        &[]
    }

    fn detach(&self) -> Option<Box<dyn Model>> {
        None
    }

    fn quantised_in_file(&self) -> &[(PartRole, Vec<&'static str>)] {
        &self.quantised_in_file
    }

    fn replace_codec(&mut self, folder: &Path, options: &LoadOptions) -> Result<()> {
        self.replace_vae(folder, options)
    }

    fn load_trained(&self, _: &Path) -> Result<()> {
        Err(not_saved())
    }

    fn check_single_file(&self) -> Result<()> {
        Err(not_saved())
    }

    fn writer<'a>(&'a self, _: &'a BTreeMap<String, Tensor>, _: SaveOptions) -> Result<Box<dyn ModelWriter + 'a>> {
        Err(not_saved())
    }
}
