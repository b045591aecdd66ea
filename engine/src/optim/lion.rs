//! Lion (Chen et al., arXiv 2302.06675) as lion-pytorch 0.2.5 and, with 8-bit state, bitsandbytes compute it.

use super::blockwise::Map;
use super::fused;
use super::kernels::for_every_unit;
use super::moment::Moment;
use super::saved::Saved;
use super::{Build, Grads, OptimError, Optimizer, Param, Precision, one_each};
use aitk_common::job::optimizer::OptimizerName;
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;

/// `lion`, `lion8bit`.
pub(super) fn build(input: Build) -> Result<Box<dyn Optimizer>, OptimError> {
    let of = &input.options;
    let (beta1, beta2) = of.pair("betas", (0.9, 0.99));
    let mut weight_decay = of.number("weight_decay", 0.0);
    // lion-pytorch's switch: the decay no longer grows with the learning rate that was configured.
    if of.flag("decoupled_weight_decay", false) && input.lr > 0.0 {
        weight_decay /= input.lr;
    }
    let precision = if matches!(input.name, OptimizerName::Lion8Bit) {
        Precision::eight_bits(of)
    } else {
        Precision::Full
    };
    let means = input
        .params
        .iter()
        .map(|p| Moment::zeros(p, precision, Map::signed()))
        .collect::<Result<_, _>>()?;
    Ok(Box::new(Lion {
        beta1,
        beta2,
        weight_decay,
        precision,
        params: input.params,
        means,
    }))
}

/// ```text
/// p <- p * (1 - lr * weight_decay)
/// p <- p - lr * sign(m * beta1 + g * (1 - beta1))
/// m <- m * beta2 + g * (1 - beta2)
/// ```
struct Lion {
    beta1: f64,
    beta2: f64,
    weight_decay: f64,
    precision: Precision,
    params: Vec<Param>,
    means: Vec<Moment>,
}

fn key(param: &Param) -> String {
    format!("{}.exp_avg", param.name)
}

for_every_unit! {
    fn kernel(p: &mut [f32], g: &[f32], m: &mut [f32], keep: f32, lr: f32, betas: [f32; 2], rests: [f32; 2]) {
        let ([beta1, beta2], [rest1, rest2]) = (betas, rests);
        for ((p, g), m) in p.iter_mut().zip(g).zip(m) {
            let direction = *m * beta1 + g * rest1;
            let up = if direction > 0.0 { lr } else { 0.0 };
            let down = if direction < 0.0 { lr } else { 0.0 };
            *p = *p * keep - (up - down);
            *m = *m * beta2 + g * rest2;
        }
    }
}

impl Lion {
    /// The same by the tensor library's operations, for other devices.
    fn composed(&mut self, at: usize, grad: &Tensor, keep: f64, lr: f64) -> Result<(), OptimError> {
        let (var, mean) = (&self.params[at].var, &mut self.means[at]);
        let grad = grad.to_dtype(DType::F32)?.detach();
        let m = mean.read()?;
        let direction = ((&m * self.beta1)? + (&grad * (1.0 - self.beta1))?)?.sign()?;
        var.set(&((var.as_tensor().detach() * keep)? - (direction * lr)?)?)?;
        mean.write(((m * self.beta2)? + (grad * (1.0 - self.beta2))?)?)
    }
}

impl Optimizer for Lion {
    fn step(&mut self, grads: &Grads, lr: f64) -> Result<(), OptimError> {
        one_each(grads, &self.params)?;
        let keep = 1.0 - lr * self.weight_decay;
        let betas = [self.beta1 as f32, self.beta2 as f32];
        let rests = [(1.0 - self.beta1) as f32, (1.0 - self.beta2) as f32];
        for (at, grad) in grads.iter().enumerate() {
            let Some(grad) = grad else { continue };
            if fused::takes(&self.params[at]) {
                fused::update(&self.params[at], grad, [&mut self.means[at]], |p, g, [m]| {
                    kernel(p, g, m, keep as f32, lr as f32, betas, rests);
                })?;
            } else {
                self.composed(at, grad, keep, lr)?;
            }
        }
        Ok(())
    }

    fn state(&self) -> Result<BTreeMap<String, Tensor>, OptimError> {
        let mut out = BTreeMap::new();
        for (param, mean) in self.params.iter().zip(&self.means) {
            mean.save(&key(param), &mut out);
        }
        Ok(out)
    }

    fn load_state(&mut self, state: &BTreeMap<String, Tensor>) -> Result<(), OptimError> {
        let mut saved = Saved::new(state);
        let means = self
            .params
            .iter()
            .map(|p| Moment::load(&mut saved, &key(p), p, self.precision, Map::signed()))
            .collect::<Result<_, _>>()?;
        saved.done()?;
        self.means = means;
        Ok(())
    }
}
