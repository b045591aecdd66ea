//! Facts about optimizers: what they keep, and what a step needs besides. The engine's tests compare them with its
//! optimizers.

use super::json::number;
use serde_json::Value;

/// What an optimizer needs of memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerFacts {
    /// Bytes of state per trained parameter, without factored.
    pub state: f64,
    /// The same for a tensor of fewer elements than `min_8bit`, which is not stored in 8 bits.
    pub small_state: f64,
    /// Elements from which a tensor is stored in 8 bits.
    pub min_8bit: f64,
    /// Whether it stores row and column factored instead of full moments: 4 bytes each. Tensors of one dimension have a mean of
    /// 4 bytes per element.
    pub is_factored: bool,
    /// Whether it can update each parameter on its own, because it uses no statistics over all of them.
    pub is_separable: bool,
    /// Float32 copies of a tensor that exist while it is updated.
    pub step_copies: f64,
    /// Whether the trainer clips gradients before a step.
    pub clips: bool,
}

/// Elements from which a tensor is stored in 8 bits, unless the config says otherwise.
const MIN_8BIT_ELEMENTS: f64 = 4096.0;
/// Of how many elements `prodigy8bit` has two float32 tensors of one, unless the config says otherwise.
const PRODIGY_8BIT_STRIDE: f64 = 5.0;

/// A scale of 4 bytes per 256 codes.
const EIGHT_BITS: f64 = 1.0 + 4.0 / 256.0;

const ADAM: OptimizerFacts = OptimizerFacts {
    state: 8.0,
    small_state: 8.0,
    min_8bit: MIN_8BIT_ELEMENTS,
    is_factored: false,
    is_separable: true,
    step_copies: 0.0,
    clips: true,
};

const fn eight_bit(moments: f64) -> OptimizerFacts {
    OptimizerFacts {
        state: moments * EIGHT_BITS,
        small_state: moments * 4.0,
        ..ADAM
    }
}

const fn full(state: f64) -> OptimizerFacts {
    OptimizerFacts {
        state,
        small_state: state,
        ..ADAM
    }
}

/// The facts about the optimizer of a process (`train.optimizer`, with `train.optimizer_params`). An unknown name has those of Adam.
pub(super) fn facts_of(body: &Value) -> OptimizerFacts {
    let name = body.pointer("/train/optimizer").and_then(Value::as_str);
    facts(
        name.unwrap_or("adamw"),
        body.pointer("/train/optimizer_params").unwrap_or(&Value::Null),
    )
}

/// The facts about an optimizer with these parameters (`train.optimizer_params`; null: none). An unknown name has those of Adam.
#[must_use]
pub fn facts(name: &str, params: &Value) -> OptimizerFacts {
    let facts = facts_of_name(&name.to_ascii_lowercase(), params);
    OptimizerFacts {
        min_8bit: number(params, "/min_8bit_size").unwrap_or(MIN_8BIT_ELEMENTS),
        ..facts
    }
}

fn facts_of_name(name: &str, params: &Value) -> OptimizerFacts {
    // Of so many elements, Prodigy estimates its learning rate from one.
    let stride = |usual: f64| number(params, "/slice_p").unwrap_or(usual).max(1.0);
    match name {
        "adam8" | "adamw8" | "adam8bit" | "adamw8bit" => eight_bit(2.0),
        "ademamix8bit" => eight_bit(3.0),
        "lion" | "adagrad" => full(4.0),
        "lion8bit" => eight_bit(1.0),
        "adafactor" => OptimizerFacts {
            is_factored: true,
            step_copies: 1.0,
            clips: false,
            // A mean of the updates, if there is a `beta1`.
            ..full(if number(params, "/beta1").is_some() { 4.0 } else { 0.0 })
        },
        // A learning rate of two bytes, or a byte of signs, per parameter.
        "automagic" => OptimizerFacts {
            is_factored: true,
            step_copies: 1.0,
            ..full(2.0)
        },
        "automagic2" => OptimizerFacts {
            is_factored: true,
            step_copies: 1.0,
            clips: false,
            ..full(1.0)
        },
        "automagic3" => OptimizerFacts {
            is_factored: true,
            is_separable: false,
            step_copies: 1.0,
            clips: false,
            ..full(1.0)
        },
        // Composed of candle's operations, which make new tensors.
        "dadaptation" | "dadaptationadam" => OptimizerFacts {
            is_separable: false,
            step_copies: 6.0,
            ..full(12.0)
        },
        "dadaptationlion" => OptimizerFacts {
            is_separable: false,
            step_copies: 6.0,
            ..full(8.0)
        },
        // Two moments in 8 bits, and two float32 tensors for a share of the elements.
        name if name.starts_with("prodigy8bit") => {
            let estimate = 8.0 / stride(PRODIGY_8BIT_STRIDE);
            OptimizerFacts {
                state: 2.0 * EIGHT_BITS + estimate,
                small_state: 8.0 + estimate,
                is_separable: false,
                ..ADAM
            }
        }
        name if name.contains("prodigy") => OptimizerFacts {
            is_separable: false,
            ..full(8.0 + 8.0 / stride(1.0))
        },
        _ => ADAM,
    }
}

impl OptimizerFacts {
    /// Bytes of state of one tensor. `factored`: the elements of its row and column factored; `None` for one dimension.
    #[must_use]
    pub fn state_bytes(&self, elements: f64, factored: Option<f64>) -> f64 {
        let plain = if elements < self.min_8bit {
            self.small_state
        } else {
            self.state
        };
        let factored = if self.is_factored {
            4.0 * factored.unwrap_or(elements)
        } else {
            0.0
        };
        elements * plain + factored
    }
}
