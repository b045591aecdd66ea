//! The training loop and its losses.
