//! The parameters of each optimizer in `train.optimizer_params`. One table serves both the check of a config and the engine.

use super::optimizer::OptimizerName;
use super::values::FreeMap;
use serde_json::Value;

/// The allowed values of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParamKind {
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
    NonNegative,
    /// A number from 0 to 1.
    ZeroToOne,
    /// A number above 0.
    Positive,
    /// A number above 0, or `null` for none.
    OptionalPositive,
    /// Two numbers from 0, or one for the first of them.
    OneOrTwoNonNegative,
    /// A whole number from 0.
    NonNegativeInteger,
    /// A whole number from 1.
    PositiveInteger,
    /// A whole number from 2 to 8.
    IntegerTwoToEight,
    /// `true` or `false`.
    Bool,
    /// `false` only: a switch that is known but not supported.
    OnlyFalse,
    /// Any value: it does not change the result here.
    NoEffect,
}

/// torch's switches. Those that only choose an implementation have no effect here.
const TORCH_SWITCHES: &[(&str, ParamKind)] = &[
    ("foreach", ParamKind::NoEffect),
    ("fused", ParamKind::NoEffect),
    ("capturable", ParamKind::NoEffect),
    ("differentiable", ParamKind::NoEffect),
    ("amsgrad", ParamKind::OnlyFalse),
    ("maximize", ParamKind::OnlyFalse),
];

/// Extra parameters of bitsandbytes' 8-bit optimizers.
const BITSANDBYTES: &[(&str, ParamKind)] = &[
    ("min_8bit_size", ParamKind::NonNegativeInteger),
    ("amsgrad", ParamKind::OnlyFalse),
    ("optim_bits", ParamKind::NoEffect),
    ("is_paged", ParamKind::NoEffect),
    ("block_wise", ParamKind::NoEffect),
];

const ADAM: &[(&str, ParamKind)] = &[
    ("betas", ParamKind::Betas),
    ("eps", ParamKind::NonNegative),
    ("weight_decay", ParamKind::NonNegative),
];

const LION: &[(&str, ParamKind)] = &[("betas", ParamKind::Betas), ("weight_decay", ParamKind::NonNegative)];

const PRODIGY: &[(&str, ParamKind)] = &[
    ("betas", ParamKind::Betas),
    ("beta3", ParamKind::OptionalBeta),
    ("eps", ParamKind::Positive),
    ("weight_decay", ParamKind::NonNegative),
    ("decouple", ParamKind::Bool),
    ("use_bias_correction", ParamKind::Bool),
    ("safeguard_warmup", ParamKind::Bool),
    ("d0", ParamKind::Positive),
    ("d_coef", ParamKind::Positive),
    ("growth_rate", ParamKind::OptionalPositive),
    ("slice_p", ParamKind::PositiveInteger),
];

const AUTOMAGIC: &[(&str, ParamKind)] = &[
    ("min_lr", ParamKind::Positive),
    ("max_lr", ParamKind::Positive),
    ("beta2", ParamKind::Beta),
    ("clip_threshold", ParamKind::Positive),
    ("weight_decay", ParamKind::NonNegative),
];

