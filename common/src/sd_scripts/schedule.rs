//! `lr_scheduler` and its options.

use super::arguments::arguments;
use super::optimizer::{DEFAULT_RATE, chooses_rates};
use super::report::{Import, Section, number};
use serde_json::{Value, json};

/// A schedule of `torch.optim.lr_scheduler`: its class, our name, and the arguments that both have.
struct TorchSchedule {
    class: &'static str,
    ours: &'static str,
    arguments: &'static [&'static str],
}

/// To add a schedule of torch, add its line.
#[rustfmt::skip]
const TORCH: &[TorchSchedule] = &[
    TorchSchedule { class: "CosineAnnealingLR", ours: "cosine", arguments: &["T_max", "eta_min"] },
    TorchSchedule { class: "CosineAnnealingWarmRestarts", ours: "cosine_with_restarts", arguments: &["T_0", "T_mult", "eta_min"] },
    TorchSchedule { class: "LinearLR", ours: "linear", arguments: &["start_factor", "end_factor", "total_iters"] },
    TorchSchedule { class: "StepLR", ours: "step", arguments: &["step_size", "gamma"] },
];

/// The last rate of transformers' polynomial.
const POLYNOMIAL_END: f64 = 1e-7;

/// Decides `train.lr_scheduler` and `train.lr_scheduler_params`. `steps` are all steps of the training.
pub(super) fn schedule(import: &mut Import<'_>, steps: u64, train: &mut Section) {
    let settings = import.settings;
    if chooses_rates(train) {
        train.insert("lr_scheduler".into(), json!("constant"));
        return;
    }
    let warmup = warmup_steps(import, steps);
    if let Some(class) = settings.text("lr_scheduler_type") {
        torch_schedule(import, class, warmup, train);
        return;
    }
    if !settings.texts("lr_scheduler_args").is_empty() {
        import.error(
            "lr_scheduler_args",
            "only lr_scheduler_type has arguments: give the scheduler's own options",
        );
    }
    let name = settings.text("lr_scheduler").unwrap_or("constant");
    let mut params = Section::new();
    let rate = train.get("lr").and_then(Value::as_f64).unwrap_or(0.0);
    let ours = match name {
        "constant" => {
            if warmup > 0 {
                import.error(
                    "lr_warmup_steps",
                    "lr_scheduler constant has no warm-up: use constant_with_warmup",
                );
            }
            "constant"
        }
        // aitk's own default is 1000 steps.
        "constant_with_warmup" if warmup == 0 => "constant",
        "constant_with_warmup" => "constant_with_warmup",
        "linear" => {
            params.insert("start_factor".into(), json!(1));
            params.insert("end_factor".into(), json!(0));
            "linear"
        }
        "cosine" => "cosine",
        "cosine_with_restarts" => {
            let cycles = import.whole_from("lr_scheduler_num_cycles", 1, 1).max(1);
            if cycles == 1 {
                "cosine"
            } else {
                let after_warmup = steps.saturating_sub(warmup).max(1);
                params.insert("T_0".into(), number(after_warmup as f64 / cycles as f64));
                "cosine_with_restarts"
            }
        }
        "polynomial" => {
            params.insert(
                "power".into(),
                number(settings.number("lr_scheduler_power").unwrap_or(1.0)),
            );
            params.insert("lr_end".into(), number(end_of_polynomial(import, rate)));
            "polynomial"
        }
        "cosine_with_min_lr" => {
            if settings.whole("lr_scheduler_num_cycles").unwrap_or(1) != 1 {
                import.error("lr_scheduler_num_cycles", "expected 1: aitk's cosine falls once");
            }
            let Some(ratio) = settings.number("lr_scheduler_min_lr_ratio") else {
                import.error("lr_scheduler", "cosine_with_min_lr needs lr_scheduler_min_lr_ratio");
                return;
            };
            params.insert("eta_min".into(), number(rate * ratio));
            "cosine"
        }
        other => {
            let message = format!(
                "aitk has no {}: use constant, constant_with_warmup, linear, cosine, cosine_with_restarts, polynomial or \
                 cosine_with_min_lr",
                other.escape_debug()
            );
            import.error("lr_scheduler", message);
            return;
        }
    };
    if warmup > 0 && name != "constant" {
        params.insert("num_warmup_steps".into(), json!(warmup));
    }
    train.insert("lr_scheduler".into(), json!(ours));
    if !params.is_empty() {
        train.insert("lr_scheduler_params".into(), Value::Object(params));
    }
}

