//! JSON presets of the kohya GUI's tabs for LoRAs, DreamBooth and fine-tuning. The GUI turns their fields into options of sd-scripts; so
//! does this module.

use super::document::{Table, Value, finding};
use super::folders::Folder;
use super::gui_fields::{Fields, NETWORK, Options};
use super::gui_tab::{Tab, fine_tuning_data, fine_tuning_steps};
use super::option::{Kind, nearest};
use super::options;
use super::script::{Script, ScriptFamily};
use super::settings::shortened;
use crate::job::Finding;
use std::path::Path;

/// Options of sd-scripts that a preset becomes.
pub(super) struct Preset {
    pub options: Table,
    pub script: Option<Script>,
    /// The text of its prompts.
    pub prompts: Option<String>,
    /// Its data set config, if it says nothing else about images.
    pub datasets: Option<Table>,
    pub notes: Vec<Finding>,
}

/// Fields that the GUI uses for itself, or to start the training.
const GUI_ONLY: &[&str] = &[
    "additional_parameters",
    "dynamo_mode",
    "dynamo_use_dynamic",
    "dynamo_use_fullgraph",
    "extra_accelerate_launch_args",
    "gpu_ids",
    "lowvram",
    "main_process_port",
    "model_list",
    "multi_gpu",
    "num_cpu_threads_per_process",
    "num_machines",
    "num_processes",
    "save_as_bool",
    "use_wandb",
    "wandb_run_name",
    "stop_text_encoder_training",
    "stop_text_encoder_training_pct",
    "noise_offset_type",
    "epoch",
    "headless",
    "print_only",
    "caption_metadata_filename",
    "latent_metadata_filename",
    "create_caption",
    "create_buckets",
    "use_latent_files",
    "full_path",
    "gradient_accumulation_steps_",
    "batch_size",
    "generate_caption_database",
    "generate_image_buckets",
    "image_folder",
    "train_dir",
];

/// Fields with another name, or another form, than the option.
const RENAMED: &[&str] = &[
    "sdxl",
    "sdxl_checkbox",
    "flux1_checkbox",
    "sd3_checkbox",
    "max_resolution",
    "optimizer",
    "lr_warmup",
    "t5xxl_lr",
    "sdxl_cache_text_encoder_outputs",
    "sdxl_no_half_vae",
    "flux1_cache_text_encoder_outputs",
    "flux1_cache_text_encoder_outputs_to_disk",
    "flux1_clip_l",
    "flux1_t5xxl",
    "flux_fused_backward_pass",
    "sd3_fused_backward_pass",
    "lora_network_weights",
];

/// Prefixes of fields of other families.
const OTHER_FAMILIES: &[&str] = &["hunyuan_", "anima_", "lumina_", "sd3_"];

/// Whether a JSON text is a preset of the kohya GUI, by its keys.
#[must_use]
pub fn is_preset(text: &str) -> bool {
    let Ok(serde_json::Value::Object(map)) = serde_json::from_str::<serde_json::Value>(text) else {
        return false;
    };
    let is_job = map.contains_key("job") || map.contains_key("config");
    !is_job && (map.contains_key("LoRA_type") || map.contains_key("pretrained_model_name_or_path"))
}

/// Turns the fields of a preset into options.
pub(super) fn options_of(table: Table, file: &str, directory: &Path, errors: &mut Vec<Finding>) -> Preset {
    let fields = Fields(table);
    let mut preset = Preset {
        options: Table::new(),
        script: None,
        prompts: fields.text("sample_prompts"),
        datasets: None,
        notes: Vec::new(),
    };
    let Some(tab) = Tab::of(&fields) else {
        let message = "only presets of the tabs for LoRAs (with LoRA_type), DreamBooth and fine-tuning are imported; the GUI writes a TOML file \
                       into the output folder when a training starts: import that";
        errors.push(finding(file, fields.position("LoRA_type"), "LoRA_type", message));
        return preset;
    };
    fields.check_types(file, errors);
    for family in ["hunyuan_image", "anima", "lumina"] {
        let key = format!("{family}_checkbox");
        if fields.is_on(&key) {
            errors.push(finding(
                file,
                fields.position(&key),
                &key,
                "aitk has no models of this family yet",
            ));
            return preset;
        }
    }
    let (sdxl, flux, sd3) = (
        fields.is_on("sdxl") || fields.is_on("sdxl_checkbox"),
        fields.is_on("flux1_checkbox"),
        fields.is_on("sd3_checkbox"),
    );
    let family = match (sdxl, flux, sd3) {
        (true, _, _) => ScriptFamily::Sdxl,
        (_, true, _) => ScriptFamily::Flux,
        (_, _, true) => ScriptFamily::Sd3,
        _ => ScriptFamily::Sd,
    };
    let script = tab.script(family);
    preset.script = Some(script);
    let mut out = Options {
        table: Table::new(),
        fields: &fields,
        file,
        errors,
    };
    copied(&fields, tab, script, &mut out);
    renamed(&fields, tab, script, &mut out);
    match tab {
        Tab::Lora => {
            network(&fields, script, &mut out);
            rates(&fields, script, &mut out);
            steps(&fields, directory, &mut out);
        }
        Tab::DreamBooth => {
            steps(&fields, directory, &mut out);
            let share = fields.number("stop_text_encoder_training_pct") + fields.number("stop_text_encoder_training");
            if share != 0.0 && script == Script::TrainDb {
                out.set("stop_text_encoder_training", Value::Whole(share as i64));
            }
        }
        Tab::FineTune => {
            preset.datasets = fine_tuning_data(&fields, &mut out);
            fine_tuning_steps(&fields, directory, &mut out);
        }
    }
    additional(&fields, &mut out);
    preset.options = out.table;
    preset
}

