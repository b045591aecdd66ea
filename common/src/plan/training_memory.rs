//! Predicts the memory of a training of a code model (`lm_trainer`) by walking a step with the shapes of the model.

use super::device_factors::{
    CPU_LANGUAGE, CUDA, DeviceFactors, GPU_GRANULARITY, METAL, Need, Phase, retained_of_blocks,
};
use super::json::{dtype_bytes, flag, number, strings, text};
use super::memory_options::MemoryOptions;
use super::names::NameFilter;
use super::need::MemoryNeed;
use super::optimizers::{OptimizerFacts, facts_of};
use super::parameter_counts::{ParameterCounts, decoder_shapes};
use super::profile::MemoryProfile;
use super::qtype::QType;
use super::shapes::LanguageShapes;
use super::walk::build::{AdapterOptions, Builder, ComponentOptions, LoraLayers, StoredFractions};
use super::walk::{Backend, Decoder, DecoderRows, Form, Walk};
use crate::capability::DeviceKind;
use serde_json::Value;
use std::path::Path;

/// Bytes below which a tensor shares the allocator's pages with others.
const SMALL_TENSOR: f64 = 262_144.0;
/// The share of the gradients of a whole model that stays with the process of a CPU, where freed memory is not returned.
const RETAINED_GRADIENTS: f64 = 0.75;
/// Float32 tensors of the size of the largest trained one while candle's operations update it.
const GPU_STEP_COPIES: f64 = 6.0;

/// What the memory of a step depends on, besides the model and what is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSize {
    /// Rows that are computed at a time.
    pub rows: u32,
    /// Tokens of a row.
    pub context: u32,
    /// Whether a step has several batches, whose gradients are added.
    pub accumulates: bool,
    /// Whether blocks are computed again in the backward pass. Some memory profiles do so anyway.
    pub checkpointed: bool,
}

/// The memory of a training of a code model.
#[derive(Clone, Copy, Debug)]
pub struct TrainingMemory<'a> {
    /// The process (`JobSpec.process[i].kind.lm_train` as JSON).
    body: &'a Value,
    counts: ParameterCounts,
    shapes: LanguageShapes,
    optimizer: OptimizerFacts,
    /// Whether the whole model is trained.
    is_full: bool,
}

/// The bytes of a process, for tests: what stays and what comes and goes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct StepBytes {
    /// The peak of both passes, with the gradients of the trained tensors.
    pub(super) peak: f64,
    /// All gradients.
    pub(super) gradients: f64,
}

impl<'a> TrainingMemory<'a> {
    /// `body`: a process of type `lm_trainer` (`JobSpec.process[i].kind.lm_train` as JSON). `None`: the shapes of its model are not known.
    #[must_use]
    pub fn new(body: &'a Value, counts: ParameterCounts) -> Option<Self> {
        Some(Self {
            body,
            counts,
            shapes: counts.decoder?,
            optimizer: facts_of(body),
            is_full: body.get("network").is_none_or(Value::is_null),
        })
    }

    /// The tokens of the longest text of the model; 0: unknown.
    #[must_use]
    pub fn positions(&self) -> u32 {
        self.shapes.positions
    }

    /// The bytes under a profile on a kind of device, as [`MemoryNeed::under`](super::need::MemoryNeed::under) has them.
    #[must_use]
    pub fn bytes(&self, profile: MemoryProfile, kind: DeviceKind, step: StepSize) -> u64 {
        let (backend, factors) = self.device(kind);
        let bytes = whole(self.need(profile, backend, step, false).bytes(factors));
        match kind {
            DeviceKind::Cpu => bytes,
            _ => bytes.div_ceil(GPU_GRANULARITY) * GPU_GRANULARITY,
        }
    }

    /// The bytes of the first step alone, without loading and saving. On a CPU the optimizer's state is not in memory before its first update.
    #[must_use]
    pub fn first_step_bytes(&self, profile: MemoryProfile, kind: DeviceKind, step: StepSize) -> u64 {
        let (backend, factors) = self.device(kind);
        whole(self.need(profile, backend, step, true).bytes(factors))
    }

    fn device(&self, kind: DeviceKind) -> (Backend, &'static DeviceFactors) {
        let width = self.gpu_width();
        match kind {
            DeviceKind::Cpu => (Backend::CPU, &CPU_LANGUAGE),
            DeviceKind::Cuda => (
                Backend {
                    width,
                    form: Form::Cuda,
                },
                &CUDA,
            ),
            DeviceKind::Metal => (
                Backend {
                    width,
                    form: Form::Metal,
                },
                &METAL,
            ),
        }
    }

    /// The need under every profile on every kind of device.
    pub(super) fn memory_need(&self, step: StepSize) -> MemoryNeed {
        let gpus = [DeviceKind::Cuda, DeviceKind::Metal];
        MemoryNeed::new(
            gpus.map(|kind| MemoryProfile::on(false).map(|profile| self.bytes(profile, kind, step))),
            MemoryProfile::on(true).map(|profile| self.bytes(profile, DeviceKind::Cpu, step)),
        )
    }

