//! Predicts the memory and the work of generating texts with a language model (`lm_generate`), from the shapes of the model.

use super::device_factors::{
    CPU_LANGUAGE, CUDA, DeviceFactors, GPU_GRANULARITY, METAL, Need, Phase, retained_of_blocks,
};
use super::json::{dtype_bytes, number, text};
use super::lm_export::{lora_bytes, lora_count};
use super::memory_options::MemoryOptions;
use super::need::MemoryNeed;
use super::parameter_counts::ParameterCounts;
use super::profile::MemoryProfile;
use super::prompt_files::LONGEST_PROMPT;
use super::shapes::LanguageShapes;
use super::training_memory::stored_fractions;
use super::walk::build::{Builder, ComponentOptions};
use super::walk::{Backend, Decoder, DecoderRows, Form, Walk};
use serde_json::Value;

/// Tokens of a prompt that are computed at a time (`engine/src/pipelines/text/generator.rs`).
const PREFILL_TOKENS: f64 = 512.0;
/// Tokens of a prompt in a file that was not seen.
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
                let seen = number(body, &format!("/generate/{LONGEST_PROMPT}"));
                longest.max(seen.map_or(ASSUMED_PROMPT, |bytes| (bytes / BYTES_PER_TOKEN).max(1.0)))
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

struct Generation<'a> {
    body: &'a Value,
    counts: ParameterCounts,
    shapes: LanguageShapes,
    prompts: Prompts,
}

impl Generation<'_> {
    fn memory_need(&self) -> MemoryNeed {
        let width = dtype_bytes(text(self.body, "/model/dtype"));
        let on_gpu = |(form, factors): (Form, &DeviceFactors)| {
            MemoryProfile::on(false).map(|profile| {
                let bytes = whole(self.need(profile, Backend { width, form }).bytes(factors));
                bytes.div_ceil(GPU_GRANULARITY) * GPU_GRANULARITY
            })
        };
        let on_cpu = |profile| whole(self.need(profile, Backend::CPU).bytes(&CPU_LANGUAGE));
        MemoryNeed::new(
            [(Form::Cuda, &CUDA), (Form::Metal, &METAL)].map(on_gpu),
            MemoryProfile::on(true).map(on_cpu),
        )
    }

    fn need(&self, profile: MemoryProfile, backend: Backend) -> Need {
        let options = MemoryOptions::of(profile);
        let stored = stored_fractions(&self.counts, &self.shapes);
        let mut builder = Builder::new(
            ComponentOptions {
                streamed: options.denoiser_streamed,
                width: backend.width,
                cpu: backend.is_cpu(),
                stored,
                ..ComponentOptions::default()
            },
            0,
        );
        // A CPU reads the rows of the tables as they are stored.
        let table = match (backend.is_cpu(), stored.quantised > 0.5, stored.halves > 0.5) {
            (true, true, _) => Some(stored.bytes),
            (true, false, true) => Some(2.0),
            _ => None,
        };
        let decoder = Decoder::new(&mut builder, &self.shapes, table);
        let Prompts {
            longest,
            new_tokens,
            texts,
        } = self.prompts;
        let texts = number(self.body, "/generate/batch_size")
            .unwrap_or(1.0)
            .clamp(1.0, 1e5)
            .min(texts);
        // A prompt by itself, a part at a time, while the texts before it wait.
        let part = PREFILL_TOKENS.min(longest);
        let prefill = self.pass(&decoder, backend, [1.0, part], 1.0);
        let bias = if longest > part { 4.0 * part * longest } else { 0.0 };
        let step = self.pass(&decoder, backend, [texts, 1.0], texts);
        let transient = (prefill + bias).max(step);
        let n = f64::from;
        let token = 2.0 * n(self.shapes.kv_heads) * n(self.shapes.head_width) * backend.width;
        let layers = texts * n(self.shapes.layers) * token;
        let (rows, freed) = cache_rows(longest, longest + new_tokens, backend.is_cpu());
        // What a cache frees when it grows stays with the process, if freed memory is not returned.
        let freed = if options.returns_freed_memory { 0.0 } else { freed };
        let loras = lora_count(self.body) * lora_bytes(&self.shapes);
        Need {
            weights: builder.weights.resident + loras,
            quantised: 0.0,
            phases: vec![Phase {
                name: "generating text",
                held: layers * (rows + freed),
                transient,
            }],
            recycled: if backend.is_cpu() {
                retained_of_blocks(transient)
            } else {
                transient
            },
            small_fraction: 0.0,
            returns_freed_memory: options.returns_freed_memory,
            has_several_images: false,
        }
    }

    /// A pass over `rows` of tokens, and the logits of this many tokens after it.
    fn pass(&self, decoder: &Decoder, backend: Backend, [rows, tokens]: [f64; 2], logits: f64) -> f64 {
        let walk = Walk::new(backend);
        let hidden = decoder.forward(
            &walk,
            DecoderRows {
                rows,
                tokens,
                is_packed: false,
            },
        );
        drop(decoder.logits(&walk, logits));
        drop(hidden);
        walk.peak()
    }
}

