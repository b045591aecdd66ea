//! Numbers that make no sense, at every numeric key of the sections that people write most: each is refused with one error
//! at its file, line and key, or is listed here as one with a meaning.

use super::tests::{MINIMAL, assert_valid_as_json};
use super::*;

/// The values that are tried.
const VALUES: [&str; 5] = ["0", "-1", "1e30", ".nan", ".inf"];

/// Keys, and for each the values that have a meaning.
type Keys = &'static [(&'static str, &'static [&'static str])];

/// A trainer's keys: the line that they follow, their indentation, and for each key the values that have a meaning.
const TRAINER: &[(&str, &str, Keys)] = &[
    (
        "      train:",
        "        ",
        &[
            ("lr", &["0"]),
            ("embedding_lr", &["0"]),
            ("adapter_lr", &["0"]),
            ("batch_size", &[]),
            ("gradient_accumulation", &[]),
            ("gradient_accumulation_steps", &["-1"]),
            // 0 and negative numbers switch clipping off.
            ("max_grad_norm", &["0", "-1", "1e30"]),
            ("num_train_timesteps", &[]),
            ("next_sample_timesteps", &[]),
            ("max_negative_prompts", &[]),
            ("noise_multiplier", &["0"]),
            ("merge_network_on_save_strength", &["0", "-1"]),
            ("noise_offset", &["0", "-1"]),
            ("reg_weight", &["0", "-1"]),
            ("cfg_scale", &["0", "-1"]),
            ("max_cfg_scale", &["0", "-1"]),
            ("cfg_rescale", &["0", "-1"]),
            ("correct_pred_norm_multiplier", &["0", "-1"]),
            ("latent_feature_loss_weight", &["0", "-1"]),
            ("diffusion_feature_extractor_weight", &["0", "-1"]),
            ("paramiter_swapping_factor", &[]),
        ],
    ),
    (
        "        - folder_path: images",
        "          ",
        &[
            ("resolution", &[]),
            ("batch_size", &[]),
            ("num_repeats", &[]),
            ("loss_multiplier", &["0", "-1"]),
            ("scale", &[]),
            ("mask_min_value", &["0"]),
            ("caption_dropout_rate", &["0"]),
        ],
    ),
    (
        "      sample:",
        "        ",
        &[
            ("width", &[]),
            ("height", &[]),
            ("sample_steps", &[]),
            ("guidance_scale", &["0", "-1"]),
            ("guidance_rescale", &["0"]),
            ("network_multiplier", &["0", "-1"]),
        ],
    ),
    (
        "          - prompt: a cat",
        "            ",
        &[
            ("width", &[]),
            ("height", &[]),
            ("sample_steps", &[]),
            ("guidance_scale", &["0", "-1"]),
        ],
    ),
    (
        "      network:",
        "        ",
        &[
            ("linear", &[]),
            ("alpha", &["0", "-1"]),
            ("linear_alpha", &["0", "-1"]),
            // 0 is not a LoRA on convolutions.
            ("conv", &["0"]),
            ("conv_alpha", &["0", "-1"]),
            ("dropout", &["0"]),
        ],
    ),
];

const GENERATE: &[(&str, &str, Keys)] = &[(
    "      generate:",
    "        ",
    &[
        ("width", &[]),
        ("height", &[]),
        ("sample_steps", &[]),
        ("num_repeats", &[]),
        ("max_images", &[]),
        ("max_random_per_prompt", &[]),
        ("guidance_scale", &["0", "-1"]),
        ("guidance_rescale", &["0"]),
    ],
)];

const GENERATE_JOB: &str = "\
job: generate
config:
  name: cat
  process:
    - type: to_folder
      output_folder: output
      model:
        name_or_path: base
      generate:
        prompts: [a cat]
";

/// Reads `text` with `key: value` after the line `after`.
fn assert_refused_unless_meaningful(text: &str, after: &str, indent: &str, key: &str, value: &str, has_meaning: bool) {
    let position = text.lines().position(|line| line == after).unwrap();
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    lines.insert(position + 1, format!("{indent}{key}: {value}"));
    let text = lines.join("\n");
    let case = format!("{}, {key}: {value}", after.trim());
    match parse(&text, Format::Yaml, Some("job.yaml"), &LoadOptions::default()) {
        Ok(job) => {
            assert!(has_meaning, "{case} is accepted");
            assert_valid_as_json(&job);
        }
        Err(error) => {
            assert!(!has_meaning, "{case} is refused: {error}");
            let [finding] = error.findings() else {
                panic!("{case}: expected exactly one error, found: {error}");
            };
            assert_eq!(finding.file.as_deref(), Some("job.yaml"), "{case}");
            assert_eq!(
                finding.line.map(|line| line as usize),
                Some(position + 2),
                "{case}: {error}"
            );
            assert!(finding.key.ends_with(key), "{case}: {error}");
        }
    }
}

#[test]
fn numbers_without_a_meaning_are_refused_at_their_key() {
    let trainer = MINIMAL.replace(
        "      network: {type: lora, linear: 8}\n",
        "      network:\n        type: lora\n      sample:\n        samples:\n          - prompt: a cat\n",
    );
    for (text, sections) in [(GENERATE_JOB, GENERATE), (trainer.as_str(), TRAINER)] {
        for (after, indent, keys) in sections {
            for (key, meaningful) in *keys {
                for value in VALUES {
                    assert_refused_unless_meaningful(text, after, indent, key, value, meaningful.contains(&value));
                }
            }
        }
    }
}

#[test]
fn a_size_of_a_list_has_two_sides_above_zero() {
    let text = format!("{GENERATE_JOB}        size_list: [[512, 512], [0, 512]]\n");
    let error = parse(&text, Format::Yaml, Some("job.yaml"), &LoadOptions::default()).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("size_list") && text.contains("expected at least 1, found 0"),
        "{text}"
    );
}

#[test]
fn numbers_without_a_meaning_are_refused_in_rare_sections_too() {
    let read = |name: &str, text: &str| parse(text, Format::Yaml, Some(name), &LoadOptions::default());
    for (text, line, wrong, key) in [
        (
            include_str!("testdata/textual_inversion.yaml"),
            "tokens: 8",
            "tokens: 0",
            "embedding.tokens",
        ),
        (
            include_str!("testdata/concept_slider.yaml"),
            "guidance_strength: 3.0",
            "guidance_strength: -1e30",
            "slider.guidance_strength",
        ),
        (
            include_str!("testdata/concept_slider.yaml"),
            "anchor_strength: 1.0",
            "resolutions: [[512, 512], [512, 0]]",
            "slider.resolutions[1]",
        ),
        (
            include_str!("testdata/concept_slider.yaml"),
            "anchor_strength: 1.0",
            "targets: [{weight: 1e30}]",
            "slider.targets[0].weight",
        ),
        (
            include_str!("testdata/rescale.yaml"),
            "target_weight: 1.0",
            "target_weight: 0",
            "process[0].target_weight",
        ),
    ] {
        assert!(read("job.yaml", text).is_ok(), "{key}");
        let error = read("job.yaml", &text.replace(line, wrong)).unwrap_err();
        let [finding] = error.findings() else {
            panic!("{key}: expected exactly one error, found: {error}");
        };
        assert!(finding.key.ends_with(key), "{error}");
    }
}
