//! Which tokens of a batch belong together.

use candle_core::{DType, Result, Tensor};

/// Which tokens a token attends to, besides itself. Sliding windows of the model hold in addition.
#[derive(Clone, Debug, Default)]
pub enum AttentionMask {
    /// All tokens before it in its row.
    #[default]
    Causal,
    /// All tokens before it in its row for which the mask [b, n] is not 0. The position of a token is the number of such tokens before it, so
    /// that texts can be padded at either end. The states of masked tokens have no meaning.
    Padded(Tensor),
    /// All tokens before it of its document. Rows are packed with documents; the tensor [b, n] (u32) has the number of the document of
    /// each token, and neighbours with the same number belong to the same document. Positions restart with each document.
    Documents(Tensor),
}

/// The tokens of a batch that each token may attend to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum VisibleKeys {
    /// All tokens before it.
    Causal,
    /// Those before it for which this is true, [b * n].
    Keys(Vec<bool>),
    /// Those from this index of its row on, [b * n].
    From(Vec<usize>),
}

/// The positions of tokens, and what they may attend to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Resolved {
    /// [b * n]; or [n], if they are the same in all rows.
    pub(super) positions: Vec<u32>,
    pub(super) visible: VisibleKeys,
}

impl AttentionMask {
    /// The positions of the tokens of a batch [b, n], and what they may attend to.
    ///
    /// # Errors
    /// When the mask has another shape or cannot be read.
    pub(super) fn resolve(&self, b: usize, n: usize) -> Result<Resolved> {
        let causal = Resolved {
            positions: (0..n as u32).collect(),
            visible: VisibleKeys::Causal,
        };
        match self {
            Self::Causal => Ok(causal),
            Self::Padded(mask) => {
                let keys: Vec<bool> = read(mask, b, n)?.into_iter().map(|value| value != 0).collect();
                // Padding at the end of a text changes nothing before it.
                let is_filled_at_end = |row: &[bool]| row.is_sorted_by(|a, b| a >= b);
                if keys.chunks(n.max(1)).all(is_filled_at_end) {
                    return Ok(causal);
                }
                let mut positions = Vec::with_capacity(keys.len());
                for row in keys.chunks(n.max(1)) {
                    let mut before = 0;
                    for is_real in row {
                        positions.push(before);
                        before += u32::from(*is_real);
                    }
                }
                Ok(Resolved {
                    positions,
                    visible: VisibleKeys::Keys(keys),
                })
            }
            Self::Documents(numbers) => {
                let numbers = read(numbers, b, n)?;
                let mut first = Vec::with_capacity(numbers.len());
                for row in numbers.chunks(n.max(1)) {
                    let mut start = 0;
                    for (index, number) in row.iter().enumerate() {
                        if index > 0 && row[index - 1] != *number {
                            start = index;
                        }
                        first.push(start);
                    }
                }
                if first.iter().all(|first| *first == 0) {
                    return Ok(causal);
                }
                let positions = first.iter().enumerate().map(|(i, first)| (i % n - first) as u32);
                Ok(Resolved {
                    positions: positions.collect(),
                    visible: VisibleKeys::From(first),
                })
            }
        }
    }
}

/// The numbers of a mask [b, n], row by row.
fn read(mask: &Tensor, b: usize, n: usize) -> Result<Vec<u32>> {
    if mask.dims() != [b, n] {
        candle_core::bail!(
            "a mask of shape {:?} does not match tokens of shape [{b}, {n}]",
            mask.dims()
        );
    }
    mask.to_dtype(DType::U32)?.flatten_all()?.to_vec1()
}