/// Converts a field to what the option takes: numbers may be texts.
fn coerced(kind: Kind, value: &Value) -> Value {
    let Value::Text(text) = value else {
        return match (kind, value) {
            (Kind::Whole, Value::Number(number)) if number.fract() == 0.0 => Value::Whole(*number as i64),
            (Kind::Flag, Value::Whole(number)) => Value::Bool(*number != 0),
            (Kind::Text, Value::Whole(number)) => Value::Text(number.to_string()),
            _ => value.clone(),
        };
    };
    let text = text.trim();
    match kind {
        Kind::Whole => text.parse().map_or_else(|_| value.clone(), Value::Whole),
        Kind::Number | Kind::Numbers => match text.parse::<f64>() {
            Ok(number) if number.is_finite() => match text.parse::<i64>() {
                Ok(whole) => Value::Whole(whole),
                Err(_) => Value::Number(number),
            },
            _ => value.clone(),
        },
        Kind::Flag => match text.to_lowercase().as_str() {
            "true" => Value::Bool(true),
            "false" => Value::Bool(false),
            _ => value.clone(),
        },
        Kind::Texts => split_words(text),
        _ => value.clone(),
    }
}

/// Splits a text at white space, without its quotes, as the GUI does.
fn split_words(text: &str) -> Value {
    let words = text.replace('"', "");
    Value::List(
        words
            .split_whitespace()
            .map(|word| Value::Text(word.to_owned()))
            .collect(),
    )
}

/// Whether the GUI leaves out a field with the name of an option, because the tab has it for another family.
fn is_left_out(name: &str, tab: Tab, family: ScriptFamily) -> bool {
    let (is_flux, is_sd3) = (family == ScriptFamily::Flux, family == ScriptFamily::Sd3);
    match name {
        "weighting_scheme" | "mode_scale" => !is_sd3,
        "t5xxl_max_token_length" | "apply_t5_attn_mask" | "fp8_base_unet" | "cpu_offload_checkpointing" => !is_flux,
        // The tab for LoRAs has other fields for SD3, the others have them for FLUX.1.
        "clip_l" | "t5xxl" if tab == Tab::Lora => !is_flux,
        "clip_l" | "t5xxl" => !is_sd3,
        "fused_backward_pass" => tab == Tab::Lora || is_flux || is_sd3,
        _ => false,
    }
}

