//! A family of models, and what pipelines and trainers see of a model.

use super::adapted_parts::{AdaptedParts, SelectedParts};
use super::conditioning::{Conditioning, ItemSize, Prompt};
use super::options::LoadOptions;
use super::part::Part;
use super::part_role::PartRole;
use crate::checkpointing::Checkpointing;
use crate::error::{EngineError, Result};
use crate::image_adapters::{AdapterTarget, ImageAdapter};
use crate::models::codec::Codec;
use crate::samplers::SamplerParams;
use aitk_common::job::arch::ArchName;
use candle_core::{DType, Device, Tensor, Var};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

/// A family of models: Stable Diffusion XL, FLUX.1. A folder below `families`, and a line in its registry.
pub trait Family: Sync + Debug {
    /// The family's name in configs.
    fn arch(&self) -> ArchName;

    /// Loads a model from a diffusers folder or a single file, whose kind was checked.
    ///
    /// # Errors
    /// When tensors do not match the configs, or a component is missing.
    fn load(&'static self, path: &Path, options: &LoadOptions) -> Result<Box<dyn Model>>;

    /// Loads the text encoders of a model alone. [`Self::load`] loads no text encoders where [`LoadOptions::prompts`] are given.
    ///
    /// # Errors
    /// As [`Self::load`].
    fn load_text_encoders(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn TextEncoders>>;

    /// Loads the selected parts whose layers adapters change, and nothing else of the model. Text encoders that it does not have are left out
    /// and named in the result.
    ///
    /// # Errors
    /// When the denoiser is selected and missing, or tensors do not match the configs.
    fn load_adapted(&self, path: &Path, selected: SelectedParts, options: &LoadOptions) -> Result<AdaptedParts>;

    /// The sampler's parameters from `scheduler_config.json`, with the changes that the family's pipeline makes.
    fn sampler_params(&self, params: SamplerParams) -> SamplerParams {
        params
    }
}

/// How a model follows a guidance scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuidanceKind {
    /// Two predictions, with the prompt and with the negative prompt, are combined.
    ClassifierFree,
    /// The model was distilled: the scale is one of its inputs, or fixed. Negative prompts need another scale
    /// (`true_cfg_scale`).
    Distilled,
}

/// The text encoders of a model. A training that encodes every prompt before it starts loads them without the denoiser, and
/// the denoiser without them.
pub trait TextEncoders: Send + Debug {
    /// Encodes prompts, as [`Model::encode_prompts`].
    ///
    /// # Errors
    /// When a tokenizer or an encoder fails.
    fn encode_prompts(&self, prompts: &[Prompt]) -> Result<Conditioning>;

    /// Their parts, whose layers a LoRA can change.
    fn parts(&mut self) -> Vec<Part<'_>>;

    /// Adds a word to the prompts, as [`Model::add_embedding`].
    ///
    /// # Errors
    /// As [`Model::add_embedding`].
    fn add_embedding(&mut self, trigger: &str, vectors: &[Tensor]) -> Result<()> {
        let _ = vectors;
        Err(EngineError::bad_input(format!(
            "the word `{trigger}`: textual inversions are for the CLIP text encoders of Stable Diffusion and SDXL, and this is another model"
        )))
    }
}

/// A loaded model.
///
/// Pipelines, trainers and processes use only this: a family that implements it can be generated with and trained.
/// Latents are one tensor or several, each [b, channels, …], in float32 and scaled as the codec scales them.
pub trait Model: Send + Debug {
    /// The family by which it was loaded.
    fn family(&self) -> &'static dyn Family;

    /// The device on which it computes.
    fn device(&self) -> &Device;

    /// The dtype of the arithmetic of the denoiser.
    fn dtype(&self) -> DType;

    /// The dtype in which the noise is drawn that an image is made of.
    fn noise_dtype(&self) -> DType {
        self.dtype()
    }

    /// The parts that can be trained, text encoders first, always in the same order.
    fn parts(&mut self) -> Vec<Part<'_>>;

    /// Encodes prompts. Tracked for gradients if a text encoder is trained.
    ///
    /// # Errors
    /// When a tokenizer or an encoder fails.
    fn encode_prompts(&self, prompts: &[Prompt]) -> Result<Conditioning>;

