//! LoHa, DoRA, OFT, BOFT and whole differences: comparison with LyCORIS and peft, by `tests/reference/make_adapter_types.py`.

use super::file_layer::{FileLayer, Site};
use super::test_helpers::{layers, named, tensors, try_layers};
use super::trained_layer::NewLayer;
use super::*;
use crate::families::{AdapterNames, Model};
use crate::nn::{BaseLayer, Conv2d, LayerAdapter, LayerKind, Linear, forward_layer};
use crate::testing::{gap, in_portable_mode, largest, tiny_sd};
use crate::weights::Weight;
use aitk_common::job::extract::ScaleTarget;
use candle_core::{DType, Device, Tensor};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

pub(super) type Tensors = HashMap<String, Tensor>;

/// The cases of the file: what it holds for each.
pub(super) fn cases(found: &Tensors) -> BTreeMap<String, Arc<dyn FileLayer>> {
    let file = found
        .iter()
        .filter_map(|(key, tensor)| Some((key.strip_prefix("file/")?.to_owned(), tensor.clone())));
    let layers = layers(&file.collect());
    assert_eq!(layers.len(), 30);
    layers
}

/// The layer of a case.
pub(super) struct Layer {
    pub(super) kind: LayerKind,
    pub(super) weight: Weight,
    pub(super) bias: Tensor,
}

impl Layer {
    pub(super) fn of(found: &Tensors, case: &str) -> Self {
        let kind = match case.rsplit_once('_').unwrap().1 {
            "linear" => LayerKind::Linear,
            "conv" => LayerKind::Conv { stride: 2, padding: 1 },
            _ => LayerKind::Conv { stride: 1, padding: 0 },
        };
        Self {
            kind,
            weight: Weight::Plain(found[&format!("{case}/weight")].clone()),
            bias: found[&format!("{case}/bias")].clone(),
        }
    }

    /// What an adapter with names of sd-scripts is made of.
    pub(super) fn new_adapter<'a>(&'a self, rank: usize, alpha: f64, handle: &'a Arc<AdapterHandle>) -> NewLayer<'a> {
        NewLayer {
            name: "layer".to_owned(),
            names: AdapterNames::Kohya,
            weight: &self.weight,
            bias: Some(&self.bias),
            dims: self.weight.dims(),
            device: &Device::Cpu,
            rank,
            alpha,
            dropout: Dropout::default(),
            tucker: false,
            rank_stabilised: false,
            scalar: false,
            handle,
        }
    }

    pub(super) fn base(&self) -> BaseLayer<'_> {
        BaseLayer {
            kind: self.kind,
            weight: &self.weight,
            bias: Some(&self.bias),
        }
    }

    pub(super) fn forward(&self, x: &Tensor, adapters: Vec<Arc<dyn LayerAdapter>>) -> Tensor {
        forward_layer(&self.base(), x, true, &adapters).unwrap()
    }

    pub(super) fn adapter(&self, layer: &dyn FileLayer, handle: &Arc<AdapterHandle>) -> Arc<dyn WeightAdapter> {
        let rows = self.weight.dims()[0];
        let whole = layer.split(&named(&[rows], false), &|_| None).unwrap().remove(0);
        whole
            .adapter(Site {
                name: "layer".to_owned(),
                names: AdapterNames::Kohya,
                weight: &self.weight,
                handle,
            })
            .unwrap()
    }
}

pub(super) fn check(found: &Tensor, expected: &Tensor, tolerance: f32, what: &str) {
    let error = gap(found, expected) / largest(expected);
    assert!(error < tolerance, "{what}: {error}");
}