/// Fields with the name of an option. Those that the family does not use, the GUI leaves out.
fn copied(fields: &Fields, tab: Tab, script: Script, out: &mut Options<'_>) {
    for entry in &fields.0 {
        let name = entry.key.as_str();
        let handled = |names: &[&str]| names.contains(&name);
        if handled(GUI_ONLY)
            || handled(NETWORK)
            || handled(RENAMED)
            || handled(&[
                "text_encoder_lr",
                "unet_lr",
                "xformers",
                "sample_prompts",
                "max_train_steps",
                "lr_warmup_steps",
            ])
            || OTHER_FAMILIES.iter().any(|prefix| name.starts_with(prefix))
        {
            continue;
        }
        let Some(row) = options::find(name) else {
            if !entry.value.is_off() {
                let known = options::rows()
                    .map(|row| row.name)
                    .chain(NETWORK.iter().chain(RENAMED).chain(GUI_ONLY).copied());
                let hint = nearest(name, known)
                    .map(|near| format!("; did you mean `{near}`?"))
                    .unwrap_or_default();
                out.error(name, format!("the kohya GUI has no such field{hint}"));
            }
            continue;
        };
        let noise = fields
            .text("noise_offset_type")
            .unwrap_or_else(|| "Original".to_owned());
        let of_other_noise = match name {
            "noise_offset" | "noise_offset_random_strength" | "adaptive_noise_scale" => noise != "Original",
            "multires_noise_iterations" | "multires_noise_discount" => noise != "Multires",
            _ => false,
        };
        let is_of_other_family = !row.used_by.includes(script.bits()) || is_left_out(name, tab, script.family());
        if entry.value.is_off() || of_other_noise || is_of_other_family {
            continue;
        }
        // The GUI passes an adaptive scale only beside an offset.
        if name == "adaptive_noise_scale" && fields.get("noise_offset").is_none() {
            continue;
        }
        out.set(name, coerced(row.kind, &entry.value));
    }
}

fn renamed(fields: &Fields, tab: Tab, script: Script, out: &mut Options<'_>) {
    let (is_flux, is_sd3) = (
        script.family() == ScriptFamily::Flux,
        script.family() == ScriptFamily::Sd3,
    );
    let is_lora = tab == Tab::Lora;
    for (field, option, on) in [
        ("max_resolution", "resolution", true),
        ("optimizer", "optimizer_type", true),
        ("lora_network_weights", "network_weights", true),
        ("flux1_clip_l", "clip_l", is_flux && !is_lora),
        ("flux1_t5xxl", "t5xxl", is_flux && !is_lora),
        ("flux_fused_backward_pass", "fused_backward_pass", is_flux && !is_lora),
        ("sd3_clip_l", "clip_l", is_sd3 && is_lora),
        ("sd3_t5xxl", "t5xxl", is_sd3 && is_lora),
        ("sd3_clip_l_dropout_rate", "clip_l_dropout_rate", is_sd3),
        ("sd3_t5_dropout_rate", "t5_dropout_rate", is_sd3),
        ("sd3_enable_scaled_pos_embed", "enable_scaled_pos_embed", is_sd3),
        ("sd3_cache_text_encoder_outputs", "cache_text_encoder_outputs", is_sd3),
        (
            "sd3_cache_text_encoder_outputs_to_disk",
            "cache_text_encoder_outputs_to_disk",
            is_sd3,
        ),
        ("sd3_fused_backward_pass", "fused_backward_pass", is_sd3),
        (
            "sdxl_cache_text_encoder_outputs",
            "cache_text_encoder_outputs",
            script.family() == ScriptFamily::Sdxl,
        ),
        (
            "flux1_cache_text_encoder_outputs",
            "cache_text_encoder_outputs",
            is_flux,
        ),
        (
            "flux1_cache_text_encoder_outputs_to_disk",
            "cache_text_encoder_outputs_to_disk",
            is_flux,
        ),
    ] {
        if let (Some(value), true) = (fields.get(field), on) {
            let kind = options::find(option).map_or(Kind::Text, |row| row.kind);
            out.set_by(field, option, coerced(kind, value));
        }
    }
    warmup(fields, tab, out);
    // The GUI passes an empty field on as the epochs, a 0 not at all, and nothing from the tab for fine-tuning.
    let is_empty = fields.given_text("lr_scheduler_num_cycles").is_none();
    if is_empty && tab != Tab::FineTune && fields.number("epoch") > 0.0 {
        let epochs = Value::Whole(fields.number("epoch") as i64);
        out.set_by("epoch", "lr_scheduler_num_cycles", epochs);
    }
    // The tab for DreamBooth has no switch for the text encoders of SDXL: their rates decide.
    let rates = ["learning_rate_te1", "learning_rate_te2"];
    let has_rate = rates.iter().any(|field| fields.number(field) > 0.0);
    if tab == Tab::DreamBooth && script.family() == ScriptFamily::Sdxl {
        out.set_by("learning_rate_te1", "train_text_encoder", Value::Bool(has_rate));
    }
}

