//! The loss on fixed images with fixed noise (`train.validation_config`), as ai-toolkit measures it
//! (`jobs/process/BaseSDTrainProcess.py`): how well the model predicts images that it is not trained on. The training does not depend on
//! it.

use super::super::context::Context;
use crate::data::plan_bucket;
use crate::error::Result;
use crate::families::ItemSize;
use crate::image_io::{self, Filter};
use crate::models::codec::Codec;
use crate::rng::TorchGenerator;
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::validation::ValidationConfig;
use candle_core::{DType, Device, Tensor};

/// The seed of the codec's samples, and of the noise of the first image; each image's is one higher.
const SEED: u64 = 42;

/// The images on which the loss is measured.
pub(super) struct Validation {
    pub(super) images: Vec<Image>,
    /// Noise levels, from 0 to 1.
    pub(super) levels: Vec<f64>,
    /// Steps between measurements; 0: after the first and the last step alone.
    every: u64,
}

/// One of them.
pub(super) struct Image {
    pub(super) prompt: String,
    pub(super) size: ItemSize,
    /// [3, h, w] from -1 to 1; none after they are encoded.
    pixels: Option<Tensor>,
    /// Of one item, float32 on the CPU.
    pub(super) latents: Vec<Tensor>,
    /// Noise of the shapes of the latents.
    pub(super) noise: Vec<Tensor>,
}

/// The images that a config measures the loss on, if there are some.
pub(super) fn config(process: &TrainerProcess) -> Option<&ValidationConfig> {
    let config = process.train.validation_config.as_ref();
    config.filter(|config| !config.validation_items.is_empty())
}

/// The prompts of the images.
pub(super) fn prompts(process: &TrainerProcess) -> impl Iterator<Item = String> + '_ {
    let items = config(process).into_iter().flat_map(|config| &config.validation_items);
    let trigger = process.sample_trigger();
    items.map(move |item| match trigger {
        Some(trigger) => item.prompt.replace("[trigger]", trigger).replace("[name]", trigger),
        None => item.prompt.clone(),
    })
}

impl Validation {
    /// Reads the images, scaled to the size of their bucket. `None`: the config has none.
    ///
    /// # Errors
    /// When an image is missing or damaged.
    pub(super) fn open(process: &TrainerProcess, cx: &Context<'_>) -> Result<Option<Self>> {
        let Some(config) = config(process) else {
            return Ok(None);
        };
        let multiple = process.model.arch.name.bucket_divisibility();
        let mut images = Vec::new();
        for (item, prompt) in config.validation_items.iter().zip(prompts(process)) {
            let image = image_io::open_rgb(&cx.local_path(&item.image_path)?)?;
            let (width, height) = plan_bucket(image.width(), image.height(), config.resolution, multiple, false).bucket;
            let image = match image.dimensions() == (width, height) {
                true => image,
                false => image_io::resize(&image, width, height, Filter::Bicubic),
            };
            images.push(Image {
                prompt,
                size: ItemSize::whole(width, height),
                pixels: Some(image_io::to_tensor(&image, &Device::Cpu)?),
                latents: Vec::new(),
                noise: Vec::new(),
            });
        }
        Ok(Some(Self {
            images,
            levels: config.validation_sigmas.clone(),
            every: config.validate_every_n_steps,
        }))
    }

    /// Encodes the images and draws their noise.
    ///
    /// # Errors
    /// When the codec fails.
    pub(super) fn encode(&mut self, codec: &dyn Codec) -> Result<()> {
        let mut sampled = TorchGenerator::manual_seed(SEED);
        for (seed, image) in (SEED..).zip(&mut self.images) {
            let Some(pixels) = image.pixels.take() else { continue };
            let latents = codec.encode(&pixels.unsqueeze(0)?, &mut |shape| draw(&mut sampled, shape))?;
            let mut generator = TorchGenerator::manual_seed(seed);
            for latents in latents {
                let latents = latents.detach().to_dtype(DType::F32)?.to_device(&Device::Cpu)?;
                image.noise.push(draw(&mut generator, latents.dims())?);
                image.latents.push(latents);
            }
        }
        Ok(())
    }

    /// Whether the loss is measured after this many steps of `steps`.
    pub(super) fn is_due(&self, done: u64, steps: u64) -> bool {
        done == 1 || done == steps || (self.every > 0 && done.is_multiple_of(self.every))
    }
}

fn draw(generator: &mut TorchGenerator, shape: &[usize]) -> Result<Tensor> {
    let noise = generator.randn(shape.iter().product());
    Ok(Tensor::from_vec(noise, shape, &Device::Cpu)?)
}
