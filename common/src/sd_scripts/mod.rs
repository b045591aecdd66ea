//! Imports training configs of kohya's sd-scripts (TOML) and presets of the kohya GUI (JSON): they become a config as
//! ai-toolkit has it.
//!
//! Every option of the scripts has a line in `options.rs` or `dataset_options.rs`, which says what becomes of it.
//! `docs/sd-scripts.md` is generated from these lines. Source of all facts: sd-scripts 48d368fa, LyCORIS 3, kohya_ss 45088f04.

mod arguments;
mod block_ranks;
mod block_rates;
mod dataset_kind;
mod dataset_options;
mod datasets;
mod document;
mod epochs;
mod folders;
mod gui;
mod gui_fields;
mod gui_tab;
mod held_out;
mod image_size;
mod left_out;
mod levels;
mod lora_plus;
mod lycoris;
mod model;
mod network;
mod network_arguments;
mod objective;
mod optimizer;
mod option;
mod options;
mod python_random;
pub mod reference;
mod refused;
mod report;
mod resumed;
mod samples;
mod saving;
mod schedule;
mod script;
mod settings;
mod subset_section;
mod templates;
mod textual_inversion;
mod transformer_blocks;
mod unet_blocks;
mod weights_ranks;
mod yaml;

pub use gui::is_preset;
pub use script::{Script, ScriptFamily};

use crate::job::Finding;
use document::{Position, finding};
use epochs::batches;
use optimizer::Rates;
use report::{Import, Section, number};
use samples::Prompts;
use serde_json::{Value, json};
use settings::Settings;
use std::path::Path;

/// The format of a config.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceFormat {
    /// TOML, as `--config_file` of the scripts takes it.
    Toml,
    /// A JSON preset of the kohya GUI.
    GuiPreset,
}

/// A config to import.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    /// Its text.
    pub text: &'a str,
    /// Its format.
    pub format: SourceFormat,
    /// Its name, for messages.
    pub file: &'a str,
    /// The folder from which relative paths start: for sd-scripts the current folder.
    pub directory: &'a Path,
    /// The data set config, instead of the one that the config names.
    pub dataset_config: Option<&'a Path>,
    /// The script; `None`: found by the options.
    pub script: Option<Script>,
}

/// An imported config.
#[derive(Clone, Debug)]
pub struct Imported {
    /// The config as YAML.
    pub yaml: String,
    /// The script that it was for.
    pub script: Script,
    /// What is ignored, and what differs.
    pub notes: Vec<Finding>,
}

/// Imports a config. Reads the files that it names: the data set config, the prompts of samples, folders of images where their
/// number is needed, and the headers of the model.
///
/// # Errors
/// Every error that was found, in the order of the files.
pub fn import(source: Source<'_>) -> Result<Imported, Vec<Finding>> {
    let file = source.file;
    let mut errors = Vec::new();
    let mut notes = Vec::new();
    let mut prompts = None;
    let mut known_script = source.script;
    let mut preset_datasets = None;
    let table = match source.format {
        SourceFormat::Toml => {
            let table = document::parse_toml(source.text, file).map_err(|error| vec![error])?;
            settings::flatten(table, file, &mut errors)
        }
        SourceFormat::GuiPreset => {
            let table = document::parse_json(source.text, file).map_err(|error| vec![error])?;
            let preset = gui::options_of(table, file, source.directory, &mut errors);
            known_script = known_script.or(preset.script);
            notes.extend(preset.notes);
            prompts = preset.prompts.map(Prompts::Text);
            preset_datasets = preset.datasets;
            preset.options
        }
    };
    let names = options::rows().map(|row| row.name);
    let mut settings = Settings::read(table, file, options::find, names, &mut errors);
    if settings.is_empty() && errors.is_empty() {
        return Err(vec![finding(
            file,
            Position::default(),
            "",
            "the config sets no option",
        )]);
    }
    settings.rename("caption_extention", "caption_extension");
    let has_dataset_config = source.dataset_config.is_some();
    let found = known_script.map_or_else(|| script::detect(&settings, source.directory, has_dataset_config), Ok);
    let script = match found {
        Ok(script) => script,
        // The options that could not be read may be those that tell the scripts apart.
        Err(_) if !errors.is_empty() => return Err(sorted(errors)),
        Err((option, message)) => return Err(vec![finding(file, settings.position(option), option, message)]),
    };
    if !errors.is_empty() {
        // Options that could not be read would be missing below.
        let of_script = Some((script.bits(), script.name()));
        settings.check_fates(options::find, of_script, &mut errors, &mut notes);
        return Err(sorted(errors));
    }
    let prompts = prompts.or_else(|| {
        settings
            .text("sample_prompts")
            .map(|path| Prompts::File(path.to_owned()))
    });
    let mut import = Import {
        settings: &settings,
        script,
        directory: source.directory,
        preset_datasets,
        of_datasets: Vec::new(),
        errors,
        notes,
    };
    settings.check_fates(
        options::find,
        Some((script.bits(), script.name())),
        &mut import.errors,
        &mut import.notes,
    );
    let config = config(&mut import, source.dataset_config, prompts);
    if !import.errors.is_empty() {
        return Err(sorted(import.errors));
    }
    import
        .notes
        .extend(templates::notes(&config, &settings, &import.of_datasets));
    let name: String = file.chars().take(200).collect();
    let yaml = format!(
        "# Imported from {} ({}.py of sd-scripts).\n{}",
        name.escape_debug(),
        script.name(),
        yaml::write(&config)
    );
    refused::check(&yaml, &settings, &import.of_datasets)?;
    Ok(Imported {
        yaml,
        script,
        notes: sorted(import.notes),
    })
}

