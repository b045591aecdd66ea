//! How a stack of blocks is run.
