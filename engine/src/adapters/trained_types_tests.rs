//! Types of adapters that are trained: comparison with peft, LyCORIS and torch, by `tests/reference/make_adapter_types.py`.

use super::file_layer::FileLayer;
use super::test_helpers::{layers, tensors};
use super::trained_layer::NewLayer;
use super::types_tests::{Layer, Tensors, cases, check};
use super::*;
use crate::autograd;
use crate::families::AdapterNames;
use crate::nn::LowRank;
use crate::rng::{TorchGenerator, generator_from_text};
use crate::testing::{gap, in_portable_mode, largest};
use crate::weights::Weight;
use candle_core::{DType, Device, Tensor};
use std::collections::HashMap;
use std::sync::Arc;

/// A trained layer with the values of a file.
fn trained(adapter: &dyn AdapterType, layer: &Layer, file: &dyn FileLayer, dropout: Dropout) -> Arc<dyn TrainedLayer> {
    let handle = AdapterHandle::new(1.0);
    handle.set_training(Some("seed"));
    let new = NewLayer {
        names: AdapterNames::Peft,
        dropout,
        ..layer.new_adapter(3, 3.0, &handle)
    };
    let trained = adapter.create(new, &mut TorchGenerator::manual_seed(1)).unwrap();
    for (var, value) in trained.values(file).unwrap().values {
        var.set(&value.reshape(var.shape()).unwrap().contiguous().unwrap())
            .unwrap();
    }
    trained
}

#[test]
fn trained_types_have_the_gradients_of_peft() {
    let found = tensors("types");
    let cases = cases(&found);
    for (case, adapter) in [
        ("peft_dora_linear", &Dora as &dyn AdapterType),
        ("peft_dora_conv", &Dora),
        ("peft_dora_pointwise", &Dora),
        ("peft_loha_linear", &Loha),
        ("peft_loha_conv", &Loha),
    ] {
        let layer = Layer::of(&found, case);
        let trained = trained(adapter, &layer, &*cases[case], Dropout::default());
        let x = candle_core::Var::from_tensor(&found[&format!("{case}/x")]).unwrap();
        let probe = &found[&format!("{case}/probe")];
        let run = || {
            let y = layer.forward(x.as_tensor(), vec![trained.clone()]);
            check(&y, &found[&format!("{case}/y/1")], 2e-6, case);
            (y * probe).unwrap().sum_all()
        };
        let (_, gradients) = autograd::gradients(run).unwrap();
        let own = |variable: &Tensor| gradients.get(variable).unwrap().clone();
        let params = trained.params().into_iter();
        let mut all: Vec<_> = params.map(|(name, var)| (name, own(var.as_tensor()))).collect();
        all.push(("x", own(x.as_tensor())));
        for (name, gradient) in all {
            let expected = &found[&format!("{case}/gradient/{}", name.replace("vector.weight", "vector"))];
            let gradient = gradient.reshape(expected.shape()).unwrap();
            check(&gradient, expected, 1e-5, &format!("{case}: {name}"));
        }
    }
}

