//! Translates the keys of a universal training config.

use super::keys::Keys;
use crate::job::node::{Entry, Mark, Node, Value};

/// What the keys become: the keys of the job's sections with their positions.
pub(super) struct Settings {
    name: Entry,
    cluster: Vec<Entry>,
    process: Vec<Entry>,
}

/// Names of optimizers in PyTorch and bitsandbytes that have another one here.
const OPTIMIZERS: [(&str, &str); 9] = [
    ("adamw_torch", "adamw"),
    ("adamw_torch_fused", "adamw"),
    ("adamw_hf", "adamw"),
    ("adamw_8bit", "adamw8bit"),
    ("adamw8bit", "adamw8bit"),
    ("adamw_bnb_8bit", "adamw8bit"),
    ("paged_adamw_8bit", "adamw8bit"),
    ("paged_adamw_32bit", "adamw"),
    ("lion_8bit", "lion8bit"),
];

/// Names of schedules.
const SCHEDULES: [(&str, &str); 4] = [
    ("cosine_with_warmup", "cosine"),
    ("linear_with_warmup", "linear"),
    ("constant_with_warmup", "constant"),
    ("warmup_stable_decay", "wsd"),
];

/// The names of `mixed_precision` that mean none.
const NO_MIXED_PRECISION: [&str; 4] = ["no", "none", "fp32", "float32"];

fn node(mark: Mark, value: Value) -> Node {
    Node {
        mark,
        value,
        plain: None,
    }
}

fn text(mark: Mark, value: &str) -> Node {
    node(mark, Value::Text(value.to_owned()))
}

fn entry(key: &str, mark: Mark, node: Node) -> Entry {
    Entry {
        key: key.to_owned(),
        mark,
        node,
    }
}

/// A section, unless it has no keys.
fn push_section(into: &mut Vec<Entry>, key: &str, mark: Mark, entries: Vec<Entry>) {
    if !entries.is_empty() {
        into.push(entry(key, mark, node(mark, Value::Map(entries))));
    }
}

fn as_text(entry: &Entry) -> Option<&str> {
    match &entry.node.value {
        Value::Text(text) => Some(text),
        _ => None,
    }
}

fn as_number(entry: &Entry) -> Option<f64> {
    match entry.node.value {
        #[allow(clippy::cast_precision_loss)]
        Value::Int(number) => Some(number as f64),
        Value::Float(number) => Some(number),
        _ => None,
    }
}

impl Keys<'_> {
    /// Moves keys under other names.
    fn renamed(&self, names: &[(&str, &str)]) -> Vec<Entry> {
        let moved = names.iter().filter_map(|(from, to)| {
            let found = self.get(from)?;
            Some(entry(to, found.mark, found.node.clone()))
        });
        moved.collect()
    }

    /// A key whose value may have another name here.
    fn translated(&self, from: &str, to: &str, names: &[(&str, &str)]) -> Option<Entry> {
        let found = self.get(from)?;
        let known = as_text(found).and_then(|name| names.iter().find(|(other, _)| *other == name));
        let value = match known {
            Some((_, ours)) => text(found.node.mark, ours),
            None => found.node.clone(),
        };
        Some(entry(to, found.mark, value))
    }

    /// A truth value; another value is an error.
    fn flag(&mut self, key: &str) -> bool {
        match self.get(key).map(|entry| &entry.node) {
            None => false,
            Some(found) => match found.value {
                Value::Bool(on) => on,
                _ => {
                    let message = format!("expected true or false, found {}", found.describe());
                    self.error(key, message);
                    false
                }
            },
        }
    }

    /// A number; another value is an error.
    fn number(&mut self, key: &str) -> Option<f64> {
        let found = self.get(key)?;
        let number = as_number(found);
        if number.is_none() {
            let message = format!("expected a number, found {}", found.node.describe());
            self.error(key, message);
        }
        number
    }
}

