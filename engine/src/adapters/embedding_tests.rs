//! LoRAs of embedding layers by themselves: gradients, files and their strength. `processes/src/lm_train/embedding_tests.rs` compares with peft.

use super::test_helpers::{layers, named};
use super::*;
use crate::autograd;
use crate::device::precision::MatmulPrecision;
use crate::families::AdapterNames;
use crate::nn::{Embedding, LayerAdapter};
use crate::rng::TorchGenerator;
use crate::testing::{formula, gap, in_portable_mode, largest};
use crate::weights::{Weight, write_tensors};
use aitk_common::job::extract::ScaleTarget;
use candle_core::{DType, Device, Tensor};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

const COUNT: usize = 7;
const WIDTH: usize = 5;
const RANK: usize = 2;

fn tensor(name: &str, shape: &[usize]) -> Tensor {
    Tensor::from_vec(formula(name, shape.iter().product(), 0.5), shape, &Device::Cpu).unwrap()
}

fn table() -> Weight {
    Weight::Plain(tensor("table", &[COUNT, WIDTH]))
}

fn file_tensors(rank: usize) -> HashMap<String, Tensor> {
    HashMap::from([
        ("a.lora_embedding_A".to_owned(), tensor("A", &[rank, COUNT])),
        ("a.lora_embedding_B".to_owned(), tensor("B", &[WIDTH, rank])),
        ("a.alpha".to_owned(), Tensor::new(3f32, &Device::Cpu).unwrap()),
    ])
}

fn file(rank: usize) -> Arc<dyn FileLayer> {
    let layer = layers(&file_tensors(rank)).remove("a").unwrap();
    layer.split(&named(&[COUNT], false), &|_| None).unwrap().remove(0)
}

/// A new adapter of a table with this alpha.
fn new_adapter(weight: &Weight, alpha: f64, handle: &Arc<AdapterHandle>) -> Arc<dyn TrainedLayer> {
    let new = NewLayer {
        name: "a".to_owned(),
        names: AdapterNames::Peft,
        weight,
        bias: None,
        dims: weight.dims(),
        device: &Device::Cpu,
        rank: RANK,
        alpha,
        dropout: Dropout::default(),
        tucker: false,
        rank_stabilised: false,
        scalar: false,
        handle,
    };
    Lora.create_embedding(new, &mut TorchGenerator::manual_seed(1)).unwrap()
}

fn set(adapter: &dyn TrainedLayer, file: &dyn FileLayer) {
    for (var, value) in adapter.values(file).unwrap().values {
        var.set(&value).unwrap();
    }
}

fn near(found: &Tensor, expected: &Tensor, what: &str) {
    let error = gap(found, expected) / largest(expected);
    assert!(error < 1e-6, "{what}: {error}");
}

/// Ids that are there twice get the gradients of both.
#[test]
fn output_and_gradients_are_those_of_the_changed_table() {
    let (weight, handle) = (table(), AdapterHandle::new(1.0));
    handle.set_training(Some("seed"));
    let adapter = new_adapter(&weight, 3.0, &handle);
    let ids = Tensor::new(&[[1u32, 4, 4], [6, 0, 1]], &Device::Cpu).unwrap();
    let mut layer = Embedding {
        weight: weight.clone(),
        adapters: vec![adapter.clone() as Arc<dyn LayerAdapter>],
    };
    let plain = weight.dense().unwrap();
    // A new adapter changes nothing: `down` is zero.
    let rows = |table: &Tensor| {
        let rows = table.index_select(&ids.flatten_all().unwrap(), 0).unwrap();
        rows.reshape((2, 3, WIDTH)).unwrap()
    };
    assert_eq!(gap(&layer.forward(&ids).unwrap(), &rows(&plain)), 0.0);
    set(&*adapter, &*file(RANK));
    let vars: Vec<_> = adapter.params().into_iter().map(|(_, var)| var.clone()).collect();
    let changed = || {
        let [down, up] = [&vars[0], &vars[1]].map(|var| var.as_tensor().clone());
        (&plain + (up.matmul(&down)?.t()? * 1.5)?)?.contiguous()
    };
    let probe = tensor("probe", &[2, 3, WIDTH]);
    let (_, found) = autograd::gradients(|| (layer.forward(&ids)? * &probe)?.sum_all()).unwrap();
    let (_, expected) = autograd::gradients(|| (rows(&changed()?) * &probe)?.sum_all()).unwrap();
    near(&layer.forward(&ids).unwrap(), &rows(&changed().unwrap()), "output");
    for (var, name) in vars.iter().zip(["down", "up"]) {
        near(
            found.get(var.as_tensor()).unwrap(),
            expected.get(var.as_tensor()).unwrap(),
            name,
        );
    }
    let merged = (&plain + adapter.change(&weight).unwrap()).unwrap();
    layer.adapters.clear();
    layer.weight = Weight::Plain(merged);
    near(&layer.forward(&ids).unwrap(), &rows(&changed().unwrap()), "merged");
}