/// As LyCORIS with `weight_decompose`: outputs by its files, and gradients, which go through the norms, by differences of the outputs.
#[test]
fn decomposed_weights_are_trained_as_by_lycoris() {
    let found = tensors("types");
    let cases = cases(&found);
    let lora = || -> Box<dyn AdapterType> { Box::new(Lora) };
    let loha = || -> Box<dyn AdapterType> { Box::new(Loha) };
    let lokr = |factor| -> Box<dyn AdapterType> { Box::new(Lokr { factor, ..Lokr::SQUARE }) };
    for (case, inner, rank, alpha, on_outputs) in [
        ("dora_locon_linear", lora(), 3, 2.0, true),
        ("dora_locon_conv", lora(), 3, 2.0, true),
        ("dora_locon_pointwise", lora(), 3, 2.0, true),
        ("dora_locon_inputs_linear", lora(), 3, 2.0, false),
        ("dora_locon_inputs_conv", lora(), 3, 2.0, false),
        ("dora_loha_linear", loha(), 2, 2.0, true),
        ("dora_loha_conv", loha(), 2, 2.0, true),
        ("dora_lokr_linear", lokr(Some(4)), 2, 1.0, true),
        ("dora_lokr_conv", lokr(Some(2)), 2, 1.0, true),
        ("dora_lokr_inputs_linear", lokr(None), 2, 1.0, false),
    ] {
        let layer = Layer::of(&found, case);
        let x = &found[&format!("{case}/x")];
        let handle = AdapterHandle::new(1.0);
        let adapter = WeightDecomposed {
            inner,
            is_lora: case.contains("locon"),
            on_outputs,
        };
        let create = |dropout: Dropout| {
            let new = NewLayer {
                dropout,
                ..layer.new_adapter(rank, alpha, &handle)
            };
            adapter.create(new, &mut TorchGenerator::manual_seed(1)).unwrap()
        };
        let trained = create(Dropout::default());
        let plain = layer.forward(x, vec![]);
        let at_start = layer.forward(x, vec![trained.clone()]);
        check(&at_start, &plain, 1e-6, &format!("{case} at the start"));
        let set = |var: &candle_core::Var, value: &Tensor| {
            var.set(&value.reshape(var.shape()).unwrap().contiguous().unwrap())
                .unwrap();
        };
        for (var, value) in trained.values(&*cases[case]).unwrap().values {
            set(var, &value);
        }
        for strength in ["1", "0.5", "-0.7"] {
            handle.multiplier.set(strength.parse().unwrap());
            let expected = &found[&format!("{case}/y/{strength}")];
            let what = format!("{case} at {strength}");
            check(&layer.forward(x, vec![trained.clone()]), expected, 5e-6, &what);
            let added = trained.apply(&layer.base(), x, plain.clone()).unwrap();
            check(&added, expected, 5e-6, &format!("{what}, added to the output"));
            let changed = (layer.weight.dense().unwrap() + trained.change(&layer.weight).unwrap()).unwrap();
            let changed = Layer {
                weight: Weight::Plain(changed),
                bias: layer.bias.clone(),
                ..layer
            };
            check(
                &changed.forward(x, vec![]),
                expected,
                5e-6,
                &format!("{what}, in the weight"),
            );
        }

        handle.multiplier.set(0.8);
        handle.set_training(Some("seed"));
        let mut generator = TorchGenerator::manual_seed(3);
        let mut random = |like: &Tensor| {
            let numbers = generator.randn(like.elem_count());
            Tensor::from_vec(numbers, like.shape(), &Device::Cpu).unwrap()
        };
        let probe = random(&plain);
        let products = || (layer.forward(x, vec![trained.clone()]) * &probe).unwrap();
        let (_, gradients) = autograd::gradients(|| products().sum_all()).unwrap();
        for (name, var) in trained.params() {
            let gradient = gradients.get(var.as_tensor()).unwrap().clone();
            let (start, direction) = (var.as_detached_tensor().copy().unwrap(), random(&gradient));
            let sum = |t: &Tensor| -> f64 {
                let sum = t.to_dtype(DType::F64).unwrap().sum_all().unwrap();
                sum.to_scalar().unwrap()
            };
            let analytic = sum(&(&gradient * &direction).unwrap());
            let moved = |step: f64| {
                set(var, &(&start + (&direction * step).unwrap()).unwrap());
                sum(&products())
            };
            let numeric = (moved(4e-3) - moved(-4e-3)) / 8e-3;
            set(var, &start);
            let error = (analytic - numeric).abs() / analytic.abs().max(1.0);
            assert!(error < 2e-2, "{case}: {name}: {analytic} against {numeric}");
        }
        let module = create(Dropout {
            module: 0.9999,
            ..Dropout::default()
        });
        set(module.params()[0].1, trained.params()[0].1.as_tensor());
        assert_eq!(gap(&layer.forward(x, vec![module]), &plain), 0.0, "{case}");

        handle.set_training(None);
        handle.multiplier.set(1.0);
        let saved = trained.saved().unwrap().into_iter();
        let saved: Tensors = saved
            .map(|(suffix, tensor)| (format!("layer.{suffix}"), tensor))
            .collect();
        let read = &layers(&saved)["layer"];
        assert_eq!(read.kind(), "DoRA");
        let again = layer.adapter(&**read, &AdapterHandle::new(1.0));
        let expected = &found[&format!("{case}/y/1")];
        check(
            &layer.forward(x, vec![again]),
            expected,
            5e-6,
            &format!("{case} read again"),
        );
        // Magnitudes of the other side, or none.
        let other = WeightDecomposed {
            inner: lora(),
            is_lora: true,
            on_outputs: !on_outputs,
        };
        if case.contains("locon") {
            let new = |adapter: &dyn AdapterType| {
                let new = layer.new_adapter(rank, alpha, &handle);
                adapter.create(new, &mut TorchGenerator::manual_seed(1)).unwrap()
            };
            let message = new(&other).values(&**read).unwrap_err();
            let expected = format!("wd_on_out: {on_outputs}");
            assert!(message.contains(&expected), "{case}: {message}");
            let message = new(&Lora).values(&**read).unwrap_err();
            assert!(message.contains("has a DoRA of it"), "{case}: {message}");
        }
    }
    let of_transformers = WeightDecomposed {
        inner: lora(),
        is_lora: true,
        on_outputs: true,
    };
    let message = of_transformers.check_names(AdapterNames::Peft).unwrap_err();
    assert!(message.contains("type: dora"), "{message}");
}