    /// The conditioning of `count` items without a prompt, where no negative prompt is given: the empty prompt, or what
    /// the family uses in its place.
    ///
    /// # Errors
    /// As [`Self::encode_prompts`].
    fn encode_nothing(&self, count: usize) -> Result<Conditioning> {
        self.encode_prompts(&vec![Prompt::default(); count])
    }

    /// The vectors of the first `count` tokens of a text in each text encoder, padded with those of `*`: the initial ones of a
    /// textual inversion. [count, width] each, float32.
    ///
    /// # Errors
    /// When words cannot be added to the family's text encoders, or they are not loaded.
    fn initial_embedding(&self, text: &str, count: usize) -> Result<Vec<Tensor>> {
        let _ = (text, count);
        Err(no_embeddings(self.family().arch()))
    }

    /// Adds a word to the prompts, with its vectors in each text encoder: [vectors, width] each, which may be variables.
    ///
    /// # Errors
    /// As [`Self::initial_embedding`], and when the word is known, or the vectors do not fit.
    fn add_embedding(&mut self, trigger: &str, vectors: &[Tensor]) -> Result<()> {
        let _ = (trigger, vectors);
        Err(no_embeddings(self.family().arch()))
    }

    /// Adds the sizes of the items to their conditioning. Models that are not conditioned on sizes ignore them.
    ///
    /// # Errors
    /// When the number of items differs.
    fn with_sizes(&self, conditioning: Conditioning, sizes: &[ItemSize]) -> Result<Conditioning> {
        let _ = sizes;
        Ok(conditioning)
    }

    /// Predicts what the model is trained to predict (noise, velocity) from noisy latents, in float32, for one timestep
    /// per item, [b], float32.
    ///
    /// # Errors
    /// When shapes do not match.
    fn predict(&self, latents: &[Tensor], timesteps: &Tensor, conditioning: &Conditioning) -> Result<Vec<Tensor>>;

    /// As [`Self::predict`], without the blocks of the denoiser whose numbers are in `skipped` (skip-layer guidance).
    ///
    /// # Errors
    /// As [`Self::predict`], or when the family has no blocks that can be left out.
    fn predict_skipping(
        &self,
        latents: &[Tensor],
        timesteps: &Tensor,
        conditioning: &Conditioning,
        skipped: &[usize],
    ) -> Result<Vec<Tensor>> {
        match skipped {
            [] => self.predict(latents, timesteps, conditioning),
            _ => Err(no_skippable_blocks(self.family().arch())),
        }
    }

    /// The number of blocks that [`Self::predict_skipping`] can leave out.
    fn skippable_blocks(&self) -> usize {
        0
    }

    /// How the model follows a guidance scale.
    fn guidance(&self) -> GuidanceKind {
        GuidanceKind::ClassifierFree
    }

    /// The weight `w` of classifier-free guidance, `negative + w * (positive - negative)`, at this guidance scale. At 1 and less only the
    /// prediction with the prompt is made.
    fn cfg_factor(&self, guidance_scale: f64) -> f64 {
        guidance_scale
    }

    /// Adds the guidance scale to the conditioning, for models that are conditioned on it. `scales`: one for each item, or one for
    /// all.
    ///
    /// # Errors
    /// When there are not as many scales as items, or the device fails.
    fn with_guidance(&self, conditioning: Conditioning, scales: &[f64]) -> Result<Conditioning> {
        let _ = scales;
        Ok(conditioning)
    }

    /// Whether images are generated from a control image (FLUX.1 Kontext).
    fn takes_control(&self) -> bool {
        false
    }

    /// Adds the latents of the control images, one for each item, to the conditioning.
    ///
    /// # Errors
    /// When the model takes no control image.
    fn with_control(&self, conditioning: Conditioning, latents: &[Tensor]) -> Result<Conditioning> {
        let _ = (conditioning, latents);
        Err(no_control(self.family().arch()))
    }

    /// Features of the text that the denoiser reads, where learned tokens can follow it (FLUX.1). `None`: they cannot.
    fn decorator_width(&self) -> Option<usize> {
        None
    }

    /// Lets learned tokens [tokens, features], which may be a variable, follow the text of every prompt.
    ///
    /// # Errors
    /// When the family takes none.
    fn set_decorator(&mut self, tokens: Tensor) -> Result<()> {
        let _ = tokens;
        Err(no_decorator(self.family().arch()))
    }

    /// Whether learned tokens follow the text.
    fn has_decorator(&self) -> bool {
        false
    }

