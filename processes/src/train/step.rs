//! The loss and the gradients of one micro-batch.

use super::data::{BatchLatents, StepBatch};
use super::embedding::{add_word_to, caption_with_class};
use super::image_requests::Needs;
use super::images_ahead::BatchNumber;
use super::options;
use super::preservation::{self, Preservation};
use super::prompts::{self, splits_captions};
use super::run::Run;
use super::sliders::{self, MicroBatchNumber};
use crate::adapters::{AdapterHandle, AdapterPass};
use crate::data::{Control, SpatialChange, TrainingImage};
use crate::error::{EngineError, Result};
use crate::families::{Conditioning, ItemSize, Model, Prompt};
use crate::rng::generator_for;
use crate::training::{
    ConditioningCache, DrawInputs, LossInputs, MicroBatch, NoiseDraw, Trainer, TrainingCfg, batch_generator, loss,
    noisy_latents, step_to,
};
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::train::LossTarget;
use candle_core::Tensor;
use std::sync::Arc;
use std::time::Instant;

/// What a micro-batch is made of.
#[derive(Clone)]
pub(super) struct BatchInputs {
    /// The latents of its images, on the device.
    pub(super) latents: Vec<Tensor>,
    /// The latents of its images before their augmentations, on the device, if the loss compares with them and they differ.
    pub(super) unaugmented: Option<Tensor>,
    /// The latents of its control images, or for an adapter their pixels; of the negative images of a slider, or of the pairs of its images, on the device. `None`: it
    /// has none.
    pub(super) control: Option<Tensor>,
    /// The pixels of its images, [b, 3, h, w] on the device, if their features are compared.
    pub(super) pixels: Option<Tensor>,
    /// How far each of its items steps before its features are compared; empty: it does not.
    pub(super) feature_steps: Vec<f32>,
    /// Left and top edge of the crop of each of its images, in the scaled image.
    pub(super) crops: Vec<(u32, u32)>,
    /// How the pixels of each of its images moved, which its mask follows.
    pub(super) moves: Vec<Vec<SpatialChange>>,
}

impl BatchInputs {
    /// Appends all items again.
    fn double(&mut self) -> Result<()> {
        for tensor in self
            .latents
            .iter_mut()
            .chain(&mut self.control)
            .chain(&mut self.unaugmented)
            .chain(&mut self.pixels)
        {
            *tensor = Tensor::cat(&[&*tensor, &*tensor], 0)?;
        }
        self.crops.extend_from_within(..);
        self.moves.extend_from_within(..);
        Ok(())
    }
}

/// The prompts of a micro-batch, and how they guide.
pub(super) struct BatchPrompts {
    pub(super) captions: Vec<String>,
    /// What is encoded for each caption.
    pub(super) encoded: Vec<Prompt>,
    cfg: Option<TrainingCfg>,
    /// The negative prompts of the guidance; empty: the empty prompt.
    negatives: Vec<Prompt>,
    /// The scale of the guidance loss for each item; empty if there is none.
    guidance_scales: Vec<f64>,
}

/// A micro-batch of the data sets, with its timesteps and noise.
pub(super) struct SampledBatch {
    pub(super) step_batch: StepBatch,
    pub(super) prompts: BatchPrompts,
    pub(super) inputs: BatchInputs,
    pub(super) noise_draw: NoiseDraw,
    image_tokens: usize,
}

/// How the preservation loss of a micro-batch is computed.
struct PreservationPass {
    preservation: Preservation,
    /// Without the adapter, and with it.
    passes: [AdapterPass; 2],
    handle: Arc<AdapterHandle>,
}

/// What the items of a batch are conditioned on besides their prompts.
pub(super) struct ItemInputs {
    pub(super) sizes: Vec<ItemSize>,
    /// The latents of their control images, or for an adapter their pixels.
    pub(super) control: Option<Tensor>,
    /// The scale of the guidance, of each item or of all.
    pub(super) scales: Vec<f64>,
}

