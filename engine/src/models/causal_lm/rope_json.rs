//! The rotary position embedding of a `config.json`.

use super::rope::{BETAS, RopeScaling, RotaryPositions, yarn_attention_factor};
use serde::Deserialize;

/// transformers' default of `rope_theta`.
const DEFAULT_THETA: f64 = 10_000.0;
/// The most numbers of `short_factor` and of `long_factor`.
const MAX_FACTORS: usize = 1 << 16;

/// `rope_parameters` (transformers 5) or `rope_scaling` (transformers 4).
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct RopeJson {
    rope_theta: Option<f64>,
    rope_type: Option<String>,
    /// An older name of `rope_type`.
    #[serde(rename = "type")]
    kind: Option<String>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
    partial_rotary_factor: Option<f64>,
    attention_factor: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    truncate: Option<bool>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    short_factor: Option<Vec<f64>>,
    long_factor: Option<Vec<f64>>,
}

/// What a `config.json` says about rotary embeddings outside the section.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BesideSection {
    /// `rope_theta`, as transformers 4 writes it.
    pub(super) theta: Option<f64>,
    /// `original_max_position_embeddings`, which comes before that of the section.
    pub(super) original: Option<f64>,
}

/// The rotary embedding of heads with this width, in a model with this context.
///
/// # Errors
/// A sentence that names the option that is not supported or missing.
pub(super) fn rotary_positions(
    section: Option<&RopeJson>,
    beside: BesideSection,
    head_width: usize,
    max_positions: usize,
) -> Result<RotaryPositions, String> {
    let default = RopeJson::default();
    let rope = section.unwrap_or(&default);
    if let Some(share) = rope.partial_rotary_factor.filter(|share| *share != 1.0) {
        return Err(format!(
            "`partial_rotary_factor` {share} is not supported: expected 1, or no such key"
        ));
    }
    let theta = rope.rope_theta.or(beside.theta).unwrap_or(DEFAULT_THETA);
    let scaling = rope.scaling(beside.original, max_positions)?;
    RotaryPositions::new(theta, scaling, head_width, max_positions)
}

impl RopeJson {
    /// How frequencies are scaled in a model with this context. `original`: `original_max_position_embeddings` beside the section.
    fn scaling(&self, original: Option<f64>, max_positions: usize) -> Result<RopeScaling, String> {
        let original = || {
            let found = original.or(self.original_max_position_embeddings);
            positive("original_max_position_embeddings", found.or(Some(max_positions as f64)))
        };
        let factor = || positive("factor", self.factor);
        // Without a factor, as transformers computes it for models of Phi's shape.
        let factor_or_ratio = |original: f64| match self.factor {
            Some(_) => factor(),
            None => Ok(max_positions as f64 / original),
        };
        let kind = self.rope_type.as_deref().or(self.kind.as_deref());
        match kind.unwrap_or("default") {
            "default" => Ok(RopeScaling::None),
            "linear" => Ok(RopeScaling::Linear { factor: factor()? }),
            "llama3" => {
                let low = positive("low_freq_factor", self.low_freq_factor)?;
                let high = positive("high_freq_factor", self.high_freq_factor)?;
                if high <= low {
                    return Err(format!(
                        "`high_freq_factor` {high} of the rotary embedding must be more than `low_freq_factor` {low}"
                    ));
                }
                Ok(RopeScaling::Llama3 {
                    factor: factor()?,
                    low,
                    high,
                    original: original()?,
                })
            }
            "yarn" => {
                let original = original()?;
                let factor = factor_or_ratio(original)?;
                // As in transformers, 0 is no value.
                let nonzero = |value: Option<f64>| value.filter(|value| *value != 0.0);
                let computed = match (nonzero(self.mscale), nonzero(self.mscale_all_dim)) {
                    (Some(mscale), Some(all)) => {
                        yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, all)
                    }
                    _ => yarn_attention_factor(factor, 1.0),
                };
                let [fast, slow] = BETAS;
                Ok(RopeScaling::Yarn {
                    factor,
                    original,
                    betas: [
                        positive("beta_fast", nonzero(self.beta_fast).or(Some(fast)))?,
                        positive("beta_slow", nonzero(self.beta_slow).or(Some(slow)))?,
                    ],
                    truncate: self.truncate.unwrap_or(true),
                    attention_factor: self.attention_factor(computed)?,
                })
            }
            "dynamic" => Ok(RopeScaling::Dynamic { factor: factor()? }),
            "longrope" => {
                let original = original()?;
                let factor = factor_or_ratio(original)?;
                let computed = match factor <= 1.0 {
                    true => 1.0,
                    false => (1.0 + factor.ln() / original.ln()).sqrt(),
                };
                Ok(RopeScaling::LongRope {
                    short: factors("short_factor", self.short_factor.as_deref())?,
                    long: factors("long_factor", self.long_factor.as_deref())?,
                    original,
                    attention_factor: self.attention_factor(computed)?,
                })
            }
            other => Err(format!(
                "the rotary embedding `{other}` is not supported: expected `default`, `linear`, `llama3`, `yarn`, `dynamic` or `longrope`"
            )),
        }
    }

    /// `attention_factor`, or the computed one.
    fn attention_factor(&self, computed: f64) -> Result<f64, String> {
        positive("attention_factor", self.attention_factor.or(Some(computed)))
    }
}

fn positive(key: &str, value: Option<f64>) -> Result<f64, String> {
    match value {
        Some(value) if value.is_finite() && value > 0.0 => Ok(value),
        Some(value) => Err(format!(
            "`{key}` of the rotary embedding is {value}: expected a positive number"
        )),
        None => Err(format!("`{key}` of the rotary embedding is missing")),
    }
}

/// The divisors of `longrope`.
fn factors(key: &str, numbers: Option<&[f64]>) -> Result<Vec<f64>, String> {
    let Some(numbers) = numbers else {
        return Err(format!("`{key}` of the rotary embedding is missing"));
    };
    if numbers.len() > MAX_FACTORS {
        return Err(format!(
            "`{key}` of the rotary embedding has {} numbers: expected at most {MAX_FACTORS}",
            numbers.len()
        ));
    }
    numbers.iter().map(|number| positive(key, Some(*number))).collect()
}
