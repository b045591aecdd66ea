//! Predicts the memory and the work of generating texts with a language model (`lm_generate`), and of exporting one (`lm_export`), from the shapes
//! of the model.

use super::device_factors::{CPU, CUDA, DeviceFactors, GPU_GRANULARITY, METAL, Need, Phase};
use super::json::{dtype_bytes, number, text};
use super::memory_options::MemoryOptions;
use super::need::MemoryNeed;
use super::parameter_counts::ParameterCounts;
use super::profile::MemoryProfile;
use super::shapes::LanguageShapes;
use serde_json::Value;

/// Tokens of a prompt that are computed at a time (`engine/src/pipelines/text/generator.rs`).
const PREFILL_TOKENS: f64 = 512.0;
/// Tokens of a prompt in a file, which is not read.
const ASSUMED_PROMPT: f64 = 512.0;
/// Bytes of a token of code.
const BYTES_PER_TOKEN: f64 = 3.0;
/// Texts in a file.
const ASSUMED_PROMPTS: f64 = 100.0;
/// Rows by which a cache of keys and values grows at least (`engine/src/models/causal_lm/cache.rs`).
const MIN_GROWTH: f64 = 64.0;
/// Floating-point operations of a pass of a family without published passes.
const FLOPS_PER_PASS: f64 = 6.5e12;

/// What is known of a process.
pub(super) struct Estimate {
    /// The amount of work in passes.
    pub(super) passes: f64,
    /// The peak memory. `None`: the model is not known.
    pub(super) memory: Option<MemoryNeed>,
}

/// Estimates the needs of a process of type `lm_generate`.
pub(super) fn estimate(body: &Value, counts: Option<ParameterCounts>) -> Estimate {
    let parameters = counts.map_or(1e9, |counts| counts.denoiser as f64);
    let prompts = Prompts::of(body);
    let tokens = prompts.texts * (prompts.longest + prompts.new_tokens);
    let model = counts.and_then(|counts| Some((counts, counts.decoder?)));
    Estimate {
        passes: 2.0 * parameters * tokens / FLOPS_PER_PASS,
        memory: model.map(|(counts, shapes)| {
            Generation {
                body,
                counts,
                shapes,
                prompts,
            }
            .memory_need()
        }),
    }
}

/// The memory of a process of type `lm_export`: the largest tensor, the table of embeddings, in float32, with its copies.
pub(super) fn export_memory(counts: Option<ParameterCounts>) -> Option<MemoryNeed> {
    let shapes = counts?.decoder?;
    let table = f64::from(shapes.vocabulary) * f64::from(shapes.width) * 4.0;
    let need = Need {
        weights: 0.0,
        quantised: 0.0,
        phases: vec![Phase {
            held: 0.0,
            transient: EXPORT_COPIES * table + EXPORT_CHUNKS,
        }],
        recycled: 0.0,
        small_fraction: 0.0,
        returns_freed_memory: true,
        has_several_images: false,
    };
    Some(MemoryNeed::new([[0; 4]; 2], [whole(need.bytes(&CPU)); 4]))
}

/// Copies of the largest tensor while a model is exported.
const EXPORT_COPIES: f64 = 2.0;
/// Bytes of the rows that are converted at a time, with their copies.
const EXPORT_CHUNKS: f64 = 300e6;

/// The texts of a process.
#[derive(Clone, Copy, Debug)]
struct Prompts {
    /// Completions of all prompts.
    texts: f64,
    /// Tokens of the longest prompt.
    longest: f64,
    /// Tokens of a completion.
    new_tokens: f64,
}

impl Prompts {
    fn of(body: &Value) -> Self {
        let list = |key: &str| {
            body.pointer(key)
                .and_then(Value::as_array)
                .map(Vec::as_slice)
                .unwrap_or_default()
        };
        let (prompts, gaps) = (list("/generate/prompts"), list("/generate/fill"));
        let is_file = body.pointer("/generate/prompts").is_some_and(text_source_is_file);
        let length = |value: &Value, key: &str| value.pointer(key).and_then(Value::as_str).map_or(0, str::len);
        let of_texts = prompts.iter().map(|prompt| prompt.as_str().map_or(0, str::len));
        let of_gaps = gaps.iter().map(|gap| length(gap, "/prefix") + length(gap, "/suffix"));
        let longest = of_texts.chain(of_gaps).max().unwrap_or(0) as f64 / BYTES_PER_TOKEN;
        let count = prompts.len() as f64 + gaps.len() as f64;
        let repeats = number(body, "/generate/num_completions").unwrap_or(1.0).clamp(1.0, 1e6);
        Self {
            texts: repeats
                * if is_file {
                    count + ASSUMED_PROMPTS
                } else {
                    count.max(1.0)
                },
            longest: if is_file {
                longest.max(ASSUMED_PROMPT)
            } else {
                longest.max(1.0)
            }
            .min(1e7),
            new_tokens: number(body, "/generate/max_new_tokens")
                .unwrap_or(256.0)
                .clamp(1.0, 1e7),
        }
    }
}

