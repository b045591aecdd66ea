//! Compares the gradients of the tape with candle's, on graphs that mix operations of both kinds.

use super::*;
use crate::nn::{add, conv2d, gelu, linear, silu};
use crate::testing::{gap, in_portable_mode};
use candle_core::Device;
use std::rc::Rc;

fn random(seed: u64, shape: &[usize]) -> Tensor {
    let mut generator = crate::rng::TorchGenerator::manual_seed(seed);
    Tensor::from_vec(generator.randn(shape.iter().product()), shape, &Device::Cpu).unwrap()
}

fn var(seed: u64, shape: &[usize]) -> Var {
    Var::from_tensor(&random(seed, shape)).unwrap()
}

/// Checks that the tape and candle compute the same gradients of `loss`.
fn compare_gradients(vars: &[&Var], loss: impl Fn() -> Result<Tensor>) {
    let expected = loss().unwrap().backward().unwrap();
    let (value, ours) = gradients(&loss).unwrap();
    assert_eq!(
        value.to_scalar::<f32>().unwrap(),
        loss().unwrap().to_scalar::<f32>().unwrap()
    );
    for (i, var) in vars.iter().enumerate() {
        match (ours.get(var), expected.get(var)) {
            (Some(a), Some(b)) => assert!(gap(a, b) < 1e-4, "variable {i}: {}", gap(a, b)),
            (None, None) => {}
            (a, b) => panic!("variable {i}: {} by tape, {} by candle", a.is_some(), b.is_some()),
        }
    }
    assert_eq!(ours.0.len(), vars.iter().filter(|v| expected.get(v).is_some()).count());
    // Each gradient is complete when `take` gets it: the variable is overwritten at that moment.
    let taken = backward_each(vars, &loss);
    for (i, var) in vars.iter().enumerate() {
        match (ours.get(var), taken.get(&var.id())) {
            (Some(a), Some(b)) => assert!(gap(a, b) == 0.0, "variable {i}: {} with backward_each", gap(a, b)),
            (a, b) => assert!(
                a.is_none() && b.is_none(),
                "variable {i}: only one of backward and backward_each has a gradient"
            ),
        }
    }
}

/// The gradients that [`Tape::backward_each`] passes on. Each variable is NaN from then on, until the end of this
/// function.
fn backward_each(vars: &[&Var], loss: impl Fn() -> Result<Tensor>) -> HashMap<TensorId, Tensor> {
    let values: Vec<_> = vars.iter().map(|var| var.as_tensor().copy().unwrap()).collect();
    let mut taken = HashMap::new();
    let (value, tape) = record(loss).unwrap();
    tape.backward_each(&value, |id, gradient| {
        let var = vars.iter().find(|var| var.id() == id).unwrap();
        var.set(&(var.ones_like()? * f64::NAN)?)?;
        assert!(taken.insert(id, gradient).is_none(), "passed on twice");
        Ok::<_, candle_core::Error>(())
    })
    .unwrap();
    for (var, value) in vars.iter().zip(&values) {
        var.set(value).unwrap();
    }
    taken
}

#[test]
fn own_operations_and_candles_can_be_mixed() {
    let (x, w, unused) = (var(1, &[3, 4]), var(2, &[4, 4]), var(3, &[2]));
    compare_gradients(&[&x, &w, &unused], || {
        // Own operations between candle's; results that operations of both kinds read; a reshape; a constant.
        let a = linear(&x, &w, None)?;
        let b = (silu(&a)? * 0.5)?.tanh()?;
        let c = add(&b, &(&a + &b)?)?;
        let d = linear(&c.reshape((2, 6))?.reshape((3, 4))?, &w, None)?;
        let e = add(&d, &random(9, &[3, 4]))?;
        (gelu(&e)? * b)?.sum_all()
    });
}

/// The gradients of a product are computed from its factors, which are variables to candle.
#[test]
fn gradients_keep_no_graph_in_memory() {
    let (x, y) = (var(1, &[4, 6]), var(2, &[4, 6]));
    let (_, ours) = gradients(|| (silu(&x)? * silu(&y)?)?.sum_all()).unwrap();
    for var in [&x, &y] {
        assert!(!ours.get(var).unwrap().track_op());
    }
}

