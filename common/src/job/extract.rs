//! Processes that convert model files: `locon` and `lora` (extract), `rescale_lora` (mod).

use super::declare::{choices, section};
use super::dtype::DType;
use super::limits::{MAX_FACTOR, MAX_RANK};
use super::process_type::ProcessType;
use super::schema::{PresentKeys, ReadContext};
use crate::fsutil::names;

choices! {
    /// How an extraction chooses ranks.
    pub enum ExtractMode("extract mode") {
        /// This rank.
        Fixed = "fixed", Works;
        /// Singular values above this number.
        Threshold = "threshold", Works;
        /// Singular values above this share of the largest.
        Ratio = "ratio", Works;
        /// The largest singular values, up to this share of the sum of all.
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
        /// The rank (`fixed`) or the limit of the mode for linear layers and 1x1 convolutions.
        linear: Option<f64> = None, Works, shown "64 (`locon`), 4 (`lora`); 0; 0.5; 0.5";
        /// The same for larger convolutions. With `type: lora`, 0: they are left out.
        conv: Option<f64> = None, Works, shown "32; 0; 0.5; 0.5 (`locon`), 0 (`lora`)";
        /// Keep the residual as a sparse bias.
        use_sparse_bias: bool = false, Refused("programs that load LoRAs ignore it, and of three factors ai-toolkit computes it wrongly (docs/extract.md); choose a higher rank, or a mode that keeps more");
        /// Sparsity of that bias.
        sparsity: f64 = 0.98, DependsOn("use_sparse_bias");
        /// `locon`: convolutions get two factors instead of three.
        disable_cp: bool = false, Works;
        /// File inside `output_folder`.
        filename: Option<String> = None, Works, shown "by name, type and mode";
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
    // Where the mode is unknown, that is the error.
    let has_mode = !cx.is_reported("mode");
    let parameters = [("linear", process.linear), ("conv", process.conv)];
    for (key, value) in parameters.into_iter().filter(|_| has_mode) {
        let value = value.unwrap_or(0.0);
        match process.mode {
            ExtractMode::Fixed => {
                let range = 0.0..=f64::from(MAX_RANK);
                if range.contains(&value) && value.fract() != 0.0 {
                    cx.error_at(
                        key,
                        "expected a rank, which is a whole number, because the mode is `fixed`",
                    );
                }
                cx.check_in_range(key, value, range);
            }
            ExtractMode::Threshold => cx.check_in_range(key, value, 0.0..=MAX_FACTOR),
            ExtractMode::Ratio | ExtractMode::Quantile => cx.check_in_range(key, value, 0.0..=1.0),
        }
    }
    cx.check_in_range("sparsity", process.sparsity, 0.0..=1.0);
    if let Some(filename) = &process.filename
        && let Err(why) = check_file_name(filename)
    {
        cx.error_at("filename", why);
    }
    check_output_path(process.output_path.as_deref(), cx);
}

impl ExtractProcess {
    /// The rank or the limit of the mode: for convolutions with a kernel larger than 1x1, or for the other layers.
    #[must_use]
    pub fn parameter(&self, is_large_conv: bool) -> f64 {
        let is_locon = self.kind == ProcessType::ExtractLocon;
        let default = match (self.mode, is_large_conv) {
            (ExtractMode::Fixed, false) if is_locon => 64.0,
            (ExtractMode::Fixed, true) if is_locon => 32.0,
            (ExtractMode::Fixed, false) => 4.0,
            (ExtractMode::Ratio | ExtractMode::Quantile, false) => 0.5,
            (ExtractMode::Ratio | ExtractMode::Quantile, true) if is_locon => 0.5,
            _ => 0.0,
        };
        (if is_large_conv { self.conv } else { self.linear }).unwrap_or(default)
    }

    /// Whether convolutions with a kernel larger than 1x1 are extracted.
    #[must_use]
    pub fn has_large_convs(&self) -> bool {
        self.kind == ProcessType::ExtractLocon || self.parameter(true) > 0.0
    }

    /// The path of its file: `output_path`, or that of `filename` below `output_folder`. A file without a name is called after the job, the
    /// type and the mode.
    #[must_use]
    pub fn result_path(&self, job: &str, output_folder: Option<&str>) -> String {
        match (&self.output_path, output_folder) {
            (Some(path), _) => path.clone(),
            (None, Some(folder)) => format!("{}/{}", folder.trim_end_matches('/'), self.file_name(job)),
            (None, None) => self.file_name(job),
        }
    }

    fn file_name(&self, job: &str) -> String {
        if let Some(filename) = &self.filename {
            return filename.clone();
        }
        let conv = match self.has_large_convs() {
            true => format!("_{}", self.parameter(true)),
            false => String::new(),
        };
        format!(
            "{job}_{}_{}_{}{conv}.safetensors",
            self.kind,
            self.mode,
            self.parameter(false)
        )
    }
}

/// Checks the name of a safetensors file that is written below a folder.
fn check_file_name(name: &str) -> Result<(), String> {
    if let Err(bad) = names::check(name) {
        return Err(format!("`{}` cannot name a file: {}", name.escape_debug(), bad.reason));
    }
    if !name.ends_with(".safetensors") {
        return Err(format!(
            "`{}`: expected a name that ends with `.safetensors`",
            name.escape_debug()
        ));
    }
    Ok(())
}

/// Checks the last part of an `output_path`, which names the result where the job's own folder replaces the rest of the path.
fn check_output_path(path: Option<&str>, cx: &mut ReadContext) {
    let Some(path) = path else { return };
    let name = path.rsplit('/').next().unwrap_or(path);
    if let Err(why) = check_file_name(name) {
        cx.error_at("output_path", why);
    }
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
        /// The file to write; on this machine it may be the same one.
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
    for (key, value) in [
        ("current_weight", process.current_weight),
        ("target_weight", process.target_weight),
    ] {
        if value == 0.0 {
            cx.error_at(key, "expected a strength other than 0");
        }
    }
    let path = (!process.output_path.is_empty()).then_some(process.output_path.as_str());
    check_output_path(path, cx);
}
