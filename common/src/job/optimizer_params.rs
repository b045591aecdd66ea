//! What `train.optimizer_params` may hold, for each optimizer: one table, for the check of a config before it runs and
//! for the engine that reads it.

use super::optimizer::OptimizerName;
use super::values::FreeMap;
use serde_json::Value;

/// What a parameter's value may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Two numbers from 0 up to, not including, 1.
    Betas,
    /// Three numbers above 0 and below 1.
    ThreeBetas,
    /// A number from 0 up to, not including, 1, or `null`.
    OptionalBeta,
    /// A number from 0 up to, not including, 1.
    Beta,
    /// A number.
    Number,
    /// A number from 0.
    FromZero,
    /// A number from 0 to 1.
    FromZeroToOne,
    /// A number above 0.
    AboveZero,
    /// A number above 0, or `null` for none.
    OptionalAboveZero,
    /// Two numbers from 0, or one for the first of them.
    OneOrTwoFromZero,
    /// A whole number from 0.
    Whole,
    /// A whole number from 1.
    WholeFromOne,
    /// A whole number from 2 to 8.
    FromTwoToEight,
    /// `true` or `false`.
    Flag,
    /// A switch that may be written, but not turned on.
    Off,
    /// Changes nothing in the result here: anything.
    Any,
}

/// Switches of torch that choose how, not what, is computed.
const TORCH: &[(&str, Kind)] = &[
    ("foreach", Kind::Any),
    ("fused", Kind::Any),
    ("capturable", Kind::Any),
    ("differentiable", Kind::Any),
    ("amsgrad", Kind::Off),
    ("maximize", Kind::Off),
];

/// What bitsandbytes' 8-bit optimizers take besides their formula's own.
const BITSANDBYTES: &[(&str, Kind)] = &[
    ("min_8bit_size", Kind::Whole),
    ("amsgrad", Kind::Off),
    ("optim_bits", Kind::Any),
    ("is_paged", Kind::Any),
    ("block_wise", Kind::Any),
];

const ADAM: &[(&str, Kind)] = &[
    ("betas", Kind::Betas),
    ("eps", Kind::FromZero),
    ("weight_decay", Kind::FromZero),
];

const LION: &[(&str, Kind)] = &[("betas", Kind::Betas), ("weight_decay", Kind::FromZero)];

const PRODIGY: &[(&str, Kind)] = &[
    ("betas", Kind::Betas),
    ("beta3", Kind::OptionalBeta),
    ("eps", Kind::AboveZero),
    ("weight_decay", Kind::FromZero),
    ("decouple", Kind::Flag),
    ("use_bias_correction", Kind::Flag),
    ("safeguard_warmup", Kind::Flag),
    ("d0", Kind::AboveZero),
    ("d_coef", Kind::AboveZero),
    ("growth_rate", Kind::OptionalAboveZero),
    ("slice_p", Kind::WholeFromOne),
];

const AUTOMAGIC: &[(&str, Kind)] = &[
    ("min_lr", Kind::AboveZero),
    ("max_lr", Kind::AboveZero),
    ("beta2", Kind::Beta),
    ("clip_threshold", Kind::AboveZero),
    ("weight_decay", Kind::FromZero),
];

