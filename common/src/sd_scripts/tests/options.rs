//! Every option of the table has the effect that its line says.

use super::support::{base, folder, import_in, job};
use crate::job::values::ImageSize;
use crate::sd_scripts::Script;
use crate::sd_scripts::option::{Fate, Kind, OptionRow};
use crate::sd_scripts::options;
use std::path::Path;

/// Lines that an option needs beside it to have an effect, and its value.
fn setting(name: &str) -> Option<(&'static str, &'static str)> {
    Some(match name {
        "pretrained_model_name_or_path" | "train_data_dir" | "output_dir" | "network_module" | "resolution" => {
            return None;
        }
        "max_train_steps" | "model_prediction_type" => return None,
        "token_string" => ("\"glorp\"", ""),
        "num_vectors_per_token" => ("3", ""),
        "train_batch_size" => ("3", ""),
        "v2" => ("true", "v_parameterization = true"),
        "clip_l" | "clip_g" | "t5xxl" => ("\"/models/text/x.safetensors\"", ""),
        "base_weights" => ("[\"a.safetensors\"]", ""),
        "base_weights_multiplier" => ("[0.5]", "base_weights = [\"a.safetensors\"]"),
        "t5xxl_max_token_length" => ("100", ""),
        "network_dim" => ("8", "network_alpha = 8"),
        "network_alpha" => ("2", "network_dim = 2"),
        "network_args" => ("[\"module_dropout=0.1\"]", ""),
        "network_dropout" => ("0.1", ""),
        "resume" => ("\"output/cat-state\"", ""),
        "initial_step" => ("3", ""),
        "dim_from_weights" => ("true", "network_weights = \"lora.safetensors\""),
        "stop_text_encoder_training" => ("-1", ""),
        "learning_rate" | "unet_lr" => ("1e-4", "network_train_unet_only = true"),
        "text_encoder_lr" => ("[0, 0]", ""),
        "huggingface_repo_id" => ("\"me/cat\"", ""),
        "huggingface_repo_visibility" => ("\"public\"", "huggingface_repo_id = \"me/cat\""),
        "learning_rate_te" => ("1e-3", "train_text_encoder = true"),
        "learning_rate_te1" | "learning_rate_te2" => ("1e-3", ""),
        "in_json" => ("\"meta.json\"", ""),
        "optimizer_type" => ("\"Lion\"", ""),
        "optimizer_args" => ("[\"weight_decay=0.5\"]", ""),
        "lr_scheduler" => ("\"cosine\"", ""),
        "lr_scheduler_type" => ("\"StepLR\"", "lr_scheduler_args = [\"step_size=3\"]"),
        "lr_scheduler_args" => (
            "[\"T_max=7\", \"eta_min=0e-0\"]",
            "lr_scheduler_type = \"CosineAnnealingLR\"",
        ),
        "lr_warmup_steps" => ("5", "lr_scheduler = \"cosine\""),
        "lr_scheduler_num_cycles" => ("2", "lr_scheduler = \"cosine_with_restarts\""),
        "lr_scheduler_power" => ("2", "lr_scheduler = \"polynomial\""),
        "lr_scheduler_min_lr_ratio" => ("0.5", "lr_scheduler = \"cosine_with_min_lr\""),
        "max_train_epochs" => ("2", ""),
        "mixed_precision" => ("\"bf16\"", ""),
        "full_fp16" => ("true", "mixed_precision = \"fp16\""),
        "fp8_base" | "fp8_base_unet" => ("true", "mixed_precision = \"bf16\""),
        "full_bf16" => ("true", "mixed_precision = \"bf16\""),
        "cache_text_encoder_outputs" | "cache_text_encoder_outputs_to_disk" => {
            ("true", "network_train_unet_only = true")
        }
        "split_mode" => ("true", ""),
        "max_timestep" => ("900", ""),
        "adaptive_noise_scale" => ("0.05", "noise_offset = 0.1"),
        "noise_offset_random_strength" => ("true", "noise_offset = 0.1"),
        "scale_weight_norms" => ("1", ""),
        "multires_noise_iterations" => ("6", ""),
        "multires_noise_discount" => ("0.5", "multires_noise_iterations = 6"),
        "ip_noise_gamma" => ("0.1", ""),
        "ip_noise_gamma_random_strength" => ("true", "ip_noise_gamma = 0.1"),
        "debiased_estimation_loss" => ("true", ""),
        "loss_type" => ("\"l1\"", ""),
        "huber_schedule" => ("\"constant\"", "loss_type = \"huber\"\nhuber_c = 0.01"),
        "huber_c" => ("0.01", "loss_type = \"huber\"\nhuber_schedule = \"constant\""),
        "huber_scale" => ("0.1", "loss_type = \"huber\"\nhuber_schedule = \"constant\""),
        "timestep_sampling" => ("\"uniform\"", ""),
        "discrete_flow_shift" => ("3.1582", "timestep_sampling = \"shift\""),
        "weighting_scheme" => (
            "\"logit_normal\"",
            "timestep_sampling = \"sigma\"\ndiscrete_flow_shift = 1",
        ),
        "validation_split" => ("0.5", "validation_seed = 1\nvalidate_every_n_steps = 5"),
        "validation_seed" => ("7", "validation_split = 0.5"),
        "validate_every_n_steps" | "validate_every_n_epochs" => ("3", "validation_split = 0.5"),
        "max_validation_steps" => ("1", "validation_split = 0.5"),
        "apply_t5_attn_mask" | "apply_lg_attn_mask" => (
            "true",
            "cache_text_encoder_outputs = true\nnetwork_train_unet_only = true",
        ),
        "clip_skip" => ("2", ""),
        "max_token_length" => ("225", ""),
        "logit_std" => ("0.5", "weighting_scheme = \"logit_normal\""),
        "masked_loss" => ("true", "dataset_config = \"sdxl_masked.dataset.toml\""),
        "reg_data_dir" => ("\"reg\"", ""),
        "dataset_config" => ("\"sd21_lion.dataset.toml\"", ""),
        "dataset_repeats" => ("3", "dataset_config = \"sd21_lion.dataset.toml\""),
        "caption_extension" | "caption_extention" => ("\".txt\"", ""),
        "keep_tokens" => ("1", "caption_tag_dropout_rate = 0.1"),
        "keep_tokens_separator" => ("\"|||\"", "shuffle_caption = true"),
        "caption_separator" => ("\";\"", "shuffle_caption = true"),
        "caption_dropout_rate" | "caption_tag_dropout_rate" => ("0.1", ""),
        "random_crop" => ("true", "enable_bucket = true"),
        "bucket_no_upscale" => ("true", "enable_bucket = true"),
        "save_every_n_epochs" => ("1", ""),
        "save_n_epoch_ratio" => ("1", ""),
        "save_last_n_steps" => ("10", "save_every_n_steps = 5"),
        "save_last_n_epochs" => ("2", "save_every_n_epochs = 1"),
        "save_precision" => ("\"fp16\"", ""),
        "save_model_as" => ("\"ckpt\"", ""),
        "sample_prompts" => ("\"prompts.txt\"", "sample_at_first = true"),
        "sample_every_n_steps" => ("5", "sample_prompts = \"prompts.txt\""),
        "sample_every_n_epochs" => ("1", "sample_prompts = \"prompts.txt\""),
        "sample_at_first" => ("true", "sample_prompts = \"prompts.txt\"\nsample_every_n_steps = 5"),
        "sample_sampler" => (
            "\"euler\"",
            "sample_prompts = \"prompts.txt\"\nsample_every_n_steps = 5",
        ),
        _ => return None,
    })
}

