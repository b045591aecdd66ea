//! Compares the gradients of the table of embeddings with transformers, where a token is the padding (`tests/reference/make_padding_row.py`).

use super::{AttentionMask, CausalLm, CausalLmOptions};
use crate::autograd::gradients;
use crate::testing::formula_weights::{formula, write_model};
use crate::testing::{compute_on_this_thread, fixtures, gap, in_portable_mode, largest};
use crate::weights::TrainableFilter;
use candle_core::{Device, Tensor};
use serde_json::Value;

fn expected() -> Value {
    serde_json::from_slice(&std::fs::read(fixtures().join("padding_row.json")).unwrap()).unwrap()
}

/// The table of embeddings of a model that is trained.
fn table(model: &CausalLm) -> candle_core::Var {
    let vars = model.trained_variables();
    let is_table = |name: &str| name.ends_with("embed_tokens.weight") || name.ends_with("wte.weight");
    vars.into_iter().find(|(name, _)| is_table(name)).unwrap().1
}

#[test]
fn the_row_of_the_padding_gets_no_gradient_as_an_input() {
    compute_on_this_thread();
    let expected = expected();
    let ids: Vec<Vec<u32>> = serde_json::from_value(expected["ids"].clone()).unwrap();
    let ids = Tensor::new(ids, &Device::Cpu).unwrap();
    let cases = expected["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 7);
    for case in cases {
        let folder = tempfile::tempdir().unwrap();
        write_model(folder.path(), &case["config"]);
        let options = CausalLmOptions {
            trained: TrainableFilter::everything(),
            ..CausalLmOptions::cpu()
        };
        let model = CausalLm::load(folder.path(), &options).unwrap();
        let loss = || {
            let hidden = model.hidden(&ids, &AttentionMask::Causal)?;
            model.logits(&hidden)?.sqr()?.mean_all()
        };
        let (_, found) = gradients(loss).unwrap();
        let table = table(&model);
        let (rows, width) = table.dims2().unwrap();
        let probe = Tensor::from_vec(formula("probe", width, 1.0), (width, 1), &Device::Cpu).unwrap();
        let sums = found
            .get(&table)
            .unwrap()
            .matmul(&probe)
            .unwrap()
            .reshape(rows)
            .unwrap();
        let numbers: Vec<f32> = serde_json::from_value(case["gradient"].clone()).unwrap();
        let numbers = Tensor::new(numbers, &Device::Cpu).unwrap();
        let error = gap(&sums, &numbers) / largest(&numbers);
        assert!(error < 1e-4, "{}: {error}", case["config"]);
    }
}

#[test]
fn the_row_of_the_padding_of_a_new_model_is_zero() {
    for case in expected()["cases"].as_array().unwrap() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), case["config"].to_string()).unwrap();
        let model = CausalLm::from_config(folder.path(), &CausalLmOptions::cpu(), 1).unwrap();
        let rows: Vec<Vec<f32>> = table(&model).to_vec2().unwrap();
        let zeros = (0..rows.len()).filter(|row| rows[*row].iter().all(|number| *number == 0.0));
        let expected: Vec<usize> = serde_json::from_value(case["zero_rows_of_new"].clone()).unwrap();
        assert_eq!(zeros.collect::<Vec<_>>(), expected, "{}", case["config"]);
    }
}

in_portable_mode! {
    the_row_of_the_padding_gets_no_gradient_as_an_input,
}