impl ItemInputs {
    pub(super) fn add_to(
        &self,
        process: &TrainerProcess,
        model: &dyn Model,
        conditioning: Conditioning,
    ) -> Result<Conditioning> {
        let conditioning = model.with_sizes(conditioning, &self.sizes)?;
        let conditioning = with_guidance(process, model, conditioning, &self.scales)?;
        match &self.control {
            Some(control) if process.adapter.is_some() => model.with_adapter_images(conditioning, control, 1.0),
            Some(control) => model.with_control(conditioning, std::slice::from_ref(control)),
            None => Ok(conditioning),
        }
    }
}

/// Predicts from noisy latents and timesteps, with guidance if there is an unconditional conditioning.
fn predict(
    model: &dyn Model,
    cfg: Option<TrainingCfg>,
    (latents, timesteps): (&[Tensor], &Tensor),
    (unconditional, conditional): (Option<&Conditioning>, &Conditioning),
) -> Result<Vec<Tensor>> {
    match (cfg, unconditional) {
        (Some(cfg), Some(unconditional)) => cfg.predict(model, latents, timesteps, [unconditional, conditional]),
        _ => model.predict(latents, timesteps, conditional),
    }
}

/// The sizes of an item that SDXL is conditioned on. `crop`: left and top edge of its crop.
fn image_size(item: &TrainingImage, crop: (u32, u32)) -> ItemSize {
    let flipped = |(width, height): (u32, u32)| (height, width);
    ItemSize {
        original: flipped(item.size),
        crop: flipped(crop),
        target: flipped(item.plan.bucket),
    }
}

/// Adds the guidance scale that a distilled model is trained at, or removes it.
fn with_guidance(
    process: &TrainerProcess,
    model: &dyn Model,
    conditioning: Conditioning,
    scales: &[f64],
) -> Result<Conditioning> {
    match process.bypasses_guidance_embedding() {
        true => Ok(model.without_guidance(conditioning)),
        false => model.with_guidance(conditioning, scales),
    }
}

/// Adds the gradients of a micro-batch's loss, or applies them where they are those of the whole step.
pub(super) fn add_gradients(
    trainer: &mut Trainer,
    process: &TrainerProcess,
    step: u64,
    loss: impl Fn() -> Result<Tensor>,
) -> Result<()> {
    let train = &process.train;
    let one_micro_batch = train.gradient_accumulation <= 1 && train.gradient_accumulation_steps == 1;
    match one_micro_batch && trainer.uses_fused_backward() {
        true => trainer.fused_step(step, loss),
        false => trainer.accumulate(loss),
    }
}