fn sorted(mut findings: Vec<Finding>) -> Vec<Finding> {
    findings.sort_by(|a, b| (&a.file, a.line, a.column).cmp(&(&b.file, b.line, b.column)));
    findings.dedup();
    findings
}

/// The whole config.
fn config(import: &mut Import<'_>, dataset_config: Option<&Path>, prompts: Option<Prompts>) -> Section {
    let settings = import.settings;
    let rates = optimizer::rates(import);
    let datasets = datasets::read(import, dataset_config);
    import.of_datasets = datasets.settings().cloned().collect();
    let batch_size = datasets.batch_size(import);
    let accumulated = import.whole_from("gradient_accumulation_steps", 1, 1);
    let mut train = Section::new();
    let mut loss = Section::new();
    let loss_factor = objective::objective(import, &mut loss);
    let caches_text = caches_text(import, &rates);
    let (sections, counted, held_out) = datasets.sections(
        import,
        &subset_section::Training {
            batch_size,
            loss_factor: loss_factor / accumulated as f64,
            caches_text,
        },
    );
    let epoch = match needs_epoch(import).or(held_out.needs_epoch(import)) {
        Some(option) if import.errors.is_empty() => match batches(&counted) {
            Ok(batches) => Some(batches.div_ceil(accumulated)),
            Err(message) => {
                import.error(option, message);
                None
            }
        },
        _ => None,
    };
    let steps = steps(import, epoch);
    train.insert("steps".into(), json!(steps));
    train.insert("batch_size".into(), json!(batch_size));
    train.insert("gradient_accumulation".into(), json!(accumulated));
    train.insert("lr".into(), number(rates.rate));
    let factors = lora_plus::lr_factors(import, &rates);
    if !factors.is_empty() {
        let factors = factors
            .iter()
            .map(|(name, factor)| json!({"contains": name, "factor": number(*factor)}));
        train.insert("lr_factors".into(), factors.collect());
    }
    optimizer::optimizer(import, &rates, &mut train);
    schedule::schedule(import, steps, &mut train);
    train.insert("train_unet".into(), json!(rates.trains_denoiser));
    train.insert("train_text_encoder".into(), json!(rates.trains_text_encoder));
    train.insert(
        "gradient_checkpointing".into(),
        json!(settings.flag("gradient_checkpointing")),
    );
    train.insert("dtype".into(), json!(dtype(import)));
    if caches_text && !rates.trains_text_encoder {
        train.insert("cache_text_embeddings".into(), json!(true));
    }
    if let Some(validation) = held_out.section(import, epoch) {
        train.insert("validation_config".into(), Value::Object(validation));
    }
    train.extend(loss);

    let mut process = Section::new();
    process.insert("type".into(), json!("sd_trainer"));
    let output = settings.text("output_dir");
    if output.is_none() {
        import.error("output_dir", "the config names no folder for the results: set it");
    }
    process.insert("training_folder".into(), json!(output.unwrap_or("")));
    if let Some(folder) = settings.text("logging_dir") {
        process.insert("log_dir".into(), json!(folder));
    }
    if let Some(seed) = settings.whole("seed") {
        process.insert("training_seed".into(), json!(seed));
    }
    if import.script.trains_adapter() {
        let mut network = network::network(import, &rates);
        resumed::resume(import, steps, &mut network, &mut train);
        process.insert("network".into(), Value::Object(network));
    } else if settings.is_set("resume") {
        import.error(
            "resume",
            "aitk reads the state folders of trainings of a LoRA alone: continue from the saved model or word",
        );
    }
    if import.script.trains_embedding() {
        process.insert("embedding".into(), Value::Object(textual_inversion::embedding(import)));
    }
    process.insert("save".into(), Value::Object(saving::save(import, epoch, steps)));
    process.insert("datasets".into(), sections.into());
    let every = saving::sample_interval(import, epoch);
    saving::sample_switches(import, every.is_some(), &mut train);
    process.insert("train".into(), Value::Object(train));
    process.insert("model".into(), Value::Object(model::model(import)));
    if let Some(every) = every {
        process.insert("sample".into(), Value::Object(samples::sample(import, prompts, every)));
    }
    let default_name = settings
        .text("token_string")
        .filter(|_| import.script.trains_embedding())
        .unwrap_or("last");
    let mut root = Section::new();
    root.insert("job".into(), json!("extension"));
    root.insert(
        "config".into(),
        json!({"name": settings.text("output_name").unwrap_or(default_name), "process": [process]}),
    );
    let meta = saving::meta(import);
    if !meta.is_empty() {
        root.insert("meta".into(), Value::Object(meta));
    }
    root
}

