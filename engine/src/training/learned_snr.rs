//! Weights of the loss by the signal-to-noise ratio that are learned while training (`train.learnable_snr_gos`; ai-toolkit's
//! `LearnableSNRGamma` in `toolkit/train_tools.py`, 27a03a91).
//!
//! The weight of an item is `|gamma / ((snr + offset_1) * scale + offset_2)|`. The four numbers are trained by AdamW, so that the weighted
//! losses of a micro-batch come near the mean of the last losses without weights.

use crate::error::{EngineError, Result};
use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// The file in the run folder with the learned numbers, as ai-toolkit writes it.
pub const LEARNED_SNR_FILE: &str = "learnable_snr.json";

/// The learned numbers, in the order of ai-toolkit's file.
const NAMES: [&str; 4] = ["offset_1", "offset_2", "scale", "gamma"];
const FIRST: [f64; 4] = [0.0, 0.777, 4.14, 2.03];
/// The number of last losses whose mean is the target.
const REMEMBERED: usize = 20;
const LEARNING_RATE: f64 = 0.01;
/// The defaults of torch's AdamW.
const BETAS: [f64; 2] = [0.9, 0.999];
const EPSILON: f64 = 1e-8;
const WEIGHT_DECAY: f64 = 0.01;

/// The learned numbers, their optimizer, and the last losses.
#[derive(Clone, Debug, PartialEq)]
pub struct LearnedSnr {
    values: [f64; 4],
    /// The moving averages of the gradients and of their squares.
    moments: [[f64; 4]; 2],
    updates: u64,
    last_losses: Vec<f64>,
}

impl Default for LearnedSnr {
    fn default() -> Self {
        Self {
            values: FIRST,
            moments: [[0.0; 4]; 2],
            updates: 0,
            last_losses: Vec::new(),
        }
    }
}

impl LearnedSnr {
    /// The denominator of the weight at a signal-to-noise ratio.
    fn denominator(&self, snr: f64) -> f64 {
        let [offset_1, offset_2, scale, _] = self.values;
        (snr + offset_1) * scale + offset_2
    }

    /// The weight of an item.
    fn weight(&self, snr: f64) -> f64 {
        (self.values[3] / self.denominator(snr)).abs()
    }

    /// Trains the numbers with the losses of the items of a micro-batch, then returns their weights. Losses that are not finite train
    /// nothing.
    fn learn(&mut self, losses: &[f64], snr: &[f64]) -> Vec<f64> {
        if losses.iter().all(|loss| loss.is_finite()) {
            self.last_losses.extend_from_slice(losses);
            let surplus = self.last_losses.len().saturating_sub(REMEMBERED);
            self.last_losses.drain(..surplus);
            self.update(losses, snr);
        }
        snr.iter().map(|snr| self.weight(*snr)).collect()
    }

    fn update(&mut self, losses: &[f64], snr: &[f64]) {
        let target = self.last_losses.iter().sum::<f64>() / self.last_losses.len().max(1) as f64;
        let [offset_1, _, scale, gamma] = self.values;
        let mut gradients = [0.0; 4];
        for (loss, snr) in losses.iter().zip(snr) {
            let denominator = self.denominator(*snr);
            let ratio = gamma / denominator;
            // Of the mean of squared differences, by the ratio.
            let outer = 2.0 * (loss * ratio.abs() - target) / losses.len() as f64 * loss * ratio.signum();
            let by_denominator = -outer * ratio / denominator;
            let own = [
                by_denominator * scale,
                by_denominator,
                by_denominator * (snr + offset_1),
                outer / denominator,
            ];
            for (sum, own) in gradients.iter_mut().zip(own) {
                *sum += own;
            }
        }
        if !gradients.iter().all(|gradient| gradient.is_finite()) {
            return;
        }
        self.updates += 1;
        let [first, second] = BETAS.map(|beta| 1.0 - beta.powf(self.updates as f64));
        for (index, gradient) in gradients.into_iter().enumerate() {
            let mean = &mut self.moments[0][index];
            *mean = *mean * BETAS[0] + gradient * (1.0 - BETAS[0]);
            let mean = *mean;
            let square = &mut self.moments[1][index];
            *square = *square * BETAS[1] + gradient * gradient * (1.0 - BETAS[1]);
            let deviation = (*square / second).sqrt() + EPSILON;
            let value = &mut self.values[index];
            *value = *value * (1.0 - LEARNING_RATE * WEIGHT_DECAY) - LEARNING_RATE * (mean / first) / deviation;
        }
    }

