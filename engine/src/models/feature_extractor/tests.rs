//! Comparison of features and their gradients with `tests/reference/make_feature_extractors.py`, and files that are refused.

use super::FeatureExtractor;
use crate::autograd::gradients;
use crate::checkpointing::Checkpointing;
use crate::error::Result;
use crate::testing::{fixtures, in_portable_mode, largest};
use crate::weights::write_tensors;
use candle_core::{DType, Device, Tensor, Var};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

fn file(name: &str) -> PathBuf {
    let folder = fixtures().join("feature_extractors");
    match folder.join(name).is_dir() {
        true => folder.join(name),
        false => folder.join(format!("{name}.safetensors")),
    }
}

fn tensors(name: &str) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(file(name), &Device::Cpu).unwrap()
}

/// The second network of a version.
fn second(name: &str) -> Option<PathBuf> {
    match name {
        "version3" => Some(file("version10")),
        "version7" => Some(file("version7_encoder")),
        _ => None,
    }
}

fn opened(name: &str) -> Result<FeatureExtractor> {
    FeatureExtractor::open((&file(name), second(name).as_deref()), DType::F32, &Device::Cpu)
}

fn features(network: &FeatureExtractor, x: &Tensor) -> Result<Vec<Tensor>> {
    match network {
        FeatureExtractor::Latents(network) => Ok(vec![network.forward(x)?]),
        FeatureExtractor::Velocities(network) => network.forward(x),
        FeatureExtractor::Vgg16(network) => network.forward(x),
        FeatureExtractor::Dino(network) => Ok(vec![network.forward(x)?]),
        FeatureExtractor::Siglip(network) => Ok(vec![network.forward(x)?]),
        FeatureExtractor::Tips(network) => {
            let found = network.forward(x)?;
            let heads = [found.depth, found.normals, found.segmentation];
            Ok(found.patches.into_iter().chain(heads).collect())
        }
        FeatureExtractor::Sapiens(network) => Ok(vec![network.forward(x)?]),
        FeatureExtractor::SiglipAndVgg16(networks) => {
            let of_vgg = networks.1.forward(x)?.into_iter();
            Ok(std::iter::once(networks.0.forward(x)?).chain(of_vgg).collect())
        }
    }
}

fn features_match_the_reference() {
    for name in [
        "version1",
        "version2",
        "version10",
        "version3",
        "version4",
        "version6",
        "version7",
        "version9",
    ] {
        let of_name = format!("features_{name}");
        let reference = match file(&of_name).is_file() {
            true => tensors(&of_name),
            false => tensors("features"),
        };
        for checkpointing in [Checkpointing::Off, Checkpointing::each_block(true)] {
            let network = opened(name).unwrap();
            let network = network.with_checkpointing(checkpointing);
            let of = |key: &str| &reference[&format!("{name}/{key}")];
            let x = Var::from_tensor(of("x")).unwrap();
            let close = |found: &Tensor, expected: &Tensor, what: &str| {
                let difference = largest(&(found - expected).unwrap()) / largest(expected);
                println!("{name} {checkpointing:?}: {what} {difference:.1e}");
                assert!(difference < 1e-4, "{name}: the {what} differ by {difference:.1e}");
            };
            let found = features(&network, of("x")).unwrap();
            assert!(reference.contains_key(&format!("{name}/y{}", found.len() - 1)));
            assert!(!reference.contains_key(&format!("{name}/y{}", found.len())));
            for (i, found) in found.iter().enumerate() {
                close(found, of(&format!("y{i}")), &format!("features {i}"));
            }
            let loss = || -> Result<Tensor> {
                let mut total = Tensor::new(0f32, &Device::Cpu)?;
                for (i, y) in features(&network, x.as_tensor())?.iter().enumerate() {
                    total = (total + (y * of(&format!("probe{i}")))?.sum_all()?)?;
                }
                Ok(total)
            };
            let (_, found) = gradients(loss).unwrap();
            close(found.get(x.as_tensor()).unwrap(), of("gradient"), "gradients");
        }
    }
}

#[test]
fn features_and_their_gradients_match_the_reference() {
    features_match_the_reference();
}

