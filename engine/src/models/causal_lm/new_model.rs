//! New models: the weights of a decoder drawn as transformers draws them (`PreTrainedModel._init_weights` of transformers 5.23).

use super::config::{CausalLmConfig, CausalLmFamily, FeedForwardKind, NormKind, PositionKind};
use super::model::{CausalLm, CausalLmOptions};
use crate::error::{EngineError, Result};
use crate::models::config;
use crate::weights::{Init, Weights};
use candle_core::Tensor;
use serde::Deserialize;
use std::path::Path;

/// The most parameters of a new model: more than a machine can train, and far below what overflows.
const MAX_PARAMETERS: u128 = 100_000_000_000;

/// The key of `config.json` that says how weights are drawn.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct InitializerJson {
    initializer_range: Option<f64>,
}

/// The standard deviation of new weights of a model folder: `initializer_range`, or that of transformers' class.
fn standard_deviation(folder: &Path, family: CausalLmFamily) -> Result<f64> {
    let path = folder.join("config.json");
    let json: InitializerJson = config::read(&path)?;
    let default = match family {
        CausalLmFamily::StarCoder2 => 0.018_042,
        _ => 0.02,
    };
    match json.initializer_range {
        None => Ok(default),
        // As in transformers, 0 is that of most models.
        Some(0.0) => Ok(0.02),
        Some(range) if range > 0.0 && range <= 1.0 => Ok(range),
        Some(range) => Err(EngineError::model_config(
            path,
            format!("`initializer_range` {range}: expected a number from 0 to 1"),
        )),
    }
}

/// The distribution of a tensor: normal for weights, 1 for norms and 0 for biases. In GPTBigCode, the layers that add to the sum of the blocks
/// have a smaller deviation.
fn init_of(name: &str, family: CausalLmFamily, layers: usize, deviation: f64) -> Init {
    if name.ends_with(".bias") {
        return Init::Zeros;
    }
    let is_norm = ["norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight"]
        .iter()
        .any(|end| name.ends_with(end));
    if is_norm {
        return Init::Ones;
    }
    if family == CausalLmFamily::GptBigCode && name.ends_with(".c_proj.weight") {
        return Init::Normal(deviation / (2.0 * layers.max(1) as f64).sqrt());
    }
    Init::Normal(deviation)
}

impl CausalLmConfig {
    /// How many numbers a model of this config has.
    #[must_use]
    pub fn parameter_count(&self) -> u128 {
        let of = |number: usize| number as u128;
        let linear =
            |inputs: usize, outputs: usize, bias: bool| of(inputs) * of(outputs) + of(outputs) * u128::from(bias);
        let norm = of(self.width) * if self.norm == NormKind::Layer { 2 } else { 1 };
        let (queries, keys) = (
            self.heads.saturating_mul(self.head_width),
            self.kv_heads.saturating_mul(self.head_width),
        );
        let (width, inner, bias) = (self.width, self.inner_width, self.feed_forward_bias);
        let feed_forward = match self.feed_forward {
            FeedForwardKind::Plain => linear(width, inner, bias),
            FeedForwardKind::Gated => 2 * linear(width, inner, bias),
        };
        let block = 2 * norm
            + linear(width, queries, self.qkv_bias)
            + 2 * linear(width, keys, self.qkv_bias)
            + linear(queries, width, self.attention_output_bias)
            + feed_forward
            + linear(inner, width, bias);
        let table = of(self.vocab_size) * of(width);
        let positions = match self.positions {
            PositionKind::Learned => of(self.max_positions) * of(width),
            PositionKind::Rotary(_) => 0,
        };
        let output = if self.ties_embeddings { 0 } else { table };
        table + positions + of(self.layers) * block + norm + output
    }

    /// Reads the config of a folder from which a new model is made, and checks it.
    ///
    /// # Errors
    /// When it cannot be read, is not supported, or is that of a model that no machine can train.
    pub fn read_new(folder: &Path) -> Result<Self> {
        if !folder.is_dir() {
            return Err(EngineError::bad_input(format!(
                "{}: expected a folder with config.json, which has the sizes of the new model",
                folder.display()
            )));
        }
        let config = Self::read(folder)?;
        standard_deviation(folder, config.family)?;
        let count = config.parameter_count();
        if count > MAX_PARAMETERS {
            return Err(EngineError::model_config(
                folder.join("config.json"),
                format!(
                    "a new model with these sizes has {count} parameters; expected at most {MAX_PARAMETERS}: make it smaller"
                ),
            ));
        }
        Ok(config)
    }
}