fn value(row: &OptionRow) -> String {
    match row.kind {
        Kind::Flag => "true".to_owned(),
        Kind::Text => "\"some text\"".to_owned(),
        Kind::Whole => "7".to_owned(),
        Kind::Number | Kind::Numbers => "0.25".to_owned(),
        Kind::Texts => "[\"a=1\"]".to_owned(),
        Kind::Choice(names) => format!("\"{}\"", names[names.len() - 1]),
        Kind::Size => "\"640\"".to_owned(),
        Kind::Table => "{a = 1}".to_owned(),
    }
}

/// A config in TOML; a later line replaces an earlier one of the same option.
fn merged(lines: &str) -> String {
    let mut kept: Vec<(&str, &str)> = Vec::new();
    for line in lines.lines().filter(|line| !line.is_empty()) {
        let key = line.split_once(" = ").map_or(line, |(key, _)| key);
        kept.retain(|(known, _)| *known != key);
        kept.push((key, line));
    }
    kept.iter().map(|(_, line)| format!("{line}\n")).collect()
}

/// The scripts that an option is tried with: those that have it.
fn scripts(row: &OptionRow) -> impl Iterator<Item = Script> {
    Script::ALL
        .into_iter()
        .filter(|script| row.used_by.includes(script.bits()))
}

