//! Generates jobs with one hostile value, from a seed.

use aitk_common::job::schema::SectionInfo;
use aitk_common::job::{self, Format, JobSpec, LoadOptions, SupportLevel};
use serde_json::{Value, json};
use std::path::Path;

/// Random numbers from a seed (SplitMix64, by Sebastiano Vigna).
pub(super) struct Rng(pub(super) u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    fn choose<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }
}

/// The inputs that every valid job may name.
pub(super) const INPUTS: [&str; 8] = [
    "model",
    "tuned",
    "flux",
    "data",
    "masks",
    "controls",
    "words.txt",
    "lora.safetensors",
];

const CONFIGS: [&str; 9] = [
    "job: extension
config:
  name: base
  process:
    - type: sd_trainer
      training_folder: out
      trigger_word: w
      network: {type: lora, linear: 2, pretrained_lora_path: lora.safetensors}
      save: {save_every: 1, dtype: float32}
      datasets:
        - {folder_path: data, mask_path: masks, random_triggers: words.txt, resolution: 64, cache_latents_to_disk: true}
      train: {steps: 1, dtype: float32, skip_first_sample: true, ema_config: {use_ema: true}}
      model: {name_or_path: model, vae_path: model, arch: sd1}
      sample: {width: 64, height: 64, sample_steps: 1, samples: [{prompt: 'a [trigger] --n dark'}]}
meta: {name: '[name]'}
cluster: {memory_budget: 768MiB, labels: {zone: x}, after: []}
",
    "job: extension
config:
  name: base
  process:
    - type: sd_trainer
      training_folder: out
      network: {type: lora, linear: 2}
      datasets: [{folder_path: data, control_path: [controls], resolution: 64, cache_latents_to_disk: true}]
      train: {steps: 1, dtype: float32, noise_scheduler: flowmatch, disable_sampling: true}
      model: {name_or_path: flux, arch: flux_kontext}
      sample: {sampler: flowmatch, width: 64, height: 64, sample_steps: 1, samples: [{prompt: a, ctrl_img: controls}]}
cluster: {memory_budget: 768MiB}
",
    "job: generate
config:
  name: base
  process:
    - type: to_folder
      output_folder: out
      model: {name_or_path: model, lora_path: lora.safetensors, dtype: float32}
      generate: {prompts: words.txt, width: 64, height: 64, sample_steps: 1, prompt_file: true, neg: dark}
cluster: {memory_budget: 768MiB}
",
    "job: extension
config:
  name: base
  process:
    - type: batch_img2img
      output_folder: out
      copy_inputs_to: copies
      model: {name_or_path: model, dtype: float32}
      datasets: [{folder_path: data, resolution: 64, default_caption: a cat}]
      generate: {sample_steps: 2}
cluster: {memory_budget: 768MiB}
",
    "job: generate
config:
  name: base
  process:
    - type: lm_generate
      output_folder: out
      model: {name_or_path: model, dtype: float32, lora_path: lora.safetensors, lora_weight: 0.5}
      generate: {prompts: words.txt, fill: [{prefix: a, suffix: b}], stop: [x], temperature: 0.5, top_k: 3, max_new_tokens: 2}
cluster: {memory_budget: 768MiB}
",
    "job: extension
config:
  name: base
  process:
    - type: lm_trainer
      training_folder: out
      model: {name_or_path: model, dtype: float32}
      network: {type: lora, linear: 2, only_if_contains: [q_proj]}
      datasets: [{path: data, include: ['*.txt'], repeats: 2}]
      context: 32
      fim_rate: 0.5
      validation: {share: 0.5, every: 2, max_rows: 2}
      train: {steps: 2, lr_scheduler: wsd, decay_steps: 1, warmup_steps: 1, min_lr: 1e-6}
      save: {save_every: 1, max_step_saves_to_keep: 1}
      sample: {prompts: [x], sample_every: 1, max_new_tokens: 2}
cluster: {memory_budget: 768MiB}
",
    "job: mod
config:
  name: base
  process:
    - type: lm_export
      output_folder: out
      model: {name_or_path: model, lora_path: lora.safetensors, lora_weight: 0.5}
      save: {format: gguf, dtype: q8_0}
cluster: {memory_budget: 768MiB}
",
    "job: extract
config:
  name: base
  base_model: model
  extract_model: tuned
  output_folder: out
  process:
    - {type: lora, filename: '[name].safetensors', mode: ratio, linear: 0.5}
    - {type: locon, output_path: out/x.safetensors, linear: 2, conv: 1}
cluster: {memory_budget: 768MiB}
",
    "job: mod
config:
  name: base
  process:
    - {type: rescale_lora, input_path: lora.safetensors, output_path: out/y.safetensors, current_weight: 2, target_weight: 1}
cluster: {memory_budget: 768MiB}
",
];

