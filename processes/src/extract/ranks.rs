//! The rank of a layer: ai-toolkit's formulas.

use aitk_common::job::extract::{ExtractMode, ExtractProcess};

/// How the rank of a layer follows from its singular values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RankRule {
    mode: ExtractMode,
    linear: f64,
    conv: f64,
}

impl RankRule {
    /// The rule of a process.
    pub(super) fn of(process: &ExtractProcess) -> Self {
        Self {
            mode: process.mode,
            linear: process.parameter(false),
            conv: process.parameter(true),
        }
    }

    /// The parameter of the mode for convolutions with a kernel above 1x1, or for other layers.
    pub(super) fn parameter(self, is_large_conv: bool) -> f64 {
        if is_large_conv { self.conv } else { self.linear }
    }

    /// The rank, if it does not depend on the singular values.
    pub(super) fn fixed(self, is_large_conv: bool, sides: [usize; 2]) -> Option<usize> {
        (self.mode == ExtractMode::Fixed).then(|| clamp(self.parameter(is_large_conv) as usize, sides))
    }

    /// The rank of a layer with these singular values, largest first, and these numbers of outputs and inputs.
    pub(super) fn rank(self, is_large_conv: bool, values: &[f64], sides: [usize; 2]) -> usize {
        let limit = self.parameter(is_large_conv);
        let above = |min: f64| values.iter().filter(|value| **value > min).count();
        let rank = match self.mode {
            ExtractMode::Fixed => limit as usize,
            ExtractMode::Threshold => above(limit),
            ExtractMode::Ratio => above(limit * values.first().copied().unwrap_or(0.0)),
            ExtractMode::Quantile => {
                let share = limit * values.iter().sum::<f64>();
                let sums = values.iter().scan(0.0, |sum, value| {
                    *sum += value;
                    Some(*sum)
                });
                sums.filter(|sum| *sum < share).count()
            }
        };
        clamp(rank, sides)
    }
}

/// At least 1, at most the number of inputs and of outputs; also of a convolution, whose change may have a higher rank.
fn clamp(rank: usize, [outputs, inputs]: [usize; 2]) -> usize {
    rank.max(1).min(outputs).min(inputs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_those_of_the_formulas() {
        let rule = |mode, linear| RankRule {
            mode,
            linear,
            conv: 2.0,
        };
        let values = [8.0, 4.0, 2.0, 1.0, 1.0];
        for (mode, linear, rank) in [
            (ExtractMode::Fixed, 3.0, 3),
            (ExtractMode::Fixed, 0.0, 1),
            (ExtractMode::Fixed, 99.0, 5),
            (ExtractMode::Threshold, 1.5, 3),
            // Equal to the limit is not above it.
            (ExtractMode::Threshold, 2.0, 2),
            (ExtractMode::Threshold, 100.0, 1),
            (ExtractMode::Threshold, 0.0, 5),
            (ExtractMode::Ratio, 0.25, 2),
            (ExtractMode::Ratio, 0.2, 3),
            (ExtractMode::Ratio, 1.0, 1),
            // The sums are 8, 12, 14, 15, 16.
            (ExtractMode::Quantile, 0.5, 1),
            (ExtractMode::Quantile, 0.8, 2),
            (ExtractMode::Quantile, 1.0, 4),
        ] {
            assert_eq!(rule(mode, linear).rank(false, &values, [5, 7]), rank, "{mode} {linear}");
        }
        assert_eq!(rule(ExtractMode::Fixed, 3.0).rank(true, &values, [5, 7]), 2);
        assert_eq!(rule(ExtractMode::Fixed, 3.0).fixed(true, [5, 1]), Some(1));
        assert_eq!(rule(ExtractMode::Ratio, 0.5).fixed(false, [5, 5]), None);
    }
}
