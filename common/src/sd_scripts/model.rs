//! The `model` section.

use super::report::{Import, Section, number};
use super::script::{Script, ScriptFamily};
use serde_json::json;
use std::path::Path;

/// Half of FLUX.1's single blocks and its double blocks: the units of `blocks_to_swap`.
const SWAPPED_UNITS: f64 = 38.0;
/// What `split_mode` of older versions meant.
const SPLIT_MODE_BLOCKS: u64 = 18;

/// The `model` section.
pub(super) fn model(import: &mut Import<'_>) -> Section {
    let settings = import.settings;
    let mut model = Section::new();
    let path = settings.text("pretrained_model_name_or_path");
    if path.is_none() {
        import.error("pretrained_model_name_or_path", "the config names no model: set it");
    }
    let path = path.unwrap_or("");
    model.insert("name_or_path".into(), json!(path));
    let arch = match import.script.family() {
        ScriptFamily::Sd if settings.flag("v2") => "sd2",
        ScriptFamily::Sd => "sd1",
        ScriptFamily::Sdxl => "sdxl",
        ScriptFamily::Flux => "flux",
        ScriptFamily::Sd3 => "sd3",
    };
    model.insert("arch".into(), json!(arch));
    prompts(import, &mut model);
    if settings.flag("v_parameterization") && !import.script.is_flow() {
        model.insert("is_v_pred".into(), json!(true));
    } else if arch == "sd2" && is_file(path) {
        let message = "a single file of Stable Diffusion 2.x says nothing about its objective, and aitk takes it for a velocity model: set \
                       v_parameterization = true, or give a diffusers folder";
        import.error("v2", message);
    } else if arch == "sd2" {
        import.note(
            "v2",
            "the prediction type is that of the model's own files; sd-scripts uses epsilon unless v_parameterization is set",
        );
    }
    match import.script.family() {
        ScriptFamily::Sd | ScriptFamily::Sdxl => {
            if let Some(vae) = settings.text("vae") {
                model.insert("vae_path".into(), json!(vae));
            }
        }
        ScriptFamily::Flux => flux_parts(import, &mut model),
        ScriptFamily::Sd3 => sd3_parts(import, &mut model),
    }
    base_weights(import, &mut model);
    float8(import, &mut model);
    swap(import, &mut model);
    model
}

/// `fp8_base` and `fp8_base_unet`: 8-bit weights of the model that an adapter is trained for. Other scripts of sd-scripts ignore them.
fn float8(import: &mut Import<'_>, model: &mut Section) {
    if !import.script.trains_adapter() {
        return;
    }
    let settings = import.settings;
    let (whole, unet) = (settings.flag("fp8_base"), settings.flag("fp8_base_unet"));
    if !whole && !unet {
        return;
    }
    let option = if whole { "fp8_base" } else { "fp8_base_unet" };
    if settings.text("mixed_precision").unwrap_or("no") == "no" {
        let message = "contradicts mixed_precision no, in sd-scripts too: set mixed_precision = \"bf16\", or remove it";
        import.error(option, message);
    }
    model.insert("quantize".into(), json!(true));
    model.insert("qtype".into(), json!("float8"));
    model.insert("quantize_te".into(), json!(whole && !unet));
    if whole && !unet {
        model.insert("qtype_te".into(), json!("float8"));
    }
    import.note(
        option,
        "aitk's float8 has a scale for each tensor, sd-scripts' has none: results differ a little",
    );
}

/// How prompts are read.
fn prompts(import: &mut Import<'_>, model: &mut Section) {
    let family = import.script.family();
    // sd-scripts ignores it for SDXL.
    if family == ScriptFamily::Sd {
        let skip = import.whole_from("clip_skip", 1, 1);
        if skip > 12 {
            import.error("clip_skip", format!("expected a number from 1 to 12, found {skip}"));
        } else if skip > 1 {
            model.insert("clip_skip".into(), json!(skip));
        }
    }
    if matches!(family, ScriptFamily::Sd | ScriptFamily::Sdxl) {
        match import.whole_from("max_token_length", 75, 75) {
            75 => {}
            tokens @ (150 | 225) => drop(model.insert("max_token_length".into(), json!(tokens))),
            other => import.error("max_token_length", format!("expected 75, 150 or 225, found {other}")),
        }
    }
    if import.script.is_flow() {
        masks(import, model);
    }
}

