//! Saves a fine-tuned transformer and loads it again. Diffusers checks the saved ones in `tests/reference/check_saves.py`.

use super::{FLUX, FluxModel};
use crate::families::transformer_folder::TransformerWriter;
use crate::families::{LoadOptions, META_FILE, Model, ModelWriter, SaveOptions, saved_step};
use crate::testing::{fixtures, gap};
use crate::weights::{Index, TrainableFilter};
use candle_core::{DType, Device, Tensor};
use std::collections::BTreeMap;
use std::path::PathBuf;

fn trained_model() -> FluxModel {
    let options = LoadOptions::cpu().training(TrainableFilter::everything(), TrainableFilter::Nothing);
    FluxModel::load(&FLUX, fixtures().join("tiny_flux"), &options).unwrap()
}

fn values(model: &FluxModel) -> BTreeMap<String, Tensor> {
    let trained = model.trained().iter();
    trained
        .map(|(name, var)| (name.clone(), var.as_detached_tensor()))
        .collect()
}

#[test]
fn a_folder_is_saved_in_one_file_or_several_and_loads_again() {
    let keep = std::env::var_os("AITK_KEEP_SAVES").map(PathBuf::from);
    let model = trained_model();
    for (_, var) in model.trained() {
        var.set(&(var.as_tensor() * 0.5).unwrap()).unwrap();
    }
    let trained = values(&model);
    let options = |dtype| SaveOptions {
        dtype,
        metadata: BTreeMap::from([("training_info".to_owned(), "{\"step\": 7, \"epoch\": 0}".to_owned())]),
        v_prediction: false,
    };
    for (dtype, max_bytes, files) in [(DType::F32, usize::MAX, 1), (DType::BF16, 100_000, 4)] {
        let dir = tempfile::tempdir().unwrap();
        let writer = TransformerWriter::new(&model.source, &trained, options(dtype)).unwrap();
        let writer = writer.with_max_file_bytes(max_bytes);
        writer.write_folder(dir.path()).unwrap();
        if let Some(keep) = &keep {
            let keep = keep.join(format!("tiny_flux/{files}"));
            std::fs::create_dir_all(&keep).unwrap();
            writer.write_folder(&keep).unwrap();
        }
        let names: Vec<String> = std::fs::read_dir(dir.path().join("transformer"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.ends_with(".safetensors"))
            .collect();
        assert_eq!(names.len(), files, "{names:?}");
        assert!(dir.path().join(META_FILE).is_file());
        assert_eq!(saved_step(dir.path()).unwrap(), Some(7));
        let index = Index::open(dir.path().join("transformer")).unwrap();
        assert_eq!(
            index.tensors().count(),
            trained.len(),
            "every tensor of the model is trained"
        );

        let other = trained_model();
        other.load_trained(dir.path()).unwrap();
        for (name, value) in values(&other) {
            let expected = trained[&name].to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap();
            assert_eq!(gap(&value, &expected), 0.0, "{name}");
        }
        // The other parts are those of the base model.
        let whole = tempfile::tempdir().unwrap();
        for part in [
            "vae",
            "text_encoder",
            "text_encoder_2",
            "tokenizer",
            "tokenizer_2",
            "scheduler",
        ] {
            std::os::unix::fs::symlink(fixtures().join("tiny_flux").join(part), whole.path().join(part)).unwrap();
        }
        std::os::unix::fs::symlink(dir.path().join("transformer"), whole.path().join("transformer")).unwrap();
        FluxModel::load(&FLUX, whole.path(), &LoadOptions::cpu()).unwrap();
    }
}

#[test]
fn samples_while_training_have_the_trained_weights_and_no_variables() {
    let model = trained_model();
    let detached = model.detach().unwrap();
    assert!(
        FluxModel::load(&FLUX, fixtures().join("tiny_flux"), &LoadOptions::cpu())
            .unwrap()
            .detach()
            .is_none()
    );
    let text = model.encode_prompts(&[crate::families::Prompt::new("a")]).unwrap();
    let latents = Tensor::ones((1, 16, 4, 4), DType::F32, &Device::Cpu).unwrap();
    let time = Tensor::new(&[500f32], &Device::Cpu).unwrap();
    let predict = |model: &dyn Model| {
        model
            .predict(std::slice::from_ref(&latents), &time, &text)
            .unwrap()
            .remove(0)
    };
    let before = predict(&*detached);
    for (_, var) in model.trained() {
        var.set(&(var.as_tensor() * 0.9).unwrap()).unwrap();
    }
    let after = predict(&*detached);
    assert!(gap(&before, &after) > 1e-4);
    assert_eq!(gap(&after, &predict(&model)), 0.0);
    let params = model.trained().iter().map(|(_, var)| var);
    let (_, gradients) =
        crate::autograd::gradients(|| Ok::<_, crate::error::EngineError>(predict(&*detached).sum_all()?)).unwrap();
    assert!(params.into_iter().all(|var| gradients.get(var).is_none()));
}

#[test]
fn a_single_file_and_a_trained_text_encoder_are_refused() {
    let error = trained_model().check_single_file().unwrap_err().to_string();
    assert!(error.contains("save_format: diffusers"), "{error}");
    let options = LoadOptions::cpu().training(TrainableFilter::Nothing, TrainableFilter::everything());
    let error = FluxModel::load(&FLUX, fixtures().join("tiny_flux"), &options)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("train_text_encoder") && error.contains("LoRA"),
        "{error}"
    );
}
