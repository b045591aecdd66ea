//! Features and predictions of diffusers' T2I-Adapters and ControlNets beside the tiny models (`tests/reference/make_image_adapters.py`).

use super::test_weights::{fill, filled, new_adapter, noise, pixels, report};
use super::{AdapterRequest, find};
use crate::checkpointing::Checkpointing;
use crate::families::{Conditioning, Model, write_adapter_folder};
use crate::models::t2i_adapter::{T2iAdapter, T2iAdapterConfig};
use crate::models::unet::UNetInputs;
use crate::testing::{fixtures, gap, largest, tiny, tiny_sd};
use crate::weights::Weights;
use aitk_common::job::adapter::{AdapterConfig, AdapterType};
use candle_core::{Device, Tensor, safetensors};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

fn expected() -> HashMap<String, Tensor> {
    safetensors::load(fixtures().join("image_adapters/expected.safetensors"), &Device::Cpu).unwrap()
}

/// The config of a job for one of the fixture's T2I-Adapters.
fn t2i(name: &str) -> AdapterConfig {
    let keys = &report()["t2i_configs"][name];
    let number = |key: &str| keys[key].as_u64().unwrap() as u32;
    AdapterConfig {
        train: true,
        channels: serde_json::from_value(keys["channels"].clone()).unwrap(),
        num_res_blocks: number("num_res_blocks"),
        downscale_factor: number("downscale_factor"),
        ..AdapterConfig::default()
    }
}

fn control_net() -> AdapterConfig {
    AdapterConfig {
        kind: AdapterType::ControlNet,
        train: true,
        ..AdapterConfig::default()
    }
}

fn check(what: &str, ours: &Tensor, theirs: &Tensor) {
    assert_eq!(ours.dims(), theirs.dims(), "{what}");
    let difference = gap(ours, theirs) / largest(theirs);
    println!("{what}: {difference:.1e}");
    assert!(difference < 1e-4, "{what} differs by {difference:.1e}");
}

/// The noisy latents, the timesteps and the conditioning of a case.
fn inputs(
    name: &str,
    model: &dyn Model,
    (height, width): (usize, usize),
    context: usize,
) -> (Tensor, Tensor, Conditioning) {
    let conditioning =
        Conditioning::default().with("context", noise(&format!("{name}/context"), &[1, 77, context], 1.0));
    let conditioning = match model.family().arch() {
        aitk_common::job::arch::ArchName::Sdxl => {
            let sizes = Tensor::new(&[[64f32, 48.0, 0.0, 4.0, 64.0, 48.0]], &Device::Cpu).unwrap();
            let width = model.encode_nothing(1).unwrap().get("pooled").unwrap().dims()[1];
            conditioning
                .with("pooled", noise("pooled", &[1, width], 1.0))
                .with("time_ids", sizes)
        }
        _ => conditioning,
    };
    let sample = noise(&format!("{name}/sample"), &[1, 4, height, width], 1.5);
    (sample, Tensor::new(&[417f32], &Device::Cpu).unwrap(), conditioning)
}

#[test]
fn features_of_t2i_adapters_match_diffusers() {
    let expected = expected();
    for (name, size) in [("full", (18, 14)), ("light", (18, 14)), ("xl", (20, 12))] {
        let config = T2iAdapterConfig::from_json(&report()["t2i_configs"][name]).unwrap();
        let weights = Weights::init(1, &Device::Cpu);
        let adapter = T2iAdapter::new(&weights, &config).unwrap();
        for (name, var) in weights.vars() {
            var.set(&filled(&name, var.dims())).unwrap();
        }
        let images = pixels(&format!("{name}/image"), &[1, 3, size.0, size.1]);
        let features = adapter.forward(&images).unwrap();
        let shapes = config.feature_shapes(size);
        assert_eq!(features.len(), shapes.len());
        for (number, (feature, shape)) in features.iter().zip(&shapes).enumerate() {
            let key = format!("{name}/feature_{number}");
            check(&key, feature, &expected[&key]);
            assert_eq!(feature.dims()[1..], shape[..]);
        }
        assert!(!expected.contains_key(&format!("{name}/feature_{}", features.len())));
    }
}

