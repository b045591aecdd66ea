//! The parameters of a sampler, as `scheduler_config.json` of a diffusers model has them.

use super::sampler::SamplerError;
use crate::models::config;
use serde_json::Value;

/// How the betas grow over the training timesteps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BetaSchedule {
    /// Linear from `beta_start` to `beta_end`.
    Linear,
    /// Linear in the square root, as in Stable Diffusion.
    ScaledLinear,
    /// The cosine schedule of Nichol and Dhariwal.
    SquaredCosCapV2,
}

/// What the model's output means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PredictionType {
    /// It is the noise.
    Epsilon,
    /// It is the velocity `sqrt(alpha) * noise - sqrt(1 - alpha) * x0`.
    VPrediction,
    /// It is the image without noise.
    Sample,
}

/// Which of the training timesteps are used for sampling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spacing {
    /// Multiples of `T / steps`, from 0.
    Leading,
    /// Evenly spaced from 0 to T - 1, both included.
    Linspace,
    /// Multiples of `T / steps`, down from T.
    Trailing,
}

/// Every sampler parameter. `None`: the config does not set it, and the sampler uses the default of its diffusers class
/// (0.42.1). Unknown keys are ignored, as `from_config` does.
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(missing_docs)] // named and explained as in diffusers
pub struct SamplerParams {
    pub num_train_timesteps: Option<usize>,
    pub beta_start: Option<f64>,
    pub beta_end: Option<f64>,
    pub beta_schedule: Option<BetaSchedule>,
    pub trained_betas: Option<Vec<f32>>,
    pub prediction_type: Option<PredictionType>,
    pub timestep_spacing: Option<Spacing>,
    pub steps_offset: Option<i64>,
    pub rescale_betas_zero_snr: Option<bool>,
    pub clip_sample: Option<bool>,
    pub clip_sample_range: Option<f64>,
    pub set_alpha_to_one: Option<bool>,
    pub thresholding: Option<bool>,
    pub variance_type: Option<String>,
    pub skip_prk_steps: Option<bool>,
    pub use_karras_sigmas: Option<bool>,
    pub use_exponential_sigmas: Option<bool>,
    pub use_beta_sigmas: Option<bool>,
    pub use_lu_lambdas: Option<bool>,
    pub use_flow_sigmas: Option<bool>,
    pub flow_shift: Option<f64>,
    pub predict_x0: Option<bool>,
    pub disable_corrector: Option<Vec<usize>>,
    pub sigma_min: Option<f64>,
    pub sigma_max: Option<f64>,
    pub interpolation_type: Option<String>,
    pub timestep_type: Option<String>,
    pub final_sigmas_type: Option<String>,
    pub solver_order: Option<usize>,
    pub solver_type: Option<String>,
    pub algorithm_type: Option<String>,
    pub lower_order_final: Option<bool>,
    pub euler_at_final: Option<bool>,
    pub lambda_min_clipped: Option<f64>,
    pub original_inference_steps: Option<usize>,
    pub timestep_scaling: Option<f64>,
    pub shift: Option<f64>,
    pub use_dynamic_shifting: Option<bool>,
    pub base_shift: Option<f64>,
    pub max_shift: Option<f64>,
    pub base_image_seq_len: Option<usize>,
    pub max_image_seq_len: Option<usize>,
    pub shift_terminal: Option<f64>,
    pub time_shift_type: Option<String>,
    pub invert_sigmas: Option<bool>,
    pub stochastic_sampling: Option<bool>,
    /// `prediction_type` is `flow_prediction`. Models that were trained by flow matching always predict the flow.
    pub flow_prediction: bool,
    /// Not a key: the model was trained by flow matching. Set by its family.
    pub is_flow: bool,
    /// Not a key: the family's pipeline gives the scheduler even noise levels, from 1 to 1 / steps.
    pub even_flow_sigmas: bool,
}

