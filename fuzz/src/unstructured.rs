//! Decodes a fuzzer's bytes into numbers, choices and texts, one after another.
//!
//! A small version of the `arbitrary` crate's type, so that the ordinary tests can replay the corpora without a fuzzer's
//! libraries. When the bytes are used up, every value is the first choice, so short inputs end early.

#![allow(dead_code, reason = "each target uses some of the methods")]

/// A source of values that are decoded from bytes.
pub struct Unstructured<'a>(&'a [u8]);

impl<'a> Unstructured<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes all remaining bytes.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    /// Takes at most `count` bytes.
    pub fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    pub fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        usize::from(self.byte()) % end.max(1)
    }

    /// True for one of `count` byte values.
    pub fn one_in(&mut self, count: u8) -> bool {
        self.byte() % count == count - 1
    }

    pub fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    pub fn u64(&mut self) -> u64 {
        self.bytes(8)
            .iter()
            .rev()
            .fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    /// A small number, or an extreme one as a malicious peer would send it.
    pub fn number(&mut self) -> u64 {
        match self.byte() {
            kind @ 0..160 => u64::from(kind % 16),
            160..176 => u64::MAX,
            176..192 => 1 << 63,
            192..208 => u64::MAX >> self.below(64),
            // Up to 4 TiB: sizes of memories.
            208..240 => u64::from(self.byte()) << 34,
            _ => self.u64(),
        }
    }

    /// A floating-point number, possibly infinite or NaN.
    pub fn real(&mut self) -> f64 {
        match self.byte() % 8 {
            0 => 0.0,
            1 => 1.0,
            2 => -1.0,
            3 => f64::NAN,
            4 => f64::INFINITY,
            5 => f64::MIN_POSITIVE,
            6 => f64::from(self.byte()) / 16.0,
            _ => f64::from_bits(self.u64()),
        }
    }

    pub fn pick<'b, T: ?Sized>(&mut self, from: &[&'b T]) -> &'b T {
        from[self.below(from.len())]
    }

    /// A short text of any characters.
    pub fn chars(&mut self) -> String {
        let length = usize::from(self.byte() % 24);
        String::from_utf8_lossy(self.bytes(length)).into_owned()
    }
}
