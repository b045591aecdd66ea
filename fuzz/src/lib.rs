//! What is run under the fuzzer: a function per target that takes any bytes and panics where something is wrong.
//!
//! Ordinary tests replay the kept corpora through the same files, so nothing here needs a fuzzer's libraries.

pub mod config;
mod dice;
pub mod manifest;
pub mod wire;