impl SamplerParams {
    /// Reads a parsed `scheduler_config.json`. `null` counts as absent.
    ///
    /// # Errors
    /// [`SamplerError::Config`] when a known key has a value of another type.
    pub fn from_json(config: &Value) -> Result<Self, SamplerError> {
        let Some(map) = config.as_object() else {
            return Err(SamplerError::Config(
                "scheduler_config.json is not a JSON object".into(),
            ));
        };
        // These keys hold defaults of the class that saved the file. They do not apply to another class.
        let defaulted: Vec<&str> = map
            .get("_use_default_values")
            .and_then(Value::as_array)
            .map(|names| names.iter().filter_map(Value::as_str).collect())
            .unwrap_or_default();
        let get = |key: &str| {
            map.get(key)
                .filter(|value| !value.is_null() && !defaulted.contains(&key))
        };
        let type_error = |key: &str, expected: &str| {
            SamplerError::Config(format!(
                "`{key}` of scheduler_config.json must be {expected}, but is {}",
                map[key]
            ))
        };
        let boolean = |key: &str| {
            get(key)
                .map(|v| v.as_bool().ok_or_else(|| type_error(key, "true or false")))
                .transpose()
        };
        let number = |key: &str| {
            get(key)
                .map(|v| v.as_f64().ok_or_else(|| type_error(key, "a number")))
                .transpose()
        };
        let count = |key: &str| {
            let positive = |v: &Value| v.as_u64().filter(|n| (1..=1_000_000).contains(n)).map(|n| n as usize);
            get(key)
                .map(|v| positive(v).ok_or_else(|| type_error(key, "a positive whole number")))
                .transpose()
        };
        let text = |key: &str| {
            get(key)
                .map(|v| v.as_str().map(str::to_owned).ok_or_else(|| type_error(key, "a string")))
                .transpose()
        };

        let beta_schedule = match text("beta_schedule")?.as_deref() {
            None => None,
            Some("linear") => Some(BetaSchedule::Linear),
            Some("scaled_linear") => Some(BetaSchedule::ScaledLinear),
            Some("squaredcos_cap_v2") => Some(BetaSchedule::SquaredCosCapV2),
            Some(_) => {
                return Err(type_error(
                    "beta_schedule",
                    "`linear`, `scaled_linear` or `squaredcos_cap_v2`",
                ));
            }
        };
        let prediction_text = text("prediction_type")?;
        let flow_prediction = prediction_text.as_deref() == Some("flow_prediction");
        let prediction_type = match prediction_text.as_deref() {
            None | Some("flow_prediction") => None,
            Some("epsilon") => Some(PredictionType::Epsilon),
            Some("v_prediction") => Some(PredictionType::VPrediction),
            Some("sample" | "original_sample") => Some(PredictionType::Sample),
            Some(_) => {
                return Err(type_error(
                    "prediction_type",
                    "`epsilon`, `v_prediction`, `sample` or `flow_prediction`",
                ));
            }
        };
        let timestep_spacing = match text("timestep_spacing")?.as_deref() {
            None => None,
            Some("leading") => Some(Spacing::Leading),
            Some("linspace") => Some(Spacing::Linspace),
            Some("trailing") => Some(Spacing::Trailing),
            Some(_) => return Err(type_error("timestep_spacing", "`leading`, `linspace` or `trailing`")),
        };
        let trained_betas = match get("trained_betas") {
            None => None,
            Some(list) => {
                let numbers = list
                    .as_array()
                    .and_then(|l| l.iter().map(|v| v.as_f64().map(|x| x as f32)).collect());
                Some(numbers.ok_or_else(|| type_error("trained_betas", "a list of numbers"))?)
            }
        };
        let disable_corrector = match get("disable_corrector") {
            None => None,
            Some(list) => {
                let steps = list
                    .as_array()
                    .and_then(|l| l.iter().map(|v| v.as_u64().map(|n| n as usize)).collect());
                Some(steps.ok_or_else(|| type_error("disable_corrector", "a list of whole numbers"))?)
            }
        };
        let steps_offset = get("steps_offset")
            .map(|v| {
                v.as_i64()
                    .filter(|n| n.abs() < 1_000_000)
                    .ok_or_else(|| type_error("steps_offset", "a whole number"))
            })
            .transpose()?;
        Ok(Self {
            num_train_timesteps: count("num_train_timesteps")?,
            beta_start: number("beta_start")?,
            beta_end: number("beta_end")?,
            beta_schedule,
            trained_betas,
            prediction_type,
            timestep_spacing,
            steps_offset,
            rescale_betas_zero_snr: boolean("rescale_betas_zero_snr")?,
            clip_sample: boolean("clip_sample")?,
            clip_sample_range: number("clip_sample_range")?,
            set_alpha_to_one: boolean("set_alpha_to_one")?,
            thresholding: boolean("thresholding")?,
            variance_type: text("variance_type")?,
            skip_prk_steps: boolean("skip_prk_steps")?,
            use_karras_sigmas: boolean("use_karras_sigmas")?,
            use_exponential_sigmas: boolean("use_exponential_sigmas")?,
            use_beta_sigmas: boolean("use_beta_sigmas")?,
            use_lu_lambdas: boolean("use_lu_lambdas")?,
            use_flow_sigmas: boolean("use_flow_sigmas")?,
            flow_shift: number("flow_shift")?,
            predict_x0: boolean("predict_x0")?,
            disable_corrector,
            sigma_min: number("sigma_min")?,
            sigma_max: number("sigma_max")?,
            interpolation_type: text("interpolation_type")?,
            timestep_type: text("timestep_type")?,
            final_sigmas_type: text("final_sigmas_type")?,
            solver_order: count("solver_order")?,
            solver_type: text("solver_type")?,
            algorithm_type: text("algorithm_type")?,
            lower_order_final: boolean("lower_order_final")?,
            euler_at_final: boolean("euler_at_final")?,
            lambda_min_clipped: number("lambda_min_clipped")?,
            original_inference_steps: count("original_inference_steps")?,
            timestep_scaling: number("timestep_scaling")?,
            shift: number("shift")?,
            use_dynamic_shifting: boolean("use_dynamic_shifting")?,
            base_shift: number("base_shift")?,
            max_shift: number("max_shift")?,
            base_image_seq_len: count("base_image_seq_len")?,
            max_image_seq_len: count("max_image_seq_len")?,
            shift_terminal: number("shift_terminal")?,
            time_shift_type: text("time_shift_type")?,
            invert_sigmas: boolean("invert_sigmas")?,
            stochastic_sampling: boolean("stochastic_sampling")?,
            flow_prediction,
            is_flow: false,
            even_flow_sigmas: false,
        })
    }

