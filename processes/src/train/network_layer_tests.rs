//! Which layers a network changes, and layers and norms that it trains whole.

use super::full_tests::full;
use super::resume_exactness::check_resumption;
use super::tests::{run_spec, spec, trainer};
use super::transformer_test_runs::{complete, flow_trainer, tensors};
use crate::adapters::{AdapterConfig, AdapterNetwork, load_lora};
use crate::families::{LoadOptions, Model};
use crate::nn::LayerMut;
use crate::rng::TorchGenerator;
use crate::testing::{fixtures, gap, load_sd, tiny_sd, zimage_folder};
use aitk_common::attempt::Outcome;
use aitk_common::job::arch::ArchName;
use aitk_common::job::network::NetworkConfig;
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::values::OneOrMany;
use candle_core::{DType, Device, Tensor};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The network of a training whose first step moves the LoRA's first matrix alone, so that the gradients of other layers are those of a full
/// fine-tune.
fn one_step(root: &Path, change: impl FnOnce(&mut NetworkConfig)) -> TrainerProcess {
    let mut process = trainer(root, 1);
    process.train.max_grad_norm = 0.0;
    process.save.save_every = None;
    change(process.network.as_mut().unwrap());
    process
}

/// The tensors that one step of a full fine-tune of the parameters with these names makes, by their names in the single file.
fn fine_tuned(only: &[&str], change: impl FnOnce(&mut TrainerProcess)) -> BTreeMap<String, Tensor> {
    let dir = tempfile::tempdir().unwrap();
    let mut process = full(dir.path(), 1);
    process.train.lr = 1e-3;
    process.train.max_grad_norm = 0.0;
    process.save.save_every = None;
    process.save.save_format = aitk_common::job::save::SaveFormat::Diffusers;
    process.model.only_if_contains = Some(OneOrMany(only.iter().map(|name| (*name).to_owned()).collect()));
    change(&mut process);
    complete(process);
    tensors(&dir.path().join("out/tiny/tiny/unet"))
}

fn predict(model: &dyn Model) -> Tensor {
    let numbers = |seed, dims: &[usize]| {
        let mut generator = TorchGenerator::manual_seed(seed);
        Tensor::from_vec(generator.randn(dims.iter().product()), dims, &Device::Cpu).unwrap()
    };
    let conditioning = model.encode_prompts(&[crate::families::Prompt::default()]).unwrap();
    let timesteps = Tensor::new(&[500f32], &Device::Cpu).unwrap();
    let latents = numbers(1, &[1, 4, 8, 8]);
    model.predict(&[latents], &timesteps, &conditioning).unwrap().remove(0)
}

/// As in ai-toolkit, whose state dict has `unet_conv_in.weight` and so on, weights and not their changes.
#[test]
fn the_first_and_last_layers_are_trained_as_in_a_full_fine_tune() {
    let dir = tempfile::tempdir().unwrap();
    complete(one_step(dir.path(), |network| {
        network.network_kwargs.full_train_in_out = true;
        network.conv = Some(2);
        network.network_kwargs.only_if_contains = Some(OneOrMany(vec!["attn1".to_owned()]));
    }));
    let file = dir.path().join("out/tiny/tiny.safetensors");
    let saved = tensors(&file);
    let names: BTreeSet<&str> = saved
        .keys()
        .map(String::as_str)
        .filter(|name| !name.starts_with("lora_unet_"))
        .collect();
    let expected = [
        "unet_conv_in.bias",
        "unet_conv_in.weight",
        "unet_conv_out.bias",
        "unet_conv_out.weight",
    ];
    assert_eq!(names, BTreeSet::from(expected));
    assert!(!saved.keys().any(|name| name.starts_with("lora_unet_conv_in")));
    let base = tensors(&fixtures().join("tiny_sd/unet"));
    let trained = fine_tuned(&["conv_in", "conv_out"], |_| {});
    for name in expected {
        let inner = name.strip_prefix("unet_").unwrap();
        assert!(gap(&saved[name], &base[inner]) > 1e-4, "{name} was not trained");
        assert!(gap(&saved[name], &trained[inner]) < 1e-6, "{name}");
    }

    // The file works wherever a LoRA does: it is the model with these two layers, and less at less strength.
    let mut model = tiny_sd();
    let plain = predict(&model);
    let loaded = load_lora(&mut model.parts(), &file, 1.0).unwrap();
    assert_eq!(loaded.unknown, [""; 0]);
    let mut expected = tiny_sd();
    expected
        .parts()
        .pop()
        .unwrap()
        .layers
        .visit_layers(&mut |path, mut layer: LayerMut<'_>| {
            if ["conv_in", "conv_out"].contains(&path) {
                layer.set_weight(saved[&format!("unet_{path}.weight")].clone());
                layer.set_bias(saved[&format!("unet_{path}.bias")].clone());
            }
            Ok(())
        })
        .unwrap();
    let changed = predict(&model);
    // `up` has made one step, so the LoRA itself changes something too.
    let lora: BTreeMap<String, Tensor> = saved
        .iter()
        .filter(|(name, _)| name.starts_with("lora_"))
        .map(|(name, t)| (name.clone(), t.clone()))
        .collect();
    let alone = dir.path().join("lora.safetensors");
    std::fs::write(
        &alone,
        crate::adapters::safetensors_bytes(&lora, &BTreeMap::new()).unwrap(),
    )
    .unwrap();
    load_lora(&mut expected.parts(), &alone, 1.0).unwrap();
    let expected = predict(&expected);
    assert!(gap(&changed, &plain) > 1e-4);
    assert!(gap(&changed, &expected) < 1e-5, "{}", gap(&changed, &expected));
    loaded.multiplier.set(0.0);
    assert_eq!(gap(&predict(&model), &plain), 0.0);
    loaded.multiplier.set(0.5);
    let half = gap(&predict(&model), &plain);
    assert!(half > 0.0 && half < gap(&changed, &plain));
}