#[test]
fn where_a_vgg16_finds_nothing_its_gradients_are_finite() {
    let mut weights = tensors("version10");
    // All features of the second part are zero.
    let bias = weights.get_mut("features.7.bias").unwrap();
    *bias = (bias.zeros_like().unwrap() - 100.0).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let weights: BTreeMap<String, Tensor> = weights.into_iter().collect();
    write_tensors(&mut std::fs::File::create(&path).unwrap(), &weights, &BTreeMap::new()).unwrap();
    // A folder is as good as its file.
    let network = FeatureExtractor::open((folder.path(), None), DType::F32, &Device::Cpu).unwrap();
    let x = Var::from_tensor(&tensors("features")["version10/x"]).unwrap();
    let loss = || -> Result<Tensor> { Ok(features(&network, x.as_tensor())?[1].sum_all()?) };
    let (_, found) = gradients(loss).unwrap();
    assert_eq!(largest(found.get(x.as_tensor()).unwrap()), 0.0);
}

/// The error of a copy of the folder of a fixture with another config or other tensors.
fn error_of_changed(name: &str, change: impl Fn(&mut Value, &mut BTreeMap<String, Tensor>)) -> String {
    let config = std::fs::read(file(name).join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    let weights = candle_core::safetensors::load(file(name).join("model.safetensors"), &Device::Cpu).unwrap();
    let mut weights: BTreeMap<String, Tensor> = weights.into_iter().collect();
    change(&mut config, &mut weights);
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let mut target = std::fs::File::create(folder.path().join("model.safetensors")).unwrap();
    write_tensors(&mut target, &weights, &BTreeMap::new()).unwrap();
    let second = second(name);
    let second = second.as_deref();
    let of = |opened: Result<FeatureExtractor>| opened.unwrap_err().to_string();
    let error = of(FeatureExtractor::open(
        (folder.path(), second),
        DType::F32,
        &Device::Cpu,
    ));
    assert_eq!(error, of(FeatureExtractor::open_layout((folder.path(), second))));
    error
}

#[test]
fn folders_of_vision_transformers_are_checked() {
    let with = |name: &str, key: &'static str, value: Value| {
        error_of_changed(name, |config, _| {
            config[key] = value.clone();
        })
    };
    for (name, key, value) in [
        ("version3", "image_size", json!(15)),
        ("version3", "num_attention_heads", json!(7)),
        ("version4", "num_patches", json!(15)),
        ("version4", "hidden_size", json!(0)),
        ("version4", "hidden_size", json!(23)),
        ("version4", "hidden_act", json!("relu7")),
        ("version4", "patch_size", json!("16")),
        ("version6", "num_attention_heads", json!(3)),
        ("version6", "rope_theta", json!(-1.0)),
        ("version6", "intermediate_size", json!(1_u64 << 40)),
        ("version6", "hidden_act", json!("tanhshrink")),
    ] {
        let error = with(name, key, value);
        assert!(error.contains(key), "{name} {key}: {error}");
    }
    // Sizes that the tensors do not have.
    for (name, key, value, tensor) in [
        ("version3", "image_size", 64, "position_embedding"),
        ("version3", "num_hidden_layers", 3, "layers.2"),
        ("version4", "intermediate_size", 41, "fc1"),
        ("version4", "num_patches", 25, "position_embedding"),
        ("version4", "num_hidden_layers", 1 << 20, "layers.3"),
        ("version6", "patch_size", 8, "patch_embeddings"),
        ("version6", "num_register_tokens", 3, "register_tokens"),
        ("version6", "num_hidden_layers", 4, "layer.3"),
    ] {
        let error = with(name, key, json!(value));
        assert!(error.contains(tensor), "{name} {key}: {error}");
    }
    let error = with("version6", "model_type", json!("vit"));
    assert!(error.contains("not a feature extractor"), "{error}");
    let error = error_of_changed("version6", |_, weights| {
        weights.retain(|name, _| !name.ends_with("norm.bias") || name.contains("layer"));
    });
    assert!(error.contains("norm.bias"), "{error}");
    let network = FeatureExtractor::open_layout((&file("version3"), None));
    let error = network.unwrap_err().to_string();
    assert!(error.contains("latent_feature_extractor_second_path"), "{error}");
    let network = FeatureExtractor::open_layout((&file("version3"), Some(&file("version2"))));
    let error = network.unwrap_err().to_string();
    assert!(error.contains("features.0.weight"), "{error}");
    let network = FeatureExtractor::open_layout((&file("version4"), Some(&file("version10"))));
    let error = network.unwrap_err().to_string();
    assert!(error.contains("the SigLIP 2 is compared alone"), "{error}");
    // A file says nothing of heads, which only the config beside it has.
    let weights = file("version6").join("model.safetensors");
    let error = FeatureExtractor::open((&weights, None), DType::F32, &Device::Cpu);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("config.json"), "{error}");
}

