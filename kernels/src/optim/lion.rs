//! Lion (Chen et al., arXiv 2302.06675) as in lion-pytorch 0.2.5, and with 8-bit state as in bitsandbytes.

use super::blockwise::QuantMap;
use super::fused;
use super::kernels::multiversion;
use super::moment::Moment;
use super::moment::Precision;
use super::optimizer::{Grads, OptimError, Optimizer, OptimizerSpec, Param, check_grad_count};
use super::saved::SavedState;
use aitk_common::job::optimizer::OptimizerName;
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;

/// `lion`, `lion8bit`.
pub(super) fn build(spec: OptimizerSpec) -> Result<Box<dyn Optimizer>, OptimError> {
    let options = &spec.options;
    let (beta1, beta2) = options.pair("betas", (0.9, 0.99));
    let mut weight_decay = options.number("weight_decay", 0.0);
    // lion-pytorch's option: the decay does not scale with the configured learning rate.
    if options.flag("decoupled_weight_decay", false) && spec.lr > 0.0 {
        weight_decay /= spec.lr;
    }
    let precision = if matches!(spec.name, OptimizerName::Lion8Bit) {
        Precision::eight_bit(options)
    } else {
        Precision::Float32
    };
    let moments = spec
        .params
        .iter()
        .map(|p| Moment::zeros(p, precision, QuantMap::signed()))
        .collect::<Result<_, _>>()?;
    Ok(Box::new(Lion {
        beta1,
        beta2,
        weight_decay,
        precision,
        params: spec.params,
        moments,
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
    moments: Vec<Moment>,
}

fn state_key(param: &Param) -> String {
    format!("{}.exp_avg", param.name)
}

multiversion! {
    fn kernel(p: &mut [f32], g: &[f32], m: &mut [f32], param_scale: f32, lr: f32, betas: [[f32; 2]; 2]) {
        let [[beta1, beta2], [one_minus_beta1, one_minus_beta2]] = betas;
        for ((p, g), m) in p.iter_mut().zip(g).zip(m) {
            let direction = *m * beta1 + g * one_minus_beta1;
            let up = if direction > 0.0 { lr } else { 0.0 };
            let down = if direction < 0.0 { lr } else { 0.0 };
            *p = *p * param_scale - (up - down);
            *m = *m * beta2 + g * one_minus_beta2;
        }
    }
}

impl Lion {
    /// The same update with candle's operations, for other devices.
    fn update_with_tensor_ops(
        &mut self,
        index: usize,
        grad: &Tensor,
        param_scale: f64,
        lr: f64,
    ) -> Result<(), OptimError> {
        let (param, moment) = (&self.params[index], &mut self.moments[index]);
        let grad = grad.to_dtype(DType::F32)?.detach();
        let m = moment.to_f32()?;
        let direction = ((&m * self.beta1)? + (&grad * (1.0 - self.beta1))?)?.sign()?;
        param.set(&((param.value()? * param_scale)? - (direction * lr)?)?)?;
        moment.set(((m * self.beta2)? + (grad * (1.0 - self.beta2))?)?)
    }
}

impl Optimizer for Lion {
    fn step(&mut self, grads: &Grads, lr: f64) -> Result<(), OptimError> {
        check_grad_count(grads, &self.params)?;
        let param_scale = 1.0 - lr * self.weight_decay;
        let betas = [
            [self.beta1 as f32, self.beta2 as f32],
            [(1.0 - self.beta1) as f32, (1.0 - self.beta2) as f32],
        ];
        for (index, grad) in grads.iter().enumerate() {
            let Some(grad) = grad else { continue };
            if fused::is_supported(&self.params[index]) {
                fused::update(&self.params[index], grad, [&mut self.moments[index]], |p, g, [m]| {
                    kernel(p, g, m, param_scale as f32, lr as f32, betas);
                })?;
            } else {
                self.update_with_tensor_ops(index, grad, param_scale, lr)?;
            }
        }
        Ok(())
    }

    fn state(&self) -> Result<BTreeMap<String, Tensor>, OptimError> {
        let mut out = BTreeMap::new();
        for (param, moment) in self.params.iter().zip(&self.moments) {
            moment.save(&state_key(param), &mut out);
        }
        Ok(out)
    }

    fn load_state(&mut self, state: &BTreeMap<String, Tensor>) -> Result<(), OptimError> {
        let mut saved = SavedState::new(state);
        let moments = self
            .params
            .iter()
            .map(|p| Moment::load(&mut saved, &state_key(p), p, self.precision, QuantMap::signed()))
            .collect::<Result<_, _>>()?;
        saved.finish()?;
        self.moments = moments;
        Ok(())
    }
}