/// New values of each trained type change nothing, and what is saved is read again as it was.
#[test]
fn trained_types_start_at_the_layer_itself_and_are_saved_as_they_are_read() {
    let found = tensors("types");
    let types: [(&str, &dyn AdapterType, &str); 3] = [
        ("DoRA", &Dora, "peft_dora"),
        ("LoHa", &Loha, "peft_loha"),
        ("whole difference", &Difference, "full"),
    ];
    for (kind, adapter, case) in types {
        for shape in ["linear", "conv"] {
            let layer = Layer::of(&found, &format!("{case}_{shape}"));
            let x = &found[&format!("{case}_{shape}/x")];
            for names in [AdapterNames::Kohya, AdapterNames::Peft] {
                let handle = AdapterHandle::new(1.0);
                let new = NewLayer {
                    names,
                    ..layer.new_adapter(3, 1.5, &handle)
                };
                let trained = adapter.create(new, &mut TorchGenerator::manual_seed(1)).unwrap();
                let plain = layer.forward(x, vec![]);
                check(
                    &layer.forward(x, vec![trained.clone()]),
                    &plain,
                    1e-6,
                    &format!("{kind} {shape} at the start"),
                );
                let mut generator = TorchGenerator::manual_seed(2);
                for (_, var) in trained.params() {
                    let noise =
                        Tensor::from_vec(generator.uniform(var.elem_count(), 0.2, 0.5), var.shape(), &Device::Cpu);
                    var.set(&(var.as_tensor() + noise.unwrap()).unwrap()).unwrap();
                }
                let expected = layer.forward(x, vec![trained.clone()]);
                assert!(gap(&expected, &plain) / largest(&plain) > 0.1, "{kind}");
                let saved = trained.saved().unwrap().into_iter();
                let file: Tensors = saved
                    .map(|(suffix, tensor)| (format!("layer.{suffix}"), tensor))
                    .collect();
                let read = &layers(&file)["layer"];
                assert_eq!(read.kind(), kind);
                let again = match (names, kind) {
                    // Dotted names have no alpha for a LoRA: its scale is 1.
                    (AdapterNames::Peft, "DoRA") => continue,
                    _ => layer.adapter(&**read, &AdapterHandle::new(1.0)),
                };
                check(
                    &layer.forward(x, vec![again]),
                    &expected,
                    1e-5,
                    &format!("{kind} {shape} read again"),
                );
            }
        }
    }
}