/// The parameters of an optimizer: those of its formula, and others that are accepted because configs contain them.
fn known_params(name: OptimizerName) -> [&'static [(&'static str, ParamKind)]; 2] {
    match name {
        OptimizerName::Adam | OptimizerName::AdamW => [ADAM, TORCH_SWITCHES],
        OptimizerName::Adam8Bit | OptimizerName::AdamW8Bit => [ADAM, BITSANDBYTES],
        OptimizerName::Adam8 | OptimizerName::AdamW8 => [
            ADAM,
            &[
                ("decouple", ParamKind::Bool),
                ("min_8bit_size", ParamKind::NonNegativeInteger),
            ],
        ],
        OptimizerName::Lion => [
            LION,
            &[
                ("decoupled_weight_decay", ParamKind::Bool),
                ("use_triton", ParamKind::NoEffect),
            ],
        ],
        OptimizerName::Lion8Bit => [LION, BITSANDBYTES],
        OptimizerName::Adafactor => [
            &[
                ("eps", ParamKind::OneOrTwoNonNegative),
                ("clip_threshold", ParamKind::Positive),
                ("decay_rate", ParamKind::Number),
                ("beta1", ParamKind::OptionalBeta),
                ("weight_decay", ParamKind::NonNegative),
                ("scale_parameter", ParamKind::Bool),
            ],
            &[("relative_step", ParamKind::Bool), ("warmup_init", ParamKind::Bool)],
        ],
        OptimizerName::Prodigy => [PRODIGY, &[("fsdp_in_use", ParamKind::OnlyFalse)]],
        OptimizerName::Prodigy8Bit => [
            PRODIGY,
            &[
                ("min_8bit_size", ParamKind::NonNegativeInteger),
                ("fsdp_in_use", ParamKind::OnlyFalse),
            ],
        ],
        OptimizerName::DAdaptation | OptimizerName::DAdaptationAdam => [
            &[
                ("betas", ParamKind::Betas),
                ("eps", ParamKind::Positive),
                ("weight_decay", ParamKind::NonNegative),
                ("decouple", ParamKind::Bool),
                ("use_bias_correction", ParamKind::Bool),
                ("d0", ParamKind::Positive),
                ("growth_rate", ParamKind::OptionalPositive),
            ],
            &[
                ("log_every", ParamKind::NoEffect),
                ("fsdp_in_use", ParamKind::OnlyFalse),
            ],
        ],
        OptimizerName::DAdaptationLion => [
            &[
                ("betas", ParamKind::Betas),
                ("weight_decay", ParamKind::NonNegative),
                ("d0", ParamKind::Positive),
            ],
            &[
                ("log_every", ParamKind::NoEffect),
                ("fsdp_in_use", ParamKind::OnlyFalse),
            ],
        ],
        OptimizerName::Adagrad => [
            &[
                ("lr_decay", ParamKind::NonNegative),
                ("weight_decay", ParamKind::NonNegative),
                ("initial_accumulator_value", ParamKind::NonNegative),
                ("eps", ParamKind::NonNegative),
            ],
            &[
                ("foreach", ParamKind::NoEffect),
                ("fused", ParamKind::NoEffect),
                ("differentiable", ParamKind::NoEffect),
                ("maximize", ParamKind::OnlyFalse),
            ],
        ],
        OptimizerName::AdemaMix8Bit => [
            &[
                ("betas", ParamKind::ThreeBetas),
                ("alpha", ParamKind::NonNegative),
                ("t_alpha", ParamKind::OptionalPositive),
                ("t_beta3", ParamKind::OptionalPositive),
                ("eps", ParamKind::NonNegative),
                ("weight_decay", ParamKind::NonNegative),
            ],
            &[
                ("min_8bit_size", ParamKind::NonNegativeInteger),
                ("is_paged", ParamKind::NoEffect),
            ],
        ],
        OptimizerName::Automagic => [
            AUTOMAGIC,
            &[
                ("lr_bump", ParamKind::Positive),
                ("eps", ParamKind::OneOrTwoNonNegative),
                ("do_paramiter_swapping", ParamKind::OnlyFalse),
                ("paramiter_swapping_factor", ParamKind::NoEffect),
            ],
        ],
        OptimizerName::Automagic2 => [
            AUTOMAGIC,
            &[
                ("lr_bump", ParamKind::Positive),
                ("eps", ParamKind::NonNegative),
                ("agreement_threshold", ParamKind::ZeroToOne),
            ],
        ],
        OptimizerName::Automagic3 => [
            AUTOMAGIC,
            &[
                ("eps", ParamKind::NonNegative),
                ("polarity_history", ParamKind::IntegerTwoToEight),
                ("fused", ParamKind::Bool),
            ],
        ],
        _ => [&[], &[]],
    }
}

fn as_numbers(value: &Value) -> Option<Vec<f64>> {
    value.as_array()?.iter().map(Value::as_f64).collect()
}

