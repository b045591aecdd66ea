//! Comparison with the fixtures of `tests/reference/make_lora_dialects.py`.

use super::load::index_layers;
use super::names::saved_name;
use super::*;
use crate::checkpointing::Checkpointing;
use crate::error::Result;
use crate::families::stable_diffusion::SdModel;
use crate::families::{self, AdapterNames, Conditioning, LoadOptions, Model, PartRole, Prompt, sdxl};
use crate::rng::TorchGenerator;
use crate::testing::{fixtures, gap, largest, tiny_sd as model, unet_part};
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::PartPaths;
use candle_core::{DType, Device, Tensor};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

fn expected() -> HashMap<String, Tensor> {
    candle_core::safetensors::load(fixtures().join("lora/expected.safetensors"), &Device::Cpu).unwrap()
}

fn load(model: &mut SdModel, path: &Path, multiplier: f64) -> crate::error::Result<LoadedAdapter> {
    load_lora(&mut model.parts(), path, multiplier)
}

fn unet(model: &SdModel, e: &HashMap<String, Tensor>) -> Tensor {
    model
        .unet
        .forward(&e["x"], &e["t"].to_dtype(DType::F32).unwrap(), &e["context"])
        .unwrap()
}

/// The tensors of a LoRA.
pub(super) fn lora(layer: &dyn FileLayer) -> &LoraTensors {
    layer.as_any().downcast_ref().unwrap()
}

fn encode_text(model: &SdModel) -> Tensor {
    model.text_encoders[0]
        .model
        .forward(&model.text_encoders[0].tokenizer.encode(&["a red circle"]).unwrap())
        .unwrap()
}

#[test]
fn every_dialect_gives_the_output_of_peft() {
    let e = expected();
    for (file, unet_key, text_key) in [
        ("diffusers", "full/unet", "full/text"),
        ("ai_toolkit", "full/unet", "full/text"),
        ("sd_scripts_original", "full/unet", "full/text"),
        ("diffusers_old", "full/unet", "plain/text"),
        ("peft", "full/unet", "plain/text"),
        ("early_diffusers", "attention/unet", "plain/text"),
    ] {
        let mut model = model();
        let loaded = load(&mut model, &fixtures().join(format!("lora/{file}.safetensors")), 1.0).unwrap();
        assert!(loaded.unknown.is_empty(), "{file}: {:?}", loaded.unknown);
        let (u, t) = (
            gap(&unet(&model, &e), &e[unet_key]),
            gap(&encode_text(&model), &e[text_key]),
        );
        assert!(u < 2e-5 && t < 2e-5, "{file}: unet {u}, text {t}");
    }
}

/// The prompt of `tests/reference/make_lora_sdxl.py`.
const SDXL_PROMPT: &str = "a red circle!";

#[test]
fn every_dialect_of_sdxl_gives_the_output_of_peft() {
    let folder = fixtures().join("lora_sdxl");
    let e = candle_core::safetensors::load(folder.join("expected.safetensors"), &Device::Cpu).unwrap();
    let answers = |model: &SdModel| {
        let text = model.encode_prompts(&[Prompt::new(SDXL_PROMPT)]).unwrap();
        let given = Conditioning::default()
            .with("context", e["context"].clone())
            .with("pooled", e["pooled"].clone())
            .with("time_ids", e["time_ids"].clone());
        let t = e["t"].to_dtype(DType::F32).unwrap();
        let unet = model
            .predict(std::slice::from_ref(&e["x"]), &t, &given)
            .unwrap()
            .remove(0);
        [
            ("unet", unet),
            ("context", text.get("context").unwrap().clone()),
            ("pooled", text.get("pooled").unwrap().clone()),
        ]
    };
    for file in ["diffusers", "ai_toolkit", "sd_scripts_original", "comfyui"] {
        for (strength, key) in [(1.0, "full"), (0.5, "half"), (0.0, "plain")] {
            let mut model = crate::testing::tiny(&sdxl::VARIANT, "tiny_sdxl");
            let loaded = load(&mut model, &folder.join(format!("{file}.safetensors")), strength).unwrap();
            assert!(loaded.unknown.is_empty(), "{file}: {:?}", loaded.unknown);
            for (name, ours) in answers(&model) {
                let gap = gap(&ours, &e[&format!("{key}/{name}")]);
                assert!(gap < 2e-5, "{file} at {strength}: {name} differs by {gap}");
            }
        }
    }
}