#[test]
fn predictions_with_adapters_match_diffusers() {
    let expected = expected();
    let sd = || Box::new(tiny_sd()) as Box<dyn Model>;
    let xl = || Box::new(tiny(&crate::families::sdxl::VARIANT, "tiny_sdxl")) as Box<dyn Model>;
    let models = [
        ("full", t2i("full"), sd(), (9, 7), 0.7),
        ("xl", t2i("xl"), xl(), (10, 6), 0.7),
        ("control", control_net(), sd(), (8, 6), 0.8),
        ("control_xl", control_net(), xl(), (8, 6), 0.8),
    ];
    for (name, config, mut model, size, scale) in models {
        let adapter = new_adapter(&config, &*model);
        fill(&*adapter, |_| true);
        model.set_image_adapter(adapter).unwrap();
        let context = model.encode_nothing(1).unwrap().get("context").unwrap().dims()[2];
        let (sample, times, conditioning) = inputs(name, &*model, size, context);
        let images = pixels(&format!("{name}/image"), &[1, 3, 2 * size.0, 2 * size.1]);
        let without = model
            .predict(std::slice::from_ref(&sample), &times, &conditioning)
            .unwrap();
        let with = model.with_adapter_images(conditioning, &images, scale).unwrap();
        let theirs = &expected[&format!("{name}/prediction")];
        let ours = model.predict(std::slice::from_ref(&sample), &times, &with).unwrap();
        check(&format!("{name}/prediction"), &ours[0], theirs);
        assert!(
            gap(&without[0], theirs) > 1e-2 * largest(theirs),
            "{name} changes nothing"
        );
        // Computed once for all steps of a sample, and by the copy without gradients.
        let encoded = model.with_encoded_adapter_images(with.clone()).unwrap();
        assert!(encoded.find("adapter_images").is_none());
        let again = model.detach().unwrap().predict(&[sample], &times, &encoded).unwrap();
        assert!(gap(&again[0], &ours[0]) < 1e-5 * largest(theirs), "{name}");
    }
}

#[test]
fn residuals_of_a_controlnet_match_diffusers() {
    let expected = expected();
    let model = tiny_sd();
    let adapter = new_adapter(&control_net(), &model);
    fill(&*adapter, |_| true);
    let (sample, timesteps, conditioning) = inputs("control", &model, (8, 6), 32);
    let inputs = UNetInputs {
        sample: &sample,
        timesteps: &timesteps,
        context: conditioning.get("context").unwrap(),
        conditions: None,
    };
    let encoded = adapter.encode(&pixels("control/image", &[1, 3, 16, 12])).unwrap();
    let found = adapter.residuals(&encoded, &inputs).unwrap();
    assert!(found.in_blocks.is_empty());
    let all: Vec<&Tensor> = found.skips.iter().chain(&found.middle).collect();
    assert_eq!(all.len(), 5);
    for (number, residual) in all.into_iter().enumerate() {
        let key = format!("control/residual_{number}");
        check(&key, &(residual * 0.8).unwrap(), &expected[&key]);
    }
}

#[test]
fn a_new_controlnet_has_the_weights_of_the_u_net_and_changes_nothing() {
    let mut model = tiny_sd();
    let adapter = new_adapter(&control_net(), &model);
    let unet = crate::weights::Index::open(fixtures().join("tiny_sd/unet")).unwrap();
    let mut copied = 0;
    for (name, var) in adapter.trained() {
        if unet.contains(name) {
            let weight = unet.read(name, candle_core::DType::F32, &Device::Cpu).unwrap();
            assert_eq!(gap(var.as_tensor(), &weight), 0.0, "{name}");
            copied += 1;
        }
    }
    assert!(copied > 40 && copied + 20 > adapter.trained().len(), "{copied}");
    model.set_image_adapter(adapter).unwrap();
    let (sample, times, conditioning) = inputs("control", &model, (8, 6), 32);
    let images = pixels("control/image", &[1, 3, 16, 12]);
    let predict = |conditioning: &Conditioning| {
        let predicted = model.predict(std::slice::from_ref(&sample), &times, conditioning);
        predicted.unwrap().remove(0)
    };
    let without = predict(&conditioning);
    let with = predict(&model.with_adapter_images(conditioning, &images, 1.0).unwrap());
    assert_eq!(gap(&without, &with), 0.0);
}

fn request<'r>(config: &'r AdapterConfig, path: Option<&'r Path>, model: &dyn Model) -> AdapterRequest<'r> {
    AdapterRequest {
        config,
        arch: model.family().arch(),
        path,
        seed: 7,
        checkpointing: Checkpointing::Off,
    }
}

