//! Where tensors live and in which dtype.
