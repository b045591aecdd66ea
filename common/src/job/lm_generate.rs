//! `lm_generate`: continues texts, or fills gaps in them, with a language model.

use super::declare::section;
use super::dtype::DType;
use super::limits::{MAX_COMPLETIONS, MAX_FILL_ITEMS, MAX_NEW_TOKENS, MAX_STOP_BYTES, MAX_STOPS, MAX_TEXT_BATCH};
use super::lm_lora::{LmLoraConfig, all_loras, check_loras};
use super::process_type::ProcessType;
use super::schema::{PresentKeys, ReadContext, SupportReport, join};
use super::values::TextSource;

section! {
    /// The language model of a process.
    pub struct LmGenerateModelConfig("model") {
        /// Folder of the model: `config.json`, `tokenizer.json` and `.safetensors` files; or `ORG/NAME` on Hugging Face; or a `.gguf` file.
        name_or_path [required]: String = String::new(), Works, input Model;
        /// Number format of the arithmetic. The CPU computes in float32, with products of more than 64 tokens in bfloat16 where it has
        /// AVX512-BF16, and keeps bfloat16 weights as they are.
        dtype: DType = DType::BF16, Works;
        /// A LoRA for the model: a folder as peft has it, or a `.safetensors` file.
        lora_path: Option<String> = None, Works, input Lora;
        /// Strength of the LoRA.
        lora_weight: f64 = 1.0, Works;
        /// LoRAs beside that of `lora_path`, each with its strength. Their changes are added.
        loras: Vec<LmLoraConfig> = Vec::new(), Works;
    }
    finish = finish_model;
}

impl LmGenerateModelConfig {
    /// The paths of all LoRAs with their strengths: that of `lora_path`, then those of `loras`.
    #[must_use]
    pub fn all_loras(&self) -> Vec<(&str, f64)> {
        all_loras(self.lora_path.as_deref(), self.lora_weight, &self.loras)
    }
}

fn finish_model(model: &mut LmGenerateModelConfig, _present: &PresentKeys, cx: &mut ReadContext) {
    check_loras(model.lora_path.as_deref(), model.lora_weight, &model.loras, cx);
}

section! {
    /// A gap between two texts.
    pub struct FillItem("fill") {
        /// The text before the gap.
        prefix: String = String::new(), Works;
        /// The text after the gap.
        suffix: String = String::new(), Works;
    }
}

section! {
    /// What `lm_generate` generates.
    pub struct LmGenerateConfig("generate") {
        /// Texts to continue, or a file: `.jsonl` with one object per line (`prompt`, or `prefix` and `suffix`), other files with one text
        /// per line.
        prompts: TextSource = TextSource::default(), Works, input PromptFile;
        /// Gaps to fill, for models that were trained to (fill in the middle). They follow the prompts.
        fill: Vec<FillItem> = Vec::new(), Works;
        /// The most tokens of a completion.
        max_new_tokens: u32 = 256, Works;
        /// Completions of each prompt.
        num_completions: u32 = 1, Works;
        /// 0: always the most probable token. Else logits are divided by it, and a token is drawn.
        temperature: f64 = 0.0, Works;
        /// Draw from this many of the most probable tokens; 0: from all.
        top_k: u32 = 0, Works;
        /// Draw from the fewest most probable tokens whose probabilities sum up to this.
        top_p: f64 = 1.0, Works;
        /// Draw from the tokens with at least this share of the largest probability.
        min_p: f64 = 0.0, Works;
        /// More than 1 makes tokens that occurred, also in the prompt, less probable.
        repetition_penalty: f64 = 1.0, Works;
        /// A completion ends before the first of these texts.
        stop: Vec<String> = Vec::new(), Works;
        /// Seed of the draws; -1: that of the job.
        seed: i64 = -1, Works;
        /// Texts that are generated at a time. A text does not depend on the others.
        batch_size: u32 = 1, Works;
        /// Write completed lines of the texts to the log while they are generated.
        stream: bool = true, Works;
    }
    finish = finish_generate;
    check = check_generate;
}

impl LmGenerateConfig {
    /// The file with the prompts, as the config has it.
    #[must_use]
    pub fn prompt_file(&self) -> Option<&str> {
        match &self.prompts {
            TextSource::File(file) if !file.is_empty() => Some(file),
            _ => None,
        }
    }
}