/// Reads all keys.
pub(super) fn read_settings(keys: &mut Keys<'_>, mark: Mark) -> Settings {
    let (name, folder) = output(keys, mark);
    let mut process = vec![entry("type", mark, text(mark, "lm_trainer")), folder];
    process.extend(keys.renamed(&[("seed", "training_seed"), ("context_window", "context")]));
    if keys.get("pretrained_model").is_none() {
        keys.error(
            "model.pretrained_model",
            "is missing: the folder of the model to train, or ORG/NAME",
        );
    }
    let has_lora = keys.flag("lora_enabled");
    let model = model(keys, has_lora, mark);
    push_section(&mut process, "model", mark, model);
    if has_lora {
        let network = network(keys, mark);
        push_section(&mut process, "network", mark, network);
    }
    data(keys, mark, &mut process);
    let train = train(keys, mark);
    push_section(&mut process, "train", mark, train);
    let save = keys.renamed(&[
        ("save_steps", "save_every"),
        ("save_total_limit", "max_step_saves_to_keep"),
    ]);
    push_section(&mut process, "save", mark, save);
    push_section(
        &mut process,
        "logging",
        mark,
        keys.renamed(&[("logging_steps", "log_every")]),
    );
    for key in ["lr_plateau_patience", "patience"] {
        if keys.get(key).is_some() {
            keys.note(
                key,
                "a training does not end early: it has all of its steps; `validation` shows when it no longer learns",
            );
        }
    }
    Settings {
        name,
        cluster: device(keys),
        process,
    }
}

/// The name of the job, and `training_folder`.
fn output(keys: &mut Keys<'_>, mark: Mark) -> (Entry, Entry) {
    if keys.flag("overwrite_output_dir") {
        keys.note(
            "overwrite_output_dir",
            "nothing is overwritten: a run in the same folder resumes; to start anew, move the folder away or give another one",
        );
    }
    if let Some(found) = keys.get("output_dir")
        && let Some(path) = as_text(found)
    {
        let path = path.trim_end_matches('/');
        let (folder, name) = path.rsplit_once('/').unwrap_or((".", path));
        let folder = if folder.is_empty() { "/" } else { folder };
        let value = found.node.mark;
        return (
            entry("name", found.mark, text(value, name)),
            entry("training_folder", found.mark, text(value, folder)),
        );
    }
    let name = match keys.get("name") {
        Some(found) => entry("name", found.mark, found.node.clone()),
        None => entry("name", mark, text(mark, "code_model")),
    };
    (name, entry("training_folder", mark, text(mark, "output")))
}

fn model(keys: &mut Keys<'_>, has_lora: bool, mark: Mark) -> Vec<Entry> {
    let mut model = keys.renamed(&[("pretrained_model", "name_or_path")]);
    model.extend(dtype(keys));
    let (four, eight) = (keys.flag("load_in_4bit"), keys.flag("load_in_8bit"));
    let key = if four { "load_in_4bit" } else { "load_in_8bit" };
    if four && eight {
        keys.error(
            "load_in_8bit",
            "cannot be used together with `load_in_4bit`: set one of them to false",
        );
    }
    if (four || eight) && !has_lora {
        keys.error(
            key,
            "only a frozen model is quantised: set `lora_enabled: true`, or this key to false",
        );
    }
    let qtype = if four { keys.get("bnb_4bit_quant_type") } else { None };
    if let Some(found) = qtype.filter(|found| as_text(found) != Some("nf4")) {
        let message = format!("{} is not supported: expected nf4", found.node.describe());
        keys.error("bnb_4bit_quant_type", message);
    }
    if four || eight {
        let at = keys.get(key).map_or(mark, |found| found.mark);
        model.push(entry("quantize", at, node(at, Value::Bool(true))));
        model.push(entry("qtype", at, text(at, if four { "nf4" } else { "int8" })));
    }
    model
}

