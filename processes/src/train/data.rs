//! The data sets of a run, and the batch of each step.

use super::super::context::Context;
use super::images_ahead::{BatchNumber, LoadedImage};
use super::options::{self, caches_captions};
use crate::data::{
    Batch, Control, Dataset, PreparedImage, SpatialChange, TrainingImage, batches, build_caption, dropped_caption,
    drops_caption, epoch_order, load_control, load_pixels,
};
use crate::error::{EngineError, Result};
use crate::models::codec::Codec;
use crate::rng::{TorchGenerator, generator_for};
use crate::training::{LatentStore, PixelOptions};
use aitk_common::job::process::TrainerProcess;
use candle_core::Tensor;
use std::borrow::Cow;
use std::collections::BTreeSet;

/// The data sets of a run and their batches. Training sets and regularisation sets have separate epochs.
pub(super) struct TrainingData {
    pub(super) datasets: Vec<Dataset>,
    /// Batches of the training sets.
    pub(super) batches: Vec<Batch>,
    /// Batches of the regularisation sets.
    pub(super) regularisation: Vec<Batch>,
    seed: u64,
    /// Whether the pixels of each batch are needed beside its latents.
    keeps_pixels: bool,
    /// A cached count: a number of steps, and how many of them use regularisation images.
    counted_steps: (u64, u64),
}

/// The batch of one micro-batch, with its weight.
pub(super) struct StepBatch {
    pub(super) batch: Batch,
    /// Loss weight of the whole batch: that of regularisation sets.
    pub(super) weight: f64,
    /// Loss weight of its items: that of their data set.
    pub(super) item_weight: f64,
}

/// The latents of a batch.
pub(super) struct BatchLatents {
    /// [b, c, h, w] on the CPU.
    pub(super) latents: Tensor,
    /// [b, 3, h, w] on the CPU, if they are needed.
    pub(super) pixels: Option<Tensor>,
    /// Left and top edge of the crop of each item, in its scaled image.
    pub(super) crops: Vec<(u32, u32)>,
    /// How the pixels of each item moved.
    pub(super) moves: Vec<Vec<SpatialChange>>,
}

/// Whether step `number` uses regularisation images if there are any.
pub(super) fn uses_regularisation(number: u64, process: &TrainerProcess) -> bool {
    let saves = process.save.is_due(number);
    let samples = process.sample.is_due(number) && !process.train.disable_sampling;
    number.is_multiple_of(2) && !saves && !samples
}

impl TrainingData {
    /// Opens every data set of the config. Errors in the data are reported here, before the model is loaded.
    pub(super) fn open(process: &TrainerProcess, seed: u64, cx: &mut Context<'_>) -> Result<Self> {
        let (mut datasets, mut logged_warnings) = (Vec::new(), BTreeSet::new());
        for options in options::dataset_options(process, cx)? {
            let (dataset, warnings) = Dataset::open(options, process.model.arch.name.bucket_divisibility(), seed)?;
            // The same files at several resolutions give the same warnings.
            for warning in warnings {
                if logged_warnings.insert(warning.clone()) {
                    cx.log("warn", warning);
                }
            }
            datasets.push(dataset);
        }
        let (batches, regularisation) = (batches(&datasets, seed, false), batches(&datasets, seed, true));
        if batches.is_empty() && process.samples_for_slider() {
            cx.log("info", "no data set: each step samples its noisy latents from noise");
        } else if batches.is_empty() {
            return Err(EngineError::bad_input(if regularisation.is_empty() {
                "the job has no data set: add `datasets` with a `folder_path`"
            } else {
                "every data set is a regularisation set (`is_reg`): add one to train on"
            }));
        }
        let data = Self {
            datasets,
            batches,
            regularisation,
            seed,
            keeps_pixels: false,
            counted_steps: (0, 0),
        };
        let count = |count: usize, one: &str, several: &str| match count {
            1 => format!("1 {one}"),
            _ => format!("{count} {several}"),
        };
        let mut text = format!(
            "{} in {}",
            count(data.count(false), "training image", "training images"),
            count(data.batches.len(), "batch", "batches")
        );
        if !data.regularisation.is_empty() {
            let images = count(data.count(true), "regularisation image", "regularisation images");
            text += &format!(", {images} in {}", data.regularisation.len());
        }
        cx.log("info", text);
        Ok(data)
    }

    /// Keeps the pixels of each batch beside its latents.
    pub(super) fn keep_pixels(&mut self) {
        self.keeps_pixels = true;
    }

    /// Whether the pixels of each batch are needed beside its latents.
    pub(super) fn keeps_pixels(&self) -> bool {
        self.keeps_pixels
    }