/// Rows of a cache of keys and values that holds a text which grows token by token, and those that it freed when it grew the last time. On a CPU, rows
/// that were never written take no memory.
fn cache_rows(prompt: f64, total: f64, only_written: bool) -> (f64, f64) {
    let grown = |rows: f64| rows + MIN_GROWTH.max((rows / 2.0).floor());
    let (mut capacity, mut before) = (0.0, 0.0);
    let mut written = prompt.min(PREFILL_TOKENS);
    loop {
        if written > capacity {
            (before, capacity) = (capacity, grown(written));
        }
        if written >= total {
            return (if only_written { total } else { capacity }, before);
        }
        // Parts of a prompt, then up to the next row that does not fit.
        written = match written < prompt {
            true => (written + PREFILL_TOKENS).min(prompt),
            false => (capacity + 1.0).min(total),
        };
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn whole(bytes: f64) -> u64 {
    bytes.clamp(0.0, 1e18) as u64
}

#[cfg(test)]
mod tests {
    use super::{cache_rows, estimate};
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
                positions: 16_384,
                window: 4096,
                ..LanguageShapes::default()
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
        let mut with_lora = body.clone();
        with_lora["model"] = json!({"lora_path": "adapter"});
        let lora = gib(&with_lora, counts(), MemoryProfile::CpuOnly) - whole;
        assert!((0.08..0.12).contains(&lora), "24 million numbers: {lora}");
        with_lora["model"]["loras"] = json!([{"path": "another"}]);
        let two = gib(&with_lora, counts(), MemoryProfile::CpuOnly) - whole;
        assert!((two - 2.0 * lora).abs() < 1e-3, "{two} {lora}");
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
    }

    #[test]
    fn caches_grow_by_half() {
        assert_eq!(cache_rows(10.0, 20.0, false), (74.0, 0.0));
        assert_eq!(cache_rows(10.0, 80.0, false), (139.0, 74.0));
        assert_eq!(cache_rows(400.0, 900.0, false), (901.0, 600.0));
        assert_eq!(cache_rows(400.0, 900.0, true), (900.0, 600.0));
        assert_eq!(cache_rows(2000.0, 2000.0, false), (3000.0, 1536.0));
    }

    #[test]
    fn prompts_in_a_file_that_was_seen_count_as_those_of_a_list() {
        let body = |prompts: Value| json!({"generate": {"prompts": prompts, "max_new_tokens": 32}});
        let mut in_file = body(json!("prompts.txt"));
        let unseen = gib(&in_file, counts(), MemoryProfile::CpuOnly);
        in_file["generate"]["longest_prompt"] = json!(60_000);
        let seen = gib(&in_file, counts(), MemoryProfile::CpuOnly);
        assert_eq!(
            seen,
            gib(&body(json!(["x".repeat(60_000)])), counts(), MemoryProfile::CpuOnly)
        );
        assert!(seen > unseen + 0.1, "{seen} {unseen}");
    }

    #[test]
    fn odd_numbers_are_bounded() {
        let body = json!({"generate": {"prompts": "a.txt", "max_new_tokens": 1e300, "batch_size": 1e300, "num_completions": 1e300}});
        assert!(estimate(&body, Some(counts())).memory.is_some());
    }
}
