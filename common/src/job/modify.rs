//! Processes that convert model files: `locon` and `lora` (extract), `rescale_lora` (mod).

use super::declare::{choices, section};
use super::dtype::DType;
use super::limits::MAX_FACTOR;
use super::process_type::ProcessType;
use super::schema::{PresentKeys, ReadContext};

choices! {
    /// How an extraction chooses ranks.
    pub enum ExtractMode("extract mode") {
        /// A fixed rank.
        Fixed = "fixed", Works;
        /// Singular values above a threshold.
        Threshold = "threshold", Works;
        /// Singular values above a share of the largest.
        Ratio = "ratio", Works;
        /// Singular values above a quantile.
        Quantile = "quantile", Works;
    }
}

choices! {
    /// Which tensors a rescaling changes.
    pub enum ScaleTarget("scale target") {
        /// Down and up by the square root of the factor.
        UpDown = "up_down", Works;
        /// Alpha by the factor.
        Alpha = "alpha", Works;
    }
}

section! {
    /// Extracts a LoRA from the difference of two models.
    pub struct ExtractProcess("process") {
        /// `locon` or `lora`.
        kind as "type": ProcessType = ProcessType::ExtractLocon, Works;
        /// Name of the process.
        name: Option<String> = None, Accepted("files are named by `filename` and `output_path`");
        /// How ranks are chosen.
        mode: ExtractMode = ExtractMode::Fixed, Works;
        /// Parameter for linear layers and 1x1 convolutions.
        linear: Option<f64> = None, Works, shown "by type and mode";
        /// Parameter for larger convolutions.
        conv: Option<f64> = None, Works, shown "by type and mode";
        /// Keep the residual as a sparse bias.
        use_sparse_bias: bool = false, Works;
        /// Sparsity of that bias.
        sparsity: f64 = 0.98, Works;
        /// `locon`: no third factor for convolutions.
        disable_cp: bool = false, Works;
        /// File inside `output_folder`.
        filename: Option<String> = None, Works;
        /// Full path; wins over `filename`.
        output_path: Option<String> = None, Works;
        /// Number format of the file.
        dtype: Option<DType> = None, Works, shown "the job's, else float16";
        /// Extract the U-Net.
        extract_unet: Option<bool> = None, Works, shown "the job's, else true";
        /// Extract the text encoder.
        extract_text_encoder: Option<bool> = None, Works, shown "the job's, else true";
    }
    finish = finish_extract;
}

fn finish_extract(process: &mut ExtractProcess, _present: &PresentKeys, cx: &mut ReadContext) {
    for (key, value) in [("linear", process.linear), ("conv", process.conv)] {
        cx.check_in_range(key, value.unwrap_or(0.0), 0.0..=MAX_FACTOR);
    }
    cx.check_in_range("sparsity", process.sparsity, 0.0..=1.0);
}

section! {
    /// Changes the strength of a LoRA.
    pub struct RescaleLoraProcess("process") {
        /// `rescale_lora`.
        kind as "type": ProcessType = ProcessType::RescaleLora, Works;
        /// Name of the process.
        name: Option<String> = None, Accepted("the file is named by `output_path`");
        /// The file.
        input_path [required]: String = String::new(), Works, input Lora;
        /// The result; may be the same file.
        output_path [required]: String = String::new(), Works;
        /// Strength at which the LoRA works now.
        current_weight [required]: f64 = 1.0, Works;
        /// Strength at which the result should have the same effect.
        target_weight [required]: f64 = 1.0, Works;
        /// Which tensors are changed.
        scale_target: ScaleTarget = ScaleTarget::UpDown, Works;
        /// Number format of the result.
        save_dtype: DType = DType::F16, Works;
        /// True: metadata from this config's `meta`; false: the file's.
        replace_meta: bool = false, Works;
        /// With `replace_meta`: the base model is SDXL.
        is_xl: bool = false, Works;
        /// With `replace_meta`: the base model is Stable Diffusion 2.x.
        is_v2: bool = false, Works;
    }
    finish = finish_rescale;
}

fn finish_rescale(process: &mut RescaleLoraProcess, _present: &PresentKeys, cx: &mut ReadContext) {
    for (key, value) in [
        ("current_weight", process.current_weight),
        ("target_weight", process.target_weight),
    ] {
        cx.check_in_range(key, value, -MAX_FACTOR..=MAX_FACTOR);
    }
    // The factor between both is `current_weight / target_weight`.
    if process.target_weight == 0.0 {
        cx.error_at("target_weight", "expected a strength other than 0");
    }
}
