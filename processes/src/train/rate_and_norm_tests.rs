//! Learning rates of parts (`train.lr_factors`), and norms of a LoRA's layers (`network.scale_weight_norms`).

use super::tests::{logs, run_spec, spec, trainer};
use crate::testing::sampled_cases;
use aitk_common::attempt::Outcome;
use aitk_common::job::lr_factor::LrFactor;
use aitk_common::job::network::NetworkType;
use aitk_common::job::process::TrainerProcess;
use std::collections::BTreeMap;
use std::path::Path;

/// The tensors of the LoRA that a training saves, by name.
fn trained_lora(root: &Path, process: TrainerProcess) -> BTreeMap<String, Vec<f32>> {
    let (outcome, events) = run_spec(&spec(process));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    let path = root.join("out/tiny/tiny.safetensors");
    let file = candle_core::safetensors::load(path, &candle_core::Device::Cpu).unwrap();
    let values = |x: candle_core::Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    file.into_iter().map(|(name, x)| (name, values(x))).collect()
}

#[test]
fn parts_are_trained_at_their_own_learning_rates() {
    let train = |factors: &[(&str, f64)]| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = trainer(dir.path(), 3);
        process.train.train_text_encoder = true;
        let factor = |(contains, factor): &(&str, f64)| LrFactor {
            contains: (*contains).to_owned(),
            factor: *factor,
            ..LrFactor::default()
        };
        process.train.lr_factors = factors.iter().map(factor).collect();
        trained_lora(dir.path(), process)
    };
    let plain = train(&[]);
    let frozen = train(&[("lora_te", 0.0)]);
    assert_eq!(train(&[("lora_", 1.0)]), plain);
    assert_eq!(plain.len(), frozen.len());
    for (name, values) in frozen.iter().filter(|(name, _)| name.ends_with("lora_up.weight")) {
        let is_zero = values.iter().all(|x| *x == 0.0);
        assert_eq!(is_zero, name.starts_with("lora_te"), "{name}");
        assert!(plain[name].iter().any(|x| *x != 0.0), "{name}");
    }
    // LoRA+: with the first matrix frozen, the second one moves by its own rate.
    let [slow, fast] = [1.0, 16.0].map(|rate| train(&[("lora_down", 0.0), ("lora_up", rate)]));
    let length = |lora: &BTreeMap<String, Vec<f32>>| {
        let ups = lora.iter().filter(|(name, _)| name.contains("lora_up"));
        ups.flat_map(|(_, values)| values)
            .map(|x| f64::from(x.abs()))
            .sum::<f64>()
    };
    let ratio = length(&fast) / length(&slow);
    assert!((10.0..20.0).contains(&ratio), "{ratio}");

    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 1);
    process.train.lr_factors = vec![LrFactor {
        contains: "nothing".into(),
        ..LrFactor::default()
    }];
    let (outcome, events) = run_spec(&spec(process));
    let text = format!("{outcome:?} {}", logs(&events));
    assert!(
        text.contains(
            "train.lr_factors[0].contains: no trained tensor has `nothing` in its name; some of the names are lora_unet_"
        ),
        "{text}"
    );
}

/// The norms of the changes that a saved LoRA makes, by layer.
fn change_norms(path: &Path) -> BTreeMap<String, f64> {
    let file = candle_core::safetensors::load(path, &candle_core::Device::Cpu).unwrap();
    let downs = file
        .iter()
        .filter_map(|(name, down)| Some((name.strip_suffix(".lora_down.weight")?, down)));
    let norm = |(layer, down): (&str, &candle_core::Tensor)| {
        let up = file[&format!("{layer}.lora_up.weight")].flatten_from(1).unwrap();
        let alpha = f64::from(file[&format!("{layer}.alpha")].to_scalar::<f32>().unwrap());
        let change = up.matmul(&down.flatten_from(1).unwrap()).unwrap();
        let square = change.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
        (
            layer.to_owned(),
            f64::from(square).sqrt() * alpha / down.dim(0).unwrap() as f64,
        )
    };
    downs.map(norm).collect()
}

