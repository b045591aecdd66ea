//! LoKr and LoCon in files: comparison with the fixtures of `tests/reference/make_lycoris_files.py`.

use super::file_layer::Site;
use super::test_helpers::{flux, layers, named, tensors, transformer, try_layers, unet};
use super::*;
use crate::families::{AdapterNames, Model};
use crate::nn::{BaseLayer, LayerKind, conv2d};
use crate::rng::TorchGenerator;
use crate::testing::{fixtures, gap, in_portable_mode, largest, tiny_sd};
use crate::weights::Weight;
use candle_core::{DType, Device, Tensor};
use std::collections::HashMap;

/// What an adapter adds to the output of a layer with this shape, for the input x.
fn change(layer: &dyn FileLayer, dims: &[usize], x: &Tensor) -> Tensor {
    let handle = AdapterHandle::new(1.0);
    let weight = Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
    let base = Weight::Plain(weight.clone());
    let site = Site {
        name: "layer".to_owned(),
        names: AdapterNames::Kohya,
        weight: &base,
        handle: &handle,
    };
    let adapter = layer.adapter(site).unwrap();
    let (kind, output) = match dims.len() {
        2 => (LayerKind::Linear, x.matmul(&weight.t().unwrap()).unwrap()),
        _ => {
            let kind = LayerKind::Conv { stride: 1, padding: 1 };
            (kind, conv2d(x, &weight, None, 1, 1).unwrap())
        }
    };
    let layer = BaseLayer {
        kind,
        weight: &base,
        bias: None,
    };
    adapter.apply(&layer, x, output).unwrap()
}

/// An input that shows every element of the weight.
fn input(dims: &[usize]) -> Tensor {
    match dims.len() {
        2 => Tensor::eye(dims[1], DType::F32, &Device::Cpu).unwrap(),
        _ => {
            let shape = (2, dims[1], 6, 7);
            let numbers = TorchGenerator::manual_seed(3).randn(2 * dims[1] * 42);
            Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap()
        }
    }
}

#[test]
fn every_form_of_lokr_changes_a_weight_as_lycoris_does() {
    let found = tensors("layers");
    let layers = layers(&found);
    assert_eq!(layers.len(), 11);
    for (name, layer) in layers {
        let delta = &found[&format!("{name}.delta")];
        let dims = delta.dims();
        assert_eq!(layer.outputs(), dims[0], "{name}");
        let x = input(dims);
        let expected = match dims.len() {
            2 => x.matmul(&delta.t().unwrap()).unwrap(),
            _ => conv2d(&x, delta, None, 1, 1).unwrap(),
        };
        let whole = layer.split(&named(&[dims[0]], false), &|_| None).unwrap().remove(0);
        let gap = gap(&change(&*whole, dims, &x), &expected) / largest(&expected);
        assert!(gap < 1e-5, "{name}: {gap}");
    }
}

/// Original releases have one layer where the model has several.
#[test]
fn the_lokr_of_a_joined_layer_is_split_by_rows() {
    let found = tensors("layers");
    let layers = layers(&found);
    for name in ["linear_full", "linear_low_rank"] {
        let (layer, delta) = (&layers[name], &found[&format!("{name}.delta")]);
        let (rows, columns) = delta.dims2().unwrap();
        let x = input(delta.dims());
        let sizes = [7, rows - 12, 5];
        let parts = layer.split(&named(&sizes, false), &|_| None).unwrap();
        let parts: Vec<Tensor> = parts
            .iter()
            .zip(sizes)
            .map(|(part, rows)| change(&**part, &[rows, columns], &x))
            .collect();
        let whole = x.matmul(&delta.t().unwrap()).unwrap();
        assert!(gap(&Tensor::cat(&parts, 1).unwrap(), &whole) < 1e-5, "{name}");
        let swapped = layer.split(&named(&[rows], true), &|_| None).unwrap().remove(0);
        let half = rows / 2;
        let halves = [
            whole.narrow(1, half, rows - half).unwrap(),
            whole.narrow(1, 0, half).unwrap(),
        ];
        let swapped = change(&*swapped, &[rows, columns], &x);
        assert!(gap(&swapped, &Tensor::cat(&halves, 1).unwrap()) < 1e-5, "{name}");
    }
}

