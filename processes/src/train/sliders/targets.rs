//! The pairs of prompts of a slider (`slider.targets`), their parts and their orders.

use crate::error::{EngineError, Result};
use crate::rng::{TorchGenerator, generator_for};
use aitk_common::job::slider::{SliderAnchor, SliderConfig, SliderTarget as TargetPrompts};
use aitk_common::job::values::ImageSize;

/// So many orders of the parts of a prompt are trained with `shuffle`, as in ai-toolkit.
const MAX_ORDERS: usize = 8;

/// One of the parts of a pair's step. The parts of a direction differ only by the prompt that the sampling of their latents avoids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StepPart {
    /// Whether it trains the positive end.
    pub(super) is_positive: bool,
    /// Whether the sampling avoids the positive prompt, or the negative one.
    pub(super) avoids_positive: bool,
}

impl StepPart {
    /// 1 or -1.
    pub(super) fn direction(self) -> f64 {
        if self.is_positive { 1.0 } else { -1.0 }
    }
}

/// The pairs of prompts of a slider, the prompts that it must not change, and its sizes.
#[derive(Debug)]
pub(crate) struct PromptTargets {
    targets: Vec<TargetPrompts>,
    pub(super) anchors: Vec<SliderAnchor>,
    pub(super) sizes: Vec<ImageSize>,
    all_parts: bool,
}

impl PromptTargets {
    /// `steps`: those of the training; more pairs than that are left out.
    pub(super) fn new(config: SliderConfig, steps: u64, seed: u64) -> Self {
        let mut generator = generator_for(seed, "slider-targets", 0, 0);
        let targets = config.targets.into_iter().flat_map(|target| match target.shuffle {
            true => shuffled(&target, &mut generator),
            false => vec![target],
        });
        let mut targets: Vec<TargetPrompts> = targets.collect();
        targets.truncate(usize::try_from(steps.max(1)).unwrap_or(usize::MAX));
        Self {
            targets,
            anchors: config.anchors,
            sizes: config.resolutions,
            all_parts: config.batch_full_slide,
        }
    }

    /// The pair of prompts of a micro-batch, and its parts.
    pub(super) fn choose(&self, generator: &mut TorchGenerator) -> Result<(&TargetPrompts, Vec<StepPart>)> {
        let target = choice(&self.targets, generator)?;
        let parts = parts(target);
        match self.all_parts {
            true => Ok((target, parts)),
            false => Ok((target, vec![*choice(&parts, generator)?])),
        }
    }

    /// Every prompt.
    pub(super) fn prompts(&self) -> Vec<String> {
        let of_targets = self
            .targets
            .iter()
            .flat_map(|target| [&target.target_class, &target.positive, &target.negative]);
        let of_anchors = self.anchors.iter().map(|anchor| &anchor.prompt);
        of_targets.chain(of_anchors).cloned().collect()
    }
}

/// One of these, at random.
pub(super) fn choice<'a, T>(all: &'a [T], generator: &mut TorchGenerator) -> Result<&'a T> {
    let missing = || EngineError::bad_input("slider: needs `targets` and `resolutions`");
    let index = match all.len() {
        0 => return Err(missing()),
        count => generator.randint(0, count as i64, 1)[0],
    };
    all.get(index as usize).ok_or_else(missing)
}

/// The parts of a pair: two of each direction. Without a positive or a negative prompt, one of each.
fn parts(target: &TargetPrompts) -> Vec<StepPart> {
    let part = |is_positive, avoids_positive| StepPart {
        is_positive,
        avoids_positive,
    };
    let is_blank = |prompt: &str| prompt.trim().is_empty();
    match (is_blank(&target.positive), is_blank(&target.negative)) {
        (true, false) => vec![part(true, true), part(false, true)],
        (false, true) => vec![part(true, false), part(false, false)],
        _ => vec![
            part(true, true),
            part(true, false),
            part(false, false),
            part(false, true),
        ],
    }
}