/// `lr_warmup_steps`: an absolute number of steps, else a percentage.
fn warmup(fields: &Fields, tab: Tab, out: &mut Options<'_>) {
    let (steps, percent) = (fields.number("lr_warmup_steps"), fields.number("lr_warmup"));
    let all = fields.number("max_train_steps").trunc();
    // With a dataset_config, the tab for LoRAs computes the steps itself, and forgets them without max_train_steps.
    let is_computed = tab == Tab::Lora && fields.get("dataset_config").is_some();
    if steps > 0.0 && !(is_computed && all <= 0.0) {
        out.set("lr_warmup_steps", Value::Whole(steps as i64));
    } else if percent != 0.0 && is_computed && all > 0.0 {
        let steps = (percent * all / 100.0).round_ties_even();
        out.set_by("lr_warmup", "lr_warmup_steps", Value::Whole(steps as i64));
    } else if percent != 0.0 {
        out.set_by("lr_warmup", "lr_warmup_steps", Value::Number(percent / 100.0));
    }
}

/// `network_module` and `network_args` of a type of LoRA.
fn network(fields: &Fields, script: Script, out: &mut Options<'_>) {
    let kind = fields.text("LoRA_type").unwrap_or_default();
    let mut arguments: Vec<String> = Vec::new();
    let mut pass = |names: &[&str]| {
        for name in names {
            let text = match *name {
                // The GUI passes them as they are.
                "conv_dim" | "conv_alpha" | "decompose_both" => fields.given_text(name),
                name => fields.text(name),
            };
            if let Some(text) = text {
                arguments.push(format!("{name}={text}"));
            }
        }
    };
    const BLOCKS: &[&str] = &[
        "down_lr_weight",
        "mid_lr_weight",
        "up_lr_weight",
        "block_lr_zero_threshold",
        "block_dims",
        "block_alphas",
        "conv_block_dims",
        "conv_block_alphas",
        "rank_dropout",
        "module_dropout",
    ];
    const LYCORIS: &[&str] = &[
        "conv_dim",
        "conv_alpha",
        "use_tucker",
        "rank_dropout",
        "bypass_mode",
        "dora_wd",
        "module_dropout",
        "use_scalar",
        "rank_dropout_scale",
        "train_norm",
    ];
    let mut algo = None;
    let module = match kind.as_str() {
        "Standard" | "Kohya LoCon" => {
            pass(BLOCKS);
            if kind == "Kohya LoCon" {
                pass(&["conv_dim", "conv_alpha"]);
            }
            if script.family() == ScriptFamily::Sd3 {
                "networks.lora_sd3"
            } else {
                "networks.lora"
            }
        }
        "Flux1" => {
            pass(&[
                "img_attn_dim",
                "img_mlp_dim",
                "img_mod_dim",
                "single_dim",
                "txt_attn_dim",
                "txt_mlp_dim",
                "txt_mod_dim",
                "single_mod_dim",
                "in_dims",
                "train_double_block_indices",
                "train_single_block_indices",
                "split_qkv",
                "train_t5xxl",
                "rank_dropout",
                "module_dropout",
            ]);
            if fields.is_on("train_lora_ggpo") {
                pass(&["ggpo_beta", "ggpo_sigma"]);
            }
            // Only split_mode passes the field train_blocks on.
            if fields.is_on("split_mode") {
                arguments.push("train_blocks=single".to_owned());
            }
            "networks.lora_flux"
        }
        "LoCon" | "LyCORIS/LoCon" => {
            pass(LYCORIS);
            algo = Some("locon");
            "lycoris.kohya"
        }
        "LyCORIS/LoHa" => {
            pass(LYCORIS);
            algo = Some("loha");
            "lycoris.kohya"
        }
        "LyCORIS/LoKr" => {
            pass(LYCORIS);
            pass(&["factor", "use_cp", "decompose_both"]);
            algo = Some("lokr");
            "lycoris.kohya"
        }
        other => {
            let message = format!(
                "`{}` is not a type that aitk trains: it has Standard, Kohya LoCon, Flux1, LyCORIS/LoCon, LyCORIS/LoHa and LyCORIS/LoKr",
                shortened(other)
            );
            out.error("LoRA_type", message);
            return;
        }
    };
    for name in [
        "loraplus_lr_ratio",
        "loraplus_unet_lr_ratio",
        "loraplus_text_encoder_lr_ratio",
    ] {
        if let Some(text) = fields.text(name) {
            arguments.push(format!("{name}={text}"));
        }
    }
    if let Some(algo) = algo {
        let preset = fields.text("LyCORIS_preset").unwrap_or_else(|| "full".to_owned());
        arguments.extend([format!("algo={algo}"), format!("preset={preset}")]);
    }
    out.set_by("LoRA_type", "network_module", Value::Text(module.to_owned()));
    if !arguments.is_empty() {
        out.set_by(
            "LoRA_type",
            "network_args",
            Value::List(arguments.into_iter().map(Value::Text).collect()),
        );
    }
}

