//! Where tensors live and in which dtype.

pub mod trial;
