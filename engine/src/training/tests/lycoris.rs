//! Comparison with the fixtures of `tests/reference/make_train_lycoris.py`: 20 steps of LoKr, LoCon and LoHa with LyCORIS, and of
//! DoRA with peft.

use super::families::{Family, SD21, SDXL};
use super::flux;
use crate::adapters::{AdapterConfig, AdapterNetwork, AdapterType, Dora, Locon, Loha, Lokr};
use crate::checkpointing::Checkpointing;
use crate::families::{LoadOptions, Model};
use crate::optim::Param;
use crate::rng::TorchGenerator;
use crate::testing::{fixtures, gap, in_portable_mode, sampled_cases};
use aitk_common::job::network::LOKR_FULL_RANK;
use candle_core::{Device, Tensor};
use serde_json::Value;

fn report() -> Value {
    serde_json::from_slice(&std::fs::read(fixtures().join("lycoris/training.json")).unwrap()).unwrap()
}

/// The rank and the alpha in a variant; those of full matrices are null. `None`: these layers get no adapter.
fn rank_and_alpha(value: &Value) -> Option<(usize, f64)> {
    let pair = value.as_array()?;
    Some(match pair[0].as_u64() {
        Some(rank) => (rank as usize, pair[1].as_f64().unwrap()),
        None => (LOKR_FULL_RANK as usize, LOKR_FULL_RANK as f64),
    })
}

fn adapter(variant: &Value) -> Box<dyn AdapterType> {
    match variant["type"].as_str() {
        Some("locon") => Box::new(Locon),
        Some("loha") => Box::new(Loha),
        Some("dora") => Box::new(Dora),
        _ => Box::new(Lokr {
            factor: usize::try_from(variant["factor"].as_i64().unwrap()).ok(),
            ..Lokr::SQUARE
        }),
    }
}

/// The parameters, module by module in the order of their names.
fn in_order(network: &AdapterNetwork) -> Vec<Param> {
    let mut params = network.params();
    // Stable: the parameters of a module stay in their order.
    params.sort_by_key(|param| param.name[..param.name.len() - suffix(&param.name).len() - 1].to_owned());
    params
}

/// The end of a parameter's name.
fn suffix(name: &str) -> &str {
    let suffixes = [
        "lokr_w1",
        "lokr_w2",
        "lokr_w2_a",
        "lokr_w2_b",
        "lora_down.weight",
        "lora_up.weight",
        "scalar",
        "hada_w1_a",
        "hada_w1_b",
        "hada_w2_a",
        "hada_w2_b",
        "lora_A.weight",
        "lora_B.weight",
        "dora_scale",
        "lora_magnitude_vector.weight",
    ];
    suffixes
        .into_iter()
        .find(|suffix| name.ends_with(&format!(".{suffix}")))
        .unwrap()
}

/// As `draw` of `tests/reference/lycoris_modules.py`.
fn set_first_values(params: &[Param], seed: u64) {
    let has_scalar = params.iter().any(|param| suffix(&param.name) == "scalar");
    let mut generator = TorchGenerator::manual_seed(seed);
    for Param { name, var } in params {
        let dims = var.dims();
        let bound = match suffix(name) {
            "lokr_w1" | "lokr_w2_a" => 1.0 / (dims[1] as f64).sqrt(),
            // A magnitude starts as the norm of the weight.
            "dora_scale" | "lora_magnitude_vector.weight" => continue,
            "hada_w1_a" => 0.1,
            "hada_w1_b" | "hada_w2_b" => 1.0,
            "lora_down.weight" | "lora_A.weight" => 1.0 / (dims[1..].iter().product::<usize>() as f64).sqrt(),
            "lora_up.weight" if has_scalar => (6.0 / dims[1] as f64).sqrt(),
            _ => 0.0,
        };
        let values = match bound > 0.0 {
            true => generator.rand(var.elem_count()),
            false => vec![0.5; var.elem_count()],
        };
        let values: Vec<f32> = values.into_iter().map(|u| (u * 2.0 - 1.0) * bound as f32).collect();
        var.set(&Tensor::from_vec(values, dims, &Device::Cpu).unwrap()).unwrap();
    }
}

