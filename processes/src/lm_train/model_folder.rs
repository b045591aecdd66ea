//! Writes saves: the folder of a LoRA as peft loads it, and that of a model as transformers loads it.

use crate::error::{EngineError, Result};
use crate::models::causal_lm::{CausalLm, CausalLmConfig};
use crate::weights::{SafetensorsLayout, Weight, write_tensors};
use aitk_common::fsutil::{self, regular};
use aitk_common::job::limits::MAX_TEXT_FILE_BYTES;
use aitk_common::job::lm_trainer::LmNetworkConfig;
use candle_core::{DType, Tensor};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;

/// The largest safetensors file of a model in bytes, as in transformers.
const MAX_SHARD_BYTES: u64 = 50_000_000_000;

/// Files of the base model's folder that belong to a whole model: the tokenizer, and how texts are generated.
const COPIED: [&str; 9] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
    "chat_template.jinja",
];

/// The config of a model, and the list of its files if there are several.
const CONFIG_FILE: &str = "config.json";
const INDEX_FILE: &str = "model.safetensors.index.json";

/// Whether [`write_model`] writes files of this name.
pub(crate) fn is_model_file(name: &str) -> bool {
    let is_weights = || {
        let between = name
            .strip_prefix("model")
            .and_then(|rest| rest.strip_suffix(".safetensors"));
        between.is_some_and(|part| part.is_empty() || part.starts_with('-'))
    };
    name == CONFIG_FILE || name == INDEX_FILE || COPIED.contains(&name) || is_weights()
}

/// What a peft folder says about its LoRA.
pub(super) struct Adapter<'a> {
    pub(super) network: &'a LmNetworkConfig,
    /// The names of its layers in the model.
    pub(super) layers: Vec<String>,
    /// The base model as the config names it.
    pub(super) base_model: &'a str,
}

/// The metadata that transformers expects.
fn metadata() -> BTreeMap<String, String> {
    BTreeMap::from([("format".to_owned(), "pt".to_owned())])
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let text = format!("{value:#}\n");
    Ok(fsutil::write_atomic(path, |out| out.write_all(text.as_bytes()))?)
}

/// Writes `adapter_model.safetensors` and `adapter_config.json` into a folder. `tensors`: with peft's names.
pub(super) fn write_adapter(folder: &Path, tensors: &BTreeMap<String, Tensor>, adapter: &Adapter<'_>) -> Result<()> {
    let path = folder.join("adapter_model.safetensors");
    let written = fsutil::write_atomic(&path, |out| write_tensors(out, tensors, &metadata()));
    written?;
    let config = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base_model,
        "r": adapter.network.linear,
        "lora_alpha": adapter.network.alpha(),
        "lora_dropout": adapter.network.dropout,
        "target_modules": adapter.layers,
        "bias": "none",
        "fan_in_fan_out": false,
        "init_lora_weights": true,
        "use_rslora": false,
        "use_dora": false,
        "inference_mode": true,
    });
    write_json(&folder.join("adapter_config.json"), &config)
}

/// Writes a whole model in `dtype`: `config.json` of its base model, the weights in one or several files, and the tokenizer. `dense` returns
/// the numbers of a tensor, by its name and its weight.
pub(crate) fn write_model(
    folder: &Path,
    model: &CausalLm,
    base: &Path,
    dtype: DType,
    dense: &mut dyn FnMut(&str, &Weight) -> Result<Tensor>,
) -> Result<()> {
    let is_untied = !model.config().ties_embeddings && CausalLmConfig::read(base)?.ties_embeddings;
    write_config(folder, base, dtype, is_untied)?;
    for name in COPIED {
        let source = base.join(name);
        if source.is_file() {
            let bytes = regular::read(&source, MAX_TEXT_FILE_BYTES).map_err(|error| EngineError::io(&source, error))?;
            fsutil::write_atomic(&folder.join(name), |out| out.write_all(&bytes))?;
        }
    }
    let tensors: BTreeMap<String, Weight> = model.tensors()?.into_iter().collect();
    let shards = shards(&tensors, dtype, MAX_SHARD_BYTES);
    let name_of = |index: usize| match shards.len() {
        1 => "model.safetensors".to_owned(),
        count => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
    };
    let mut weight_map = Map::new();
    let mut total = 0;
    for (index, names) in shards.iter().enumerate() {
        let file = name_of(index);
        let mut layout = SafetensorsLayout::new(metadata());
        for name in names {
            let dims = tensors
                .get(*name)
                .map(|weight| weight.dims().to_vec())
                .unwrap_or_default();
            total += bytes_of(&dims, dtype);
            layout.add(*name, dtype, dims);
            weight_map.insert((*name).to_owned(), file.clone().into());
        }
        let tensor = |name: &str| match tensors.get(name) {
            Some(weight) => Ok(dense(name, weight)?.to_dtype(dtype)?),
            None => Err(EngineError::Internal(format!("`{name}` is missing"))),
        };
        fsutil::write_atomic(&folder.join(file), |out| layout.write(out, tensor))?;
    }
    if shards.len() > 1 {
        let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        write_json(&folder.join(INDEX_FILE), &index)?;
    }
    Ok(())
}

