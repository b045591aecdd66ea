//! Norms.

use super::tape::TRAINED;

/// A norm.
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm {
    /// The position in the model; it names the trained tensors.
    pub(super) index: u64,
    /// Elements of its weight and bias, as far as they are trained.
    pub(super) trained_elements: f64,
    /// Whether the mean of a row is subtracted first, and a bias added: all but RMS norms.
    pub(super) centres: bool,
}

impl Norm {
    /// A layer norm without weight and bias.
    pub(super) const PLAIN: Self = Self {
        index: 0,
        trained_elements: 0.0,
        centres: true,
    };

    /// The id of its trained tensors.
    pub(super) fn trained_id(&self) -> u64 {
        TRAINED + 4 * self.index + 3
    }
}