fn load(
    config: &AdapterConfig,
    path: &Path,
    model: &dyn Model,
) -> Result<std::sync::Arc<dyn super::ImageAdapter>, String> {
    let request = request(config, Some(path), model);
    let target = model.image_adapter_target().unwrap();
    find(config.kind)
        .unwrap()
        .load(&request, &target)
        .map_err(|error| error.to_string())
}

#[test]
fn folders_and_files_of_diffusers_are_loaded_and_those_of_other_models_refused() {
    let (sd, xl) = (tiny_sd(), tiny(&crate::families::sdxl::VARIANT, "tiny_sdxl"));
    for config in [t2i("full"), control_net()] {
        let adapter = new_adapter(&config, &sd);
        fill(&*adapter, |_| true);
        let tensors: BTreeMap<String, Tensor> = adapter
            .trained()
            .iter()
            .map(|(name, var)| (name.clone(), var.as_detached_tensor()))
            .collect();
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("adapter");
        write_adapter_folder(&folder, &adapter.config_json(), &tensors, &BTreeMap::new()).unwrap();
        // A folder has its own config, a file that of the job.
        let other = AdapterConfig {
            channels: vec![8],
            ..config.clone()
        };
        let file = folder.join("diffusion_pytorch_model.safetensors");
        for (config, path) in [(&other, &folder), (&config, &file)] {
            let loaded = load(config, path, &sd).unwrap();
            assert_eq!(loaded.trained().len(), tensors.len());
            for (name, var) in loaded.trained() {
                assert_eq!(gap(var.as_tensor(), &tensors[name]), 0.0, "{name}");
            }
        }
        let error = load(&config, &folder, &xl).unwrap_err();
        assert!(
            error.contains("another model") || error.contains("feature 0"),
            "{error}"
        );
        let wrong = AdapterConfig {
            kind: match config.kind {
                AdapterType::T2i => AdapterType::ControlNet,
                _ => AdapterType::T2i,
            },
            ..config.clone()
        };
        let error = load(&wrong, &folder, &sd).unwrap_err();
        assert!(error.contains("it is a ") && error.contains("adapter.type"), "{error}");
    }
}

/// The first feature of SDXL's network is added after the first downsampling: twice the pixels of a latent.
#[test]
fn the_factor_of_sdxl_follows_the_autoencoder() {
    let model = tiny(&crate::families::sdxl::VARIANT, "tiny_sdxl");
    let target = model.image_adapter_target().unwrap();
    for (factor, says) in [
        (4, None),
        (16, Some("set `downscale_factor: 4`")),
        (8, Some("set `downscale_factor: 4`")),
    ] {
        let config = AdapterConfig {
            downscale_factor: factor,
            ..t2i("xl")
        };
        let request = request(&config, None, &model);
        let found = find(AdapterType::T2i).unwrap().check(&request, &target);
        match (found, says) {
            (Ok(()), None) => {}
            (Err(error), Some(says)) => assert!(error.to_string().contains(says), "{factor}: {error}"),
            (found, _) => panic!("{factor}: {found:?}"),
        }
    }
}

/// They would be in no save.
#[test]
fn tensors_without_a_place_are_refused() {
    let model = tiny_sd();
    for config in [t2i("full"), control_net()] {
        let adapter = new_adapter(&config, &model);
        let folder = tempfile::tempdir().unwrap();
        let vars = adapter.trained().iter();
        let mut tensors: BTreeMap<String, Tensor> = vars
            .map(|(name, var)| (name.clone(), var.as_detached_tensor()))
            .collect();
        write_adapter_folder(folder.path(), &adapter.config_json(), &tensors, &BTreeMap::new()).unwrap();
        load(&config, folder.path(), &model).unwrap();
        let other = Tensor::zeros(2, candle_core::DType::F32, &Device::Cpu).unwrap();
        tensors.insert("zzz.weight".into(), other);
        write_adapter_folder(folder.path(), &adapter.config_json(), &tensors, &BTreeMap::new()).unwrap();
        let error = load(&config, folder.path(), &model).unwrap_err();
        assert!(error.contains("no place for the tensor `zzz.weight`"), "{error}");
    }
}

