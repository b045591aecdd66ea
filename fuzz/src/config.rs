//! Any bytes as a job config: parsing never panics, and a parsed job stays the same when it is serialised and read again.

use super::unstructured::Unstructured;
use aitk_common::job::{Format, JobSpec, LoadOptions, parse};
use aitk_common::plan::demand::Demand;
use std::fmt::Write as _;
use std::sync::OnceLock;

const FORMATS: [Format; 3] = [Format::Yaml, Format::Json, Format::Jsonc];

/// The first byte selects the format, whether the name is overridden, and whether the other bytes are the text or mutations of
/// a valid config.
pub fn run(data: &[u8]) {
    let mut input = Unstructured::new(data);
    let first = input.byte();
    let (text, format) = if first & 0x80 == 0 {
        let Ok(text) = str::from_utf8(input.rest()) else { return };
        (text.to_owned(), FORMATS[usize::from(first & 0x3f) % 3])
    } else {
        (mutate_valid_config(&mut input), Format::Yaml)
    };
    let options = LoadOptions {
        name_override: (first & 0x40 != 0).then_some("given"),
        env: &|name| name.starts_with('A').then(|| "value".to_owned()),
        ..LoadOptions::default()
    };
    match parse(&text, format, Some("fuzz.yaml"), &options) {
        Err(error) => assert!(!error.to_string().trim().is_empty(), "an empty error message"),
        Ok(job) => {
            let _ = job.spec.unsupported().to_string();
            let _ = job.spec.inputs();
            // As the coordinator stores it.
            let text = serde_json::to_vec(&job.spec).expect("a job can be serialised");
            let value: serde_json::Value = serde_json::from_slice(&text).expect("a serialised job is valid JSON");
            if let Some(demand) = Demand::of_job(&value, None, &[]) {
                assert!(demand.passes().is_finite(), "{demand:?}");
            }
            let back: JobSpec = serde_json::from_slice(&text).expect("a serialised job can be read");
            // Their JSON is compared, because NaN is not equal to itself.
            if serde_json::to_vec(&back).expect("a job can be serialised") != text {
                panic!("{:#?}\nbecame\n{back:#?}", job.spec);
            }
            // A coordinator accepts every job that parsing returns.
            if let Err(error) = JobSpec::from_value(&value) {
                panic!("{:#?}\nis refused: {error}", job.spec);
            }
        }
    }
}

/// Short valid configs that are mutated.
const VALID: [&str; 3] = [
    "job: extension
config:
  name: one
  process:
    - type: sd_trainer
      training_folder: out
      trigger_word: w
      network:
        type: lora
        linear: 4
      save:
        save_every: 10
      datasets:
        - folder_path: in
          resolution: 512
      train:
        steps: 20
        lr: 1e-4
        optimizer: adamw
      model:
        name_or_path: m
        arch: sd1
      sample:
        sampler: ddpm
        samples:
          - prompt: a --w 512
meta:
  name: '[name]'
cluster:
  priority: 1
",
    "job: generate
config:
  name: two
  process:
    - type: to_folder
      output_folder: out
      generate:
        sampler: ddim
        width: 512
        prompts:
          - a cat --seed 1
      model:
        name_or_path: m
",
    "job: extension
config:
  name: three
  process:
    - type: batch_img2img
      output_folder: out
      model:
        name_or_path: m
      datasets:
        - folder_path: in
          resolution: [512, 768]
",
];

/// Replacements for values.
const VALUES: [&str; 32] = [
    "",
    "null",
    "0",
    "-1",
    "1e400",
    "-.inf",
    ".nan",
    "4294967296",
    "18446744073709551615",
    "0.5",
    "true",
    "off",
    "''",
    "'[name]'",
    "${A}",
    "'${B'",
    "[]",
    "{}",
    "[1, 2]",
    "[[0, 1], [a, b]]",
    "{a: 1}",
    "sdxl",
    "flux",
    "prodigy",
    "cuda",
    "float32",
    "2h30m",
    "8GB",
    "2026-01-01T00:00:00Z",
    "&a x",
    "*a",
    "|-",
];

/// Every config key, from the generated documentation page.
fn keys() -> &'static Vec<&'static str> {
    static KEYS: OnceLock<Vec<&'static str>> = OnceLock::new();
    KEYS.get_or_init(|| {
        let mut keys: Vec<&str> = include_str!("../../docs/config-keys.md")
            .lines()
            .filter_map(|line| line.strip_prefix("| `")?.split_once("` |"))
            .map(|(key, _)| key)
            .collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    })
}

/// A valid config with a few lines changed, duplicated, removed or inserted.
fn mutate_valid_config(input: &mut Unstructured<'_>) -> String {
    let mut lines: Vec<String> = input.pick(&VALID).lines().map(str::to_owned).collect();
    for _ in 0..8 {
        if input.is_empty() || lines.is_empty() {
            break;
        }
        let at = input.below(lines.len());
        let mutation = input.byte() % 8;
        match mutation {
            0 => drop(lines.remove(at)),
            1 => lines.insert(at, lines[at].clone()),
            2 => lines[at].insert_str(0, input.pick(&[" ", "  ", "- ", "#", "\t"])),
            _ => {
                let indent: String = lines[at].chars().take_while(|c| matches!(c, ' ' | '-')).collect();
                let key = if mutation < 5 {
                    lines[at]
                        .split(':')
                        .next()
                        .unwrap_or("")
                        .trim_start_matches([' ', '-'])
                        .to_owned()
                } else {
                    let all = keys();
                    let index = usize::from(input.byte()) << 8 | usize::from(input.byte());
                    all[index % all.len()].to_owned()
                };
                let value = if input.one_in(8) {
                    input.chars()
                } else {
                    (*input.pick(&VALUES)).to_owned()
                };
                let line = format!("{indent}{key}: {value}");
                if mutation < 6 {
                    lines[at] = line;
                } else {
                    lines.insert(at + 1, line.replacen('-', " ", 1));
                }
            }
        }
    }
    lines.iter().fold(String::new(), |mut text, line| {
        let _ = writeln!(text, "{line}");
        text
    })
}
