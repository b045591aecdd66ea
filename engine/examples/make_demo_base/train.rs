//! Trains the models from scratch: first the autoencoder, then text encoder and U-Net together on its latents.

use super::files::{read_config, write_configs, write_weights};
use super::shapes::{ImageGenerator, SIZE};
use super::{Fallible, log};
use aitk_engine::autograd::record;
use aitk_engine::models::clip::{ClipTextModel, ClipTokenizer};
use aitk_engine::models::unet::UNet2DConditionModel;
use aitk_engine::models::vae::AutoencoderKl;
use aitk_engine::optim::{Adam, AdamParams, Grads, Optimizer, Param, Schedule, ScheduleParams, clip_grad_norm};
use aitk_engine::rng::TorchGenerator;
use aitk_engine::samplers::{NoiseSchedule, SamplerParams};
use aitk_engine::weights::Weights;
use candle_core::{DType, Device, Tensor};
use serde_json::json;
use std::path::Path;
use std::time::Instant;

const CPU: Device = Device::Cpu;

/// AdamW with its learning rate schedule, and the EMA of the weights, which is saved at the end.
struct Trainer {
    params: Vec<Param>,
    optimizer: Adam,
    schedule: Schedule,
    ema: Vec<Tensor>,
    step: u64,
    started: Instant,
}

impl Trainer {
    fn new(params: Vec<Param>, lr: f64, steps: u64) -> Fallible<Self> {
        let options = json!({"num_warmup_steps": 60});
        let options = options.as_object().cloned().unwrap_or_default();
        let schedule = Schedule::new(ScheduleParams {
            name: "cosine",
            params: &options,
            lr,
            steps,
        })?;
        let optimizer = Adam::new(params.clone(), AdamParams::new(true))?;
        let ema = params
            .iter()
            .map(|p| p.var.as_tensor().detach().copy())
            .collect::<Result<_, _>>()?;
        Ok(Self {
            params,
            optimizer,
            schedule,
            ema,
            step: 0,
            started: Instant::now(),
        })
    }

    /// Makes one training step. `name`: the name of the stage in the log.
    fn train_step(&mut self, name: &str, loss: impl FnOnce() -> Fallible<Tensor>) -> Fallible<()> {
        let (loss, tape) = record(loss)?;
        let store = tape.backward(&loss)?;
        let mut grads: Grads = self.params.iter().map(|p| store.get(&p.var).cloned()).collect();
        clip_grad_norm(&mut grads, 1.0)?;
        self.optimizer.step(&grads, self.schedule.lr_at(self.step))?;
        self.step += 1;
        // The decay grows with the steps, so that the EMA forgets the first weights.
        let decay = (self.step as f64 / (self.step as f64 + 20.0)).min(0.998);
        for (ema, param) in self.ema.iter_mut().zip(&self.params) {
            *ema = ((&*ema * decay)? + (param.var.as_tensor().detach() * (1.0 - decay))?)?;
        }
        if self.step.is_multiple_of(50) {
            let seconds = self.started.elapsed().as_secs_f64();
            log(&format!(
                "{name} step {} loss {:.5} {seconds:.0} s",
                self.step,
                loss.to_scalar::<f32>()?
            ));
        }
        Ok(())
    }

    /// The EMA weights whose names begin with `prefix`, with the prefix removed.
    fn ema_weights(&self, prefix: &str) -> Vec<(String, Tensor)> {
        let pairs = self.params.iter().zip(&self.ema);
        pairs
            .filter_map(|(p, t)| Some((p.name.strip_prefix(prefix)?.to_owned(), t.clone())))
            .collect()
    }
}

fn params(weights: &Weights, prefix: &str) -> Vec<Param> {
    weights
        .vars()
        .into_iter()
        .map(|(name, var)| Param {
            name: format!("{prefix}{name}"),
            var,
        })
        .collect()
}