#[test]
fn norms_of_a_lora_are_limited() {
    const MAX: f64 = 0.1;
    let train = |max: Option<f64>| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = trainer(dir.path(), 4);
        process.train.lr = 2e-2;
        let network = process.network.as_mut().unwrap();
        network.scale_weight_norms = max;
        (network.conv, network.conv_alpha, network.linear_alpha) = (Some(2), Some(1.0), 8.0);
        trained_lora(dir.path(), process);
        change_norms(&dir.path().join("out/tiny/tiny.safetensors"))
    };
    let (free, limited) = (train(None), train(Some(MAX)));
    assert_eq!(free.len(), limited.len());
    let above = free.values().filter(|norm| **norm > MAX).count();
    assert!(above > 0 && above < free.len(), "{free:?}");
    for (layer, norm) in &limited {
        assert!(*norm <= MAX * 1.000_01, "{layer}: {norm}");
    }
    assert!(limited.values().any(|norm| *norm > MAX * 0.999), "{limited:?}");
    // Nothing is above this limit, so nothing changes.
    assert_eq!(train(Some(1e5)), free);
}

/// The norms of the changes that a saved LoHa or LoKr with a full first matrix makes, by layer.
fn lycoris_norms(path: &Path) -> BTreeMap<String, f64> {
    let file = candle_core::safetensors::load(path, &candle_core::Device::Cpu).unwrap();
    let tensor = |layer: &str, suffix: &str| file.get(&format!("{layer}.{suffix}"));
    let norm = |tensor: &candle_core::Tensor| {
        let square = tensor.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
        f64::from(square).sqrt()
    };
    let product = |layer: &str, left: &str, right: &str| {
        let left = tensor(layer, left)?.flatten_from(1).unwrap();
        Some(left.matmul(&tensor(layer, right)?.flatten_from(1).unwrap()).unwrap())
    };
    let layers = file.keys().filter_map(|name| name.strip_suffix(".alpha"));
    let of_layer = |layer: &str| {
        let alpha = f64::from(file[&format!("{layer}.alpha")].to_scalar::<f32>().unwrap());
        if let Some(first) = product(layer, "hada_w1_a", "hada_w1_b") {
            let second = product(layer, "hada_w2_a", "hada_w2_b").unwrap();
            let rank = tensor(layer, "hada_w1_b").unwrap().dim(0).unwrap() as f64;
            return (layer.to_owned(), norm(&(first * second).unwrap()) * alpha / rank);
        }
        let second = product(layer, "lokr_w2_a", "lokr_w2_b");
        let scale = tensor(layer, "lokr_w2_b").map_or(1.0, |b| alpha / b.dim(0).unwrap() as f64);
        let second = second.unwrap_or_else(|| tensor(layer, "lokr_w2").unwrap().clone());
        (
            layer.to_owned(),
            norm(tensor(layer, "lokr_w1").unwrap()) * norm(&second) * scale,
        )
    };
    layers.map(of_layer).collect()
}

#[test]
fn norms_of_lokr_and_loha_are_limited() {
    for (kind, full_rank, max) in sampled_cases(vec![
        (NetworkType::Loha, false, 0.02),
        (NetworkType::Lokr, true, 0.1),
        (NetworkType::Lokr, false, 0.1),
    ]) {
        let train = |max: Option<f64>| {
            let dir = tempfile::tempdir().unwrap();
            let mut process = trainer(dir.path(), 4);
            process.train.lr = 2e-2;
            let network = process.network.as_mut().unwrap();
            (network.kind, network.lokr_full_rank, network.scale_weight_norms) = (kind, full_rank, max);
            (network.linear, network.linear_alpha) = (1, 1.0);
            trained_lora(dir.path(), process);
            lycoris_norms(&dir.path().join("out/tiny/tiny.safetensors"))
        };
        let (free, limited) = (train(None), train(Some(max)));
        let above = free.values().filter(|norm| **norm > max).count();
        assert!(
            above > 0 && free.len() == limited.len(),
            "{kind}, {full_rank}: {free:?}"
        );
        for (layer, norm) in &limited {
            assert!(*norm <= max * 1.000_1, "{kind}, {full_rank}, {layer}: {norm}");
        }
        assert!(limited.values().any(|norm| *norm > max * 0.99), "{kind}: {limited:?}");
        assert_eq!(train(Some(1e5)), free, "{kind}");
    }
}