/// A slider trains with several strengths in one loss.
#[test]
fn each_pass_keeps_its_strength_in_the_backward_pass() {
    let e = expected();
    let gradients_with = |checkpointing| -> Vec<Tensor> {
        let mut model = model();
        model.unet.checkpointing = checkpointing;
        let network = attach(&mut model, &config());
        randomise(&network);
        let pass = |strength| {
            let pass = AdapterPass {
                strength,
                dropout_seed: Some("masks".into()),
            };
            network.handle.in_pass(pass, || unet(&model, &e))
        };
        let loss = || -> crate::error::Result<Tensor> {
            let (strong, weak) = (pass(1.0).sqr()?.mean_all()?, pass(-0.5).sqr()?.mean_all()?);
            Ok((strong + (weak * 3.0)?)?)
        };
        let (_, gradients) = crate::autograd::gradients(loss).unwrap();
        let params = network.params();
        let of = |param: &crate::optim::Param| gradients.get(&param.var).unwrap().clone();
        params.iter().map(of).collect()
    };
    let resident = gradients_with(Checkpointing::Off);
    let recomputed = gradients_with(Checkpointing::Segments { blocks: 1 });
    for (a, b) in resident.iter().zip(&recomputed) {
        let gap = gap(a, b) / largest(a);
        assert!(gap < 1e-4, "gradients differ by {gap}");
    }
}

#[test]
fn an_error_says_which_family_a_lora_is_for() {
    let xl = fixtures().join("lora_sdxl/ai_toolkit.safetensors");
    let error = load(&mut model(), &xl, 1.0).unwrap_err().to_string();
    assert!(error.contains("made for Stable Diffusion XL"), "{error}");
    let mut of_sd1 = model();
    let network = attach(&mut of_sd1, &config());
    let error = network.load(&AdapterFile::open(&xl).unwrap()).unwrap_err().to_string();
    assert!(error.contains("made for Stable Diffusion XL"), "{error}");
    let said = BTreeMap::from([("ss_base_model_version".to_owned(), "flux.1".to_owned())]);
    let file = AdapterFile {
        metadata: said,
        ..AdapterFile::open(&xl).unwrap()
    };
    let error = network.load(&file).unwrap_err().to_string();
    assert!(error.contains("flux.1"), "{error}");
}

#[test]
fn the_multiplier_can_change_at_any_time() {
    let e = expected();
    let mut model = model();
    let loaded = load(&mut model, &fixtures().join("lora/diffusers.safetensors"), 0.5).unwrap();
    assert!(gap(&unet(&model, &e), &e["half/unet"]) < 2e-5);
    loaded.multiplier.set(1.0);
    assert!(gap(&unet(&model, &e), &e["full/unet"]) < 2e-5);
    loaded.multiplier.set(0.0);
    assert!(gap(&unet(&model, &e), &e["plain/unet"]) < 1e-5);
}

fn config() -> AdapterConfig {
    AdapterConfig {
        rank: 4,
        alpha: 2.0,
        conv_rank: Some(3),
        conv_alpha: 3.0,
        ..AdapterConfig::default()
    }
}

fn attach(model: &mut SdModel, config: &AdapterConfig) -> AdapterNetwork {
    AdapterNetwork::attach(config, &mut [unet_part(model)], &mut TorchGenerator::manual_seed(9)).unwrap()
}

fn randomise(network: &AdapterNetwork) {
    let mut generator = TorchGenerator::manual_seed(4);
    for p in network.params() {
        let values = generator.uniform(p.var.elem_count(), -0.2, 0.2);
        p.var
            .set(&Tensor::from_vec(values, p.var.shape(), &Device::Cpu).unwrap())
            .unwrap();
    }
}