#[test]
fn inputs_that_are_not_contiguous_get_gradients() {
    let (x, w) = (var(1, &[4, 3]), var(2, &[5, 4]));
    compare_gradients(&[&x, &w], || linear(&x.t()?, &w, None)?.t()?.sqr()?.mean_all());
    let (x, w) = (var(1, &[1, 2, 5, 4]), var(2, &[3, 2, 3, 3]));
    compare_gradients(&[&x, &w], || {
        let transposed = x.transpose(2, 3)?;
        conv2d(&transposed.narrow(2, 1, 3)?, &w, None, 1, 1)?.sqr()?.sum_all()
    });
}

#[test]
fn a_loss_may_have_only_candles_operations_or_be_a_variable() {
    let x = var(1, &[3]);
    compare_gradients(&[&x], || x.sqr()?.sum_all());
    let (value, grads) = gradients(|| Ok::<_, candle_core::Error>(x.as_tensor().clone())).unwrap();
    assert_eq!(value.id(), x.id());
    assert_eq!(grads.get(&x).unwrap().to_vec1::<f32>().unwrap(), [1.0; 3]);
    let (_, grads) = gradients(|| random(1, &[2]).sum_all()).unwrap();
    assert!(grads.0.is_empty());
}

#[test]
fn nested_checkpoints_get_the_same_gradients() {
    let (x, w, shared) = (var(1, &[3, 4]), var(2, &[4, 4]), var(3, &[4]));
    let (w_in, shared_in) = (w.as_tensor().clone(), shared.as_tensor().clone());
    let inner = move |t: &[Tensor]| -> Result<Vec<Tensor>> {
        let y = linear(&t[0], &w_in, None)?;
        // An output of an own operation, one of candle's, and one that nothing reads.
        Ok(vec![silu(&y)?, y.broadcast_mul(&shared_in)?, y.exp()?])
    };
    let inner = Rc::new(inner);
    let outer = {
        let inner = Rc::clone(&inner);
        move |t: &[Tensor]| -> Result<Vec<Tensor>> {
            let inner = Rc::clone(&inner);
            let mut outputs = checkpoint(t.to_vec(), move |t| inner(t))?;
            outputs.truncate(2);
            let last = add(&outputs[0], &outputs[1])?;
            Ok(vec![last, t[0].clone()])
        }
    };
    let outer = Rc::new(outer);
    compare_gradients(&[&x, &w, &shared], || {
        let outer = Rc::clone(&outer);
        let outputs = checkpoint(vec![(x.as_tensor() * 2.0)?], move |t| outer(t))?;
        add(&outputs[0], &outputs[1])?.sqr()?.mean_all()
    });
}

#[test]
fn an_error_or_a_panic_ends_the_recording() {
    let x = var(1, &[2, 2]);
    let failed = gradients(|| {
        let scope = Scope::enter(Recording::Variables(HashSet::new()));
        silu(&x)?;
        drop(scope);
        linear(&x, &random(1, &[2, 3]), None)
    });
    assert!(failed.is_err() && !is_recording());
    let panicked = std::panic::catch_unwind(|| record(|| -> Result<()> { panic!("in the forward pass") }));
    assert!(panicked.is_err() && !is_recording());
    // Afterwards candle's backward pass works again.
    let grads = silu(&x).unwrap().sum_all().unwrap().backward().unwrap();
    assert!(grads.get(&x).is_some());
}

in_portable_mode! {
    gradients_keep_no_graph_in_memory,
    own_operations_and_candles_can_be_mixed,
    inputs_that_are_not_contiguous_get_gradients,
    a_loss_may_have_only_candles_operations_or_be_a_variable,
    nested_checkpoints_get_the_same_gradients,
    an_error_or_a_panic_ends_the_recording,
}

#[test]
fn a_gradient_is_taken_once() {
    let x = Var::new(&[1f32, 2.0], &Device::Cpu).unwrap();
    let (loss, tape) = record(|| x.as_tensor().sqr()?.sum_all()).unwrap();
    let mut gradients = tape.backward(&loss).unwrap();
    let taken = gradients.take(x.as_tensor()).unwrap();
    assert_eq!(taken.to_vec1::<f32>().unwrap(), [2.0, 4.0]);
    assert!(gradients.take(x.as_tensor()).is_none() && gradients.get(x.as_tensor()).is_none());
}