/// Whether the prompts are the path of a file.
fn text_source_is_file(value: &Value) -> bool {
    value.as_str().is_some_and(|path| !path.is_empty())
}

/// Bytes that are in memory at a time.
struct Parts {
    /// Weights that stay.
    weights: f64,
    /// Of these, the table of embeddings.
    table: f64,
    /// Keys and values.
    cache: f64,
    /// Activations of a chunk of a prompt.
    activations: f64,
    logits: f64,
    /// The largest weight that is dequantised or read at each use.
    read: f64,
}

struct Generation<'a> {
    body: &'a Value,
    counts: ParameterCounts,
    shapes: LanguageShapes,
    prompts: Prompts,
}

impl Generation<'_> {
    fn memory_need(&self) -> MemoryNeed {
        let dtype = dtype_bytes(text(self.body, "/model/dtype"));
        let on_gpu = |factors: &DeviceFactors| {
            MemoryProfile::on(false).map(|profile| {
                let bytes = whole(self.need(profile, dtype).bytes(factors));
                bytes.div_ceil(GPU_GRANULARITY) * GPU_GRANULARITY
            })
        };
        let on_cpu = |profile| whole(self.cpu_bytes(profile));
        MemoryNeed::new([&CUDA, &METAL].map(on_gpu), MemoryProfile::on(true).map(on_cpu))
    }

    /// The memory on a CPU, fitted to measurements (docs/memory-measurements.md).
    fn cpu_bytes(&self, profile: MemoryProfile) -> f64 {
        let parts = self.parts(profile, 4.0, true);
        let resident = 1.05 * parts.weights + 0.24 * parts.table + 1.7 * parts.cache;
        1.02 * (CPU_BASE + resident + 0.31 * parts.activations + parts.read)
    }

    /// The memory on a GPU. `width`: bytes of a number of the arithmetic.
    fn need(&self, profile: MemoryProfile, width: f64) -> Need {
        let parts = self.parts(profile, width, false);
        let transient = parts.activations + parts.logits + parts.read;
        Need {
            weights: parts.weights,
            quantised: 0.0,
            phases: vec![Phase {
                held: parts.cache,
                transient,
            }],
            recycled: transient,
            small_fraction: 0.0,
            returns_freed_memory: MemoryOptions::of(profile).returns_freed_memory,
            has_several_images: false,
        }
    }

    /// `width`: bytes of a number of the arithmetic; 4 on a CPU.
    fn parts(&self, profile: MemoryProfile, width: f64, is_cpu: bool) -> Parts {
        let options = MemoryOptions::of(profile);
        let shapes = &self.shapes;
        let n = f64::from;
        let (total, stored) = (self.counts.denoiser as f64, self.counts.denoiser_stored);
        let table = (n(shapes.vocabulary) * n(shapes.width)).min(total);
        let quantised = stored.quantised as f64;
        // Of a Hugging Face folder, the table is among the 16-bit weights; in memory it has the width of the arithmetic.
        let has_table = stored.halves as f64 + quantised + table > total;
        let halves = (stored.halves as f64 - if has_table { table } else { 0.0 }).max(0.0);
        let plain = (total - table - halves - quantised).max(0.0);
        // A CPU keeps 16-bit weights of files in 16 bits.
        let half_bytes = if is_cpu { 2.0 } else { width };
        let dense = table * width + halves * half_bytes + plain * width;
        let weights = dense * (1.0 - options.denoiser_streamed) + stored.bytes as f64;
        // A weight that is dequantised or read at each use: of the feed-forward network, or the output layer.
        let is_untied = total - table >= self.block_parameters() + table * 0.9;
        let largest = n(shapes.intermediate) * n(shapes.width);
        let largest = if is_untied || options.denoiser_streamed > 0.0 {
            largest.max(table)
        } else {
            largest
        };
        let is_read = quantised > 0.0 || options.denoiser_streamed > 0.0;
        let read = if is_read { largest * width } else { 0.0 };
        let texts = number(self.body, "/generate/batch_size")
            .unwrap_or(1.0)
            .clamp(1.0, 1e5)
            .min(self.prompts.texts);
        let keys = 2.0 * n(shapes.kv_heads) * n(shapes.head_width) * width;
        let cache = texts
            * n(shapes.layers)
            * keys
            * capacity(self.prompts.longest, self.prompts.longest + self.prompts.new_tokens);
        let chunk = PREFILL_TOKENS.min(self.prompts.longest);
        let features = ACTIVATION_WIDTHS * n(shapes.width) + HIDDEN_WIDTHS * n(shapes.intermediate);
        let scores = n(shapes.heads) * chunk * self.prompts.longest;
        let logits = LOGIT_COPIES * texts * n(shapes.vocabulary) * 4.0;
        Parts {
            weights,
            table: table * width * (1.0 - options.denoiser_streamed),
            cache,
            activations: (chunk.max(texts) * features + scores) * width,
            logits,
            read,
        }
    }

    /// Parameters of the blocks.
    fn block_parameters(&self) -> f64 {
        let shapes = &self.shapes;
        let n = f64::from;
        let heads = 2.0 * n(shapes.heads) + 2.0 * n(shapes.kv_heads);
        n(shapes.layers)
            * (n(shapes.width) * n(shapes.head_width) * heads + 2.0 * n(shapes.width) * n(shapes.intermediate))
    }
}