/// `apply_t5_attn_mask` and `apply_lg_attn_mask`. The scripts of SD3 mask the padding only in outputs of text encoders that they cache: in a
/// step they call `encode_tokens` of `strategy_sd3.py` without the masks.
fn masks(import: &mut Import<'_>, model: &mut Section) {
    let settings = import.settings;
    let is_sd3 = import.script.family() == ScriptFamily::Sd3;
    let caches = ["cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk"]
        .into_iter()
        .any(|option| settings.flag(option));
    let (caches_t5, caches_clip) = match import.script {
        Script::Sd3TrainNetwork => (caches, caches && settings.flag("network_train_unet_only")),
        Script::Sd3Train if settings.flag("use_t5xxl_cache_only") => (true, false),
        _ => (caches, caches),
    };
    for (option, of_script, masks) in [
        ("apply_t5_attn_mask", true, !is_sd3 || caches_t5),
        ("apply_lg_attn_mask", is_sd3, caches_clip),
    ] {
        if !of_script || !settings.flag(option) {
            continue;
        }
        if masks {
            model.insert(option.into(), json!(true));
        } else {
            let message = "ignored, as by sd-scripts, which masks the padding of SD3 only in outputs of text encoders that are cached \
                           (cache_text_encoder_outputs)";
            import.note(option, message);
        }
    }
}

fn is_file(path: &str) -> bool {
    let extension = Path::new(path).extension().and_then(|extension| extension.to_str());
    extension.is_some_and(|extension| ["safetensors", "ckpt", "pt", "sft"].contains(&extension.to_lowercase().as_str()))
}

/// The folder of a file, as a path of the config.
fn folder_of(path: &str) -> String {
    match Path::new(path).parent().and_then(Path::to_str) {
        Some("") | None => ".".to_owned(),
        Some(folder) => folder.to_owned(),
    }
}

fn flux_parts(import: &mut Import<'_>, model: &mut Section) {
    let settings = import.settings;
    if let Some(t5) = settings.text("t5xxl") {
        model.insert("te_name_or_path".into(), json!(t5));
    }
    if let Some(clip) = settings.text("clip_l") {
        model.insert("extras_name_or_path".into(), json!(folder_of(clip)));
        let message = "aitk takes CLIP-L, and the tokenizer of T5 (tokenizer_2, or tokenizer.json or spiece.model), from the folder of this \
                       file; sd-scripts downloads the tokenizer";
        import.note("clip_l", message);
    }
    if let Some(vae) = settings.text("ae") {
        model.insert("vae_path".into(), json!(vae));
    }
}

fn sd3_parts(import: &mut Import<'_>, model: &mut Section) {
    let settings = import.settings;
    if let Some(vae) = settings.text("vae") {
        model.insert("vae_path".into(), json!(vae));
    }
    let mut folders: Vec<(&str, String)> = Vec::new();
    for option in ["clip_l", "clip_g", "t5xxl"] {
        let Some(path) = settings.text(option) else { continue };
        let folder = folder_of(path);
        if folders.iter().all(|(_, known)| *known != folder) {
            folders.push((option, folder));
        }
    }
    if let Some((option, _)) = folders.get(2) {
        import.error(
            option,
            "aitk takes the text encoders from at most two folders: put these files into one",
        );
    }
    for (key, folder) in ["te_name_or_path", "extras_name_or_path"].into_iter().zip(&folders) {
        model.insert(key.into(), json!(folder.1));
    }
    if settings.text("t5xxl").is_some() {
        let message = "aitk takes all text encoders of these folders, and the tokenizer of T5 (tokenizer_3, or tokenizer.json or \
                       spiece.model) too; sd-scripts downloads the tokenizer";
        import.note("t5xxl", message);
    }
}

/// LoRAs that are merged into the base model.
fn base_weights(import: &mut Import<'_>, model: &mut Section) {
    let settings = import.settings;
    if !import.script.trains_adapter() {
        return;
    }
    let weights = settings.texts("base_weights");
    let multipliers = settings.numbers("base_weights_multiplier");
    match *weights.as_slice() {
        [] => {}
        [path] if multipliers.iter().all(|multiplier| *multiplier == 1.0) => {
            model.insert("lora_path".into(), json!(path));
        }
        [_] => import.error(
            "base_weights_multiplier",
            "aitk applies a LoRA at full strength: rescale the file with `type: rescale_lora` first",
        ),
        _ => import.error(
            "base_weights",
            "aitk applies one LoRA to the base model: merge the others into one file first",
        ),
    }
}

fn swap(import: &mut Import<'_>, model: &mut Section) {
    if !import.script.is_flow() {
        return;
    }
    let settings = import.settings;
    let mut blocks = import.whole_from("blocks_to_swap", 0, 0);
    if blocks == 0 && settings.flag("split_mode") && import.script.family() == ScriptFamily::Flux {
        blocks = SPLIT_MODE_BLOCKS;
    }
    if blocks == 0 {
        return;
    }
    if settings.flag("cpu_offload_checkpointing") {
        import.error(
            "cpu_offload_checkpointing",
            "contradicts blocks_to_swap: remove one of them",
        );
    }
    let share = (blocks as f64 / SWAPPED_UNITS).min(1.0);
    model.insert("layer_offloading".into(), json!(true));
    model.insert(
        "layer_offloading_transformer_percent".into(),
        number((share * 1000.0).round() / 1000.0),
    );
    model.insert("layer_offloading_text_encoder_percent".into(), json!(0));
}
