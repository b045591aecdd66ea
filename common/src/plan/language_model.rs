//! Estimates the memory and the work of a training of a code model from the number of its parameters.
//!
//! Depth and width follow from that number by what published models have, on the side of more memory: StarCoder2-3B has `layers * width` of 1.7
//! times the root of its parameters, Llama-2 7B 1.6, Qwen2.5-0.5B 1.0, SmolLM-135M 1.5.

use super::device_factors::{CPU, CUDA, DeviceFactors, GPU_GRANULARITY, METAL, Need, Phase};
use super::json::{dtype_bytes, flag, number, text};
use super::memory_options::MemoryOptions;
use super::need::MemoryNeed;
use super::optimizers::facts;
use super::parameter_counts::ParameterCounts;
use super::profile::MemoryProfile;
use super::qtype::QType;
use serde_json::Value;

/// The family under which measured speeds of language models are stored.
pub(super) const FAMILY: &str = "language_model";
/// Floating-point operations of a pass of a family without published passes.
const FLOPS_PER_PASS: f64 = 6.5e12;
/// `layers * width`, as a multiple of the root of the parameters.
const DEPTH_TIMES_WIDTH: f64 = 1.75;
/// Parameters for each squared feature of a token.
const PARAMETERS_PER_SQUARED_WIDTH: f64 = 150.0;
/// Features that a block saves for its backward pass, in widths.
const SAVED_WIDTHS: f64 = 30.0;
/// Rows of the table of embeddings, which is the output layer in float32 while the loss is computed.
const VOCABULARY: f64 = 60_000.0;
/// The bytes of a chunk of logits (`engine/src/training/token_loss.rs`).
const LOGIT_BYTES: f64 = 67_108_864.0;
/// Inputs and outputs of the linear layers of a block, in widths.
const LAYER_WIDTHS: f64 = 24.0;
/// Steps that are assumed where the config has epochs.
const ASSUMED_STEPS: f64 = 1000.0;

/// What is known of a process of type `lm_trainer`.
pub(super) struct Estimate {
    /// The amount of work in passes.
    pub(super) passes: f64,
    /// The peak memory. `None`: the model is not known.
    pub(super) memory: Option<MemoryNeed>,
}

/// Estimates the needs of a process of type `lm_trainer`.
pub(super) fn estimate(body: &Value, counts: Option<ParameterCounts>) -> Estimate {
    let parameters = counts.map(|counts| counts.denoiser as f64).filter(|count| *count > 0.0);
    let training = Training::new(body, counts.unwrap_or_default());
    let steps = number(body, "/train/steps").unwrap_or(ASSUMED_STEPS).max(1.0);
    let accumulation = number(body, "/train/gradient_accumulation").unwrap_or(1.0).max(1.0);
    Estimate {
        passes: steps * accumulation * training.flops(parameters.unwrap_or(1e9)) / FLOPS_PER_PASS,
        memory: parameters.map(|_| training.memory_need()),
    }
}

struct Training<'a> {
    body: &'a Value,
    counts: ParameterCounts,
    /// Tokens of a batch, and of a row.
    tokens: f64,
    context: f64,
    /// The rank of the LoRA. `None`: the whole model is trained.
    rank: Option<f64>,
    checkpointed: bool,
}

impl<'a> Training<'a> {
    fn new(body: &'a Value, counts: ParameterCounts) -> Self {
        let context = number(body, "/context").unwrap_or(1024.0).clamp(2.0, 1e7);
        let batch = number(body, "/train/batch_size").unwrap_or(1.0).clamp(1.0, 1e6);
        let network = body.get("network").filter(|network| !network.is_null());
        Self {
            body,
            counts,
            tokens: context * batch,
            context,
            rank: network.map(|network| number(network, "/linear").unwrap_or(16.0).clamp(1.0, 1e5)),
            checkpointed: body
                .pointer("/train/gradient_checkpointing")
                .and_then(Value::as_bool)
                .unwrap_or(true),
        }
    }

