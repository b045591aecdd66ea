//! The fields of a preset of the kohya GUI, and the options that they become.

use super::document::{Entry, Position, Table, Value, finding};
use super::settings::shortened;
use crate::job::Finding;

/// Fields that decide the network: `network_module` and `network_args`.
pub(super) const NETWORK: &[&str] = &[
    "LoRA_type",
    "LyCORIS_preset",
    "block_alphas",
    "block_dims",
    "block_lr_zero_threshold",
    "bypass_mode",
    "constrain",
    "conv_alpha",
    "conv_alphas",
    "conv_block_alphas",
    "conv_block_dims",
    "conv_dim",
    "conv_dims",
    "decompose_both",
    "dora_wd",
    "down_lr_weight",
    "enable_all_linear",
    "factor",
    "ggpo_beta",
    "ggpo_sigma",
    "img_attn_dim",
    "img_mlp_dim",
    "img_mod_dim",
    "in_dims",
    "loraplus_lr_ratio",
    "loraplus_text_encoder_lr_ratio",
    "loraplus_unet_lr_ratio",
    "mid_lr_weight",
    "module_dropout",
    "rank_dropout",
    "rank_dropout_scale",
    "rescaled",
    "single_dim",
    "single_mod_dim",
    "split_qkv",
    "train_blocks",
    "train_double_block_indices",
    "train_lora_ggpo",
    "train_norm",
    "train_on_input",
    "train_single_block_indices",
    "train_t5xxl",
    "txt_attn_dim",
    "txt_mlp_dim",
    "txt_mod_dim",
    "unit",
    "up_lr_weight",
    "use_cp",
    "use_scalar",
    "use_tucker",
];

/// Switches that become no option.
const SWITCHES: &[&str] = &[
    "anima_checkbox",
    "create_caption",
    "flux1_checkbox",
    "generate_caption_database",
    "hunyuan_image_checkbox",
    "lumina_checkbox",
    "sd3_checkbox",
    "sdxl",
    "sdxl_checkbox",
    "split_mode",
    "train_lora_ggpo",
];

/// Numbers that become no option of their own, or not as they are.
const NUMBERS: &[&str] = &[
    "epoch",
    "lr_warmup",
    "lr_warmup_steps",
    "max_train_steps",
    "stop_text_encoder_training",
    "stop_text_encoder_training_pct",
    "t5xxl_lr",
    "text_encoder_lr",
    "unet_lr",
];

/// Texts that become no option of their own, or not as they are.
const TEXTS: &[&str] = &[
    "additional_parameters",
    "caption_metadata_filename",
    "image_folder",
    "latent_metadata_filename",
    "sample_prompts",
    "train_dir",
    "use_latent_files",
];

/// The fields of a preset.
pub(super) struct Fields(pub Table);

impl Fields {
    /// A field that is set: not empty, not 0, not false.
    pub(super) fn get(&self, name: &str) -> Option<&Value> {
        self.0
            .iter()
            .find(|entry| entry.key == name)
            .map(|entry| &entry.value)
            .filter(|value| !value.is_off())
    }

    /// Where a field is.
    pub(super) fn position(&self, name: &str) -> Position {
        let entry = self.0.iter().find(|entry| entry.key == name);
        entry.map_or(Position::default(), |entry| entry.at)
    }

    /// Whether the preset has a field, also one that is not set.
    pub(super) fn has(&self, name: &str) -> bool {
        self.0.iter().any(|entry| entry.key == name)
    }

    pub(super) fn is_on(&self, name: &str) -> bool {
        self.get(name).and_then(switch_of) == Some(true)
    }

    /// Reports values of other types. Fields that become options as they are, are checked as these.
    pub(super) fn check_types(&self, file: &str, errors: &mut Vec<Finding>) {
        for entry in self.0.iter().filter(|entry| !entry.value.is_off()) {
            let (name, value) = (entry.key.as_str(), &entry.value);
            let is_several = matches!(value, Value::List(_) | Value::Table(_));
            let expected = if SWITCHES.contains(&name) && switch_of(value).is_none() {
                "true or false"
            } else if NUMBERS.contains(&name) && number_of(value).is_none() {
                "a number"
            } else if is_several && (TEXTS.contains(&name) || NETWORK.contains(&name)) {
                "one value"
            } else {
                continue;
            };
            let message = format!("expected {expected}, found {}", value.shown());
            errors.push(finding(file, entry.at, name, message));
        }
    }

    pub(super) fn text(&self, name: &str) -> Option<String> {
        text_of(self.get(name)?)
    }

    /// A field as text, also one that is 0 or false.
    pub(super) fn given_text(&self, name: &str) -> Option<String> {
        let entry = self.0.iter().find(|entry| entry.key == name)?;
        text_of(&entry.value).filter(|text| !text.is_empty())
    }

    pub(super) fn number(&self, name: &str) -> f64 {
        self.get(name).and_then(number_of).unwrap_or(0.0)
    }
}

fn switch_of(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(on) => Some(*on),
        Value::Whole(number) => Some(*number != 0),
        Value::Text(text) => match text.trim().to_lowercase().as_str() {
            "true" => Some(true),
            "" | "false" => Some(false),
            _ => None,
        },
        _ => None,
    }
}

fn number_of(value: &Value) -> Option<f64> {
    let number: f64 = match value {
        Value::Text(text) if text.trim().is_empty() => 0.0,
        Value::Text(text) => text.trim().parse().ok()?,
        value => value.as_number()?,
    };
    number.is_finite().then_some(number)
}

/// How Python writes a value.
fn text_of(value: &Value) -> Option<String> {
    match value {
        Value::Text(text) => Some(text.clone()),
        Value::Bool(on) => Some(if *on { "True" } else { "False" }.to_owned()),
        Value::Whole(number) => Some(number.to_string()),
        Value::Number(number) => Some(format!("{number:?}")),
        _ => None,
    }
}

/// The options that are collected.
pub(super) struct Options<'a> {
    pub table: Table,
    pub fields: &'a Fields,
    pub file: &'a str,
    pub errors: &'a mut Vec<Finding>,
}

impl Options<'_> {
    /// Sets an option to what the field of its name says.
    pub(super) fn set(&mut self, key: &str, value: Value) {
        self.set_by(key, key, value);
    }

    /// Sets an option to what a field says.
    pub(super) fn set_by(&mut self, field: &str, key: &str, value: Value) {
        self.table.retain(|entry| entry.key != key);
        self.table.push(Entry {
            key: key.to_owned(),
            value,
            at: self.fields.position(field),
        });
    }

    pub(super) fn error(&mut self, field: &str, message: impl Into<String>) {
        let at = self.fields.position(field);
        let error = finding(self.file, at, &shortened(field), message);
        self.errors.push(error);
    }
}
