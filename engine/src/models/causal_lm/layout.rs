//! Positions and attention masks of one forward pass, shared by all blocks.

use super::attention_mask::{AttentionMask, Resolved, VisibleKeys};
use super::config::{CausalLmConfig, PositionKind};
use crate::nn::{Rotary, RotaryPairs};
use candle_core::{Device, Result, Tensor};

/// The positions of the tokens of a batch.
#[derive(Clone, Debug)]
pub(super) struct Positions {
    /// `None`: the model has learned positions.
    rotary: Option<Rotary>,
    /// Whether each row has positions of its own.
    by_row: bool,
}

impl Positions {
    /// `positions`: [b * n], or [n] if they are the same in all rows. Where they do not rise by one, another text begins.
    pub(super) fn new(config: &CausalLmConfig, positions: &[u32], n: usize) -> Result<Self> {
        let runs = positions.chunks(n.max(1));
        let runs = runs.flat_map(|row| row.chunk_by(|before, after| before.checked_add(1) == Some(*after)));
        let with_length = |run: &[u32]| run.last().map_or(0, |last| *last as usize + 1);
        let texts: Vec<(&[u32], usize)> = runs.map(|run| (run, with_length(run))).collect();
        Self::of_texts(config, &texts, positions.len() != n)
    }

    /// The positions of the tokens of one text after another, each with the number of tokens that the text has so far. `by_row`: whether
    /// each row has positions of its own.
    pub(super) fn of_texts(config: &CausalLmConfig, texts: &[(&[u32], usize)], by_row: bool) -> Result<Self> {
        let rotary = match &config.positions {
            PositionKind::Learned => None,
            PositionKind::Rotary(rotary) => {
                let runs = texts.iter().map(|(run, length)| (*run, rotary.frequencies(*length)));
                Some(Rotary::for_positions(runs, rotary.scale(), RotaryPairs::Halves)?)
            }
        };
        Ok(Self { rotary, by_row })
    }

    /// Rotates every head of queries or keys x [b, n, heads * width].
    pub(super) fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        let Some(rotary) = &self.rotary else {
            return Ok(x.clone());
        };
        if !self.by_row {
            return rotary.forward(x);
        }
        let (b, n, features) = x.dims3()?;
        rotary
            .forward(&x.reshape((1, b * n, features))?)?
            .reshape((b, n, features))
    }
}

/// The positions and the masks of one forward pass.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    pub(super) positions: Positions,
    /// [b * n], row by row.
    pub(super) position_ids: Vec<u32>,
    /// The biases of the scores by the sliding window, for each window that the model has. `None`: the scores have no other mask than the
    /// causal one.
    biases: Vec<(Option<usize>, Option<Tensor>)>,
}

impl Layout {
    /// The layout of tokens [b, n].
    ///
    /// # Errors
    /// When the mask does not fit, or a text is longer than the table of learned positions.
    pub(super) fn new(
        config: &CausalLmConfig,
        mask: &AttentionMask,
        b: usize,
        n: usize,
        device: &Device,
    ) -> Result<Self> {
        let Resolved { positions, visible } = mask.resolve(b, n)?;
        check_positions(config, &positions)?;
        let mut biases: Vec<(Option<usize>, Option<Tensor>)> = Vec::new();
        for window in &config.windows {
            // A window that is longer than the text masks nothing.
            let window = window.filter(|window| *window < n);
            if biases.iter().all(|(known, _)| *known != window) {
                biases.push((window, bias(&visible, window, b, n, device)?));
            }
        }
        let position_ids = match positions.len() == n {
            true => positions.repeat(b),
            false => positions.clone(),
        };
        Ok(Self {
            positions: Positions::new(config, &positions, n)?,
            position_ids,
            biases,
        })
    }

    /// The bias of the scores of a block with this sliding window in a text of `n` tokens.
    pub(super) fn bias(&self, window: Option<usize>, n: usize) -> Option<Tensor> {
        let window = window.filter(|window| *window < n);
        let found = self.biases.iter().find(|(known, _)| *known == window);
        found.and_then(|(_, bias)| bias.clone())
    }
}

/// Checks that a table of learned positions has these.
pub(super) fn check_positions(config: &CausalLmConfig, positions: &[u32]) -> Result<()> {
    let last = positions.iter().copied().max().unwrap_or(0) as usize;
    if config.positions == PositionKind::Learned && last >= config.max_positions {
        candle_core::bail!(
            "a text of {} tokens is longer than the model's table of {} positions: shorten it",
            last + 1,
            config.max_positions
        );
    }
    Ok(())
}

/// The bias of the scores of tokens [b, n], added to the causal mask: [b or 1, 1, n or 1, n].
fn bias(visible: &VisibleKeys, window: Option<usize>, b: usize, n: usize, device: &Device) -> Result<Option<Tensor>> {
    let number = |allowed: bool| if allowed { 0f32 } else { f32::NEG_INFINITY };
    let (rows, queries) = match (visible, window) {
        (VisibleKeys::Causal, None) => return Ok(None),
        (VisibleKeys::Causal, Some(_)) => (1, n),
        (VisibleKeys::Keys(_), None) => (b, 1),
        _ => (b, n),
    };
    let mut numbers = Vec::with_capacity(rows * queries * n);
    for row in 0..rows {
        for query in 0..queries {
            let first = window.map_or(0, |window| (query + 1).saturating_sub(window));
            let first = match visible {
                VisibleKeys::From(starts) => starts[row * n + query].max(first),
                _ => first,
            };
            match visible {
                VisibleKeys::Keys(keys) => {
                    let keys = keys[row * n..(row + 1) * n].iter().enumerate();
                    numbers.extend(keys.map(|(key, is_real)| number(*is_real && key >= first)));
                }
                _ => numbers.extend((0..n).map(|key| number(key >= first))),
            }
        }
    }
    Tensor::from_vec(numbers, (rows, 1, queries, n), device).map(Some)
}
