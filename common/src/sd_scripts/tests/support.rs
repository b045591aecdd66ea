//! Folders and configs for the tests.

use crate::job::{Finding, Format, JobSpec, LoadOptions, parse};
use crate::sd_scripts::{Imported, Script, Source, SourceFormat, import};
use std::path::{Path, PathBuf};

/// The folder of the examples.
pub(super) fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../config/examples/sd-scripts")
}

/// The folder of the configs that train tiny models.
pub(super) fn trained_configs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/sd_scripts")
}

/// A folder with these configs, the images that they name, and the tiny models as `models`.
pub(super) fn trained_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(trained_configs()).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    for (name, images, caption) in [
        ("images/2_a circle", 3, "a red circle"),
        ("reg/1_circle", 2, ""),
        ("cats", 3, "a cat, black"),
        ("more_cats", 2, "a cat; white"),
        ("masks", 3, ""),
    ] {
        let path = folder.path().join(name);
        std::fs::create_dir_all(&path).unwrap();
        for index in 0..images {
            std::fs::write(path.join(format!("{index}.png")), png(32, 32)).unwrap();
            // The first image has no caption file.
            if index > 0 && !caption.is_empty() {
                std::fs::write(path.join(format!("{index}.txt")), caption).unwrap();
            }
        }
    }
    let models = trained_configs().join("..").canonicalize().unwrap();
    std::os::unix::fs::symlink(models, folder.path().join("models")).unwrap();
    folder
}

/// A folder with the examples and the images that they name.
pub(super) fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(examples()).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    for (name, images) in [
        ("images/10_sks dog", 12),
        ("reg/1_dog", 4),
        ("cats", 7),
        ("more_cats", 5),
        ("masks", 7),
    ] {
        let path = folder.path().join(name);
        std::fs::create_dir_all(&path).unwrap();
        for index in 0..images {
            std::fs::write(path.join(format!("{index}.png")), png(640, 480)).unwrap();
        }
    }
    std::fs::write(folder.path().join("lora.safetensors"), lora_file()).unwrap();
    let state = folder.path().join("output/cat-state");
    std::fs::create_dir_all(&state).unwrap();
    std::fs::write(state.join("model.safetensors"), lora_file()).unwrap();
    std::fs::write(
        state.join("train_state.json"),
        "{\"current_epoch\": 1, \"current_step\": 4}",
    )
    .unwrap();
    let metadata = r#"{"0": {"caption": "a cat", "tags": "red, small", "train_resolution": [512, 512]}, "/x/cats/3.png": {"tags": "blue"}}"#;
    std::fs::write(folder.path().join("meta.json"), metadata).unwrap();
    folder
}

/// A LoRA of a linear layer of rank 6, another of rank 2, and a convolution of rank 3.
fn lora_file() -> Vec<u8> {
    let mut data = 0;
    let mut tensors = serde_json::Map::new();
    for (name, shape) in [
        (
            "lora_unet_mid_block_attentions_0_proj_in.lora_down.weight",
            vec![6, 8, 1, 1],
        ),
        (
            "lora_unet_mid_block_attentions_0_proj_in.lora_up.weight",
            vec![8, 6, 1, 1],
        ),
        ("lora_unet_mid_block_resnets_0_conv1.lora_down.weight", vec![3, 8, 3, 3]),
        ("lora_unet_mid_block_resnets_0_conv1.lora_up.weight", vec![8, 3, 1, 1]),
        (
            "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight",
            vec![2, 8],
        ),
        ("lora_te_text_model_encoder_layers_0_mlp_fc1.lora_up.weight", vec![8, 2]),
    ] {
        let bytes: usize = shape.iter().product::<usize>() * 2;
        let entry = serde_json::json!({"dtype": "F16", "shape": shape, "data_offsets": [data, data + bytes]});
        tensors.insert(name.to_owned(), entry);
        data += bytes;
    }
    let header = serde_json::to_vec(&tensors).unwrap();
    let length = (header.len() as u64).to_le_bytes();
    [length.to_vec(), header, vec![0; data]].concat()
}

/// The first bytes of a PNG of this size.
pub(super) fn png(width: u32, height: u32) -> Vec<u8> {
    let mut bytes = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR".to_vec();
    bytes.extend(width.to_be_bytes());
    bytes.extend(height.to_be_bytes());
    bytes.extend([8, 2, 0, 0, 0]);
    bytes
}

/// Imports a TOML text in a folder.
pub(super) fn import_in(folder: &Path, text: &str, script: Option<Script>) -> Result<Imported, Vec<Finding>> {
    import(Source {
        text,
        format: SourceFormat::Toml,
        file: "config.toml",
        directory: folder,
        dataset_config: None,
        script,
    })
}

/// Parses a config, which must give no warning. Returns its job without the positions of its keys.
pub(super) fn job(yaml: &str) -> JobSpec {
    let options = LoadOptions {
        env: &|name| Some(name.to_owned()),
        ..LoadOptions::default()
    };
    let mut loaded = parse(yaml, Format::Yaml, None, &options).unwrap_or_else(|error| panic!("{error}\n{yaml}"));
    assert_eq!(loaded.warnings, [], "{yaml}");
    loaded.spec.positions.clear();
    loaded.spec
}

/// A small config of a script that is imported.
pub(super) fn base(script: Script) -> String {
    let common = "train_data_dir = \"images\"\noutput_dir = \"output\"\nresolution = \"512\"\nmax_train_steps = 10\n";
    let of_script = match script {
        Script::TrainNetwork => "pretrained_model_name_or_path = \"sd15\"\nnetwork_module = \"networks.lora\"\n",
        Script::SdxlTrainNetwork => "pretrained_model_name_or_path = \"sdxl\"\nnetwork_module = \"networks.lora\"\n",
        Script::FluxTrainNetwork => {
            "pretrained_model_name_or_path = \"flux1\"\nnetwork_module = \"networks.lora_flux\"\nnetwork_alpha = 4\n\
             timestep_sampling = \"sigmoid\"\nmodel_prediction_type = \"raw\"\n"
        }
        Script::Sd3TrainNetwork => {
            "pretrained_model_name_or_path = \"sd35\"\nnetwork_module = \"networks.lora_sd3\"\nnetwork_alpha = 4\n"
        }
        Script::TrainDb | Script::FineTune => "pretrained_model_name_or_path = \"sd15\"\n",
        Script::SdxlTrain => "pretrained_model_name_or_path = \"sdxl\"\n",
        Script::FluxTrain => {
            "pretrained_model_name_or_path = \"flux1\"\ntimestep_sampling = \"sigmoid\"\nmodel_prediction_type = \"raw\"\n"
        }
        Script::Sd3Train => "pretrained_model_name_or_path = \"sd35\"\n",
        Script::TrainTextualInversion => "pretrained_model_name_or_path = \"sd15\"\ntoken_string = \"vorx\"\n",
        Script::SdxlTrainTextualInversion => "pretrained_model_name_or_path = \"sdxl\"\ntoken_string = \"vorx\"\n",
    };
    format!("{common}{of_script}")
}
