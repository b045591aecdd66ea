//! Noise, timesteps and the loss.

use super::report::{Import, Section, number};
use super::script::{Script, ScriptFamily};
use serde_json::json;

/// The number by which aitk's loss is multiplied so that it is sd-scripts'.
pub(super) type LossFactor = f64;

/// Decides the keys of `train` about noise, timesteps and the loss.
pub(super) fn objective(import: &mut Import<'_>, train: &mut Section) -> LossFactor {
    match import.script.family() {
        ScriptFamily::Sd | ScriptFamily::Sdxl => diffusion(import, train),
        ScriptFamily::Flux => flux(import, train),
        ScriptFamily::Sd3 => sd3(import, train),
    }
    let gamma = import.settings.number("ip_noise_gamma");
    if let Some(gamma) = gamma.filter(|gamma| *gamma != 0.0 && import.script.family() != ScriptFamily::Sd3) {
        train.insert("ip_noise_gamma".into(), number(gamma));
        if import.settings.flag("ip_noise_gamma_random_strength") {
            train.insert("ip_noise_gamma_random_strength".into(), json!(true));
        }
    }
    let mut reg_weight = import.settings.number("prior_loss_weight").unwrap_or(1.0);
    if import.script == Script::SdxlTrain && reg_weight != 1.0 {
        let message = "ignored: sdxl_train.py weighs regularisation images as the others";
        import.note("prior_loss_weight", message);
        reg_weight = 1.0;
    }
    train.insert("reg_weight".into(), number(reg_weight));
    loss_type(import, train)
}

fn diffusion(import: &mut Import<'_>, train: &mut Section) {
    let settings = import.settings;
    train.insert("noise_scheduler".into(), json!("ddpm"));
    for option in ["noise_offset", "min_snr_gamma"] {
        if let Some(value) = settings.number(option).filter(|value| *value != 0.0) {
            train.insert(option.into(), number(value));
        }
    }
    let offset = settings.number("noise_offset").unwrap_or(0.0);
    let adaptive = settings.number("adaptive_noise_scale").unwrap_or(0.0);
    if adaptive != 0.0 && offset == 0.0 {
        import.error(
            "adaptive_noise_scale",
            "needs noise_offset, in sd-scripts too: set it, or remove this option",
        );
    } else if adaptive != 0.0 {
        train.insert("adaptive_noise_scale".into(), number(adaptive));
    }
    if offset != 0.0 && settings.flag("noise_offset_random_strength") {
        train.insert("noise_offset_random_strength".into(), json!(true));
    }
    let iterations = import.whole_from("multires_noise_iterations", 0, 0);
    if iterations > 0 {
        let discount = settings.number("multires_noise_discount").unwrap_or(0.3);
        train.insert("multires_noise_iterations".into(), json!(iterations));
        train.insert("multires_noise_discount".into(), number(discount));
    }
    if settings.flag("debiased_estimation_loss") {
        train.insert("debiased_estimation_loss".into(), json!(true));
    }
    let min = import.whole_from("min_timestep", 0, 0);
    let end = import.whole_from("max_timestep", 0, 1000);
    let end = if end == 0 { 1000 } else { end };
    if min >= end || end > 1000 {
        import.error(
            "max_timestep",
            format!("expected min_timestep < max_timestep <= 1000, found {min} and {end}"),
        );
    } else if (min, end) != (0, 1000) {
        // sd-scripts draws from min_timestep to max_timestep - 1; aitk's index counts from the most noise.
        train.insert("min_denoising_steps".into(), json!(1000 - end));
        train.insert("max_denoising_steps".into(), json!(999 - min));
    }
}

