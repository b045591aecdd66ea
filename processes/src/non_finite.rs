//! How many training steps in a row may have a loss or gradients that are not finite numbers.

/// After this many a run fails; ai-toolkit counts such a loss as zero and continues.
pub(super) const MAX_NON_FINITE_STEPS: u64 = 25;
/// After this many no state is saved any more, so that the last good one is kept.
pub(super) const NON_FINITE_STEPS_BEFORE_SAVING_STOPS: u64 = 5;