    /// The tensor of a checkpoint, float64.
    ///
    /// # Errors
    /// When memory is short.
    pub(super) fn state(&self) -> candle_core::Result<Tensor> {
        let mut numbers = self.values.to_vec();
        numbers.extend(self.moments.concat());
        numbers.push(self.updates as f64);
        numbers.extend(&self.last_losses);
        Tensor::new(numbers, &Device::Cpu)
    }

    /// Reads a tensor of [`Self::state`].
    ///
    /// # Errors
    /// When it has another form, or numbers that are not finite.
    pub(super) fn from_state(tensor: &Tensor) -> Result<Self> {
        let numbers = match (tensor.rank(), tensor.dtype()) {
            (1, DType::F64) => tensor.to_device(&Device::Cpu)?.to_vec1::<f64>()?,
            _ => Vec::new(),
        };
        let wrong =
            || EngineError::bad_input("the checkpoint's state of `learnable_snr_gos` is not one that aitk writes");
        if !numbers.iter().all(|number| number.is_finite()) {
            return Err(wrong());
        }
        match numbers.as_slice() {
            [o1, o2, s, g, m1, m2, m3, m4, v1, v2, v3, v4, updates, last @ ..]
                if last.len() <= REMEMBERED && *updates >= 0.0 =>
            {
                Ok(Self {
                    values: [*o1, *o2, *s, *g],
                    moments: [[*m1, *m2, *m3, *m4], [*v1, *v2, *v3, *v4]],
                    updates: *updates as u64,
                    last_losses: last.to_vec(),
                })
            }
            _ => Err(wrong()),
        }
    }

    /// The learned numbers as ai-toolkit's file has them.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let [offset_1, offset_2, scale, gamma] = self.values;
        json!({"offset_1": offset_1, "offset_2": offset_2, "scale": scale, "gamma": gamma})
    }

    /// Reads the learned numbers of ai-toolkit's file, with a new optimizer. Its oldest form has `offset` for `offset_2`.
    ///
    /// # Errors
    /// When a number is missing or not finite: the text says which.
    pub fn from_json(file: &Value) -> std::result::Result<Self, String> {
        let mut values = FIRST;
        for (value, name) in values.iter_mut().zip(NAMES) {
            let number = match (name, file.get("offset")) {
                ("offset_1", Some(_)) => continue,
                ("offset_2", Some(old)) => old.as_f64(),
                _ => file.get(name).and_then(Value::as_f64),
            };
            *value = number.filter(|number| (*number as f32).is_finite()).ok_or_else(|| {
                format!(
                    "expected an object with the numbers {}; `{name}` is missing or not a finite number",
                    NAMES.join(", ")
                )
            })?;
        }
        Ok(Self {
            values,
            ..Self::default()
        })
    }
}

/// The learned numbers of a run, which its micro-batches share.
#[derive(Clone, Debug, Default)]
pub struct SharedLearnedSnr(Arc<Mutex<LearnedSnr>>);

impl SharedLearnedSnr {
    /// The numbers. A panic of another holder leaves them as they are.
    fn lock(&self) -> MutexGuard<'_, LearnedSnr> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy of the numbers.
    #[must_use]
    pub fn get(&self) -> LearnedSnr {
        self.lock().clone()
    }

    /// Replaces the numbers.
    pub fn set(&self, learned: LearnedSnr) {
        *self.lock() = learned;
    }

    /// The weights of a micro-batch whose items have these signal-to-noise ratios.
    #[must_use]
    pub fn of_batch(&self, snr: Vec<f32>) -> LearnedWeights {
        LearnedWeights {
            learned: self.clone(),
            snr: snr.into_iter().map(f64::from).collect(),
            weights: Arc::default(),
        }
    }
}

/// The learned weights of the items of one micro-batch. They are computed, and the numbers trained, once, even if its loss is computed
/// again.
#[derive(Clone, Debug)]
pub struct LearnedWeights {
    learned: SharedLearnedSnr,
    snr: Vec<f64>,
    weights: Arc<OnceLock<Vec<f32>>>,
}