#[test]
fn every_type_changes_a_layer_as_the_software_that_made_the_file() {
    let found = tensors("types");
    for (case, file) in cases(&found) {
        let (layer, x) = (Layer::of(&found, &case), &found[&format!("{case}/x")]);
        let plain = layer.forward(x, vec![]);
        for strength in ["1", "0.5", "-0.7"] {
            let handle = AdapterHandle::new(strength.parse().unwrap());
            let adapter = layer.adapter(&*file, &handle);
            let expected = &found[&format!("{case}/y/{strength}")];
            let what = format!("{case} at {strength}");
            assert!(
                gap(&plain, expected) / largest(expected) > 0.02,
                "{what} changes nothing"
            );
            check(&layer.forward(x, vec![adapter.clone()]), expected, 2e-6, &what);
            let added = adapter.apply(&layer.base(), x, plain.clone()).unwrap();
            check(&added, expected, 2e-6, &format!("{what}, added to the output"));
            // The difference of a bias is no change of the weight.
            if !case.starts_with("full") {
                let changed = (layer.weight.dense().unwrap() + adapter.change(&layer.weight).unwrap()).unwrap();
                let changed = Layer {
                    weight: Weight::Plain(changed),
                    bias: layer.bias.clone(),
                    ..layer
                };
                check(
                    &changed.forward(x, vec![]),
                    expected,
                    2e-6,
                    &format!("{what}, in the weight"),
                );
            }
            handle.multiplier.set(0.0);
            assert!(
                gap(&layer.forward(x, vec![adapter]), &plain) < 1e-6,
                "{case} at strength 0"
            );
        }
    }
}

/// Two adapters of one layer: the second is added to the output of the first.
#[test]
fn a_dora_after_another_adapter_adds_its_own_change() {
    let found = tensors("types");
    let cases = cases(&found);
    let (layer, x) = (Layer::of(&found, "dora_locon_linear"), &found["dora_locon_linear/x"]);
    let handle = AdapterHandle::new(1.0);
    let [dora, loha] = ["dora_locon_linear", "loha_linear"].map(|case| layer.adapter(&*cases[case], &handle));
    let change = |adapter: &Arc<dyn WeightAdapter>| adapter.change(&layer.weight).unwrap();
    let weight = (layer.weight.dense().unwrap() + (change(&dora) + change(&loha)).unwrap()).unwrap();
    let expected = Layer {
        weight: Weight::Plain(weight),
        bias: layer.bias.clone(),
        ..layer
    };
    let expected = expected.forward(x, vec![]);
    for adapters in [[dora.clone(), loha.clone()], [loha, dora]] {
        check(
            &layer.forward(x, adapters.map(|adapter| adapter as _).to_vec()),
            &expected,
            2e-6,
            "both",
        );
    }
}

/// A magnitude and a low-rank change of rows that the model has as several layers.
#[test]
fn every_type_of_a_joined_layer_is_split_by_rows() {
    let found = tensors("types");
    let cases = cases(&found);
    for case in [
        "loha_linear",
        "dora_locon_linear",
        "dora_loha_linear",
        "dora_lokr_linear",
        "peft_dora_linear",
        "full_linear",
    ] {
        let (layer, x) = (Layer::of(&found, case), &found[&format!("{case}/x")]);
        let handle = AdapterHandle::new(1.0);
        for (sizes, swapped) in [(vec![7, 20, 5], false), (vec![32], true)] {
            let parts = cases[case].split(&named(&sizes, swapped), &|_| None).unwrap();
            let whole = layer.weight.dense().unwrap();
            let whole = match swapped {
                true => Tensor::cat(&[whole.narrow(0, 16, 16).unwrap(), whole.narrow(0, 0, 16).unwrap()], 0).unwrap(),
                false => whole,
            };
            let mut start = 0;
            let mut changes = Vec::new();
            for (part, rows) in parts.iter().zip(&sizes) {
                let part_layer = Layer {
                    kind: layer.kind,
                    weight: Weight::Plain(whole.narrow(0, start, *rows).unwrap().contiguous().unwrap()),
                    bias: layer.bias.narrow(0, start, *rows).unwrap(),
                };
                let site = Site {
                    name: "layer".to_owned(),
                    names: AdapterNames::Peft,
                    weight: &part_layer.weight,
                    handle: &handle,
                };
                let adapter = part.adapter(site).unwrap();
                changes.push(adapter.change(&part_layer.weight).unwrap());
                start += rows;
            }
            let changes = Tensor::cat(&changes, 0).unwrap();
            let expected = layer.adapter(&*cases[case], &handle).change(&layer.weight).unwrap();
            let expected = match swapped {
                true => Tensor::cat(
                    &[expected.narrow(0, 16, 16).unwrap(), expected.narrow(0, 0, 16).unwrap()],
                    0,
                )
                .unwrap(),
                false => expected,
            };
            check(&changes, &expected, 2e-6, case);
            assert!(x.rank() > 0);
        }
    }
    let inputs = cases["dora_locon_inputs_linear"].split(&named(&[7, 25], false), &|_| None);
    assert!(inputs.unwrap_err().to_string().contains("for each input"));
    let oft = cases["oft_linear"].split(&named(&[7, 25], false), &|_| None);
    assert!(oft.unwrap_err().to_string().contains("cannot be split"));
}