impl Run<'_> {
    /// Draws a micro-batch: captions, timesteps and noise come from the generator of (seed, step, micro-batch); noise that is the same
    /// each time has a generator of its own.
    pub(super) fn draw_batch(&mut self, step: u64, micro: u64) -> Result<SampledBatch> {
        let process = self.process;
        let mut step_batch = self.data.batch_of_step(step, micro, process);
        let mut generator = batch_generator(self.seed, step, micro);
        let mut captions = self.data.captions(&step_batch.batch, process, &mut generator);
        let regularisation = self.data.datasets[step_batch.batch.dataset].options.regularisation;
        let doubles = process.train.short_and_long_captions && !regularisation;
        let splits = splits_captions(process);
        let mut short = match doubles || splits {
            true => self.data.short_captions(&step_batch.batch, doubles, &mut generator),
            false => Vec::new(),
        };
        for captions in [&mut captions, &mut short] {
            add_word_to(captions, process, regularisation);
        }
        if doubles {
            captions.append(&mut short);
        }
        let cfg = options::training_cfg(process, &mut generator);
        let max = process.train.max_negative_prompts;
        let negatives = prompts::negatives(&self.negative_prompts, captions.len(), max, &mut generator);
        let guidance_scales = options::guidance_scales(process, captions.len(), &mut generator);
        let prompts = BatchPrompts {
            encoded: prompts::prompts(&captions, splits.then_some(&short), process, &mut generator),
            negatives: prompts::prompts(&negatives, None, process, &mut generator),
            cfg,
            guidance_scales,
            captions,
        };
        let device = self.compute.device.clone();
        let start = Instant::now();
        let (batch, codec) = (&step_batch.batch, self.model.codec());
        let number = (step, micro);
        let mut loaded = self.images_ahead.take(number)?.unwrap_or_default();
        let BatchLatents {
            latents,
            pixels,
            crops,
            moves,
        } = self.data.latents(
            (batch, &mut loaded),
            number,
            &self.pixel_options,
            &mut self.latents,
            codec,
        )?;
        let latents = [self.latent_options.standardized(latents)?];
        let unaugmented = match options::uses_unaugmented(process) {
            true => self
                .data
                .unaugmented_latents((batch, &mut loaded), number, &self.latents, codec)?
                .map(|unaugmented| [unaugmented]),
            false => None,
        };
        let control = match process.adapter {
            Some(_) => self.data.control_pixels((batch, &moves), &mut loaded, number)?,
            None => self
                .data
                .control_latents((batch, &moves), &mut loaded, number, &mut self.latents, codec)?,
        };
        self.data_time += start.elapsed();
        self.read_images_after(number);
        let control = match control {
            // The negative images of a slider are trained on as the positive ones are.
            Some(negative) if process.kind.uses_image_pairs() => {
                let standardized = self.latent_options.standardized(negative)?;
                Some(self.latent_options.scaled(standardized, &prompts.captions)?)
            }
            control => control,
        };
        let control = control.map(|control| control.to_device(&device)).transpose()?;
        let pixels = pixels.map(|pixels| pixels.to_device(&device)).transpose()?;
        let items: Vec<&TrainingImage> = self.data.items_of(&step_batch.batch).collect();
        let noise_seeds = items.iter().map(|item| item.noise_seed());
        let is_differential = process.train.loss_target == LossTarget::DifferentialNoise;
        let image_tokens = latents
            .first()
            .map_or(0, |latents| self.model.image_tokens(latents.dims()));
        let mut noise_draw = self.objective.draw(
            &mut generator,
            &DrawInputs {
                latents: &latents,
                unaugmented: unaugmented
                    .as_ref()
                    .filter(|_| is_differential)
                    .map(<[Tensor; 1]>::as_slice),
                image_tokens,
                noise_seeds: &noise_seeds.collect::<Vec<_>>(),
                regularisation,
            },
        )?;
        for noise in noise_draw.noise.iter_mut().chain(&mut noise_draw.input_noise) {
            *noise = noise.to_device(&device)?;
        }
        let (latents, unaugmented) = match unaugmented {
            // They are trained in place of the augmented ones, whose difference is in the noise.
            Some(unaugmented) if is_differential => (unaugmented, None),
            unaugmented => (latents, unaugmented),
        };
        let unaugmented = unaugmented.map(|[latents]| -> Result<Tensor> {
            let multiplier = process.train.latent_multiplier;
            Ok((latents * multiplier)?.to_device(&device)?)
        });
        let latents = latents.into_iter().map(|latents| {
            let scaled = self.latent_options.scaled(latents, &prompts.captions)?;
            Ok(scaled.to_device(&device)?)
        });
        let mut inputs = BatchInputs {
            latents: latents.collect::<Result<_>>()?,
            unaugmented: unaugmented.transpose()?,
            control,
            pixels,
            feature_steps: Vec::new(),
            crops,
            moves,
        };
        if doubles {
            // The images, their noise and their timesteps again, for the short captions.
            step_batch.batch.items.extend_from_within(..);
            inputs.double()?;
            noise_draw.double()?;
        }
        if let Some(features) = &self.features {
            let mut generator = generator_for(self.seed, "features", step, micro);
            inputs.feature_steps = features.draw_steps(&mut generator, noise_draw.timesteps.len());
        }
        Ok(SampledBatch {
            step_batch,
            prompts,
            inputs,
            noise_draw,
            image_tokens,
        })
    }

    /// Begins to read the images of the micro-batch after this one.
    fn read_images_after(&mut self, (step, micro): BatchNumber) {
        let train = &self.process.train;
        let next = match micro + 1 < train.gradient_accumulation.max(1) {
            true => (step, micro + 1),
            false => (step + 1, 0),
        };
        if !self.images_ahead.is_enabled() || next.0 >= train.steps {
            return;
        }
        let batch = self.data.batch_of_step(next.0, next.1, self.process).batch;
        let needs = Needs {
            drawn: self.data.draws_images(&batch, &self.pixel_options),
            unaugmented: options::uses_unaugmented(self.process),
        };
        let on_disk = self.data.datasets[batch.dataset].options.cache_latents_to_disk;
        let has_adapter = self.process.adapter.is_some();
        let is_known = |item: &TrainingImage, control: Option<&Control>| {
            // An adapter sees the pixels of control images, which have no latents.
            !(has_adapter && control.is_some()) && self.latents.has(item, control, on_disk)
        };
        let requests = self.data.image_requests(&batch, next, needs, is_known);
        self.images_ahead.start(next, requests);
    }

    /// The sizes of the images of a micro-batch.
    pub(super) fn sizes_of(&self, batch: &SampledBatch) -> Vec<ItemSize> {
        self.sizes_of_items(&batch.step_batch, &batch.inputs.crops)
    }

    fn sizes_of_items(&self, step_batch: &StepBatch, crops: &[(u32, u32)]) -> Vec<ItemSize> {
        let items = self.data.items_of(&step_batch.batch).zip(crops);
        items.map(|(item, crop)| image_size(item, *crop)).collect()
    }

    /// The timesteps of a draw, [b], float32.
    pub(super) fn timesteps_of(&self, noise_draw: &NoiseDraw) -> Result<Tensor> {
        let device = &self.compute.device;
        Ok(Tensor::from_vec(
            noise_draw.timesteps.clone(),
            noise_draw.timesteps.len(),
            device,
        )?)
    }

    /// Computes the loss and the gradients of one micro-batch. Dropout has generators of its own.
    pub(super) fn micro_batch(&mut self, step: u64, micro: u64) -> Result<()> {
        if let Some(slider) = self.slider.clone() {
            return sliders::micro_batch(&slider, self, MicroBatchNumber { step, micro });
        }
        let process = self.process;
        let batch = self.draw_batch(step, micro)?;
        let guidance = self.data.datasets[batch.step_batch.batch.dataset].options.guidance;
        if let Some(guidance) = guidance {
            return self.train_pairs(guidance, &batch, MicroBatchNumber { step, micro });
        }
        let SampledBatch {
            step_batch,
            prompts,
            inputs,
            noise_draw,
            image_tokens,
        } = batch;
        let Some(handle) = self.target.handle().cloned() else {
            return self
                .forward_backward(step, &step_batch, (&prompts, image_tokens), inputs, noise_draw, None)
                .map(drop);
        };
        let (strength, seed) = (
            self.data.datasets[step_batch.batch.dataset].options.network_weight,
            self.seed,
        );
        let pass = |name: &str| AdapterPass {
            strength,
            dropout_seed: Some(format!("{seed}/{name}/{step}/{micro}").into()),
        };
        let training = pass("dropout");
        let Some(preservation) = Preservation::of(process) else {
            let run = || {
                self.forward_backward(
                    step,
                    &step_batch,
                    (&prompts, image_tokens),
                    inputs,
                    noise_draw,
                    Some(&handle),
                )
            };
            return handle.in_pass(training, run).map(drop);
        };
        let of_captions = inputs.clone();
        let noise_draw = handle.in_pass(training, || {
            self.forward_backward(
                step,
                &step_batch,
                (&prompts, image_tokens),
                of_captions,
                noise_draw,
                Some(&handle),
            )
        })?;
        let preservation_pass = PreservationPass {
            preservation,
            passes: [AdapterPass::inference(0.0), pass("preservation-dropout")],
            handle,
        };
        self.preserve(&preservation_pass, &step_batch, &prompts, inputs, &noise_draw)
    }

    /// Adds the gradients of the preservation loss of these captions and latents.
    fn preserve(
        &mut self,
        pass: &PreservationPass,
        step_batch: &StepBatch,
        prompts: &BatchPrompts,
        BatchInputs {
            latents,
            control,
            crops,
            ..
        }: BatchInputs,
        noise_draw: &NoiseDraw,
    ) -> Result<()> {
        let rules = &self.data.datasets[step_batch.batch.dataset].options.captions;
        let cfg = prompts.cfg;
        let inputs = self.item_inputs((step_batch, &crops), control, prompts);
        let texts = prompts
            .captions
            .iter()
            .map(|caption| pass.preservation.prompt(caption, rules.trigger_word()));
        let texts: Vec<String> = texts.collect();
        // Without the adapter: in ai-toolkit these prompts are encoded before the training.
        let [without, _] = pass.passes.clone();
        let (conditional, unconditional) = pass.handle.in_pass(without, || {
            Ok::<_, EngineError>((self.encode_frozen(&texts)?, self.unconditional(prompts)?))
        })?;
        let (process, model) = (self.process, &*self.model);
        let conditional = inputs.add_to(process, model, conditional)?;
        let unconditional = unconditional
            .map(|negative| inputs.add_to(process, model, negative))
            .transpose()?;
        let (noisy, times) = self.noisy(&latents, noise_draw)?;
        let predict = || predict(model, cfg, (&noisy, &times), (unconditional.as_ref(), &conditional));
        let [without, with] = pass.passes.clone();
        let base = pass.handle.in_pass(without, predict)?;
        let factor = pass.preservation.multiplier * step_batch.weight;
        let forward = || preservation::loss(&predict()?, &base, factor);
        pass.handle
            .in_pass(with, || self.trainer.accumulate_preservation(forward))
    }

    /// Encodes texts without the graph of a text encoder that is trained.
    pub(super) fn encode_frozen(&mut self, texts: &[String]) -> Result<Conditioning> {
        let prompts: Vec<Prompt> = texts.iter().map(|text| Prompt::new(text.as_str())).collect();
        self.encode_frozen_prompts(&prompts)
    }

    /// Encodes prompts without the graph of a text encoder that is trained.
    pub(super) fn encode_frozen_prompts(&mut self, prompts: &[Prompt]) -> Result<Conditioning> {
        let model = &*self.model;
        match self.target.covers_text_encoder() {
            true => model.encode_prompts(prompts)?.detached_as(model.dtype()),
            false => self.encoded_captions.get(prompts, model),
        }
    }

    /// The negative or empty prompt of each item, if the training uses guidance. It is not a caption: no text encoder is trained on it.
    fn unconditional(&mut self, prompts: &BatchPrompts) -> Result<Option<Conditioning>> {
        if prompts.cfg.is_none() {
            return Ok(None);
        }
        match prompts.negatives.is_empty() {
            true => self.encode_frozen(&vec![String::new(); prompts.captions.len()]),
            false => self.encode_frozen_prompts(&prompts.negatives),
        }
        .map(Some)
    }

    /// The prompt of the unconditional prediction of the guidance loss for this many items, if there is one.
    /// It is encoded without the adapter, as in ai-toolkit, which encodes it before the training.
    fn guidance_loss_prompt(&mut self, items: usize, handle: Option<&AdapterHandle>) -> Result<Option<Conditioning>> {
        let train = &self.process.train;
        if !train.do_guidance_loss {
            return Ok(None);
        }
        let prompts = vec![train.unconditional_prompt.clone(); items];
        match handle {
            Some(handle) => handle.in_pass(AdapterPass::inference(0.0), || self.encode_frozen(&prompts)),
            None => self.encode_frozen(&prompts),
        }
        .map(Some)
    }

    /// The noisy latents that the model gets, and their timesteps, [b], float32.
    fn noisy(&self, latents: &[Tensor], noise_draw: &NoiseDraw) -> Result<(Vec<Tensor>, Tensor)> {
        let times = self.timesteps_of(noise_draw)?;
        Ok((noisy_latents(&*self.objective, &self.loss, latents, noise_draw)?, times))
    }

    /// What the items of a batch are conditioned on besides their prompts.
    fn item_inputs(
        &self,
        (step_batch, crops): (&StepBatch, &[(u32, u32)]),
        control: Option<Tensor>,
        prompts: &BatchPrompts,
    ) -> ItemInputs {
        ItemInputs {
            sizes: self.sizes_of_items(step_batch, crops),
            control,
            scales: match (prompts.guidance_scales.as_slice(), prompts.cfg) {
                ([], Some(cfg)) => vec![cfg.scale],
                ([], None) => vec![self.process.train.cfg_scale],
                (scales, _) => scales.to_vec(),
            },
        }
    }

    /// Computes the loss of these captions and latents, and adds or applies the gradients. Returns the noise that was used.
    /// `handle`: that of the adapter that is trained.
    fn forward_backward(
        &mut self,
        step: u64,
        step_batch: &StepBatch,
        (prompts, image_tokens): (&BatchPrompts, usize),
        BatchInputs {
            latents,
            unaugmented,
            control,
            pixels,
            feature_steps,
            crops,
            moves,
        }: BatchInputs,
        mut noise_draw: NoiseDraw,
        handle: Option<&AdapterHandle>,
    ) -> Result<NoiseDraw> {
        let (captions, encoded, cfg) = (&prompts.captions, &prompts.encoded, prompts.cfg);
        let cached = match self.target.covers_text_encoder() {
            true => None,
            false => Some(self.encode_frozen_prompts(encoded)?),
        };
        let unconditional = self.unconditional(prompts)?;
        let guidance_loss_prompt = self.guidance_loss_prompt(captions.len(), handle)?;
        let (process, model) = (self.process, &*self.model);
        let start = Instant::now();
        let items = || {
            let moves = moves.iter().map(Vec::as_slice);
            self.data.items_of(&step_batch.batch).zip(moves)
        };
        let mask = self.masks.get(items(), model.codec())?;
        let mask = mask.map(|mask| mask.to_device(&self.compute.device)).transpose()?;
        let outside = match process.train.inverted_mask_prior {
            true => self.masks.outside(items(), model.codec())?,
            false => None,
        };
        self.data_time += start.elapsed();
        let outside_mask = outside.map(|mask| mask.to_device(&self.compute.device)).transpose()?;
        let inputs = self.item_inputs((step_batch, &crops), control, prompts);
        let with_inputs = |conditioning: Conditioning| inputs.add_to(process, model, conditioning);
        let frozen_conditioning = || {
            let conditioning = match &cached {
                Some(conditioning) => conditioning.clone(),
                None => model.encode_prompts(encoded)?.detached_as(model.dtype())?,
            };
            with_inputs(model.with_decorator(conditioning, false)?.detached())
        };
        let unconditional = unconditional.map(|negative| with_inputs(model.with_decorator(negative, true)?));
        let unconditional = unconditional.transpose()?;
        let predict = |latents: &[Tensor], timesteps: &Tensor, conditioning: &Conditioning| {
            predict(model, cfg, (latents, timesteps), (unconditional.as_ref(), conditioning))
        };
        if let Some(next) = self.objective.next_timesteps(&noise_draw, image_tokens)? {
            let (noisy, times) = self.noisy(&latents, &noise_draw)?;
            let predicted = predict(&noisy, &times, &frozen_conditioning()?)?;
            noise_draw = step_to(&latents, &noisy, &predicted, &noise_draw, next)?;
        }
        let dataset = &self.data.datasets[step_batch.batch.dataset].options;
        let strength = dataset.network_weight;
        let corrects_norm = options::corrects_norm(process) && !dataset.regularisation;
        let uses_base =
            options::compares_with_base(process, dataset.prior_target) || outside_mask.is_some() || corrects_norm;
        let mut loss_inputs = LossInputs {
            guidance_scales: prompts.guidance_scales.clone(),
            corrects_norm,
            outside_mask,
            unaugmented: unaugmented.map(|unaugmented| vec![unaugmented]),
            learned: self.learned_weights(&noise_draw)?,
            features: self.features.clone(),
            pixels,
            feature_steps,
            stepped_levels: match self.loss.stepped {
                true => self.objective.stepped_levels(&noise_draw, image_tokens)?,
                false => Vec::new(),
            },
            ..LossInputs::default()
        };
        if let Some(handle) = handle.filter(|_| uses_base) {
            let (noisy, times) = self.noisy(&latents, &noise_draw)?;
            // In ai-toolkit too, the captions are encoded with the adapter of the text encoder.
            let conditioning = handle.in_pass(AdapterPass::inference(strength), frozen_conditioning)?;
            let base = handle.in_pass(AdapterPass::inference(0.0), || predict(&noisy, &times, &conditioning))?;
            loss_inputs.base = Some(base.iter().map(Tensor::detach).collect());
        }
        if let (true, Some(word)) = (uses_base, &process.embedding) {
            // Without the word, the prompt is that of its class.
            let captions: Vec<String> = captions
                .iter()
                .map(|caption| caption_with_class(caption, word))
                .collect();
            let (noisy, times) = self.noisy(&latents, &noise_draw)?;
            let of_class = with_inputs(ConditioningCache::encode(&captions, model)?.detached_as(model.dtype())?)?;
            let base = predict(&noisy, &times, &of_class)?;
            loss_inputs.base = Some(base.iter().map(Tensor::detach).collect());
        }
        if let Some(prompt) = guidance_loss_prompt {
            let (noisy, times) = self.noisy(&latents, &noise_draw)?;
            // As in ai-toolkit, without the tokens of a decorator.
            let conditioning = with_inputs(prompt)?;
            // Nothing is kept for a backward pass.
            let prediction = match (handle, model.detach()) {
                (Some(handle), _) => handle.in_pass(AdapterPass::inference(strength), || {
                    model.predict(&noisy, &times, &conditioning)
                })?,
                (None, Some(frozen)) => frozen.predict(&noisy, &times, &conditioning)?,
                (None, None) => model.predict(&noisy, &times, &conditioning)?,
            };
            loss_inputs.guidance_loss_prediction = Some(prediction.iter().map(Tensor::detach).collect());
        }
        let mut options = self.loss.clone();
        if loss_inputs.outside_mask.is_some() {
            // As in ai-toolkit.
            options.signal_amplification = 0.0;
        }
        let forward = || {
            let conditioning = match &cached {
                Some(conditioning) => conditioning.clone(),
                None => model.encode_prompts(encoded)?,
            };
            let micro_batch = MicroBatch {
                latents: latents.clone(),
                noise_draw: noise_draw.clone(),
                conditioning: with_inputs(model.with_decorator(conditioning, false)?)?,
                weights: vec![step_batch.item_weight; captions.len()],
                weight: step_batch.weight,
                mask: mask.clone(),
                loss_inputs: loss_inputs.clone(),
            };
            loss(&predict, &*self.objective, &options, &micro_batch)
        };
        add_gradients(&mut self.trainer, process, step, forward)?;
        Ok(noise_draw)
    }
}
