//! Saves a fine-tuned transformer and loads it again, and what is refused when a model is loaded.

use super::{SD3, Sd3Model};
use crate::families::{LoadOptions, META_FILE, Model, SaveOptions};
use crate::testing::{fixtures, gap, sd35_large_folder, sd35_without_t5};
use crate::weights::{Index, TrainableFilter};
use candle_core::{DType, Device, Tensor};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn trained_model() -> Sd3Model {
    let options = LoadOptions::cpu().training(TrainableFilter::everything(), TrainableFilter::Nothing);
    Sd3Model::load(&SD3, fixtures().join("tiny_sd35"), &options).unwrap()
}

fn values(model: &Sd3Model) -> BTreeMap<String, Tensor> {
    let trained = model.trained().iter();
    trained
        .map(|(name, var)| (name.clone(), var.as_detached_tensor()))
        .collect()
}

#[test]
fn a_folder_is_saved_and_loads_again() {
    let keep = std::env::var_os("AITK_KEEP_SAVES").map(PathBuf::from);
    let model = trained_model();
    for (_, var) in model.trained() {
        var.set(&(var.as_tensor() * 0.5).unwrap()).unwrap();
    }
    let trained = values(&model);
    for dtype in [DType::F32, DType::BF16] {
        let options = SaveOptions {
            dtype,
            metadata: BTreeMap::new(),
            v_prediction: false,
        };
        let dir = tempfile::tempdir().unwrap();
        let writer = model.writer(&trained, options).unwrap();
        writer.write_folder(dir.path()).unwrap();
        if let Some(keep) = &keep {
            let keep = keep.join(format!("tiny_sd35/{}", dtype.as_str()));
            std::fs::create_dir_all(&keep).unwrap();
            writer.write_folder(&keep).unwrap();
        }
        assert!(dir.path().join(META_FILE).is_file());
        let index = Index::open(dir.path().join("transformer")).unwrap();
        let base = Index::open(fixtures().join("tiny_sd35/transformer")).unwrap();
        assert!(index.tensors().eq(base.tensors()));
        // The table of positions is not trained.
        let positions = |index: &Index| index.read("pos_embed.pos_embed", DType::F32, &Device::Cpu).unwrap();
        let gap_of_positions = gap(&positions(&index), &positions(&base));
        assert!(gap_of_positions < if dtype == DType::F32 { 1e-9 } else { 1e-2 });

        let other = trained_model();
        other.load_trained(dir.path()).unwrap();
        for (name, value) in values(&other) {
            let expected = trained[&name].to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap();
            assert_eq!(gap(&value, &expected), 0.0, "{name}");
        }
        // The other parts are those of the base model.
        let whole = tempfile::tempdir().unwrap();
        for part in std::fs::read_dir(fixtures().join("tiny_sd35")).unwrap() {
            let name = part.unwrap().file_name();
            let source = match name == "transformer" {
                true => dir.path().to_path_buf(),
                false => fixtures().join("tiny_sd35"),
            };
            std::os::unix::fs::symlink(source.join(&name), whole.path().join(&name)).unwrap();
        }
        Sd3Model::load(&SD3, whole.path(), &LoadOptions::cpu()).unwrap();
    }
}

#[test]
fn samples_while_training_have_the_trained_weights_and_no_variables() {
    let model = trained_model();
    let detached = model.detach().unwrap();
    let plain = Sd3Model::load(&SD3, fixtures().join("tiny_sd35"), &LoadOptions::cpu()).unwrap();
    assert!(plain.detach().is_none());
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
    let (_, gradients) =
        crate::autograd::gradients(|| Ok::<_, crate::error::EngineError>(predict(&*detached).sum_all()?)).unwrap();
    assert!(model.trained().iter().all(|(_, var)| gradients.get(var).is_none()));
}