#[test]
fn damaged_tensors_of_every_type_are_errors() {
    let t = |dims: &[usize]| Tensor::ones(dims, DType::F32, &Device::Cpu).unwrap();
    let layer = |tensors: &[(&str, &[usize])]| {
        let tensors = tensors
            .iter()
            .map(|(suffix, dims)| (format!("layer.{suffix}"), t(dims)));
        try_layers(&tensors.collect()).map(|mut layers| layers.remove("layer").unwrap())
    };
    for (tensors, part) in [
        (&[("hada_w1_a", &[4, 2][..]), ("hada_w1_b", &[2, 4])][..], "hada_w2"),
        (&[("hada_w1_a", &[4, 2]), ("hada_w1_b", &[3, 4])], "do not fit together"),
        (
            &[
                ("hada_w1_a", &[4, 2]),
                ("hada_w1_b", &[2, 4]),
                ("hada_w2_a", &[4, 2]),
                ("hada_w2_b", &[2, 5]),
            ],
            "different sizes",
        ),
        (
            &[("lora_down.weight", &[0, 4]), ("lora_up.weight", &[4, 0])],
            "rank is 0",
        ),
        (
            &[
                ("lora_down.weight", &[2, 4]),
                ("lora_up.weight", &[4, 2]),
                ("lokr_w1", &[2, 2]),
                ("lokr_w2", &[2, 2]),
            ],
            "several types",
        ),
        (&[("dora_scale", &[4, 1]), ("magnitude", &[4])], "two magnitudes"),
        (&[("dora_scale", &[4, 1])], "no other tensor"),
        (&[("dora_scale", &[4, 1]), ("lora_down.weight", &[2, 4])], "no up"),
        (&[("oft_blocks", &[4, 2])], "not square"),
        (&[("oft_blocks", &[4, 2, 3])], "not blocks"),
        (&[("oft_blocks", &[9, 4, 2, 2])], "not blocks"),
        (&[("oft_blocks", &[1, 4, 3, 3])], "not blocks"),
        (
            &[("oft_blocks", &[4, 2, 2]), ("rescale", &[7, 1])],
            "numbers of outputs",
        ),
        (&[("diff", &[4, 2, 2]), ("diff_b", &[4])], "not the whole difference"),
        (&[("diff_b", &[4, 1])], "not the difference of a bias"),
        (
            &[
                ("diff_b", &[4]),
                ("lora_down.weight", &[2, 4]),
                ("lora_up.weight", &[4, 2]),
            ],
            "several types",
        ),
    ] {
        let error = layer(tensors).unwrap_err();
        assert!(error.contains(part), "{tensors:?}: {error}");
    }
    // What fits by itself, but not the layer of the model.
    let weight = Weight::Plain(t(&[6, 4]));
    for (tensors, part) in [
        (
            &[
                ("hada_w1_a", &[4, 2][..]),
                ("hada_w1_b", &[2, 4]),
                ("hada_w2_a", &[4, 2]),
                ("hada_w2_b", &[2, 4]),
            ][..],
            "the model needs",
        ),
        (&[("oft_blocks", &[2, 2, 2])], "has 4 outputs, the layer has 6"),
        (&[("diff", &[4, 6])], "the model needs [6, 4]"),
        (&[("diff_b", &[4])], "the model needs [6]"),
        (
            &[
                ("dora_scale", &[5, 1]),
                ("lora_down.weight", &[2, 4]),
                ("lora_up.weight", &[6, 2]),
            ],
            "6 outputs and 4 inputs",
        ),
    ] {
        let site = Site {
            name: "layer".to_owned(),
            names: AdapterNames::Kohya,
            weight: &weight,
            handle: &AdapterHandle::new(1.0),
        };
        let error = layer(tensors).unwrap().adapter(site).unwrap_err();
        assert!(error.contains(part), "{tensors:?}: {error}");
    }
}