#[test]
fn every_option_has_the_effect_that_its_line_says() {
    let folder = folder();
    for row in options::rows() {
        let mut seen = false;
        for script in scripts(row) {
            seen = true;
            try_option(folder.path(), row, script);
        }
        assert!(seen, "{} belongs to no script", row.name);
    }
}

fn try_option(folder: &Path, row: &OptionRow, script: Script) {
    let name = row.name;
    let at = format!("{name} of {}", script.name());
    let (value, beside) = setting(name).map_or((value(row), ""), |(value, beside)| (value.to_owned(), beside));
    // What is beside the option is left out where the script does not have it.
    let beside: String = beside
        .lines()
        .filter(|line| {
            let key = line.split_once(" = ").map_or(*line, |(key, _)| key);
            options::find(key).is_some_and(|row| row.used_by.includes(script.bits()))
        })
        .map(|line| format!("{line}\n"))
        .collect();
    let without = merged(&format!("{}{beside}", base(script)));
    // It shares its bits with train_db, and has no masks.
    if (name, script) == ("masked_loss", Script::FineTune) {
        let errors = import_in(folder, &without, Some(script)).expect_err(&at);
        assert!(
            errors.iter().all(|error| error.key == "conditioning_data_dir"),
            "{at}: {errors:?}"
        );
        return;
    }
    let with = merged(&format!("{without}{name} = {value}\n"));
    let (before, after) = (
        import_in(folder, &without, Some(script)),
        import_in(folder, &with, Some(script)),
    );
    match row.fate {
        Fate::Refused { .. } => {
            let errors = after.expect_err(&at);
            let error = errors
                .iter()
                .find(|error| error.key == name)
                .unwrap_or_else(|| panic!("{at}: {errors:?}"));
            assert!(error.line.is_some() && !error.message.is_empty(), "{at}: {error}");
        }
        Fate::Noted(_) => {
            let after = after.unwrap_or_else(|errors| panic!("{at}: {errors:?}"));
            assert!(
                after.notes.iter().any(|note| note.key == name),
                "{at}: {:?}",
                after.notes
            );
            assert_eq!(job(&after.yaml), job(&before.unwrap().yaml), "{at}");
        }
        Fate::NoInfluence(_) => {
            let after = after.unwrap_or_else(|errors| panic!("{at}: {errors:?}"));
            assert!(
                after.notes.iter().all(|note| note.key != name),
                "{at}: {:?}",
                after.notes
            );
            assert_eq!(job(&after.yaml), job(&before.unwrap().yaml), "{at}");
        }
        Fate::Translated(_) => match after {
            Err(errors) => {
                assert!(before.is_ok(), "{at}: fails without it: {errors:?}");
                let said = REFUSED_VALUES.iter().find(|(option, _)| *option == name);
                let (_, said) = said.unwrap_or_else(|| panic!("{at}: {errors:?}"));
                for error in &errors {
                    assert!(
                        error.key == name && error.line.is_some() && error.message.contains(*said),
                        "{at}: \"{said}\" is not in {error}"
                    );
                }
            }
            Ok(after) => {
                let Ok(before) = before else { return };
                let is_noted = after.notes.iter().any(|note| note.key == name);
                assert!(
                    WITHOUT_CHANGE.contains(&name) || is_noted || job(&after.yaml) != job(&before.yaml),
                    "{at}:\n{}",
                    after.yaml
                );
            }
        },
    }
}

