//! Fill-in-the-middle: a document is cut into prefix, middle and suffix, and the middle is put at the end.
//!
//! "Efficient Training of Language Models to Fill in the Middle" (Bavarian et al. 2022); the cuts are between characters, as in StarCoder
//! ("StarCoder: may the source be with you!", Li et al. 2023), whose form of SPM is that of section 3.1 of the first paper's variant 2:
//! the suffix is marked first, and prefix and middle follow as one piece.

use crate::models::causal_lm::FimTokens;
use crate::rng::TorchGenerator;
use std::ops::Range;

/// How many documents are cut, and in which order their parts are put.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FimRates {
    /// Share of the documents that are cut.
    pub rate: f64,
    /// Share of these in the order suffix, prefix, middle.
    pub spm_rate: f64,
}

/// How a document is cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// Prefix, middle and suffix, as ranges of the units between which is cut.
    pub(super) parts: [Range<usize>; 3],
    /// The order suffix, prefix, middle.
    pub(super) is_spm: bool,
}

impl FimRates {
    /// Draws whether and how a document of `units` characters or tokens is cut. Draws four numbers in any case.
    pub(super) fn draw(self, units: usize, generator: &mut TorchGenerator) -> Option<Cut> {
        let drawn = generator.rand_f64(4);
        // A boundary is before any unit, or at the end.
        let boundary = |u: f64| ((u * (units + 1) as f64) as usize).min(units);
        let (a, b) = (boundary(drawn[2]), boundary(drawn[3]));
        let (first, second) = (a.min(b), a.max(b));
        (drawn[0] < self.rate).then_some(Cut {
            parts: [0..first, first..second, second..units],
            is_spm: drawn[1] < self.spm_rate,
        })
    }
}

impl FimTokens {
    /// The tokens of a document whose prefix, middle and suffix have these tokens: at most `max`, for which the suffix is shortened at its
    /// end, then the prefix at its beginning, then the middle at its end.
    pub(super) fn join(self, [prefix, middle, suffix]: [&[u32]; 3], is_spm: bool, max: usize) -> Vec<u32> {
        let available = max.saturating_sub(self.marks());
        let middle = &middle[..middle.len().min(available)];
        let prefix = &prefix[prefix.len() - prefix.len().min(available - middle.len())..];
        let suffix = &suffix[..suffix.len().min(available - middle.len() - prefix.len())];
        let mut tokens = self.before_middle(prefix, suffix, is_spm);
        tokens.extend_from_slice(middle);
        tokens
    }
}