/// A rescaled file has the effect of the file at that strength, where its type can be rescaled.
#[test]
fn files_of_every_type_are_rescaled_or_refused() {
    let found = tensors("types");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let rescale = |case: &str, target| {
        let tensors = found.iter().filter_map(|(key, tensor)| {
            let name = key.strip_prefix("file/")?;
            name.starts_with(&format!("{case}."))
                .then(|| (name.to_owned(), tensor.clone()))
        });
        std::fs::write(&path, safetensors_bytes(&tensors.collect(), &BTreeMap::new()).unwrap()).unwrap();
        let rescaling = Rescaling {
            factor: -0.7,
            target,
            dtype: DType::F32,
        };
        rescale_lora(&path, rescaling, &mut |_, _| true).map(|rescaled| rescaled.unwrap().tensors.into_iter().collect())
    };
    for (case, target) in [
        ("loha_linear", ScaleTarget::UpDown),
        ("loha_conv", ScaleTarget::Alpha),
        ("loha_tucker_conv", ScaleTarget::UpDown),
        ("full_linear", ScaleTarget::UpDown),
        ("full_conv", ScaleTarget::UpDown),
    ] {
        let rescaled: Tensors = rescale(case, target).unwrap();
        let layer = Layer::of(&found, case);
        let adapter = layer.adapter(&*layers(&rescaled)[case], &AdapterHandle::new(1.0));
        let y = layer.forward(&found[&format!("{case}/x")], vec![adapter]);
        check(&y, &found[&format!("{case}/y/-0.7")], 2e-6, case);
    }
    for (case, target, part) in [
        (
            "dora_loha_linear",
            ScaleTarget::UpDown,
            "has a DoRA, whose strength is not in its matrices",
        ),
        ("oft_linear", ScaleTarget::UpDown, "has an OFT"),
        ("full_linear", ScaleTarget::Alpha, "no alpha"),
    ] {
        let error = rescale(case, target).unwrap_err().to_string();
        assert!(error.contains(part), "{case}: {error}");
    }
}

/// Layers are built by both structs, so that their own `forward` calls the adapter.
#[test]
fn layers_of_a_model_call_the_forward_pass_of_their_first_adapter() {
    let found = tensors("types");
    let cases = cases(&found);
    for case in ["peft_dora_linear", "peft_dora_conv"] {
        let layer = Layer::of(&found, case);
        let adapter = layer.adapter(&*cases[case], &AdapterHandle::new(1.0));
        let (weight, bias, x) = (
            layer.weight.clone(),
            Some(layer.bias.clone()),
            &found[&format!("{case}/x")],
        );
        let y = match layer.kind {
            LayerKind::Linear => Linear {
                weight,
                bias,
                adapters: vec![adapter],
            }
            .forward(x),
            LayerKind::Conv { stride, padding } => Conv2d {
                weight,
                bias,
                stride,
                padding,
                adapters: vec![adapter],
            }
            .forward(x),
            other => panic!("{other:?}"),
        };
        check(&y.unwrap(), &found[&format!("{case}/y/1")], 2e-6, case);
    }
}

/// Whole files of LyCORIS' `diag-oft` and `boft`, with the names of its network and of that for sd-scripts, which sd-scripts' own OFT has too.
#[test]
fn files_of_oft_and_boft_are_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("oft.safetensors");
    let layer = "down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q";
    for (kind, shape) in [("OFT", &[4, 4, 4][..]), ("BOFT", &[2, 4, 4, 4])] {
        for prefix in ["lycoris", "lora_unet"] {
            let numbers = (0..shape.iter().product::<usize>()).map(|at| (at as f32 * 0.7).sin() * 0.2);
            let blocks = Tensor::from_iter(numbers, &Device::Cpu)
                .unwrap()
                .reshape(shape)
                .unwrap();
            let alpha = Tensor::new(0_f32, &Device::Cpu).unwrap();
            let tensors = [("oft_blocks", blocks), ("alpha", alpha)];
            let tensors = tensors.map(|(suffix, tensor)| (format!("{prefix}_{layer}.{suffix}"), tensor));
            let bytes = safetensors_bytes(&BTreeMap::from(tensors), &BTreeMap::new()).unwrap();
            std::fs::write(&path, bytes).unwrap();
            assert_eq!(AdapterFile::open(&path).unwrap().modules[0].tensors.kind(), kind);
            let loaded = load_lora(&mut tiny_sd().parts(), &path, 1.0).unwrap();
            assert_eq!((loaded.layers, loaded.unknown), (1, Vec::new()), "{prefix}: {kind}");
        }
    }
}

in_portable_mode! {
    every_type_changes_a_layer_as_the_software_that_made_the_file,
    a_dora_after_another_adapter_adds_its_own_change,
}