/// Translated options that are refused with the values above, by all scripts or by some, and what the error says.
const REFUSED_VALUES: &[(&str, &str)] = &[
    ("base_weights_multiplier", "rescale the file"),
    ("t5xxl_max_token_length", "not 100: remove it"),
    ("network_module", "aitk has no `some text`"),
    ("train_text_encoder", "trains the transformer alone"),
    ("fused_backward_pass", "needs optimizer_type Adafactor"),
    ("full_fp16", "does not train a whole model in float16"),
    ("cache_text_encoder_outputs", "contradicts the training of a word"),
    (
        "cache_text_encoder_outputs_to_disk",
        "contradicts the training of a word",
    ),
    ("resume", "of trainings of a LoRA alone"),
    ("min_timestep", "from the whole range"),
    ("max_timestep", "from the whole range"),
    ("model_prediction_type", "only raw is supported"),
    ("weighting_scheme", "draws no such timesteps"),
    ("train_data_dir", "cannot be read as a folder"),
];

/// Translated options that change nothing with the values above: what they say is already so.
const WITHOUT_CHANGE: &[&str] = &[
    "stop_text_encoder_training",
    "bucket_no_upscale",
    "network_train_text_encoder_only",
    "train_text_encoder",
    "learning_rate_te1",
    "learning_rate_te2",
    "weighting_scheme",
    "full_bf16",
    "save_model_as",
    "network_module",
    "max_timestep",
    "train_data_dir",
    "save_precision",
];

#[test]
fn an_option_of_another_script_is_ignored_with_a_note() {
    let folder = folder();
    let text = format!(
        "{}noise_offset = 0.1\nmin_snr_gamma = 5\n",
        base(Script::FluxTrainNetwork)
    );
    let imported = import_in(folder.path(), &text, None).unwrap();
    assert_eq!(imported.script, Script::FluxTrainNetwork);
    let keys: Vec<&str> = imported.notes.iter().map(|note| note.key.as_str()).collect();
    assert!(
        keys.contains(&"noise_offset") && keys.contains(&"min_snr_gamma"),
        "{keys:?}"
    );
    // Only scripts of LoRAs read it, and need a mixed_precision for it.
    for script in [Script::SdxlTrain, Script::FluxTrain, Script::TrainTextualInversion] {
        let read = |text: &str| import_in(folder.path(), text, Some(script)).unwrap();
        let (without, with) = (read(&base(script)), read(&format!("{}fp8_base = true\n", base(script))));
        assert_eq!(job(&with.yaml), job(&without.yaml), "{}", script.name());
        let note = format!("ignored: {}.py does not use it", script.name());
        assert!(
            with.notes
                .iter()
                .any(|found| found.key == "fp8_base" && found.message == note),
            "{:?}",
            with.notes
        );
    }
}

