//! Paired images of a data set (`unconditional_path`): what their losses need, and keys that have no effect on them.

use super::dataset::{DatasetConfig, GuidanceType};
use super::objective::LossTarget;
use super::process::TrainerProcess;
use super::schema::ReadContext;
use super::slider_checks::keys_of_other_losses;
use super::train::{TimestepType, TrainConfig};

impl GuidanceType {
    /// Whether its loss needs an adapter, which it switches off or uses at another strength.
    #[must_use]
    pub const fn needs_network(self) -> bool {
        matches!(self, Self::Targeted | Self::Polarity | Self::TargetedFlow)
    }

    /// Whether it compares with what the model predicts for the paired images without the adapter.
    #[must_use]
    pub const fn uses_base(self) -> bool {
        matches!(self, Self::Targeted | Self::TargetedFlow)
    }

    /// Whether the predictions for the paired images are trained, too.
    #[must_use]
    pub const fn trains_pairs(self) -> bool {
        !matches!(self, Self::TargetedFlow)
    }
}

impl DatasetConfig {
    /// How its paired images guide the training. `None`: it has none.
    #[must_use]
    pub fn paired_guidance(&self) -> Option<GuidanceType> {
        self.unconditional_path.is_some().then_some(self.guidance_type)
    }
}

impl TrainerProcess {
    /// The keys that cannot be used with the paired images of its data sets, each with the reason.
    #[must_use]
    pub fn excluded_by_paired_images(&self) -> Vec<(String, String)> {
        let mut excluded: Vec<(String, String)> = Vec::new();
        for (index, set) in self.datasets.iter().enumerate() {
            let Some(guidance) = set.paired_guidance() else {
                continue;
            };
            let of_set = |key: &str| format!("datasets[{index}].{key}");
            excluded.extend(excluded_guidance(self, guidance).map(|why| (of_set("guidance_type"), why)));
            excluded.extend(excluded_of_set(self, set).map(|(key, why)| (of_set(key), why.to_owned())));
            for (key, why) in excluded_of_train(&self.train, guidance) {
                let entry = (format!("train.{key}"), why.to_owned());
                if !excluded.contains(&entry) {
                    excluded.push(entry);
                }
            }
        }
        excluded
    }

    /// Reports what cannot be used with paired images, and warns of keys that have no effect on them.
    pub(super) fn check_paired_images(&self, cx: &mut ReadContext) {
        let excluded = self.excluded_by_paired_images();
        for (key, why) in &excluded {
            cx.error_at(key, why.as_str());
        }
        let sets = self.datasets.iter().enumerate();
        let mut sets = sets.filter_map(|(index, set)| Some((index, set, set.paired_guidance()?)));
        let Some(first) = sets.next() else { return };
        if self.kind.is_slider() {
            return;
        }
        for (index, set, guidance) in std::iter::once(first).chain(sets) {
            for key in ineffective_of_set(set, guidance) {
                cx.warn_at(
                    &format!("datasets[{index}].{key}"),
                    format!("has no effect with `guidance_type: {guidance}`, as in ai-toolkit"),
                );
            }
        }
        for key in ineffective_of_train(&self.train) {
            let key = format!("train.{key}");
            if !excluded.iter().any(|(other, _)| *other == key) {
                cx.warn_at(
                    &key,
                    "has no effect on data sets with `unconditional_path`, as in ai-toolkit: they have losses of their own (docs/losses.md)",
                );
            }
        }
    }
}

/// Why a loss cannot train the model of a process.
fn excluded_guidance(process: &TrainerProcess, guidance: GuidanceType) -> Option<String> {
    let arch = process.model.arch.name;
    let compares_noise = !matches!(guidance, GuidanceType::Polarity | GuidanceType::TargetedFlow);
    if arch.is_flow() && compares_noise {
        return Some(format!(
            "`{guidance}` compares predictions with the noise, and `arch: {arch}` predicts velocities: in ai-toolkit it would train the \
             model to predict the noise. Use `polarity` or `targeted_flow`"
        ));
    }
    if !arch.is_flow() && guidance == GuidanceType::TargetedFlow {
        return Some(format!(
            "`{guidance}` needs a model that is trained by flow matching, and `arch: {arch}` is a diffusion model. Use `targeted`, \
             `polarity` or another type"
        ));
    }
    if !arch.is_flow() && process.model.is_v_pred {
        return Some(format!(
            "`{guidance}` compares predictions with the noise, and `model.is_v_pred` says that this model predicts the velocity; remove \
             one of them"
        ));
    }
    if guidance.needs_network() && process.network.is_none() {
        return Some(format!(
            "`{guidance}` needs a `network`: it trains the difference to what the model predicts without it, or at another strength"
        ));
    }
    None
}

