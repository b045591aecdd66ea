//! Classifier-free guidance while training (`train.do_cfg`): the loss is that of the guided prediction.

use crate::error::Result;
use crate::families::{Conditioning, Model};
use candle_core::Tensor;

/// The scale of the guidance, and how its result is rescaled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrainingCfg {
    /// `train.cfg_scale`, or a random one.
    pub scale: f64,
    /// `train.cfg_rescale`: the result gets the mean and the standard deviation that this scale would give.
    pub rescale: f64,
}

impl TrainingCfg {
    /// Predicts with guidance, both with gradients. `unconditional`: the conditioning of as many items without a prompt.
    ///
    /// # Errors
    /// When shapes do not match.
    pub fn predict(
        self,
        model: &dyn Model,
        latents: &[Tensor],
        timesteps: &Tensor,
        [unconditional, conditional]: [&Conditioning; 2],
    ) -> Result<Vec<Tensor>> {
        if self.scale == 1.0 && self.rescale == 1.0 {
            return model.predict(latents, timesteps, conditional);
        }
        let items = timesteps.dim(0)?;
        let pairs: Vec<[Tensor; 2]> = if model.sequential_cfg() {
            let without = model.predict(latents, timesteps, unconditional)?;
            let with = model.predict(latents, timesteps, conditional)?;
            without
                .into_iter()
                .zip(with)
                .map(|(without, with)| [without, with])
                .collect()
        } else {
            let twice = latents.iter().map(|latent| Tensor::cat(&[latent, latent], 0));
            let both = model.predict(
                &twice.collect::<candle_core::Result<Vec<_>>>()?,
                &Tensor::cat(&[timesteps, timesteps], 0)?,
                &Conditioning::cat(&[unconditional, conditional])?,
            )?;
            let halves = both
                .iter()
                .map(|both| Ok([both.narrow(0, 0, items)?, both.narrow(0, items, items)?]));
            halves.collect::<candle_core::Result<_>>()?
        };
        pairs.iter().map(|pair| self.combine(pair)).collect()
    }

    /// The guided prediction (`predict_noise` in ai-toolkit's `toolkit/models/base_model.py`).
    fn combine(self, [unconditional, conditional]: &[Tensor; 2]) -> Result<Tensor> {
        let guided = |scale: f64, unconditional: &Tensor, conditional: &Tensor| -> candle_core::Result<Tensor> {
            unconditional + ((conditional - unconditional)? * scale)?
        };
        let result = guided(self.scale, unconditional, conditional)?;
        if self.rescale == self.scale {
            return Ok(result);
        }
        let target = guided(self.rescale, &unconditional.detach(), &conditional.detach())?;
        let [mean, deviation] = mean_and_deviation(&result.detach())?;
        let [target_mean, target_deviation] = mean_and_deviation(&target)?;
        let normal = result.broadcast_sub(&mean)?.broadcast_div(&deviation)?;
        Ok(normal.broadcast_mul(&target_deviation)?.broadcast_add(&target_mean)?)
    }
}

/// The mean and the standard deviation of each item, [b, 1, …].
fn mean_and_deviation(x: &Tensor) -> candle_core::Result<[Tensor; 2]> {
    let flat = x.flatten_from(1)?;
    let count = flat.dim(1)?.max(2);
    let mean = flat.mean_keepdim(1)?;
    let squares = flat.broadcast_sub(&mean)?.sqr()?.sum_keepdim(1)?;
    let deviation = (squares / (count - 1) as f64)?.sqrt()?;
    let mut per_item = vec![1; x.rank()];
    per_item[0] = x.dim(0)?;
    Ok([mean.reshape(per_item.as_slice())?, deviation.reshape(per_item)?])
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::rng::generator_for;
    use candle_core::Device;

    #[test]
    fn a_guided_prediction_gets_the_mean_and_deviation_of_another_scale() {
        let mut generator = generator_for(5, "cfg", 0, 0);
        let mut random = || Tensor::from_vec(generator.randn(2 * 3 * 4), (2, 3, 4), &Device::Cpu).unwrap();
        let pair = [random(), random()];
        let rows = |t: &Tensor| {
            t.flatten_from(1)
                .unwrap()
                .to_dtype(candle_core::DType::F64)
                .unwrap()
                .to_vec2::<f64>()
                .unwrap()
        };
        let cfg = |scale, rescale| rows(&TrainingCfg { scale, rescale }.combine(&pair).unwrap());
        let [without, with] = pair.each_ref().map(rows);
        let plain = |scale: f64, item: usize| -> Vec<f64> {
            let pairs = without[item].iter().zip(&with[item]);
            pairs.map(|(a, b)| a + scale * (b - a)).collect()
        };
        let statistics = |row: &[f64]| {
            let mean = row.iter().sum::<f64>() / row.len() as f64;
            let squares: f64 = row.iter().map(|x| (x - mean).powi(2)).sum();
            (mean, (squares / (row.len() - 1) as f64).sqrt())
        };
        for item in 0..2 {
            let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-5, "{a} and {b}");
            for (found, expected) in cfg(3.0, 3.0)[item].iter().zip(plain(3.0, item)) {
                close(*found, expected);
            }
            let (mean, deviation) = statistics(&plain(3.0, item));
            let (target_mean, target_deviation) = statistics(&plain(1.5, item));
            for (found, expected) in cfg(3.0, 1.5)[item].iter().zip(plain(3.0, item)) {
                close(*found, (expected - mean) / deviation * target_deviation + target_mean);
            }
        }
    }
}
