//! Stable Diffusion as a [`Model`].

use super::control_images;
use super::load::SIZE_NUMBERS;
use super::save::FullModel;
use super::text::{CONTEXT, POOLED, add_embedding, encode, initial_embedding, parts};
use super::variant::TextOutput;
use super::{SdModel, TextEncoder};
use crate::checkpointing::Checkpointing;
use crate::error::{EngineError, Result};
use crate::families::conditioning::{Conditioning, ItemSize, Prompt};
use crate::families::model::{Family, Model, ModelWriter, SaveOptions};
use crate::families::options::LoadOptions;
use crate::families::part::{AdapterNames, Part, PartInfo};
use crate::families::part_role::PartRole;
use crate::families::text_embeddings::look_up;
use crate::image_adapters::{AdapterTarget, ImageAdapter};
use crate::models::codec::Codec;
use crate::models::unet::{AdditionalConditions, UNetInputs, UNetResiduals};
use candle_core::{DType, Device, Tensor, Var};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// The U-Net, to whose layers adapters are added.
pub(super) const UNET: PartInfo = PartInfo {
    id: "unet",
    role: PartRole::Denoiser,
    lora_prefix: "lora_unet",
    lora_names: AdapterNames::Kohya,
    block_lists: &[],
};
/// The sizes in the conditioning.
const TIME_IDS: &str = "time_ids";

impl SdModel {
    /// The model for sampling during training, see [`Model::detach`].
    #[must_use]
    pub fn detached(&self) -> Option<Self> {
        let trains_text = |encoder: &TextEncoder| encoder.frozen.is_some() || encoder.model.trains_vectors();
        let frozen_text = self.text_encoders.iter().any(trains_text);
        if !frozen_text && self.frozen_unet.is_none() && self.image_adapter.is_none() {
            return None;
        }
        let mut model = self.clone();
        model.image_adapter = self.image_adapter.as_ref().map(|adapter| adapter.detached());
        for encoder in &mut model.text_encoders {
            if let Some(frozen) = &encoder.frozen {
                encoder.model = frozen.clone();
            }
            encoder.model.detach_vectors();
        }
        if let Some(frozen) = &self.frozen_unet {
            model.unet = frozen.clone();
        }
        Some(model)
    }
}