/// `model.dtype`: `torch_dtype`, or where that is `auto`, `mixed_precision`.
fn dtype(keys: &mut Keys<'_>) -> Option<Entry> {
    let is_auto = |found: &Entry| as_text(found) == Some("auto");
    if let Some(found) = keys.get("torch_dtype").filter(|found| !is_auto(found)) {
        return Some(entry("dtype", found.mark, found.node.clone()));
    }
    let is_off = keys.get("use_mixed_precision").is_some() && !keys.flag("use_mixed_precision");
    let found = keys.get("mixed_precision").filter(|_| !is_off)?;
    // YAML 1.1 reads `no` as a truth value.
    let is_none =
        found.node.value == Value::Bool(false) || as_text(found).is_some_and(|name| NO_MIXED_PRECISION.contains(&name));
    Some(match is_none {
        true => entry("dtype", found.mark, text(found.node.mark, "float32")),
        false => entry("dtype", found.mark, found.node.clone()),
    })
}

fn network(keys: &mut Keys<'_>, mark: Mark) -> Vec<Entry> {
    let mut network = vec![entry("type", mark, text(mark, "lora"))];
    network.extend(keys.renamed(&[("lora_rank", "linear"), ("lora_alpha", "linear_alpha")]));
    if keys.number("lora_dropout").is_some_and(|chance| chance != 0.0) {
        network.extend(keys.renamed(&[("lora_dropout", "dropout")]));
    }
    let is_all = |found: &Entry| as_text(found).is_some_and(|name| matches!(name, "all-linear" | "all"));
    if keys.get("lora_target_modules").is_some_and(|found| !is_all(found)) {
        network.extend(keys.renamed(&[("lora_target_modules", "only_if_contains")]));
    }
    if let Some(found) = keys.get("lora_bias").filter(|found| as_text(found) != Some("none")) {
        let message = format!(
            "{} is not supported: biases are not trained with a LoRA; expected none",
            found.node.describe()
        );
        keys.error("lora_bias", message);
    }
    network
}

/// `datasets` and `validation`.
fn data(keys: &mut Keys<'_>, mark: Mark, process: &mut Vec<Entry>) {
    let key = if keys.get("train_path").is_some() {
        "train_path"
    } else {
        "sequences"
    };
    match keys.get(key) {
        Some(found) => {
            let dataset = vec![entry("path", found.mark, found.node.clone())];
            let list = Value::List(vec![node(found.mark, Value::Map(dataset))]);
            process.push(entry("datasets", found.mark, node(found.mark, list)));
        }
        None => keys.error(
            "dataset.train_path",
            "is missing: the file or folder of token sequences or texts, which other trainers take as `--sequences`",
        ),
    }
    if keys.get("val_path").is_some() {
        let validation = keys.renamed(&[("val_path", "path"), ("eval_steps", "every")]);
        push_section(process, "validation", mark, validation);
    } else if keys.get("eval_steps").is_some() {
        keys.note("eval_steps", "has no effect without `val_path`");
    }
    if keys.get("test_path").is_some() {
        keys.note("test_path", "is not measured: the loss of `val_path` is");
    }
    if keys.get("target_window").is_some() {
        keys.note(
            "target_window",
            "has no effect: each token of a row of `context_window` tokens is predicted from those before it",
        );
    }
}

