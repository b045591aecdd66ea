//! Counts the parameters of a model's components from the headers of its files. Weights are not read.

use super::headers::{Tensor, WeightEncoding, tensors};
use super::shapes::{LanguageShapes, ModelShapes};
use crate::fsutil::regular;
use crate::gguf;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;

/// Number of parameters of each component of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ParameterCounts {
    /// The U-Net or transformer.
    pub denoiser: u64,
    /// All text encoders.
    pub text: u64,
    /// The VAE.
    pub vae: u64,
    /// The denoiser's parameters that its files store in a compact format.
    #[serde(default)]
    pub denoiser_stored: CompactWeights,
    /// The text encoders' parameters that their files store in a compact format.
    #[serde(default)]
    pub text_stored: CompactWeights,
    /// The VAE's parameters that its files store in a compact format.
    #[serde(default)]
    pub vae_stored: CompactWeights,
    /// The shapes of the layers, from the model's own configs. `None`: it has no configs, or is of another kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shapes: Option<ModelShapes>,
    /// The shapes of a model that generates texts. `None`: it is another model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decoder: Option<LanguageShapes>,
}

/// Parameters that files store with fewer bits than the compute dtype, and that keep these bits in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CompactWeights {
    /// Parameters of quantised weights, which stay in memory under every profile.
    pub quantised: u64,
    /// Size of the quantised weights in bytes, with their scales.
    pub bytes: u64,
    /// Parameters of a GGUF file's 16-bit weights. A CPU keeps them in 16 bits, or streams them like other weights.
    pub halves: u64,
}

/// Parameter counts of a component.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Count {
    total: u64,
    stored: CompactWeights,
}

impl ParameterCounts {
    /// Counts the parameters of a diffusers folder, a single safetensors or GGUF file, or the folder of a language model, whose
    /// parameters count as those of the denoiser. `None` when the path is none of these, or has no denoiser.
    #[must_use]
    pub fn read(path: &Path) -> Option<Self> {
        // A GGUF file alone in a folder, with a tokenizer beside it.
        let sole_file = gguf::model_file(path);
        let path = sole_file.as_deref().unwrap_or(path);
        let [denoiser, text, vae] = if is_language_model(path) {
            [parameters_below(path), Count::default(), Count::default()]
        } else if path.is_dir() {
            let component = |names: &[&str]| {
                let counts = names.iter().map(|name| parameters_below(&path.join(name)));
                counts.fold(Count::default(), Count::add)
            };
            [
                component(&["unet", "transformer"]),
                component(&["text_encoder", "text_encoder_2", "text_encoder_3"]),
                component(&["vae"]),
            ]
        } else {
            Self::of_file(path).ok()?
        };
        let counted = Self {
            denoiser: denoiser.total,
            text: text.total,
            vae: vae.total,
            denoiser_stored: denoiser.stored,
            text_stored: text.stored,
            vae_stored: vae.stored,
            shapes: if path.is_dir() { ModelShapes::read(path) } else { None },
            decoder: decoder_shapes(path),
        };
        (counted.denoiser > 0).then_some(counted)
    }

    fn of_file(path: &Path) -> io::Result<[Count; 3]> {
        let mut parts: [BTreeMap<String, Tensor>; 3] = Default::default();
        for (name, tensor) in tensors(path)? {
            // An average of the denoiser beside it (v1-5-pruned.safetensors), which is not loaded.
            if name.starts_with("model_ema.") {
                continue;
            }
            // Prefixes of the original Stable Diffusion checkpoints. Other tensors belong to the denoiser.
            let part = if name.starts_with("first_stage_model.") || name.starts_with("vae.") {
                2
            } else if ["cond_stage_model.", "conditioner.", "text_encoders."]
                .iter()
                .any(|prefix| name.starts_with(prefix))
            {
                1
            } else {
                0
            };
            parts[part].insert(name, tensor);
        }
        Ok(parts.map(|tensors| Count::of(&tensors)))
    }
}

impl Count {
    fn add(self, other: Self) -> Self {
        let (one, two) = (self.stored, other.stored);
        Self {
            total: self.total.saturating_add(other.total),
            stored: CompactWeights {
                quantised: one.quantised.saturating_add(two.quantised),
                bytes: one.bytes.saturating_add(two.bytes),
                halves: one.halves.saturating_add(two.halves),
            },
        }
    }

    fn of(tensors: &BTreeMap<String, Tensor>) -> Self {
        let each = tensors
            .iter()
            .map(|(name, tensor)| Self::of_tensor(name, tensor, tensors));
        each.fold(Self::default(), Self::add)
    }