impl Model for SdModel {
    fn family(&self) -> &'static dyn Family {
        self.variant.family
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn parts(&mut self) -> Vec<Part<'_>> {
        let mut parts = parts(&mut self.text_encoders);
        parts.push(UNET.with(&mut self.unet));
        parts
    }

    fn encode_prompts(&self, prompts: &[Prompt]) -> Result<Conditioning> {
        match &self.prompts {
            Some(encoded) => look_up(&**encoded, prompts, &self.device),
            None => encode(self.variant, &self.text_encoders, &self.device, prompts),
        }
    }

    fn encode_nothing(&self, count: usize) -> Result<Conditioning> {
        let empty = self.encode_prompts(&vec![Prompt::default(); count])?;
        if self.variant.text_output == TextOutput::LastHidden || !self.source.zeros_for_no_prompt() {
            return Ok(empty);
        }
        let zeros = |name| empty.get(name)?.zeros_like().map_err(EngineError::from);
        Ok(Conditioning::default()
            .with(CONTEXT, zeros(CONTEXT)?)
            .with(POOLED, zeros(POOLED)?))
    }

    fn initial_embedding(&self, text: &str, count: usize) -> Result<Vec<Tensor>> {
        match &self.prompts {
            Some(_) => Err(text_encoders_needed()),
            None => initial_embedding(&self.text_encoders, text, count),
        }
    }

    fn add_embedding(&mut self, trigger: &str, vectors: &[Tensor]) -> Result<()> {
        match &self.prompts {
            Some(_) => Err(text_encoders_needed()),
            None => add_embedding(&mut self.text_encoders, trigger, vectors),
        }
    }

    fn with_sizes(&self, conditioning: Conditioning, sizes: &[ItemSize]) -> Result<Conditioning> {
        if self.variant.text_output == TextOutput::LastHidden {
            return Ok(conditioning);
        }
        let numbers = sizes.iter().flat_map(|size| {
            let pairs = [size.original, size.crop, size.target];
            pairs
                .into_iter()
                .flat_map(|(vertical, horizontal)| [vertical as f32, horizontal as f32])
        });
        let time_ids = Tensor::from_vec(numbers.collect(), (sizes.len(), SIZE_NUMBERS), &self.device)?;
        Ok(conditioning.with(TIME_IDS, time_ids))
    }

    fn predict(&self, latents: &[Tensor], timesteps: &Tensor, conditioning: &Conditioning) -> Result<Vec<Tensor>> {
        let [latents] = latents else {
            return Err(EngineError::Internal("a U-Net takes one latent tensor".into()));
        };
        let sample = latents.to_dtype(self.dtype)?;
        let context = conditioning.get(CONTEXT)?.to_dtype(self.dtype)?;
        let pooled = match self.variant.text_output {
            TextOutput::LastHidden => None,
            TextOutput::PenultimateAndPooled => Some(conditioning.get(POOLED)?.to_dtype(self.dtype)?),
        };
        let conditions = match &pooled {
            Some(pooled) => Some(AdditionalConditions {
                pooled,
                time_ids: conditioning.get(TIME_IDS)?,
            }),
            None => None,
        };
        let inputs = UNetInputs {
            sample: &sample,
            timesteps,
            context: &context,
            conditions,
        };
        let residuals = match &self.image_adapter {
            Some(adapter) => control_images::residuals(&**adapter, conditioning, &inputs)?,
            None => UNetResiduals::default(),
        };
        let prediction = self.unet.forward_adapted(&inputs, &residuals)?;
        Ok(vec![prediction.to_dtype(DType::F32)?])
    }

    fn image_adapter_target(&self) -> Result<AdapterTarget<'_>> {
        let (tensors, config) = self.source.denoiser()?;
        Ok(AdapterTarget {
            unet: self.unet.config(),
            config_json: config,
            tensors,
            pixels_per_latent: self.vae.scale_factor(),
            device: &self.device,
        })
    }

    fn set_image_adapter(&mut self, adapter: Arc<dyn ImageAdapter>) -> Result<()> {
        self.image_adapter = Some(adapter);
        Ok(())
    }

    fn image_adapter(&self) -> Option<&dyn ImageAdapter> {
        self.image_adapter.as_deref()
    }

    fn with_adapter_images(&self, conditioning: Conditioning, images: &Tensor, scale: f64) -> Result<Conditioning> {
        match self.image_adapter {
            Some(_) => control_images::with_images(conditioning, images, scale),
            None => Err(EngineError::Internal(
                "control images for a model without an adapter".into(),
            )),
        }
    }

    fn with_encoded_adapter_images(&self, conditioning: Conditioning) -> Result<Conditioning> {
        match &self.image_adapter {
            Some(adapter) => control_images::encoded(&**adapter, conditioning),
            None => Ok(conditioning),
        }
    }

    fn size_multiple(&self) -> usize {
        let of_adapter = self.image_adapter.as_ref().map_or(1, |adapter| adapter.size_multiple());
        // Both are powers of 2, so that the larger is a multiple of the smaller.
        self.vae.pixels_per_latent().max(of_adapter)
    }

    fn codec(&self) -> &dyn Codec {
        &self.vae
    }

    fn scheduler_config(&self) -> &Value {
        &self.scheduler_config
    }

    fn sequential_cfg(&self) -> bool {
        self.sequential_cfg
    }

    fn default_size(&self) -> (usize, usize) {
        let (height, width) = self.unet.config().sample_extent();
        let scale = self.vae.scale_factor();
        (width * scale, height * scale)
    }

    fn set_checkpointing(&mut self, checkpointing: Checkpointing) {
        self.unet.checkpointing = checkpointing;
        for encoder in &mut self.text_encoders {
            encoder.model.checkpointing = checkpointing;
        }
    }

    fn trained(&self) -> &[(String, Var)] {
        &self.trained
    }

    fn detach(&self) -> Option<Box<dyn Model>> {
        Some(Box::new(self.detached()?))
    }

    fn quantised_in_file(&self) -> &[(PartRole, Vec<&'static str>)] {
        &self.quantised_in_file
    }

    fn replace_codec(&mut self, folder: &Path, options: &LoadOptions) -> Result<()> {
        self.replace_vae(folder, options)
    }

    fn read_saved(
        &self,
        path: &Path,
        like: &[(String, Tensor)],
        found: &mut dyn FnMut(usize, Tensor) -> Result<()>,
    ) -> Result<()> {
        self.read_saved_tensors(path, like, found)
    }

    fn check_single_file(&self) -> Result<()> {
        self.source.check_single_file()
    }

    fn writer<'a>(
        &'a self,
        trained: &'a BTreeMap<String, Tensor>,
        options: SaveOptions,
    ) -> Result<Box<dyn ModelWriter + 'a>> {
        Ok(Box::new(FullModel::new(&self.source, trained, options)?))
    }
}

/// The error of a word for prompts that were encoded before.
fn text_encoders_needed() -> EngineError {
    EngineError::bad_input(
        "embedding: the word needs the text encoders, and they are not loaded: all prompts were encoded before",
    )
}