    /// Bytes of a number on a GPU.
    fn gpu_width(&self) -> f64 {
        let configured = text(self.body, "/model/dtype");
        match (self.is_full, configured) {
            // A whole model is trained in float32, or in bfloat16 with stochastic rounding.
            (true, Some("bf16" | "bfloat16")) => 2.0,
            (true, _) => 4.0,
            (false, configured) => dtype_bytes(configured),
        }
    }

    /// The layers of the model, and the bytes of their weights.
    fn decoder(&self, options: &MemoryOptions, backend: Backend) -> (Decoder, Builder) {
        let network = self.body.get("network").filter(|network| !network.is_null());
        let rank = |network: &Value| number(network, "/linear").unwrap_or(16.0).clamp(1.0, 1e5);
        let drops = |network: &Value| number(network, "/dropout").is_some_and(|chance| chance > 0.0);
        let qtype = flag(self.body, "/model/quantize").then(|| {
            let named = text(self.body, "/model/qtype").and_then(QType::from_name);
            named.unwrap_or(QType::Nf4)
        });
        let (prefix, blocks) = match self.shapes.learned_positions {
            true => ("transformer", LoraLayers::Blocks(&["h"])),
            false => ("model", LoraLayers::Blocks(&["layers"])),
        };
        let mut builder = Builder::new(
            ComponentOptions {
                streamed: if self.is_full { 0.0 } else { options.denoiser_streamed },
                qtype: qtype.filter(|_| !self.is_full),
                // The output layer is not quantised, as in transformers.
                exclude: vec!["lm_head".to_owned()],
                trained: self.is_full.then(NameFilter::default),
                adapter: network.map(|network| AdapterOptions {
                    rank: rank(network),
                    dropout: drops(network),
                    drops_inputs: drops(network),
                    filter: NameFilter {
                        only_if_contains: strings(network.get("only_if_contains")),
                        ignore_if_contains: strings(network.get("ignore_if_contains")),
                    },
                    ..AdapterOptions::default()
                }),
                lora_prefix: prefix,
                lora_layers: blocks,
                width: backend.width,
                cpu: backend.is_cpu(),
                stored: match self.is_full || flag(self.body, "/model/from_config") {
                    true => StoredFractions::default(),
                    false => stored_fractions(&self.counts, &self.shapes),
                },
                ..ComponentOptions::default()
            },
            0,
        );
        (Decoder::new(&mut builder, &self.shapes, None), builder)
    }

    /// Both passes of a batch.
    fn step(&self, decoder: &Decoder, backend: Backend, step: StepSize, is_fused: bool, trained: f64) -> StepBytes {
        let walk = Walk::new(backend);
        let rows = DecoderRows {
            rows: f64::from(step.rows.max(1)),
            tokens: f64::from(step.context.max(1)),
            is_packed: self.body.get("packing").and_then(Value::as_bool).unwrap_or(true),
        };
        // Tokens, the numbers of their documents, their positions and targets.
        let ids = (!backend.is_cpu()).then(|| walk.tensor([rows.rows, rows.tokens, 2.0, 1.0], false));
        let _walked = decoder.train(&walk, rows, step.checkpointed, is_fused);
        drop(ids);
        let width = if self.is_full { backend.width } else { 4.0 };
        StepBytes {
            peak: walk.peak(),
            gradients: if is_fused { 0.0 } else { trained * width },
        }
    }

    /// The batches of a step.
    fn batches(&self, step: StepSize) -> f64 {
        let count = |key: &str| number(self.body, key).unwrap_or(1.0).max(1.0);
        (count("/train/batch_size") * count("/train/gradient_accumulation") / f64::from(step.rows.max(1))).ceil()
    }