    /// The conditioning with the learned tokens after the text of each item, or with as many zeros, as ai-toolkit has them in the
    /// unconditional prediction of classifier-free guidance. Tracked for gradients if the tokens are a variable. Without such tokens it is
    /// unchanged.
    ///
    /// # Errors
    /// When the shapes do not match.
    fn with_decorator(&self, conditioning: Conditioning, is_unconditional: bool) -> Result<Conditioning> {
        let _ = is_unconditional;
        Ok(conditioning)
    }

    /// The U-Net that an adapter of images can be made for.
    ///
    /// # Errors
    /// When the family takes none.
    fn image_adapter_target(&self) -> Result<AdapterTarget<'_>> {
        Err(no_image_adapter(self.family().arch()))
    }

    /// Lets an adapter condition the predictions on images. A model has one.
    ///
    /// # Errors
    /// When the family takes none.
    fn set_image_adapter(&mut self, adapter: Arc<dyn ImageAdapter>) -> Result<()> {
        let _ = adapter;
        Err(no_image_adapter(self.family().arch()))
    }

    /// The adapter that conditions the predictions on images.
    fn image_adapter(&self) -> Option<&dyn ImageAdapter> {
        None
    }

    /// Adds the control images of an adapter to the conditioning, one for each item: [b, 3, height, width] from 0 to 1, float32. `scale`:
    /// the strength of the adapter. A prediction computes the features of the images, with gradients.
    ///
    /// # Errors
    /// When the model has no adapter.
    fn with_adapter_images(&self, conditioning: Conditioning, images: &Tensor, scale: f64) -> Result<Conditioning> {
        let _ = (conditioning, images, scale);
        Err(no_image_adapter(self.family().arch()))
    }

    /// The conditioning with the features of the control images of an adapter in place of the images, for several predictions without
    /// gradients. Without such images it is unchanged.
    ///
    /// # Errors
    /// When the size of the images does not fit.
    fn with_encoded_adapter_images(&self, conditioning: Conditioning) -> Result<Conditioning> {
        Ok(conditioning)
    }

    /// Removes the guidance scale from the conditioning: a model with a guidance embedding then predicts without it, as one
    /// that never had it (`train.bypass_guidance_embedding`).
    fn without_guidance(&self, conditioning: Conditioning) -> Conditioning {
        conditioning
    }

    /// Converts between media and latents.
    fn codec(&self) -> &dyn Codec;

    /// The sides of images are multiples of this many pixels.
    fn size_multiple(&self) -> usize {
        self.codec().pixels_per_latent()
    }

    /// Width and height in pixels of the largest images for which the model has positions. `None`: it has them for images of any size.
    fn max_size(&self) -> Option<(usize, usize)> {
        None
    }

    /// Tokens that the model makes of latents [b, channels, h, w], which dynamic shifts of noise levels follow; 0 if there
    /// are none.
    fn image_tokens(&self, latent_shape: &[usize]) -> usize {
        let _ = latent_shape;
        0
    }

    /// `scheduler_config.json`: the noise schedule and the defaults of samplers.
    fn scheduler_config(&self) -> &Value;

    /// Whether classifier-free guidance runs its two predictions one after the other, with half the memory.
    fn sequential_cfg(&self) -> bool;

    /// Width and height in pixels that the model was trained on.
    fn default_size(&self) -> (usize, usize);

    /// Sets how the parts that can be trained run their blocks.
    fn set_checkpointing(&mut self, checkpointing: Checkpointing);

    /// The model's own tensors that are trained, with part and name (`unet.conv_in.weight`), sorted.
    fn trained(&self) -> &[(String, Var)];

    /// The model for sampling during training: it shares the trained weights, but saves nothing for a backward pass.
    /// `None` if no weights of the model itself are trained.
    fn detach(&self) -> Option<Box<dyn Model>>;

