//! A generator per decision (`docs/randomness.md`): nothing random in a training run comes from anywhere else.

use super::TorchGenerator;
use md5::{Digest, Md5};

/// The generator of one purpose: of the text `"<seed>/<purpose>/<a>/<b>"`.
#[must_use]
pub fn generator_for(seed: u64, purpose: &str, a: u64, b: u64) -> TorchGenerator {
    generator_of(&format!("{seed}/{purpose}/{a}/{b}"))
}

/// A generator seeded with the first four bytes, little endian, of the MD5 of a text.
#[must_use]
pub fn generator_of(text: &str) -> TorchGenerator {
    let digest = Md5::digest(text.as_bytes());
    TorchGenerator::manual_seed(u64::from(u32::from_le_bytes([
        digest[0], digest[1], digest[2], digest[3],
    ])))
}