#[test]
fn the_files_of_a_tips_are_checked() {
    let refused = |changed: &str, change: &dyn Fn(&mut BTreeMap<String, Tensor>), expected: &str| {
        let mut weights: BTreeMap<String, Tensor> = tensors(changed).into_iter().collect();
        change(&mut weights);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        write_tensors(&mut std::fs::File::create(&path).unwrap(), &weights, &BTreeMap::new()).unwrap();
        let files = match changed {
            "version7" => (path, file("version7_encoder")),
            _ => (file("version7"), path),
        };
        for opened in [
            FeatureExtractor::open((&files.0, Some(&files.1)), DType::F32, &Device::Cpu),
            FeatureExtractor::open_layout((&files.0, Some(&files.1))),
        ] {
            let error = opened.unwrap_err().to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        }
    };
    let encoder = "version7_encoder";
    for name in [
        "vision_encoder.patch_embed.proj.weight",
        "vision_encoder.pos_embed",
        "vision_encoder.blocks.0.mlp.fc1.weight",
        "vision_encoder.blocks.2.ls2.gamma",
        "vision_encoder.norm.bias",
    ] {
        refused(encoder, &|weights| drop(weights.remove(name).unwrap()), name);
    }
    // The queries, keys and values are parts of one tensor.
    let qkv = "vision_encoder.blocks.1.attn.qkv.weight";
    refused(
        encoder,
        &|weights| drop(weights.remove(qkv).unwrap()),
        "blocks.1.attn.q.weight",
    );
    let shortened = |weights: &mut BTreeMap<String, Tensor>| {
        let rows = weights[qkv].narrow(0, 0, 300).unwrap();
        weights.insert(qkv.into(), rows);
    };
    refused(encoder, &shortened, "blocks.1.attn.q.weight");
    let last = |weights: &mut BTreeMap<String, Tensor>| weights.retain(|name, _| !name.contains("blocks.3."));
    refused(encoder, &last, "multiple of 4");
    for name in [
        "depth_head.reassemble.out_projections.1.weight",
        "normals_head.normals_head.weight",
        "segmentation_head.convs.2.weight",
        "depth_head.fusion_blocks.1.residual_unit.conv1.weight",
        "normals_head.reassemble.resize_layers.0.bias",
    ] {
        refused("version7", &|weights| drop(weights.remove(name).unwrap()), name);
    }
    let two_coordinates = |weights: &mut BTreeMap<String, Tensor>| {
        let rows = weights["normals_head.normals_head.weight"].narrow(0, 0, 2).unwrap();
        weights.insert("normals_head.normals_head.weight".into(), rows);
    };
    refused("version7", &two_coordinates, "3 coordinates");

    let error = FeatureExtractor::open_layout((&file("version7"), None))
        .unwrap_err()
        .to_string();
    assert!(error.contains("latent_feature_extractor_second_path"), "{error}");
    // One file may have all.
    let folder = tempfile::tempdir().unwrap();
    let all = tensors("version7").into_iter().chain(tensors(encoder)).collect();
    let mut target = std::fs::File::create(folder.path().join("model.safetensors")).unwrap();
    write_tensors(&mut target, &all, &BTreeMap::new()).unwrap();
    FeatureExtractor::open((folder.path(), None), DType::F32, &Device::Cpu).unwrap();
}