in_portable_mode!(output_and_gradients_are_those_of_the_changed_table);

/// On a CPU without products of bfloat16 numbers both are in float32.
#[test]
fn products_are_in_float32_beside_layers_in_bfloat16() {
    let (weight, handle) = (table(), AdapterHandle::new(1.0));
    let adapter = new_adapter(&weight, 3.0, &handle);
    set(&*adapter, &*file(RANK));
    let layer = Embedding {
        weight,
        adapters: vec![adapter as Arc<dyn LayerAdapter>],
    };
    let ids = Tensor::new(&[1u32, 4, 6], &Device::Cpu).unwrap();
    let [wide, narrow] =
        [MatmulPrecision::F32, MatmulPrecision::Bf16].map(|precision| precision.run(|| layer.forward(&ids)).unwrap());
    assert_eq!(gap(&wide, &narrow), 0.0);
}

/// The scale of the file goes into `up`, so that the change is that of the file.
#[test]
fn a_training_starts_from_a_file_of_the_same_rank() {
    let (weight, handle) = (table(), AdapterHandle::new(1.0));
    let adapter = new_adapter(&weight, 8.0, &handle);
    set(&*adapter, &*file(RANK));
    let [down, up] = [tensor("A", &[RANK, COUNT]), tensor("B", &[WIDTH, RANK])];
    let expected = (up.matmul(&down).unwrap().t().unwrap() * 1.5).unwrap();
    near(
        &adapter.change(&weight).unwrap(),
        &expected.contiguous().unwrap(),
        "change",
    );
    let error = adapter.values(&*file(RANK + 1)).unwrap_err();
    assert!(error.contains("the file has [3, 7], this job [2, 7]"), "{error}");
}

#[test]
fn its_strength_is_scaled() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lora.safetensors");
    let mut tensors: BTreeMap<String, Tensor> = file_tensors(RANK).into_iter().collect();
    // peft saves the table of the base model beside it.
    tensors.insert("a.base_layer.weight".to_owned(), tensor("table", &[COUNT, WIDTH]));
    write_tensors(&mut std::fs::File::create(&path).unwrap(), &tensors, &BTreeMap::new()).unwrap();
    let rescale = |target| {
        let rescaling = Rescaling {
            factor: -4.0,
            target,
            dtype: DType::F32,
        };
        rescale_lora(&path, rescaling, &mut |_, _| true).unwrap().unwrap()
    };
    for (target, factors) in [
        (ScaleTarget::UpDown, [2.0, -2.0, 1.0, 1.0]),
        (ScaleTarget::Alpha, [1.0, 1.0, -4.0, 1.0]),
    ] {
        let found = rescale(target).tensors;
        let names = ["lora_embedding_A", "lora_embedding_B", "alpha", "base_layer.weight"];
        for (name, factor) in names.into_iter().zip(factors) {
            let name = format!("a.{name}");
            let expected = (&tensors[&name] * factor).unwrap().flatten_all().unwrap();
            near(&found[&name].flatten_all().unwrap(), &expected, &name);
        }
    }
}