fn flux(import: &mut Import<'_>, train: &mut Section) {
    let settings = import.settings;
    train.insert("noise_scheduler".into(), json!("flowmatch"));
    if settings.text("model_prediction_type") != Some("raw") {
        let message = "only raw is supported: set model_prediction_type = \"raw\", as the documentation of sd-scripts recommends; without \
                       it, sd-scripts trains another loss (sigma_scaled)";
        import.error("model_prediction_type", message);
    }
    let sampling = settings.text("timestep_sampling").unwrap_or("sigma");
    let scheme = settings.text("weighting_scheme").unwrap_or("uniform");
    if sampling == "sigma" && matches!(scheme, "logit_normal" | "mode") {
        let advice = "aitk draws no such timesteps: set timestep_sampling to sigmoid, shift, flux_shift or uniform";
        import.error("weighting_scheme", advice);
    }
    let has_levels = matches!(sampling, "uniform" | "sigma");
    train.insert(
        "timestep_type".into(),
        json!(if has_levels { "linear" } else { "sigmoid" }),
    );
    if !has_levels {
        positive_factor(import, train, "sigmoid_scale", 1.0, "timestep_sigmoid_scale");
    }
    match sampling {
        "shift" | "sigma" => positive_factor(import, train, "discrete_flow_shift", 3.0, "timestep_shift"),
        "flux_shift" => drop(train.insert("timestep_shift_by_size".into(), json!(true))),
        _ => {}
    }
    train.insert(
        "cfg_scale".into(),
        number(settings.number("guidance_scale").unwrap_or(3.5)),
    );
    if let Some(tokens) = settings
        .whole("t5xxl_max_token_length")
        .filter(|tokens| !matches!(tokens, 0 | 256 | 512))
    {
        import.error(
            "t5xxl_max_token_length",
            format!("aitk reads 512 tokens (dev) or 256 (schnell), not {tokens}: remove it"),
        );
    }
}

/// Sets a key of `train` to an option that must be above 0, unless it is 1.
fn positive_factor(import: &mut Import<'_>, train: &mut Section, option: &str, default: f64, key: &str) {
    let factor = import.settings.number(option).unwrap_or(default);
    if factor <= 0.0 {
        import.error(option, format!("expected a number above 0, found {factor:?}"));
    } else if factor != 1.0 {
        train.insert(key.into(), number(factor));
    }
}

fn sd3(import: &mut Import<'_>, train: &mut Section) {
    let settings = import.settings;
    train.insert("noise_scheduler".into(), json!("flowmatch"));
    positive_factor(import, train, "training_shift", 1.0, "timestep_shift");
    let (timesteps, compares_images) = match settings.text("weighting_scheme").unwrap_or("uniform") {
        "uniform" | "none" => ("linear", true),
        "logit_normal" => {
            positive_factor(import, train, "logit_std", 1.0, "timestep_sigmoid_scale");
            ("sigmoid", true)
        }
        // Weighted by 1 / sigma^2, the loss of the image is that of the velocity.
        "sigma_sqrt" => ("linear", false),
        other => {
            import.error(
                "weighting_scheme",
                format!("aitk has no {other}: use uniform, logit_normal or sigma_sqrt"),
            );
            return;
        }
    };
    train.insert("timestep_type".into(), json!(timesteps));
    train.insert("t0_loss_target".into(), json!(compares_images));
    for (option, usual) in [("min_timestep", 0), ("max_timestep", 1000)] {
        if settings.whole(option).is_some_and(|value| value != usual && value != 0) {
            import.error(
                option,
                "aitk draws the timesteps of SD3 from the whole range: remove it",
            );
        }
    }
    if let Some(tokens) = settings
        .whole("t5xxl_max_token_length")
        .filter(|tokens| !matches!(tokens, 0 | 256))
    {
        import.error(
            "t5xxl_max_token_length",
            format!("aitk reads 256 tokens, not {tokens}: remove it"),
        );
    }
}

/// `huber_c` of the loss that aitk has.
const HUBER_C: f64 = 0.01;

fn loss_type(import: &mut Import<'_>, train: &mut Section) -> LossFactor {
    let settings = import.settings;
    let name = settings.text("loss_type").unwrap_or("l2");
    let is_huber = matches!(name, "huber" | "smooth_l1");
    let constant = settings.text("huber_schedule") == Some("constant");
    let c = settings.number("huber_c").unwrap_or(0.1) * settings.number("huber_scale").unwrap_or(1.0);
    if is_huber && (!constant || (c - HUBER_C).abs() > 1e-9) {
        let message = format!(
            "aitk's Huber loss has a constant huber_c of {HUBER_C}: set huber_schedule = \"constant\" and huber_c = {HUBER_C}, or use l2"
        );
        import.error("loss_type", message);
    }
    let (ours, factor) = match name {
        "l1" => ("mae", 1.0),
        // sd-scripts multiplies sqrt(d^2 + c^2) - c by 2 c, or by 2.
        "huber" => ("pseudo_huber", 2.0 * HUBER_C),
        "smooth_l1" => ("pseudo_huber", 2.0),
        _ => ("mse", 1.0),
    };
    train.insert("loss_type".into(), json!(ours));
    factor
}
