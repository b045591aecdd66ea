//! Keys of sliders that cannot work, or that have no effect.

use super::error::JobError;
use super::{Format, LoadOptions, parse};

const SLIDER: &str = "job: train
config:
  name: s
  process:
    - type: slider
      training_folder: out
      network: {type: lora, linear: 4}
      model: {name_or_path: m, arch: sd1}
      train: {steps: 3, max_denoising_steps: 40, noise_scheduler: ddpm}
      slider: {targets: [{target_class: a, positive: b, negative: c}], resolutions: [[512, 512]]}
";
const CONCEPT: &str = "job: extension
config:
  name: s
  process:
    - type: concept_slider
      training_folder: out
      network: {type: lora, linear: 4}
      model: {name_or_path: m, arch: sd1}
      train: {steps: 3}
      datasets: [{folder_path: images}]
      slider: {positive_prompt: b, negative_prompt: c, target_class: a}
";
const PAIRS: &str = "job: extension
config:
  name: s
  process:
    - type: ultimate_slider_trainer
      training_folder: out
      network: {type: lora, linear: 4}
      model: {name_or_path: m, arch: sd1}
      train: {steps: 3}
      slider: {datasets: [{pos_folder: p, neg_folder: n}], targets: [{target_class: a, positive: b, negative: c}]}
";

/// The messages of a config: errors, or else warnings.
fn messages(text: &str) -> (bool, Vec<(String, String)>) {
    let short = |key: &str| key.trim_start_matches("config.process[0].").to_owned();
    match parse(text, Format::Yaml, None, &LoadOptions::default()) {
        Ok(loaded) => {
            let warnings = loaded.warnings.iter().map(|w| (short(&w.key), w.message.clone()));
            (false, warnings.collect())
        }
        Err(JobError::Invalid { findings }) => {
            let errors = findings.iter().map(|e| (short(&e.key), e.message.clone()));
            (true, errors.collect())
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn sliders_without_a_mistake_have_no_message() {
    for text in [SLIDER, CONCEPT, PAIRS] {
        assert_eq!(messages(text), (false, Vec::new()), "{text}");
    }
}

#[test]
fn the_captions_of_image_pairs_have_no_trigger_word() {
    let text = PAIRS.replace("training_folder: out", "training_folder: out\n      trigger_word: zorb");
    let loaded = parse(&text, Format::Yaml, None, &LoadOptions::default()).unwrap();
    let pairs = loaded.spec.process[0].trainer().unwrap().split_datasets();
    assert_eq!((pairs.len(), pairs[0].trigger_word.as_deref()), (1, None));
    let text = CONCEPT.replace("training_folder: out", "training_folder: out\n      trigger_word: zorb");
    let loaded = parse(&text, Format::Yaml, None, &LoadOptions::default()).unwrap();
    let images = loaded.spec.process[0].trainer().unwrap().split_datasets();
    assert_eq!(images[0].trigger_word.as_deref(), Some("zorb"));
}

#[test]
fn mistakes_are_errors() {
    for (text, from, to, key, why) in [
        (
            SLIDER,
            "steps: 40",
            "steps: 1000",
            "train.max_denoising_steps",
            "3 to 999 with `noise_scheduler: ddpm`",
        ),
        (
            SLIDER,
            "steps: 40, noise_scheduler: ddpm",
            "steps: 51, noise_scheduler: lcm",
            "train.max_denoising_steps",
            "3 to 50",
        ),
        (
            SLIDER,
            "steps: 40, noise_scheduler: ddpm",
            "steps: 999, noise_scheduler: dpmsolver++",
            "train.max_denoising_steps",
            "3 to 500",
        ),
        (
            SLIDER,
            "[512, 512]",
            "[16384, 16384]",
            "slider.resolutions[0]",
            "too large",
        ),
        (
            SLIDER,
            "negative: c",
            "negative: c, weight: 0",
            "slider.targets[0].weight",
            "must not be 0",
        ),
        (
            SLIDER,
            "{target_class: a, positive: b, negative: c}",
            "old",
            "slider.targets[0]",
            "a map",
        ),
        (
            CONCEPT,
            "target_class: a",
            "guidance_strength: 0",
            "slider.guidance_strength",
            "must not be 0",
        ),
        (
            PAIRS,
            "neg_folder: n",
            "neg_folder: p",
            "slider.datasets[0].neg_folder",
            "same as `pos_folder`",
        ),
        (
            PAIRS,
            "neg_folder: n",
            "neg_folder: n, network_weight: 0",
            "slider.datasets[0]",
            "strengths are 0",
        ),
        (
            PAIRS,
            "neg_folder: n",
            "pair_folder: n",
            "slider.datasets[0]",
            "a `pair_folder` and one of",
        ),
        (
            PAIRS,
            "slider: {",
            "slider: {img_loss_weight: 0, cfg_loss_weight: 0, ",
            "slider",
            "both 0",
        ),
    ] {
        let changed = text.replace(from, to);
        assert_ne!(changed, text, "{from}");
        let (is_error, found) = messages(&changed);
        assert!(is_error && found.len() == 1, "{to}: {found:?}");
        assert!(found[0].0 == key && found[0].1.contains(why), "{to}: {found:?}");
    }
}

#[test]
fn keys_without_effect_are_named() {
    for (text, from, to, key) in [
        (
            SLIDER,
            "slider: {",
            "slider: {positive_prompt: x, ",
            "slider.positive_prompt",
        ),
        (
            SLIDER,
            "slider: {",
            "slider: {datasets: [{pair_folder: p}], ",
            "slider.datasets",
        ),
        (SLIDER, "[512, 512]", "[33, 47]", "slider.resolutions[0]"),
        (
            SLIDER,
            "negative: c",
            "negative: c, weight: -1",
            "slider.targets[0].weight",
        ),
        (
            SLIDER,
            "[512, 512]]}",
            "[64, 64]]}\n      datasets: [{folder_path: i}]",
            "slider.resolutions",
        ),
        (
            CONCEPT,
            "slider: {",
            "slider: {targets: [{positive: x}], ",
            "slider.targets",
        ),
        (
            CONCEPT,
            "slider: {",
            "slider: {weight_jitter: 0.5, ",
            "slider.weight_jitter",
        ),
        (
            CONCEPT,
            "folder_path: images",
            "folder_path: images, alpha_mask: true",
            "datasets[0].alpha_mask",
        ),
        (
            CONCEPT,
            "folder_path: images",
            "folder_path: images, is_reg: true",
            "datasets[0].is_reg",
        ),
        (
            CONCEPT,
            "folder_path: images",
            "folder_path: images, network_weight: 0.5",
            "datasets[0].network_weight",
        ),
        (SLIDER, "steps: 3,", "steps: 3, snr_gamma: 5,", "train.snr_gamma"),
        (
            PAIRS,
            "steps: 3}",
            "steps: 3, snr_gamma: 5, min_snr_gamma: 5}",
            "train.snr_gamma",
        ),
        (
            CONCEPT,
            "steps: 3}",
            "steps: 3, min_snr_gamma: 5}",
            "train.min_snr_gamma",
        ),
        (
            PAIRS,
            "slider: {",
            "slider: {anchors: [{prompt: x}], ",
            "slider.anchors",
        ),
        (
            PAIRS,
            "slider: {",
            "slider: {img_loss_weight: -1, ",
            "slider.img_loss_weight",
        ),
    ] {
        let changed = text.replace(from, to);
        assert_ne!(changed, text, "{from}");
        let (is_error, found) = messages(&changed);
        assert!(!is_error && found.len() == 1 && found[0].0 == key, "{to}: {found:?}");
    }
}