    /// Floating-point operations of a batch: two for each parameter and token in the forward pass, as many for the gradients of the
    /// activations, and of the weights if these are trained; and the forward pass again.
    fn flops(&self, parameters: f64) -> f64 {
        let weights = if self.rank.is_none() { 2.0 } else { 0.0 };
        let again = if self.checkpointed { 2.0 } else { 0.0 };
        (4.0 + weights + again) * parameters * self.tokens
    }

    fn memory_need(&self) -> MemoryNeed {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let whole = |bytes: f64| bytes.clamp(0.0, 1e18) as u64;
        let on_gpu = |factors: &DeviceFactors| {
            MemoryProfile::on(false).map(|profile| {
                let bytes = whole(self.need(profile, self.gpu_width()).bytes(factors));
                bytes.div_ceil(GPU_GRANULARITY) * GPU_GRANULARITY
            })
        };
        let on_cpu = |profile| whole(self.need(profile, 4.0).bytes(&CPU));
        MemoryNeed::new([&CUDA, &METAL].map(on_gpu), MemoryProfile::on(true).map(on_cpu))
    }

    /// Bytes of a number on a GPU.
    fn gpu_width(&self) -> f64 {
        let configured = text(self.body, "/model/dtype");
        match (self.rank, configured) {
            // A whole model is trained in float32, or in bfloat16 with stochastic rounding.
            (None, Some("bf16" | "bfloat16")) => 2.0,
            (None, _) => 4.0,
            (Some(_), configured) => dtype_bytes(configured),
        }
    }

    /// `width`: bytes of a number of the arithmetic; 4 on a CPU.
    fn need(&self, profile: MemoryProfile, width: f64) -> Need {
        let options = MemoryOptions::of(profile);
        let parameters = self.counts.denoiser as f64;
        let root = parameters.sqrt();
        let features = (parameters / PARAMETERS_PER_SQUARED_WIDTH).sqrt();
        let depth_width = DEPTH_TIMES_WIDTH * root;
        let embedding = (VOCABULARY * features).min(parameters);
        let trained = match self.rank {
            Some(rank) => LAYER_WIDTHS * rank * depth_width,
            None => parameters,
        };
        let optimizer = facts(text(self.body, "/train/optimizer").unwrap_or("adamw"));
        let trained_width = if self.rank.is_some() { 4.0 } else { width };
        let state = trained * optimizer.state.max(0.5);
        // Of a whole model, a gradient is freed when its weight was updated, where there is one batch to a step.
        let one_batch = number(self.body, "/train/gradient_accumulation").unwrap_or(1.0) <= 1.0;
        let is_fused = self.rank.is_none() && options.fused_backward && one_batch && optimizer.is_separable;
        let gradients = match is_fused {
            true => embedding.max(parameters / 16.0),
            false => trained,
        };
        let checkpointed = self.checkpointed || options.gradient_checkpointing;
        let block = SAVED_WIDTHS * features * self.tokens * width;
        let scores = self.tokens * self.context * (features / 64.0).max(1.0) * width;
        let kept = match checkpointed {
            true => depth_width * self.tokens * width + block,
            false => SAVED_WIDTHS * depth_width * self.tokens * width,
        };
        let mask = self.tokens * self.context * 4.0;
        let output = if width < 4.0 || self.rank.is_none() {
            0.0
        } else {
            embedding * 4.0
        };
        let transient = kept + scores + mask + 3.0 * LOGIT_BYTES + output + gradients * trained_width;
        let (weights, quantised) = match self.rank {
            None => (parameters * width, 0.0),
            Some(_) => self.frozen_weights(&options, width, embedding),
        };
        let lora = if self.rank.is_some() { trained * 4.0 } else { 0.0 };
        Need {
            weights: weights + lora,
            quantised,
            phases: vec![Phase { held: state, transient }],
            recycled: transient,
            small_fraction: 0.0,
            returns_freed_memory: options.returns_freed_memory,
            has_several_images: false,
        }
    }

