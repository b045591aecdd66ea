//! Comparison with the fixtures of `tests/reference/make_rng.py`.

use super::*;
use serde_json::Value;
use sha2::{Digest, Sha256};

fn digest(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))[..32].to_owned()
}

fn draw(g: &mut TorchGenerator, op: &[Value]) -> Vec<u8> {
    let int = |i: usize| op[i].as_i64().unwrap();
    let len = |i: usize| int(i) as usize;
    let f32s = |v: Vec<f32>| v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let f64s = |v: Vec<f64>| v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let i64s = |v: Vec<i64>| v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    match op[0].as_str().unwrap() {
        "randn" => f32s(g.randn(len(1))),
        "rand" => f32s(g.rand(len(1))),
        "uniform" => f32s(g.uniform(len(1), op[2].as_f64().unwrap() as f32, op[3].as_f64().unwrap() as f32)),
        "rand_f64" => f64s(g.rand_f64(len(1))),
        "randn_f64" => f64s(g.randn_f64(len(1))),
        "randint" => i64s(g.randint(int(1), int(2), len(3))),
        "randperm" => i64s(g.randperm(len(1))),
        "randn_f16" => f32s(g.randn_as(len(1), NormalKind::F16)),
        "randn_bf16" => f32s(g.randn_as(len(1), NormalKind::BF16)),
        other => panic!("unknown draw {other}"),
    }
}

#[test]
fn every_draw_is_bit_identical_to_torch() {
    let text = include_str!("../../../tests/fixtures/rng/draws.json");
    let cases: Vec<Value> = serde_json::from_str(text).unwrap();
    let mut wrong = Vec::new();
    for case in &cases {
        let seed: i128 = case["seed"].as_str().unwrap().parse().unwrap();
        let mut g = TorchGenerator::manual_seed(seed as u64);
        for (i, expected) in case["draws"].as_array().unwrap().iter().enumerate() {
            let bytes = draw(&mut g, expected["op"].as_array().unwrap());
            if digest(&bytes) != expected["sha"].as_str().unwrap() {
                wrong.push(format!("seed {seed}, draw {i}: {}: values", expected["op"]));
            }
            let state = g.state();
            if digest(&state) != expected["state"].as_str().unwrap() {
                wrong.push(format!("seed {seed}, draw {i}: {}: state", expected["op"]));
            }
            g = TorchGenerator::from_state(&state).unwrap();
        }
    }
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn a_damaged_state_is_an_error() {
    let good = TorchGenerator::manual_seed(3).state();
    assert!(TorchGenerator::from_state(&good[1..]).is_err());
    let mut position = good.clone();
    position[16] = 9;
    assert!(TorchGenerator::from_state(&position).is_err());
    let mut word = good;
    word[24 + 7] = 1;
    assert!(TorchGenerator::from_state(&word).is_err());
}

#[test]
fn negative_seeds_are_twos_complement() {
    assert_eq!(
        TorchGenerator::manual_seed_signed(-1).randn(20),
        TorchGenerator::manual_seed(u64::MAX).randn(20)
    );
}