/// The parameters that an optimizer has: those of its formula, and others that are taken because configs have them.
fn known(name: OptimizerName) -> [&'static [(&'static str, Kind)]; 2] {
    match name {
        OptimizerName::Adam | OptimizerName::AdamW => [ADAM, TORCH],
        OptimizerName::Adam8Bit | OptimizerName::AdamW8Bit => [ADAM, BITSANDBYTES],
        OptimizerName::Adam8 | OptimizerName::AdamW8 => {
            [ADAM, &[("decouple", Kind::Flag), ("min_8bit_size", Kind::Whole)]]
        }
        OptimizerName::Lion => [
            LION,
            &[("decoupled_weight_decay", Kind::Flag), ("use_triton", Kind::Any)],
        ],
        OptimizerName::Lion8Bit => [LION, BITSANDBYTES],
        OptimizerName::Adafactor => [
            &[
                ("eps", Kind::OneOrTwoFromZero),
                ("clip_threshold", Kind::AboveZero),
                ("decay_rate", Kind::Number),
                ("beta1", Kind::OptionalBeta),
                ("weight_decay", Kind::FromZero),
                ("scale_parameter", Kind::Flag),
            ],
            &[("relative_step", Kind::Off), ("warmup_init", Kind::Off)],
        ],
        OptimizerName::Prodigy => [PRODIGY, &[("fsdp_in_use", Kind::Off)]],
        OptimizerName::Prodigy8Bit => [PRODIGY, &[("min_8bit_size", Kind::Whole), ("fsdp_in_use", Kind::Off)]],
        OptimizerName::DAdaptation | OptimizerName::DAdaptationAdam => [
            &[
                ("betas", Kind::Betas),
                ("eps", Kind::AboveZero),
                ("weight_decay", Kind::FromZero),
                ("decouple", Kind::Flag),
                ("use_bias_correction", Kind::Flag),
                ("d0", Kind::AboveZero),
                ("growth_rate", Kind::OptionalAboveZero),
            ],
            &[("log_every", Kind::Any), ("fsdp_in_use", Kind::Off)],
        ],
        OptimizerName::DAdaptationLion => [
            &[
                ("betas", Kind::Betas),
                ("weight_decay", Kind::FromZero),
                ("d0", Kind::AboveZero),
            ],
            &[("log_every", Kind::Any), ("fsdp_in_use", Kind::Off)],
        ],
        OptimizerName::Adagrad => [
            &[
                ("lr_decay", Kind::FromZero),
                ("weight_decay", Kind::FromZero),
                ("initial_accumulator_value", Kind::FromZero),
                ("eps", Kind::FromZero),
            ],
            &[
                ("foreach", Kind::Any),
                ("fused", Kind::Any),
                ("differentiable", Kind::Any),
                ("maximize", Kind::Off),
            ],
        ],
        OptimizerName::AdemaMix8Bit => [
            &[
                ("betas", Kind::ThreeBetas),
                ("alpha", Kind::FromZero),
                ("t_alpha", Kind::OptionalAboveZero),
                ("t_beta3", Kind::OptionalAboveZero),
                ("eps", Kind::FromZero),
                ("weight_decay", Kind::FromZero),
            ],
            &[("min_8bit_size", Kind::Whole), ("is_paged", Kind::Any)],
        ],
        OptimizerName::Automagic => [
            AUTOMAGIC,
            &[
                ("lr_bump", Kind::AboveZero),
                ("eps", Kind::OneOrTwoFromZero),
                ("do_paramiter_swapping", Kind::Off),
                ("paramiter_swapping_factor", Kind::Any),
            ],
        ],
        OptimizerName::Automagic2 => [
            AUTOMAGIC,
            &[
                ("lr_bump", Kind::AboveZero),
                ("eps", Kind::FromZero),
                ("agreement_threshold", Kind::FromZeroToOne),
            ],
        ],
        OptimizerName::Automagic3 => [
            AUTOMAGIC,
            &[
                ("eps", Kind::FromZero),
                ("polarity_history", Kind::FromTwoToEight),
                ("fused", Kind::Flag),
            ],
        ],
        _ => [&[], &[]],
    }
}

fn numbers(value: &Value) -> Option<Vec<f64>> {
    value.as_array()?.iter().map(Value::as_f64).collect()
}