/// The pair with its comma-separated parts in up to 8 orders.
fn shuffled(target: &TargetPrompts, generator: &mut TorchGenerator) -> Vec<TargetPrompts> {
    let (positive, negative) = (orders(&target.positive, generator), orders(&target.negative, generator));
    let pairs = positive.iter().flat_map(|p| negative.iter().map(move |n| (p, n)));
    let pairs: Vec<(&String, &String)> = pairs.collect();
    let order = generator.randperm(pairs.len());
    let chosen = order.into_iter().filter_map(|index| pairs.get(index as usize));
    chosen
        .take(MAX_ORDERS)
        .map(|(positive, negative)| TargetPrompts {
            positive: (*positive).clone(),
            negative: (*negative).clone(),
            shuffle: false,
            ..target.clone()
        })
        .collect()
}

/// Up to 8 orders of the comma-separated parts of a prompt, which are shuffled first.
fn orders(prompt: &str, generator: &mut TorchGenerator) -> Vec<String> {
    let parts: Vec<&str> = prompt
        .split(',')
        .map(str::trim)
        .filter(|part| !part.is_empty())
        .collect();
    let first = generator.randperm(parts.len()).into_iter().map(|index| index as usize);
    let mut order: Vec<usize> = first.collect();
    let shuffled: Vec<&str> = order.iter().filter_map(|index| parts.get(*index).copied()).collect();
    order = (0..parts.len()).collect();
    let mut out = Vec::new();
    loop {
        let text: Vec<&str> = order.iter().filter_map(|index| shuffled.get(*index).copied()).collect();
        out.push(text.join(", "));
        if out.len() == MAX_ORDERS || !next_permutation(&mut order) {
            return out;
        }
    }
}

/// Changes an order to the next one in lexicographic order. `false`: it was the last one.
fn next_permutation(order: &mut [usize]) -> bool {
    let Some(pivot) = (1..order.len()).rev().find(|i| order[i - 1] < order[*i]).map(|i| i - 1) else {
        return false;
    };
    let Some(larger) = (pivot + 1..order.len()).rev().find(|i| order[*i] > order[pivot]) else {
        return false;
    };
    order.swap(pivot, larger);
    order[pivot + 1..].reverse();
    true
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn target(positive: &str, negative: &str) -> TargetPrompts {
        TargetPrompts {
            positive: positive.into(),
            negative: negative.into(),
            ..TargetPrompts::default()
        }
    }

    #[test]
    fn a_pair_has_both_directions_and_a_single_prompt_too() {
        let directions = |positive, negative| {
            let parts = parts(&target(positive, negative));
            parts.into_iter().map(|part| part.is_positive).collect::<Vec<_>>()
        };
        assert_eq!(directions("old", "young"), [true, true, false, false]);
        assert_eq!(directions("old", " "), [true, false]);
        assert_eq!(directions("", "young"), [true, false]);
    }

    #[test]
    fn shuffled_pairs_keep_their_parts() {
        let config = SliderConfig {
            targets: vec![TargetPrompts {
                shuffle: true,
                ..target("a, b,, c , d", "x, y")
            }],
            ..SliderConfig::default()
        };
        let slider = PromptTargets::new(config.clone(), 500, 7);
        assert_eq!(slider.targets.len(), MAX_ORDERS);
        for target in &slider.targets {
            let sorted = |prompt: &str| {
                let mut parts: Vec<&str> = prompt.split(", ").collect();
                parts.sort_unstable();
                parts.join(" ")
            };
            assert_eq!(
                (sorted(&target.positive).as_str(), sorted(&target.negative).as_str()),
                ("a b c d", "x y")
            );
        }
        let mut all = slider.prompts();
        all.sort();
        all.dedup();
        assert!(all.len() > 8, "{all:?}");
        assert_eq!(
            PromptTargets::new(config, 3, 7).targets.len(),
            3,
            "no more pairs than steps"
        );
    }

    #[test]
    fn permutations_are_in_lexicographic_order() {
        let mut order = [0, 1, 2];
        let mut all = vec![order];
        while next_permutation(&mut order) {
            all.push(order);
        }
        assert_eq!(all, [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]]);
    }
}