    /// Counts one tensor. Names of sibling tensors show how it is quantised (see `kernels/src/weights/quantized.rs`).
    fn of_tensor(name: &str, tensor: &Tensor, all: &BTreeMap<String, Tensor>) -> Self {
        if is_quantization_metadata(name) {
            return Self::default();
        }
        let count = tensor.count();
        let plain = Self {
            total: count,
            stored: CompactWeights::default(),
        };
        // Embedding tables and one-dimensional tensors are dequantised when they are loaded.
        let tables = [
            "token_embedding",
            "position_embedding",
            "shared.weight",
            "embed_tokens.",
            "token_embd.",
        ];
        let table = tables.iter().any(|table| name.contains(table));
        let sibling = |ending: &str| all.get(&format!("{}{ending}", name.strip_suffix("weight")?));
        let outputs = tensor.shape.first().copied().unwrap_or(1);
        let quantised = |parameters: u64, bytes: u64, scales: u64| Self {
            total: parameters,
            stored: CompactWeights {
                quantised: parameters,
                bytes: bytes.saturating_add(scales.saturating_mul(4)),
                halves: 0,
            },
        };
        let flat = tensor.shape.len() < 2;
        match tensor.storage {
            WeightEncoding::Half if !table && !flat => Self {
                total: count,
                stored: CompactWeights {
                    halves: count,
                    ..CompactWeights::default()
                },
            },
            WeightEncoding::Blocks(block, bytes) if !table && !flat => {
                quantised(count, (count / block).saturating_mul(bytes), 0)
            }
            WeightEncoding::Float8 if !table && !flat => {
                let scale = sibling("scale_weight").or_else(|| sibling("weight_scale"));
                quantised(count, count, scale.map_or(outputs, |scale| scale.count().max(outputs)))
            }
            WeightEncoding::Signed => match sibling("SCB") {
                Some(_) => quantised(count, count, outputs),
                None => plain,
            },
            // Two weights per byte; the scales of the blocks are dequantised.
            WeightEncoding::Bytes => match sibling("weight.absmax") {
                Some(scales) => quantised(count.saturating_mul(2), count, scales.count()),
                None => plain,
            },
            _ => plain,
        }
    }
}

/// Whether a tensor holds the scales or other metadata of a quantised weight, which are counted with that weight.
fn is_quantization_metadata(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    let names = [
        "absmax",
        "quant_map",
        "nested_absmax",
        "nested_quant_map",
        "SCB",
        "weight_format",
        "scale_weight",
        "weight_scale",
        "scale_input",
        "input_scale",
        "scaled_fp8",
        "comfy_quant",
    ];
    name.contains(".quant_state.") || names.contains(&last)
}

/// The shapes of a model that generates texts, in a folder with its `config.json` or in a GGUF file.
pub(super) fn decoder_shapes(path: &Path) -> Option<LanguageShapes> {
    if path.is_dir() {
        return LanguageShapes::read_decoder(&language_model_config(path)?);
    }
    let (file, length) = regular::open(path).ok()?;
    let tensors = tensors(path).ok()?;
    let table = *tensors.get("token_embd.weight")?.shape.first()?;
    let metadata = gguf::read_metadata(&file, length).ok()?;
    let has_output = tensors.contains_key("output.weight");
    LanguageShapes::read_gguf(&metadata, u32::try_from(table).ok()?, has_output)
}

/// Whether a folder has a language model as transformers saves it, and no other one.
fn is_language_model(folder: &Path) -> bool {
    language_model_config(folder).is_some()
}

/// The `config.json` of such a folder.
fn language_model_config(folder: &Path) -> Option<serde_json::Value> {
    /// Longer than any config.
    const MAX_CONFIG_BYTES: u64 = 16 << 20;
    if folder.join("model_index.json").exists() {
        return None;
    }
    let bytes = regular::read(&folder.join("config.json"), MAX_CONFIG_BYTES).ok()?;
    let config: serde_json::Value = serde_json::from_slice(&bytes).ok()?;
    config.get("model_type").is_some().then_some(config)
}