/// The parts that jobs are generated from.
pub(super) struct JobGenerator {
    bases: Vec<Value>,
    /// Every name that is a valid value of some key.
    names: Vec<&'static str>,
    /// Hostile texts.
    texts: Vec<String>,
}

fn collect_names(section: &SectionInfo, names: &mut Vec<&'static str>) {
    for field in &section.fields {
        names.extend(
            field
                .values
                .iter()
                .filter(|(_, status)| matches!(status, SupportLevel::Works))
                .map(|(name, _)| *name),
        );
        if let Some(nested) = &field.nested {
            collect_names(nested, names);
        }
    }
}

impl JobGenerator {
    /// `canary` is a folder that no job may touch, `up` its path relative to an attempt's folder, `pipe` a pipe
    /// without a writer.
    pub(super) fn new(canary: &Path, up: &str, pipe: &Path) -> Self {
        let bases = CONFIGS.iter().map(|text| {
            let loaded = job::parse(text, Format::Yaml, Some("job.yaml"), &LoadOptions::default()).unwrap();
            let mut json = serde_json::to_value(&loaded.spec).unwrap();
            // A few positions are enough as targets.
            let places = json["positions"].as_object_mut().unwrap();
            while places.len() > 3 {
                let last = places.keys().next_back().unwrap().clone();
                places.remove(&last);
            }
            json
        });
        let bases: Vec<Value> = bases.collect();
        let mut names = Vec::new();
        for section in [
            job::process::TrainerProcess::describe(),
            job::process::GenerateProcess::describe(),
            job::process::Img2ImgProcess::describe(),
            job::lm_trainer::LmTrainerProcess::describe(),
            job::lm_generate::LmGenerateProcess::describe(),
            job::lm_export::LmExportProcess::describe(),
            job::extract::ExtractProcess::describe(),
            job::extract::RescaleLoraProcess::describe(),
        ] {
            collect_names(&section, &mut names);
        }
        let canary = canary.display();
        let mut texts: Vec<String> = [
            "",
            " ",
            ".",
            "..",
            "/",
            "\0",
            "a\0b",
            "a\nb",
            "\u{1b}[2J",
            "../../x",
            "a/../../../x",
            "..\\..\\x",
            "C:\\x",
            "\\\\host\\x",
            "~",
            "~/x",
            "~root/x",
            "$HOME/x",
            "${HOME}",
            "$(id)",
            "`id`",
            "|id",
            "-x",
            "--help",
            "CON",
            "nul.txt",
            "x.",
            " x",
            "x:y",
            "%2e%2e%2fx",
            "..%2fx",
            "%00",
            "\u{ff0e}\u{ff0e}\u{ff0f}x",
            "..\u{2215}x",
            "\u{2025}/x",
            "e\u{301}",
            "\u{202e}gnp.exe",
            "\u{feff}x",
            "\u{200b}",
            "/etc/passwd",
            "/etc/shadow",
            "/proc/self/environ",
            "/proc/self/mem",
            "/proc/self/root",
            "/proc/1/environ",
            "/dev/zero",
            "/dev/stdin",
            "/dev/fd/0",
            "/dev/urandom",
            "/sys/kernel",
            "file:///etc/passwd",
            "http://127.0.0.1/x",
            "s3://bucket/x",
            "org/name",
            "org/../name",
            "org--a/name",
            "../org",
            "a/b/c",
            ".aitk",
            ".tmp-x",
            "model/../..",
            "data/..",
            "model\0",
            "words.txt/..",
            "main",
            "a --ctrl_img /etc/passwd",
            "a --seed 99999999999999999999",
            "a --w 4294967295",
            "x.ckpt",
            "x.safetensors",
            "name[0]",
        ]
        .map(str::to_owned)
        .into();
        for path in ["secret.txt", "home/.docker/config.json", "model", "new-file", "absent"] {
            texts.push(format!("{canary}/{path}"));
            texts.push(format!("{up}/{path}"));
            texts.push(format!("a --ctrl_img {canary}/{path}"));
        }
        texts.push(canary.to_string());
        texts.push(up.to_owned());
        texts.push(pipe.display().to_string());
        texts.push("x".repeat(100_000));
        texts.push("../".repeat(2_000));
        texts.push(format!("/{}", "a/".repeat(5_000)));
        Self { bases, names, texts }
    }