#[test]
fn a_saved_lora_loads_and_gives_the_same_output() {
    let e = expected();
    let mut trained = model();
    let network = attach(&mut trained, &config());
    assert!(network.convolutions() > 0 && network.layers() > 40);
    randomise(&network);
    let meta = BTreeMap::from([
        (
            "training_info".to_owned(),
            python_json(&serde_json::json!({"step": 7, "epoch": 1}), false),
        ),
        ("ss_output_name".to_owned(), "mine".to_owned()),
        ("format".to_owned(), "pt".to_owned()),
    ]);
    let bytes = lora_file_bytes(&network.tensors(DType::F32).unwrap(), meta.clone()).unwrap();
    assert_eq!(
        bytes,
        lora_file_bytes(&network.tensors(DType::F32).unwrap(), meta).unwrap()
    );
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mine.safetensors");
    std::fs::write(&path, &bytes).unwrap();

    let want = unet(&trained, &e);
    let mut other = model();
    let loaded = load(&mut other, &path, 1.0).unwrap();
    assert_eq!(loaded.layers, network.layers());
    assert_eq!(gap(&unet(&other, &e), &want), 0.0);
    assert!(gap(&want, &e["plain/unet"]) > 0.01);

    let file = AdapterFile::open(&path).unwrap();
    assert_eq!(file.training_info(), Some((7, 1)));
    assert_eq!(file.metadata["sshs_model_hash"].len(), 64);
    assert_eq!(file.metadata["sshs_legacy_hash"].len(), 8);
    let network = attach(&mut model(), &config());
    let report = network.load(&file).unwrap();
    assert_eq!((report.missing.len(), report.unknown.len(), report.resized), (0, 0, 0));
}

#[test]
fn name_filters_select_the_target_layers() {
    let names = |c: &AdapterConfig| -> Vec<String> {
        let network = attach(&mut model(), c);
        network.params().into_iter().map(|p| p.name).collect()
    };
    let all = names(&config());
    assert!(
        all.iter()
            .any(|n| n == "lora_unet_time_embedding_linear_1.lora_down.weight")
    );
    assert!(all.iter().any(|n| n == "lora_unet_conv_in.lora_down.weight"));
    let linear = names(&AdapterConfig {
        conv_rank: None,
        ..config()
    });
    assert!(linear.iter().any(|n| n.contains("conv_shortcut")) && !linear.iter().any(|n| n.contains("conv_in")));
    let some = names(&AdapterConfig {
        only_if_contains: vec!["mid_block.attentions".into(), "up_blocks_1".into()],
        ignore_if_contains: vec!["attn2".into()],
        ..config()
    });
    assert!(
        !some.is_empty()
            && some
                .iter()
                .all(|n| !n.contains("attn2") && (n.contains("mid_block") || n.contains("up_blocks_1")))
    );
    let none = AdapterConfig {
        only_if_contains: vec!["nothing like it".into()],
        ..config()
    };
    let mut sd = model();
    let failed = AdapterNetwork::attach(&none, &mut [unet_part(&mut sd)], &mut TorchGenerator::manual_seed(0));
    assert!(failed.unwrap_err().to_string().contains("only_if_contains"));
}

#[test]
fn the_initial_weights_match_peft() {
    let network = attach(&mut model(), &config());
    for p in network.params() {
        let values = p.var.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        if p.name.ends_with("lora_up.weight") {
            assert!(values.iter().all(|v| *v == 0.0));
        } else {
            let fan_in: usize = p.var.dims()[1..].iter().product();
            let bound = (1.0 / fan_in as f32).sqrt();
            let largest = values.iter().fold(0f32, |m, v| m.max(v.abs()));
            assert!(
                largest <= bound && (values.len() < 40 || largest > 0.7 * bound),
                "{}: {largest} of {bound}",
                p.name
            );
        }
    }
}