/// The key of a data set that excludes paired images, or is excluded by them, and why.
fn excluded_of_set(process: &TrainerProcess, set: &DatasetConfig) -> Option<(&'static str, &'static str)> {
    if process.kind.is_slider() {
        let why =
            "cannot be used for a slider, which has losses of its own; image pairs of sliders are in `slider.datasets`";
        return Some(("unconditional_path", why));
    }
    if process.embedding.is_some() {
        let why = "cannot be used with `embedding`: in ai-toolkit no word learns from image pairs, whose captions are encoded without \
                   gradients";
        return Some(("unconditional_path", why));
    }
    if process.decorator.is_some() {
        let why = "cannot be used with `decorator` yet: remove it, or train a `network` on image pairs";
        return Some(("unconditional_path", why));
    }
    if set.standardize_images {
        return Some(("standardize_images", UNLIKE));
    }
    set.control_key()
        .map(|key| (key, "cannot be used with `unconditional_path`; remove one of them"))
}

/// Why options of images and latents are refused.
const UNLIKE: &str = "cannot be used with `unconditional_path`: it changes the images and not their pairs, or not in the same way, so that \
                      the loss would compare unlike latents";

/// The keys of `train` that exclude paired images, and why.
fn excluded_of_train(
    train: &TrainConfig,
    guidance: GuidanceType,
) -> impl Iterator<Item = (&'static str, &'static str)> {
    let refuses_cfg = !matches!(guidance, GuidanceType::Direct | GuidanceType::TargetedFlow);
    let cfg =
        "cannot be used with `unconditional_path` and this `guidance_type`; it does not work in ai-toolkit either";
    let text = "cannot be used with `unconditional_path`: in ai-toolkit the text encoder learns nothing from image pairs, whose captions \
                are encoded without gradients; set it to false";
    let short = "cannot be used with `unconditional_path`; it does not work in ai-toolkit either";
    let other =
        "cannot be used with `unconditional_path`: an image and its pair have the same noise at the same timestep";
    [
        (train.do_cfg && refuses_cfg, "do_cfg", cfg),
        (train.do_random_cfg && refuses_cfg, "do_random_cfg", cfg),
        (train.train_text_encoder, "train_text_encoder", text),
        (train.short_and_long_captions, "short_and_long_captions", short),
        (train.timestep_type == TimestepType::NextSample, "timestep_type", other),
        (train.loss_target == LossTarget::DifferentialNoise, "loss_target", other),
        (train.latent_multiplier != 1.0, "latent_multiplier", UNLIKE),
        (train.adaptive_scaling_factor, "adaptive_scaling_factor", UNLIKE),
        (train.standardize_latents, "standardize_latents", UNLIKE),
        (train.do_blank_stabilization, "do_blank_stabilization", UNLIKE),
        (train.img_multiplier != 1.0, "img_multiplier", UNLIKE),
        (train.standardize_images, "standardize_images", UNLIKE),
    ]
    .into_iter()
    .filter_map(|(on, key, why)| on.then_some((key, why)))
}

/// The keys of a data set that have no effect on its paired images.
fn ineffective_of_set(set: &DatasetConfig, guidance: GuidanceType) -> impl Iterator<Item = &'static str> {
    let ignores_masks = guidance != GuidanceType::Direct;
    [
        (set.mask_path.is_some() && ignores_masks, "mask_path"),
        (set.alpha_mask && ignores_masks, "alpha_mask"),
        (set.mask_type().is_some() && ignores_masks, "controls"),
        (set.prior_reg, "prior_reg"),
        (set.loss_multiplier != 1.0, "loss_multiplier"),
    ]
    .into_iter()
    .filter_map(|(on, key)| on.then_some(key))
}

/// The keys of `train` that have no effect on paired images.
fn ineffective_of_train(train: &TrainConfig) -> impl Iterator<Item = &'static str> {
    let weights = [
        (train.min_snr_gamma.is_some(), "min_snr_gamma"),
        (train.snr_gamma.is_some(), "snr_gamma"),
        (train.debiased_estimation_loss, "debiased_estimation_loss"),
        (train.ip_noise_gamma != 0.0, "ip_noise_gamma"),
    ];
    let weights = weights.into_iter().filter_map(|(on, key)| on.then_some(key));
    keys_of_other_losses(train).into_iter().chain(weights)
}

#[cfg(test)]
mod tests {
    use crate::job::{Format, LoadOptions, parse};

