//! Values that a config may leave to the machine: `auto`.

use super::node::{Node, Value};
use super::schema::{FieldValue, ReadContext};
use serde::{Deserialize, Serialize};

const AUTO: &str = "auto";

/// Whether a value is the word `auto`.
fn is_auto(node: &Node) -> bool {
    matches!(&node.value, Value::Text(text) if text.trim().eq_ignore_ascii_case(AUTO))
}

macro_rules! or_auto {
    ($(#[$meta:meta])* $name:ident($inner:ty), $kind:literal, $expected:literal) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(into = "serde_json::Value", try_from = "serde_json::Value")]
        pub enum $name {
            /// What suits the machine.
            Auto,
            /// This value.
            Fixed($inner),
        }

        impl $name {
            /// The value of the config. `None`: `auto`.
            #[must_use]
            pub const fn fixed(self) -> Option<$inner> {
                match self {
                    Self::Auto => None,
                    Self::Fixed(value) => Some(value),
                }
            }
        }

        impl From<$name> for serde_json::Value {
            fn from(value: $name) -> Self {
                match value {
                    $name::Auto => AUTO.into(),
                    $name::Fixed(value) => value.into(),
                }
            }
        }

        impl TryFrom<serde_json::Value> for $name {
            type Error = String;

            fn try_from(value: serde_json::Value) -> Result<Self, String> {
                if value.as_str() == Some(AUTO) {
                    return Ok(Self::Auto);
                }
                serde_json::from_value(value).map(Self::Fixed).map_err(|error| error.to_string())
            }
        }

        impl FieldValue for $name {
            fn kind() -> String {
                $kind.into()
            }
            fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
                if is_auto(node) {
                    return Some(Self::Auto);
                }
                if matches!(node.value, Value::Text(_)) {
                    cx.wrong_type(node, $expected);
                    return None;
                }
                <$inner>::read(node, cx).map(Self::Fixed)
            }
            fn show(&self) -> String {
                match self {
                    Self::Auto => AUTO.into(),
                    Self::Fixed(value) => value.show(),
                }
            }
            fn is_falsy(&self) -> bool {
                self.fixed().is_some_and(|value| value.is_falsy())
            }
        }
    };
}

or_auto!(
    /// A whole number, or `auto`.
    CountOrAuto(u32), "whole number from 0, or `auto`", "a whole number from 0, or `auto`"
);
or_auto!(
    /// True, false or `auto`.
    FlagOrAuto(bool), "true, false or `auto`", "true, false or `auto`"
);
