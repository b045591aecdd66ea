//! Comparison of features and their gradients with `tests/reference/make_feature_extractors.py`, and files that are refused.

use super::FeatureExtractor;
use crate::autograd::gradients;
use crate::checkpointing::Checkpointing;
use crate::error::Result;
use crate::testing::{fixtures, in_portable_mode, largest};
use crate::weights::write_tensors;
use candle_core::{Device, Tensor, Var};
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

fn file(name: &str) -> PathBuf {
    fixtures().join(format!("feature_extractors/{name}.safetensors"))
}

fn tensors(name: &str) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(file(name), &Device::Cpu).unwrap()
}

fn features(network: &FeatureExtractor, x: &Tensor) -> Result<Vec<Tensor>> {
    match network {
        FeatureExtractor::Latents(network) => Ok(vec![network.forward(x)?]),
        FeatureExtractor::Velocities(network) => network.forward(x),
        FeatureExtractor::Vgg16(network) => network.forward(x),
    }
}

fn features_match_the_reference() {
    let reference = tensors("features");
    for name in ["version1", "version2", "version10"] {
        for checkpointing in [Checkpointing::Off, Checkpointing::each_block(true)] {
            let network = FeatureExtractor::open(&file(name), &Device::Cpu).unwrap();
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
    let network = FeatureExtractor::open(folder.path(), &Device::Cpu).unwrap();
    let x = Var::from_tensor(&tensors("features")["version10/x"]).unwrap();
    let loss = || -> Result<Tensor> { Ok(features(&network, x.as_tensor())?[1].sum_all()?) };
    let (_, found) = gradients(loss).unwrap();
    assert_eq!(largest(found.get(x.as_tensor()).unwrap()), 0.0);
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
            FeatureExtractor::open(&path, &Device::Cpu),
            FeatureExtractor::open_layout(&path),
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

    let open = |name: &str| FeatureExtractor::open(&file(name), &Device::Cpu).unwrap();
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