    /// The number of training images, or of regularisation images.
    fn count(&self, regularisation: bool) -> usize {
        let is_selected = |d: &&Dataset| d.options.regularisation == regularisation;
        self.datasets.iter().filter(is_selected).map(|d| d.items.len()).sum()
    }

    /// Whether step `number` (counted from 1, as in the names of saves) uses regularisation images: every even step
    /// does, unless a save or samples are due.
    fn is_regularisation(&self, number: u64, process: &TrainerProcess) -> bool {
        !self.regularisation.is_empty() && uses_regularisation(number, process)
    }

    /// How many of the first `steps` steps use training images, and how many use regularisation images.
    fn steps_by_kind(&mut self, steps: u64, process: &TrainerProcess) -> (u64, u64) {
        if self.regularisation.is_empty() {
            return (steps, 0);
        }
        if self.counted_steps.0 > steps {
            self.counted_steps = (0, 0);
        }
        let (from, before) = self.counted_steps;
        let new = (from + 1..=steps)
            .filter(|n| self.is_regularisation(*n, process))
            .count();
        self.counted_steps = (steps, before + new as u64);
        (steps - self.counted_steps.1, self.counted_steps.1)
    }

    /// The number of complete epochs of the training sets after `steps` steps.
    pub(super) fn epoch(&mut self, steps: u64, process: &TrainerProcess) -> u64 {
        if self.batches.is_empty() {
            return 0;
        }
        let micro_batches = self.steps_by_kind(steps, process).0 * process.train.gradient_accumulation.max(1);
        micro_batches / (self.batches.len() as u64).max(1)
    }

    /// Whether this step ends with an update of the weights. Always true without `gradient_accumulation_steps`, where
    /// each micro-batch counts as a step (-1: an update at the end of each epoch of the training sets).
    pub(super) fn updates_weights(&mut self, step: u64, process: &TrainerProcess) -> bool {
        match process.train.gradient_accumulation_steps {
            n if n < 0 => {
                let training_steps = self.steps_by_kind(step + 1, process).0;
                !self.is_regularisation(step + 1, process)
                    && training_steps.is_multiple_of(self.batches.len().max(1) as u64)
            }
            n => (step + 1).is_multiple_of(n.max(1) as u64),
        }
    }

    /// The batch of micro-batch `micro` of step `step` (both from 0).
    pub(super) fn batch_of_step(&mut self, step: u64, micro: u64, process: &TrainerProcess) -> StepBatch {
        let regularisation = self.is_regularisation(step + 1, process);
        let (training_steps, regularisation_steps) = self.steps_by_kind(step, process);
        let (list, steps_before, weight) = if regularisation {
            (&self.regularisation, regularisation_steps, process.train.reg_weight)
        } else {
            (&self.batches, training_steps, 1.0)
        };
        let count = list.len() as u64;
        let index = steps_before * process.train.gradient_accumulation.max(1) + micro;
        let order = epoch_order(list.len(), self.seed, index / count, regularisation);
        let batch = list[order[(index % count) as usize]].clone();
        StepBatch {
            weight,
            item_weight: self.datasets[batch.dataset].options.loss_multiplier,
            batch,
        }
    }

    /// The caption of an item when captions are encoded before the training, as in ai-toolkit: built once, with one order of its
    /// tokens and one choice of random triggers, and without dropout of tokens.
    pub(super) fn frozen_caption(&self, dataset: usize, item: usize) -> String {
        let set = &self.datasets[dataset];
        let mut rules = set.options.captions.clone();
        rules.caption_dropout = 0.0;
        rules.tags.token_dropout_rate = 0.0;
        let mut generator = generator_for(self.seed, "caption", dataset as u64, item as u64);
        build_caption(&set.items[item].caption, &rules, &mut generator)
    }

    /// The changed captions of a batch. Draws from the micro-batch's generator.
    pub(super) fn captions(
        &self,
        batch: &Batch,
        process: &TrainerProcess,
        generator: &mut TorchGenerator,
    ) -> Vec<String> {
        let dataset = &self.datasets[batch.dataset];
        let rules = &dataset.options.captions;
        let caches_captions = caches_captions(process);
        let caption = |i: &usize| {
            if process.train.unload_text_encoder && !caches_captions {
                // Only the trigger word is trained; regularisation sets have an empty caption.
                return dropped_caption(rules);
            }
            if caches_captions {
                return match drops_caption(rules, generator) {
                    true => dropped_caption(rules),
                    false => self.frozen_caption(batch.dataset, *i),
                };
            }
            build_caption(&dataset.items[*i].caption, rules, generator)
        };
        batch.items.iter().map(caption).collect()
    }

