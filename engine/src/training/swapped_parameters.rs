//! Trains a changing share of the parameters (`train.do_paramiter_swapping`; `swap_paramiters` in ai-toolkit's
//! `toolkit/optimizers/adafactor.py`, 27a03a91).

use crate::error::{EngineError, Result};
use crate::rng::generator_for;

/// Which parameters each step trains: the first of a random order that together have fewer elements than the share.
#[derive(Clone, Debug, PartialEq)]
pub struct SwappedParameters {
    seed: u64,
    /// The number of elements of each parameter.
    sizes: Vec<usize>,
    /// The number of elements that a step does not reach.
    target: usize,
}

impl SwappedParameters {
    /// A share of parameters with this many elements each. `seed`: that of the run.
    ///
    /// # Errors
    /// When no parameter would ever be trained.
    pub fn new(sizes: Vec<usize>, share: f64, seed: u64) -> Result<Self> {
        let total: usize = sizes.iter().sum();
        let target = (total as f64 * share) as usize;
        let smallest = sizes.iter().copied().min().unwrap_or(0);
        if smallest >= target {
            return Err(EngineError::bad_input(format!(
                "train.paramiter_swapping_factor: {share} of the {total} trained numbers are {target}, and the smallest trained tensor has \
                 {smallest}: nothing would be trained. Use a larger share"
            )));
        }
        Ok(Self { seed, sizes, target })
    }

    /// Whether each parameter is trained in step number `step`. A function of the seed and the step, so that a resumed run chooses as
    /// an uninterrupted one.
    pub(super) fn trained_in(&self, step: u64) -> Vec<bool> {
        let mut trained = vec![false; self.sizes.len()];
        let mut sum = 0;
        for index in generator_for(self.seed, "swap", step, 0).randperm(self.sizes.len()) {
            let index = index as usize;
            sum += self.sizes.get(index).copied().unwrap_or(0);
            if sum >= self.target {
                break;
            }
            if let Some(trained) = trained.get_mut(index) {
                *trained = true;
            }
        }
        trained
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn each_step_trains_other_parameters_up_to_the_share() {
        let sizes: Vec<usize> = (1..=40).collect();
        let swapped = SwappedParameters::new(sizes.clone(), 0.25, 7).unwrap();
        let mut times = vec![0; 40];
        for step in 0..200 {
            let trained = swapped.trained_in(step);
            assert_eq!(trained, swapped.trained_in(step));
            let sum: usize = trained
                .iter()
                .zip(&sizes)
                .filter(|(on, _)| **on)
                .map(|(_, size)| size)
                .sum();
            // 820 numbers; the next parameter would reach 205.
            assert!(sum < 205, "{sum}");
            times
                .iter_mut()
                .zip(&trained)
                .for_each(|(times, on)| *times += usize::from(*on));
        }
        assert!(times.iter().all(|times| (15..85).contains(times)), "{times:?}");
        assert_ne!(swapped.trained_in(0), swapped.trained_in(1));
        assert_ne!(
            swapped.trained_in(0),
            SwappedParameters::new(sizes.clone(), 0.25, 8).unwrap().trained_in(0)
        );
        // As in ai-toolkit, the parameter that reaches the whole is not trained.
        let all = SwappedParameters::new(sizes, 1.0, 7).unwrap().trained_in(3);
        assert_eq!(all.iter().filter(|on| **on).count(), 39);
    }

    #[test]
    fn a_share_below_every_parameter_is_refused() {
        let error = SwappedParameters::new(vec![50, 60], 0.1, 1).unwrap_err().to_string();
        assert!(
            error.contains("paramiter_swapping_factor") && error.contains("50"),
            "{error}"
        );
        assert!(SwappedParameters::new(Vec::new(), 0.5, 1).is_err());
    }
}
