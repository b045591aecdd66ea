//! Compares runs of a small sequence of blocks with and without checkpointing. It has what models have: skip connections, an input
//! that every block reads, blocks with two outputs, a variable that two blocks share, and a block that does not depend on a variable.

use super::{BlockSequence, Checkpointing};
use crate::autograd::{Gradients, gradients};
use candle_core::{DType, Device, Tensor, Var};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

fn random(seed: u64, shape: &[usize]) -> Tensor {
    let mut generator = crate::rng::TorchGenerator::manual_seed(seed);
    Tensor::from_vec(generator.randn(shape.iter().product()), shape, &Device::Cpu).unwrap()
}

struct Toy {
    vars: Vec<Var>,
    input: Var,
    shared: Var,
    /// How often blocks ran.
    runs: Arc<AtomicUsize>,
}

impl Toy {
    fn new() -> Self {
        let var = |seed, shape: &[usize]| Var::from_tensor(&random(seed, shape)).unwrap();
        Self {
            vars: (0..4).map(|i| var(i, &[6, 6])).collect(),
            input: var(10, &[3, 6]),
            shared: var(11, &[1, 6]),
            runs: Arc::default(),
        }
    }

    fn forward(&self, checkpointing: Checkpointing, train: bool) -> Tensor {
        let tensor = |v: &Var| {
            if train {
                v.as_tensor().clone()
            } else {
                v.as_tensor().detach()
            }
        };
        let mut sequence = BlockSequence::new();
        let mut x = sequence.input(tensor(&self.input));
        let shared = sequence.input(tensor(&self.shared));
        let constant = sequence.input(random(12, &[3, 6]));
        let mut skips = Vec::new();
        for i in 0..4 {
            let (w, runs) = (tensor(&self.vars[i % 3]), Arc::clone(&self.runs));
            x = sequence.add(format!("down {i}"), [x, shared], move |[x, shared]| {
                runs.fetch_add(1, Ordering::Relaxed);
                x.matmul(&w)?.broadcast_mul(&shared.tanh()?)?.tanh()
            });
            skips.push(x);
        }
        let plain = sequence.add("plain", [constant], |[constant]| constant.sqr());
        x = sequence.add("mixed", [x, plain], |[x, plain]| x + plain);
        // Two streams, of which the second one is also read by a step that nobody reads.
        let [image, text] = sequence.add_with_outputs("double", [x, shared], |[x, shared]| {
            Ok([x.tanh()?, x.broadcast_add(shared)?.sin()?])
        });
        let [image, text] = sequence.add_with_outputs("double again", [image, text], |[image, text]| {
            Ok([(image * text)?, (text + image)?])
        });
        sequence.add("ignored", [text], |[text]| text.exp());
        x = sequence.add("joined", [image, text], |[image, text]| image + text);
        for (i, skip) in skips.into_iter().rev().enumerate() {
            let (w, runs) = (tensor(&self.vars[3 - i % 2]), Arc::clone(&self.runs));
            x = sequence.add(format!("up {i}"), [x, skip, shared], move |[x, skip, shared]| {
                runs.fetch_add(1, Ordering::Relaxed);
                ((x.matmul(&w)? * skip)? + x.broadcast_add(shared)?)?.tanh()
            });
        }
        let unread = sequence.input(tensor(&self.shared));
        sequence.add("unread", [unread], |[x]| x.exp());
        sequence.run(checkpointing, x).unwrap()
    }

    fn grads(&self, checkpointing: Checkpointing) -> (f32, Vec<Tensor>) {
        let (loss, grads) = gradients(|| self.forward(checkpointing, true).sqr()?.mean_all()).unwrap();
        (loss.to_scalar().unwrap(), self.gradients_of_all(&grads))
    }

    fn gradients_of_all(&self, grads: &Gradients) -> Vec<Tensor> {
        let all = self.vars.iter().chain([&self.input, &self.shared]);
        all.map(|v| grads.get(v.as_tensor()).unwrap().clone()).collect()
    }
}

fn gap(a: &Tensor, b: &Tensor) -> f64 {
    let norm = |t: &Tensor| {
        let t = t.to_dtype(DType::F64).unwrap().sqr().unwrap().sum_all().unwrap();
        t.to_scalar::<f64>().unwrap().sqrt()
    };
    norm(&(a - b).unwrap()) / norm(b).max(1e-12)
}

