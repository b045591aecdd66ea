//! Tests of what options of images, short captions and losses exclude.

use super::tests::{MINIMAL, load_yaml, with_line_after};

/// The messages of the errors and of the warnings of a job.
fn findings(text: &str) -> (Vec<String>, Vec<String>) {
    match load_yaml(text) {
        Err(error) => (error.findings().iter().map(ToString::to_string).collect(), Vec::new()),
        Ok(job) => {
            let support = job.spec.unsupported();
            let warnings = job.warnings.iter().chain(&support.warnings);
            let text = |finding: &super::error::Finding| finding.to_string();
            (support.errors.iter().map(text).collect(), warnings.map(text).collect())
        }
    }
}

fn of_dataset(lines: &str) -> (Vec<String>, Vec<String>) {
    let lines = lines.lines().map(|line| format!("          {line}"));
    findings(&with_line_after("folder_path", &lines.collect::<Vec<_>>().join("\n")))
}

fn of_train(lines: &str) -> (Vec<String>, Vec<String>) {
    let lines = lines.lines().map(|line| format!("        {line}"));
    findings(&with_line_after("steps: 10", &lines.collect::<Vec<_>>().join("\n")))
}

#[track_caller]
fn assert_one(found: &[String], parts: &[&str]) {
    assert_eq!(found.len(), 1, "{found:?}");
    for part in parts {
        assert!(found[0].contains(part), "{part} not in {found:?}");
    }
}

#[test]
fn augmentations_are_checked_with_file_line_and_key() {
    let (errors, warnings) = of_dataset(
        "augments: [ColorJitter, RandomEqualize]\naugmentations:\n  - method: HorizontalFlip\n  - {method: Rotate, params: {limit: 5}}",
    );
    assert_eq!((errors, warnings), (vec![], vec![]));
    let (errors, _) = of_dataset("augments: [ColorJiter]");
    assert_one(
        &errors,
        &["job.yaml:12:", "datasets[0].augments[0]", "ColorJitter, RandomEqualize"],
    );
    let (errors, _) = of_dataset("augmentations:\n  - method: Blurr");
    assert_one(
        &errors,
        &[
            "job.yaml:",
            "datasets[0].augmentations[0].method",
            "GaussianBlur",
            "CLAHE",
        ],
    );
    let (errors, _) = of_dataset("augmentations:\n  - {method: Rotate, params: {limitt: 5}}");
    assert_one(&errors, &["augmentations[0].params.limitt", "limit"]);
    let (errors, _) = of_dataset("augmentations:\n  - method: Sharpen\n    params:\n      alpha: 0.5");
    assert_one(
        &errors,
        &[
            "job.yaml:15:",
            "augmentations[0].params.alpha",
            "two numbers, [low, high], each from 0 to 1",
        ],
    );
    for (line, key) in [
        ("shuffle_augmentations: true", "shuffle_augmentations"),
        ("replay_transforms: false", "replay_transforms"),
        ("use_short_captions: true", "use_short_captions"),
    ] {
        let (errors, warnings) = of_dataset(line);
        assert_eq!(errors, [""; 0]);
        assert_one(&warnings, &[key, "has no effect"]);
    }
    let (errors, warnings) = of_dataset("augments: [ColorJitter]\ncache_latents_to_disk: true");
    assert_eq!(errors, [""; 0]);
    assert_one(&warnings, &["cache_latents_to_disk", "is ignored"]);
    let shift = "augmentations: [{method: ShiftScaleRotate}]\nmask_path: masks";
    assert_one(&of_dataset(shift).0, &["ShiftScaleRotate", "replay_transforms"]);
    let still = format!("{shift}\nreplay_transforms: false");
    assert_eq!(of_dataset(&still).0, [""; 0]);
}

#[test]
fn factors_of_learning_rates_that_are_for_no_tensor_are_errors() {
    let (errors, _) = of_train("lr_factors: [{contains: down_blocks_0, factor: 2}, {contains: lora_te, factor: 0.5}]");
    assert_one(&errors, &["lr_factors[1].contains", "no text encoder is trained"]);
    let both = "train_text_encoder: true\nlr_factors: [{contains: lora_te, factor: 0}]";
    assert_eq!(of_train(both).0, [""; 0]);
    let (errors, _) = of_train("lr_factors: [{contains: down, factor: 0}, {contains: \"*\", factor: 0}]");
    assert_one(&errors, &["nothing is trained"]);
    let some = "lr_factors: [{contains: down, factor: 1}, {contains: \"*\", factor: 0}]";
    assert_eq!(of_train(some).0, [""; 0]);
}

#[test]
fn random_squares_exclude_what_is_computed_once() {
    let squares = "buckets: false\nrandom_crop: true\nrandom_scale: true";
    assert_eq!(of_dataset(squares), (vec![], vec![]));
    for (line, key) in [
        ("cache_latents: true", "cache_latents"),
        ("mask_path: masks", "mask_path"),
        ("alpha_mask: true", "alpha_mask"),
    ] {
        assert_one(&of_dataset(&format!("{squares}\n{line}")).0, &[key, "random_crop"]);
    }
    for lines in ["random_scale: true", "buckets: false\nrandom_scale: true"] {
        let (errors, warnings) = of_dataset(lines);
        assert_eq!(errors, [""; 0]);
        assert_one(&warnings, &["random_scale", "no effect"]);
    }
}

#[test]
fn squares_of_buckets_are_not_cropped_at_random() {
    let (errors, warnings) = of_dataset("square_crop: true\nrandom_crop: true");
    assert_eq!(errors, [""; 0]);
    assert_one(&warnings, &["random_crop", "no effect with `square_crop`"]);
}

