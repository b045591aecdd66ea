//! How a LoKr splits the sides of a weight, for the engine and for the planner.

/// Splits a side of a weight into a factor of the first matrix and one of the second, as ai-toolkit does (`factorization` in
/// `toolkit/models/lokr.py`): `factor` and the rest if it divides the side; otherwise the most similar factors whose first is not
/// above `factor`. `None` (`lokr_factor: -1`): the most similar factors, the smaller one first.
#[must_use]
pub fn lokr_factors(side: usize, factor: Option<usize>) -> [usize; 2] {
    if let Some(factor) = factor
        && factor > 0
        && side.is_multiple_of(factor)
    {
        return [factor, side / factor];
    }
    let limit = factor.unwrap_or(side);
    let candidates = (2..=limit).take_while(|candidate| candidate * candidate <= side);
    let smaller = candidates.filter(|candidate| side.is_multiple_of(*candidate)).last();
    let smaller = smaller.unwrap_or(1);
    [smaller, side / smaller]
}

/// How a LoKr splits weights, besides its factor. The default is that of ai-toolkit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LokrSplits {
    /// The first matrix gets the smaller factor of each side, also if the given factor is the larger one (`smaller_factor_first`).
    pub smaller_first: bool,
    /// The factors of the outputs change places (`unbalanced_factorization`).
    pub unbalanced: bool,
    /// The first matrix may be a product of a low rank, too (`decompose_both`).
    pub decompose_both: bool,
}

impl LokrSplits {
    /// The factors of the outputs and of the inputs of a weight, each with that of the first matrix first: [[a, b], [c, d]].
    #[must_use]
    pub fn factors(self, sides: [usize; 2], factor: Option<usize>) -> [[usize; 2]; 2] {
        let [mut outputs, mut inputs] = sides.map(|side| lokr_factors(side, factor));
        if self.smaller_first {
            outputs.sort_unstable();
            inputs.sort_unstable();
        }
        if self.unbalanced {
            outputs.reverse();
        }
        [outputs, inputs]
    }

    /// Whether the first matrix, with these sides, is a product of this rank.
    #[must_use]
    pub fn splits_first(self, rank: usize, first: [usize; 2]) -> bool {
        self.decompose_both && !lokr_is_full(rank, first)
    }
}

/// Whether the second matrix is trained as it is: a product of this rank would have about as many numbers, or more.
#[must_use]
pub fn lokr_is_full(rank: usize, second: [usize; 2]) -> bool {
    rank.saturating_mul(2) >= second[0].max(second[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `factorization` of ai-toolkit computes them.
    #[test]
    fn sides_are_split_as_ai_toolkit_splits_them() {
        for (side, factor, expected) in [
            (127, None, [1, 127]),
            (128, None, [8, 16]),
            (250, None, [10, 25]),
            (360, None, [18, 20]),
            (1024, None, [32, 32]),
            (3072, None, [48, 64]),
            (128, Some(4), [4, 32]),
            (250, Some(8), [5, 50]),
            (320, Some(16), [16, 20]),
            (1280, Some(64), [64, 20]),
            (4, Some(8), [2, 2]),
            (12, Some(5), [3, 4]),
            (9, Some(2), [1, 9]),
            (1, None, [1, 1]),
        ] {
            assert_eq!(lokr_factors(side, factor), expected, "{side} by {factor:?}");
        }
        assert!(lokr_is_full(8, [4, 16]) && !lokr_is_full(7, [4, 16]));
    }

    /// As `factorization` and `LokrModule` of LyCORIS compute them.
    #[test]
    fn sides_are_split_as_lycoris_splits_them() {
        let of_lycoris = LokrSplits {
            smaller_first: true,
            ..LokrSplits::default()
        };
        for (sides, factor, expected) in [
            ([320, 1280], Some(32), [[10, 32], [32, 40]]),
            ([320, 4], Some(4), [[4, 80], [1, 4]]),
            ([128, 250], Some(16), [[8, 16], [10, 25]]),
            ([360, 512], None, [[18, 20], [16, 32]]),
        ] {
            assert_eq!(of_lycoris.factors(sides, factor), expected, "{sides:?} by {factor:?}");
            let unbalanced = LokrSplits {
                unbalanced: true,
                ..of_lycoris
            };
            let [[a, b], inputs] = expected;
            assert_eq!(unbalanced.factors(sides, factor), [[b, a], inputs]);
        }
        assert_eq!(LokrSplits::default().factors([320, 4], Some(32)), [[32, 10], [2, 2]]);
        let both = LokrSplits {
            decompose_both: true,
            ..of_lycoris
        };
        assert!(both.splits_first(4, [9, 3]) && !both.splits_first(4, [8, 3]));
        assert!(!of_lycoris.splits_first(4, [9, 3]));
    }
}
