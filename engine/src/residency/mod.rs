//! How a stack of blocks is run.
//!
//! A model hands each of its blocks to a [`Residency`] as a function of tensors. No model file knows whether the block
//! simply runs, is run a second time in the backward pass, or has its weights fetched first: that is decided here,
//! once for every family.

use candle_core::{Result, Tensor};

/// How blocks are run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Residency {
    /// All weights stay on the device, all activations that a gradient needs are kept.
    #[default]
    Resident,
}

impl Residency {
    /// Runs one block: `forward(inputs)`.
    ///
    /// `forward` may be called more than once and must depend on its inputs (and the block's weights) only.
    ///
    /// # Errors
    /// What `forward` answers.
    pub fn run(
        self,
        block: &str,
        inputs: &[Tensor],
        forward: impl Fn(&[Tensor]) -> Result<Vec<Tensor>>,
    ) -> Result<Vec<Tensor>> {
        match self {
            Self::Resident => forward(inputs).map_err(|e| e.context(format!("in block {block}"))),
        }
    }
}
