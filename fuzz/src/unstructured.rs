//! What a fuzzer's bytes decide: numbers, choices and texts, drawn one after another.
//!
//! Ours, in a few lines, so that the ordinary tests replay the corpora without a fuzzer's libraries. When the bytes are
//! used up every draw is the first choice, so a short input ends soon.

#![allow(dead_code, reason = "each target draws what it needs")]

/// Draws from bytes.
pub struct Unstructured<'a>(&'a [u8]);

impl<'a> Unstructured<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What was not drawn yet.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    /// At most so many bytes.
    pub fn bytes(&mut self, most: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        taken
    }

    pub fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    /// 0 up to, not including, `end`.
    pub fn below(&mut self, end: usize) -> usize {
        usize::from(self.byte()) % end.max(1)
    }

    /// Rarely true: one time in `of`.
    pub fn one_in(&mut self, of: u8) -> bool {
        self.byte() % of == of - 1
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

    /// A number as peers that mean harm send it, or a plain one.
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

    /// A number with a point, or none at all.
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

    /// Any characters, a few of them.
    pub fn chars(&mut self) -> String {
        let length = usize::from(self.byte() % 24);
        String::from_utf8_lossy(self.bytes(length)).into_owned()
    }
}