fn problem(kind: Kind, value: &Value) -> Option<&'static str> {
    let number = value.as_f64();
    let is = |test: fn(f64) -> bool| number.is_some_and(test);
    let pair = |test: fn(&f64) -> bool| numbers(value).is_some_and(|pair| pair.len() == 2 && pair.iter().all(test));
    let below_one = |beta: f64| (0.0..1.0).contains(&beta);
    let (fine, expected) = match kind {
        Kind::Betas => (
            pair(|beta| (0.0..1.0).contains(beta)),
            "expected two numbers from 0 to below 1",
        ),
        Kind::ThreeBetas => (
            numbers(value).is_some_and(|all| all.len() == 3 && all.iter().all(|beta| *beta > 0.0 && *beta < 1.0)),
            "expected three numbers above 0 and below 1",
        ),
        Kind::Beta => (is(below_one), "expected a number from 0 to below 1"),
        Kind::OptionalBeta => (
            value.is_null() || is(below_one),
            "expected a number from 0 to below 1, or null",
        ),
        Kind::Number => (number.is_some(), "expected a number"),
        Kind::FromZero => (is(|n| n >= 0.0), "expected a number from 0"),
        Kind::FromZeroToOne => (is(|n| (0.0..=1.0).contains(&n)), "expected a number from 0 to 1"),
        Kind::AboveZero => (is(|n| n > 0.0), "expected a number above 0"),
        Kind::OptionalAboveZero => (value.is_null() || is(|n| n > 0.0), "expected a number above 0, or null"),
        Kind::OneOrTwoFromZero => (
            is(|n| n >= 0.0) || pair(|n| *n >= 0.0),
            "expected one or two numbers from 0",
        ),
        Kind::Whole => (value.as_u64().is_some(), "expected a whole number from 0"),
        Kind::WholeFromOne => (value.as_u64().is_some_and(|n| n > 0), "expected a whole number from 1"),
        Kind::FromTwoToEight => (
            value.as_u64().is_some_and(|n| (2..=8).contains(&n)),
            "expected a whole number from 2 to 8",
        ),
        Kind::Flag => (value.is_boolean(), "expected true or false"),
        Kind::Off => (value.as_bool() == Some(false), "is not supported yet: only false"),
        Kind::Any => (true, ""),
    };
    (!fine).then_some(expected)
}

/// `train.optimizer_params`, found to be in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OptimizerParams(FreeMap);

impl OptimizerParams {
    /// Checks the parameters of an optimizer.
    ///
    /// # Errors
    /// What is wrong with which of them, all at once.
    pub fn new(name: OptimizerName, params: &FreeMap) -> Result<Self, Vec<(String, String)>> {
        let known = known(name).concat();
        let wrong = |(key, value): (&String, &Value)| {
            let message = match known.iter().find(|(known, _)| known == key) {
                Some((_, kind)) => problem(*kind, value)?.to_owned(),
                None => {
                    let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
                    format!("no such parameter; known: {}", names.join(", "))
                }
            };
            Some((key.clone(), message))
        };
        let mut problems: Vec<_> = params.iter().filter_map(wrong).collect();
        let read = Self(params.clone());
        if let (true, (min, max)) = (problems.is_empty(), read.lr_range(name))
            && min > max
        {
            problems.push(("min_lr".into(), format!("{min:e} is above max_lr, which is {max:e}")));
        }
        if problems.is_empty() { Ok(read) } else { Err(problems) }
    }

    /// The least and the greatest learning rate of an optimizer that finds its own between `min_lr` and `max_lr`.
    #[must_use]
    pub fn lr_range(&self, name: OptimizerName) -> (f64, f64) {
        let (min, max) = match name {
            OptimizerName::Automagic3 => (1e-8, 1e3),
            _ => (1e-7, 1e-3),
        };
        (self.number("min_lr", min), self.number("max_lr", max))
    }

    /// A number, or its default where it is left out.
    #[must_use]
    pub fn number(&self, key: &str, default: f64) -> f64 {
        self.optional(key).unwrap_or(default)
    }

    /// A number that may be left out.
    #[must_use]
    pub fn optional(&self, key: &str) -> Option<f64> {
        self.0.get(key).and_then(Value::as_f64)
    }