    /// The short captions of a batch, built without caption dropout and token dropout, as in ai-toolkit. `saturates`: short ones are
    /// repeated as the long ones are. Draws from the micro-batch's generator.
    pub(super) fn short_captions(&self, batch: &Batch, saturates: bool, generator: &mut TorchGenerator) -> Vec<String> {
        let dataset = &self.datasets[batch.dataset];
        let mut rules = dataset.options.captions.clone();
        rules.caption_dropout = 0.0;
        rules.tags.token_dropout_rate = 0.0;
        if !saturates {
            rules.saturation = 0.0;
        }
        let items = batch.items.iter().map(|index| &dataset.items[*index]);
        let short = items.map(|item| item.short_caption.as_deref().unwrap_or_default());
        short.map(|caption| build_caption(caption, &rules, generator)).collect()
    }

    /// The items of a batch.
    pub(super) fn items_of<'a>(&'a self, batch: &'a Batch) -> impl Iterator<Item = &'a TrainingImage> {
        let items = &self.datasets[batch.dataset].items;
        batch.items.iter().map(|i| &items[*i])
    }

    /// The generator by which the image at a place of a batch is drawn.
    pub(super) fn image_generator(&self, place: usize, (step, micro): BatchNumber) -> TorchGenerator {
        generator_for(self.seed, &format!("image/{place}"), step, micro)
    }

    /// Whether the images of a batch differ each time, or are changed together: they have no latents of their own.
    pub(super) fn draws_images(&self, batch: &Batch, pixels: &PixelOptions) -> bool {
        let options = &self.datasets[batch.dataset].options;
        let is_cached = options.cache_latents || options.cache_latents_to_disk;
        options.draws_images() || !(is_cached || pixels.is_neutral(options.regularisation))
    }

    /// The latents of a batch. Images that differ each time are drawn by generators of (seed, place in the batch, step, micro-batch).
    /// `pixels`: how images are changed whose latents are not cached. `loaded`: what was read ahead of it.
    pub(super) fn latents(
        &self,
        (batch, loaded): (&Batch, &mut [LoadedImage]),
        number: BatchNumber,
        pixels: &PixelOptions,
        latents: &mut LatentStore,
        codec: &dyn Codec,
    ) -> Result<BatchLatents> {
        let options = &self.datasets[batch.dataset].options;
        let mut out = Vec::with_capacity(batch.items.len());
        if !self.draws_images(batch, pixels) {
            let (in_memory, on_disk) = (options.cache_latents, options.cache_latents_to_disk);
            let mut kept = Vec::new();
            for (place, item) in self.items_of(batch).enumerate() {
                let mut pixels = loaded.get_mut(place).and_then(|loaded| loaded.pixels.take());
                if self.keeps_pixels {
                    let own = match pixels {
                        Some(pixels) => pixels,
                        None => load_pixels(item)?,
                    };
                    kept.push(own.clone());
                    pixels = Some(own);
                }
                out.push(latents.get(item, pixels, codec, in_memory, on_disk)?);
            }
            return Ok(BatchLatents {
                latents: Tensor::stack(&out, 0)?,
                pixels: self.kept(&kept)?,
                crops: self.items_of(batch).map(|item| item.plan.crop).collect(),
                moves: vec![Vec::new(); out.len()],
            });
        }
        let (mut images, mut crops, mut moves) = (Vec::new(), Vec::new(), Vec::new());
        for (place, item) in self.items_of(batch).enumerate() {
            let drawn = match loaded.get_mut(place).and_then(|loaded| loaded.drawn.take()) {
                Some(drawn) => drawn,
                None => PreparedImage::load(item, options, &mut self.image_generator(place, number))?,
            };
            images.push(drawn.pixels);
            crops.push(drawn.crop);
            moves.push(drawn.moves);
        }
        let images = pixels.apply(images, options.regularisation)?;
        for (place, image) in images.iter().enumerate() {
            let name = self.name_of_draw("image", place, number);
            out.push(latents.encode_drawn(image, codec, &name)?);
        }
        Ok(BatchLatents {
            latents: Tensor::stack(&out, 0)?,
            pixels: self.kept(&images)?,
            crops,
            moves,
        })
    }

    /// The pixels of a batch, if they are needed beside its latents.
    fn kept(&self, images: &[Tensor]) -> Result<Option<Tensor>> {
        let stacked = self.keeps_pixels.then(|| Tensor::stack(images, 0));
        Ok(stacked.transpose()?)
    }