fn train(keys: &mut Keys<'_>, mark: Mark) -> Vec<Entry> {
    let mut train = keys.renamed(&[
        ("batch_size", "batch_size"),
        ("gradient_accumulation_steps", "gradient_accumulation"),
        ("learning_rate", "lr"),
        ("min_lr", "min_lr"),
        ("max_grad_norm", "max_grad_norm"),
        ("gradient_checkpointing", "gradient_checkpointing"),
    ]);
    train.extend(keys.translated("lr_scheduler", "lr_scheduler", &SCHEDULES));
    train.extend(keys.translated("optimizer", "optimizer", &OPTIMIZERS));
    let steps = keys.number("max_steps").filter(|steps| *steps > 0.0);
    if keys.get("num_epochs").is_some() {
        train.extend(keys.renamed(&[("num_epochs", "epochs")]));
        if steps.is_some() {
            keys.note(
                "max_steps",
                "has no effect: `num_epochs` says how long the training is; remove that to use this",
            );
        }
    } else if steps.is_some() {
        train.extend(keys.renamed(&[("max_steps", "steps")]));
    }
    train.extend(warmup(keys, steps));
    let mut params = keys.renamed(&[("weight_decay", "weight_decay"), ("adam_epsilon", "eps")]);
    if keys.get("adam_beta1").is_some() || keys.get("adam_beta2").is_some() {
        let betas = [("adam_beta1", 0.9), ("adam_beta2", 0.999)].map(|(key, usual)| match keys.get(key) {
            Some(found) => found.node.clone(),
            None => node(mark, Value::Float(usual)),
        });
        params.push(entry("betas", mark, node(mark, Value::List(betas.to_vec()))));
    }
    push_section(&mut train, "optimizer_params", mark, params);
    train
}

/// `warmup_steps`, or `warmup_ratio` of the steps where these are known, as in transformers.
fn warmup(keys: &mut Keys<'_>, steps: Option<f64>) -> Vec<Entry> {
    let ratio = keys.number("warmup_ratio").filter(|ratio| *ratio > 0.0);
    if keys.number("warmup_steps").is_some_and(|steps| steps > 0.0) {
        if ratio.is_some() {
            keys.note(
                "warmup_ratio",
                "has no effect: `warmup_steps` is used, as in transformers",
            );
        }
        return keys.renamed(&[("warmup_steps", "warmup_steps")]);
    }
    let (Some(ratio), Some(found)) = (ratio, keys.get("warmup_ratio")) else {
        return Vec::new();
    };
    if keys.get("num_epochs").is_some() || !(0.0..=1.0).contains(&ratio) || steps.is_none() {
        keys.error(
            "warmup_ratio",
            "expected a share of `max_steps` from 0 to 1; with `num_epochs` give `warmup_steps` instead",
        );
        return Vec::new();
    }
    #[allow(clippy::cast_possible_truncation)]
    let count = (ratio * steps.unwrap_or_default()).ceil().min(1e15) as i64;
    vec![entry(
        "warmup_steps",
        found.mark,
        node(found.node.mark, Value::Int(count)),
    )]
}

/// `cluster.device`.
fn device(keys: &mut Keys<'_>) -> Vec<Entry> {
    if let Some(found) = keys
        .get("attention_backend")
        .filter(|found| as_text(found) != Some("auto"))
    {
        let message = format!(
            "{} has no effect: attention is computed as suits the device, which is what `auto` means",
            found.node.describe()
        );
        keys.note("attention_backend", message);
    }
    let Some(found) = keys.get("force_device") else {
        return Vec::new();
    };
    let kind = match as_text(found) {
        Some("cpu") => "cpu",
        Some("mps" | "metal") => "metal",
        Some("cuda") => "cuda",
        Some("auto") => return Vec::new(),
        _ => {
            let message = format!(
                "expected cuda, mps, cpu, or null for the best device, found {}",
                found.node.describe()
            );
            keys.error("force_device", message);
            return Vec::new();
        }
    };
    vec![entry("device", found.mark, text(found.node.mark, kind))]
}

/// The config of the job.
pub(super) fn config_of(settings: Settings, mark: Mark) -> Node {
    let process = node(mark, Value::List(vec![node(mark, Value::Map(settings.process))]));
    let config = vec![settings.name, entry("process", mark, process)];
    let mut root = vec![
        entry("job", mark, text(mark, "extension")),
        entry("config", mark, node(mark, Value::Map(config))),
    ];
    push_section(&mut root, "cluster", mark, settings.cluster);
    node(mark, Value::Map(root))
}