/// Configs, names and shapes show it, so that the check before a run finds it too.
#[test]
fn files_that_are_not_the_adapter_say_what_they_are() {
    let model = tiny_sd();
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let file = |name: &str, tensor: &str| {
        let zeros = Tensor::zeros((2, 2), candle_core::DType::F32, &Device::Cpu).unwrap();
        safetensors::save(&HashMap::from([(tensor, zeros)]), at(name)).unwrap();
    };
    file("lora.safetensors", "lora_unet_down_blocks_0.lora_down.weight");
    file("first.safetensors", "control_model.input_hint_block.0.weight");
    file("other.safetensors", "some.weight");
    std::fs::write(at("junk.safetensors"), "junk").unwrap();
    std::fs::write(at("empty.safetensors"), "").unwrap();
    let saved = |name: &str, config: &AdapterConfig, change: &dyn Fn(&mut serde_json::Value)| {
        let adapter = new_adapter(config, &model);
        let vars = adapter.trained().iter();
        let tensors: BTreeMap<String, Tensor> = vars
            .map(|(name, var)| (name.clone(), var.as_detached_tensor()))
            .collect();
        let mut json = adapter.config_json();
        change(&mut json);
        write_adapter_folder(&at(name), &json, &tensors, &BTreeMap::new()).unwrap();
    };
    let set =
        |key: &'static str, value: serde_json::Value| move |json: &mut serde_json::Value| json[key] = value.clone();
    let (full, control) = (t2i("full"), control_net());
    let blocks = full.num_res_blocks;
    saved("t2i", &full, &|_| {});
    saved("more_blocks", &full, &set("num_res_blocks", (blocks + 1).into()));
    saved("fewer_blocks", &full, &set("num_res_blocks", (blocks - 1).into()));
    saved("huge", &full, &set("channels", serde_json::json!([1u64 << 40, 32])));
    saved("factor", &full, &set("downscale_factor", (1u64 << 20).into()));
    saved("text", &full, &set("channels", "16".into()));
    saved("gray", &full, &set("in_channels", 1.into()));
    saved("net", &control, &|_| {});
    saved("layers", &control, &set("layers_per_block", 3.into()));
    saved(
        "text_net",
        &control,
        &set("block_out_channels", serde_json::json!(["16", 32])),
    );
    // The config of a ControlNet or of a T2I adapter beside the weights of a LoRA.
    let sdxl_lora = |name: &str| {
        let stem = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k";
        let tensor = |shape: (usize, usize)| Tensor::zeros(shape, candle_core::DType::F32, &Device::Cpu).unwrap();
        let tensors = HashMap::from([
            (format!("{stem}.lora_A.weight"), tensor((2, 2048))),
            (format!("{stem}.lora_B.weight"), tensor((16, 2))),
        ]);
        safetensors::save(&tensors, at(name).join("diffusion_pytorch_model.safetensors")).unwrap();
    };
    saved("lora_net", &control, &|_| {});
    sdxl_lora("lora_net");
    saved("lora_t2i", &full, &|_| {});
    sdxl_lora("lora_t2i");
    // A LoRA beside the weights of the ControlNet is not read.
    saved("net_and_lora", &control, &|_| {});
    std::fs::copy(at("lora.safetensors"), at("net_and_lora/lora.safetensors")).unwrap();
    saved("broken", &control, &|_| {});
    std::fs::write(at("broken/config.json"), "{").unwrap();
    saved("no_config", &control, &|_| {});
    std::fs::remove_file(at("no_config/config.json")).unwrap();
    let whole = fixtures().join("tiny_sd");
    crate::testing::copy_folder(&whole, &at("with_net"));
    saved("with_net/controlnet", &control, &|_| {});
    let net_of_model = at("with_net/controlnet").display().to_string();
    let t2i_file = "t2i/diffusion_pytorch_model.safetensors";
    let net_file = "net/diffusion_pytorch_model.safetensors";
    let wider = AdapterConfig {
        num_res_blocks: blocks + 1,
        ..full.clone()
    };
    let cases: [(&AdapterConfig, &Path, &str); 28] = [
        (&full, &at("lora.safetensors"), "is a LoRA"),
        (&control, &at("lora.safetensors"), "is a LoRA"),
        (
            &control,
            &at("lora_net"),
            "diffusion_pytorch_model.safetensors is a LoRA, made for Stable Diffusion XL",
        ),
        (&control, &at("lora_net"), "expected the weights of a ControlNetModel"),
        (&full, &at("lora_t2i"), "expected the weights of a T2IAdapter"),
        (&full, &at("lora_t2i"), "used with `model.lora_path`"),
        (&full, &at("junk.safetensors"), "junk.safetensors: "),
        (&control, &at("empty.safetensors"), "empty"),
        (&full, &at("other.safetensors"), "is missing"),
        (&control, &at("other.safetensors"), "is missing"),
        (&control, &at("first.safetensors"), "first release"),
        (&full, &at(net_file), "is a ControlNet"),
        (&control, &at(t2i_file), "is a T2I adapter"),
        (&full, &at("net"), "it is a ControlNetModel"),
        (&control, &at("t2i"), "it is a T2IAdapter"),
        (&full, &whole, "is a whole model, Stable Diffusion 1.x"),
        (&control, &whole, "expected a ControlNetModel"),
        (&control, &at("with_net"), &net_of_model),
        (&control, &whole.join("unet"), "is the denoiser of a model"),
        (&full, &at("more_blocks"), "is missing"),
        (&full, &at("fewer_blocks"), "no place for the tensor"),
        (&wider, &at(t2i_file), "`num_res_blocks`"),
        (&full, &at("huge"), "`channels` is"),
        (&full, &at("factor"), "at most 64"),
        (&full, &at("text"), "`channels`: expected a list, found \"16\""),
        (&full, &at("gray"), "`in_channels` is 1"),
        (
            &control,
            &at("text_net"),
            "`block_out_channels[0]`: expected a whole number from 0, found \"16\"",
        ),
        (&control, &at("layers"), "it is for another model"),
    ];
    let broken = [
        (&control, at("broken"), "not valid JSON"),
        (&control, at("no_config"), "give its .safetensors file"),
    ];
    let broken = broken
        .iter()
        .map(|(config, path, says)| (*config, path.as_path(), *says));
    for (config, path, says) in cases.into_iter().chain(broken) {
        let request = request(config, Some(path), &model);
        let target = model.image_adapter_target().unwrap();
        let checked = find(config.kind).unwrap().check(&request, &target);
        let error = checked.map_err(|error| error.to_string()).unwrap_err();
        assert!(error.contains(says), "{}: {error}", path.display());
        assert!(
            error.contains(&path.display().to_string()),
            "{}: {error}",
            path.display()
        );
        assert_eq!(load(config, path, &model).unwrap_err(), error);
    }
    for (config, path) in [
        (&full, "t2i"),
        (&full, t2i_file),
        (&control, "net"),
        (&control, "net_and_lora"),
        (&control, net_file),
    ] {
        load(config, &at(path), &model).unwrap();
        super::check_files(config, &at(path), model.family().arch()).unwrap();
    }
}

