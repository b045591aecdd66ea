//! The rotary embedding of a GGUF file, from its metadata (`{arch}.rope.*`) and its tables of factors, as llama.cpp reads them.

use super::super::config_json::MAX_SIZE;
use super::super::rope::{BETAS, RopeScaling, RotaryPositions, yarn_attention_factor};
use super::architecture::{LONGROPE_FACTORS, ROPE_FACTORS};
use super::metadata::Metadata;
use crate::error::Result;
use crate::weights::Index;
use candle_core::{DType, Device};

/// The tables of factors of a file.
#[derive(Clone, Debug, Default)]
pub(super) struct RopeTables {
    /// What all frequencies are divided by.
    factors: Option<Vec<f32>>,
    /// Those of `longrope`.
    longrope: [Option<Vec<f32>>; 2],
}

impl RopeTables {
    /// Reads them.
    ///
    /// # Errors
    /// When a table cannot be read.
    pub(super) fn read(index: &Index) -> Result<Self> {
        let read = |name: &str| -> Result<Option<Vec<f32>>> {
            if !index.contains(name) {
                return Ok(None);
            }
            let table = index.read(name, DType::F32, &Device::Cpu)?;
            Ok(Some(table.flatten_all()?.to_vec1()?))
        };
        let [short, long] = LONGROPE_FACTORS;
        Ok(Self {
            factors: read(ROPE_FACTORS)?,
            longrope: [read(short)?, read(long)?],
        })
    }
}

/// The rotary embedding of heads with this width, in a model with this context.
///
/// # Errors
/// A sentence that names the key.
pub(super) fn rotary_positions(
    metadata: &Metadata,
    arch: &str,
    head_width: usize,
    max_positions: usize,
    tables: RopeTables,
) -> std::result::Result<RotaryPositions, String> {
    let key = |name: &str| format!("{arch}.rope.{name}");
    if head_width == 0 || !head_width.is_multiple_of(2) || head_width > MAX_SIZE {
        return Err(format!(
            "a head of {head_width} features cannot be rotated: expected an even number"
        ));
    }
    let rotated = metadata.number(&key("dimension_count")).unwrap_or(head_width);
    if rotated != head_width {
        return Err(format!(
            "`{}` is {rotated}, and a head has {head_width} features: rotating a part of them is not supported",
            key("dimension_count")
        ));
    }
    let positive = |name: &str, usual: f64| match metadata.float(&key(name)).unwrap_or(usual) {
        found if found.is_finite() && found > 0.0 => Ok(found),
        found => Err(format!("`{}` is {found}: expected a positive number", key(name))),
    };
    let theta = positive("freq_base", 10_000.0)?;
    // Files of 2023 have another key, and 0 is no scaling.
    let factor = metadata
        .float(&key("scaling.factor"))
        .or_else(|| metadata.float(&key("scale_linear")))
        .filter(|factor| *factor != 0.0)
        .unwrap_or(1.0);
    let original = || match metadata.number(&key("scaling.original_context_length")) {
        Some(0) | None => max_positions as f64,
        Some(original) => original as f64,
    };
    let usual_only = |name: &str, usual: f64| match metadata.float(&key(name)) {
        Some(found) if found != usual => Err(format!("`{}` is {found}: expected {usual}, or no such key", key(name))),
        _ => Ok(()),
    };
    let attention_factor = positive("scaling.attn_factor", 1.0)?;
    let tables_of_longrope = match tables.longrope {
        [Some(short), Some(long)] => Some([short, long]),
        _ => None,
    };
    let scaling = match (metadata.text(&key("scaling.type")), tables_of_longrope) {
        (Some("none"), None) => RopeScaling::None,
        // As llama.cpp: linear without a type.
        (None | Some("linear"), None) if factor == 1.0 => RopeScaling::None,
        (None | Some("linear"), None) => RopeScaling::Linear { factor },
        (Some("yarn"), None) => {
            usual_only("scaling.yarn_ext_factor", 1.0)?;
            usual_only("scaling.yarn_attn_factor", 1.0)?;
            let [fast, slow] = BETAS;
            // llama.cpp divides by the attention factor that belongs to it.
            let log = metadata.float(&key("scaling.yarn_log_multiplier")).unwrap_or(0.0);
            let usual = match log == 0.0 {
                true => yarn_attention_factor(factor, 1.0),
                false => yarn_attention_factor(factor, 1.0) / yarn_attention_factor(factor, log),
            };
            RopeScaling::Yarn {
                factor,
                original: original(),
                betas: [
                    positive("scaling.yarn_beta_fast", fast)?,
                    positive("scaling.yarn_beta_slow", slow)?,
                ],
                truncate: true,
                attention_factor: attention_factor * usual,
            }
        }
        (Some("longrope"), Some(tables)) => {
            let [short, long] = tables.map(|table| {
                let factors = table.iter().map(|divisor| f64::from(*divisor) * factor);
                factors.collect::<Vec<f64>>()
            });
            RopeScaling::LongRope {
                short,
                long,
                original: original(),
                attention_factor,
            }
        }
        (Some("longrope"), None) => {
            return Err(format!(
                "`{}` is `longrope`, and it has no tables `{}` and `{}`",
                key("scaling.type"),
                LONGROPE_FACTORS[0],
                LONGROPE_FACTORS[1]
            ));
        }
        (found, tables) => {
            return Err(format!(
                "`{}` is `{}`{}: expected `none`, `linear`, `yarn`, or `longrope` with its tables of factors",
                key("scaling.type"),
                found.unwrap_or("none"),
                if tables.is_some() {
                    " beside tables of `longrope`"
                } else {
                    ""
                }
            ));
        }
    };
    if !matches!(scaling, RopeScaling::Yarn { .. } | RopeScaling::LongRope { .. }) {
        usual_only("scaling.attn_factor", 1.0)?;
    }
    let rope = RotaryPositions::new(theta, scaling, head_width, max_positions)?;
    let Some(factors) = tables.factors else {
        return Ok(rope);
    };
    if factors.len() != head_width / 2 {
        return Err(format!(
            "`{ROPE_FACTORS}` has {} numbers: expected {}, half as many as a head has features",
            factors.len(),
            head_width / 2
        ));
    }
    rope.divided_by(&factors)
}
