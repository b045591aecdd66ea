//! `optimizer_type`, `optimizer_args` and the learning rates.

use super::arguments::{arguments, parse_arguments};
use super::report::{Import, Section, number};
use super::script::ScriptFamily;
use serde_json::{Value, json};

/// An optimizer of sd-scripts: its names in lower case, aitk's name, and the default parameters of its library.
struct OptimizerRow {
    names: &'static [&'static str],
    ours: &'static str,
    defaults: &'static str,
}

/// To add an optimizer, add its line. Defaults are those of torch, bitsandbytes, lion-pytorch, transformers, prodigyopt and dadaptation.
#[rustfmt::skip]
const OPTIMIZERS: &[OptimizerRow] = &[
    OptimizerRow { names: &["adamw", "pagedadamw", "pagedadamw32bit"], ours: "adamw", defaults: r#"{"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}"# },
    OptimizerRow { names: &["adamw8bit", "pagedadamw8bit"], ours: "adamw8bit", defaults: r#"{"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}"# },
    OptimizerRow { names: &["adam", "torch.optim.adam"], ours: "adam", defaults: r#"{"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0}"# },
    OptimizerRow { names: &["lion"], ours: "lion", defaults: r#"{"betas": [0.9, 0.99], "weight_decay": 0}"# },
    OptimizerRow { names: &["lion8bit", "pagedlion8bit"], ours: "lion8bit", defaults: r#"{"betas": [0.9, 0.99], "weight_decay": 0}"# },
    OptimizerRow { names: &["bitsandbytes.optim.ademamix8bit", "bitsandbytes.optim.pagedademamix8bit"], ours: "ademamix8bit", defaults: r#"{"betas": [0.9, 0.999, 0.9999], "alpha": 5, "eps": 1e-8, "weight_decay": 0.01}"# },
    OptimizerRow { names: &["adafactor"], ours: "adafactor", defaults: r#"{"eps": [1e-30, 1e-3], "clip_threshold": 1, "decay_rate": -0.8, "weight_decay": 0, "scale_parameter": true}"# },
    OptimizerRow { names: &["adagrad", "torch.optim.adagrad"], ours: "adagrad", defaults: r#"{"lr_decay": 0, "weight_decay": 0, "initial_accumulator_value": 0, "eps": 1e-10}"# },
    OptimizerRow { names: &["prodigy"], ours: "prodigy", defaults: r#"{"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0, "decouple": true, "use_bias_correction": false, "safeguard_warmup": false, "d0": 1e-6, "d_coef": 1}"# },
    OptimizerRow { names: &["dadaptadam"], ours: "dadaptationadam", defaults: r#"{"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0, "decouple": false, "use_bias_correction": false, "d0": 1e-6}"# },
    OptimizerRow { names: &["dadaptlion"], ours: "dadaptationlion", defaults: r#"{"betas": [0.9, 0.99], "weight_decay": 0, "d0": 1e-6}"# },
];

/// `learning_rate` of sd-scripts.
pub(super) const DEFAULT_RATE: f64 = 2e-6;

/// Below this rate, aitk trains these optimizers with 1, as ai-toolkit does.
const LEAST_ADAPTIVE_RATE: f64 = 0.1;

/// Decides `train.optimizer`, `train.optimizer_params` and `train.max_grad_norm`. `train` has `lr_factors` already.
pub(super) fn optimizer(import: &mut Import<'_>, rates: &Rates, train: &mut Section) {
    let settings = import.settings;
    let mut name = settings.text("optimizer_type").unwrap_or("").to_owned();
    let mut option = "optimizer_type";
    for (old, meaning) in [("use_8bit_adam", "AdamW8bit"), ("use_lion_optimizer", "Lion")] {
        if settings.flag(old) {
            if name.is_empty() {
                (name, option) = (meaning.to_owned(), old);
            } else {
                import.error(old, format!("contradicts {option}: remove one of them"));
            }
        }
    }
    if name.is_empty() {
        "AdamW".clone_into(&mut name);
    }
    let max_norm = settings.number("max_grad_norm").unwrap_or(1.0).max(0.0);
    train.insert("max_grad_norm".into(), number(max_norm));
    let lower = name.to_lowercase();
    let Some(found) = OPTIMIZERS.iter().find(|row| row.names.contains(&lower.as_str())) else {
        let known: Vec<&str> = OPTIMIZERS.iter().flat_map(|row| row.names).copied().collect();
        let shown = name.chars().take(60).collect::<String>();
        import.error(
            option,
            format!(
                "aitk has no optimizer `{}`; it has {}",
                shown.escape_debug(),
                known.join(", ")
            ),
        );
        return;
    };
    if settings.flag("fused_backward_pass") && found.ours != "adafactor" {
        import.error(
            "fused_backward_pass",
            "needs optimizer_type Adafactor, in sd-scripts too: remove it",
        );
    }
    let is_fused = |option: &&str| {
        let row = super::options::find(option).filter(|row| row.used_by.includes(import.script.bits()));
        settings.is_set(option) && row.is_some()
    };
    let fused = ["fused_optimizer_groups", "blockwise_fused_optimizers"];
    let clips = max_norm > 0.0 && found.ours != "adafactor";
    if let Some(option) = fused.into_iter().find(is_fused).filter(|_| clips) {
        let message =
            format!("sd-scripts clips the gradients of each tensor to a norm of {max_norm}, aitk all together");
        import.note(option, message);
    }
    let accumulates = settings
        .whole("gradient_accumulation_steps")
        .is_some_and(|steps| steps > 1);
    if settings.flag("fused_backward_pass") && accumulates {
        import.error(
            "fused_backward_pass",
            "contradicts gradient_accumulation_steps, in sd-scripts too: remove one of them",
        );
    }
    let mut params: Section = serde_json::from_str(found.defaults).unwrap_or_default();
    for argument in arguments(import, "optimizer_args") {
        let Some(value) = argument.literal() else {
            let message = format!(
                "{}: expected a number, True, False, None or (0.9, 0.99)",
                argument.name.escape_debug()
            );
            import.error("optimizer_args", message);
            continue;
        };
        match argument.name.as_str() {
            _ if value.is_null() && !params.contains_key(&argument.name) => {}
            _ => {
                params.insert(argument.name, value);
            }
        }
    }
    if found.ours == "adafactor" {
        adafactor(import, option, &mut params, train);
        if max_norm > 0.0 {
            let message = format!(
                "aitk does not clip gradients with Adafactor, which bounds its updates itself; sd-scripts clips them to a norm of {max_norm}"
            );
            let option = if settings.is_set("max_grad_norm") {
                "max_grad_norm"
            } else {
                option
            };
            import.note(option, message);
        }
    }
    train.insert("optimizer".into(), json!(found.ours));
    train.insert("optimizer_params".into(), Value::Object(params));
    let rate = train.get("lr").and_then(Value::as_f64).unwrap_or(0.0);
    if found.ours == "prodigy" || found.ours.starts_with("dadaptation") {
        // The optimizer finds one rate.
        if !rates.factors.is_empty() {
            let message = format!(
                "{name} finds one learning rate for all parts: give text encoders the rate of the U-Net or transformer"
            );
            let option = if settings.is_set("text_encoder_lr") {
                "text_encoder_lr"
            } else {
                "learning_rate"
            };
            import.error(option, message);
        } else if train.contains_key("lr_factors") {
            // They are those of LoRA+ or of blocks.
            let names = parse_arguments(settings, "network_args").into_iter();
            let names = names
                .filter(|argument| argument.name.starts_with("loraplus_") || argument.name.ends_with("_lr_weight"));
            let names: Vec<String> = names.map(|argument| argument.name).collect();
            let message = format!(
                "{}: {name} finds one learning rate for all parts: remove it",
                names.join(", ")
            );
            import.error("network_args", message);
        }
    }
    let adapts = found.ours == "prodigy" || found.ours.starts_with("dadaptation");
    if adapts && rate < LEAST_ADAPTIVE_RATE {
        let message =
            format!("{name} adapts the learning rate itself, and aitk reads a rate below 0.1 as 1: set it to 1");
        let option = if settings.is_set("unet_lr") {
            "unet_lr"
        } else {
            "learning_rate"
        };
        import.error(option, message);
    }
}

/// `relative_step` and `warmup_init`: unless the first is off, Adafactor chooses the learning rate, and sd-scripts ignores those of the
/// config.
fn adafactor(import: &mut Import<'_>, option: &str, params: &mut Section, train: &mut Section) {
    let is_on = |params: &Section, name: &str| params.get(name) == Some(&Value::Bool(true));
    let warms_up = is_on(params, "warmup_init");
    let is_off = params.get("relative_step") == Some(&Value::Bool(false));
    if is_off && !warms_up {
        // aitk's own defaults.
        params.remove("relative_step");
        params.remove("warmup_init");
        return;
    }
    if is_off {
        let message = "relative_step: sd-scripts switches it on, because warmup_init needs it";
        import.note("optimizer_args", message);
    }
    params.insert("relative_step".into(), json!(true));
    train.remove("lr_factors");
    let message = "Adafactor chooses the learning rate itself (relative_step), as in sd-scripts: learning_rate, other rates and lr_scheduler have \
                   no effect";
    import.note(option, message);
}

/// Whether Adafactor chooses the learning rate: `train` has an optimizer.
pub(super) fn chooses_rates(train: &Section) -> bool {
    let params = train.get("optimizer_params");
    params.and_then(|params| params.get("relative_step")) == Some(&Value::Bool(true))
}

/// The learning rate, and whether the denoiser and the text encoder are trained.
pub(super) struct Rates {
    pub rate: f64,
    pub trains_denoiser: bool,
    pub trains_text_encoder: bool,
    /// `train.lr_factors`: a part of the names of tensors, and how many times `rate` their rate is.
    pub factors: Vec<(String, f64)>,
}

/// Decides `train.lr` and `train.lr_factors`, and which parts are trained.
pub(super) fn rates(import: &mut Import<'_>) -> Rates {
    let settings = import.settings;
    let default = settings.number("learning_rate").unwrap_or(DEFAULT_RATE);
    for option in ["learning_rate", "unet_lr"] {
        if settings.number(option).is_some_and(|rate| rate < 0.0) {
            import.error(option, "expected a learning rate from 0");
        }
    }
    if import.script.trains_adapter() {
        adapter_rates(import, default)
    } else if import.script.trains_embedding() {
        Rates {
            rate: default,
            trains_denoiser: true,
            trains_text_encoder: false,
            factors: Vec::new(),
        }
    } else {
        model_rates(import, default)
    }
}

fn adapter_rates(import: &mut Import<'_>, default: f64) -> Rates {
    let settings = import.settings;
    let (unet_only, text_only) = (
        settings.flag("network_train_unet_only"),
        settings.flag("network_train_text_encoder_only"),
    );
    if unet_only && text_only {
        import.error(
            "network_train_text_encoder_only",
            "contradicts network_train_unet_only: remove one of them",
        );
    }
    let unet = settings.number("unet_lr").unwrap_or(default);
    let texts = match settings.numbers("text_encoder_lr") {
        rates if rates.is_empty() => vec![default],
        rates => rates,
    };
    // The LoRA of a part whose rate is 0 stays zero, so that the part is left out.
    let trains_denoiser = !text_only && unet != 0.0;
    let first = texts.first().copied().unwrap_or(default);
    let trained = match import.script.family() {
        // The last rate is that of T5, which is not trained.
        ScriptFamily::Sd3 => vec![first, texts.get(1).copied().unwrap_or(first)],
        ScriptFamily::Flux => vec![first],
        ScriptFamily::Sd | ScriptFamily::Sdxl => {
            if !unet_only && texts.iter().any(|rate| *rate != first) {
                let message = format!(
                    "sd-scripts trains all text encoders of this model with the first rate, {first:?}: the others have no effect"
                );
                import.note("text_encoder_lr", message);
            }
            vec![first]
        }
    };
    let trains_text_encoder = !unet_only && trained.iter().any(|rate| *rate != 0.0);
    let rate = if trains_denoiser { unet } else { first };
    let factors = match trains_text_encoder {
        true => text_factors(import, &trained, rate),
        false => Vec::new(),
    };
    let contradicts = unet_only && text_only;
    if !contradicts && !trains_denoiser && !trains_text_encoder {
        import.error("learning_rate", "nothing is trained: all learning rates are 0");
    }
    Rates {
        rate,
        trains_denoiser,
        trains_text_encoder,
        factors,
    }
}

/// The factors of the rates of text encoders, where they are not `rate`.
fn text_factors(import: &mut Import<'_>, rates: &[f64], rate: f64) -> Vec<(String, f64)> {
    // Names of all text encoders, and of the first two.
    let all = match import.script.is_flow() {
        true => "text_encoder",
        false => "lora_te",
    };
    let each = ["text_encoder.", "text_encoder_2."];
    let first = rates.first().copied().unwrap_or(rate);
    if rates.iter().all(|other| *other == rate) {
        return Vec::new();
    }
    if rate == 0.0 {
        import.error(
            "learning_rate",
            "is 0, but a text encoder has a learning rate: set learning_rate to that of the text encoder",
        );
        return Vec::new();
    }
    match rates.iter().all(|other| *other == first) {
        true => vec![(all.to_owned(), factor_of(first, rate))],
        false => each
            .into_iter()
            .zip(rates)
            .map(|(name, other)| (name.to_owned(), factor_of(*other, rate)))
            .collect(),
    }
}

/// How many times `rate` another rate is, as people write it: 50 of 1e-4 and 2e-6, whose quotient is 50.00000000000001.
fn factor_of(other: f64, rate: f64) -> f64 {
    let exact = other / rate;
    let rounded: f64 = format!("{exact:.11e}").parse().unwrap_or(exact);
    if (rounded - exact).abs() <= exact.abs() * 1e-15 {
        rounded
    } else {
        exact
    }
}

fn model_rates(import: &mut Import<'_>, default: f64) -> Rates {
    use super::script::Script;
    let settings = import.settings;
    let options: &[&str] = match import.script {
        Script::TrainDb | Script::FineTune => &["learning_rate_te"],
        Script::SdxlTrain | Script::Sd3Train => &["learning_rate_te1", "learning_rate_te2"],
        _ => &[],
    };
    if settings.flag("train_text_encoder") && import.script == Script::Sd3Train {
        import.error(
            "train_text_encoder",
            "aitk trains the transformer alone when it trains a whole model: remove it",
        );
    }
    let is_zero = |option: &&&str| settings.number(option) == Some(0.0);
    let mut trains_text_encoder = match import.script {
        // 0 stops it before the first step.
        Script::TrainDb => settings.whole("stop_text_encoder_training").is_none_or(|step| step > 0),
        Script::FluxTrain => false,
        _ => settings.flag("train_text_encoder"),
    };
    if settings
        .whole("stop_text_encoder_training")
        .is_some_and(|step| step > 0)
        && import.script == Script::TrainDb
    {
        let message = "aitk trains the text encoder to the end, or not at all (-1)";
        import.error("stop_text_encoder_training", message);
    }
    trains_text_encoder &= options.is_empty() || options.iter().filter(is_zero).count() < options.len();
    let names = ["text_encoder.", "text_encoder_2."];
    let mut factors = Vec::new();
    for (option, name) in options.iter().zip(names).filter(|_| trains_text_encoder) {
        let rate = settings.number(option).unwrap_or(default);
        if rate == default {
            continue;
        }
        if rate < 0.0 {
            import.error(option, "expected a learning rate from 0");
        } else if default == 0.0 {
            import.error(
                "learning_rate",
                "is 0, but a text encoder has a learning rate: set learning_rate to that of the text encoder",
            );
        } else {
            factors.push((name.to_owned(), factor_of(rate, default)));
        }
    }
    Rates {
        rate: default,
        trains_denoiser: true,
        trains_text_encoder,
        factors,
    }
}