/// `encode_tokens` of `strategy_sd3.py` masks nothing unless its caller says so, and only the one that caches its outputs does.
#[test]
fn sd3_masks_the_padding_of_cached_text_alone() {
    let folder = folder();
    let masks = |script: Script, more: &str| {
        let text = format!("{}apply_t5_attn_mask = true\n{more}", base(script));
        let imported = import_in(folder.path(), &text, Some(script)).unwrap();
        let model = job(&imported.yaml).process[0].trainer().unwrap().model.clone();
        let found = (model.apply_t5_attn_mask, model.apply_lg_attn_mask);
        let noted = |option: &str| {
            let of_option =
                |note: &crate::job::Finding| note.key == option && note.message.contains("as by sd-scripts");
            imported.notes.iter().any(of_option)
        };
        assert_eq!(noted("apply_t5_attn_mask"), !found.0, "{more}");
        assert_eq!(noted("apply_lg_attn_mask"), more.contains("lg") && !found.1, "{more}");
        found
    };
    assert_eq!(masks(Script::FluxTrainNetwork, ""), (true, false));
    let of_clip = "apply_lg_attn_mask = true\n";
    for (script, lines, expected) in [
        (Script::Sd3TrainNetwork, "", (false, false)),
        (
            Script::Sd3TrainNetwork,
            "network_train_unet_only = true\n",
            (false, false),
        ),
        (
            Script::Sd3TrainNetwork,
            "cache_text_encoder_outputs = true\n",
            (true, false),
        ),
        (
            Script::Sd3TrainNetwork,
            "cache_text_encoder_outputs_to_disk = true\nnetwork_train_unet_only = true\n",
            (true, true),
        ),
        (Script::Sd3Train, "", (false, false)),
        (Script::Sd3Train, "cache_text_encoder_outputs = true\n", (true, true)),
        (Script::Sd3Train, "use_t5xxl_cache_only = true\n", (true, false)),
    ] {
        assert_eq!(
            masks(script, &format!("{of_clip}{lines}")),
            expected,
            "{}: {lines}",
            script.name()
        );
    }
}

/// The loss of `sdxl_train.py`, `fine_tune.py` and of SD3 (`sd3_train_utils.py`).
#[test]
fn options_that_the_loss_of_a_script_does_not_have_are_ignored() {
    let folder = folder();
    let read = |script: Script, more: &str| {
        import_in(folder.path(), &format!("{}{more}\n", base(script)), Some(script)).unwrap()
    };
    for (script, option, value) in [
        (Script::Sd3TrainNetwork, "ip_noise_gamma", "0.1"),
        (Script::SdxlTrain, "prior_loss_weight", "0.5"),
        (Script::SdxlTrain, "alpha_mask", "true"),
        (Script::FineTune, "alpha_mask", "true"),
    ] {
        let (without, with) = (read(script, ""), read(script, &format!("{option} = {value}")));
        assert_eq!(job(&with.yaml), job(&without.yaml), "{option}");
        assert!(
            with.notes.iter().any(|note| note.key == option),
            "{option}: {:?}",
            with.notes
        );
    }
    let with = read(Script::SdxlTrain, "alpha_mask = true\nmin_snr_gamma = 5");
    assert!(job(&with.yaml).process[0].trainer().unwrap().datasets[0].alpha_mask);
}

#[test]
fn images_smaller_than_the_resolution_are_noted() {
    let folder = folder();
    let notes = |more: &str| {
        let text = merged(&format!(
            "{}resolution = \"1024\"\nenable_bucket = true\n{more}",
            base(Script::TrainNetwork)
        ));
        import_in(folder.path(), &text, None).unwrap().notes
    };
    let found = notes("");
    assert!(
        found.len() == 1
            && found[0]
                .message
                .contains("12 images of `images/10_sks dog` are smaller"),
        "{found:?}"
    );
    assert_eq!(notes("bucket_no_upscale = true\n"), []);
    assert_eq!(notes("resolution = \"512\"\n"), []);
}