/// Whether text is encoded before the training; of models with T5 also where the other text encoders are trained, which aitk does not cache.
fn caches_text(import: &mut Import<'_>, rates: &Rates) -> bool {
    if import.script.family() == ScriptFamily::Sd {
        return false;
    }
    let options = ["cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk"];
    let Some(option) = options.into_iter().find(|option| import.settings.flag(option)) else {
        return false;
    };
    if import.script.trains_embedding() {
        import.error(
            option,
            "contradicts the training of a word, which needs the text encoders: remove it",
        );
    }
    if rates.trains_text_encoder && import.script.is_flow() {
        let message = "text is encoded at each step, because a text encoder is trained; sd-scripts caches T5 alone, and trains the same";
        import.note(option, message);
    } else if rates.trains_text_encoder {
        let message = "contradicts the training of the text encoder, whose outputs change: set network_train_unet_only = true, or remove it";
        import.error(option, message);
    }
    true
}

/// An option that needs the number of steps of an epoch.
fn needs_epoch(import: &Import<'_>) -> Option<&'static str> {
    let options = [
        "max_train_epochs",
        "save_every_n_epochs",
        "save_n_epoch_ratio",
        "sample_every_n_epochs",
    ];
    options
        .into_iter()
        .find(|option| import.settings.whole(option).is_some_and(|number| number > 0))
}

fn steps(import: &mut Import<'_>, epoch: Option<u64>) -> u64 {
    if import.settings.whole("max_train_epochs") == Some(0) {
        import.note(
            "max_train_epochs",
            "0 is read as not set: max_train_steps counts; sd-scripts would train no step",
        );
    }
    match (import.whole_from("max_train_epochs", 0, 0), epoch) {
        (0, _) => import.whole_from("max_train_steps", 1, 1600),
        (epochs, epoch) => epochs.saturating_mul(epoch.unwrap_or(1)),
    }
}

/// `train.dtype`.
fn dtype(import: &mut Import<'_>) -> &'static str {
    let settings = import.settings;
    let mixed = settings.text("mixed_precision").unwrap_or("no");
    let (full_bf16, full_fp16) = (settings.flag("full_bf16"), settings.flag("full_fp16"));
    for (on, option, needed) in [(full_bf16, "full_bf16", "bf16"), (full_fp16, "full_fp16", "fp16")] {
        if on && mixed != needed {
            import.error(
                option,
                format!("contradicts mixed_precision {mixed}: set mixed_precision = \"{needed}\""),
            );
        }
    }
    if !import.script.trains_model() {
        for (on, option) in [(full_bf16, "full_bf16"), (full_fp16, "full_fp16")] {
            if on {
                import.note(
                    option,
                    "aitk keeps what it trains and its gradients in float32, which is more exact",
                );
            }
        }
        return match mixed {
            "bf16" => "bfloat16",
            "fp16" => "float16",
            _ => "float32",
        };
    }
    if full_fp16 {
        import.error(
            "full_fp16",
            "aitk does not train a whole model in float16: use full_bf16 with mixed_precision = \"bf16\"",
        );
    }
    if full_bf16 {
        import.note(
            "full_bf16",
            "aitk rounds the updates of bfloat16 weights at random, so that small ones are not lost",
        );
        return "bfloat16";
    }
    if mixed != "no" {
        import.note(
            "mixed_precision",
            "aitk trains a whole model with weights and arithmetic in float32, or with both in bfloat16 (full_bf16)",
        );
    }
    "float32"
}

#[cfg(test)]
mod tests;