    /// The parts whose files contain quantised weights, with the formats.
    fn quantised_in_file(&self) -> &[(PartRole, Vec<&'static str>)];

    /// Replaces the codec by that of a folder or a file (`model.vae_path`).
    ///
    /// # Errors
    /// When it cannot be loaded.
    fn replace_codec(&mut self, path: &Path, options: &LoadOptions) -> Result<()>;

    /// The file or folder of the codec. `None`: it is that of the whole model.
    fn codec_path(&self) -> Option<&Path> {
        None
    }

    /// Loads the trained tensors from a saved model.
    ///
    /// # Errors
    /// When it cannot be read, or a tensor is missing or has another shape. Then no tensor is changed.
    fn load_trained(&self, path: &Path) -> Result<()> {
        let (names, vars): (Vec<_>, Vec<_>) = self.trained().iter().cloned().unzip();
        let like: Vec<_> = names
            .into_iter()
            .zip(vars.iter().map(Var::as_detached_tensor))
            .collect();
        self.read_saved(path, &like, &mut |index, tensor| {
            Ok(vars[index].set(&tensor.contiguous()?)?)
        })
    }

    /// Reads tensors of a saved model by part and name, as those of [`Self::trained`]. Each is passed to `found` with its index, in the
    /// dtype and on the device of the tensor in `like`.
    ///
    /// # Errors
    /// The first error of `found`; when it cannot be read, or a tensor is missing or has another shape than in `like`. Then `found` was
    /// not called.
    fn read_saved(
        &self,
        path: &Path,
        like: &[(String, Tensor)],
        found: &mut dyn FnMut(usize, Tensor) -> Result<()>,
    ) -> Result<()>;

    /// Checks that the model can be saved as a single file. Call this before training.
    ///
    /// # Errors
    /// When there are no names for its tensors.
    fn check_single_file(&self) -> Result<()>;

    /// Prepares saving the whole model: `trained` (by the names of [`Self::trained`]) and everything else from where the
    /// model was loaded.
    ///
    /// # Errors
    /// When `trained` has other tensors than the model, or the dtype cannot be saved.
    fn writer<'a>(
        &'a self,
        trained: &'a BTreeMap<String, Tensor>,
        options: SaveOptions,
    ) -> Result<Box<dyn ModelWriter + 'a>>;
}

/// The error of a model whose text encoders get no words.
fn no_embeddings(arch: ArchName) -> EngineError {
    EngineError::bad_input(format!(
        "embedding: words are trained for the CLIP text encoders of Stable Diffusion and SDXL, and this is `arch: {arch}`"
    ))
}

/// The error of a model whose predictions need all blocks.
pub(super) fn no_skippable_blocks(arch: ArchName) -> EngineError {
    EngineError::bad_input(format!(
        "skip-layer guidance leaves out blocks of the transformer of Stable Diffusion 3.5; `{arch}` has none that can be left out"
    ))
}

/// The error of a model whose text no learned tokens follow.
pub fn no_decorator(arch: ArchName) -> EngineError {
    EngineError::bad_input(format!(
        "decorator: its tokens follow the text of FLUX.1 (`arch: flux`), and this is `arch: {arch}`"
    ))
}

/// The error of a model that takes no control image.
pub(super) fn no_control(arch: ArchName) -> EngineError {
    EngineError::bad_input(format!(
        "`arch: {arch}` takes no control image: remove `--ctrl_img`, or use FLUX.1 Kontext (`arch: flux_kontext`)"
    ))
}

/// The error of a model that takes no adapter of images.
fn no_image_adapter(arch: ArchName) -> EngineError {
    EngineError::bad_input(format!(
        "adapter: T2I-Adapters and ControlNets are for the U-Nets of Stable Diffusion and SDXL, and this is `arch: {arch}`"
    ))
}

/// How a model is saved.
#[derive(Clone, Debug)]
pub struct SaveOptions {
    /// f32, f16 or bf16.
    pub dtype: DType,
    /// Metadata of the file or folder.
    pub metadata: BTreeMap<String, String>,
    /// The scheduler's config gets the prediction type `v_prediction`, whatever that of the source is.
    pub v_prediction: bool,
}

/// Writes a whole model.
pub trait ModelWriter {
    /// Writes a single safetensors file with the metadata, in the layout of the family's original release.
    ///
    /// # Errors
    /// The error of `out`; or an [`EngineError`](crate::error::EngineError) as [`std::io::Error::other`] when the model
    /// has no such layout ([`Model::check_single_file`]) or its files cannot be read.
    fn write_file(&self, out: &mut dyn Write) -> std::io::Result<()>;

    /// Writes a diffusers folder, into a folder that is empty or does not exist. This is not atomic: write to a
    /// temporary folder and rename it. Every file is synced.
    ///
    /// # Errors
    /// When a file cannot be written, or a file of the source cannot be read.
    fn write_folder(&self, folder: &Path) -> Result<()>;
}
