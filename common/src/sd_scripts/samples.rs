//! The file of `sample_prompts`: one prompt a line with flags, or TOML, or JSON.

use super::document::{Entry, MAX_BYTES, Table, Value, parse_json, parse_toml};
use super::report::{Import, Section, number};
use super::script::ScriptFamily;
use crate::fsutil::regular;
use serde_json::json;
use std::path::Path;

/// Prompts of a file.
const MAX_PROMPTS: usize = 10_000;

/// The prompts of a config: a file, or the text itself, as the kohya GUI has it.
pub(super) enum Prompts {
    File(String),
    Text(String),
}

/// A prompt with its settings, by sd-scripts' names.
#[derive(Default)]
struct Prompt {
    text: String,
    settings: Vec<(&'static str, f64)>,
    negative: Option<String>,
}

/// The `sample` section.
pub(super) fn sample(import: &mut Import<'_>, prompts: Option<Prompts>, every: u64) -> Section {
    let is_flux = import.script.family() == ScriptFamily::Flux;
    let mut section = Section::new();
    section.insert("sampler".into(), json!(sampler(import)));
    section.insert("sample_every".into(), json!(every));
    section.insert("width".into(), json!(512));
    section.insert("height".into(), json!(512));
    section.insert("seed".into(), json!(-1));
    section.insert("sample_steps".into(), json!(if is_flux { 20 } else { 30 }));
    section.insert("guidance_scale".into(), number(if is_flux { 3.5 } else { 7.5 }));
    let read = match prompts {
        Some(prompts) => read(import, prompts),
        None => {
            let options = ["sample_every_n_epochs", "sample_every_n_steps", "sample_at_first"];
            let option = options.into_iter().find(|option| import.settings.is_set(option));
            import.error(
                option.unwrap_or("sample_prompts"),
                "samples are asked for, but no prompts are given: set sample_prompts, or remove this option",
            );
            Vec::new()
        }
    };
    let samples: Vec<serde_json::Value> = read.into_iter().map(|prompt| entry(import, prompt, is_flux)).collect();
    section.insert("samples".into(), samples.into());
    section
}

fn entry(import: &mut Import<'_>, prompt: Prompt, is_flux: bool) -> serde_json::Value {
    let mut entry = Section::new();
    entry.insert("prompt".into(), json!(prompt.text));
    let mut has_cfg = false;
    for (name, value) in prompt.settings {
        let key = match name {
            // With FLUX.1, `scale` is that of true CFG, which aitk does not have.
            "scale" if is_flux => {
                has_cfg |= value != 1.0;
                continue;
            }
            "guidance_scale" if !is_flux => continue,
            "scale" | "guidance_scale" => "guidance_scale",
            other => other,
        };
        entry.insert(key.into(), number(value));
    }
    if has_cfg {
        import.note(
            "sample_prompts",
            "samples of FLUX.1 are made without CFG: `--l` has no effect (`--g` is the guidance)",
        );
    }
    if let Some(negative) = prompt.negative.filter(|_| !is_flux) {
        entry.insert("neg".into(), json!(negative));
    }
    entry.into()
}

/// `sample.sampler`. One that aitk lacks is replaced: samples do not change the training.
fn sampler(import: &mut Import<'_>) -> &'static str {
    if import.script.is_flow() {
        return "flowmatch";
    }
    let name = import.settings.text("sample_sampler").unwrap_or("ddim");
    let (ours, is_same) = match name {
        "pndm" => ("pndm", true),
        "lms" => ("lms", true),
        "euler" => ("euler", true),
        "euler_a" => ("euler_a", true),
        "dpmsolver" => ("dpmsolver", true),
        "dpmsolver++" => ("dpmsolver++", true),
        "dpmsingle" => ("dpmsingle", true),
        "dpm_2" => ("dpm_2", true),
        "dpm_2_a" => ("dpm_2_a", true),
        // sd-scripts uses the schedulers without Karras sigmas for these names too.
        "k_lms" => ("lms", true),
        "k_euler" => ("euler", true),
        "k_euler_a" => ("euler_a", true),
        "k_dpm_2" => ("dpm_2", true),
        "k_dpm_2_a" => ("dpm_2_a", true),
        "heun" => ("dpmsolver++", false),
        _ => ("ddim", true),
    };
    if !is_same {
        import.note(
            "sample_sampler",
            format!("aitk has no {name} for this model: samples are made with {ours}"),
        );
    }
    ours
}

fn read(import: &mut Import<'_>, prompts: Prompts) -> Vec<Prompt> {
    let (text, file) = match prompts {
        Prompts::Text(text) => (text, "prompts.txt".to_owned()),
        Prompts::File(file) => match regular::read_text(&import.directory.join(&file), MAX_BYTES as u64) {
            Ok(text) => (text, file),
            Err(error) => {
                import.error(
                    "sample_prompts",
                    format!("{} cannot be read: {error}", file.escape_debug()),
                );
                return Vec::new();
            }
        },
    };
    let ending = Path::new(&file)
        .extension()
        .and_then(|ending| ending.to_str())
        .unwrap_or("");
    let found = match ending {
        "txt" => Ok(lines(import, &text)),
        "toml" => parse_toml(&text, &file).map(|table| of_toml(import, &table)),
        // A list is not an object, so it becomes one.
        "json" => parse_json(&format!("{{\"prompts\":{text}}}"), &file).map(|table| of_list(import, &table)),
        _ => {
            import.error(
                "sample_prompts",
                format!("{}: expected a .txt, .toml or .json file", file.escape_debug()),
            );
            return Vec::new();
        }
    };
    let found = match found {
        Ok(found) => found,
        Err(error) => {
            import.errors.push(error);
            return Vec::new();
        }
    };
    if found.is_empty() {
        import.error("sample_prompts", format!("{} has no prompts", file.escape_debug()));
    } else if found.len() > MAX_PROMPTS {
        import.error(
            "sample_prompts",
            format!("{} prompts are more than {MAX_PROMPTS}", found.len()),
        );
    }
    found
}

fn lines(import: &mut Import<'_>, text: &str) -> Vec<Prompt> {
    let lines = text
        .lines()
        .filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
    lines.map(|line| of_line(import, line.trim())).collect()
}

/// A prompt with flags such as `--w 768 --n blurry`.
fn of_line(import: &mut Import<'_>, line: &str) -> Prompt {
    let mut parts = line.split(" --");
    let mut prompt = Prompt {
        text: parts.next().unwrap_or("").to_owned(),
        ..Prompt::default()
    };
    for part in parts {
        let (flag, value) = part.split_once(' ').unwrap_or((part, ""));
        let flag = flag.to_lowercase();
        let name = match flag.as_str() {
            "w" => "width",
            "h" => "height",
            "d" => "seed",
            "s" => "sample_steps",
            "l" => "scale",
            "g" => "guidance_scale",
            "n" => {
                prompt.negative = Some(value.to_owned());
                continue;
            }
            _ => {
                let shown: String = flag.chars().take(20).collect();
                import.note(
                    "sample_prompts",
                    format!("the flag --{} is ignored", shown.escape_debug()),
                );
                continue;
            }
        };
        let leading: String = value.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
        if let Ok(number) = leading.parse() {
            prompt.set(name, number);
        }
    }
    prompt
}

impl Prompt {
    fn set(&mut self, name: &'static str, value: f64) {
        let value = match name {
            "sample_steps" => value.clamp(1.0, 1000.0),
            _ => value,
        };
        self.settings.push((name, value));
    }

    /// Sets what a key of a prompt says. False if the key is unknown, or its value is of another type.
    fn add(&mut self, key: &str, value: &Value) -> bool {
        const NAMES: [&str; 6] = ["width", "height", "seed", "sample_steps", "scale", "guidance_scale"];
        match (key, value) {
            ("prompt", Value::Text(text)) => self.text.clone_from(text),
            ("negative_prompt", Value::Text(text)) => self.negative = Some(text.clone()),
            _ => match (NAMES.iter().find(|name| **name == key), value.as_number()) {
                (Some(name), Some(number)) => self.set(name, number),
                _ => return false,
            },
        }
        true
    }
}

/// A prompt of these keys; others are reported.
fn of_keys<'a>(import: &mut Import<'_>, entries: impl Iterator<Item = &'a Entry>) -> Prompt {
    let mut prompt = Prompt::default();
    for Entry { key, value, .. } in entries {
        if !prompt.add(key, value) {
            let key = super::settings::shortened(key);
            import.note("sample_prompts", format!("`{key}` of a prompt is ignored"));
        }
    }
    prompt
}

/// `[prompt]` with what all have, and `[[prompt.subset]]`.
fn of_toml(import: &mut Import<'_>, table: &Table) -> Vec<Prompt> {
    let Some(Value::Table(common)) = table
        .iter()
        .find(|entry| entry.key == "prompt")
        .map(|entry| &entry.value)
    else {
        return Vec::new();
    };
    let subsets = common
        .iter()
        .find(|entry| entry.key == "subset")
        .map(|entry| &entry.value);
    let Some(Value::List(subsets)) = subsets else {
        return Vec::new();
    };
    let common = common.iter().filter(|entry| entry.key != "subset");
    let mut prompts = Vec::new();
    for subset in subsets {
        let own: &[Entry] = if let Value::Table(own) = subset { own } else { &[] };
        prompts.push(of_keys(import, common.clone().chain(own)));
    }
    prompts
}

fn of_list(import: &mut Import<'_>, table: &Table) -> Vec<Prompt> {
    let Some(Value::List(items)) = table.first().map(|entry| &entry.value) else {
        return Vec::new();
    };
    let mut prompts = Vec::new();
    for item in items {
        match item {
            Value::Text(line) => prompts.push(of_line(import, line)),
            Value::Table(table) => prompts.push(of_keys(import, table.iter())),
            _ => {}
        }
    }
    prompts
}