fn finish_generate(generate: &mut LmGenerateConfig, _present: &PresentKeys, cx: &mut ReadContext) {
    let is_empty = match &generate.prompts {
        TextSource::List(list) => list.is_empty(),
        TextSource::File(file) => file.is_empty(),
    };
    if is_empty && generate.fill.is_empty() {
        cx.error_at("prompts", "expected texts to continue, or `fill` with gaps to fill");
    }
    for (key, value, max) in [
        ("max_new_tokens", generate.max_new_tokens, MAX_NEW_TOKENS),
        ("num_completions", generate.num_completions, MAX_COMPLETIONS),
        ("batch_size", generate.batch_size, MAX_TEXT_BATCH),
    ] {
        cx.check_not_zero(key, value);
        cx.check_at_most(key, value, max);
    }
    cx.check_in_range("temperature", generate.temperature, 0.0..=100.0);
    cx.check_in_range("top_p", generate.top_p, 0.0..=1.0);
    if generate.top_p == 0.0 {
        cx.error_at(
            "top_p",
            "expected a number above 0: with 0 no token is left; for the most probable one use `temperature: 0`",
        );
    }
    cx.check_in_range("min_p", generate.min_p, 0.0..=1.0);
    cx.check_in_range("repetition_penalty", generate.repetition_penalty, 0.01..=100.0);
    if generate.seed < -1 {
        cx.error_at("seed", "expected -1, or a number from 0");
    }
    cx.check_item_count("fill", generate.fill.len(), MAX_FILL_ITEMS);
    for (index, item) in generate.fill.iter().enumerate() {
        if item.prefix.is_empty() && item.suffix.is_empty() {
            let message = "expected a `prefix`, a `suffix` or both: there is no text around this gap";
            cx.error_at(&format!("fill[{index}]"), message);
        }
    }
    cx.check_item_count("stop", generate.stop.len(), MAX_STOPS);
    for (index, text) in generate.stop.iter().enumerate() {
        if text.is_empty() || text.len() > MAX_STOP_BYTES {
            let message = format!("expected a text of 1 to {MAX_STOP_BYTES} bytes, found {}", text.len());
            cx.error_at(&format!("stop[{index}]"), message);
        }
    }
}

fn check_generate(generate: &LmGenerateConfig, path: &str, report: &mut SupportReport) {
    if generate.temperature > 0.0 {
        return;
    }
    for (key, is_set) in [
        ("top_k", generate.top_k != 0),
        ("top_p", generate.top_p != 1.0),
        ("min_p", generate.min_p != 0.0),
        ("seed", generate.seed != -1),
    ] {
        if is_set {
            let message = "has no effect with `temperature: 0`, which always takes the most probable token";
            report.warn(join(path, key), message.to_owned());
        }
    }
    if generate.num_completions > 1 {
        let message = "with `temperature: 0` all completions of a prompt are the same: set a temperature, or 1";
        report.error(join(path, "num_completions"), message.to_owned());
    }
}

section! {
    /// Continues texts, or fills gaps in them, with a language model (`lm_generate`).
    pub struct LmGenerateProcess("process") {
        /// `lm_generate`.
        kind as "type": ProcessType = ProcessType::LmGenerate, Works, shown "required";
        /// Name of the process.
        name: Option<String> = None, Accepted("completions go into `output_folder`");
        /// Folder for the completions.
        output_folder [required]: String = String::new(), Works;
        /// Device to use; ignored.
        device: Option<String> = None, Accepted("the scheduler assigns the device; `cluster.device` requests a kind");
        /// The model.
        model [required]: LmGenerateModelConfig = LmGenerateModelConfig::default(), Works;
        /// The texts to generate.
        generate [required]: LmGenerateConfig = LmGenerateConfig::default(), Works;
    }
}

#[cfg(test)]
mod tests {
    use crate::job::{Format, LoadOptions, ProcessKind, parse};

    fn job(generate: &str) -> String {
        format!(
            "job: generate\nconfig:\n  name: a\n  process:\n    - type: lm_generate\n      output_folder: out\n      model:\n        \
             name_or_path: models/code\n      generate:\n{generate}"
        )
    }

    fn read(generate: &str) -> Result<crate::job::LoadedJob, String> {
        let options = LoadOptions::default();
        parse(&job(generate), Format::Yaml, Some("a.yaml"), &options).map_err(|error| error.to_string())
    }

    #[test]
    fn texts_and_gaps_are_read_and_their_files_are_inputs() {
        let spec = read(
            "        prompts: [\"def add(a, b):\"]\n        fill:\n          - prefix: a\n            suffix: b\n",
        )
        .unwrap()
        .spec;
        assert_eq!(spec.unsupported(), Default::default());
        let inputs = |spec: &crate::job::JobSpec| -> Vec<String> {
            spec.inputs().into_iter().map(|input| input.config_path).collect()
        };
        assert_eq!(inputs(&spec), ["models/code"]);
        let spec = read("        prompts: tasks.jsonl\n").unwrap().spec;
        assert_eq!(inputs(&spec), ["models/code", "tasks.jsonl"]);
    }