    /// The latents of a batch's images before their `augmentations`, [b, c, h, w] on the CPU, whose crops and `augments` are those of
    /// [`Self::latents`]. `None`: its data set has no `augmentations`.
    pub(super) fn unaugmented_latents(
        &self,
        (batch, loaded): (&Batch, &mut [LoadedImage]),
        number: BatchNumber,
        latents: &LatentStore,
        codec: &dyn Codec,
    ) -> Result<Option<Tensor>> {
        let options = &self.datasets[batch.dataset].options;
        if options.augmentations.list.is_empty() {
            return Ok(None);
        }
        let mut out = Vec::with_capacity(batch.items.len());
        for (place, item) in self.items_of(batch).enumerate() {
            let pixels = match loaded.get_mut(place).and_then(|loaded| loaded.unaugmented.take()) {
                Some(pixels) => pixels,
                None => PreparedImage::load_unaugmented(item, options, &mut self.image_generator(place, number))?,
            };
            let name = self.name_of_draw("unaugmented", place, number);
            out.push(latents.encode_drawn(&pixels, codec, &name)?);
        }
        Ok(Some(Tensor::stack(&out, 0)?))
    }

    /// What seeds the codec's posterior of an image that was drawn for a place in a batch.
    fn name_of_draw(&self, what: &str, place: usize, (step, micro): BatchNumber) -> String {
        format!("{}/{what}/{place}/{step}/{micro}", self.seed)
    }

    /// The latents of a batch's control images, [b, c, h, w] on the CPU, whose pixels move as those of their images. `None`: its data set
    /// has none.
    pub(super) fn control_latents(
        &self,
        (batch, moves): (&Batch, &[Vec<SpatialChange>]),
        loaded: &mut [LoadedImage],
        number: BatchNumber,
        latents: &mut LatentStore,
        codec: &dyn Codec,
    ) -> Result<Option<Tensor>> {
        let options = &self.datasets[batch.dataset].options;
        let mut out = Vec::with_capacity(batch.items.len());
        for (place, item) in self.items_of(batch).enumerate() {
            let Some(control) = self.control_of((batch, place), item, number) else {
                return Ok(None);
            };
            let control = &*control;
            let pixels = loaded.get_mut(place).and_then(|loaded| loaded.control.take());
            if let Some(moves) = moves.get(place).filter(|moves| !moves.is_empty()) {
                let name = self.name_of_draw("control", place, number);
                let pixels = match pixels {
                    Some(pixels) => pixels,
                    None => load_control(item, control, moves)?,
                };
                out.push(latents.encode_drawn(&pixels, codec, &name)?);
                continue;
            }
            let (in_memory, on_disk) = (options.cache_latents, options.cache_latents_to_disk);
            out.push(latents.get_control((item, control), pixels, codec, in_memory, on_disk)?);
        }
        Ok(Some(Tensor::stack(&out, 0)?))
    }

    /// The pixels of a batch's control images, [b, 3, height, width] from 0 to 1 on the CPU, which move as those of their images: for an
    /// adapter, which is conditioned on pixels. They are read each time, as in ai-toolkit. `None`: its data set has none.
    pub(super) fn control_pixels(
        &self,
        (batch, moves): (&Batch, &[Vec<SpatialChange>]),
        loaded: &mut [LoadedImage],
        number: BatchNumber,
    ) -> Result<Option<Tensor>> {
        let mut out = Vec::with_capacity(batch.items.len());
        for (place, item) in self.items_of(batch).enumerate() {
            let Some(control) = self.control_of((batch, place), item, number) else {
                return Ok(None);
            };
            let moves = moves.get(place).map_or(&[][..], Vec::as_slice);
            // From -1 to 1.
            let pixels = match loaded.get_mut(place).and_then(|loaded| loaded.control.take()) {
                Some(pixels) => pixels,
                None => load_control(item, &control, moves)?,
            };
            out.push(((pixels + 1.0)? * 0.5)?);
        }
        Ok(Some(Tensor::stack(&out, 0)?))
    }

    /// The control image of an item: its own, or one that is drawn for its place in the batch.
    pub(super) fn control_of<'i>(
        &self,
        (batch, place): (&Batch, usize),
        item: &'i TrainingImage,
        (step, micro): BatchNumber,
    ) -> Option<Cow<'i, Control>> {
        let dataset = &self.datasets[batch.dataset];
        match dataset.options.same_folder_controls {
            Some(controls) => {
                let mut generator = generator_for(self.seed, &format!("control/{place}"), step, micro);
                Some(Cow::Owned(controls.draw(&dataset.items, item, &mut generator)))
            }
            None => item.control.as_ref().map(Cow::Borrowed),
        }
    }
}
