//! The memory of a training: its steps, its updates, its saves.

use super::{CAPTION_TOKENS, Job, MAX_BATCH, MAX_SIDE, Model, small_fraction};
use crate::plan::device_factors::Phase;
use crate::plan::json::{dtype_bytes, flag, largest, number, text};
use crate::plan::memory_options::MemoryOptions;
use crate::plan::paired_images::trains_pairs;
use crate::plan::requests::{sample_sizes, slider_sampling_sizes, validation_side};
use crate::plan::slider::{SliderKind, slider_sizes};
use crate::plan::walk::build::{TrainedTensor, WeightTotals};
use crate::plan::walk::{Backend, Walk};
use serde_json::Value;

/// Float32 tensors of the size of the largest trained one while candle's operations update it.
const GPU_STEP_COPIES: f64 = 6.0;

/// An adapter has only large tensors if no more than this fraction of its numbers is in small ones.
const LARGE_TENSORS: f64 = 0.1;

/// The bytes of a training step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    /// The peak of the forward pass.
    pub(super) forward: f64,
    /// The peak of both passes.
    pub(super) peak: f64,
    /// All gradients.
    pub(super) gradients: f64,
    /// The FLOPs of both passes, of the largest batch.
    pub(super) flops: f64,
}

/// Images of one size that are trained together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct DataBatch {
    /// Height and width in pixels.
    pub(super) size: [f64; 2],
    pub(super) items: f64,
}

impl DataBatch {
    /// Pixels of an image.
    pub(super) fn pixels(&self) -> f64 {
        self.size[0] * self.size[1]
    }
}

/// The predictions of a step that are kept for one backward pass.
#[derive(Clone, Copy, Debug)]
struct Predictions {
    /// How often an item is in the batch of a pass.
    copies: f64,
    /// Passes one after another.
    passes: u32,
}

impl Predictions {
    fn of(body: &Value, options: &MemoryOptions) -> Self {
        let one = Self { copies: 1.0, passes: 1 };
        match (trains_pairs(body), uses_guidance(body)) {
            // The images, then their pairs.
            (true, _) => Self { passes: 2, ..one },
            (false, true) if options.sequential_cfg => Self { passes: 2, ..one },
            (false, true) => Self { copies: 2.0, ..one },
            (false, false) => one,
        }
    }
}

/// Whether the prediction of a step is one with classifier-free guidance: with the prompt and without it, both with gradients (`train.do_cfg`).
fn uses_guidance(body: &Value) -> bool {
    let usual = number(body, "/train/cfg_scale").unwrap_or(1.0);
    let is_random = flag(body, "/train/do_random_cfg");
    let largest = match is_random {
        true => number(body, "/train/max_cfg_scale").unwrap_or(usual),
        false => usual,
    };
    let rescale = number(body, "/train/cfg_rescale").unwrap_or(usual);
    // At a scale of 1, the prediction is that with the prompt.
    (is_random || flag(body, "/train/do_cfg")) && (largest != 1.0 || rescale != 1.0) && SliderKind::of(body).is_none()
}

/// Whether a training has a preservation loss.
pub(in crate::plan) fn preserves(body: &Value) -> bool {
    let keys = ["/train/diff_output_preservation", "/train/blank_prompt_preservation"];
    keys.iter().any(|key| flag(body, key))
}

/// Whether each image of a data set is changed each time.
fn is_augmented(set: &Value) -> bool {
    let lists = ["/augments", "/augmentations"].map(|key| set.pointer(key).and_then(Value::as_array));
    lists.into_iter().flatten().any(|list| !list.is_empty())
}

/// Whether another part of each image of a data set is trained on each time.
fn draws_crops(set: &Value) -> bool {
    flag(set, "/random_crop") && set.get("buckets").and_then(Value::as_bool) == Some(false)
}

/// Whether the latents of a data set are cached.
fn is_cached(set: &Value) -> bool {
    let draws = is_augmented(set) || flag(set, "/control_from_same_folder");
    (flag(set, "/cache_latents") || flag(set, "/cache_latents_to_disk")) && !draws
}

/// Height and width of the largest images of a data set, as far as its section gives them.
fn largest_size(set: &Value) -> [f64; 2] {
    let fixed = |index: usize| set.get("size")?.get(index)?.as_f64().filter(|side| *side > 0.0);
    if let (Some(width), Some(height)) = (fixed(0), fixed(1)) {
        return [height, width].map(|side| side.min(MAX_SIDE));
    }
    let side = largest(set.get("resolution"));
    // An image of a bucket has at most the pixels of the square.
    [side.filter(|side| *side > 0.0).unwrap_or(512.0).min(MAX_SIDE); 2]
}