    /// The bytes of frozen weights, and of those that are quantised when they are loaded.
    fn frozen_weights(&self, options: &MemoryOptions, width: f64, embedding: f64) -> (f64, f64) {
        let layers = self.counts.denoiser as f64 - embedding;
        let table = embedding * width;
        if flag(self.body, "/model/quantize") {
            let qtype = text(self.body, "/model/qtype").and_then(QType::from_name);
            return (table, layers * quantised_bytes(qtype));
        }
        // A CPU keeps 16-bit weights of files in 16 bits.
        let halves = (self.counts.denoiser_stored.halves as f64 / self.counts.denoiser.max(1) as f64).min(1.0);
        let bytes = if width < 4.0 { width } else { 4.0 - 2.0 * halves };
        (table + layers * bytes * (1.0 - options.denoiser_streamed), 0.0)
    }
}

/// Bytes of a quantised weight with its scales.
fn quantised_bytes(qtype: Option<QType>) -> f64 {
    match qtype {
        Some(QType::Nf4 | QType::Q4K) => 0.57,
        _ => 1.07,
    }
}

#[cfg(test)]
mod tests {
    use super::estimate;
    use crate::capability::DeviceKind;
    use crate::plan::parameter_counts::{CompactWeights, ParameterCounts};
    use crate::plan::profile::MemoryProfile;
    use serde_json::{Value, json};

    fn counts(parameters: u64) -> ParameterCounts {
        ParameterCounts {
            denoiser: parameters,
            denoiser_stored: CompactWeights {
                halves: parameters / 20 * 19,
                ..CompactWeights::default()
            },
            ..ParameterCounts::default()
        }
    }

    fn gib(body: &Value, profile: MemoryProfile, kind: DeviceKind) -> f64 {
        let need = estimate(body, Some(counts(3_030_371_328))).memory.unwrap();
        need.under(profile, kind) as f64 / f64::from(1 << 30)
    }

    #[test]
    fn needs_grow_with_what_is_trained_and_shrink_with_the_profile() {
        let lora = json!({"network": {"linear": 16}, "context": 1024, "model": {"dtype": "bfloat16"}});
        let full = json!({"context": 1024, "model": {"dtype": "bfloat16"}});
        let cuda = |body: &Value| gib(body, MemoryProfile::FullGpu, DeviceKind::Cuda);
        // 5.6 GiB of weights; Adam keeps 8 bytes for each.
        assert!((6.0..12.0).contains(&cuda(&lora)), "{}", cuda(&lora));
        assert!((33.0..50.0).contains(&cuda(&full)), "{}", cuda(&full));
        let small = gib(&lora, MemoryProfile::Extreme, DeviceKind::Cpu);
        assert!(
            small < 5.0 && small < gib(&lora, MemoryProfile::CpuOnly, DeviceKind::Cpu),
            "{small}"
        );
        let longer = json!({"network": {"linear": 16}, "context": 8192, "model": {"dtype": "bfloat16"}});
        assert!(cuda(&longer) > cuda(&lora) + 1.0);
        let kept = json!({"network": {"linear": 16}, "context": 8192, "model": {"dtype": "bfloat16"}, "train":
            {"gradient_checkpointing": false}});
        assert!(cuda(&kept) > cuda(&longer) + 5.0);
        let quantised =
            json!({"network": {"linear": 16}, "model": {"dtype": "bfloat16", "quantize": true, "qtype": "nf4"}});
        assert!(cuda(&quantised) < cuda(&lora) - 2.0);
    }

    #[test]
    fn without_the_model_the_memory_is_unknown_and_odd_numbers_are_bounded() {
        let body = json!({"train": {"steps": 1e300, "batch_size": 1e300}, "context": 1e300});
        assert_eq!(estimate(&body, None).memory, None);
        assert!(estimate(&body, Some(counts(u64::MAX))).memory.is_some());
        let steps = |steps: u64| estimate(&json!({"train": {"steps": steps}}), Some(counts(1 << 30))).passes;
        assert!((steps(200) / steps(100) - 2.0).abs() < 0.01);
    }
}
