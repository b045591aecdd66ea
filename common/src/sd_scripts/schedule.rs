//! `lr_scheduler` and its options.

use super::report::{Import, Section, number};
use serde_json::{Value, json};

/// Decides `train.lr_scheduler` and `train.lr_scheduler_params`. `steps` are all steps of the training.
pub(super) fn schedule(import: &mut Import<'_>, steps: u64, train: &mut Section) {
    let settings = import.settings;
    let name = settings.text("lr_scheduler").unwrap_or("constant");
    let warmup = warmup_steps(import, steps);
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
            params.insert("lr_end".into(), number(1e-7));
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