#[test]
fn images_are_scaled_as_in_ai_toolkit() {
    // Sizes by ai-toolkit's `_target_hw` and `prepare_inputs`.
    for (size, of_siglip, of_dino) in [
        ([512, 512], [512, 512], [512, 512]),
        ([64, 72], [64, 80], [64, 64]),
        ([34, 48], [48, 48], [32, 48]),
        ([1024, 1024], [512, 512], [512, 512]),
        ([768, 1344], [384, 672], [384, 672]),
        ([832, 1216], [416, 608], [416, 608]),
        ([1000, 300], [912, 272], [928, 272]),
    ] {
        assert_eq!(super::siglip::scaled_size(size, 16), of_siglip, "{size:?}");
        let found = super::vision_layer::scaled_size((size[0], size[1]), 16, super::dino::MAX_PIXELS);
        assert_eq!([found.0, found.1], of_dino, "{size:?}");
    }
}

#[test]
fn the_names_of_lpips_are_those_of_torchvision() {
    for (name, current) in [
        ("net.slice1.0.weight", "features.0.weight"),
        ("net.slice5.28.bias", "features.28.bias"),
        ("features.5.weight", "features.5.weight"),
        ("lin0.model.1.weight", "lin0.model.1.weight"),
    ] {
        assert_eq!(super::vgg16::current_name(name), current);
    }
}

#[test]
fn files_of_something_else_and_for_other_latents_are_refused() {
    let refused = |change: &dyn Fn(&mut BTreeMap<String, Tensor>), name: &str, expected: &str| {
        let mut weights: BTreeMap<String, Tensor> = tensors(name).into_iter().collect();
        change(&mut weights);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        write_tensors(&mut std::fs::File::create(&path).unwrap(), &weights, &BTreeMap::new()).unwrap();
        for opened in [
            FeatureExtractor::open((&path, None), DType::F32, &Device::Cpu),
            FeatureExtractor::open_layout((&path, None)),
        ] {
            let error = opened.unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("a.safetensors"), "{error}");
        }
    };
    let removed = |key: &'static str| {
        move |weights: &mut BTreeMap<String, Tensor>| {
            weights.remove(key).unwrap();
        }
    };
    refused(&removed("conv_in.weight"), "version1", "not a feature extractor");
    refused(&removed("blocks.1.proj.weight"), "version1", "blocks.1.proj.weight");
    refused(&removed("path4.2.norm2.bias"), "version2", "path4.2.norm2.bias");
    refused(&removed("features.28.weight"), "version10", "features.28.weight");
    let flattened = |key: &'static str| {
        move |weights: &mut BTreeMap<String, Tensor>| {
            let flat = weights[key].flatten_all().unwrap();
            weights.insert(key.to_owned(), flat);
        }
    };
    refused(&flattened("conv_in.weight"), "version1", "four sizes");
    refused(&flattened("path3.2.conv1.weight"), "version2", "path3.2.conv1.weight");
    refused(&flattened("features.10.weight"), "version10", "four sizes");
    for name in [
        "blocks.0.attn.q_norm.weight",
        "blocks.1.attn.wk.weight",
        "blocks.2.attn.gamma.weight",
        "rope_embed.periods",
        "cls_token",
        "ln1.weight",
    ] {
        refused(&removed(name), "version9", name);
    }
    refused(&removed("blocks.1.ffn.w12.bias"), "version9", "blocks.1.ffn.gate.bias");
    refused(&flattened("patch_embed.projection.weight"), "version9", "four sizes");
    let one_row = |weights: &mut BTreeMap<String, Tensor>| {
        let row = weights["blocks.1.attn.wk.weight"].narrow(0, 0, 1).unwrap();
        weights.insert("blocks.1.attn.wk.weight".into(), row);
    };
    refused(&one_row, "version9", "heads of 8");

    let open = |name: &str| opened(name).unwrap();
    for name in ["version1", "version2", "version10"] {
        open(name).check_channels(16).unwrap();
    }
    for (name, expected) in [("version1", "needs to take 4"), ("version2", "needs to take 8")] {
        let error = open(name).check_channels(4).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    open("version10").check_channels(4).unwrap();
}

in_portable_mode! {
    features_match_the_reference,
}