fn bytes_of(dims: &[usize], dtype: DType) -> u64 {
    (dims.iter().product::<usize>() * dtype.size_in_bytes()) as u64
}

/// The names of the tensors of each file, in their order; each file has at most `max` bytes, or a single tensor.
fn shards(tensors: &BTreeMap<String, Weight>, dtype: DType, max: u64) -> Vec<Vec<&str>> {
    let mut shards: Vec<Vec<&str>> = vec![Vec::new()];
    let mut bytes = 0;
    for (name, weight) in tensors {
        let own = bytes_of(weight.dims(), dtype);
        if bytes + own > max && bytes > 0 {
            shards.push(Vec::new());
            bytes = 0;
        }
        bytes += own;
        if let Some(shard) = shards.last_mut() {
            shard.push(name);
        }
    }
    shards
}

/// The base model's `config.json` with the number format of the saved weights, which are not quantised. `is_untied`: the output layer is one of
/// its own, unlike in the config.
fn write_config(folder: &Path, base: &Path, dtype: DType, is_untied: bool) -> Result<()> {
    let path = base.join(CONFIG_FILE);
    let bytes = regular::read(&path, MAX_TEXT_FILE_BYTES).map_err(|error| EngineError::io(&path, error))?;
    let mut config: Map<String, Value> =
        serde_json::from_slice(&bytes).map_err(|error| EngineError::model_config(&path, error.to_string()))?;
    let name = match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float32",
    };
    // transformers 4 and 5 write different keys, and a config may have both.
    let keys = ["dtype", "torch_dtype"];
    if !keys.iter().any(|key| config.contains_key(*key)) {
        config.insert("dtype".to_owned(), name.into());
    }
    for key in keys {
        if let Some(value) = config.get_mut(key) {
            *value = name.into();
        }
    }
    config.shift_remove("quantization_config");
    if is_untied {
        config.insert("tie_word_embeddings".to_owned(), false.into());
    }
    write_json(&folder.join(CONFIG_FILE), &Value::Object(config))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::Device;

    /// transformers would look for the quantised weights of the base.
    #[test]
    fn the_config_of_a_quantised_base_says_what_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let (base, saved) = (dir.path().join("base"), dir.path().join("saved"));
        for folder in [&base, &saved] {
            std::fs::create_dir(folder).unwrap();
        }
        let config = json!({
            "model_type": "llama", "torch_dtype": "float16", "quantization_config": {"load_in_4bit": true}, "dtype": "float32",
        });
        std::fs::write(base.join("config.json"), config.to_string()).unwrap();
        let written = |is_untied: bool| -> Value {
            write_config(&saved, &base, DType::BF16, is_untied).unwrap();
            serde_json::from_slice(&std::fs::read(saved.join("config.json")).unwrap()).unwrap()
        };
        let mut expected = json!({"model_type": "llama", "torch_dtype": "bfloat16", "dtype": "bfloat16"});
        assert_eq!(written(false), expected);
        expected["tie_word_embeddings"] = json!(false);
        assert_eq!(written(true), expected);
    }

    #[test]
    fn a_file_has_at_most_so_many_bytes() {
        let tensor = |count: usize| Weight::Plain(Tensor::zeros(count, DType::F32, &Device::Cpu).unwrap());
        let tensors: BTreeMap<String, Weight> = [("a", 3), ("b", 3), ("c", 9), ("d", 1), ("e", 1)]
            .map(|(name, count)| (name.to_owned(), tensor(count)))
            .into();
        assert_eq!(
            shards(&tensors, DType::BF16, 12),
            [vec!["a", "b"], vec!["c"], vec!["d", "e"]]
        );
        assert_eq!(shards(&tensors, DType::F32, 1000).len(), 1);
    }
}