#[test]
fn weights_of_another_rank_are_padded_or_cut() {
    let mut sd = model();
    let small = attach(&mut sd, &config());
    randomise(&small);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.safetensors");
    std::fs::write(
        &path,
        lora_file_bytes(&small.tensors(DType::F32).unwrap(), BTreeMap::new()).unwrap(),
    )
    .unwrap();
    let file = AdapterFile::open(&path).unwrap();
    // alpha / rank is the same as before, so padding with zeros does not change the output.
    let mut bigger = model();
    let large = attach(
        &mut bigger,
        &AdapterConfig {
            rank: 8,
            alpha: 4.0,
            conv_rank: Some(6),
            conv_alpha: 6.0,
            ..config()
        },
    );
    let report = large.load(&file).unwrap();
    assert_eq!((report.resized, report.other_strengths), (large.layers(), 0));
    let e = expected();
    assert!(gap(&unet(&bigger, &e), &unet(&sd, &e)) < 1e-5);
    // Every row can be trained: where `up` is zero, `down` is not.
    for (name, tensor) in large.tensors(DType::F32).unwrap() {
        if name.contains("lora_down") {
            let rows = tensor.flatten_from(1).unwrap().abs().unwrap().sum(1).unwrap();
            assert!(rows.to_vec1::<f32>().unwrap().iter().all(|row| *row > 0.0), "{name}");
        }
    }
    let report = attach(&mut model(), &AdapterConfig { rank: 2, ..config() })
        .load(&file)
        .unwrap();
    assert!(report.resized > 0);
    // The file's are 2 / 4 of linear layers, and 3 / 3 of convolutions.
    let report = attach(&mut model(), &AdapterConfig { alpha: 6.0, ..config() })
        .load(&file)
        .unwrap();
    assert!(report.other_strengths > 0 && report.other_strengths < large.layers());
    assert!((report.first_other_strength.unwrap() - 3.0).abs() < 1e-9);
}

