//! Saves, samples while training, and metadata.

use super::report::{Import, Section};
use serde_json::{Value, json};

/// Options of metadata, and their keys in `meta`.
const METADATA: &[(&str, &str)] = &[
    ("training_comment", "training_comment"),
    ("metadata_title", "title"),
    ("metadata_author", "author"),
    ("metadata_description", "description"),
    ("metadata_license", "license"),
    ("metadata_tags", "tags"),
    ("metadata_usage_hint", "usage_hint"),
    ("metadata_thumbnail", "thumbnail"),
    ("metadata_merged_from", "merged_from"),
    ("metadata_trigger_phrase", "trigger_phrase"),
    ("metadata_preprocessor", "preprocessor"),
    ("metadata_is_negative_embedding", "is_negative_embedding"),
];

/// The `meta` section.
pub(super) fn meta(import: &Import<'_>) -> Section {
    let text = |(option, key): &(&str, &str)| Some(((*key).to_owned(), json!(import.settings.text(option)?)));
    METADATA.iter().filter_map(text).collect()
}

/// The `save` section. `epoch`: steps of an epoch, if an option needs them.
pub(super) fn save(import: &mut Import<'_>, epoch: Option<u64>, steps: u64) -> Section {
    let settings = import.settings;
    let mut save = Section::new();
    let by_steps = import.whole_from("save_every_n_steps", 0, 0);
    let mut epochs = import.whole_from("save_every_n_epochs", 0, 0);
    let ratio = import.whole_from("save_n_epoch_ratio", 0, 0);
    if let (Some(epoch), true) = (epoch, ratio > 0) {
        epochs = (steps.div_ceil(epoch) / ratio).max(1);
    }
    let by_epochs = epochs.saturating_mul(epoch.unwrap_or(0));
    let every = match (by_steps, by_epochs) {
        (0, every) | (every, 0) => every,
        (by_steps, _) => {
            let option = if settings.is_set("save_every_n_epochs") {
                "save_every_n_epochs"
            } else {
                "save_n_epoch_ratio"
            };
            import.note(
                option,
                "ignored: aitk saves at one interval, that of save_every_n_steps",
            );
            by_steps
        }
    };
    save.insert("save_every".into(), json!(every));
    save.insert(
        "max_step_saves_to_keep".into(),
        json!(saves_to_keep(import, every, by_steps)),
    );
    save.insert("dtype".into(), json!(dtype(import)));
    if let Some(repo) = settings.text("huggingface_repo_id") {
        save.insert("push_to_hub".into(), json!(true));
        save.insert("hf_repo_id".into(), json!(repo));
        let is_private = settings.text("huggingface_repo_visibility") != Some("public");
        save.insert("hf_private".into(), json!(is_private));
    }
    let format = settings.text("save_model_as");
    if !import.script.trains_model() {
        if matches!(format, Some("ckpt" | "pt")) {
            import.note("save_model_as", "aitk writes safetensors");
        }
    } else {
        save.insert("save_format".into(), json!(model_format(import, format)));
    }
    save
}

/// How many saves are kept; 0: all.
fn saves_to_keep(import: &mut Import<'_>, every: u64, by_steps: u64) -> u64 {
    let window = import.whole_from("save_last_n_steps", 0, 0);
    let epochs = import.whole_from("save_last_n_epochs", 0, 0);
    match (by_steps > 0, window, epochs) {
        (true, window, _) if window > 0 => window / every.max(1) + 1,
        (false, _, epochs) => epochs,
        _ => 0,
    }
}

fn dtype(import: &Import<'_>) -> &'static str {
    let settings = import.settings;
    match settings.text("save_precision") {
        Some("fp16") => "float16",
        Some("bf16") => "bfloat16",
        Some(_) => "float32",
        // The weights' own format.
        None if settings.flag("full_bf16") => "bfloat16",
        None if settings.flag("full_fp16") => "float16",
        None => "float32",
    }
}

/// `save.save_format` of a whole model: without the option, that of the base model.
fn model_format(import: &mut Import<'_>, format: Option<&str>) -> &'static str {
    if import.script.is_flow() {
        import.note("save_model_as", "aitk saves the transformer as a diffusers folder");
        return "diffusers";
    }
    match format {
        Some("diffusers" | "diffusers_safetensors") => "diffusers",
        Some("ckpt") => {
            import.note("save_model_as", "aitk writes safetensors");
            "safetensors"
        }
        Some(_) => "safetensors",
        None => {
            let path = import.settings.text("pretrained_model_name_or_path").unwrap_or("");
            let is_file = std::path::Path::new(path).extension().is_some_and(|ending| {
                ["safetensors", "ckpt"]
                    .iter()
                    .any(|known| ending.eq_ignore_ascii_case(known))
            });
            if is_file { "safetensors" } else { "diffusers" }
        }
    }
}

/// Whether samples are made, and after how many steps; 0: only before the first one.
pub(super) fn sample_interval(import: &mut Import<'_>, epoch: Option<u64>) -> Option<u64> {
    let settings = import.settings;
    for option in ["sample_every_n_steps", "sample_every_n_epochs"] {
        if settings.whole(option).is_some_and(|every| every < 0) {
            import.note(option, "not above 0: no samples, as in sd-scripts");
        }
    }
    let positive = |option: &str| {
        settings
            .whole(option)
            .and_then(|every| u64::try_from(every).ok())
            .filter(|every| *every > 0)
    };
    let (steps, epochs) = (positive("sample_every_n_steps"), positive("sample_every_n_epochs"));
    let samples_at_first = settings.flag("sample_at_first");
    if steps.is_none() && epochs.is_none() && !samples_at_first {
        return None;
    }
    Some(match (epochs, steps) {
        // sd-scripts ignores the steps if epochs are given.
        (Some(epochs), _) => epochs.saturating_mul(epoch.unwrap_or(1)),
        (None, steps) => steps.unwrap_or(0),
    })
}

/// Adds the keys of `train` about samples.
pub(super) fn sample_switches(import: &Import<'_>, makes_samples: bool, train: &mut Section) {
    if makes_samples {
        train.insert(
            "skip_first_sample".into(),
            Value::Bool(!import.settings.flag("sample_at_first")),
        );
    } else {
        train.insert("disable_sampling".into(), json!(true));
    }
}
