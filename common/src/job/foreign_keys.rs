//! The names that the keys of a training have in other trainers: diffusers' scripts, transformers' `TrainingArguments`, sd-scripts, peft.
//!
//! ai-toolkit ignores such a key silently, and the training has another learning rate or length than its config says.

/// Of a section: names of other trainers, and the key that is meant. A dot separates a key from one below it.
type Names = &'static [(&'static [&'static str], &'static str)];

const TRAIN: Names = &[
    (&["learning_rate"], "lr"),
    (
        &[
            "max_train_steps",
            "max_steps",
            "num_train_steps",
            "num_training_steps",
            "train_steps",
            "total_steps",
            "num_steps",
        ],
        "steps",
    ),
    (&["train_batch_size", "per_device_train_batch_size"], "batch_size"),
    (&["optimizer_type", "optim"], "optimizer"),
    (&["optimizer_args"], "optimizer_params"),
    (&["weight_decay", "adam_weight_decay"], "optimizer_params.weight_decay"),
    (&["lr_scheduler_type"], "lr_scheduler"),
    (&["lr_scheduler_args"], "lr_scheduler_params"),
    (
        &["warmup_steps", "lr_warmup_steps", "num_warmup_steps"],
        "lr_scheduler_params.num_warmup_steps",
    ),
    (&["mixed_precision"], "dtype"),
];

const NETWORK: Names = &[
    (
        &["network_dim", "lora_rank", "lora_dim", "linear_dim", "linear_rank"],
        "linear",
    ),
    (&["network_alpha", "lora_alpha"], "linear_alpha"),
    (&["conv_dim", "conv_rank"], "conv"),
    (&["network_dropout", "lora_dropout"], "dropout"),
    (&["network_args"], "network_kwargs"),
    (&["network_type", "algo", "peft_type"], "type"),
    (&["network_weights"], "pretrained_lora_path"),
    (&["target_modules"], "network_kwargs.only_if_contains"),
];

const DATASETS: Names = &[
    (
        &[
            "image_dir",
            "train_data_dir",
            "instance_data_dir",
            "data_dir",
            "image_folder",
        ],
        "folder_path",
    ),
    (&["caption_extension"], "caption_ext"),
    (&["repeats"], "num_repeats"),
    (&["shuffle_caption"], "shuffle_tokens"),
    (&["flip_aug"], "flip_x"),
    (&["image_size"], "resolution"),
    (&["enable_bucket"], "buckets"),
    (&["instance_prompt"], "default_caption"),
];

const SAVE: Names = &[
    (
        &["save_every_n_steps", "save_steps", "checkpointing_steps"],
        "save_every",
    ),
    (&["save_precision"], "dtype"),
    (
        &["checkpoints_total_limit", "save_total_limit"],
        "max_step_saves_to_keep",
    ),
];

const SAMPLE: Names = &[
    (&["sample_every_n_steps", "validation_steps"], "sample_every"),
    (&["validation_prompt", "validation_prompts"], "prompts"),
    (&["num_inference_steps"], "sample_steps"),
    (&["cfg_scale"], "guidance_scale"),
    (&["negative_prompt"], "neg"),
    (&["sample_sampler"], "sampler"),
];

const MODEL: Names = &[
    (
        &["pretrained_model_name_or_path", "model_name_or_path", "base_model"],
        "name_or_path",
    ),
    (&["vae"], "vae_path"),
    (&["model_type"], "arch"),
];

/// The key of a section that another trainer calls `key`, if the section has it. `is_known`: whether the section has a key.
pub(super) fn meant_key(section: &str, key: &str, is_known: impl Fn(&str) -> bool) -> Option<&'static str> {
    let names = match section {
        "train" => TRAIN,
        "network" => NETWORK,
        "datasets" => DATASETS,
        "save" => SAVE,
        "sample" | "generate" => SAMPLE,
        "model" => MODEL,
        _ => return None,
    };
    let key = key.to_ascii_lowercase().replace('-', "_");
    let (_, meant) = names.iter().find(|(names, _)| names.contains(&key.as_str()))?;
    let first = meant.split_once('.').map_or(*meant, |(first, _)| first);
    is_known(first).then_some(meant)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{MINIMAL, load_yaml, with_line_after};
    use super::*;

    #[test]
    fn a_key_with_the_name_of_another_trainer_is_an_error_that_names_ours() {
        for (after, line, expected) in [
            (
                "steps: 10",
                "        learning_rate: 1e-4",
                "`train` has no key `learning_rate`; did you mean `lr`?",
            ),
            ("steps: 10", "        max_train_steps: 3000", "did you mean `steps`?"),
            ("steps: 10", "        Max-Train-Steps: 3000", "did you mean `steps`?"),
            (
                "steps: 10",
                "        weight_decay: 0.1",
                "did you mean `optimizer_params.weight_decay`?",
            ),
        ] {
            let errors = load_yaml(&with_line_after(after, line)).unwrap_err().to_string();
            assert!(errors.contains(expected), "{line}: {errors}");
        }
        let network = MINIMAL.replace("linear: 8}", "linear: 8, network_alpha: 4}");
        let errors = load_yaml(&network).unwrap_err().to_string();
        assert!(
            errors.contains("`network` has no key `network_alpha`; did you mean `linear_alpha`?"),
            "{errors}"
        );
    }

    #[test]
    fn a_section_without_the_key_that_is_meant_keeps_its_warning() {
        assert_eq!(meant_key("train", "learning_rate", |key| key == "lr"), Some("lr"));
        assert_eq!(meant_key("train", "learning_rate", |_| false), None);
        assert_eq!(meant_key("train", "nothing_has_it", |_| true), None);
        assert_eq!(meant_key("cluster", "learning_rate", |_| true), None);
    }

    /// No name of the tables is a key of its section: such a key would be read before.
    #[test]
    fn every_key_that_is_meant_exists() {
        use super::super::dataset::DatasetConfig;
        use super::super::model::ModelConfig;
        use super::super::network::NetworkConfig;
        use super::super::sample::SampleConfig;
        use super::super::save::SaveConfig;
        use super::super::train::TrainConfig;
        let sections = [
            (TRAIN, TrainConfig::describe()),
            (NETWORK, NetworkConfig::describe()),
            (DATASETS, DatasetConfig::describe()),
            (SAVE, SaveConfig::describe()),
            (SAMPLE, SampleConfig::describe()),
            (MODEL, ModelConfig::describe()),
        ];
        for (names, section) in sections {
            let has = |key: &str| section.fields.iter().any(|field| field.key == key);
            for (foreign, meant) in names {
                let first = meant.split('.').next().unwrap();
                assert!(has(first), "`{meant}`");
                for name in *foreign {
                    assert!(!has(name), "`{name}` is a key");
                }
            }
        }
    }
}