/// Converts images with values 0 ..= 1 to one tensor [b, 3, SIZE, SIZE] with values -1 ..= 1.
fn to_batch(images: Vec<Vec<f32>>) -> Fallible<Tensor> {
    let count = images.len();
    Ok(Tensor::from_vec(images.concat(), (count, 3, SIZE, SIZE), &CPU)?.affine(2.0, -1.0)?)
}

fn normal(random: &mut TorchGenerator, shape: &[usize]) -> Fallible<Tensor> {
    Ok(Tensor::from_vec(random.randn(shape.iter().product()), shape, &CPU)?)
}

/// Trains the autoencoder and writes it, with the scaling factor of its latents.
pub(crate) fn autoencoder(folder: &Path, steps: u64, seed: u64) -> Fallible<()> {
    const BATCH: usize = 8;
    const NOISE: f64 = 0.05;
    write_configs(folder, 1.0)?;
    let weights = Weights::init(seed, &CPU);
    let model = AutoencoderKl::new(&weights, &read_config(folder, "vae")?)?;
    let mut trainer = Trainer::new(params(&weights, ""), 3e-3, steps)?;
    let (mut generator, mut random) = (ImageGenerator::new(seed), TorchGenerator::manual_seed(seed));
    for _ in 0..steps {
        let images = to_batch((0..BATCH).map(|_| generator.autoencoder_image()).collect())?;
        trainer.train_step("autoencoder", || {
            let latents = model.encode(&images)?;
            // Noise with a small, fixed deviation makes the decoder robust; the encoder is trained to predict that
            // deviation.
            let noise = (normal(&mut random, latents.mean.dims())? * NOISE)?;
            let error = (model.decode(&(&latents.mean + noise)?)? - images)?;
            let difference = (error.sqr()?.mean_all()? + (error.abs()?.mean_all()? * 0.3)?)?;
            let mean_square = latents.mean.sqr()?.mean_all()?;
            let deviation_error = (latents.logvar - 2.0 * NOISE.ln())?.sqr()?.mean_all()?;
            let kl = (mean_square + deviation_error)?;
            Ok((difference + (kl * 1e-3)?)?)
        })?;
    }
    write_weights(
        &folder.join("vae/diffusion_pytorch_model.safetensors"),
        &trainer.ema_weights(""),
    )?;

    // Measure the model that was written. `scaling_factor` scales its latents to unit variance.
    let model = AutoencoderKl::open(folder, DType::F32, &CPU)?;
    let mut generator = ImageGenerator::new(seed + 1);
    let images = to_batch((0..64).map(|_| generator.image_with_caption().0).collect())?;
    let latents = model.encode(&images)?.mean;
    let error = (model.decode(&latents)? - images)?
        .sqr()?
        .mean_all()?
        .to_scalar::<f32>()?;
    let deviation = latents.flatten_all()?.var(0)?.to_scalar::<f32>()?.sqrt();
    log(&format!(
        "autoencoder: mean squared error {error:.5} (pixels -1 to 1), deviation of latents {deviation:.3}"
    ));
    write_configs(folder, (1e4 / f64::from(deviation)).round() / 1e4)
}

/// Scaled latents of rendered images, and token ids of their captions.
struct TrainingSet {
    latents: Tensor,
    ids: Tensor,
}

impl TrainingSet {
    fn generate(folder: &Path, count: usize, seed: u64) -> Fallible<Self> {
        let vae = AutoencoderKl::open(folder, DType::F32, &CPU)?;
        let tokenizer = ClipTokenizer::open(&folder.join("tokenizer"))?;
        let mut generator = ImageGenerator::new(seed);
        let (mut latents, mut captions) = (Vec::new(), Vec::new());
        while captions.len() < count {
            let (images, texts): (Vec<_>, Vec<_>) = (0..32).map(|_| generator.image_with_caption()).unzip();
            latents.push((vae.encode(&to_batch(images)?)?.mean * vae.scaling_factor)?);
            captions.extend(texts);
        }
        let captions: Vec<&str> = captions.iter().map(String::as_str).collect();
        Ok(Self {
            latents: Tensor::cat(&latents, 0)?,
            ids: tokenizer.encode(&captions)?,
        })
    }
}