/// Two full matrices have an alpha that overflows in float16 and means nothing.
#[test]
fn the_alpha_of_two_full_matrices_is_ignored() {
    let mut found = tensors("layers");
    let x = input(&[30, 24]);
    let with_alpha = |found: &mut HashMap<String, Tensor>, alpha: f32| {
        found.insert(
            "linear_full.alpha".to_owned(),
            Tensor::new(alpha, &Device::Cpu).unwrap(),
        );
        let layer = &layers(found)["linear_full"];
        let layer = layer.split(&named(&[30], false), &|_| None).unwrap().remove(0);
        change(&*layer, &[30, 24], &x)
    };
    let expected = x.matmul(&found["linear_full.delta"].t().unwrap()).unwrap();
    for alpha in [f32::INFINITY, 1e10, 3.0, 0.0] {
        assert!(gap(&with_alpha(&mut found, alpha), &expected) < 1e-5, "{alpha}");
    }
}

#[test]
fn a_damaged_lokr_is_refused() {
    let refused = |changes: Vec<(&str, Tensor)>| {
        let mut found = tensors("layers");
        found.retain(|key, _| key.starts_with("linear_low_rank."));
        for (suffix, tensor) in changes {
            found.insert(format!("linear_low_rank.{suffix}"), tensor);
        }
        try_layers(&found).unwrap_err()
    };
    for alpha in [f32::INFINITY, f32::NAN] {
        let message = refused(vec![("alpha", Tensor::new(alpha, &Device::Cpu).unwrap())]);
        assert!(message.contains("the file is damaged"), "{message}");
    }
    let empty = |dims: (usize, usize)| Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
    let message = refused(vec![("lokr_w2_a", empty((16, 0))), ("lokr_w2_b", empty((0, 12)))]);
    assert_eq!(message, "its rank is 0");
}