#[test]
fn an_invalid_file_is_an_error_that_names_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let check_error = |bytes: &[u8], text: &str| {
        std::fs::write(&path, bytes).unwrap();
        let message = load(&mut model(), &path, 1.0).unwrap_err().to_string();
        assert!(
            message.contains(text) && message.contains("x.safetensors"),
            "\"{text}\" is not in: {message}"
        );
    };
    let good = std::fs::read(fixtures().join("lora/ai_toolkit.safetensors")).unwrap();
    check_error(&good[..good.len() - 1], "cut off");
    check_error(&good[..100], "cut off");
    check_error(b"", "empty");
    check_error(b"\x80\x02}q\x00.", "pickle");
    let t = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let one = |tensors: &[(&str, &[usize])]| {
        let map = tensors.iter().map(|(n, s)| ((*n).to_owned(), t(s))).collect();
        safetensors_bytes(&map, &BTreeMap::new()).unwrap()
    };
    check_error(&one(&[("conv.weight", &[2, 2])]), "no LoRA");
    check_error(
        &one(&[("lora_unet_conv_in.lora_down.weight", &[4, 4, 3, 3])]),
        "incomplete",
    );
    check_error(&one(&[("lora_unet_conv_in.lokr_w1", &[4, 4])]), "incomplete");
    check_error(&one(&[("lora_unet_conv_in.lokr_t1", &[4, 4])]), "LoKr of another form");
    check_error(&one(&[("lora_unet_conv_in.hada_w1_a", &[4, 4])]), "incomplete");
    check_error(&one(&[("lora_unet_conv_in.hada_x", &[4, 4])]), "LoHa of another form");
    for (keys, kind) in [
        (&["oft_R.weight"][..], "an OFT of peft, which rotates the inputs"),
        (&["boft_R", "boft_s"], "a BOFT of peft"),
        (&["oft_diag"], "OFT of another form"),
        (&["lora_A", "lora_B", "lora_E"], "AdaLoRA"),
        (&["weight", "on_input"], "IA3"),
        (&["q_layer.weight", "p_layer.weight", "lambda_layer"], "T-LoRA"),
        (&["vera_lambda_b", "vera_lambda_d"], "VeRA"),
    ] {
        let keys = keys.iter().map(|key| format!("base_model.model.conv_in.{key}"));
        let keys: Vec<String> = keys.collect();
        let tensors: Vec<(&str, &[usize])> = keys.iter().map(|key| (key.as_str(), &[4_usize, 4][..])).collect();
        check_error(&one(&tensors), kind);
    }
    check_error(&one(&[("lora_unet_conv_in.dora_scale", &[32, 1])]), "no other tensor");
    let product = [
        ("lora_unet_conv_in.lokr_w2_a", &[8, 2][..]),
        ("lora_unet_conv_in.lokr_w2_b", &[3, 18]),
    ];
    let lokr = [&[("lora_unet_conv_in.lokr_w1", &[4, 2][..])], &product[..]].concat();
    check_error(&one(&lokr), "do not fit together");
    check_error(
        &one(&[
            ("lora_unet_conv_in.lokr_w1", &[4, 2]),
            ("lora_unet_conv_in.lokr_w2", &[9, 2, 3, 3]),
        ]),
        "36 outputs and 4 inputs, the layer has 16 and 4",
    );
    check_error(&one(&[("unet.conv_in.lora_B.bias", &[4])]), "biases");
    check_error(&one(&[("lora_unet_conv_in.diff_b", &[4])]), "the model needs");
    check_error(
        &one(&[("lora_unet_conv_norm_out.diff", &[32, 3, 3])]),
        "layer `lora_unet_conv_norm_out`: its `.diff` [32, 3, 3] is not the whole difference",
    );
    check_error(&one(&[("lora_unet_conv_in.diff", &[32, 4, 5, 3])]), "the model needs");
    check_error(&one(&[("lora_unet_conv_in.diff", &[32])]), "the model needs");
    check_error(&one(&[("lora_unet_conv_norm_out.diff", &[31])]), "the model needs");
    check_error(
        &one(&[
            ("lora_unet_conv_norm_out.lora_down.weight", &[4, 32]),
            ("lora_unet_conv_norm_out.lora_up.weight", &[32, 4]),
        ]),
        "a LoRA of a norm; for norms only whole differences can be used",
    );
    check_error(
        &one(&[("unet_conv_in.bias", &[32])]),
        "no `.weight`: the file is incomplete",
    );
    check_error(&one(&[("unet_conv_in.weight", &[32, 4, 5, 3])]), "the model needs");
    let layer = [("unet.conv_in.lora_A.weight", t(&[4, 4, 3, 3]))].map(|(n, t)| (n.to_owned(), t));
    let peft = r#"{"unet.r": 4, "unet.lora_alpha": 4, "unet.alpha_pattern": {"attn2.*": 2}}"#;
    let metadata = BTreeMap::from([("lora_adapter_metadata".to_owned(), peft.to_owned())]);
    check_error(
        &safetensors_bytes(&layer.into_iter().collect(), &metadata).unwrap(),
        "attn2.*",
    );
    check_error(
        &one(&[
            ("lora_unet_x.lora_down.weight", &[4, 4]),
            ("lora_unet_x.lora_up.weight", &[4, 4]),
        ]),
        "another model",
    );
    check_error(
        &one(&[
            ("lora_unet_time_embedding_linear_1.lora_down.weight", &[4, 5]),
            ("lora_unet_time_embedding_linear_1.lora_up.weight", &[64, 4]),
        ]),
        "time_embedding",
    );
}

#[test]
fn an_unknown_layer_is_named_by_a_tensor_of_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let tensor = |shape: &[usize]| Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap();
    let tensors = BTreeMap::from(
        [
            ("lora_unet_conv_in.lora_down.weight", tensor(&[4, 4, 3, 3])),
            ("lora_unet_conv_in.lora_up.weight", tensor(&[16, 4, 1, 1])),
            ("lora_unet_x.scalar", tensor(&[1])),
            ("lora_unet_y.alpha", tensor(&[1])),
        ]
        .map(|(name, tensor)| (name.to_owned(), tensor)),
    );
    std::fs::write(&path, safetensors_bytes(&tensors, &BTreeMap::new()).unwrap()).unwrap();
    let file = AdapterFile::open(&path).unwrap();
    let (_, unknown) = file.resolve(&index_layers(&mut model().parts()).unwrap()).unwrap();
    assert_eq!(unknown, ["lora_unet_x.scalar", "lora_unet_y.alpha"]);
}

