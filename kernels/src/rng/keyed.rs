//! One generator per random decision (`docs/randomness.md`). A training run has no other source of randomness.

use super::TorchGenerator;
use md5::{Digest, Md5};

/// The generator for one purpose, seeded with the text `"<seed>/<purpose>/<a>/<b>"`.
#[must_use]
pub fn generator_for(seed: u64, purpose: &str, a: u64, b: u64) -> TorchGenerator {
    generator_from_text(&format!("{seed}/{purpose}/{a}/{b}"))
}

/// A generator seeded with the first four bytes (little-endian) of the MD5 hash of a text.
#[must_use]
pub fn generator_from_text(text: &str) -> TorchGenerator {
    let digest = Md5::digest(text.as_bytes());
    TorchGenerator::manual_seed(u64::from(u32::from_le_bytes([
        digest[0], digest[1], digest[2], digest[3],
    ])))
}