impl CausalLm {
    /// A new model with the sizes of `config.json` in a folder, all of whose weights are trained. They depend only on the seed and the names of
    /// the tensors.
    ///
    /// # Errors
    /// As [`CausalLmConfig::read_new`].
    pub fn from_config(folder: &Path, options: &CausalLmOptions, seed: u64) -> Result<Self> {
        let config = CausalLmConfig::read_new(folder)?;
        let (family, layers) = (config.family, config.layers);
        let deviation = standard_deviation(folder, family)?;
        let weights = Weights::init_by_name(seed, options.dtype, &options.device, move |name| {
            init_of(name, family, layers, deviation)
        });
        let model = Self::new(&weights, config)?;
        model.clear_padding_row()?;
        Ok(model)
    }

    /// Sets the row of the padding token of a new table of embeddings to zero.
    fn clear_padding_row(&self) -> Result<()> {
        let config = self.config();
        let Some(padding) = config.padding_id else {
            return Ok(());
        };
        let table = self.embedding_name();
        let rows: Vec<f32> = (0..config.vocab_size)
            .map(|row| if row == padding as usize { 0.0 } else { 1.0 })
            .collect();
        for (_, var) in self.trained_variables().iter().filter(|(name, _)| *name == table) {
            let rows = Tensor::from_slice(&rows, (rows.len(), 1), var.device())?.to_dtype(var.dtype())?;
            var.set(&var.as_tensor().detach().broadcast_mul(&rows)?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::testing::formula_weights::expected;
    use candle_core::DType;
    use serde_json::{Value, json};

    /// The folder of a new model.
    fn folder(config: &Value) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        folder
    }

    /// Mean and standard deviation.
    fn moments(numbers: &[f32]) -> (f64, f64) {
        let count = numbers.len() as f64;
        let mean = numbers.iter().map(|x| f64::from(*x)).sum::<f64>() / count;
        let variance = numbers.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / count;
        (mean, variance.sqrt())
    }

    #[test]
    fn new_weights_have_the_moments_of_transformers_and_follow_from_the_seed() {
        let config = json!({
            "model_type": "gpt_bigcode", "vocab_size": 512, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4,
            "initializer_range": 0.05
        });
        let folder = folder(&config);
        let model = |seed| CausalLm::from_config(folder.path(), &CausalLmOptions::cpu(), seed).unwrap();
        let tensors = |seed| -> Vec<(String, Vec<f32>)> {
            let tensors = model(seed).tensors().unwrap().into_iter();
            let numbers = tensors.map(|(name, weight)| {
                let dense = weight.dense().unwrap().to_dtype(DType::F32).unwrap();
                (name, dense.flatten_all().unwrap().to_vec1().unwrap())
            });
            numbers.collect()
        };
        let first = tensors(3);
        for (name, numbers) in &first {
            let (mean, deviation) = moments(numbers);
            let (expected_mean, expected) = match name {
                name if name.contains("ln_") && name.ends_with("weight") => (1.0, 0.0),
                name if name.ends_with("bias") => (0.0, 0.0),
                name if name.contains("c_proj") => (0.0, 0.025),
                _ => (0.0, 0.05),
            };
            assert!((deviation - expected).abs() <= 0.04 * expected, "{name}: {deviation}");
            assert!((mean - expected_mean).abs() <= 0.1 * expected, "{name}: {mean}");
        }
        assert_eq!(first, tensors(3));
        assert_ne!(first, tensors(4));
    }

    #[test]
    fn parameters_are_counted_and_too_many_are_refused_before_they_are_drawn() {
        let configs = expected();
        for (name, model) in configs["models"].as_object().unwrap() {
            let folder = folder(&model["config"]);
            let model = CausalLm::from_config(folder.path(), &CausalLmOptions::cpu(), 0).unwrap();
            let tensors = model.tensors().unwrap();
            let count: usize = tensors
                .iter()
                .map(|(_, weight)| weight.dims().iter().product::<usize>())
                .sum();
            assert_eq!(model.config().parameter_count(), count as u128, "{name}");
        }
        let refused = |config: Value| {
            let folder = folder(&config);
            let refused = CausalLm::from_config(folder.path(), &CausalLmOptions::cpu(), 0);
            refused.unwrap_err().to_string()
        };
        let large = json!({"model_type": "llama", "vocab_size": 16_000_000, "hidden_size": 16_000_000, "num_attention_heads": 4});
        assert!(refused(large).contains("parameters; expected at most"));
        let wrong = json!({"model_type": "llama", "initializer_range": -1.0});
        assert!(refused(wrong).contains("`initializer_range` -1"));
    }
}