#[test]
fn a_training_does_not_start_from_whole_differences() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let diff = Tensor::ones((32, 4, 3, 3), DType::F32, &Device::Cpu).unwrap();
    let tensors = BTreeMap::from([("lora_unet_conv_in.diff".to_owned(), diff)]);
    std::fs::write(&path, safetensors_bytes(&tensors, &BTreeMap::new()).unwrap()).unwrap();
    let error = attach(&mut model(), &config()).load(&AdapterFile::open(&path).unwrap());
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("lora_unet_conv_in") && error.contains("lower rank"),
        "{error}"
    );
}

#[test]
fn an_alpha_may_be_a_whole_number() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let layer = |alpha: DType| {
        let tensor = |shape: &[usize]| Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap();
        let tensors = [
            ("lora_unet_conv_in.lora_down.weight", tensor(&[4, 4, 3, 3])),
            ("lora_unet_conv_in.lora_up.weight", tensor(&[32, 4, 1, 1])),
            (
                "lora_unet_conv_in.alpha",
                Tensor::new(3f32, &Device::Cpu).unwrap().to_dtype(alpha).unwrap(),
            ),
        ];
        let tensors = tensors.map(|(name, tensor)| (name.to_owned(), tensor));
        safetensors_bytes(&tensors.into(), &BTreeMap::new()).unwrap()
    };
    for dtype in [DType::F32, DType::BF16, DType::I64] {
        std::fs::write(&path, layer(dtype)).unwrap();
        let file = AdapterFile::open(&path).unwrap();
        assert_eq!(lora(&*file.modules[0].tensors).alpha, Some(3.0), "{dtype:?}");
    }
}

#[test]
fn the_alpha_of_peft_is_read_from_the_header_or_from_the_file_beside_it() {
    let dir = tempfile::tempdir().unwrap();
    let layer = |prefix: &str| {
        let t = |shape: &[usize]| Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap();
        BTreeMap::from([
            (format!("{prefix}conv_in.lora_A.weight"), t(&[4, 4, 3, 3])),
            (format!("{prefix}conv_in.lora_B.weight"), t(&[16, 4, 1, 1])),
        ])
    };
    let alpha = |path: &Path| {
        let file = AdapterFile::open(path).unwrap();
        let (found, unknown) = file.resolve(&index_layers(&mut model().parts()).unwrap()).unwrap();
        assert!(unknown.is_empty(), "{unknown:?}");
        (
            lora(&*found.into_values().next().unwrap()).alpha.unwrap(),
            file.alpha_is_unknown(),
        )
    };
    // diffusers' save_lora_adapter writes keys without the part's name.
    let header = r#"{"r": 4, "lora_alpha": 8}"#;
    let metadata = BTreeMap::from([("lora_adapter_metadata".to_owned(), header.to_owned())]);
    let path = dir.path().join("pytorch_lora_weights.safetensors");
    std::fs::write(&path, safetensors_bytes(&layer(""), &metadata).unwrap()).unwrap();
    assert_eq!(alpha(&path), (8.0, false));
    // peft's own files.
    let path = dir.path().join("adapter_model.safetensors");
    std::fs::write(
        &path,
        safetensors_bytes(&layer("base_model.model."), &BTreeMap::new()).unwrap(),
    )
    .unwrap();
    assert_eq!(alpha(&path), (4.0, true), "nothing says what it is");
    std::fs::write(dir.path().join("adapter_config.json"), r#"{"r": 4, "lora_alpha": 2}"#).unwrap();
    assert_eq!(alpha(&path), (2.0, false));
    std::fs::write(
        dir.path().join("adapter_config.json"),
        r#"{"lora_alpha": 2, "use_rslora": true}"#,
    )
    .unwrap();
    assert_eq!(alpha(&path), (4.0, false), "times the root of the rank");
}

#[test]
fn layers_of_the_additional_embedding_have_the_names_that_diffusers_reads() {
    for (path, name) in [
        ("add_embedding.linear_1", "lora_unet_label_emb_0_0"),
        ("add_embedding.linear_2", "lora_unet_label_emb_0_2"),
        ("time_embedding.linear_1", "lora_unet_time_embedding_linear_1"),
    ] {
        assert_eq!(
            saved_name(AdapterNames::Kohya, PartRole::Denoiser, "lora_unet", path),
            name
        );
    }
}

crate::testing::in_portable_mode! {
    every_dialect_gives_the_output_of_peft,
    the_multiplier_can_change_at_any_time,
}

#[test]
fn a_lora_of_text_encoders_alone_is_none_for_the_denoiser() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, text) = (
        fixtures().join("lora/ai_toolkit.safetensors"),
        dir.path().join("text.safetensors"),
    );
    let mut tensors = candle_core::safetensors::load(&whole, &Device::Cpu).unwrap();
    tensors.retain(|name, _| is_of_text(name));
    candle_core::safetensors::save(&tensors, &text).unwrap();
    let (folder, arch) = (fixtures().join("tiny_sd"), ArchName::Sd1);
    let load = |path: &Path| {
        let mut model = families::load(&folder, arch, &LoadOptions::cpu()).unwrap();
        load_denoiser_lora(&mut *model, path, 1.0).map(drop)
    };
    let check = |path: &Path| check_denoiser_lora(path, &folder, arch, &PartPaths::default());
    check_lora(&text, &folder, arch, &PartPaths::default()).unwrap();
    let recover = |path: &Path| adapted_layers(path, &folder, arch, &PartPaths::default());
    for found in [load(&text), check(&text), recover(&text).map(drop)] {
        let error = found.unwrap_err().to_string();
        assert!(
            error.contains("layers are of text encoders") && error.contains("`model.lora_path`"),
            "{error}"
        );
    }
    load(&whole).unwrap();
    check(&whole).unwrap();
    assert!(!recover(&whole).unwrap().is_empty());
}

