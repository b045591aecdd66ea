//! `model` of a training of a code model.

use crate::job::declare::section;
use crate::job::dtype::DType;
use crate::job::schema::{PresentKeys, ReadContext, SupportReport, join};
use crate::plan::qtype::QType;

section! {
    /// A code model: a folder as Hugging Face has it, or a GGUF file.
    pub struct LmTrainerModelConfig("model") {
        /// The folder of the model: `config.json`, `*.safetensors` and, for texts, `tokenizer.json`; or `ORG/NAME` on Hugging Face; or, under
        /// a LoRA, a `.gguf` file, whose bits it keeps.
        name_or_path [required]: String = String::new(), Works, input LanguageModel;
        /// Train a new model: its sizes are those of `config.json` in the folder, its weights are drawn from the seed as transformers draws
        /// them (`initializer_range`), and weights in the folder are not read.
        from_config: bool = false, Works;
        /// Number format of the arithmetic. On a CPU it is float32, with products in bfloat16 where the CPU has
        /// AVX512-BF16 (docs/gpus.md). Without a `network`, a GPU computes in float32 too, or in bfloat16 with
        /// stochastic rounding.
        dtype: DType = DType::BF16, Works;
        /// Quantise the linear layers of the frozen model under a LoRA.
        quantize: bool = false, Works;
        /// How they are quantised: `nf4`, `int8`, `qint8`, `float8`, `qfloat8`, `q8_0`, `q4_k`.
        qtype: String = "nf4".into(), DependsOn("quantize");
    }
    finish = finish;
    check = check;
}

fn finish(model: &mut LmTrainerModelConfig, present: &PresentKeys, cx: &mut ReadContext) {
    if present.has("name_or_path") && model.name_or_path.trim().is_empty() {
        cx.missing_at("name_or_path", "needs the path of the model's folder, or ORG/NAME");
    }
}

fn check(model: &LmTrainerModelConfig, path: &str, report: &mut SupportReport) {
    if model.quantize && QType::from_name(&model.qtype).is_none() {
        let message = format!(
            "`{}` does not work yet; expected one of {}",
            model.qtype,
            QType::names()
        );
        report.error(join(path, "qtype"), message);
    }
}

impl LmTrainerModelConfig {
    /// How the frozen model is quantised. `None`: it is not.
    #[must_use]
    pub fn quantization(&self) -> Option<QType> {
        QType::from_name(&self.qtype).filter(|_| self.quantize)
    }
}
