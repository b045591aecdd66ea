//! The frequencies of rotary position embeddings, as transformers computes them (`modeling_rope_utils.py`), in float32.

use serde::Deserialize;

/// transformers' default of `rope_theta`.
const DEFAULT_THETA: f64 = 10_000.0;

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
}

/// The angle per position of each pair of features of a head without scaling, [head_width / 2].
pub(super) fn plain_frequencies(theta: f64, head_width: usize) -> impl Iterator<Item = f32> {
    (0..head_width / 2).map(move |pair| {
        let exponent = 2.0 * pair as f32 / head_width as f32;
        1.0 / (theta.powf(f64::from(exponent)) as f32)
    })
}

/// The angle per position of each pair of features of a head, [head_width / 2].
///
/// `theta`: `rope_theta` beside the section, as transformers 4 writes it.
///
/// # Errors
/// A sentence that names the option that is not supported or missing.
pub(super) fn frequencies(
    section: Option<&RopeJson>,
    theta: Option<f64>,
    head_width: usize,
    max_positions: usize,
) -> Result<Vec<f32>, String> {
    let default = RopeJson::default();
    let rope = section.unwrap_or(&default);
    if !head_width.is_multiple_of(2) || head_width == 0 {
        return Err(format!(
            "a head of {head_width} features cannot be rotated: expected an even number"
        ));
    }
    if let Some(share) = rope.partial_rotary_factor.filter(|share| *share != 1.0) {
        return Err(format!(
            "`partial_rotary_factor` {share} is not supported: expected 1, or no such key"
        ));
    }
    let theta = rope.rope_theta.or(theta).unwrap_or(DEFAULT_THETA);
    if !theta.is_finite() || theta <= 0.0 {
        return Err(format!("`rope_theta` is {theta}: expected a positive number"));
    }
    let plain = plain_frequencies(theta, head_width);
    let number = |key: &str, value: Option<f64>| match value {
        Some(value) if value.is_finite() && value > 0.0 => Ok(value as f32),
        Some(value) => Err(format!(
            "`{key}` of the rotary embedding is {value}: expected a positive number"
        )),
        None => Err(format!("`{key}` of the rotary embedding is missing")),
    };
    match rope.rope_type.as_deref().or(rope.kind.as_deref()).unwrap_or("default") {
        "default" => Ok(plain.collect()),
        "linear" => {
            let factor = number("factor", rope.factor)?;
            Ok(plain.map(|frequency| frequency / factor).collect())
        }
        "llama3" => {
            let factor = number("factor", rope.factor)?;
            let low = number("low_freq_factor", rope.low_freq_factor)?;
            let high = number("high_freq_factor", rope.high_freq_factor)?;
            let original = rope.original_max_position_embeddings.or(Some(max_positions as f64));
            let original = number("original_max_position_embeddings", original)?;
            if high <= low {
                return Err(format!(
                    "`high_freq_factor` {high} of the rotary embedding must be more than `low_freq_factor` {low}"
                ));
            }
            Ok(plain
                .map(|frequency| {
                    let wavelength = 2.0 * std::f32::consts::PI / frequency;
                    if wavelength < original / high {
                        return frequency;
                    }
                    if wavelength > original / low {
                        return frequency / factor;
                    }
                    let smooth = (original / wavelength - low) / (high - low);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                })
                .collect())
        }
        other => Err(format!(
            "the rotary embedding `{other}` is not supported: expected `default`, `linear` or `llama3`"
        )),
    }
}