    /// `is_first`: only the first step.
    fn need(&self, profile: MemoryProfile, backend: Backend, step: StepSize, is_first: bool) -> Need {
        let options = MemoryOptions::of(profile);
        let (decoder, builder) = self.decoder(&options, backend);
        let weights = &builder.weights;
        let trained: f64 = weights.trained.iter().map(|tensor| tensor.elements).sum();
        let largest = 4.0 * weights.trained.iter().map(|tensor| tensor.elements).fold(0.0, f64::max);
        let states = weights.trained.iter();
        let state: f64 = states
            .map(|tensor| self.optimizer.state_bytes(tensor.elements, tensor.factored))
            .sum();
        // A model's own trained weights are counted with the others.
        let held = state + if self.is_full { 0.0 } else { 4.0 * trained };

        let is_fused = options.fused_backward && self.is_full && self.optimizer.is_separable && !step.accumulates;
        let checkpointed = step.checkpointed || options.gradient_checkpointing;
        let step = StepSize { checkpointed, ..step };
        let passes = self.step(&decoder, backend, step, is_fused, trained);
        // Without gradient checkpointing, what is kept for the backward pass does not come and go.
        let block = match checkpointed || !backend.is_cpu() {
            true => passes,
            false => {
                let checkpointed = StepSize {
                    checkpointed: true,
                    ..step
                };
                self.step(&decoder, backend, checkpointed, is_fused, trained)
            }
        };
        let gradients = passes.gradients;
        // They are in float32, whatever the gradients are in.
        let sums = match step.accumulates && self.is_full {
            true => gradients * 4.0 / backend.width,
            false => gradients,
        };
        let clips = number(self.body, "/train/max_grad_norm").unwrap_or(1.0) > 0.0 && self.optimizer.clips;
        let copies = match backend.is_cpu() {
            true => self.optimizer.step_copies,
            false => self.optimizer.step_copies.max(GPU_STEP_COPIES),
        };
        let update = copies * largest + if clips { largest } else { 0.0 };
        let activations = passes.peak - gradients;
        let phase = |name: &'static str, more: f64, transient: f64| Phase {
            name,
            held: held + more,
            transient,
        };
        let mut phases = vec![match (is_fused, step.accumulates) {
            (true, _) => phase("step", 0.0, passes.peak.max(largest + update)),
            (false, false) => phase("step", gradients, activations.max(update)),
            // The sums of earlier batches, or the gradients of the only earlier one. A sum is a new tensor.
            (false, true) if self.batches(step) > 2.0 => phase("step", sums + gradients, activations.max(largest)),
            (false, true) => phase("step", 2.0 * gradients, activations.max(largest)),
        }];
        if !is_fused {
            phases.push(phase("update", sums, update));
        }
        // The gradients of a whole model are freed after the update, and do not fit what the next step needs.
        let kept_gradients = match self.is_full && !is_fused && !step.accumulates {
            true => RETAINED_GRADIENTS * gradients,
            false => 0.0,
        };
        let recycled = match backend.is_cpu() {
            true => retained_of_blocks(block.peak - block.gradients) + kept_gradients,
            false => activations.max(update),
        };
        if is_first && backend.is_cpu() {
            phases[0].held -= if is_fused { 0.0 } else { state };
        }
        if backend.is_cpu() && !is_first {
            let saving = self.saving(trained, largest);
            phases.push(phase("saving", 0.0, saving));
        }
        // Loading: a dense weight that is quantised, and a copy of it.
        if !is_first {
            phases.push(Phase {
                name: "loading",
                held: 0.0,
                transient: 2.0 * weights.largest_quantised,
            });
        }
        let small = weights
            .trained
            .iter()
            .filter(|tensor| 4.0 * tensor.elements < SMALL_TENSOR);
        Need {
            weights: weights.resident,
            quantised: weights.quantised,
            phases,
            recycled,
            small_fraction: match self.is_full {
                true => 0.0,
                false => small.map(|tensor| tensor.elements).sum::<f64>() / trained.max(1.0),
            },
            returns_freed_memory: options.returns_freed_memory,
            has_several_images: false,
        }
    }

    /// What a save needs besides the tensors.
    fn saving(&self, trained: f64, largest: f64) -> f64 {
        if self.is_full {
            return largest;
        }
        // A tensor at a time is written; all are converted before, if the file has another number format.
        let width = dtype_bytes(text(self.body, "/save/dtype").or(Some("float32")));
        let converted = if width < 4.0 { width } else { 0.0 };
        (trained * converted).max(largest)
    }
}

/// The size of the model that is made from the `config.json` in a folder. `None`: it has none, or that of another kind of model.
#[must_use]
pub fn new_model_counts(folder: &Path) -> Option<ParameterCounts> {
    let shapes = decoder_shapes(folder)?;
    let mut builder = Builder::new(ComponentOptions::default(), 0);
    let _decoder = Decoder::new(&mut builder, &shapes, None);
    Some(ParameterCounts {
        denoiser: whole(builder.weights.parameters),
        decoder: Some(shapes),
        ..ParameterCounts::default()
    })
}

/// The fractions of the weights of layers that are stored in fewer bits. The tables are not layers.
pub(super) fn stored_fractions(counts: &ParameterCounts, shapes: &LanguageShapes) -> StoredFractions {
    let (stored, width) = (counts.denoiser_stored, f64::from(shapes.width));
    let total = counts.denoiser as f64;
    let positions = match shapes.learned_positions {
        true => f64::from(shapes.positions) * width,
        false => 0.0,
    };
    let tables = (f64::from(shapes.vocabulary) * width + positions).min(total);
    let layers = (total - tables).max(1.0);
    let (quantised, halves) = (stored.quantised as f64, stored.halves as f64);
    // Of some Hugging Face folders, the tables (`wte`) are among the 16-bit weights.
    let has_tables = halves + quantised + tables > total;
    StoredFractions {
        quantised: (quantised / layers).min(1.0),
        bytes: stored.bytes as f64 / quantised.max(1.0),
        halves: ((halves - if has_tables { tables } else { 0.0 }).max(0.0) / layers).min(1.0),
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn whole(bytes: f64) -> u64 {
    bytes.clamp(0.0, 1e18) as u64
}