/// A training would say that its prompts were encoded with it.
#[test]
fn a_lora_of_other_text_encoders_is_refused_before_prompts_are_encoded() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, other) = (
        fixtures().join("lora/ai_toolkit.safetensors"),
        dir.path().join("other.safetensors"),
    );
    let renamed =
        |(name, tensor): (String, Tensor)| Some((format!("lora_te3_{}", name.strip_prefix("lora_te_")?), tensor));
    let tensors = candle_core::safetensors::load(&whole, &Device::Cpu).unwrap();
    let tensors: HashMap<String, Tensor> = tensors.into_iter().filter_map(renamed).collect();
    candle_core::safetensors::save(&tensors, &other).unwrap();
    let folder = fixtures().join("tiny_sd");
    let mut encoders = families::load_text_encoders(&folder, ArchName::Sd1, &LoadOptions::cpu()).unwrap();
    let error = load_text_lora(&mut encoders.parts(), &other).unwrap_err().to_string();
    assert!(error.contains("none of its"), "{error}");
    assert!(load_text_lora(&mut encoders.parts(), &whole).unwrap() > 0);
}

/// `check_lora` reads no numbers, and answers as `load_lora` does.
#[test]
fn a_check_answers_as_loading_does() {
    let models = [
        ("tiny_sd", ArchName::Sd1),
        ("tiny_sdxl", ArchName::Sdxl),
        ("tiny_flux", ArchName::Flux),
    ];
    let mut answers = [0, 0];
    for folder in ["lora", "lora_sdxl", "lora_flux", "our_lora", "strong_lora"] {
        for entry in std::fs::read_dir(fixtures().join(folder)).unwrap() {
            let path = entry.unwrap().path();
            let is_lora = path.extension().is_some_and(|e| e == "safetensors");
            if !is_lora {
                continue;
            }
            for (model, arch) in models {
                let model = fixtures().join(model);
                let mut loaded = families::load(&model, arch, &LoadOptions::cpu()).unwrap();
                let expected = load_lora(&mut loaded.parts(), &path, 1.0).map(drop);
                let found = check_lora(&path, &model, arch, &PartPaths::default());
                let text = |result: Result<()>| result.map_err(|error| error.to_string());
                answers[usize::from(found.is_ok())] += 1;
                assert_eq!(text(found), text(expected), "{}, {arch:?}", path.display());
            }
        }
    }
    assert!(answers[0] > 10 && answers[1] > 10, "{answers:?}");
}