#[test]
fn a_transformer_has_no_first_and_last_layer_to_train() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = flow_trainer(dir.path(), ArchName::Flux, &fixtures().join("tiny_flux"), 1);
    process.network.as_mut().unwrap().network_kwargs.full_train_in_out = true;
    let (outcome, _) = run_spec(&spec(process));
    let Outcome::Failed { message, .. } = outcome else {
        panic!("{outcome:?}");
    };
    assert!(
        message.contains("full_train_in_out") && message.contains("U-Nets"),
        "{message}"
    );
}

#[test]
fn norms_are_trained_as_in_a_full_fine_tune() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = one_step(dir.path(), |network| {
        network.all_layers = true;
        network.network_kwargs.only_if_contains = Some(OneOrMany(vec!["norm".to_owned(), "attn1".to_owned()]));
    });
    // A difference decays towards no change, and a weight towards zero.
    let without_decay = |process: &mut TrainerProcess| {
        process.train.optimizer_params = serde_json::json!({"weight_decay": 0.0}).as_object().unwrap().clone();
    };
    without_decay(&mut process);
    complete(process);
    let file = dir.path().join("out/tiny/tiny.safetensors");
    let saved = tensors(&file);
    let base = tensors(&fixtures().join("tiny_sd/unet"));
    let trained = fine_tuned(&["norm"], without_decay);
    let mut norms = 0;
    for (name, before) in base.iter().filter(|(name, _)| name.contains("norm")) {
        let (path, suffix) = name.rsplit_once('.').unwrap();
        let suffix = if suffix == "bias" { "diff_b" } else { "diff" };
        let change = &saved[&format!("lora_unet_{}.{suffix}", path.replace('.', "_"))];
        let expected = (&trained[name] - before).unwrap();
        assert!(gap(change, &expected) < 2e-6, "{name}: {}", gap(change, &expected));
        assert!(
            gap(change, &change.zeros_like().unwrap()) > 1e-4,
            "{name} was not trained"
        );
        norms += 1;
    }
    assert_eq!(norms, 66);

    let mut model = load_sd(fixtures().join("tiny_sd"), &LoadOptions::cpu()).unwrap();
    let plain = predict(&model);
    let loaded = load_lora(&mut model.parts(), &file, 1.0).unwrap();
    assert_eq!(loaded.unknown, [""; 0]);
    let changed = predict(&model);
    assert!(gap(&changed, &plain) > 1e-4);
    loaded.multiplier.set(0.0);
    assert_eq!(gap(&predict(&model), &plain), 0.0);
}

