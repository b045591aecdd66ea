//! The tape against candle's backward pass, on graphs that mix operations of both.

use super::*;
use crate::nn::{add, conv2d, gelu, linear, silu};
use crate::testing::gap;
use candle_core::Device;
use std::rc::Rc;

fn random(seed: u64, shape: &[usize]) -> Tensor {
    let mut generator = crate::rng::TorchGenerator::manual_seed(seed);
    Tensor::from_vec(generator.randn(shape.iter().product()), shape, &Device::Cpu).unwrap()
}

fn var(seed: u64, shape: &[usize]) -> Var {
    Var::from_tensor(&random(seed, shape)).unwrap()
}

/// Gradients by tape and by candle of the same function.
fn both(vars: &[&Var], loss: impl Fn() -> Result<Tensor>) {
    let candles = loss().unwrap().backward().unwrap();
    let (value, ours) = gradients(&loss).unwrap();
    assert_eq!(
        value.to_scalar::<f32>().unwrap(),
        loss().unwrap().to_scalar::<f32>().unwrap()
    );
    for (i, var) in vars.iter().enumerate() {
        match (ours.get(var), candles.get(var)) {
            (Some(a), Some(b)) => assert!(gap(a, b) < 1e-4, "variable {i}: {}", gap(a, b)),
            (None, None) => {}
            (a, b) => panic!("variable {i}: {} by tape, {} by candle", a.is_some(), b.is_some()),
        }
    }
    assert_eq!(ours.0.len(), vars.iter().filter(|v| candles.get(v).is_some()).count());
    // The same one by one; each is complete, as it is spoilt the moment that it has been given.
    let given = one_by_one(vars, &loss);
    for (i, var) in vars.iter().enumerate() {
        match (ours.get(var), given.get(&var.id())) {
            (Some(a), Some(b)) => assert!(gap(a, b) == 0.0, "variable {i}: {} when it is given", gap(a, b)),
            (a, b) => assert!(a.is_none() && b.is_none(), "variable {i} is given in one way only"),
        }
    }
}

/// Gradients as they are given; variables that got theirs are made useless until the end.
fn one_by_one(vars: &[&Var], loss: impl Fn() -> Result<Tensor>) -> HashMap<TensorId, Tensor> {
    let kept: Vec<_> = vars.iter().map(|var| var.as_tensor().copy().unwrap()).collect();
    let mut given = HashMap::new();
    let (value, tape) = record(loss).unwrap();
    tape.backward_each(&value, |id, gradient| {
        let var = vars.iter().find(|var| var.id() == id).unwrap();
        var.set(&(var.ones_like()? * f64::NAN)?)?;
        assert!(given.insert(id, gradient).is_none(), "given twice");
        Ok::<_, candle_core::Error>(())
    })
    .unwrap();
    for (var, value) in vars.iter().zip(&kept) {
        var.set(value).unwrap();
    }
    given
}

#[test]
fn operations_of_both_kinds_mix() {
    let (x, w, unused) = (var(1, &[3, 4]), var(2, &[4, 4]), var(3, &[2]));
    both(&[&x, &w, &unused], || {
        // Ours, candle's, ours; results that are read twice, by either kind; a change of shape; a constant.
        let a = linear(&x, &w, None)?;
        let b = (silu(&a)? * 0.5)?.tanh()?;
        let c = add(&b, &(&a + &b)?)?;
        let d = linear(&c.reshape((2, 6))?.reshape((3, 4))?, &w, None)?;
        let e = add(&d, &random(9, &[3, 4]))?;
        (gelu(&e)? * b)?.sum_all()
    });
}

#[test]
fn what_is_not_contiguous_gets_its_gradient() {
    let (x, w) = (var(1, &[4, 3]), var(2, &[5, 4]));
    both(&[&x, &w], || linear(&x.t()?, &w, None)?.t()?.sqr()?.mean_all());
    let (x, w) = (var(1, &[1, 2, 5, 4]), var(2, &[3, 2, 3, 3]));
    both(&[&x, &w], || {
        let turned = x.transpose(2, 3)?;
        conv2d(&turned.narrow(2, 1, 3)?, &w, None, 1, 1)?.sqr()?.sum_all()
    });
}

#[test]
fn a_loss_of_candles_operations_alone_and_one_that_is_a_variable() {
    let x = var(1, &[3]);
    both(&[&x], || x.sqr()?.sum_all());
    let (value, grads) = gradients(|| Ok::<_, candle_core::Error>(x.as_tensor().clone())).unwrap();
    assert_eq!(value.id(), x.id());
    assert_eq!(grads.get(&x).unwrap().to_vec1::<f32>().unwrap(), [1.0; 3]);
    let (_, grads) = gradients(|| random(1, &[2]).sum_all()).unwrap();
    assert!(grads.0.is_empty());
}

#[test]
fn recomputed_parts_get_the_same_gradients_and_may_be_nested() {
    let (x, w, shared) = (var(1, &[3, 4]), var(2, &[4, 4]), var(3, &[4]));
    let (w_in, shared_in) = (w.as_tensor().clone(), shared.as_tensor().clone());
    let inner = move |t: &[Tensor]| -> Result<Vec<Tensor>> {
        let y = linear(&t[0], &w_in, None)?;
        // One result of ours, one of candle's, one that nothing reads.
        Ok(vec![silu(&y)?, y.broadcast_mul(&shared_in)?, y.exp()?])
    };
    let inner = Rc::new(inner);
    let outer = {
        let inner = Rc::clone(&inner);
        move |t: &[Tensor]| -> Result<Vec<Tensor>> {
            let inner = Rc::clone(&inner);
            let mut made = recomputed(t.to_vec(), move |t| inner(t))?;
            made.truncate(2);
            let last = add(&made[0], &made[1])?;
            Ok(vec![last, t[0].clone()])
        }
    };
    let outer = Rc::new(outer);
    both(&[&x, &w, &shared], || {
        let outer = Rc::clone(&outer);
        let made = recomputed(vec![(x.as_tensor() * 2.0)?], move |t| outer(t))?;
        add(&made[0], &made[1])?.sqr()?.mean_all()
    });
}

#[test]
fn an_error_ends_the_scope() {
    let x = var(1, &[2, 2]);
    let failed = gradients(|| {
        let scope = Scope::enter(Written::Reads(HashSet::new()));
        silu(&x)?;
        drop(scope);
        linear(&x, &random(1, &[2, 3]), None)
    });
    assert!(failed.is_err() && !is_recording());
    let panicked = std::panic::catch_unwind(|| record(|| -> Result<()> { panic!("in the forward pass") }));
    assert!(panicked.is_err() && !is_recording());
    // candle's own again.
    let grads = silu(&x).unwrap().sum_all().unwrap().backward().unwrap();
    assert!(grads.get(&x).is_some());
}