/// The last rate of a polynomial. transformers falls to 1e-7 of learning_rate, by which it multiplies the rates of all parts, those of
/// `unet_lr` too.
fn end_of_polynomial(import: &mut Import<'_>, rate: f64) -> f64 {
    let base = import.settings.number("learning_rate").unwrap_or(DEFAULT_RATE);
    if base <= POLYNOMIAL_END {
        let message =
            format!("polynomial falls to {POLYNOMIAL_END:?}, and needs a higher learning_rate, in sd-scripts too");
        import.error("lr_scheduler", message);
    }
    match base == rate || base <= POLYNOMIAL_END {
        true => POLYNOMIAL_END,
        false => POLYNOMIAL_END * rate / base,
    }
}

/// A class of torch wins over `lr_scheduler`.
fn torch_schedule(import: &mut Import<'_>, class: &str, warmup: u64, train: &mut Section) {
    let name = class.strip_prefix("torch.optim.lr_scheduler.").unwrap_or(class);
    let Some(found) = TORCH.iter().find(|schedule| schedule.class == name) else {
        let known: Vec<&str> = TORCH.iter().map(|schedule| schedule.class).collect();
        let message = format!(
            "aitk has no `{}`; it has {}",
            super::settings::shortened(class),
            known.join(", ")
        );
        import.error("lr_scheduler_type", message);
        return;
    };
    if warmup > 0 {
        import.error(
            "lr_warmup_steps",
            "sd-scripts has no warm-up with lr_scheduler_type: remove it",
        );
    }
    let mut params = Section::new();
    for argument in arguments(import, "lr_scheduler_args") {
        match argument
            .number()
            .filter(|_| found.arguments.contains(&argument.name.as_str()))
        {
            Some(value) => {
                params.insert(argument.name, number(value));
            }
            None => {
                let message = format!(
                    "expected numbers for {}, found {}",
                    found.arguments.join(", "),
                    super::settings::shortened(&argument.name)
                );
                import.error("lr_scheduler_args", message);
            }
        }
    }
    let needed = match found.class {
        "CosineAnnealingLR" => Some("T_max"),
        "CosineAnnealingWarmRestarts" => Some("T_0"),
        "StepLR" => Some("step_size"),
        _ => None,
    };
    if let Some(needed) = needed.filter(|needed| !params.contains_key(*needed)) {
        import.error(
            "lr_scheduler_type",
            format!("{name} needs {needed} in lr_scheduler_args"),
        );
    }
    let has_end = params
        .get("eta_min")
        .and_then(Value::as_f64)
        .is_some_and(|end| end != 0.0);
    if has_end && train.contains_key("lr_factors") {
        let message = "eta_min: aitk multiplies it by the factors of the rates (lr_factors), so that parts with other rates have another one";
        import.note("lr_scheduler_args", message);
    }
    // torch ends its linear schedule after five steps, ai-toolkit's after all steps.
    if found.class == "LinearLR" && !params.contains_key("total_iters") {
        params.insert("total_iters".into(), json!(5));
    }
    train.insert("lr_scheduler".into(), json!(found.ours));
    train.insert("lr_scheduler_params".into(), Value::Object(params));
}

/// The steps of the warm-up: a whole number, or a share of all steps.
fn warmup_steps(import: &mut Import<'_>, steps: u64) -> u64 {
    let settings = import.settings;
    match settings.get("lr_warmup_steps") {
        Some(super::document::Value::Number(share)) if (0.0..=1.0).contains(share) => (share * steps as f64) as u64,
        Some(super::document::Value::Number(_)) => {
            import.error(
                "lr_warmup_steps",
                "expected a whole number of steps, or a share of them from 0 to 1",
            );
            0
        }
        _ => import.whole_from("lr_warmup_steps", 0, 0),
    }
}