/// A rate of 0 leaves a part out, if another one is set.
fn rates(fields: &Fields, script: Script, out: &mut Options<'_>) {
    let (text, unet, t5) = (
        fields.number("text_encoder_lr"),
        fields.number("unet_lr"),
        fields.number("t5xxl_lr"),
    );
    if unet != 0.0 {
        out.set("unet_lr", Value::Number(unet));
    }
    if text > 0.0 {
        let second = if t5 > 0.0 && script.is_flow() { t5 } else { text };
        out.set(
            "text_encoder_lr",
            Value::List(vec![Value::Number(text), Value::Number(second)]),
        );
    }
    match (text != 0.0, unet != 0.0) {
        (false, true) => out.set("network_train_unet_only", Value::Bool(true)),
        (true, false) => out.set("network_train_text_encoder_only", Value::Bool(true)),
        _ => {}
    }
}

/// `max_train_steps`, which the GUI computes from the folders if it is not set.
fn steps(fields: &Fields, directory: &Path, out: &mut Options<'_>) {
    let steps = fields.number("max_train_steps");
    if steps > 0.0 {
        out.set("max_train_steps", Value::Whole(steps as i64));
        return;
    }
    if fields.get("dataset_config").is_some() || fields.number("max_train_epochs") > 0.0 {
        return;
    }
    let Some(path) = fields.text("train_data_dir") else {
        return;
    };
    let Some(folder) = Folder::read(&directory.join(&path)) else {
        out.error(
            "train_data_dir",
            format!(
                "`{}` cannot be read as a folder here, and the steps are computed from its images",
                path.escape_debug()
            ),
        );
        return;
    };
    let mut total = 0_u64;
    for inner in &folder.folders {
        let name = inner.file_name().and_then(|name| name.to_str()).unwrap_or("");
        let repeats: Option<u64> = name.split('_').next().and_then(|number| number.parse().ok());
        let images = Folder::read(inner).map_or(0, |found| {
            let is_bitmap = |path: &&std::path::PathBuf| {
                path.extension()
                    .is_some_and(|ending| ending.eq_ignore_ascii_case("bmp"))
            };
            found.images.len() - found.images.iter().filter(is_bitmap).count()
        });
        total = total.saturating_add(repeats.unwrap_or(0).saturating_mul(images as u64));
    }
    let whole = |name: &str| fields.number(name).max(1.0).floor();
    let factor = if fields.get("reg_data_dir").is_some() { 2.0 } else { 1.0 };
    let steps =
        total as f64 / whole("train_batch_size") / whole("gradient_accumulation_steps") * whole("epoch") * factor;
    match steps.ceil() as i64 {
        0 => out.error("train_data_dir", "there are no images in folders such as 10_name"),
        steps => out.set("max_train_steps", Value::Whole(steps)),
    }
}

/// `additional_parameters`: a command line, whose options win.
fn additional(fields: &Fields, out: &mut Options<'_>) {
    let Some(text) = fields.text("additional_parameters") else {
        return;
    };
    let text = text.replace('"', "");
    let mut given: Vec<(String, Vec<String>)> = Vec::new();
    for word in text.split_whitespace() {
        match (word.strip_prefix("--"), given.last_mut()) {
            (Some(option), _) => {
                let (name, value) = option
                    .split_once('=')
                    .map_or((option, None), |(name, value)| (name, Some(value)));
                given.push((name.to_owned(), value.map(str::to_owned).into_iter().collect()));
            }
            (None, Some((_, values))) => values.push(word.to_owned()),
            (None, None) => out.error(
                "additional_parameters",
                format!("expected options such as --name value, found `{}`", shortened(word)),
            ),
        }
    }
    for (name, values) in given {
        let value = match options::find(&name).map(|row| row.kind) {
            Some(Kind::Flag) if values.is_empty() => Value::Bool(true),
            Some(Kind::Texts) => Value::List(values.into_iter().map(Value::Text).collect()),
            Some(Kind::Numbers) => Value::List(
                values
                    .into_iter()
                    .map(|value| coerced(Kind::Number, &Value::Text(value)))
                    .collect(),
            ),
            Some(kind) => coerced(kind, &Value::Text(values.join(" "))),
            None => Value::Text(values.join(" ")),
        };
        out.set_by("additional_parameters", &name, value);
    }
}