/// Counts the parameters in a component's folder: the sum of its shards, or the largest file, because the others are the same
/// weights in another dtype. GGUF files count only if there are no others.
fn parameters_below(folder: &Path) -> Count {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Count::default();
    };
    let mut shards = BTreeMap::new();
    let (mut largest, mut gguf) = (Count::default(), Count::default());
    // At equal parameter counts, the one that takes more memory.
    let larger = |one: Count, two: Count| {
        let size = |count: &Count| (count.total, u64::MAX - count.stored.quantised);
        if size(&one) >= size(&two) { one } else { two }
    };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_gguf = name.ends_with(".gguf");
        if !is_gguf && !name.ends_with(".safetensors") {
            continue;
        }
        let Ok(tensors) = tensors(&entry.path()) else {
            continue;
        };
        if is_gguf {
            gguf = larger(gguf, Count::of(&tensors));
        } else if name.contains("-of-") {
            shards.extend(tensors);
        } else {
            largest = larger(largest, Count::of(&tensors));
        }
    }
    let found = larger(largest, Count::of(&shards));
    if found.total > 0 { found } else { gguf }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, header: &str) {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }

    #[test]
    fn folders_and_single_files_are_counted_from_their_headers() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        write(&at("m/unet/a-00001-of-00002.safetensors"), r#"{"w":{"shape":[10,10]}}"#);
        write(&at("m/unet/a-00002-of-00002.safetensors"), r#"{"v":{"shape":[5]}}"#);
        write(&at("m/text_encoder/model.safetensors"), r#"{"w":{"shape":[7]}}"#);
        write(&at("m/vae/d.safetensors"), r#"{"w":{"shape":[3]}}"#);
        write(&at("m/vae/d.fp16.safetensors"), r#"{"w":{"shape":[3]}}"#);
        let whole = ParameterCounts {
            denoiser: 105,
            text: 7,
            vae: 3,
            ..ParameterCounts::default()
        };
        assert_eq!(ParameterCounts::read(&at("m")), Some(whole));
        let single = r#"{"__metadata__":{"a":"b"},"model.diffusion_model.w":{"shape":[2,2]},"first_stage_model.w":{"shape":[6]},"cond_stage_model.w":{"shape":[]}}"#;
        write(&at("one.safetensors"), single);
        let counted = ParameterCounts {
            denoiser: 4,
            text: 1,
            vae: 6,
            ..ParameterCounts::default()
        };
        assert_eq!(ParameterCounts::read(&at("one.safetensors")), Some(counted));
    }

    #[test]
    fn the_average_of_a_denoiser_beside_it_is_not_counted() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("one.safetensors");
        let plain = r#""model.diffusion_model.w":{"shape":[2,2]},"first_stage_model.w":{"shape":[6]}"#;
        let average = r#""model_ema.diffusion_modelw":{"shape":[2,2]},"model_ema.decay":{"shape":[]}"#;
        write(&file, &format!("{{{plain}}}"));
        let without = ParameterCounts::read(&file).unwrap();
        write(&file, &format!("{{{plain},{average}}}"));
        assert_eq!(ParameterCounts::read(&file), Some(without));
        assert_eq!(without.denoiser, 4);
    }

    #[test]
    fn shapes_are_read_from_the_configs_of_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for part in ["unet", "text_encoder", "vae"] {
            write(&at(part).join("a.safetensors"), r#"{"w":{"shape":[8]}}"#);
        }
        assert_eq!(ParameterCounts::read(folder.path()).unwrap().shapes, None);
        let configs = [
            (
                "unet",
                r#"{"block_out_channels":[32,64],"attention_head_dim":[2,4],"cross_attention_dim":48,"layers_per_block":1,
                    "down_block_types":["CrossAttnDownBlock2D","DownBlock2D"],"up_block_types":["UpBlock2D","CrossAttnUpBlock2D"]}"#,
            ),
            ("text_encoder", r#"{"hidden_size":48,"num_hidden_layers":2}"#),
            ("vae", r#"{"block_out_channels":[16,32],"sample_size":64}"#),
        ];
        for (part, config) in configs {
            std::fs::write(at(part).join("config.json"), config).unwrap();
        }
        let shapes = ParameterCounts::read(folder.path()).unwrap().shapes.unwrap();
        let [first, second, ..] = shapes.unet.blocks;
        assert_eq!(
            (first.channels, first.heads, second.channels, second.heads),
            (32, 2, 64, 4)
        );
        assert!(first.down_attention && first.up_attention && !second.down_attention && !second.up_attention);
        assert_eq!(
            (shapes.text[0].width, shapes.text[0].layers, shapes.text[1].width),
            (48, 2, 0)
        );
        assert_eq!((shapes.vae.channels(), shapes.vae.sample_size), (&[16, 32][..], 64));
    }

    #[test]
    fn files_that_are_no_model_give_none() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("x.safetensors");
        for bytes in [
            &b""[..],
            b"\xff\xff\xff\xff\xff\xff\xff\xff",
            b"\x02\0\0\0\0\0\0\0[]",
            b"\x05\0\0\0\0\0\0\0{",
        ] {
            std::fs::write(&file, bytes).unwrap();
            assert_eq!(ParameterCounts::read(&file), None, "{bytes:?}");
        }
        assert_eq!(ParameterCounts::read(&folder.path().join("nothing")), None);
        assert_eq!(ParameterCounts::read(folder.path()), None);
    }

    #[test]
    fn quantised_weights_are_counted_with_their_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let entry = |name: &str, dtype: &str, shape: &str| format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape}}}"#);
        let header = |entries: &[String]| format!("{{{}}}", entries.join(","));
        let float8 = header(&[
            entry("model.diffusion_model.a.weight", "F8_E4M3", "[10,64]"),
            entry("model.diffusion_model.a.scale_weight", "F32", "[10,2,1]"),
            entry("model.diffusion_model.a.bias", "F16", "[10]"),
            entry("cond_stage_model.token_embedding.weight", "F8_E4M3", "[9,64]"),
            entry("first_stage_model.b.weight", "F8_E5M2", "[4,4,3,3]"),
            entry("scaled_fp8", "F8_E4M3", "[2]"),
        ]);
        write(&at("one.safetensors"), &float8);
        let stored = |quantised, bytes| CompactWeights {
            quantised,
            bytes,
            halves: 0,
        };
        let counted = ParameterCounts {
            denoiser: 650,
            text: 576,
            vae: 144,
            denoiser_stored: stored(640, 640 + 80),
            text_stored: CompactWeights::default(),
            vae_stored: stored(144, 144 + 16),
            shapes: None,
            decoder: None,
        };
        assert_eq!(ParameterCounts::read(&at("one.safetensors")), Some(counted));
        // A weight and its scales may be in different shards.
        let first = header(&[
            entry("a.weight", "U8", "[320,1]"),
            entry("a.weight.quant_map", "F32", "[16]"),
            entry("b.weight", "I8", "[10,20]"),
            entry("c.weight", "F32", "[10,20]"),
        ]);
        let second = header(&[
            entry("a.weight.absmax", "U8", "[10]"),
            entry("a.weight.nested_absmax", "F32", "[1]"),
            entry("a.weight.quant_state.bitsandbytes__nf4", "U8", "[99]"),
            entry("b.SCB", "F32", "[10]"),
        ]);
        write(&at("m/unet/x-00001-of-00002.safetensors"), &first);
        write(&at("m/unet/x-00002-of-00002.safetensors"), &second);
        let folder = ParameterCounts::read(&at("m")).unwrap();
        assert_eq!(
            (folder.denoiser, folder.denoiser_stored),
            (640 + 200 + 200, stored(840, 320 + 40 + 200 + 40))
        );
    }

    #[test]
    fn the_tables_of_text_encoders_are_not_among_the_weights_in_fewer_bits() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("one.safetensors");
        let tables = [
            "clip_l.transformer.text_model.embeddings.token_embedding",
            "t5xxl.shared",
            "qwen3_4b.model.embed_tokens",
        ];
        let entry = |name: &str, dtype: &str, shape: &str| format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape}}}"#);
        let mut entries = vec![
            entry("model.diffusion_model.w", "F32", "[1]"),
            entry(
                "text_encoders.qwen3_4b.model.layers.0.mlp.up_proj.weight",
                "F8_E4M3",
                "[10,64]",
            ),
            entry(
                "text_encoders.qwen3_4b.model.layers.0.mlp.down_proj.weight",
                "BF16",
                "[64,10]",
            ),
        ];
        for (table, dtype) in tables.iter().zip(["BF16", "F8_E4M3", "F8_E4M3"]) {
            entries.push(entry(&format!("text_encoders.{table}.weight"), dtype, "[9,64]"));
        }
        write(&file, &format!("{{{}}}", entries.join(",")));
        let counts = ParameterCounts::read(&file).unwrap();
        assert_eq!(counts.text, 2 * 640 + 3 * 576);
        let stored = CompactWeights {
            quantised: 640,
            bytes: 640 + 40,
            halves: 640,
        };
        assert_eq!(counts.text_stored, stored);
    }

    /// The fixtures are written by the `gguf` library (`tests/reference/make_prequantised.py`).
    #[test]
    fn gguf_files_are_counted() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/prequantised");
        let whole = ParameterCounts::read(&fixtures.join("checkpoint.gguf")).unwrap();
        let float8 = ParameterCounts::read(&fixtures.join("checkpoint_float8.safetensors")).unwrap();
        assert_eq!(
            [whole.denoiser, whole.text, whole.vae],
            [float8.denoiser, float8.text, float8.vae]
        );
        let CompactWeights {
            quantised,
            bytes,
            halves,
        } = whole.denoiser_stored;
        assert!(quantised > 0 && halves > quantised && quantised + halves < whole.denoiser);
        assert!((0.3..0.9).contains(&(bytes as f64 / quantised as f64)));
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("unet")).unwrap();
        std::fs::copy(fixtures.join("unet_comfy.gguf"), folder.path().join("unet/a.gguf")).unwrap();
        assert_eq!(ParameterCounts::read(folder.path()).unwrap().denoiser, whole.denoiser);
        // Alone in a folder, beside a tokenizer.
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
        std::fs::copy(fixtures.join("checkpoint.gguf"), folder.path().join("a.gguf")).unwrap();
        assert_eq!(ParameterCounts::read(folder.path()), Some(whole));
    }
}