    /// The errors and the warnings of a training whose data set and `train` section have these keys.
    fn found(model: &str, network: &str, set: &str, train: &str) -> (String, String, Vec<String>) {
        let more = |keys: &str| match keys {
            "" => String::new(),
            keys => format!(", {keys}"),
        };
        let text = format!(
            "job: extension\nconfig:\n  name: a\n  process:\n    - type: sd_trainer\n      training_folder: out\n      model: \
             {{name_or_path: m, {model}}}\n{network}      datasets:\n        - {{folder_path: after, unconditional_path: \
             before{}}}\n      train: {{steps: 4{}}}\n",
            more(set),
            more(train)
        );
        match parse(&text, Format::Yaml, Some("a.yaml"), &LoadOptions::default()) {
            Ok(job) => {
                let report = job.spec.unsupported();
                let errors = report
                    .errors
                    .iter()
                    .map(|error| format!("{}: {}\n", error.key, error.message));
                let mut warnings = format!("{:?}", job.warnings);
                warnings += &report.to_string();
                let inputs = job.spec.inputs().into_iter().map(|input| input.config_path);
                (errors.collect(), warnings, inputs.collect())
            }
            Err(error) => (error.to_string(), String::new(), Vec::new()),
        }
    }

    const LORA: &str = "      network: {type: lora, linear: 4}\n";

    #[test]
    fn paired_images_are_inputs_and_each_model_has_losses_for_them() {
        let (errors, warnings, inputs) = found("arch: sd15", LORA, "guidance_type: targeted", "");
        assert!(errors.is_empty(), "{errors}");
        assert!(!warnings.contains("unconditional_path"), "{warnings}");
        assert!(
            ["after", "before"]
                .iter()
                .all(|folder| inputs.iter().any(|path| path == folder)),
            "{inputs:?}"
        );
        let flow = "noise_scheduler: flowmatch";
        for (model, train, kind, is_trained) in [
            ("arch: sd15", "", "targeted", true),
            ("arch: sd15", "", "polarity", true),
            ("arch: sdxl", "", "targeted_polarity", true),
            ("arch: sd15", "", "direct", true),
            ("arch: sd15", "", "tnt", true),
            ("arch: sd15", "", "targeted_flow", false),
            ("arch: flux", flow, "targeted_flow", true),
            ("arch: flux", flow, "polarity", true),
            ("arch: flux", flow, "targeted", false),
            ("arch: flux", flow, "targeted_polarity", false),
            ("arch: flux", flow, "direct", false),
            ("arch: flux", flow, "tnt", false),
            ("arch: sd15, is_v_pred: true", "", "polarity", false),
        ] {
            let (errors, ..) = found(model, LORA, &format!("guidance_type: {kind}"), train);
            assert_eq!(errors.is_empty(), is_trained, "{model} {kind}: {errors}");
            assert!(is_trained || errors.contains("guidance_type"), "{errors}");
        }
        for (kind, is_trained) in [
            ("targeted", false),
            ("polarity", false),
            ("targeted_polarity", true),
            ("direct", true),
            ("tnt", true),
        ] {
            let (errors, ..) = found("arch: sd15", "", &format!("guidance_type: {kind}"), "");
            assert_eq!(errors.is_empty(), is_trained, "{kind}: {errors}");
            assert!(is_trained || errors.contains("needs a `network`"), "{errors}");
        }
    }

    #[test]
    fn keys_that_do_not_fit_paired_images_are_refused_and_others_named() {
        for (set, train, key) in [
            ("standardize_images: true", "", "standardize_images"),
            ("control_path: c", "", "control_path"),
            ("buckets: false, random_crop: true", "", "unconditional_path"),
            ("", "do_cfg: true", "do_cfg"),
            ("", "train_text_encoder: true", "train_text_encoder"),
            ("", "short_and_long_captions: true", "short_and_long_captions"),
            ("", "latent_multiplier: 0.5", "latent_multiplier"),
            ("", "img_multiplier: 0.5", "img_multiplier"),
        ] {
            let set = match set {
                "" => "guidance_type: polarity".to_owned(),
                set => format!("guidance_type: polarity, {set}"),
            };
            let (errors, ..) = found("arch: sd15", LORA, &set, train);
            assert!(errors.contains(key), "{set} {train}: {errors}");
        }
        // Guidance of scale 1 is no guidance.
        let (errors, ..) = found("arch: sd15", LORA, "guidance_type: direct", "do_cfg: true");
        assert!(errors.is_empty(), "{errors}");
        let (errors, warnings, _) = found(
            "arch: sd15",
            LORA,
            "mask_path: masks, loss_multiplier: 2.0",
            "loss_type: mae, min_snr_gamma: 5.0",
        );
        assert!(errors.is_empty(), "{errors}");
        for key in ["mask_path", "loss_multiplier", "loss_type", "min_snr_gamma"] {
            assert!(warnings.contains(key), "{key} in {warnings}");
        }
        let (_, warnings, _) = found("arch: sd15", LORA, "guidance_type: direct, mask_path: masks", "");
        assert!(!warnings.contains("mask_path"), "{warnings}");
    }
}