#[test]
fn recomputing_changes_neither_loss_nor_gradients() {
    let toy = Toy::new();
    let (loss, grads) = toy.grads(Checkpointing::Off);
    for blocks in [0, 1, 2, 3, 4, 7, 100] {
        let (recomputed_loss, recomputed_grads) = toy.grads(Checkpointing::Segments { blocks });
        assert_eq!(loss, recomputed_loss, "{blocks} blocks together");
        for (a, b) in recomputed_grads.iter().zip(&grads) {
            assert!(gap(a, b) < 1e-6, "{blocks} blocks together: {}", gap(a, b));
        }
    }
}

#[test]
fn without_a_tape_nothing_is_recomputed_and_candles_backward_pass_works() {
    let toy = Toy::new();
    let (_, grads) = toy.grads(Checkpointing::Off);
    let before = toy.runs.load(Ordering::Relaxed);
    let loss = toy.forward(Checkpointing::each_block(true), true);
    let store = loss.sqr().unwrap().mean_all().unwrap().backward().unwrap();
    assert_eq!(toy.runs.load(Ordering::Relaxed) - before, 8);
    let all = toy.vars.iter().chain([&toy.input, &toy.shared]);
    for (a, v) in grads.iter().zip(all) {
        assert!(gap(a, store.get(v.as_tensor()).unwrap()) < 1e-6);
    }
}

#[test]
fn blocks_run_again_only_if_a_tensor_is_trainable() {
    let toy = Toy::new();
    let runs = |f: &dyn Fn()| {
        let before = toy.runs.load(Ordering::Relaxed);
        f();
        toy.runs.load(Ordering::Relaxed) - before
    };
    let train = |on| Checkpointing::each_block(on);
    assert_eq!(runs(&|| drop(toy.grads(train(false)))), 8);
    assert_eq!(runs(&|| drop(toy.grads(train(true)))), 16);
    assert_eq!(runs(&|| drop(toy.forward(train(true), false))), 8);
    assert!(!toy.forward(train(true), false).track_op());
}

#[test]
fn an_error_of_a_recomputed_block_names_the_block() {
    let count = AtomicUsize::new(0);
    let var = Var::from_tensor(&random(0, &[2])).unwrap();
    let mut sequence = BlockSequence::new();
    let x = sequence.input(var.as_tensor().clone());
    let y = sequence.add("blocks.3", [x], move |[x]| {
        match count.fetch_add(1, Ordering::Relaxed) {
            0 => x.sqr(),
            _ => candle_core::bail!("out of memory"),
        }
    });
    let error = gradients(|| sequence.run(Checkpointing::each_block(true), y)?.sum_all());
    let error = error.unwrap_err().to_string();
    assert!(error.contains("out of memory") && error.contains("blocks.3"), "{error}");
}

crate::testing::in_portable_mode! {
    recomputing_changes_neither_loss_nor_gradients,
    without_a_tape_nothing_is_recomputed_and_candles_backward_pass_works,
    blocks_run_again_only_if_a_tensor_is_trainable,
}

/// A sequence whose blocks in the middle are results too: each is there, and its gradients are those without checkpointing.
#[test]
fn several_results_are_those_of_their_blocks() {
    let toy = Toy::new();
    let run = |checkpointing| {
        let forward = || -> candle_core::Result<Vec<Tensor>> {
            let mut sequence = BlockSequence::new();
            let mut x = sequence.input(toy.input.as_tensor().clone());
            let mut results = vec![x];
            for var in &toy.vars {
                let w = var.as_tensor().clone();
                x = sequence.add("step", [x], move |[x]| x.matmul(&w)?.tanh());
                results.push(x);
            }
            sequence.run_all(checkpointing, &results)
        };
        let (loss, grads) = gradients(|| {
            let results = forward()?;
            assert_eq!(results.len(), 5);
            let squares = results.iter().map(|result| result.sqr()?.mean_all());
            squares.reduce(|a, b| a? + b?).unwrap()
        })
        .unwrap();
        let vars = toy.vars.iter().chain([&toy.input]);
        let grads: Vec<Tensor> = vars.map(|v| grads.get(v.as_tensor()).unwrap().clone()).collect();
        (loss.to_scalar::<f32>().unwrap(), grads)
    };
    let (loss, grads) = run(Checkpointing::Off);
    for blocks in [1, 2, 3, 100] {
        let (recomputed_loss, recomputed_grads) = run(Checkpointing::Segments { blocks });
        assert_eq!(loss, recomputed_loss, "{blocks} blocks together");
        for (a, b) in recomputed_grads.iter().zip(&grads) {
            assert!(gap(a, b) < 1e-6, "{blocks} blocks together: {}", gap(a, b));
        }
    }
}