/// What is dropped of the change of a DoRA is not dropped from the norm: with all of it dropped, the rows of the weight have the
/// magnitudes over the norms of the whole change.
#[test]
fn dropout_of_a_dora_keeps_its_norm() {
    let found = tensors("types");
    let cases = cases(&found);
    for case in ["peft_dora_linear", "peft_dora_conv"] {
        let (layer, x) = (Layer::of(&found, case), &found[&format!("{case}/x")]);
        let forward = |dropout| layer.forward(x, vec![trained(&Dora, &layer, &*cases[case], dropout)]);
        let whole = forward(Dropout::default());
        check(&whole, &found[&format!("{case}/y/1")], 2e-6, "without dropout");
        let changed = (layer.weight.dense().unwrap() + {
            let LowRank { down, up, scale } = factors(&*cases[case], &layer);
            let product = up
                .flatten_from(1)
                .unwrap()
                .matmul(&down.flatten_from(1).unwrap())
                .unwrap();
            (product * scale).unwrap().reshape(layer.weight.dims()).unwrap()
        })
        .unwrap();
        let norms = |weight: &Tensor| {
            weight
                .flatten_from(1)
                .unwrap()
                .sqr()
                .unwrap()
                .sum_keepdim(1)
                .unwrap()
                .sqrt()
                .unwrap()
        };
        let magnitude = found[&format!("file/{case}.lora_magnitude_vector")]
            .reshape(((), 1))
            .unwrap();
        let factors = (magnitude / norms(&changed)).unwrap();
        let dense = layer.weight.dense().unwrap();
        let weight = dense
            .flatten_from(1)
            .unwrap()
            .broadcast_mul(&factors)
            .unwrap()
            .reshape(dense.dims())
            .unwrap();
        let without_change = Layer {
            weight: Weight::Plain(weight),
            bias: layer.bias.clone(),
            ..layer
        };
        for dropout in [
            Dropout {
                module: 0.9999,
                ..Dropout::default()
            },
            Dropout {
                rank: 0.9999,
                ..Dropout::default()
            },
        ] {
            check(&forward(dropout), &without_change.forward(x, vec![]), 2e-6, case);
        }
        for dropout in [
            Dropout {
                element: 0.5,
                ..Dropout::default()
            },
            Dropout {
                rank: 0.5,
                ..Dropout::default()
            },
        ] {
            assert!(gap(&forward(dropout), &whole) / largest(&whole) > 1e-3, "{dropout:?}");
        }
    }
}