    /// The parameters of Stable Diffusion 1.x, for checkpoints without a `scheduler_config.json`.
    #[must_use]
    pub fn stable_diffusion() -> Self {
        Self {
            beta_start: Some(0.00085),
            beta_end: Some(0.012),
            beta_schedule: Some(BetaSchedule::ScaledLinear),
            num_train_timesteps: Some(1000),
            clip_sample: Some(false),
            set_alpha_to_one: Some(false),
            skip_prk_steps: Some(true),
            steps_offset: Some(1),
            ..Self::default()
        }
    }

    /// These parameters with the overrides of diffusers' Stable Diffusion pipelines: latents are not clipped, and time
    /// steps start at 1.
    #[must_use]
    pub fn with_stable_diffusion_overrides(mut self) -> Self {
        self.clip_sample = Some(false);
        self.steps_offset = Some(1);
        self
    }

    /// Checks that no parameter turns on a feature that aitk does not implement, and none of the other kind of models.
    pub(super) fn check_supported(&self) -> Result<(), SamplerError> {
        let unsupported = [
            ("thresholding", self.thresholding),
            ("use_beta_sigmas", self.use_beta_sigmas.filter(|_| !self.is_flow)),
            ("use_lu_lambdas", self.use_lu_lambdas),
        ];
        for (key, value) in unsupported {
            if value == Some(true) {
                return Err(SamplerError::Config(format!(
                    "`{key}: true` in scheduler_config.json is not supported yet"
                )));
            }
        }
        let of_flow = [
            ("use_flow_sigmas: true", self.use_flow_sigmas == Some(true)),
            ("invert_sigmas: true", self.invert_sigmas == Some(true)),
            ("stochastic_sampling: true", self.stochastic_sampling == Some(true)),
            ("prediction_type: flow_prediction", self.flow_prediction),
        ];
        if let Some((key, _)) = of_flow.iter().find(|(_, is_set)| *is_set && !self.is_flow) {
            return Err(SamplerError::Config(format!(
                "`{key}` in scheduler_config.json is for models that were trained by flow matching: remove it"
            )));
        }
        Ok(())
    }
}

/// Parses the text of a `scheduler_config.json`. Accepts `-Infinity`, which Python writes for the default of
/// `lambda_min_clipped`.
///
/// # Errors
/// [`SamplerError::Config`] when the text is not JSON otherwise.
pub fn parse_scheduler_config(text: &str) -> Result<Value, SamplerError> {
    config::parse_json(text).map_err(|e| SamplerError::Config(format!("scheduler_config.json is not JSON: {e}")))
}
