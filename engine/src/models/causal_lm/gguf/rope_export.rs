//! The rotary embedding of a decoder as GGUF files have it.

use super::super::config::{CausalLmConfig, CausalLmFamily, PositionKind};
use super::super::rope::{BETAS, RopeScaling, plain_frequencies, yarn_attention_factor};
use super::architecture::{LONGROPE_FACTORS, ROPE_FACTORS};
use crate::weights::GgufValue;

/// The metadata and the tables of factors.
#[derive(Clone, Debug, Default)]
pub(super) struct RopeExport {
    /// By their keys without the name of the architecture.
    pub(super) metadata: Vec<(&'static str, GgufValue)>,
    /// Tables of numbers by which frequencies are divided, by their names.
    pub(super) tables: Vec<(&'static str, Vec<f32>)>,
    /// What a user should know about it.
    pub(super) note: Option<String>,
}

impl RopeExport {
    /// The rotary embedding of a model.
    ///
    /// # Errors
    /// A sentence that says what llama.cpp does not compute.
    pub(super) fn new(config: &CausalLmConfig) -> Result<Self, String> {
        let PositionKind::Rotary(rope) = &config.positions else {
            return Ok(Self::default());
        };
        let mut export = Self::default();
        let number = |value: f64| GgufValue::Float(value as f32);
        export.set("rope.dimension_count", GgufValue::Unsigned(rope.width() as u32));
        export.set("rope.freq_base", number(rope.theta));
        let refused = |what: &str| {
            Err(format!(
                "llama.cpp has no rotary embedding {what}: the model cannot be exported as GGUF, only as `format: hf`"
            ))
        };
        // llama.cpp reads tables of factors for Llama alone.
        let has_tables = config.family == CausalLmFamily::Llama;
        match &rope.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => {
                export.set("rope.scaling.type", GgufValue::Text("linear".into()));
                export.set("rope.scaling.factor", number(*factor));
            }
            RopeScaling::Llama3 { .. } if !has_tables => return refused("`llama3` for this family"),
            RopeScaling::Llama3 { .. } => {
                let own = rope.frequencies(0);
                let plain = plain_frequencies(rope.theta, rope.width());
                let factors = plain.zip(own.iter()).map(|(plain, own)| plain / own).collect();
                export.tables.push((ROPE_FACTORS, factors));
            }
            RopeScaling::Yarn {
                factor,
                original,
                betas,
                truncate,
                attention_factor,
            } => {
                if !truncate {
                    return refused("`yarn` with `truncate: false`");
                }
                export.set("rope.scaling.type", GgufValue::Text("yarn".into()));
                export.set("rope.scaling.factor", number(*factor));
                export.set_original(*original);
                let keys = ["rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"];
                for ((key, beta), usual) in keys.into_iter().zip(betas).zip(BETAS) {
                    if *beta != usual {
                        export.set(key, number(*beta));
                    }
                }
                // llama.cpp multiplies it by the usual one.
                export.set_attention_factor(attention_factor / yarn_attention_factor(*factor, 1.0));
            }
            RopeScaling::Dynamic { .. } => return refused("`dynamic`"),
            RopeScaling::LongRope { .. } if !has_tables => return refused("`longrope` for this family"),
            RopeScaling::LongRope {
                short,
                long,
                original,
                attention_factor,
            } => {
                export.set("rope.scaling.type", GgufValue::Text("longrope".into()));
                export.set_original(*original);
                export.set_attention_factor(*attention_factor);
                for (name, factors) in LONGROPE_FACTORS.into_iter().zip([short, long]) {
                    let factors = factors.iter().map(|factor| *factor as f32).collect();
                    export.tables.push((name, factors));
                }
                export.note = Some(format!(
                    "the model has other rotary embeddings in texts of more than {original} tokens (`longrope`), and llama.cpp in all texts where \
                     it is started with a longer context: its texts differ there"
                ));
            }
        }
        Ok(export)
    }

    fn set(&mut self, key: &'static str, value: GgufValue) {
        self.metadata.push((key, value));
    }

    fn set_original(&mut self, original: f64) {
        self.set(
            "rope.scaling.original_context_length",
            GgufValue::Unsigned(original as u32),
        );
    }

    fn set_attention_factor(&mut self, factor: f64) {
        if (factor - 1.0).abs() > 1e-7 {
            self.set("rope.scaling.attn_factor", GgufValue::Float(factor as f32));
        }
    }
}
