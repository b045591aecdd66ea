//! Values with more than one notation, such as one item or a list of items.

use super::node::{Node, Value};
use super::schema::{FieldValue, ReadContext, read_items, show_items};
use serde::{Deserialize, Serialize};
use std::ops::Deref;

/// One value, or a list of them: `512` and `[512, 768]` are both fine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct OneOrMany<T>(pub Vec<T>);

impl<T> Deref for OneOrMany<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T: FieldValue> FieldValue for OneOrMany<T> {
    fn kind() -> String {
        format!("{0}, or list of {0}", T::kind())
    }
    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        match &node.value {
            Value::List(items) => read_items(items, cx).map(Self),
            // Such as `512,768`.
            Value::Text(_) if T::kind().contains("number") => {
                cx.wrong_type(node, &format!("a {}, or a list of such numbers", T::kind()));
                None
            }
            _ => T::read(node, cx).map(|value| Self(vec![value])),
        }
    }
    fn show(&self) -> String {
        match self.0.as_slice() {
            [one] => one.show(),
            many => show_items(many),
        }
    }
    fn is_falsy(&self) -> bool {
        self.0.iter().all(T::is_falsy)
    }
    fn for_each_text(&self, f: &mut dyn FnMut(&str, &str)) {
        self.0.for_each_text(f);
    }
}

/// Text, where `false` means none (`sample.neg`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TextOrFalse(pub String);

impl Deref for TextOrFalse {
    type Target = str;
    fn deref(&self) -> &str {
        &self.0
    }
}

impl FieldValue for TextOrFalse {
    fn kind() -> String {
        "text, or false".into()
    }
    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        match node.value {
            Value::Bool(false) => Some(Self::default()),
            _ => String::read(node, cx).map(Self),
        }
    }
    fn show(&self) -> String {
        self.0.show()
    }
    fn is_falsy(&self) -> bool {
        self.0.is_empty()
    }
}

/// A list of text, or the path of a file that holds one text per line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum TextSource {
    /// The texts themselves.
    List(Vec<String>),
    /// A text file, one per line.
    File(String),
}

impl Default for TextSource {
    fn default() -> Self {
        Self::List(Vec::new())
    }
}

impl FieldValue for TextSource {
    fn kind() -> String {
        "list of text, or path of a text file".into()
    }
    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        match &node.value {
            Value::List(items) => read_items(items, cx).map(Self::List),
            Value::Text(path) => Some(Self::File(path.clone())),
            _ => {
                cx.wrong_type(node, "a list of text, or the path of a text file");
                None
            }
        }
    }
    fn show(&self) -> String {
        match self {
            Self::List(items) => items.show(),
            Self::File(path) => path.clone(),
        }
    }
    fn is_falsy(&self) -> bool {
        match self {
            Self::List(items) => items.is_empty(),
            Self::File(path) => path.is_empty(),
        }
    }
    fn for_each_text(&self, f: &mut dyn FnMut(&str, &str)) {
        if let Self::File(path) = self {
            f("", path);
        }
    }
}

macro_rules! quotable {
    ($(#[$meta:meta])* $name:ident($inner:ty), $kind:literal, $parse:expr) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl Deref for $name {
            type Target = $inner;
            fn deref(&self) -> &$inner {
                &self.0
            }
        }

        impl FieldValue for $name {
            fn kind() -> String {
                concat!($kind, " (also in quotes)").into()
            }
            fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
                let parsed = match &node.value {
                    Value::Text(text) => text.trim().parse::<$inner>().ok().filter($parse),
                    _ => return <$inner>::read(node, cx).map(Self),
                };
                if parsed.is_none() {
                    cx.wrong_type(node, concat!("a ", $kind));
                }
                parsed.map(Self)
            }
            fn show(&self) -> String {
                self.0.show()
            }
            fn is_falsy(&self) -> bool {
                self.0.is_falsy()
            }
        }
    };
}

quotable!(
    /// A number that may also be written in quotes (`"0.05"`), as ai-toolkit allowed for some keys.
    Float(f64), "number", |value| value.is_finite()
);
quotable!(
    /// A whole number that may also be written in quotes, as ai-toolkit allowed for `lokr_factor`.
    Integer(i64), "whole number", |_| true
);

impl Eq for Integer {}

/// A number, or a `[low, high]` range from which a random number is drawn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum FloatOrRange {
    /// This number.
    Fixed(f64),
    /// From low to high.
    Range([f64; 2]),
}

impl FloatOrRange {
    /// The smallest and the largest number.
    #[must_use]
    pub const fn bounds(&self) -> (f64, f64) {
        match self {
            Self::Fixed(value) => (*value, *value),
            Self::Range([low, high]) => (*low, *high),
        }
    }
}

impl FieldValue for FloatOrRange {
    fn kind() -> String {
        "number, or [low, high]".into()
    }
    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        match &node.value {
            Value::List(items) => match read_items::<f64>(items, cx)?.as_slice() {
                [low, high] => Some(Self::Range([*low, *high])),
                _ => {
                    cx.wrong_type(node, "a number, or two numbers [low, high]");
                    None
                }
            },
            _ => f64::read(node, cx).map(Self::Fixed),
        }
    }
    fn show(&self) -> String {
        match self {
            Self::Fixed(value) => value.show(),
            Self::Range([low, high]) => format!("[{}, {}]", low.show(), high.show()),
        }
    }
    fn is_falsy(&self) -> bool {
        matches!(self, Self::Fixed(value) if *value == 0.0)
    }
}

/// Two whole numbers: `[width, height]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageSize(pub u32, pub u32);

impl FieldValue for ImageSize {
    fn kind() -> String {
        "[width, height]".into()
    }
    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        if let Value::List(items) = &node.value
            && let [first, second] = items.as_slice()
        {
            return Some(Self(u32::read(first, cx)?, u32::read(second, cx)?));
        }
        cx.wrong_type(node, "two whole numbers: [width, height]");
        None
    }
    fn show(&self) -> String {
        format!("[{}, {}]", self.0, self.1)
    }
    fn is_falsy(&self) -> bool {
        false
    }
}
