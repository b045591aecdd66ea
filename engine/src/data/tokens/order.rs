//! Which rows each step trains on: a function of the seed and the step, so that a run that resumes needs no other state.

use crate::rng::generator_for;

/// The order of rows.
#[derive(Clone, Debug)]
pub struct RowOrder {
    rows: usize,
    /// Rows of a step.
    per_step: usize,
    /// Rows that are computed at a time.
    batch: usize,
    seed: u64,
    /// The order of the last epoch that was asked for.
    epoch: Option<(u64, Vec<i64>)>,
}

impl RowOrder {
    /// Each epoch has all `rows` in an order of its own. A step has `accumulation` batches of `batch` rows; the last step of an epoch has what
    /// is left.
    #[must_use]
    pub fn new(rows: usize, batch: usize, accumulation: usize, seed: u64) -> Self {
        Self {
            rows: rows.max(1),
            per_step: batch.max(1).saturating_mul(accumulation.max(1)),
            batch: batch.max(1),
            seed,
            epoch: None,
        }
    }

    /// Computes this many rows of a step at a time. The rows of each step stay the same.
    pub fn set_batch(&mut self, rows: usize) {
        self.batch = rows.max(1);
    }

    /// The number of steps of an epoch.
    #[must_use]
    pub fn steps_per_epoch(&self) -> u64 {
        self.rows.div_ceil(self.per_step) as u64
    }

    /// The number of the epoch of a step, from 0.
    #[must_use]
    pub fn epoch_of(&self, step: u64) -> u64 {
        step / self.steps_per_epoch()
    }

    /// The rows of each batch of a step.
    pub fn batches(&mut self, step: u64) -> Vec<Vec<usize>> {
        let (epoch, seed, rows) = (self.epoch_of(step), self.seed, self.rows);
        let per_step = self.per_step;
        let first = (step % self.steps_per_epoch()) as usize * per_step;
        if self.epoch.as_ref().is_none_or(|(known, _)| *known != epoch) {
            self.epoch = Some((epoch, generator_for(seed, "rows", epoch, 0).randperm(rows)));
        }
        let order = self.epoch.as_ref().map_or(&[][..], |(_, order)| order);
        let of_step = &order[first.min(order.len())..first.saturating_add(per_step).min(order.len())];
        of_step
            .chunks(self.batch)
            .map(|batch| batch.iter().map(|row| *row as usize).collect())
            .collect()
    }
}
