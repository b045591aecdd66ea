//! Adagrad as in `torch.optim.Adagrad`.

use super::blockwise::QuantMap;
use super::fused;
use super::kernels::multiversion;
use super::moment::Moment;
use super::moment::Precision;
use super::optimizer::{Grads, OptimError, Optimizer, OptimizerSpec, Param, check_grad_count};
use super::saved::{self, SavedState};
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;

/// `adagrad`.
pub(super) fn build(spec: OptimizerSpec) -> Result<Box<dyn Optimizer>, OptimError> {
    let options = &spec.options;
    let initial_sum = options.number("initial_accumulator_value", 0.0);
    let state = |param: &Param| {
        let mut sum = zeros(param)?;
        if initial_sum != 0.0 {
            let var = &param.var;
            sum.set(Tensor::full(initial_sum as f32, var.shape(), var.device())?)?;
        }
        Ok::<_, OptimError>(State { step: 0, sum })
    };
    let states = spec.params.iter().map(state).collect::<Result<_, _>>()?;
    Ok(Box::new(Adagrad {
        lr_decay: options.number("lr_decay", 0.0),
        weight_decay: options.number("weight_decay", 0.0),
        eps: options.number("eps", 1e-10),
        params: spec.params,
        states,
    }))
}

fn zeros(param: &Param) -> Result<Moment, OptimError> {
    Moment::zeros(param, Precision::Float32, QuantMap::unsigned())
}

struct State {
    step: u64,
    /// The sum of squared gradients.
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

multiversion! {
    fn kernel(p: &mut [f32], g: &[f32], sum: &mut [f32], decay: f32, eps: f32, lr: f32) {
        for ((p, g), sum) in p.iter_mut().zip(g).zip(sum) {
            let g = g + *p * decay;
            *sum += g * g;
            *p -= g * lr / (sum.sqrt() + eps);
        }
    }
}

impl Adagrad {
    /// The same update with candle's operations, for other devices.
    fn update_with_tensor_ops(&mut self, index: usize, grad: &Tensor, lr: f64) -> Result<(), OptimError> {
        let (param, state) = (&self.params[index], &mut self.states[index]);
        let p = param.value()?;
        let grad = (grad.to_dtype(DType::F32)?.detach() + (&p * self.weight_decay)?)?;
        let sum = (state.sum.to_f32()? + grad.sqr()?)?;
        let update = ((grad * lr)? / (sum.sqrt()? + self.eps)?)?;
        param.set(&(p - update)?)?;
        state.sum.set(sum)
    }
}

impl Optimizer for Adagrad {
    fn step(&mut self, grads: &Grads, lr: f64) -> Result<(), OptimError> {
        check_grad_count(grads, &self.params)?;
        let (decay, eps) = (self.weight_decay as f32, self.eps as f32);
        for (index, grad) in grads.iter().enumerate() {
            let Some(grad) = grad else { continue };
            let state = &mut self.states[index];
            let lr = lr / (1.0 + state.step as f64 * self.lr_decay);
            state.step += 1;
            if fused::is_supported(&self.params[index]) {
                fused::update(&self.params[index], grad, [&mut state.sum], |p, g, [sum]| {
                    kernel(p, g, sum, decay, eps, lr as f32);
                })?;
            } else {
                self.update_with_tensor_ops(index, grad, lr)?;
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
        let mut saved = SavedState::new(state);
        let mut states = Vec::with_capacity(self.params.len());
        for param in &self.params {
            let name = |suffix: &str| format!("{}.{suffix}", param.name);
            states.push(State {
                step: saved.count(&name("step"))?,
                sum: Moment::load(
                    &mut saved,
                    &name("sum"),
                    param,
                    Precision::Float32,
                    QuantMap::unsigned(),
                )?,
            });
        }
        saved.finish()?;
        self.states = states;
        Ok(())
    }
}