/// LyCORIS' `train_norm`: the same differences, with its names. `scale_weight_norms` does not limit them.
#[test]
fn norms_have_the_names_of_lycoris_if_they_are_asked_for() {
    let train = |of_lycoris: bool| {
        let dir = tempfile::tempdir().unwrap();
        complete(one_step(dir.path(), |network| {
            network.all_layers = !of_lycoris;
            network.network_kwargs.train_norm = of_lycoris;
            network.scale_weight_norms = of_lycoris.then_some(1e5);
        }));
        let file = dir.path().join("out/tiny/tiny.safetensors");
        let mut model = load_sd(fixtures().join("tiny_sd"), &LoadOptions::cpu()).unwrap();
        let loaded = load_lora(&mut model.parts(), &file, 1.0).unwrap();
        assert_eq!(loaded.unknown, [""; 0]);
        (tensors(&file), predict(&model))
    };
    let ((ours, expected), (of_lycoris, found)) = (train(false), train(true));
    assert_eq!(gap(&found, &expected), 0.0);
    assert_eq!(ours.len(), of_lycoris.len());
    let mut norms = 0;
    for (name, tensor) in &ours {
        let name = match name.rsplit_once('.').unwrap() {
            (layer, "diff") => format!("{layer}.w_norm"),
            (layer, "diff_b") => format!("{layer}.b_norm"),
            _ => name.clone(),
        };
        assert_eq!(gap(&of_lycoris[&name], tensor), 0.0, "{name}");
        norms += usize::from(name.ends_with("_norm"));
    }
    assert_eq!(norms, 66);
}