/// Bytes of the program on a CPU.
const CPU_BASE: f64 = 0.051 * 1_073_741_824.0;
/// Features of a token that are in memory at a time, in widths.
const ACTIVATION_WIDTHS: f64 = 8.0;
/// The same in widths of the hidden layer of the feed-forward network.
const HIDDEN_WIDTHS: f64 = 3.0;
/// Copies of the logits of a step.
const LOGIT_COPIES: f64 = 3.0;

/// Rows of a cache of keys and values that holds a text which grows token by token.
fn capacity(prompt: f64, total: f64) -> f64 {
    let grown = |rows: f64| rows + MIN_GROWTH.max((rows / 2.0).floor());
    let mut capacity = grown(prompt.min(PREFILL_TOKENS));
    while capacity < total {
        capacity = grown(capacity + 1.0);
    }
    capacity
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn whole(bytes: f64) -> u64 {
    bytes.clamp(0.0, 1e18) as u64
}

#[cfg(test)]
mod tests {
    use super::{capacity, estimate, export_memory};
    use crate::capability::DeviceKind;
    use crate::plan::parameter_counts::{CompactWeights, ParameterCounts};
    use crate::plan::profile::MemoryProfile;
    use crate::plan::shapes::{LanguageKind, LanguageShapes};
    use serde_json::{Value, json};

    /// StarCoder2-3B in bfloat16.
    fn counts() -> ParameterCounts {
        ParameterCounts {
            denoiser: 3_030_371_328,
            denoiser_stored: CompactWeights {
                halves: 3_029_000_000,
                ..CompactWeights::default()
            },
            decoder: Some(LanguageShapes {
                kind: LanguageKind::Decoder,
                width: 3072,
                heads: 24,
                kv_heads: 2,
                head_width: 128,
                intermediate: 12_288,
                layers: 30,
                vocabulary: 49_152,
            }),
            ..ParameterCounts::default()
        }
    }

    fn gib(body: &Value, counts: ParameterCounts, profile: MemoryProfile) -> f64 {
        let need = estimate(body, Some(counts)).memory.unwrap();
        need.under(profile, DeviceKind::Cpu) as f64 / f64::from(1 << 30)
    }

    #[test]
    fn needs_follow_the_model_the_texts_and_the_profile() {
        let body = json!({"generate": {"prompts": ["fn a"], "max_new_tokens": 256}});
        let whole = gib(&body, counts(), MemoryProfile::CpuOnly);
        // 5.4 GiB in 16 bits, and the table of embeddings in 32.
        assert!((5.8..7.3).contains(&whole), "{whole}");
        assert!(gib(&body, counts(), MemoryProfile::Extreme) < 1.5);
        let long =
            json!({"generate": {"prompts": ["fn a"], "max_new_tokens": 16000, "batch_size": 8, "num_completions": 8}});
        assert!(gib(&long, counts(), MemoryProfile::CpuOnly) > whole + 7.0);
        let quantised = ParameterCounts {
            denoiser_stored: CompactWeights {
                quantised: 2_879_000_000,
                bytes: 1_620_000_000,
                halves: 0,
            },
            ..counts()
        };
        assert!(gib(&body, quantised, MemoryProfile::CpuOnly) < 3.2);
        assert_eq!(estimate(&body, None).memory, None);
        let export = export_memory(Some(counts()))
            .unwrap()
            .under(MemoryProfile::CpuOnly, DeviceKind::Cpu);
        assert!((1 << 30..3 << 30).contains(&export), "{export}");
    }

    #[test]
    fn caches_grow_by_half() {
        assert_eq!(capacity(10.0, 20.0), 74.0);
        assert_eq!(capacity(10.0, 80.0), 139.0);
        assert_eq!(capacity(400.0, 900.0), 901.0);
    }

    #[test]
    fn odd_numbers_are_bounded() {
        let body = json!({"generate": {"prompts": "a.txt", "max_new_tokens": 1e300, "batch_size": 1e300, "num_completions": 1e300}});
        assert!(estimate(&body, Some(counts())).memory.is_some());
    }
}
