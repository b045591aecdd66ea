//! LoRAs and DoRAs of one- and three-dimensional convolutions: comparison with peft, by `tests/reference/make_conv_adapters.py`.

use super::test_helpers::layers;
use super::types_tests::{Layer, check};
use super::*;
use crate::autograd;
use crate::families::AdapterNames;
use crate::nn::LayerKind;
use crate::rng::TorchGenerator;
use crate::testing::{fixtures, formula, gap, in_portable_mode, largest};
use crate::weights::Weight;
use candle_core::{Device, Tensor, Var};
use serde_json::Value;
use std::collections::HashMap;
use std::sync::Arc;

/// The layer of a case, its input, what its output is multiplied with, and the adapter in a file.
struct Case {
    layer: Layer,
    x: Tensor,
    probe: Tensor,
    file: Arc<dyn FileLayer>,
    expected: Value,
}

fn tensor(numbers: Vec<f32>, shape: &[usize]) -> Tensor {
    Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap()
}

fn numbers(value: &Value) -> Vec<f32> {
    serde_json::from_value(value.clone()).unwrap()
}

impl Case {
    fn of(name: &str, expected: &Value) -> Self {
        let layer_name = name.split_once('_').unwrap().0;
        let shape =
            |tensor: &str| -> Vec<usize> { serde_json::from_value(expected["shapes"][tensor].clone()).unwrap() };
        let numbers = |tensor_name: &str, shape: &[usize], scale: f32| {
            let count = shape.iter().product();
            tensor(formula(&format!("{layer_name}.{tensor_name}"), count, scale), shape)
        };
        let (weight, bias) = (shape("weight"), [shape("weight")[0]]);
        let kind = match layer_name {
            "conv1d" => LayerKind::Conv1d { stride: 2, padding: 1 },
            _ => LayerKind::Conv3d {
                strides: [1, 2],
                paddings: [1, 1],
            },
        };
        let mut tensors = HashMap::from([
            ("a.lora_A.weight".to_owned(), numbers("down", &shape("down"), 0.5)),
            ("a.lora_B.weight".to_owned(), numbers("up", &shape("up"), 0.5)),
            ("a.alpha".to_owned(), Tensor::new(3f32, &Device::Cpu).unwrap()),
        ]);
        if name.ends_with("dora") {
            let magnitude = (numbers("magnitude", &shape("magnitude"), 0.3) + 1.5).unwrap();
            tensors.insert("a.lora_magnitude_vector".to_owned(), magnitude);
        }
        Self {
            layer: Layer {
                kind,
                weight: Weight::Plain(numbers("weight", &weight, 0.5)),
                bias: numbers("bias", &bias, 0.5),
            },
            x: numbers("x", &shape("x"), 1.0),
            probe: numbers("probe", &shape("y"), 1.0),
            file: layers(&tensors).remove("a").unwrap(),
            expected: expected.clone(),
        }
    }

    fn y(&self) -> Tensor {
        tensor(numbers(&self.expected["y"]), self.probe.dims())
    }
}

fn cases() -> Vec<(String, Case)> {
    let path = fixtures().join("conv_adapters.json");
    let found: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let found = found.as_object().unwrap();
    assert_eq!(found.len(), 4);
    found
        .iter()
        .map(|(name, case)| (name.clone(), Case::of(name, case)))
        .collect()
}

#[test]
fn adapters_of_files_change_a_layer_as_peft_does() {
    for (name, case) in cases() {
        let handle = AdapterHandle::new(1.0);
        let adapter = case.layer.adapter(&*case.file, &handle);
        let (x, expected) = (&case.x, case.y());
        let plain = case.layer.forward(x, vec![]);
        assert!(
            gap(&plain, &expected) / largest(&expected) > 0.02,
            "{name} changes nothing"
        );
        check(&case.layer.forward(x, vec![adapter.clone()]), &expected, 5e-6, &name);
        let added = adapter.apply(&case.layer.base(), x, plain.clone()).unwrap();
        check(&added, &expected, 5e-6, &format!("{name}, added to the output"));
        let weight = (case.layer.weight.dense().unwrap() + adapter.change(&case.layer.weight).unwrap()).unwrap();
        let merged = Layer {
            weight: Weight::Plain(weight),
            bias: case.layer.bias.clone(),
            kind: case.layer.kind,
        };
        check(&merged.forward(x, vec![]), &expected, 5e-6, &format!("{name}, merged"));
        handle.multiplier.set(0.0);
        assert!(
            gap(&case.layer.forward(x, vec![adapter]), &plain) < 1e-6,
            "{name} at strength 0"
        );
    }
}

#[test]
fn trained_adapters_have_the_gradients_of_peft() {
    for (name, case) in cases() {
        let adapter: &dyn AdapterType = match name.ends_with("dora") {
            true => &Dora,
            false => &Lora,
        };
        let handle = AdapterHandle::new(1.0);
        handle.set_training(Some("seed"));
        let new = NewLayer {
            names: AdapterNames::Kohya,
            ..case.layer.new_adapter(2, 3.0, &handle)
        };
        let trained = adapter.create(new, &mut TorchGenerator::manual_seed(1)).unwrap();
        for (var, value) in trained.values(&*case.file).unwrap().values {
            var.set(&value.reshape(var.shape()).unwrap().contiguous().unwrap())
                .unwrap();
        }
        let x = Var::from_tensor(&case.x).unwrap();
        let run = || {
            let y = case.layer.forward(x.as_tensor(), vec![trained.clone()]);
            check(&y, &case.y(), 5e-6, &name);
            (y * &case.probe).unwrap().sum_all()
        };
        let (_, gradients) = autograd::gradients(run).unwrap();
        let mut all: Vec<(&str, &Tensor)> = vec![("x", x.as_tensor())];
        for (suffix, var) in trained.params() {
            let name = match suffix {
                "lora_down.weight" => "down",
                "lora_up.weight" => "up",
                _ => "magnitude",
            };
            all.push((name, var.as_tensor()));
        }
        assert_eq!(
            all.len(),
            case.expected["gradients"].as_object().unwrap().len(),
            "{name}"
        );
        for (tensor_name, of) in all {
            let gradient = gradients.get(of).unwrap();
            let expected = tensor(numbers(&case.expected["gradients"][tensor_name]), of.dims());
            check(gradient, &expected, 1e-5, &format!("{name}: {tensor_name}"));
        }
    }
}

in_portable_mode! {
    adapters_of_files_change_a_layer_as_peft_does,
    trained_adapters_have_the_gradients_of_peft,
}
