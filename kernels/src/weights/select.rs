//! Which tensors are trained, and which layers are quantised, by their names.

use aitk_common::job::QType;
use std::collections::BTreeSet;
use wildmatch::WildMatch;

/// Selects the tensors that are handed out as trainable variables, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TrainableFilter {
    /// No tensor.
    #[default]
    Nothing,
    /// The tensors whose name contains a string of `only_if_contains` (all if it is empty) and none of
    /// `ignore_if_contains`.
    Names {
        /// `model.only_if_contains`.
        only_if_contains: Vec<String>,
        /// `model.ignore_if_contains`. Takes precedence.
        ignore_if_contains: Vec<String>,
        /// The name of the part that the tensors belong to. A string may also be in the name with the part before it
        /// (`transformer.transformer_blocks.`).
        part: Option<&'static str>,
    },
}

impl TrainableFilter {
    /// Every tensor.
    #[must_use]
    pub fn everything() -> Self {
        Self::Names {
            only_if_contains: Vec::new(),
            ignore_if_contains: Vec::new(),
            part: None,
        }
    }

    /// The same filter for the tensors of a part.
    #[must_use]
    pub fn in_part(mut self, name: &'static str) -> Self {
        if let Self::Names { part, .. } = &mut self {
            *part = Some(name);
        }
        self
    }

    /// Whether the tensor of this name is selected.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        match self {
            Self::Nothing => false,
            Self::Names {
                only_if_contains: only,
                ignore_if_contains: ignored,
                part,
            } => {
                let full_name = part.map_or_else(|| name.to_owned(), |part| format!("{part}.{name}"));
                let contains_any = |strings: &[String]| strings.iter().any(|text| full_name.contains(text.as_str()));
                (only.is_empty() || contains_any(only)) && !contains_any(ignored)
            }
        }
    }
}

/// Which layers are quantised when they are read, and to which type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuantizationConfig {
    /// The quantisation type.
    pub qtype: QType,
    /// Names of layers that are not quantised; `*` matches any text, `?` one character.
    pub exclude: Vec<String>,
    /// The layers of an accuracy recovery adapter, if there is one: the others are quantised in 8 bits.
    pub adapted: Option<BTreeSet<String>>,
}

impl QuantizationConfig {
    /// The type to which this layer is quantised. As ai-toolkit, which quantises the layers without an adapter to `uint8`.
    pub(super) fn qtype_of(&self, layer: &str) -> QType {
        match &self.adapted {
            Some(adapted) if !adapted.contains(layer) => QType::Int8,
            _ => self.qtype,
        }
    }

    /// Whether this layer is quantised.
    pub(super) fn applies_to(&self, layer: &str) -> bool {
        !self
            .exclude
            .iter()
            .any(|pattern| WildMatch::new(pattern).matches(layer))
    }
}