/// The weights of blocks, beside those of text encoders and LoRA+; names as `networks/lora.py` counts blocks (`get_block_index`).
#[test]
fn blocks_have_their_own_learning_rates() {
    let folder = folder();
    let read = |script: Script, arguments: &str| {
        let text = merged(&format!(
            "{}text_encoder_lr = 5e-5\nlearning_rate = 1e-4\nnetwork_args = [{arguments}]\n",
            base(script)
        ));
        let job = job(&import_in(folder.path(), &text, Some(script)).unwrap().yaml);
        let process = job.process[0].trainer().unwrap();
        let factors = process.train.lr_factors.iter();
        let factors: Vec<String> = factors
            .map(|one| format!("{} {:.4}", one.contains, one.factor))
            .collect();
        let network = process.network.as_ref().unwrap();
        (factors, network.network_kwargs.ignore_if_contains.0.clone())
    };
    let (factors, ignored) = read(
        Script::TrainNetwork,
        "\"down_lr_weight=9,0.5,1,0,0.25,0.1,1,1,1,1,1,1\", \"mid_lr_weight=2\", \"up_lr_weight=zeros+1\", \"block_lr_zero_threshold=0.1\"",
    );
    assert_eq!(
        factors,
        [
            "lora_te 0.5000",
            "down_blocks_0_attentions_0_ 0.5000",
            "down_blocks_1_attentions_0_ 0.2500",
            "mid_block_ 2.0000"
        ]
    );
    assert_eq!(ignored, ["down_blocks.1.attentions.1."]);

    let (factors, ignored) = read(
        Script::SdxlTrainNetwork,
        "\"up_lr_weight=0,1,0.5,1,1,1,1,0.3,0\", \"mid_lr_weight=0,0.7\", \"conv_dim=4\", \"loraplus_unet_lr_ratio=4\"",
    );
    assert_eq!(
        factors[1..],
        [
            "mid_block_attentions_0_*lora_up 2.8000",
            "mid_block_attentions_0_ 0.7000",
            "up_blocks_0_attentions_2_*lora_up 2.0000",
            "up_blocks_0_attentions_2_ 0.5000",
            "up_blocks_0_resnets_2_*lora_up 2.0000",
            "up_blocks_0_resnets_2_ 0.5000",
            "up_blocks_0_upsamplers_0_*lora_up 2.0000",
            "up_blocks_0_upsamplers_0_ 0.5000",
            "up_blocks_2_resnets_1_*lora_up 1.2000",
            "up_blocks_2_resnets_1_ 0.3000",
            "lora_up 4.0000",
        ]
    );
    assert_eq!(
        ignored,
        [
            "mid_block.resnets.0.",
            "up_blocks.0.attentions.0.",
            "up_blocks.0.resnets.0.",
            "up_blocks.2.resnets.2."
        ]
    );
}

#[test]
fn sizes_without_buckets_are_kept() {
    let folder = folder();
    let dataset = |more: &str| {
        let text = merged(&format!("{}{more}", base(Script::TrainNetwork)));
        let job = job(&import_in(folder.path(), &text, None).unwrap().yaml);
        let dataset = job.process[0].trainer().unwrap().datasets[0].clone();
        (dataset.size, dataset.resolution.0[0], dataset.buckets)
    };
    let size = Some(ImageSize(512, 768));
    assert_eq!(dataset("resolution = \"512,768\"\n"), (size, 627, false));
    assert_eq!(dataset("resolution = \"512,512\"\n"), (None, 512, false));
    assert_eq!(
        dataset("resolution = \"512,768\"\nenable_bucket = true\n"),
        (None, 627, true)
    );
}

#[test]
fn a_lokr_with_a_rank_above_all_sides_is_not_split() {
    let folder = folder();
    let text = format!(
        "{}network_train_unet_only = true\nnetwork_dim = 100000\nnetwork_args = [\"algo=lokr\", \"factor=6\"]\n",
        base(Script::TrainNetwork)
    );
    let text = text.replace("networks.lora", "lycoris.kohya");
    let imported = import_in(folder.path(), &text, None).unwrap();
    let job = job(&imported.yaml);
    let network = job.process[0].trainer().unwrap().network.as_ref().unwrap();
    assert!(network.lokr_full_rank && *network.lokr_factor == 6, "{}", imported.yaml);
}