fn check_value(kind: ParamKind, value: &Value) -> Option<&'static str> {
    let number = value.as_f64();
    let is = |test: fn(f64) -> bool| number.is_some_and(test);
    let pair = |test: fn(&f64) -> bool| as_numbers(value).is_some_and(|pair| pair.len() == 2 && pair.iter().all(test));
    let below_one = |beta: f64| (0.0..1.0).contains(&beta);
    let (fine, expected) = match kind {
        ParamKind::Betas => (
            pair(|beta| (0.0..1.0).contains(beta)),
            "expected two numbers from 0 to below 1",
        ),
        ParamKind::ThreeBetas => (
            as_numbers(value).is_some_and(|all| all.len() == 3 && all.iter().all(|beta| *beta > 0.0 && *beta < 1.0)),
            "expected three numbers above 0 and below 1",
        ),
        ParamKind::Beta => (is(below_one), "expected a number from 0 to below 1"),
        ParamKind::OptionalBeta => (
            value.is_null() || is(below_one),
            "expected a number from 0 to below 1, or null",
        ),
        ParamKind::Number => (number.is_some(), "expected a number"),
        ParamKind::NonNegative => (is(|n| n >= 0.0), "expected a number from 0"),
        ParamKind::ZeroToOne => (is(|n| (0.0..=1.0).contains(&n)), "expected a number from 0 to 1"),
        ParamKind::Positive => (is(|n| n > 0.0), "expected a number above 0"),
        ParamKind::OptionalPositive => (value.is_null() || is(|n| n > 0.0), "expected a number above 0, or null"),
        ParamKind::OneOrTwoNonNegative => (
            is(|n| n >= 0.0) || pair(|n| *n >= 0.0),
            "expected one or two numbers from 0",
        ),
        ParamKind::NonNegativeInteger => (value.as_u64().is_some(), "expected a whole number from 0"),
        ParamKind::PositiveInteger => (value.as_u64().is_some_and(|n| n > 0), "expected a whole number from 1"),
        ParamKind::IntegerTwoToEight => (
            value.as_u64().is_some_and(|n| (2..=8).contains(&n)),
            "expected a whole number from 2 to 8",
        ),
        ParamKind::Bool => (value.is_boolean(), "expected true or false"),
        ParamKind::OnlyFalse => (
            value.as_bool() == Some(false),
            "is not supported yet; only false is accepted",
        ),
        ParamKind::NoEffect => (true, ""),
    };
    (!fine).then_some(expected)
}

/// Validated `train.optimizer_params`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OptimizerParams(FreeMap);

impl OptimizerParams {
    /// Validates the parameters of an optimizer.
    ///
    /// # Errors
    /// The key and the message of every invalid parameter.
    pub fn new(name: OptimizerName, params: &FreeMap) -> Result<Self, Vec<(String, String)>> {
        let known = known_params(name).concat();
        let find_problem = |(key, value): (&String, &Value)| {
            let message = match known.iter().find(|(known, _)| known == key) {
                Some((_, kind)) => check_value(*kind, value)?.to_owned(),
                None => {
                    let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
                    format!("no such parameter; known: {}", names.join(", "))
                }
            };
            Some((key.clone(), message))
        };
        let mut problems: Vec<_> = params.iter().filter_map(find_problem).collect();
        let read = Self(params.clone());
        if let (true, (min, max)) = (problems.is_empty(), read.lr_range(name))
            && min > max
        {
            problems.push(("min_lr".into(), format!("{min:e} is above max_lr, which is {max:e}")));
        }
        if name == OptimizerName::Adafactor && read.flag("warmup_init", false) && !read.flag("relative_step", false) {
            problems.push(("warmup_init".into(), "needs relative_step: true".into()));
        }
        if problems.is_empty() { Ok(read) } else { Err(problems) }
    }

    /// The minimum and maximum learning rate of an optimizer that adapts it between `min_lr` and `max_lr`.
    #[must_use]
    pub fn lr_range(&self, name: OptimizerName) -> (f64, f64) {
        let (min, max) = match name {
            OptimizerName::Automagic3 => (1e-8, 1e3),
            _ => (1e-7, 1e-3),
        };
        (self.number("min_lr", min), self.number("max_lr", max))
    }

    /// A number, or its default if absent.
    #[must_use]
    pub fn number(&self, key: &str, default: f64) -> f64 {
        self.optional(key).unwrap_or(default)
    }

    /// A number, if present.
    #[must_use]
    pub fn optional(&self, key: &str) -> Option<f64> {
        self.0.get(key).and_then(Value::as_f64)
    }

    /// Two numbers, or their defaults. A single number sets the first.
    #[must_use]
    pub fn pair(&self, key: &str, default: (f64, f64)) -> (f64, f64) {
        match (self.optional(key), self.0.get(key).and_then(as_numbers).as_deref()) {
            (Some(first), _) => (first, default.1),
            (None, Some(&[first, second])) => (first, second),
            _ => default,
        }
    }

    /// Three numbers, or their defaults.
    #[must_use]
    pub fn three(&self, key: &str, default: [f64; 3]) -> [f64; 3] {
        let found = self.0.get(key).and_then(as_numbers);
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
    fn valid_parameters_are_read() {
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
    fn invalid_parameters_are_refused_with_a_reason() {
        for (name, params, part) in [
            (OptimizerName::AdamW8Bit, json!({"betas": [0.9]}), "two numbers"),
            (OptimizerName::AdamW8Bit, json!({"min_8bit_size": -1}), "whole number"),
            (OptimizerName::Lion, json!({"eps": 1e-8}), "known: betas, weight_decay"),
            (OptimizerName::Adafactor, json!({"relative_step": 1}), "true or false"),
            (
                OptimizerName::Adafactor,
                json!({"warmup_init": true}),
                "needs relative_step: true",
            ),
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