/// Compares what the parameters became.
fn compare(params: &[Param], variant: &Value, report: &Value, key: &str) {
    let elements: usize = params.iter().map(|param| param.var.elem_count()).sum();
    assert_eq!(
        (params.len() as u64, elements as u64),
        (
            variant["tensors"].as_u64().unwrap(),
            variant["elements"].as_u64().unwrap()
        ),
        "{key}: tensors, numbers"
    );
    let theirs = candle_core::safetensors::load(fixtures().join("lycoris/training.safetensors"), &Device::Cpu).unwrap();
    let every = report["every"].as_u64().unwrap() as usize;
    let mut by_name: Vec<&Param> = params.iter().collect();
    by_name.sort_by(|a, b| a.name.cmp(&b.name));
    let kept = by_name.iter().flat_map(|param| {
        let values = param.var.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        values.into_iter().step_by(every)
    });
    let kept: Vec<f32> = kept.collect();
    let gap = gap(&Tensor::new(kept, &Device::Cpu).unwrap(), &theirs[key]);
    println!("{key}: weights {gap:.1e}");
    assert!(gap < 1e-3, "{key}: {gap:.1e}");
}

fn check_sd(name: &str) {
    let report = report();
    let variant = &report["sd"]["variants"][name];
    let family: &Family = match variant["family"].as_str().unwrap() {
        "sd21" => &SD21,
        _ => &SDXL,
    };
    let (rank, alpha) = rank_and_alpha(&variant["linear"]).unwrap();
    let conv = rank_and_alpha(&variant["conv"]);
    let config = AdapterConfig {
        rank,
        alpha,
        conv_rank: conv.map(|(rank, _)| rank),
        conv_alpha: conv.map_or(1.0, |(_, alpha)| alpha),
        only_if_contains: variant["covers"].as_str().map(str::to_owned).into_iter().collect(),
        ..AdapterConfig::default()
    };
    let adapter = adapter(variant);
    let mut model = family.load(&LoadOptions::cpu());
    let mut trained = model.parts();
    trained.retain(|part| part.id == "unet");
    let network = AdapterNetwork::attach_as(
        &*adapter,
        &config,
        None,
        &mut trained,
        &mut TorchGenerator::manual_seed(0),
    )
    .unwrap();
    drop(trained);
    let params = in_order(&network);
    set_first_values(&params, report["seed"].as_u64().unwrap());
    network.handle.set_training(Some("masks"));
    family.train(&model, params.clone(), 1e-3, false, (&report["sd"], name));
    compare(&params, variant, &report, &format!("sd/{name}"));
}

fn check_flux(name: &str, checkpointing: Checkpointing) {
    let report = report();
    let variant = &report["flux"]["variants"][name];
    let rank = variant["rank"].as_u64().unwrap_or(LOKR_FULL_RANK) as usize;
    let config = AdapterConfig {
        rank,
        alpha: 1.0,
        conv_rank: None,
        conv_alpha: 1.0,
        ..AdapterConfig::default()
    };
    let mut model = flux::model(&crate::families::FLUX, variant, &LoadOptions::cpu());
    model.set_checkpointing(checkpointing);
    let mut trained = model.parts();
    trained.retain(|part| part.id == "transformer");
    let network = AdapterNetwork::attach_as(
        &*adapter(variant),
        &config,
        None,
        &mut trained,
        &mut TorchGenerator::manual_seed(0),
    )
    .unwrap();
    drop(trained);
    let params = in_order(&network);
    set_first_values(&params, report["seed"].as_u64().unwrap());
    network.handle.set_training(Some("masks"));
    flux::train(&model, params.clone(), &report["flux"], name, None);
    compare(&params, variant, &report, &format!("flux/{name}"));
}

#[test]
fn adapters_of_unets_match_lycoris_and_peft() {
    for name in sampled_cases(vec![
        "lokr_full",
        "lokr_low_rank",
        "lokr_linear",
        "locon",
        "locon_linear",
        "loha",
        "dora",
    ]) {
        check_sd(name);
    }
}

#[test]
fn adapters_of_a_transformer_match_lycoris_and_peft() {
    for name in ["lokr_full", "lokr_factor", "lokr_low_rank", "loha", "dora"] {
        check_flux(name, Checkpointing::Off);
    }
    for name in ["lokr_low_rank", "dora"] {
        check_flux(name, Checkpointing::Segments { blocks: 1 });
    }
}

/// Of each kind one.
fn one_of_each_kind_matches() {
    for name in sampled_cases(vec!["dora", "lokr_low_rank", "lokr_full", "locon", "loha"]) {
        check_sd(name);
    }
    check_flux("lokr_factor", Checkpointing::Segments { blocks: 1 });
}

in_portable_mode! {
    one_of_each_kind_matches,
}

crate::testing::with_emulated_kernels! {
    one_of_each_kind_matches,
}