#[test]
fn changes_of_all_images_have_no_effect_on_cached_latents() {
    for lines in ["standardize_images: true", "img_multiplier: 0.5"] {
        assert_eq!(of_train(lines), (vec![], vec![]));
        let cached = with_line_after("folder_path", "          cache_latents: true");
        let text = cached.replacen("        steps: 10", &format!("        steps: 10\n        {lines}"), 1);
        let (errors, warnings) = findings(&text);
        assert_eq!(errors, [""; 0]);
        assert_one(&warnings, &["cache_latents", "no effect"]);
    }
    assert_one(&of_train("img_multiplier: 1.5").1, &["img_multiplier", "above 1"]);
    assert_one(&of_train("img_multiplier: -0.5").0, &["img_multiplier", "0 to 1"]);
    assert_eq!(of_dataset("standardize_images: true"), (vec![], vec![]));
}

#[test]
fn short_captions_and_dropped_prompts_need_text_encoders() {
    assert!(MINIMAL.contains("train"));
    assert_eq!(of_train("short_and_long_captions: true"), (vec![], vec![]));
    for (other, part) in [
        ("cache_text_embeddings: true", "cache_text_embeddings"),
        ("unload_text_encoder: true", "unload_text_encoder"),
        ("short_and_long_captions_encoder_split: true", "encoder_split"),
    ] {
        let (errors, _) = of_train(&format!("short_and_long_captions: true\n{other}"));
        assert_one(&errors, &["train.short_and_long_captions", part]);
    }
    let (errors, warnings) = of_train("short_and_long_captions_encoder_split: true");
    assert_eq!(errors, [""; 0]);
    assert_one(&warnings, &["only SDXL"]);
    assert_eq!(of_train("prompt_dropout_prob: 0.1"), (vec![], vec![]));
    assert_one(&of_train("prompt_dropout_prob: 1.1").0, &["prompt_dropout_prob"]);
    let (errors, warnings) = of_train("prompt_dropout_prob: 0.1\ncache_text_embeddings: true");
    assert_eq!(errors, [""; 0]);
    assert_one(&warnings, &["prompt_dropout_prob", "no effect"]);
}

#[test]
fn the_padding_of_t5_is_that_of_models_with_t5() {
    let of_arch = |arch: &str| {
        let lines = format!("        arch: {arch}\n        apply_t5_attn_mask: true");
        findings(&with_line_after("name_or_path: base", &lines)).0
    };
    for arch in ["flux", "flux_kontext", "sd3"] {
        assert!(
            of_arch(arch).iter().all(|error| !error.contains("apply_t5_attn_mask")),
            "{arch}"
        );
    }
    for arch in ["sd1", "sdxl", "chroma", "zimage"] {
        let errors = of_arch(arch);
        let about = errors.iter().filter(|error| error.contains("apply_t5_attn_mask"));
        let about: Vec<String> = about.cloned().collect();
        assert_one(&about, &["FLUX.1 and Stable Diffusion 3.5", arch]);
    }
    let of_clip = |arch: &str| {
        let lines = format!("        arch: {arch}\n        apply_lg_attn_mask: true");
        let errors = findings(&with_line_after("name_or_path: base", &lines)).0;
        errors.iter().any(|error| error.contains("apply_lg_attn_mask"))
    };
    assert!(!of_clip("sd3") && of_clip("flux") && of_clip("sdxl"));
}

#[test]
fn weights_that_another_weight_replaces_are_warned_of() {
    assert_eq!(of_train("min_snr_gamma: 5\nsnr_gamma: 0"), (vec![], vec![]));
    let (errors, warnings) = of_train("min_snr_gamma: 5\nsnr_gamma: 4");
    assert_eq!(errors, [""; 0]);
    assert_one(&warnings, &["train.min_snr_gamma", "`snr_gamma`"]);
}

#[test]
fn targets_that_a_preservation_loss_replaces_are_warned_of() {
    let text = with_line_after("folder_path", "          prior_reg: true");
    let preserving = |more: &str| {
        let line = "        steps: 10\n";
        let (errors, warnings) =
            findings(&text.replace(line, &format!("{line}        blank_prompt_preservation: true\n{more}")));
        assert_eq!(errors, [""; 0]);
        warnings
    };
    assert_eq!(findings(&text), (vec![], vec![]));
    assert_one(&preserving(""), &["datasets[0].prior_reg", "preservation loss"]);
    let both = preserving("        do_prior_divergence: true\n");
    assert_eq!(both.len(), 2, "{both:?}");
    let of_train = both
        .iter()
        .find(|warning| warning.contains("train.do_prior_divergence"));
    assert!(
        of_train.is_some_and(|warning| warning.contains("preservation loss")),
        "{both:?}"
    );
}

#[test]
fn timesteps_of_a_sampler_cannot_be_even() {
    let of_flux = |lines: &str| {
        let text = with_line_after("steps: 10", &format!("        noise_scheduler: flowmatch\n{lines}"));
        findings(&text.replace("name_or_path: base", "name_or_path: base\n        arch: flux"))
    };
    for key in ["linear_timesteps", "linear_timesteps2"] {
        let (errors, _) = of_flux(&format!("        timestep_type: next_sample\n        {key}: true"));
        assert_one(&errors, &[&format!("train.{key}"), "timestep_type: next_sample"]);
        let (errors, _) = of_flux(&format!("        timestep_type: two_step\n        {key}: true"));
        assert_eq!(errors, [""; 0]);
    }
}