/// Trains and writes the text encoder and the U-Net.
pub(crate) fn diffusion(folder: &Path, steps: u64, seed: u64) -> Fallible<()> {
    const BATCH: usize = 16;
    const IMAGES: usize = 6144;
    let training_set = TrainingSet::generate(folder, IMAGES, seed)?;
    log("images are rendered and encoded");
    let tokenizer = ClipTokenizer::open(&folder.join("tokenizer"))?;
    let empty_caption = tokenizer.encode(&[""])?;
    let (text_weights, unet_weights) = (Weights::init(seed, &CPU), Weights::init(seed + 1, &CPU));
    let text_encoder = ClipTextModel::new(&text_weights, &read_config(folder, "text_encoder")?)?;
    let unet = UNet2DConditionModel::new(&unet_weights, &read_config(folder, "unet")?)?;
    let mut all = params(&text_weights, "text/");
    all.extend(params(&unet_weights, "unet/"));
    let mut trainer = Trainer::new(all, 1.5e-3, steps)?;
    let config = std::fs::read_to_string(folder.join("scheduler/scheduler_config.json"))?;
    let schedule = NoiseSchedule::new(&SamplerParams::from_json(&serde_json::from_str(&config)?)?)?;
    let mut random = TorchGenerator::manual_seed(seed);
    for step in 1..=steps {
        let indices: Vec<u32> = random
            .randint(0, IMAGES as i64, BATCH)
            .into_iter()
            .map(|i| i as u32)
            .collect();
        let indices = Tensor::from_vec(indices, BATCH, &CPU)?;
        let latents = training_set.latents.index_select(&indices, 0)?;
        // One caption in ten is replaced by the empty one, for classifier-free guidance.
        let dropout = random.rand(BATCH);
        let ids = training_set.ids.index_select(&indices, 0)?;
        let rows = (0..BATCH).map(|i| {
            if dropout[i] < 0.1 {
                Ok(empty_caption.clone())
            } else {
                ids.narrow(0, i, 1)
            }
        });
        let ids = Tensor::cat(&rows.collect::<Result<Vec<_>, _>>()?, 0)?;
        let times = random.randint(0, 1000, BATCH);
        // Offset noise: plain noise hardly changes the mean of an image, so the model would not learn to choose the
        // colour of the background when it starts from pure noise.
        let (count, channels, _, _) = latents.dims4()?;
        let offset = (normal(&mut random, &[count, channels, 1, 1])? * 0.2)?;
        let noise = normal(&mut random, latents.dims())?.broadcast_add(&offset)?;
        let noisy = schedule.add_noise(&latents, &noise, &times)?;
        // min-SNR with gamma 5.
        let weight = times
            .iter()
            .map(|t| schedule.snr(*t).map(|snr| snr.min(5.0) / snr))
            .collect::<Result<Vec<_>, _>>()?;
        let weight = Tensor::from_vec(weight, BATCH, &CPU)?;
        let times = Tensor::from_vec(times.iter().map(|t| *t as f32).collect::<Vec<_>>(), BATCH, &CPU)?;
        trainer.train_step("diffusion", || {
            let predicted = unet.forward(&noisy, &times, &text_encoder.forward(&ids)?)?;
            let loss = (predicted - noise)?.sqr()?.flatten_from(1)?.mean(1)?;
            Ok((loss * weight)?.mean_all()?)
        })?;
        if step.is_multiple_of(500) || step == steps {
            write_weights(
                &folder.join("text_encoder/model.safetensors"),
                &trainer.ema_weights("text/"),
            )?;
            write_weights(
                &folder.join("unet/diffusion_pytorch_model.safetensors"),
                &trainer.ema_weights("unet/"),
            )?;
        }
    }
    Ok(())
}
