//! `lm_export`: writes a language model as GGUF for llama.cpp, or as a Hugging Face folder, with LoRAs merged into it.

use super::declare::{choices, section};
use super::lm_lora::{LmLoraConfig, all_loras, check_loras};
use super::process_type::ProcessType;
use super::schema::{PresentKeys, ReadContext};

choices! {
    /// The format of an exported language model.
    pub enum LmExportFormat("export format") {
        /// One file, as llama.cpp and the programs built on it load it.
        Gguf = "gguf", Works;
        /// A folder, as transformers loads it.
        Hf = "hf", Works;
    }
}

choices! {
    /// The number format of the matrices of an exported language model.
    pub enum LmExportType("export dtype") {
        /// 32-bit float.
        F32 = "f32" | "float32" | "fp32", Works;
        /// 16-bit IEEE float.
        F16 = "f16" | "float16" | "fp16", Works;
        /// 16-bit brain float.
        BF16 = "bf16" | "bfloat16", Works;
        /// GGUF: 8 bits, a scale for each 32 numbers.
        Q8_0 = "q8_0", Works;
        /// GGUF: 4 bits in blocks of 256, with 6 bits for the matrices that lose most.
        Q4K = "q4_k" | "q4_k_m", Works;
    }
}

section! {
    /// The model that is exported.
    pub struct LmExportModelConfig("model") {
        /// Folder of the model: `config.json`, `tokenizer.json` and `.safetensors` files; or `ORG/NAME` on Hugging Face.
        name_or_path [required]: String = String::new(), Works, input Model;
        /// A LoRA that is merged into the model: a folder as peft has it, or a `.safetensors` file.
        lora_path: Option<String> = None, Works, input Lora;
        /// Strength of the LoRA.
        lora_weight: f64 = 1.0, Works;
        /// LoRAs that are merged beside that of `lora_path`, each with its strength. Their changes are added.
        loras: Vec<LmLoraConfig> = Vec::new(), Works;
    }
    finish = finish_model;
}

impl LmExportModelConfig {
    /// The paths of all LoRAs with their strengths: that of `lora_path`, then those of `loras`.
    #[must_use]
    pub fn all_loras(&self) -> Vec<(&str, f64)> {
        all_loras(self.lora_path.as_deref(), self.lora_weight, &self.loras)
    }
}

fn finish_model(model: &mut LmExportModelConfig, _present: &PresentKeys, cx: &mut ReadContext) {
    check_loras(model.lora_path.as_deref(), model.lora_weight, &model.loras, cx);
}

section! {
    /// What is written.
    pub struct LmExportSaveConfig("save") {
        /// The format.
        format: LmExportFormat = LmExportFormat::Gguf, Works;
        /// Number format of the matrices. In GGUF, vectors and tables of positions are float32. `hf` has `f32`, `f16` and `bf16`.
        dtype: Option<LmExportType> = None, Works, shown "`f16` of GGUF, `bf16` of `hf`";
    }
    finish = finish_save;
}

fn finish_save(save: &mut LmExportSaveConfig, _present: &PresentKeys, cx: &mut ReadContext) {
    let is_quantized = matches!(save.dtype, Some(LmExportType::Q8_0 | LmExportType::Q4K));
    if save.format == LmExportFormat::Hf && is_quantized {
        cx.error_at(
            "dtype",
            "is a format of GGUF: use `format: gguf`, or `f32`, `f16` or `bf16`",
        );
    }
}

impl LmExportSaveConfig {
    /// The number format: `dtype`, or that of the format.
    #[must_use]
    pub fn export_type(&self) -> LmExportType {
        self.dtype.unwrap_or(match self.format {
            LmExportFormat::Gguf => LmExportType::F16,
            LmExportFormat::Hf => LmExportType::BF16,
        })
    }
}

section! {
    /// Exports a language model (`lm_export`).
    pub struct LmExportProcess("process") {
        /// `lm_export`.
        kind as "type": ProcessType = ProcessType::LmExport, Works, shown "required";
        /// Name of the process.
        name: Option<String> = None, Accepted("results are named by `config.name` and `save.dtype`");
        /// Folder for the result: `NAME-DTYPE.gguf`, or the folder `NAME-DTYPE`.
        output_folder [required]: String = String::new(), Works;
        /// Device to use; ignored.
        device: Option<String> = None, Accepted("models are exported on the CPU");
        /// The model.
        model [required]: LmExportModelConfig = LmExportModelConfig::default(), Works;
        /// What is written.
        save: LmExportSaveConfig = LmExportSaveConfig::default(), Works;
    }
}

impl LmExportProcess {
    /// The name of the file or folder that it writes, for a job of this name.
    #[must_use]
    pub fn result_name(&self, job: &str) -> String {
        let dtype = self.save.export_type().name();
        match self.save.format {
            LmExportFormat::Gguf => format!("{job}-{dtype}.gguf"),
            LmExportFormat::Hf => format!("{job}-{dtype}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::job::{Format, LoadOptions, ProcessKind, parse};

    fn read(keys: &str) -> Result<crate::job::JobSpec, String> {
        let text = format!(
            "job: mod\nconfig:\n  name: coder\n  process:\n    - type: lm_export\n      output_folder: out\n{keys}"
        );
        let loaded = parse(&text, Format::Yaml, Some("a.yaml"), &LoadOptions::default());
        loaded.map(|loaded| loaded.spec).map_err(|error| error.to_string())
    }

    fn result_name(keys: &str) -> String {
        let spec = read(keys).unwrap();
        assert_eq!(spec.unsupported(), Default::default());
        match &spec.process[0].kind {
            ProcessKind::LmExport(process) => process.result_name(&spec.name),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn results_are_named_by_their_number_format() {
        let model = "      model: {name_or_path: models/code, lora_path: out/coder}\n";
        assert_eq!(result_name(model), "coder-f16.gguf");
        assert_eq!(
            result_name(&format!("{model}      save: {{dtype: q4_k_m}}\n")),
            "coder-q4_k.gguf"
        );
        assert_eq!(
            result_name(&format!("{model}      save: {{format: hf}}\n")),
            "coder-bf16"
        );
        let inputs = read(model).unwrap().inputs();
        let paths: Vec<&str> = inputs.iter().map(|input| input.config_path.as_str()).collect();
        assert_eq!(paths, ["models/code", "out/coder"]);
        let several = "      model: {name_or_path: models/code, loras: [{path: a}, {path: b, weight: 0.5}]}\n";
        let inputs = read(several).unwrap().inputs();
        let paths: Vec<&str> = inputs.iter().map(|input| input.config_path.as_str()).collect();
        assert_eq!(paths, ["models/code", "a", "b"]);
    }

    #[test]
    fn formats_that_do_not_fit_and_keys_without_effect_are_refused() {
        for (keys, key) in [
            (
                "      model: {name_or_path: a}\n      save: {format: hf, dtype: q8_0}\n",
                "save.dtype",
            ),
            ("      model: {name_or_path: a, lora_weight: 0.5}\n", "lora_weight"),
            ("      model: {name_or_path: a}\n      save: {dtype: q3_k}\n", "q3_k"),
            ("      model: {lora_path: a}\n", "name_or_path"),
        ] {
            let error = read(keys).unwrap_err();
            assert!(error.contains(key), "{key}: {error}");
        }
    }
}
