//! Presets of the kohya GUI's tabs for whole models, and metadata files.

use super::support::{base, folder, import_in, job};
use crate::job::process::TrainerProcess;
use crate::sd_scripts::{Script, Source, SourceFormat, import};
use std::path::Path;

fn preset(folder: &Path, fields: &str) -> Result<(Script, TrainerProcess), Vec<String>> {
    let text = format!(
        "{{\"pretrained_model_name_or_path\": \"model\", \"output_dir\": \"out\", \"max_resolution\": \"512,512\", \"optimizer\": \"AdamW\", \
         \"learning_rate\": \"1e-5\", \"caption_extension\": \".txt\", {fields}}}"
    );
    let source = Source {
        text: &text,
        format: SourceFormat::GuiPreset,
        file: "preset.json",
        directory: folder,
        dataset_config: None,
        script: None,
    };
    match import(source) {
        Ok(imported) => Ok((
            imported.script,
            job(&imported.yaml).process[0].trainer().unwrap().clone(),
        )),
        Err(errors) => Err(errors.iter().map(ToString::to_string).collect()),
    }
}

#[test]
fn the_tab_for_fine_tuning_reads_captions_as_it_would_write_them() {
    let folder = folder();
    let (script, process) = preset(
        folder.path(),
        r#""image_folder": "cats", "train_dir": "work", "create_caption": true, "dataset_repeats": "3", "epoch": 2, "train_batch_size": 2,
           "train_text_encoder": true, "use_latent_files": "No", "full_path": true"#,
    )
    .unwrap();
    assert_eq!(script, Script::FineTune);
    // 7 images, 3 times, 2 epochs, in batches of 2.
    assert_eq!((process.train.steps, process.train.train_text_encoder), (21, true));
    assert!(process.network.is_none());
    let dataset = &process.datasets[0];
    assert_eq!(
        (
            dataset.folder_path.as_deref(),
            dataset.num_repeats,
            dataset.buckets,
            dataset.caption_ext.as_str()
        ),
        (Some("cats"), 3, true, ".txt")
    );
    assert_eq!(dataset.captions_file, None);

    let (script, process) = preset(
        folder.path(),
        r#""image_folder": "cats", "train_dir": "", "caption_metadata_filename": "meta.json", "sdxl_checkbox": true, "flip_aug": true,
           "max_train_steps": 5"#,
    )
    .unwrap();
    assert_eq!(script, Script::SdxlTrain);
    assert_eq!(process.train.steps, 3);
    let dataset = &process.datasets[0];
    assert_eq!(
        (dataset.folder_path.as_deref(), dataset.captions_file.as_deref()),
        (Some("cats"), Some("meta.json"))
    );
    let errors = preset(folder.path(), r#""image_folder": """#).unwrap_err();
    assert!(
        errors[0].contains("image_folder: the preset names no images"),
        "{errors:?}"
    );
}

#[test]
fn the_tab_for_dreambooth_trains_folders_with_repeats() {
    let folder = folder();
    let fields = r#""train_data_dir": "images", "reg_data_dir": "reg", "epoch": 1, "prior_loss_weight": 0.5"#;
    let (script, process) = preset(folder.path(), fields).unwrap();
    assert_eq!(script, Script::TrainDb);
    assert_eq!((process.train.steps, process.train.train_text_encoder), (240, true));
    assert_eq!((process.datasets.len(), process.train.reg_weight), (2, 0.5));
    let (script, _) = preset(folder.path(), &format!("{fields}, \"sd3_checkbox\": true")).unwrap();
    assert_eq!(script, Script::Sd3Train);
    for (more, expected) in [
        (
            "\"stop_text_encoder_training\": 50",
            "stop_text_encoder_training: aitk trains the text encoder to the end",
        ),
        ("\"token_string\": \"cat\"", "only presets of the tabs for LoRAs"),
    ] {
        let errors = preset(folder.path(), &format!("{fields}, {more}")).unwrap_err();
        assert!(errors[0].contains(expected), "{errors:?}");
    }
    // sd-scripts sets a flag that nothing reads.
    let (script, with_padding) = preset(folder.path(), &format!("{fields}, \"no_token_padding\": true")).unwrap();
    assert_eq!((script, with_padding.train.steps), (Script::TrainDb, 240));
    let (_, process) = preset(folder.path(), &format!("{fields}, \"stop_text_encoder_training\": -1")).unwrap();
    assert!(!process.train.train_text_encoder);
    let text = format!("{}stop_text_encoder_training = 0\n", base(Script::TrainDb));
    let imported = import_in(folder.path(), &text, Some(Script::TrainDb)).unwrap();
    let job = job(&imported.yaml);
    assert!(!job.process[0].trainer().unwrap().train.train_text_encoder);
}

/// The GUI shows the fields of all families, and passes on those of the one that is chosen.
#[test]
fn fields_of_other_families_are_left_out() {
    let folder = folder();
    let lora = r#""network_dim": 4, "network_alpha": 4, "unet_lr": 1e-4, "text_encoder_lr": 0, "train_data_dir": "images", "max_train_steps": 5"#;
    let others = r#""weighting_scheme": "logit_normal", "t5xxl_max_token_length": 512, "apply_t5_attn_mask": true, "clip_l": "/x/clip_l.safetensors""#;
    let fields = format!(
        "\"LoRA_type\": \"Flux1\", \"flux1_checkbox\": true, \"timestep_sampling\": \"sigma\", \"discrete_flow_shift\": 1, \
         \"model_prediction_type\": \"raw\", {lora}, {}",
        others.replace("true", "false")
    );
    let (script, process) = preset(folder.path(), &fields).unwrap();
    assert_eq!(script, Script::FluxTrainNetwork);
    assert_eq!(process.model.extras_name_or_path.as_deref(), Some("/x"));
    let fields = format!("\"LoRA_type\": \"Standard\", \"sd3_checkbox\": true, {lora}, {others}");
    let (script, process) = preset(folder.path(), &fields).unwrap();
    assert_eq!(script, Script::Sd3TrainNetwork);
    assert_eq!(process.model.te_name_or_path, None);
    // DreamBooth has them for SD3.
    let fields = format!("\"sd3_checkbox\": true, \"train_data_dir\": \"images\", \"max_train_steps\": 5, {others}");
    let (script, process) = preset(folder.path(), &fields).unwrap();
    assert_eq!(script, Script::Sd3Train);
    assert_eq!(process.model.te_name_or_path.as_deref(), Some("/x"));
}

/// `dreambooth_gui.py` sets `train_text_encoder` by these rates.
#[test]
fn rates_of_text_encoders_of_sdxl_train_them() {
    let folder = folder();
    let fields = r#""sdxl": true, "train_data_dir": "images", "max_train_steps": 5, "learning_rate_te2": 0, "learning_rate_te1": "#;
    for (rate, expected) in [("1e-6", true), ("0", false)] {
        let (script, process) = preset(folder.path(), &format!("{fields}{rate}")).unwrap();
        assert_eq!(
            (script, process.train.train_text_encoder),
            (Script::SdxlTrain, expected),
            "{rate}"
        );
    }
}

#[test]
fn steps_of_warm_ups_cycles_and_ranks_are_those_that_the_gui_passes_on() {
    let folder = folder();
    let read = |fields: &str| {
        let lora = r#""network_dim": 4, "unet_lr": 1e-4, "lr_scheduler": "cosine_with_restarts", "epoch": 3"#;
        let fields = format!("\"LoRA_type\": \"Kohya LoCon\", {lora}, {fields}");
        preset(folder.path(), &fields).unwrap().1
    };
    let param = |process: &TrainerProcess, name: &str| {
        let value = process.train.lr_scheduler_params.get(name);
        value.and_then(serde_json::Value::as_f64)
    };
    // 25 % of 30 steps, rounded; without a dataset_config sd-scripts cuts it.
    let config = "\"dataset_config\": \"sd21_lion.dataset.toml\", \"max_train_steps\": 30, \"lr_warmup\": 25";
    let folders = config.replace(
        "\"dataset_config\": \"sd21_lion.dataset.toml\"",
        "\"train_data_dir\": \"images\"",
    );
    assert_eq!(param(&read(config), "num_warmup_steps"), Some(8.0));
    assert_eq!(param(&read(&folders), "num_warmup_steps"), Some(7.0));
    let cycles = "\"train_data_dir\": \"images\", \"max_train_steps\": 30, \"lr_scheduler_num_cycles\": ";
    assert_eq!(param(&read(&format!("{cycles}\"\"")), "T_0"), Some(10.0));
    assert_eq!(param(&read(&format!("{cycles}0")), "T_0"), None);
    let conv = |rank: u32| {
        let fields =
            format!("\"train_data_dir\": \"images\", \"max_train_steps\": 30, \"conv_dim\": {rank}, \"conv_alpha\": 0");
        read(&fields).network.unwrap()
    };
    assert_eq!(
        (conv(0).conv, conv(2).conv, conv(2).conv_alpha),
        (None, Some(2), Some(2.0))
    );
}

/// Also of fields that become no option.
#[test]
fn values_of_other_types_are_errors_at_their_fields() {
    let folder = folder();
    let lora = "\"LoRA_type\": \"Standard\", \"train_data_dir\": \"images\", \"text_encoder_lr\": 1e-5";
    for (field, expected) in [
        ("\"sdxl\": 0.5", "sdxl: expected true or false, found 0.5"),
        ("\"unet_lr\": \"1e-4x\"", "unet_lr: expected a number, found \"1e-4x\""),
        (
            "\"max_train_steps\": true",
            "max_train_steps: expected a number, found true",
        ),
        (
            "\"sample_prompts\": [\"a cat\"]",
            "sample_prompts: expected one value, found a list",
        ),
        (
            "\"conv_dim\": {\"a\": 1}",
            "conv_dim: expected one value, found a table",
        ),
    ] {
        let errors = preset(folder.path(), &format!("{lora},\n{field}")).unwrap_err();
        assert!(
            errors.len() == 1 && errors[0].starts_with("preset.json:2:1: ") && errors[0].ends_with(expected),
            "{errors:?}"
        );
    }
    let switches = "\"sdxl\": \"True\", \"max_train_steps\": \" 5 \", \"unet_lr\": \" \"";
    let (script, process) = preset(folder.path(), &format!("{lora}, {switches}")).unwrap();
    assert_eq!(
        (script, process.train.steps, process.train.train_unet),
        (Script::SdxlTrainNetwork, 5, false)
    );
}

/// Only the images of the file are counted.
#[test]
fn a_metadata_file_has_captions_and_says_which_images_are_trained() {
    let folder = folder();
    let common = base(Script::FineTune).replace("\"images\"", "\"cats\"");
    let import = |more: &str| import_in(folder.path(), &format!("{common}{more}\n"), Some(Script::FineTune));
    let imported = import("in_json = \"meta.json\"\nmax_train_epochs = 5\ndataset_repeats = 2").unwrap();
    let job = job(&imported.yaml);
    let process = job.process[0].trainer().unwrap();
    assert_eq!(process.train.steps, 20);
    assert_eq!(process.datasets[0].captions_file.as_deref(), Some("meta.json"));
    for (name, text, expected) in [
        ("none.json", None, "`none.json` cannot be read"),
        ("list.json", Some("[]"), "`list.json`: expected a JSON object"),
    ] {
        if let Some(text) = text {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let errors = import(&format!("in_json = \"{name}\"")).unwrap_err();
        assert!(
            errors[0].to_string().contains(expected) && errors[0].line == Some(6),
            "{errors:?}"
        );
    }
}

#[test]
fn a_lokr_that_splits_nothing_has_no_tucker_and_no_decomposition() {
    let folder = folder();
    let import = |rank: u32| {
        let text = format!(
            "{}network_train_unet_only = true\nnetwork_dim = {rank}\nnetwork_args = [\"algo=lokr\", \"use_cp=True\", \"decompose_both=True\", \
             \"rank_dropout_scale=True\"]\n",
            base(Script::TrainNetwork).replace("networks.lora", "lycoris.kohya")
        );
        import_in(folder.path(), &text, None)
    };
    for (rank, splits) in [(100_000, false), (8, true)] {
        let imported = import(rank).unwrap();
        let network = job(&imported.yaml).process[0].trainer().unwrap().network.clone();
        let kwargs = network.unwrap().network_kwargs;
        assert_eq!([kwargs.use_cp, kwargs.decompose_both], [splits; 2], "{rank}");
    }
}