/// A change of a config.
type Change = fn(&mut AdapterConfig);

#[test]
fn a_t2i_adapter_that_does_not_fit_the_u_net_says_what_is_wrong() {
    let model = tiny_sd();
    let target = model.image_adapter_target().unwrap();
    let refused = |change: &dyn Fn(&mut AdapterConfig)| {
        let mut config = t2i("full");
        change(&mut config);
        let request = request(&config, None, &model);
        find(AdapterType::T2i)
            .unwrap()
            .check(&request, &target)
            .map_err(|error| error.to_string())
    };
    assert!(refused(&|_| {}).is_ok());
    // Fewer features than blocks.
    assert!(refused(&|config| config.channels = vec![16]).is_ok());
    let cases: [(Change, &str); 7] = [
        (|config| config.channels = vec![320, 640, 1280, 1280], "places for 3"),
        (
            |config| config.channels = vec![320, 640],
            "there: set `channels: [16, 32]`",
        ),
        (|config| config.channels = vec![16, 16], "feature 1 has 16 channels"),
        (
            |config| config.downscale_factor = 8,
            "feature 0 has 16 channels for each 8 x 8 pixels of the control image, and the U-Net adds 16 channels for each 2 x 2 pixels there: \
             set `downscale_factor: 2`",
        ),
        // No rounded ratio.
        (
            |config| config.downscale_factor = 3,
            "for each 3 x 3 pixels of the control image, and the U-Net adds 16 channels for each 2 x 2 pixels there: set `downscale_factor: 2`",
        ),
        (
            |config| {
                config.channels = vec![320, 640];
                config.downscale_factor = 16;
            },
            "set `channels: [16, 32]` and `downscale_factor: 2`",
        ),
        (
            |config| config.adapter_type = aitk_common::job::adapter::T2iNetwork::LightAdapter,
            "feature 2",
        ),
    ];
    for (change, text) in cases {
        let error = refused(&change).unwrap_err();
        assert!(error.contains(text), "{text}: {error}");
    }
    let images = pixels("odd", &[1, 3, 9, 8]);
    let error = new_adapter(&t2i("full"), &model)
        .encode(&images)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("8 x 9 pixels") && error.contains("multiples of 2"),
        "{error}"
    );
}