/// Outputs that are dropped are missing from the change, and from the gradients of its matrices; the others are as without dropout.
#[test]
fn dropped_outputs_are_missing_from_the_change_and_its_gradients() {
    const CHANCE: f64 = 0.4;
    let found = tensors("types");
    let lokr = |factor| Lokr { factor, ..Lokr::SQUARE };
    let (square, narrow) = (lokr(None), lokr(Some(2)));
    let types: [(&str, &dyn AdapterType); 5] = [
        ("LoRA", &Lora),
        ("LoCon", &Locon),
        ("LoHa", &Loha),
        ("LoKr", &square),
        ("LoKr of other sides", &narrow),
    ];
    let cases = types
        .into_iter()
        .flat_map(|kind| ["linear", "conv"].map(|shape| (kind, shape)));
    for ((kind, adapter), shape) in cases {
        let what = format!("{kind} {shape}");
        let layer = Layer::of(&found, &format!("peft_loha_{shape}"));
        let (x, probe) = (
            &found[&format!("peft_loha_{shape}/x")],
            &found[&format!("peft_loha_{shape}/probe")],
        );
        let make = |dropout: Dropout| {
            let handle = AdapterHandle::new(0.8);
            handle.set_training(Some("seed"));
            let new = NewLayer {
                dropout,
                ..layer.new_adapter(2, 1.5, &handle)
            };
            let trained = adapter.create(new, &mut TorchGenerator::manual_seed(1)).unwrap();
            let mut generator = TorchGenerator::manual_seed(2);
            for (_, var) in trained.params() {
                let noise = Tensor::from_vec(generator.uniform(var.elem_count(), 0.2, 0.5), var.shape(), &Device::Cpu);
                var.set(&(var.as_tensor() + noise.unwrap()).unwrap()).unwrap();
            }
            trained
        };
        let run = |trained: &Arc<dyn TrainedLayer>, probe: &Tensor| {
            let forward = || (layer.forward(x, vec![trained.clone()]) * probe).unwrap().sum_all();
            let (_, gradients) = autograd::gradients(forward).unwrap();
            let params = trained.params().into_iter();
            let gradient = |(name, var): (&'static str, &candle_core::Var)| {
                (name, gradients.get(var.as_tensor()).unwrap().clone())
            };
            params.map(gradient).collect::<Vec<_>>()
        };
        let (whole, dropping) = (
            make(Dropout::default()),
            make(Dropout {
                output: CHANCE,
                ..Dropout::default()
            }),
        );
        let outputs = layer.weight.dims()[0];
        let drawn = generator_from_text("seed/layer/output").rand(outputs);
        let kept: Vec<f32> = drawn.iter().map(|u| f32::from(f64::from(*u) >= CHANCE)).collect();
        assert!(kept.contains(&0.0) && kept.contains(&1.0), "{kept:?}");
        let kept = Tensor::from_vec(kept, outputs, &Device::Cpu).unwrap();
        let mut rows = vec![1; layer.weight.dims().len()];
        rows[0] = outputs;
        let change = whole.change(&layer.weight).unwrap();
        let masked = change.broadcast_mul(&kept.reshape(rows).unwrap()).unwrap();
        let expected = Layer {
            weight: Weight::Plain((layer.weight.dense().unwrap() + masked).unwrap()),
            bias: layer.bias.clone(),
            ..layer
        };
        check(
            &layer.forward(x, vec![dropping.clone()]),
            &expected.forward(x, vec![]),
            1e-5,
            &what,
        );
        let probe_of_kept = probe.broadcast_mul(&layer.kind.over_channels(&kept).unwrap()).unwrap();
        for ((name, found), (_, expected)) in run(&dropping, probe).into_iter().zip(run(&whole, &probe_of_kept)) {
            check(&found, &expected, 1e-5, &format!("{what}: gradient of {name}"));
        }
        let without = make(Dropout {
            module: 0.9999,
            ..Dropout::default()
        });
        assert_eq!(
            gap(&layer.forward(x, vec![without]), &layer.forward(x, vec![])),
            0.0,
            "{what}"
        );
    }
}

/// A Tucker decomposition of convolutions: output and gradients of torch, by `tests/reference/make_tucker.py`.
#[test]
fn trained_decompositions_have_the_gradients_of_torch() {
    let found = tensors("tucker");
    let file = found
        .iter()
        .filter_map(|(key, tensor)| Some((key.strip_prefix("file/")?.to_owned(), tensor.clone())));
    let files = layers(&file.collect());
    let lokr = Lokr {
        factor: Some(2),
        ..Lokr::SQUARE
    };
    for (case, adapter) in [
        ("lora_conv", &Lora as &dyn AdapterType),
        ("loha_conv", &Loha),
        ("lokr_conv", &lokr),
    ] {
        let layer = Layer::of(&found, case);
        let x = candle_core::Var::from_tensor(&found[&format!("{case}/x")]).unwrap();
        let (probe, y) = (&found[&format!("{case}/probe")], &found[&format!("{case}/y")]);
        let create = |tucker: bool| {
            let handle = AdapterHandle::new(1.0);
            handle.set_training(Some("seed"));
            let new = NewLayer {
                tucker,
                ..layer.new_adapter(2, 3.0, &handle)
            };
            adapter.create(new, &mut TorchGenerator::manual_seed(1)).unwrap()
        };
        let trained = create(true);
        let plain = layer.forward(x.as_tensor(), vec![]);
        let at_start = layer.forward(x.as_tensor(), vec![trained.clone()]);
        check(&at_start, &plain, 1e-6, &format!("{case} at the start"));
        for (var, value) in trained.values(&*files[case]).unwrap().values {
            var.set(&value).unwrap();
        }
        let run = || {
            let found = layer.forward(x.as_tensor(), vec![trained.clone()]);
            check(&found, y, 5e-6, case);
            (found * probe).unwrap().sum_all()
        };
        let (_, gradients) = autograd::gradients(run).unwrap();
        let params = trained.params().into_iter().chain([("x", &x)]);
        for (name, var) in params {
            let expected = &found[&format!("{case}/gradient/{name}")];
            check(
                gradients.get(var.as_tensor()).unwrap(),
                expected,
                1e-5,
                &format!("{case}: {name}"),
            );
        }
        // What is saved is read as it was, and not by a training without the third matrix.
        let saved = trained.saved().unwrap().into_iter();
        let saved: Tensors = saved
            .map(|(suffix, tensor)| (format!("layer.{suffix}"), tensor))
            .collect();
        let read = &layers(&saved)["layer"];
        let again = layer.adapter(&**read, &AdapterHandle::new(1.0));
        check(
            &layer.forward(x.as_tensor(), vec![again]),
            y,
            2e-6,
            &format!("{case} read again"),
        );
        let message = create(false).values(&**read).unwrap_err();
        assert!(message.contains("use_cp: true"), "{case}: {message}");
        trained.limit_norm(0.5).unwrap();
        let change = trained.change(&layer.weight).unwrap();
        let norm: f32 = change
            .sqr()
            .unwrap()
            .sum_all()
            .unwrap()
            .sqrt()
            .unwrap()
            .to_scalar()
            .unwrap();
        assert!((norm - 0.5).abs() < 1e-4, "{case}: {norm}");
    }
}