/// peft's own files have no alphas: `adapter_config.json` beside them has those, also for two whole matrices of a LoKr.
#[test]
fn files_of_peft_have_the_scale_of_their_config() {
    let dir = tempfile::tempdir().unwrap();
    let written = |file: HashMap<String, Tensor>, config: Option<&str>| {
        let path = dir.path().join("adapter_config.json");
        match config {
            Some(config) => std::fs::write(&path, config).unwrap(),
            None => std::fs::remove_file(&path).unwrap(),
        }
        candle_core::safetensors::save(&file, dir.path().join("adapter_model.safetensors")).unwrap();
        AdapterFile::open(dir.path()).unwrap()
    };
    let of = |file: &AdapterFile, name: &str, dims: &[usize]| {
        let stem = format!("base_model.model.{name}");
        let module = file.modules.iter().find(|module| module.stem == stem).unwrap();
        let layer = module
            .tensors
            .split(&named(&[dims[0]], false), &|_| None)
            .unwrap()
            .remove(0);
        change(&*layer, dims, &input(dims))
    };
    let renamed = |found: &HashMap<String, Tensor>, from: &str, to: &str| -> HashMap<String, Tensor> {
        let tensors = found.iter().filter_map(|(key, tensor)| {
            let suffix = key.strip_prefix(from)?.strip_prefix('.')?;
            let is_matrix = !["alpha", "delta"].contains(&suffix);
            is_matrix.then(|| (format!("base_model.model.{to}.{suffix}"), tensor.clone()))
        });
        tensors.collect()
    };

    let found = tensors("layers");
    let mut lokr = renamed(&found, "linear_full", "blocks.0.whole");
    lokr.extend(renamed(&found, "linear_low_rank", "blocks.0.low"));
    let config =
        r#"{"peft_type": "LOKR", "r": 8, "alpha": 4, "rank_pattern": {"low": 2}, "alpha_pattern": {"0.low": 3.0}}"#;
    let file = written(lokr.clone(), Some(config));
    let whole = (of_delta(&found, "linear_full") * 0.5).unwrap();
    assert!(gap(&of(&file, "blocks.0.whole", &[30, 24]), &whole) / largest(&whole) < 1e-5);
    let alpha = f64::from(found["linear_low_rank.alpha"].to_scalar::<f32>().unwrap());
    let low = (of_delta(&found, "linear_low_rank") * (3.0 / alpha)).unwrap();
    assert!(gap(&of(&file, "blocks.0.low", &[64, 48]), &low) / largest(&low) < 1e-5);
    assert!(!file.alpha_is_unknown());
    assert!(written(lokr, None).alpha_is_unknown());

    let found = tensors("types");
    let dims = found["peft_loha_linear/weight"].dims().to_vec();
    let mut loha = renamed(&found, "file/peft_loha_linear", "a");
    let file = written(loha.clone(), Some(r#"{"peft_type": "LOHA", "r": 3, "alpha": 12}"#));
    let by_config = of(&file, "a", &dims);
    loha.insert(
        "base_model.model.a.alpha".to_owned(),
        Tensor::new(12f32, &Device::Cpu).unwrap(),
    );
    let file = written(loha, None);
    let expected = of(&file, "a", &dims);
    assert!(gap(&by_config, &expected) / largest(&expected) < 1e-5);
}

/// The change of a case for [`input`].
fn of_delta(found: &HashMap<String, Tensor>, name: &str) -> Tensor {
    let delta = &found[&format!("{name}.delta")];
    input(delta.dims()).matmul(&delta.t().unwrap()).unwrap()
}

/// As that of a LoRA or LoHa.
#[test]
fn a_scalar_in_a_file_multiplies_the_change_of_a_lokr() {
    let x = input(&[64, 48]);
    for name in ["linear_low_rank", "linear_both_low_rank"] {
        let mut found = tensors("layers");
        found.retain(|key, _| key.starts_with(&format!("{name}.")));
        let half = (x.matmul(&found[&format!("{name}.delta")].t().unwrap()).unwrap() * 0.5).unwrap();
        found.insert(format!("{name}.scalar"), Tensor::new(0.5f32, &Device::Cpu).unwrap());
        let read = |found: &HashMap<String, Tensor>| {
            let layer = &layers(found)[name];
            layer.split(&named(&[64], false), &|_| None).unwrap().remove(0)
        };
        let layer = read(&found);
        assert!(
            gap(&change(&*layer, &[64, 48], &x), &half) / largest(&half) < 1e-5,
            "{name}"
        );
        let written = layer.tensors().unwrap().into_iter();
        let written = written.map(|(suffix, tensor)| (format!("{name}.{suffix}"), tensor));
        let again = read(&written.collect());
        assert!(
            gap(&change(&*again, &[64, 48], &x), &half) / largest(&half) < 1e-5,
            "{name}"
        );
    }
}

#[test]
fn models_with_a_lokr_answer_as_with_lycoris() {
    let expected = tensors("expected");
    for strength in [1.0, 0.5] {
        let name = if strength == 1.0 { "full" } else { "half" };
        let mut sd = tiny_sd();
        let loaded = load_lora(&mut sd.parts(), &fixtures().join("lycoris/unet.safetensors"), strength).unwrap();
        assert!(loaded.unknown.is_empty() && loaded.layers > 10, "{:?}", loaded.unknown);
        let mut flux = flux();
        let path = fixtures().join("lycoris/transformer.safetensors");
        let loaded = load_lora(&mut flux.parts(), &path, strength).unwrap();
        assert!(loaded.unknown.is_empty() && loaded.layers > 10, "{:?}", loaded.unknown);
        for (part, found) in [("unet", unet(&sd)), ("transformer", transformer(&*flux))] {
            let expected = &expected[&format!("{part}/{name}")];
            let gap = gap(&found, expected) / largest(expected);
            assert!(gap < 1e-5, "{part} at {strength}: {gap}");
        }
    }
}

in_portable_mode! {
    every_form_of_lokr_changes_a_weight_as_lycoris_does,
    models_with_a_lokr_answer_as_with_lycoris,
}
