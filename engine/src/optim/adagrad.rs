//! Adagrad as `torch.optim.Adagrad` computes it.

use super::blockwise::Map;
use super::fused;
use super::kernels::for_every_unit;
use super::moment::Moment;
use super::saved::{self, Saved};
use super::{Build, Grads, OptimError, Optimizer, Param, Precision, one_each};
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;

/// `adagrad`.
pub(super) fn build(input: Build) -> Result<Box<dyn Optimizer>, OptimError> {
    let of = &input.options;
    let first = of.number("initial_accumulator_value", 0.0);
    let state = |param: &Param| {
        let mut sum = zeros(param)?;
        if first != 0.0 {
            let var = &param.var;
            sum.write(Tensor::full(first as f32, var.shape(), var.device())?)?;
        }
        Ok::<_, OptimError>(State { step: 0, sum })
    };
    let states = input.params.iter().map(state).collect::<Result<_, _>>()?;
    Ok(Box::new(Adagrad {
        lr_decay: of.number("lr_decay", 0.0),
        weight_decay: of.number("weight_decay", 0.0),
        eps: of.number("eps", 1e-10),
        params: input.params,
        states,
    }))
}

fn zeros(param: &Param) -> Result<Moment, OptimError> {
    Moment::zeros(param, Precision::Full, Map::unsigned())
}

struct State {
    step: u64,
    /// Of squared gradients.
    sum: Moment,
}

/// ```text
/// g <- g + weight_decay * p
/// s <- s + g * g
/// p <- p - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)
/// ```
struct Adagrad {
    lr_decay: f64,
    weight_decay: f64,
    eps: f64,
    params: Vec<Param>,
    states: Vec<State>,
}

for_every_unit! {
    fn kernel(p: &mut [f32], g: &[f32], sum: &mut [f32], decay: f32, eps: f32, lr: f32) {
        for ((p, g), sum) in p.iter_mut().zip(g).zip(sum) {
            let g = g + *p * decay;
            *sum += g * g;
            *p -= g * lr / (sum.sqrt() + eps);
        }
    }
}

impl Adagrad {
    /// The same by the tensor library's operations, for other devices.
    fn composed(&mut self, at: usize, grad: &Tensor, lr: f64) -> Result<(), OptimError> {
        let (var, state) = (&self.params[at].var, &mut self.states[at]);
        let p = var.as_tensor().detach();
        let grad = (grad.to_dtype(DType::F32)?.detach() + (&p * self.weight_decay)?)?;
        let sum = (state.sum.read()? + grad.sqr()?)?;
        let update = ((grad * lr)? / (sum.sqrt()? + self.eps)?)?;
        var.set(&(p - update)?)?;
        state.sum.write(sum)
    }
}

impl Optimizer for Adagrad {
    fn step(&mut self, grads: &Grads, lr: f64) -> Result<(), OptimError> {
        one_each(grads, &self.params)?;
        let (decay, eps) = (self.weight_decay as f32, self.eps as f32);
        for (at, grad) in grads.iter().enumerate() {
            let Some(grad) = grad else { continue };
            let state = &mut self.states[at];
            let lr = lr / (1.0 + state.step as f64 * self.lr_decay);
            state.step += 1;
            if fused::takes(&self.params[at]) {
                fused::update(&self.params[at], grad, [&mut state.sum], |p, g, [sum]| {
                    kernel(p, g, sum, decay, eps, lr as f32);
                })?;
            } else {
                self.composed(at, grad, lr)?;
            }
        }
        Ok(())
    }

    fn state(&self) -> Result<BTreeMap<String, Tensor>, OptimError> {
        let mut out = BTreeMap::new();
        for (param, state) in self.params.iter().zip(&self.states) {
            out.insert(format!("{}.step", param.name), saved::count(state.step)?);
            state.sum.save(&format!("{}.sum", param.name), &mut out);
        }
        Ok(out)
    }

    fn load_state(&mut self, state: &BTreeMap<String, Tensor>) -> Result<(), OptimError> {
        let mut saved = Saved::new(state);
        let mut states = Vec::with_capacity(self.params.len());
        for param in &self.params {
            let name = |part: &str| format!("{}.{part}", param.name);
            states.push(State {
                step: saved.count(&name("step"))?,
                sum: Moment::load(&mut saved, &name("sum"), param, Precision::Full, Map::unsigned())?,
            });
        }
        saved.done()?;
        self.states = states;
        Ok(())
    }
}