    /// A job that passes, with up to three values changed from its config.
    pub(super) fn valid(&self, rng: &mut Rng) -> Value {
        let mut job = rng.choose(&self.bases).clone();
        for _ in 0..rng.below(4) {
            let mut other = job.clone();
            let mut leaves = Vec::new();
            collect_pointers(&other["process"], "/process", &mut leaves);
            let value = other.pointer_mut(rng.choose(&leaves).as_str()).unwrap();
            *value = match value {
                Value::Bool(on) => json!(!*on),
                Value::Number(_) => rng
                    .choose(&[json!(0), json!(1), json!(2), json!(3), json!(0.5), json!(1e-3)])
                    .clone(),
                Value::String(_) => json!(rng.choose(&self.names)),
                _ => json!(null),
            };
            if JobSpec::from_value(&other).is_ok_and(|spec| spec.unsupported().is_ok()) {
                job = other;
            }
        }
        job
    }

    /// Makes one value of a job hostile. Also returns which one, and the new value.
    pub(super) fn hostile(&self, mut job: Value, rng: &mut Rng) -> (Value, String) {
        let mut all = Vec::new();
        collect_pointers(&job, "", &mut all);
        let pointer = rng.choose(&all).clone();
        let into = self.hostile_value(job.pointer(&pointer).unwrap(), rng);
        let mut new_value = into.to_string();
        if let Some((cut, _)) = new_value.char_indices().nth(120) {
            new_value.truncate(cut);
        }
        // In some cases the key is removed or replaced instead.
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        match (rng.below(16), job.pointer_mut(parent)) {
            (0, Some(Value::Object(map))) => {
                map.remove(key);
            }
            (1, Some(Value::Object(map))) => {
                map.insert(rng.choose(&self.texts).clone(), into);
            }
            _ => *job.pointer_mut(&pointer).unwrap() = into,
        }
        (job, format!("{pointer} -> {new_value}"))
    }

    fn hostile_value(&self, value: &Value, rng: &mut Rng) -> Value {
        // Mostly of the same type, so that it passes the first check.
        let kind = match rng.below(8) {
            0 => rng.below(6),
            _ => match value {
                Value::String(_) => 0,
                Value::Number(_) => 1,
                Value::Array(_) => 2,
                Value::Object(_) => 3,
                Value::Bool(_) => 4,
                Value::Null => rng.below(3),
            },
        };
        match kind {
            0 => json!(rng.choose(&self.texts)),
            1 => rng
                .choose(&[
                    json!(u64::MAX),
                    json!(i64::MAX),
                    json!(i64::MIN),
                    json!(u32::MAX),
                    json!(1_u64 << 53),
                    json!(1 << 20),
                    json!(65_537),
                    json!(-1),
                    json!(0),
                    json!(-0.0),
                    json!(0.5),
                    json!(1e308),
                    json!(-1e308),
                    json!(5e-324),
                    json!(16_384),
                    json!(100_000),
                ])
                .clone(),
            2 => {
                let item = value
                    .as_array()
                    .and_then(|items| items.first().cloned())
                    .unwrap_or_else(|| json!(rng.choose(&self.texts)));
                let many = *rng.choose(&[0, 1, 2, 65, 1_000, 20_000]);
                // Fewer large items, so that the message can still be sent.
                let many = if item.to_string().len() > 200 {
                    many.min(100)
                } else {
                    many
                };
                Value::Array(vec![item; many])
            }
            3 => match rng.below(3) {
                0 => (0..100).fold(json!(1), |inner, _| json!({ "a": inner })),
                1 => Value::Object((0..5_000).map(|number| (format!("k{number}"), json!(number))).collect()),
                _ => json!({ "rare": {"steps": 1}, "name_or_path": "/etc/passwd", "file": "/etc/passwd" }),
            },
            4 => rng
                .choose(&[json!(true), json!(false), json!("true"), json!(2), json!([])])
                .clone(),
            _ => json!(null),
        }
    }
}

/// Collects the JSON pointers of all values in a tree.
fn collect_pointers(value: &Value, path: &str, out: &mut Vec<String>) {
    let mut below = |key: &str, value: &Value| {
        let path = format!("{path}/{}", key.replace('~', "~0").replace('/', "~1"));
        out.push(path.clone());
        collect_pointers(value, &path, out);
    };
    match value {
        Value::Object(map) => map.iter().for_each(|(key, value)| below(key, value)),
        Value::Array(items) => items
            .iter()
            .enumerate()
            .for_each(|(index, value)| below(&index.to_string(), value)),
        _ => {}
    }
}