#[test]
fn the_text_is_that_of_diffusers_with_t5_and_without() {
    let path = fixtures().join("models/sd35.safetensors");
    let tensors = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let without_t5 = sd35_without_t5();
    let load = |folder: &Path| Sd3Model::load(&SD3, folder, &LoadOptions::cpu()).unwrap();
    let (with, without) = (load(&fixtures().join("tiny_sd35")), load(without_t5.path()));
    let prompts = [
        "a red cat",
        "a photo of a red circle on a blue background, watching the sea",
    ];
    let encode = |model: &Sd3Model, tokens: usize, second: [Option<&str>; 2]| {
        let mut model = model.clone();
        model.set_max_sequence_length(tokens);
        let prompts: Vec<_> = prompts
            .iter()
            .zip(second)
            .map(|(text, second)| crate::families::Prompt {
                text: (*text).to_owned(),
                text_2: second.map(str::to_owned),
            })
            .collect();
        let found = model.encode_prompts(&prompts).unwrap();
        (
            found.get("context").unwrap().clone(),
            found.get("pooled").unwrap().clone(),
        )
    };
    for (name, tokens) in [("short", 24), ("long", 60)] {
        let (context, pooled) = encode(&with, tokens, [None; 2]);
        let gap = gap(&context, &tensors[&format!("text/{name}/context")]);
        assert!(gap < 1e-4, "{name}: {gap}");
        let gap = crate::testing::gap(&pooled, &tensors[&format!("text/{name}/pooled")]);
        assert!(gap < 1e-4, "{name}: {gap}");
    }
    let (context, pooled) = encode(&with, 24, [Some("a green square"), Some("two dogs")]);
    let of_clip = context.narrow(1, 0, 77).unwrap();
    assert!(gap(&of_clip, &tensors["text/second/context"]) < 1e-4);
    assert!(gap(&pooled, &tensors["text/second/pooled"]) < 1e-4);
    // T5 reads the first prompt.
    let of_t5 = |context: &Tensor| context.narrow(1, 77, 24).unwrap().contiguous().unwrap();
    assert!(gap(&of_t5(&context), &of_t5(&tensors["text/short/context"])) < 1e-4);

    let (context, pooled) = encode(&without, without.max_sequence_length().unwrap(), [None; 2]);
    let tokens = tensors["text/without/tokens"].to_vec1::<i64>().unwrap()[0] as usize;
    assert_eq!(context.dims(), [2, tokens, 44]);
    let of_clip = |context: &Tensor| context.narrow(1, 0, 77).unwrap().contiguous().unwrap();
    assert!(gap(&of_clip(&context), &of_clip(&tensors["text/short/context"])) < 1e-4);
    assert_eq!(
        crate::testing::largest(&context.narrow(1, 77, tokens - 77).unwrap()),
        0.0
    );
    assert!(gap(&pooled, &tensors["text/short/pooled"]) < 1e-4);
}

/// A copy of tiny_sd35 whose file `name` is changed.
fn changed(name: &str, change: impl Fn(&mut serde_json::Value)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let (part, file) = name.split_once('/').unwrap_or(("", name));
    for entry in std::fs::read_dir(fixtures().join("tiny_sd35")).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() == part {
            std::fs::create_dir(folder.path().join(part)).unwrap();
            for inner in std::fs::read_dir(entry.path()).unwrap() {
                let inner = inner.unwrap();
                let target = folder.path().join(part).join(inner.file_name());
                std::os::unix::fs::symlink(inner.path(), target).unwrap();
            }
        } else {
            std::os::unix::fs::symlink(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
    }
    let path = folder.path().join(part).join(file);
    let mut value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut value);
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, value.to_string()).unwrap();
    folder
}

#[test]
fn t5_may_be_left_out_by_the_list_of_parts() {
    let folder = changed("model_index.json", |index| {
        index["text_encoder_3"] = serde_json::json!([null, null]);
    });
    let model = Sd3Model::load(&SD3, folder.path(), &LoadOptions::cpu()).unwrap();
    assert!(!model.has_t5());
}

#[test]
fn what_does_not_belong_together_is_refused_by_name() {
    let refused = |folder: &Path| {
        Sd3Model::load(&SD3, folder, &LoadOptions::cpu())
            .unwrap_err()
            .to_string()
    };
    for (file, key, value, expected) in [
        (
            "text_encoder/config.json",
            "projection_dim",
            20,
            "pooled text of 40 features",
        ),
        ("text_encoder_2/config.json", "hidden_size", 40, "tokens of 56 features"),
        (
            "text_encoder_3/config.json",
            "d_model",
            48,
            "third text encoder gives 48",
        ),
        ("vae/config.json", "latent_channels", 4, "latents have 4"),
        ("transformer/config.json", "in_channels", 8, "expects 8"),
    ] {
        let folder = changed(file, |config| config[key] = value.into());
        let error = refused(folder.path());
        assert!(error.contains(expected), "{file}: {error}");
    }
    let error = refused(&fixtures().join("tiny_sd35/transformer/diffusion_pytorch_model.safetensors"));
    assert!(
        error.contains("without CLIP-L text encoder") && error.contains("`model.extras_name_or_path`"),
        "{error}"
    );
    let options = LoadOptions::cpu().training(TrainableFilter::Nothing, TrainableFilter::everything());
    let error = Sd3Model::load(&SD3, fixtures().join("tiny_sd35"), &options)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("train_text_encoder") && error.contains("LoRA"),
        "{error}"
    );
    let error = trained_model().check_single_file().unwrap_err().to_string();
    assert!(error.contains("save_format: diffusers"), "{error}");
    // Large has no second attention.
    let large = sd35_large_folder();
    Sd3Model::load(&SD3, large.path(), &LoadOptions::cpu()).unwrap();
}