/// LyCORIS' `use_scalar`: the number is zero at first, has the gradient of a factor of the change, and is saved in a matrix.
#[test]
fn a_trained_number_multiplies_the_change() {
    let found = tensors("types");
    let (square, narrow) = (
        Lokr::SQUARE,
        Lokr {
            factor: Some(2),
            ..Lokr::SQUARE
        },
    );
    let split = Lokr {
        splits: LokrSplits {
            decompose_both: true,
            ..LokrSplits::default()
        },
        ..Lokr::SQUARE
    };
    let types: [(&str, &dyn AdapterType); 5] = [
        ("LoRA", &Lora),
        ("LoHa", &Loha),
        ("LoKr", &square),
        ("LoKr of other sides", &narrow),
        ("LoKr of two products", &split),
    ];
    let cases = types
        .into_iter()
        .flat_map(|kind| [(kind, "linear", false), (kind, "conv", false), (kind, "conv", true)]);
    for ((kind, adapter), shape, tucker) in cases {
        let what = format!("{kind} {shape}, core: {tucker}");
        let layer = Layer::of(&found, &format!("peft_loha_{shape}"));
        let (x, probe) = (
            &found[&format!("peft_loha_{shape}/x")],
            &found[&format!("peft_loha_{shape}/probe")],
        );
        let handle = AdapterHandle::new(1.0);
        let create = || {
            let new = NewLayer {
                tucker,
                scalar: true,
                ..layer.new_adapter(1, 1.5, &handle)
            };
            adapter.create(new, &mut TorchGenerator::manual_seed(1)).unwrap()
        };
        let trained = create();
        let plain = layer.forward(x, vec![]);
        check(&layer.forward(x, vec![trained.clone()]), &plain, 1e-6, &what);
        let (name, scalar) = trained.params().pop().unwrap();
        assert_eq!((name, scalar.elem_count()), ("scalar", 1), "{what}");
        let set = |number: f32| scalar.set(&Tensor::new(number, &Device::Cpu).unwrap()).unwrap();
        set(1.0);
        let change = (layer.forward(x, vec![trained.clone()]) - &plain).unwrap();
        assert!(largest(&change) > 1e-4, "{what}");

        set(-3.0);
        handle.set_training(Some("seed"));
        let run = || (layer.forward(x, vec![trained.clone()]) * probe).unwrap().sum_all();
        let (_, gradients) = autograd::gradients(run).unwrap();
        for (name, var) in trained.params() {
            assert!(gradients.get(var.as_tensor()).is_some(), "{what}: {name}");
        }
        let gradient = gradients.get(scalar.as_tensor()).unwrap().clone();
        let expected = (change * probe).unwrap().sum_all().unwrap();
        check(&gradient, &expected, 1e-2, &what);
        handle.set_training(None);

        let expected = layer.forward(x, vec![trained.clone()]);
        let saved = trained.saved().unwrap().into_iter();
        let saved: Tensors = saved
            .map(|(suffix, tensor)| (format!("layer.{suffix}"), tensor))
            .collect();
        assert!(!saved.contains_key("layer.scalar"), "{what}");
        let read = &layers(&saved)["layer"];
        let again = layer.adapter(&**read, &AdapterHandle::new(1.0));
        check(&layer.forward(x, vec![again]), &expected, 1e-5, &what);
        let other = create();
        for (var, value) in other.values(&**read).unwrap().values {
            var.set(&value).unwrap();
        }
        check(&layer.forward(x, vec![other]), &expected, 1e-5, &what);
    }
}