impl Job<'_> {
    /// The phases of a training, and the bytes that come and go.
    pub(super) fn training(&self, model: &Model, options: &MemoryOptions, backend: Backend) -> (Vec<Phase>, f64) {
        let body = self.body;
        let trained: Vec<TrainedTensor> = model.weights.iter().flat_map(|w| w.trained.iter().copied()).collect();
        let count: f64 = trained.iter().map(|tensor| tensor.elements).sum();
        let largest = 4.0 * trained.iter().map(|tensor| tensor.elements).fold(0.0, f64::max);
        let state: f64 = trained
            .iter()
            .map(|tensor| self.optimizer.state_bytes(tensor.elements, tensor.factored))
            .sum();
        let ema = if flag(body, "/train/ema_config/use_ema") {
            4.0 * count
        } else {
            0.0
        };
        // While images are sampled and files are saved, the average is in the model, and its weights are kept.
        let swapped = match self.is_full {
            true => ema * backend.width / 4.0,
            false => ema,
        };
        // A model's own trained weights are counted with their component.
        let weights = if self.is_full { 0.0 } else { 4.0 * count };
        let held = weights + state + ema;

        let accumulation = number(body, "/train/gradient_accumulation").unwrap_or(1.0);
        let legacy = body
            .pointer("/train/gradient_accumulation_steps")
            .and_then(Value::as_f64)
            .unwrap_or(1.0);
        // The gradients of a preservation loss, and of the passes of a slider, are added to those before.
        let accumulates = accumulation > 1.0 || legacy != 1.0 || preserves(body) || SliderKind::of(body).is_some();
        let micro_batches = match legacy {
            // All batches of an epoch.
            legacy if legacy < 0.0 => f64::INFINITY,
            legacy => accumulation.max(legacy),
        };
        // The gradients of two passes are complete at the end of the backward pass.
        let has_one_pass = Predictions::of(body, options).passes == 1;
        let fused =
            options.fused_backward && self.is_full && self.optimizer.is_separable && !accumulates && has_one_pass;
        let clips = number(body, "/train/max_grad_norm").unwrap_or(1.0) > 0.0 && self.optimizer.clips;
        let clipped = if clips { largest } else { 0.0 };

        let data = self.data();
        let checkpointed = self.is_checkpointed(options);
        let gradient_width = self.gradient_width(backend);
        let share = self.swapped_share();
        let step_with = |checkpointed: bool| {
            let mut step = self.step(model, (options, backend), fused || share.is_some(), checkpointed, &data);
            // Those of other tensors are freed as soon as they are complete.
            if let (Some(share), false) = (share, fused) {
                step.gradients = share * count * gradient_width;
                step.peak += step.gradients;
            }
            step
        };
        let step = step_with(checkpointed);
        // Kept activations fill whole pages, which are freed as a whole. The allocator keeps free memory between the tensors that
        // come and go within a block, which are those of gradient checkpointing.
        let block = match checkpointed || !backend.is_cpu() {
            true => step,
            false => step_with(true),
        };
        let gradients = step.gradients;
        // They are in float32, whatever the gradients are in.
        let sums = if accumulates {
            gradients * 4.0 / gradient_width
        } else {
            gradients
        };
        let step_copies = match backend.is_cpu() {
            true => self.optimizer.step_copies,
            false => self.optimizer.step_copies.max(GPU_STEP_COPIES),
        };
        let update = clipped + step_copies * largest;
        let activations = step.peak - gradients;
        let phase = |name: &'static str, more: f64, transient: f64| Phase {
            name,
            held: held + more,
            transient,
        };
        let mut phases = vec![match (fused, accumulates) {
            (true, _) => phase("step", 0.0, step.peak.max(largest + update)),
            (false, false) => phase("step", gradients, activations.max(update)),
            // The sums of earlier micro-batches, or the gradients of the only earlier one. A sum is a new tensor.
            (false, true) if micro_batches > 2.0 => phase("step", sums + gradients, activations.max(largest)),
            (false, true) => phase("step", 2.0 * gradients, activations.max(largest)),
        }];
        if !fused {
            phases.push(phase("update", sums, update));
        }
        if !self.caches_all_latents() {
            let largest = self.largest_uncached();
            let encode = data
                .iter()
                .filter(|batch| batch.pixels() <= largest)
                .map(|batch| self.encoding(model, options, backend, batch.size) + self.pixels_of(batch));
            let sums = if accumulates { sums } else { 0.0 };
            phases.push(phase("encoding images", sums, encode.fold(0.0, f64::max)));
        }
        let mut samples = sample_sizes(body, self.multiple());
        samples.extend(slider_sampling_sizes(body, self.multiple()));
        if !samples.is_empty() {
            phases.push(phase(
                "sampling",
                swapped,
                self.images(model, options, backend, &samples),
            ));
        }
        if let Some(side) = validation_side(body) {
            let walk = self.denoising(model, backend, [side, side], 1.0, false, CAPTION_TOKENS);
            phases.push(phase("validation", 0.0, walk.peak()));
            // Before the first step: the network, the optimizer's state and the average exist.
            phases.push(phase(
                "encoding validation images",
                0.0,
                self.encoding(model, options, backend, [side, side]),
            ));
        }
        let others = phases.iter().skip(1).map(|phase| phase.transient);
        let first = match checkpointed {
            true => phases[0].transient,
            false => (block.peak - gradients).max(update),
        };
        let mut recycled = others.fold(block.forward.max(first), f64::max);
        if backend.is_cpu() {
            let saving = self.saving(model, count, largest);
            phases.push(phase("saving", swapped, saving));
            // Whole files are made of many small tensors; a model is saved tensor by tensor at the end. Of large tensors, such as whole
            // differences, no free memory is left between others.
            if !self.is_full && small_fraction(model) > LARGE_TENSORS {
                recycled = recycled.max(saving);
            }
        }
        (phases, recycled)
    }

    /// Bytes per number of a gradient.
    fn gradient_width(&self, backend: Backend) -> f64 {
        if self.is_full { backend.width } else { 4.0 }
    }

    /// The share of the trained numbers that a step trains (`train.do_paramiter_swapping`). `None`: it trains all.
    fn swapped_share(&self) -> Option<f64> {
        let share = number(self.body, "/train/paramiter_swapping_factor").unwrap_or(0.1);
        flag(self.body, "/train/do_paramiter_swapping").then_some(share.min(1.0))
    }

    /// The pixels of a batch in float32, if they are changed together before they are encoded.
    fn pixels_of(&self, batch: &DataBatch) -> f64 {
        let body = self.body;
        let contrast = number(body, "/train/img_multiplier").unwrap_or(1.0);
        let sets = body.get("datasets").and_then(Value::as_array);
        let draws = sets
            .into_iter()
            .flatten()
            .any(|set| is_augmented(set) || draws_crops(set));
        match contrast < 1.0 || flag(body, "/train/standardize_images") || draws {
            true => 12.0 * batch.pixels() * batch.items,
            false => 0.0,
        }
    }

    /// Whether every image is encoded before the model is loaded.
    fn caches_all_latents(&self) -> bool {
        let datasets = self.body.get("datasets").and_then(Value::as_array);
        datasets.is_some_and(|sets| !sets.is_empty() && sets.iter().all(is_cached))
    }

    /// The most pixels of an image whose latents are not cached, if some data sets are cached.
    fn largest_uncached(&self) -> f64 {
        let datasets = self.body.get("datasets").and_then(Value::as_array);
        let datasets = || datasets.into_iter().flatten();
        if !datasets().any(is_cached) {
            return f64::INFINITY;
        }
        let pixels = datasets()
            .filter(|set| !is_cached(set))
            .map(|set| largest_size(set).into_iter().product::<f64>());
        pixels.fold(0.0, f64::max)
    }

    /// The phase in which images are encoded, and the autoencoder is alone in memory.
    pub(super) fn caching_latents(&self, model: &Model, options: &MemoryOptions, backend: Backend) -> Phase {
        let data = self.data();
        let encode = data
            .iter()
            .map(|batch| self.encoding(model, options, backend, batch.size));
        let all = |weights: &WeightTotals| weights.resident + weights.quantised;
        Phase {
            name: "caching latents",
            held: 0.0,
            // The weights are counted in every phase, and are not loaded in this one.
            transient: all(&model.weights[2]) + encode.fold(0.0, f64::max) - model.weights.iter().map(all).sum::<f64>(),
        }
    }

    /// What a save needs besides the tensors.
    pub(super) fn saving(&self, model: &Model, count: f64, largest: f64) -> f64 {
        let width = dtype_bytes(text(self.body, "/save/dtype").or(Some("float16")));
        let converted = if width < 4.0 { width } else { 0.0 };
        if self.is_full || self.merges_network() {
            // A tensor at a time. One that is not trained is read from its file: its bytes, a tensor, and that in the dtype of
            // the save.
            let weights = match self.shapes.has_transformer() {
                true => &model.weights[1..2],
                false => &model.weights[..],
            };
            let frozen = weights.iter().map(|weights| weights.largest_frozen).fold(0.0, f64::max);
            let read = if width < 4.0 { 8.0 + width } else { 4.0 };
            return largest.max(frozen * read);
        }
        // A tensor at a time is written; all are converted before, if the file has another number format.
        (count * converted).max(largest)
    }

    pub(super) fn is_checkpointed(&self, options: &MemoryOptions) -> bool {
        let configured = self
            .body
            .pointer("/train/gradient_checkpointing")
            .and_then(Value::as_bool);
        options.gradient_checkpointing || configured.unwrap_or(true)
    }

    /// A forward and a backward pass.
    pub(super) fn step(
        &self,
        model: &Model,
        (options, backend): (&MemoryOptions, Backend),
        fused: bool,
        checkpointed: bool,
        data: &[DataBatch],
    ) -> Step {
        let trains_text = self.trains()[1];
        let Predictions { copies, passes } = Predictions::of(self.body, options);
        let mut peak: f64 = if trains_text {
            0.0
        } else {
            self.text_pass(model, backend, CAPTION_TOKENS)
        };
        let (mut all_gradients, mut all_forward, mut flops): (f64, f64, f64) = (0.0, peak, 0.0);
        let gradient_width = self.gradient_width(backend);
        let networks = self.feature_extractors(backend);
        let networks: Vec<_> = match networks.is_empty() {
            true => vec![None],
            false => networks.iter().map(|(network, _)| Some(network)).collect(),
        };
        let walks = data
            .iter()
            .flat_map(|batch| networks.iter().map(move |network| (batch, *network)));
        for (batch, network) in walks {
            let walk = Walk::new(backend);
            let items = copies * batch.items;
            let latents = self.latents(&walk, model, batch.size, items);
            // The noise, the noisy latents and the target.
            let drawn = [0; 3].map(|_| walk.tensor(latents.dims(), false));
            let conditions = (!trains_text).then(|| self.conditions(&walk, items, &latents, CAPTION_TOKENS));
            let gradients = walk.forward_backward(fused, || {
                let conditions = conditions
                    .clone()
                    .unwrap_or_else(|| self.trained_conditions(&walk, model, (&latents, batch.items), checkpointed));
                let conditions = self.with_decorator(&walk, conditions);
                let conditions = self.with_image_adapter(&walk, model, &latents, conditions, checkpointed);
                let mut predicted = None;
                for _ in 0..passes {
                    let one = model.denoiser.forward(&walk, &latents, &conditions, checkpointed);
                    // One loss of all predictions.
                    predicted = match (predicted, one) {
                        (Some(before), Some(one)) => Some(walk.add(&before, &one)),
                        (before, one) => one.or(before),
                    };
                }
                let predicted = predicted.unwrap_or_else(|| latents.clone());
                let with_features =
                    self.with_features(&walk, model, network, [&latents, &predicted], (options, checkpointed));
                all_forward = all_forward.max(walk.peak());
                with_features.unwrap_or(predicted)
            });
            all_gradients = all_gradients.max(
                gradients
                    .values()
                    .map(|gradient| gradient.dims().iter().product::<f64>() * gradient_width)
                    .sum(),
            );
            drop(drawn);
            peak = peak.max(walk.peak());
            flops = flops.max(walk.flops());
        }
        Step {
            forward: all_forward,
            peak,
            gradients: all_gradients,
            flops,
        }
    }

    /// The batches of the data sets: those that were seen, or else squares of the resolutions.
    pub(super) fn data(&self) -> Vec<DataBatch> {
        let mut batches = self.data_batches();
        if flag(self.body, "/train/short_and_long_captions") {
            // Each image is trained with both its captions.
            batches.iter_mut().for_each(|batch| batch.items *= 2.0);
        }
        batches
    }

    /// The batches of the data sets that need the most memory.
    fn data_batches(&self) -> Vec<DataBatch> {
        if !self.batches.is_empty() {
            let side = |side: u32| f64::from(side).clamp(1.0, MAX_SIDE);
            let batches = self.batches.iter().map(|batch| DataBatch {
                size: [side(batch.height), side(batch.width)],
                items: f64::from(batch.images).clamp(1.0, MAX_BATCH),
            });
            return batches.collect();
        }
        let usual = number(self.body, "/train/batch_size").unwrap_or(1.0);
        let datasets = self.body.get("datasets").and_then(Value::as_array);
        let batches = datasets.into_iter().flatten().map(|set| DataBatch {
            size: largest_size(set),
            items: number(set, "/batch_size").unwrap_or(usual).clamp(1.0, MAX_BATCH),
        });
        let mut batches: Vec<DataBatch> = batches.collect();
        if let Some((sizes, _)) = slider_sizes(self.body) {
            batches.extend(sizes.into_iter().map(|[width, height]| DataBatch {
                size: [height, width].map(|side| side.clamp(1.0, MAX_SIDE)),
                items: usual.clamp(1.0, MAX_BATCH),
            }));
        }
        // Those with the most pixels at once, and the largest image.
        batches.sort_by(|a, b| (b.items * b.pixels()).total_cmp(&(a.items * a.pixels())));
        let largest = batches.iter().copied().max_by(|a, b| a.pixels().total_cmp(&b.pixels()));
        batches.truncate(1);
        batches.extend(largest);
        if batches.is_empty() {
            batches.push(DataBatch {
                size: [512.0; 2],
                items: usual.clamp(1.0, MAX_BATCH),
            });
        }
        batches.dedup();
        batches
    }
}