    #[test]
    fn a_lora_is_an_input_and_its_strength_needs_it() {
        let with = |keys: &str| {
            let text = job("        prompts: [a]\n").replace("models/code", &format!("models/code{keys}"));
            let loaded = parse(&text, Format::Yaml, Some("a.yaml"), &LoadOptions::default());
            loaded.map(|loaded| loaded.spec).map_err(|error| error.to_string())
        };
        let spec = with("\n        lora_path: out/coder\n        lora_weight: 0.5").unwrap();
        let inputs = spec.inputs();
        let paths: Vec<&str> = inputs.iter().map(|input| input.config_path.as_str()).collect();
        assert_eq!(paths, ["models/code", "out/coder"]);
        let error = with("\n        lora_weight: 0.5").unwrap_err();
        assert!(error.contains("lora_weight") && error.contains("lora_path"), "{error}");
    }

    #[test]
    fn several_loras_are_inputs_with_strengths_of_their_own() {
        let read = |keys: &str| {
            let text = job("        prompts: [a]\n").replace("models/code", &format!("models/code{keys}"));
            let loaded = parse(&text, Format::Yaml, Some("a.yaml"), &LoadOptions::default());
            loaded.map(|loaded| loaded.spec).map_err(|error| error.to_string())
        };
        let all = "\n        lora_path: a\n        lora_weight: 2\n        loras:\n          - {path: b, weight: -0.5}\n          - path: c";
        let spec = read(all).unwrap();
        assert_eq!(spec.unsupported(), Default::default());
        let inputs = spec.inputs();
        let paths: Vec<&str> = inputs.iter().map(|input| input.config_path.as_str()).collect();
        assert_eq!(paths, ["models/code", "a", "b", "c"]);
        match &spec.process[0].kind {
            ProcessKind::LmGenerate(process) => {
                assert_eq!(process.model.all_loras(), [("a", 2.0), ("b", -0.5), ("c", 1.0)]);
            }
            other => panic!("{other:?}"),
        }
        for (keys, key) in [
            ("loras: [{weight: 1}]", "path"),
            ("loras: [{path: ''}]", "loras[0].path"),
            ("loras: [{path: a, weight: 1e30}]", "loras[0].weight"),
        ] {
            let error = read(&format!("\n        {keys}")).unwrap_err();
            assert!(error.contains("a.yaml:9") && error.contains(key), "{error}");
        }
        let many = ["{path: a}"; 17].join(", ");
        let error = read(&format!("\n        loras: [{many}]")).unwrap_err();
        assert!(error.contains("loras"), "{error}");
    }

    #[test]
    fn numbers_without_a_meaning_and_keys_without_effect_are_reported() {
        for (line, key) in [
            ("temperature: -1", "temperature"),
            ("top_p: 1.5", "top_p"),
            ("top_p: 0", "top_p"),
            ("fill: [{}]", "fill[0]"),
            ("min_p: 2", "min_p"),
            ("repetition_penalty: 0", "repetition_penalty"),
            ("max_new_tokens: 0", "max_new_tokens"),
            ("max_new_tokens: 100000000", "max_new_tokens"),
            ("batch_size: 0", "batch_size"),
            ("num_completions: 0", "num_completions"),
            ("seed: -2", "seed"),
            ("stop: ['']", "stop[0]"),
        ] {
            let error = read(&format!("        prompts: [a]\n        {line}\n")).unwrap_err();
            assert!(error.contains("a.yaml:11") && error.contains(key), "{error}");
        }
        assert!(read("        temperature: 1\n").unwrap_err().contains("`fill`"));
        let found = read("        prompts: [a]\n        top_k: 5\n")
            .unwrap()
            .spec
            .unsupported();
        assert!(
            found.errors.is_empty() && found.to_string().contains("a.yaml:11"),
            "{found}"
        );
        let found = read("        prompts: [a]\n        num_completions: 2\n")
            .unwrap()
            .spec
            .unsupported();
        assert_eq!(found.errors.len(), 1, "{found}");
        let found =
            read("        prompts: [a]\n        temperature: 0.8\n        top_k: 5\n        num_completions: 2\n");
        assert_eq!(found.unwrap().spec.unsupported(), Default::default());
    }
}