/// `apply_max_norm` of LyCORIS with `use_scalar`: of LoRA and LoHa the number is multiplied and counts, of LoKr it does not count and the
/// matrices are multiplied.
#[test]
fn norms_are_limited_beside_a_trained_number() {
    const NUMBER: f64 = -3.0;
    let found = tensors("types");
    let square = Lokr::SQUARE;
    let types: [(&str, &dyn AdapterType); 3] = [("LoRA", &Lora), ("LoHa", &Loha), ("LoKr", &square)];
    let cases = types
        .into_iter()
        .flat_map(|kind| [(kind, "linear", false), (kind, "conv", false), (kind, "conv", true)]);
    for ((kind, adapter), shape, tucker) in cases {
        let what = format!("{kind} {shape}, core: {tucker}");
        let layer = Layer::of(&found, &format!("peft_loha_{shape}"));
        let handle = AdapterHandle::new(1.0);
        let new = NewLayer {
            tucker,
            scalar: true,
            ..layer.new_adapter(1, 1.5, &handle)
        };
        let trained = adapter.create(new, &mut TorchGenerator::manual_seed(1)).unwrap();
        let mut params = trained.params();
        let (_, scalar) = params.pop().unwrap();
        scalar.set(&Tensor::new(NUMBER as f32, &Device::Cpu).unwrap()).unwrap();
        let norm = || {
            let change = trained.change(&layer.weight).unwrap().sqr().unwrap().sum_all().unwrap();
            f64::from(change.to_scalar::<f32>().unwrap()).sqrt()
        };
        let values = || -> Vec<Vec<f32>> {
            let flat = params
                .iter()
                .map(|(_, var)| var.flatten_all().unwrap().to_vec1().unwrap());
            flat.collect()
        };
        let number = || f64::from(scalar.to_scalar::<f32>().unwrap());
        let (before, matrices) = (norm(), values());
        let counted = if kind == "LoKr" { before / -NUMBER } else { before };
        // Below the limit nothing changes.
        trained.limit_norm(counted * 1.01).unwrap();
        assert_eq!(
            (norm(), values(), number()),
            (before, matrices.clone(), NUMBER),
            "{what}"
        );
        trained.limit_norm(counted * 0.8).unwrap();
        assert!((norm() / before - 0.8).abs() < 1e-4, "{what}: {} of {before}", norm());
        match kind {
            "LoKr" => assert_eq!(number(), NUMBER, "{what}"),
            _ => {
                assert_eq!(values(), matrices, "{what}");
                assert!((number() / NUMBER - 0.8).abs() < 1e-4, "{what}: {}", number());
            }
        }
    }
}

/// The low-rank product of a DoRA's file.
fn factors(file: &dyn FileLayer, layer: &Layer) -> LowRank {
    let trained = trained(&Dora, layer, file, Dropout::default());
    let params: HashMap<_, _> = trained.params().into_iter().collect();
    LowRank {
        down: params["lora_A.weight"].as_detached_tensor(),
        up: params["lora_B.weight"].as_detached_tensor(),
        scale: 1.0,
    }
}

in_portable_mode! {
    trained_types_have_the_gradients_of_peft,
    decomposed_weights_are_trained_as_by_lycoris,
    trained_types_start_at_the_layer_itself_and_are_saved_as_they_are_read,
    dropout_of_a_dora_keeps_its_norm,
    dropped_outputs_are_missing_from_the_change_and_its_gradients,
    trained_decompositions_have_the_gradients_of_torch,
    a_trained_number_multiplies_the_change,
}