/// Text encoders with rates of their own: the text, and `train.lr_factors`.
#[test]
fn text_encoders_have_their_own_learning_rates() {
    let factors = |script: Script, text: &str| {
        let dir = folder();
        let text = format!("{}\nunet_lr = 1e-4\n{text}", base(script));
        let config = job(&import_in(dir.path(), &text, Some(script)).unwrap().yaml);
        let train = &config.process[0].trainer().unwrap().train;
        assert_eq!(train.lr, 1e-4);
        let of =
            |factor: &crate::job::lr_factor::LrFactor| (factor.contains.clone(), (factor.factor * 1e6).round() / 1e6);
        (
            train.train_text_encoder,
            train.lr_factors.iter().map(of).collect::<Vec<_>>(),
        )
    };
    let one = |name: &str, factor: f64| (name.to_owned(), factor);
    assert_eq!(
        factors(Script::TrainNetwork, "text_encoder_lr = 5e-5"),
        (true, vec![one("lora_te", 0.5)])
    );
    assert_eq!(factors(Script::TrainNetwork, "text_encoder_lr = 1e-4"), (true, vec![]));
    assert_eq!(factors(Script::TrainNetwork, "text_encoder_lr = 0"), (false, vec![]));
    assert_eq!(
        factors(Script::SdxlTrainNetwork, "text_encoder_lr = 2e-4"),
        (true, vec![one("lora_te", 2.0)])
    );
    // `networks/lora.py` has no `prepare_optimizer_params_with_multiple_te_lrs`, so that train_network.py gives it the first rate alone.
    assert_eq!(
        factors(Script::SdxlTrainNetwork, "text_encoder_lr = [5e-5, 0]"),
        (true, vec![one("lora_te", 0.5)])
    );
    assert_eq!(
        factors(Script::SdxlTrainNetwork, "text_encoder_lr = [0, 5e-5]"),
        (false, vec![])
    );
    assert_eq!(
        factors(Script::FluxTrainNetwork, "text_encoder_lr = [5e-5, 0]"),
        (true, vec![one("text_encoder", 0.5)])
    );
    // 1e-4 / 2e-6 is 50.00000000000001.
    let dir = folder();
    let text = format!("{}unet_lr = 2e-6\ntext_encoder_lr = 1e-4\n", base(Script::TrainNetwork));
    let yaml = import_in(dir.path(), &text, None).unwrap().yaml;
    assert!(yaml.contains("factor: 50\n"), "{yaml}");
    // Of SD3, two rates are those of CLIP-L, and of CLIP-G and T5.
    let two = vec![one("text_encoder.", 0.5), one("text_encoder_2.", 2.0)];
    for rates in ["[5e-5, 2e-4]", "[5e-5, 2e-4, 0]"] {
        let lines = format!("text_encoder_lr = {rates}");
        assert_eq!(factors(Script::Sd3TrainNetwork, &lines), (true, two.clone()), "{rates}");
    }
    // LoRA+: the second matrices have a rate of their own, in the U-Net and in the text encoders.
    let all = "network_args = [\"loraplus_lr_ratio=16\"]\n";
    assert_eq!(
        factors(Script::TrainNetwork, &format!("{all}text_encoder_lr = 5e-5")),
        (
            true,
            vec![one("lora_te*lora_up", 8.0), one("lora_te", 0.5), one("lora_up", 16.0)]
        )
    );
    assert_eq!(
        factors(
            Script::FluxTrainNetwork,
            &format!("{all}network_train_unet_only = true")
        ),
        (false, vec![one("lora_B", 16.0)])
    );
    let unet = "network_args = [\"loraplus_unet_lr_ratio=4\"]\ntext_encoder_lr = 1e-4";
    assert_eq!(
        factors(Script::TrainNetwork, unet),
        (true, vec![one("lora_te", 1.0), one("lora_up", 4.0)])
    );
}
