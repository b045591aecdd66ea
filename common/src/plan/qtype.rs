//! Quantisation types of weights.

use std::fmt;

/// A quantisation type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QType {
    /// 8-bit floats (e4m3) with one scale per output channel.
    Float8,
    /// 8-bit integers with one scale per output channel.
    Int8,
    /// 4-bit NormalFloat with one scale per 64 weights.
    Nf4,
    /// GGUF's 8-bit type `Q8_0`.
    Q8_0,
    /// GGUF's 4-bit type `Q4_K`.
    Q4K,
}

/// The names of each type: aitk's name first, then those of quanto and torchao.
const NAMES: [(&str, QType); 9] = [
    ("float8", QType::Float8),
    ("qfloat8", QType::Float8),
    ("qfloat8_e4m3fn", QType::Float8),
    ("int8", QType::Int8),
    ("qint8", QType::Int8),
    ("uint8", QType::Int8),
    ("nf4", QType::Nf4),
    ("q8_0", QType::Q8_0),
    ("q4_k", QType::Q4K),
];

impl QType {
    /// The type with this name, in upper or lower case.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        let name = name.trim().to_ascii_lowercase();
        let found = NAMES.iter().find(|(known, _)| *known == name);
        found.map(|(_, qtype)| *qtype)
    }

    /// aitk's name of the type.
    #[must_use]
    pub fn name(self) -> &'static str {
        let found = NAMES.iter().find(|(_, qtype)| *qtype == self);
        found.map_or("", |(name, _)| name)
    }

    /// All names, separated by commas.
    #[must_use]
    pub fn names() -> String {
        NAMES.map(|(name, _)| name).join(", ")
    }

    /// Bytes per weight, with its share of the scales.
    #[must_use]
    pub const fn bytes(self) -> f64 {
        match self {
            Self::Float8 | Self::Int8 => 1.01,
            Self::Nf4 | Self::Q4K => 0.5625,
            Self::Q8_0 => 1.0625,
        }
    }
}

impl fmt::Display for QType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