impl LearnedWeights {
    /// The losses of the items, [b], times their weights.
    ///
    /// # Errors
    /// When there are not as many losses as ratios.
    pub(super) fn weighted(&self, losses: &Tensor) -> Result<Tensor> {
        let values: Vec<f64> = losses
            .detach()
            .to_dtype(DType::F32)?
            .to_vec1::<f32>()?
            .into_iter()
            .map(f64::from)
            .collect();
        if values.len() != self.snr.len() {
            return Err(EngineError::Internal(
                "a micro-batch lacks signal-to-noise ratios".into(),
            ));
        }
        let weights = self.weights.get_or_init(|| {
            let weights = self.learned.lock().learn(&values, &self.snr);
            weights.into_iter().map(|weight| weight as f32).collect()
        });
        let weights = Tensor::from_slice(weights, weights.len(), losses.device())?;
        Ok((losses * weights)?)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::rng::TorchGenerator;
    use crate::samplers::{NoiseSchedule, SamplerParams};

    /// The numbers are those that `tests/reference/make_loss_targets.py` prints.
    #[test]
    fn what_is_learned_is_what_torch_learns() {
        let params = json!({"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000});
        let schedule = NoiseSchedule::new(&SamplerParams::from_json(&params).unwrap()).unwrap();
        for (updates, values, weights) in [
            (1, [-0.01, 0.766922, 4.129586, 2.039797], [2.715848, 0.340782, 0.619163]),
            (
                40,
                [0.14954, 0.922814, 4.250119, 1.870861],
                [0.46371, 0.634414, 1.107953],
            ),
        ] {
            let shared = SharedLearnedSnr::default();
            let mut generator = TorchGenerator::manual_seed(13);
            let mut last = Vec::new();
            for _ in 0..updates {
                let losses = Tensor::new(generator.rand(3), &Device::Cpu).unwrap();
                let timesteps = generator.randint(0, 1000, 3).into_iter();
                let batch = shared.of_batch(timesteps.map(|t| schedule.snr(t).unwrap()).collect());
                let weighted = batch.weighted(&losses).unwrap();
                // A second pass over the same micro-batch learns nothing.
                let again = batch.weighted(&losses).unwrap().to_vec1::<f32>().unwrap();
                assert_eq!(weighted.to_vec1::<f32>().unwrap(), again);
                last = (weighted / losses).unwrap().to_vec1::<f32>().unwrap();
            }
            let learned = shared.get();
            for (found, expected) in learned.values.into_iter().zip(values) {
                assert!((found - expected).abs() < 1e-5, "{updates}: {found} {expected}");
            }
            for (found, expected) in last.into_iter().zip(weights) {
                assert!(
                    (f64::from(found) / expected - 1.0).abs() < 1e-4,
                    "{updates}: {found} {expected}"
                );
            }
            assert_eq!(LearnedSnr::from_state(&learned.state().unwrap()).unwrap(), learned);
            let mut other = learned.clone();
            (other.moments, other.updates, other.last_losses) = (Default::default(), 0, Vec::new());
            assert_eq!(LearnedSnr::from_json(&learned.to_json()).unwrap(), other);
        }
    }

    #[test]
    fn losses_that_are_not_finite_teach_nothing() {
        let mut learned = LearnedSnr::default();
        assert!(learned.learn(&[f64::NAN, 1.0], &[1.0, 2.0])[0].is_finite());
        assert_eq!(learned, LearnedSnr::default());
    }

    #[test]
    fn files_of_ai_toolkit_are_read() {
        let old = LearnedSnr::from_json(&json!({"offset": 0.5, "scale": 2, "gamma": 3.0})).unwrap();
        assert_eq!(old.values, [0.0, 0.5, 2.0, 3.0]);
        for wrong in [
            json!({"offset_1": 1, "offset_2": 1, "scale": "x", "gamma": 1}),
            json!([1]),
        ] {
            assert!(
                LearnedSnr::from_json(&wrong)
                    .unwrap_err()
                    .contains("offset_1, offset_2")
            );
        }
        for wrong in [vec![1.0; 12], vec![1.0; 34], vec![f64::NAN; 13]] {
            assert!(LearnedSnr::from_state(&Tensor::new(wrong, &Device::Cpu).unwrap()).is_err());
        }
    }
}
