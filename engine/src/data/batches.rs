//! The batches of a run, and their order.

use super::dataset::Dataset;
use crate::rng::generator_for;
use std::collections::HashMap;

/// The items of one training batch, all of one data set and one bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Index of the data set.
    pub dataset: usize,
    /// Indices of its items.
    pub items: Vec<usize>,
}

/// The batches of the training sets, or of the regularisation sets. They are the same in every epoch: items are
/// shuffled once inside each bucket (`randperm` of a generator of `seed/bucket/<data set>/<bucket number>`) and split;
/// a short last batch repeats its own items.
#[must_use]
pub fn batches(datasets: &[Dataset], seed: u64, regularisation: bool) -> Vec<Batch> {
    let mut out = Vec::new();
    let is_selected = |dataset: &Dataset| dataset.options.regularisation == regularisation;
    for (number, dataset) in datasets.iter().enumerate().filter(|(_, dataset)| is_selected(dataset)) {
        let mut order = Vec::new();
        let mut buckets: HashMap<(u32, u32), Vec<usize>> = HashMap::new();
        for (index, item) in dataset.items.iter().enumerate() {
            buckets
                .entry(item.plan.bucket)
                .or_insert_with(|| {
                    order.push(item.plan.bucket);
                    Vec::new()
                })
                .push(index);
        }
        for (position, bucket) in order.iter().enumerate() {
            let items = &buckets[bucket];
            let permutation = generator_for(seed, "bucket", number as u64, position as u64).randperm(items.len());
            let shuffled: Vec<usize> = permutation.into_iter().map(|i| items[i as usize]).collect();
            let size = dataset.options.batch_size.max(1);
            for chunk in shuffled.chunks(size) {
                let items = chunk.iter().copied().cycle().take(size).collect();
                out.push(Batch { dataset: number, items });
            }
        }
    }
    out
}

/// The order of the batches in an epoch: `randperm` of a generator of `seed/epoch/<epoch>/0`. Regularisation sets have
/// their own epochs and use `seed/reg-epoch/<epoch>/0`.
#[must_use]
pub fn epoch_order(count: usize, seed: u64, epoch: u64, regularisation: bool) -> Vec<usize> {
    let purpose = if regularisation { "reg-epoch" } else { "epoch" };
    generator_for(seed, purpose, epoch, 0)
        .randperm(count)
        .into_iter()
        .map(|i| i as usize)
        .collect()
}