    /// Two numbers, or their defaults. One number stands for the first.
    #[must_use]
    pub fn pair(&self, key: &str, default: (f64, f64)) -> (f64, f64) {
        match (self.optional(key), self.0.get(key).and_then(numbers).as_deref()) {
            (Some(first), _) => (first, default.1),
            (None, Some(&[first, second])) => (first, second),
            _ => default,
        }
    }

    /// Three numbers, or their defaults.
    #[must_use]
    pub fn three(&self, key: &str, default: [f64; 3]) -> [f64; 3] {
        let found = self.0.get(key).and_then(numbers);
        found.and_then(|all| all.try_into().ok()).unwrap_or(default)
    }

    /// A whole number, or its default.
    #[must_use]
    pub fn whole(&self, key: &str, default: u64) -> u64 {
        self.0.get(key).and_then(Value::as_u64).unwrap_or(default)
    }

    /// A switch, or its default.
    #[must_use]
    pub fn flag(&self, key: &str, default: bool) -> bool {
        self.0.get(key).and_then(Value::as_bool).unwrap_or(default)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(name: OptimizerName, params: &Value) -> Result<OptimizerParams, Vec<(String, String)>> {
        OptimizerParams::new(name, params.as_object().unwrap())
    }

    #[test]
    fn what_fits_is_read() {
        let params = check(
            OptimizerName::Prodigy,
            &json!({"betas": [0.9, 0.99], "decouple": false, "slice_p": 11, "d_coef": 2, "beta3": null}),
        )
        .unwrap();
        assert_eq!(params.pair("betas", (0.0, 0.0)), (0.9, 0.99));
        assert_eq!(params.whole("slice_p", 1), 11);
        assert!(!params.flag("decouple", true));
        assert_eq!(params.number("d_coef", 1.0), 2.0);
        assert_eq!((params.optional("beta3"), params.number("eps", 1e-6)), (None, 1e-6));
    }

    #[test]
    fn what_does_not_is_told() {
        for (name, params, part) in [
            (OptimizerName::AdamW8Bit, json!({"betas": [0.9]}), "two numbers"),
            (OptimizerName::AdamW8Bit, json!({"min_8bit_size": -1}), "whole number"),
            (OptimizerName::Lion, json!({"eps": 1e-8}), "known: betas, weight_decay"),
            (OptimizerName::Adafactor, json!({"relative_step": true}), "only false"),
            (OptimizerName::Adafactor, json!({"eps": [1e-8]}), "two numbers"),
            (OptimizerName::Prodigy, json!({"d0": 0}), "above 0"),
            (
                OptimizerName::Prodigy8Bit,
                json!({"lr_bump": 1e-6}),
                "known: betas, beta3",
            ),
            (OptimizerName::AdamW8, json!({"decouple": 1}), "true or false"),
            (
                OptimizerName::Automagic,
                json!({"min_lr": 0.01}),
                "above max_lr, which is 1e-3",
            ),
            (
                OptimizerName::Automagic,
                json!({"do_paramiter_swapping": true}),
                "only false",
            ),
            (
                OptimizerName::Automagic2,
                json!({"agreement_threshold": 2}),
                "from 0 to 1",
            ),
            (
                OptimizerName::Automagic3,
                json!({"polarity_history": 64}),
                "from 2 to 8",
            ),
            (
                OptimizerName::Automagic3,
                json!({"lr_bump": 1e-6}),
                "known: min_lr, max_lr",
            ),
            (OptimizerName::Lion, json!({"weight_decay": "high"}), "0"),
            (
                OptimizerName::AdemaMix8Bit,
                json!({"betas": [0.9, 0.999]}),
                "three numbers",
            ),
        ] {
            let problems = check(name, &params).unwrap_err();
            assert_eq!(problems.len(), 1, "{params}");
            assert!(problems[0].1.contains(part), "{params}: {}", problems[0].1);
        }
    }
}