/// Names and numbers: `tests/reference/make_network_targets.py`.
#[test]
fn layers_and_norms_are_those_of_ai_toolkit() {
    let digest = |names: &BTreeSet<String>| {
        let joined = names.iter().cloned().collect::<Vec<_>>().join("\n");
        Sha256::digest(joined)[..8]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>()
    };
    let attach = |model: &mut dyn Model, config: AdapterConfig| {
        let mut parts = model.parts();
        let mut denoiser = vec![parts.pop().unwrap()];
        let network = AdapterNetwork::attach(&config, &mut denoiser, &mut TorchGenerator::manual_seed(1)).unwrap();
        let params = network.params();
        let names = params.iter().map(|param| param.name.as_str());
        let names: BTreeSet<String> = names
            .map(
                |name| match name.strip_suffix(".diff").or(name.strip_suffix(".diff_b")) {
                    Some(norm) => format!("{norm}:diff"),
                    None => name.split(".lora_").next().unwrap().to_owned(),
                },
            )
            .collect();
        let norms = names.iter().filter(|name| name.ends_with(":diff")).count();
        (names.len() - norms, norms, digest(&names))
    };
    let classes = |linear: &[&str], conv: Option<&[&str]>, norms| {
        let list = |names: &[&str]| OneOrMany(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
        let mut network = NetworkConfig {
            conv: conv.map(|_| 2),
            all_layers: norms,
            ..NetworkConfig::default()
        };
        network.network_kwargs.target_lin_modules = list(linear);
        network.network_kwargs.target_conv_modules = list(conv.unwrap_or_default());
        super::adapter_options::adapter_config(&network)
    };
    let resnets: &[&str] = &["ResnetBlock2D", "Downsample2D", "Upsample2D"];
    for (config, expected) in [
        (
            classes(&["UNet2DConditionModel"], Some(&[]), true),
            (83, 33, "2a31bd3b7a16f467"),
        ),
        (
            classes(&["Transformer2DModel"], None, false),
            (48, 0, "ac9373195d13d61f"),
        ),
        (
            classes(&["Transformer2DModel"], None, true),
            (48, 16, "59d19d2faf3b2abf"),
        ),
        // The default for convolutions, and the same named.
        (
            classes(&["Transformer2DModel"], Some(&[]), false),
            (79, 0, "75b464bb947ac271"),
        ),
        (
            classes(&["Transformer2DModel"], Some(resnets), false),
            (79, 0, "75b464bb947ac271"),
        ),
        (
            classes(&["Attention"], Some(&["Upsample2D"]), false),
            (33, 0, "b4d37d1f6a8d4c9b"),
        ),
        (classes(&["FeedForward"], None, false), (8, 0, "a08248894a040547")),
    ] {
        let found = attach(&mut tiny_sd(), config);
        assert_eq!((found.0, found.1, found.2.as_str()), expected);
    }
    let zimage = zimage_folder(false);
    for (arch, folder, expected) in [
        (
            ArchName::Flux,
            fixtures().join("tiny_flux"),
            (46, 14, "c7aac32284f5fbbb"),
        ),
        (
            ArchName::Sd3,
            fixtures().join("tiny_sd35"),
            (47, 16, "db82997ae36bb0e2"),
        ),
        (
            ArchName::Zimage,
            zimage.path().to_path_buf(),
            (16, 12, "870e3fd4cc417e5a"),
        ),
    ] {
        let mut model = crate::families::load(&folder, arch, &LoadOptions::cpu()).unwrap();
        let found = attach(&mut *model, classes(&["Attention"], None, true));
        assert_eq!((found.0, found.1, found.2.as_str()), expected, "{arch}");
    }
}

/// Every norm of a transformer's blocks gets gradients, its file has the names of ai-toolkit, and a run resumes exactly.
#[test]
fn norms_of_every_family_are_trained_and_resume_exactly() {
    let zimage = zimage_folder(false);
    for (arch, model, name) in [
        (
            ArchName::Sd1,
            fixtures().join("tiny_sd"),
            "lora_unet_mid_block_resnets_0_norm1.diff_b",
        ),
        (
            ArchName::Flux,
            fixtures().join("tiny_flux"),
            "transformer.transformer_blocks.0.attn.norm_added_k.diff",
        ),
        (
            ArchName::Sd3,
            fixtures().join("tiny_sd35"),
            "transformer.transformer_blocks.0.attn.norm_q.diff",
        ),
        (
            ArchName::Zimage,
            zimage.path().to_path_buf(),
            "diffusion_model.layers.0.attention_norm1.diff",
        ),
    ] {
        let process = |root: &Path, steps| {
            let mut process = flow_trainer(root, arch, &model, steps);
            if !arch.is_flow() {
                process = trainer(root, steps);
            }
            let network = process.network.as_mut().unwrap();
            network.all_layers = true;
            network.network_kwargs.full_train_in_out = !arch.is_flow();
            network.network_kwargs.only_if_contains = Some(OneOrMany(vec!["norm".to_owned(), "to_q".to_owned()]));
            process
        };
        let dir = tempfile::tempdir().unwrap();
        complete(process(dir.path(), 2));
        let saved = tensors(&dir.path().join("out/tiny/tiny.safetensors"));
        assert!(saved.contains_key(name), "{arch}: {:?}", saved.keys());
        for (name, tensor) in saved.iter().filter(|(name, _)| name.contains(".diff")) {
            // The last block of Stable Diffusion 3.5 has queries of the text and drops what they find.
            if arch == ArchName::Sd3 && name.contains("blocks.2.attn.norm_added_q") {
                continue;
            }
            let zero = tensor.zeros_like().unwrap().to_dtype(DType::F32).unwrap();
            assert!(gap(tensor, &zero) > 0.0, "{arch}: {name} got no gradient");
        }
        check_resumption(&|root| process(root, 6));
    }
}

/// A merge adds the differences of norms, and takes layers that are trained themselves as they are.
#[test]
fn norms_and_whole_layers_are_merged() {
    let dir = tempfile::tempdir().unwrap();
    let change = |network: &mut NetworkConfig| {
        network.all_layers = true;
        network.network_kwargs.full_train_in_out = true;
    };
    let mut process = one_step(dir.path(), change);
    complete(process.clone());
    let lora = tensors(&dir.path().join("out/tiny/tiny.safetensors"));
    process.name = Some("merged".to_owned());
    process.save.save_format = aitk_common::job::save::SaveFormat::Diffusers;
    process.train.merge_network_on_save = true;
    process.train.merge_network_on_save_strength = 0.5;
    complete(process);
    let merged = tensors(&dir.path().join("out/merged/tiny/unet"));
    let base = tensors(&fixtures().join("tiny_sd/unet"));
    let norm = "mid_block.resnets.0.norm1.bias";
    let half = (&lora["lora_unet_mid_block_resnets_0_norm1.diff_b"] * 0.5).unwrap();
    assert!(gap(&merged[norm], &(&base[norm] + half).unwrap()) < 1e-6);
    assert!(gap(&merged[norm], &base[norm]) > 1e-4);
    for name in ["conv_in.weight", "conv_out.bias"] {
        assert_eq!(gap(&merged[name], &lora[&format!("unet_{name}")]), 0.0, "{name}");
    }
}
