//! What a run trains on: its data sets, and which batch has its turn.

use super::super::Context;
use super::options;
use crate::data::{Batch, Dataset, Item, batches, build_caption, epoch_order};
use crate::error::{EngineError, Result};
use crate::models::vae::AutoencoderKl;
use crate::rng::TorchGenerator;
use crate::training::LatentStore;
use aitk_common::job::process::TrainerProcess;
use candle_core::Tensor;
use std::collections::BTreeSet;

/// The data sets of a run and their batches. Training sets and regularisation sets have epochs of their own.
pub(super) struct Data {
    pub(super) datasets: Vec<Dataset>,
    /// Of the training sets.
    pub(super) batches: Vec<Batch>,
    /// Of the regularisation sets.
    pub(super) regularisation: Vec<Batch>,
    seed: u64,
    /// Steps that were looked at, and how many of them took regularisation images.
    counted: (u64, u64),
}

/// What one micro-batch trains on.
pub(super) struct Turn {
    pub(super) batch: Batch,
    /// Loss weight of its items.
    pub(super) weight: f64,
}

/// Whether step `number` takes regularisation images where there are any.
pub(super) fn takes_regularisation(number: u64, process: &TrainerProcess) -> bool {
    let saves = process.save.is_due(number);
    let samples = process.sample.is_due(number) && !process.train.disable_sampling;
    number.is_multiple_of(2) && !saves && !samples
}

impl Data {
    /// Opens every data set of the config. A mistake in the data shows here, before the model is loaded.
    pub(super) fn open(process: &TrainerProcess, seed: u64, cx: &mut Context<'_>) -> Result<Self> {
        let (mut datasets, mut said) = (Vec::new(), BTreeSet::new());
        for options in options::datasets(process, cx)? {
            let (dataset, warnings) = Dataset::open(options, process.model.arch.name.bucket_divisibility(), seed)?;
            // The same files at several resolutions have the same to be said of them.
            for warning in warnings {
                if said.insert(warning.clone()) {
                    cx.log("warn", warning);
                }
            }
            datasets.push(dataset);
        }
        let (batches, regularisation) = (batches(&datasets, seed, false), batches(&datasets, seed, true));
        if batches.is_empty() {
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
            counted: (0, 0),
        };
        let mut text = format!(
            "{} training images in {} batches",
            data.count(false),
            data.batches.len()
        );
        if !data.regularisation.is_empty() {
            text += &format!(
                ", {} regularisation images in {}",
                data.count(true),
                data.regularisation.len()
            );
        }
        cx.log("info", text);
        Ok(data)
    }

    fn count(&self, regularisation: bool) -> usize {
        let own = |d: &&Dataset| d.options.regularisation == regularisation;
        self.datasets.iter().filter(own).map(|d| d.items.len()).sum()
    }

    /// Whether step `number` (counted from 1, as saves are named) takes regularisation images: every even one does,
    /// except where a save or samples are due.
    fn is_regularisation(&self, number: u64, process: &TrainerProcess) -> bool {
        !self.regularisation.is_empty() && takes_regularisation(number, process)
    }

    /// How many of the first `steps` steps took training images, and how many took regularisation images.
    fn taken(&mut self, steps: u64, process: &TrainerProcess) -> (u64, u64) {
        if self.regularisation.is_empty() {
            return (steps, 0);
        }
        if self.counted.0 > steps {
            self.counted = (0, 0);
        }
        let (from, before) = self.counted;
        let new = (from + 1..=steps)
            .filter(|n| self.is_regularisation(*n, process))
            .count();
        self.counted = (steps, before + new as u64);
        (steps - self.counted.1, self.counted.1)
    }

    /// Passes over the training sets that are complete after `steps` steps.
    pub(super) fn epoch(&mut self, steps: u64, process: &TrainerProcess) -> u64 {
        let micro_batches = self.taken(steps, process).0 * process.train.gradient_accumulation.max(1);
        micro_batches / (self.batches.len() as u64).max(1)
    }

    /// Whether this step ends with an update of the weights: always, except with the legacy accumulation, where each
    /// micro-batch counts as a step (-1: an update at the end of each epoch of the training sets).
    pub(super) fn updates(&mut self, step: u64, process: &TrainerProcess) -> bool {
        match process.train.gradient_accumulation_steps {
            n if n < 0 => {
                let plain = self.taken(step + 1, process).0;
                !self.is_regularisation(step + 1, process) && plain.is_multiple_of(self.batches.len() as u64)
            }
            n => (step + 1).is_multiple_of(n.max(1) as u64),
        }
    }

    /// What micro-batch `micro` of step `step` (from 0) trains on.
    pub(super) fn turn(&mut self, step: u64, micro: u64, process: &TrainerProcess) -> Turn {
        let regularisation = self.is_regularisation(step + 1, process);
        let (plain, regular) = self.taken(step, process);
        let (list, steps_before, weight) = if regularisation {
            (&self.regularisation, regular, process.train.reg_weight)
        } else {
            (&self.batches, plain, 1.0)
        };
        let count = list.len() as u64;
        let index = steps_before * process.train.gradient_accumulation.max(1) + micro;
        let order = epoch_order(list.len(), self.seed, index / count, regularisation);
        let batch = list[order[(index % count) as usize]].clone();
        Turn {
            weight: weight * self.datasets[batch.dataset].options.loss_multiplier,
            batch,
        }
    }

    /// The captions of a batch as they are trained. Draws from the micro-batch's generator.
    pub(super) fn captions(
        &self,
        batch: &Batch,
        process: &TrainerProcess,
        generator: &mut TorchGenerator,
    ) -> Vec<String> {
        let dataset = &self.datasets[batch.dataset];
        let rules = &dataset.options.captions;
        let caption = |i: &usize| {
            if process.train.unload_text_encoder {
                // Nothing but the trigger word, and for regularisation not even that.
                let trigger = process.trigger_word.clone().filter(|_| !rules.regularisation);
                return trigger.unwrap_or_default();
            }
            build_caption(&dataset.items[*i].caption, rules, generator)
        };
        batch.items.iter().map(caption).collect()
    }

    /// The items of a batch.
    pub(super) fn items_of<'a>(&'a self, batch: &'a Batch) -> impl Iterator<Item = &'a Item> {
        let items = &self.datasets[batch.dataset].items;
        batch.items.iter().map(|i| &items[*i])
    }

    /// The latents of a batch, [b, c, h, w] on the CPU.
    pub(super) fn latents(&self, batch: &Batch, latents: &mut LatentStore, vae: &AutoencoderKl) -> Result<Tensor> {
        let options = &self.datasets[batch.dataset].options;
        let mut out = Vec::with_capacity(batch.items.len());
        for item in self.items_of(batch) {
            out.push(latents.get(item, vae, options.cache_latents, options.cache_latents_to_disk)?);
        }
        Ok(Tensor::stack(&out, 0)?)
    }
}
