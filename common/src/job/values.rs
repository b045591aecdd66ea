//! [`FieldValue`] for numbers, text, lists and maps, with the type coercions of ai-toolkit.

use super::node::{Node, Value};
use super::schema::{
    FieldValue, Input, ReadContext, SectionInfo, SupportLevel, SupportReport, is_falsy_json, nearest, read_items,
    show_items, show_json,
};

pub use super::compound::{Float, FloatOrRange, ImageSize, Integer, OneOrMany, TextOrFalse, TextSource};

/// How deep the positions of keys are kept in values of any form, for messages.
const POSITION_DEPTH: usize = 2;

/// A free-form map, in the order of the document.
pub type FreeMap = serde_json::Map<String, serde_json::Value>;

/// Reads a value that is one of some names.
pub(crate) fn read_choice<T>(
    node: &Node,
    cx: &mut ReadContext,
    what: &str,
    names: &[&'static str],
    from_name: impl Fn(&str) -> Option<T>,
) -> Option<T> {
    let Some(text) = as_text(node).or(node.plain.as_deref()) else {
        let article = if what.starts_with(['a', 'e', 'i', 'o', 'u']) {
            "an"
        } else {
            "a"
        };
        cx.wrong_type(node, &format!("the name of {article} {what} (text)"));
        return None;
    };
    let value = from_name(text.trim());
    if value.is_none() {
        let hint =
            nearest(text, names.iter().copied()).map_or(String::new(), |near| format!(" Did you mean `{near}`?"));
        cx.error(format!(
            "`{}` is not a known {what}.{hint} Known: {}",
            super::node::shorten(text),
            names.join(", ")
        ));
    }
    value
}

/// Returns the text, or the source characters of a number in a text key.
fn as_text(node: &Node) -> Option<&str> {
    match &node.value {
        Value::Text(text) => Some(text),
        Value::Int(_) | Value::Float(_) => node.plain.as_deref(),
        _ => None,
    }
}

fn as_integer(node: &Node) -> Option<i64> {
    match node.value {
        Value::Int(value) => Some(value),
        // 2^53: above it a float may not be an exact integer.
        #[allow(clippy::cast_possible_truncation)]
        Value::Float(value) if value.fract() == 0.0 && value.abs() <= 9_007_199_254_740_992.0 => Some(value as i64),
        _ => None,
    }
}

macro_rules! integers {
    ($($ty:ty => $kind:literal),*) => {$(
        impl FieldValue for $ty {
            fn kind() -> String {
                $kind.into()
            }
            fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
                let number = as_integer(node);
                let value = number.and_then(|value| Self::try_from(value).ok());
                if value.is_none() {
                    // A number that no integer of a config holds was read as a float.
                    let is_huge = matches!(node.value, Value::Float(value) if value > i64::MAX as f64);
                    match number.is_some_and(|number| number > 0) || is_huge {
                        true => {
                            let largest = i64::try_from(Self::MAX).unwrap_or(i64::MAX);
                            let to = if $kind.ends_with("from 0") { "to" } else { "up to" };
                            cx.wrong_type(node, &format!("a {} {to} {largest}", $kind));
                        }
                        false => cx.wrong_type(node, concat!("a ", $kind)),
                    }
                }
                value
            }
            fn show(&self) -> String {
                self.to_string()
            }
            fn is_falsy(&self) -> bool {
                *self == 0
            }
        }
    )*};
}
integers!(u32 => "whole number from 0", u64 => "whole number from 0", i64 => "whole number");

impl FieldValue for f64 {
    fn kind() -> String {
        "number".into()
    }
    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        #[allow(clippy::cast_precision_loss)]
        let value = match node.value {
            Value::Int(value) => Some(value as Self),
            Value::Float(value) if value.is_finite() => Some(value),
            _ => None,
        };
        if value.is_none() {
            cx.wrong_type(node, "a finite number");
        }
        value
    }
    fn show(&self) -> String {
        show_float(*self)
    }
    fn is_falsy(&self) -> bool {
        *self == 0.0
    }
}

fn show_float(value: f64) -> String {
    if value != 0.0 && value.abs() < 1e-3 {
        format!("{value:e}")
    } else {
        format!("{value:?}")
    }
}

impl FieldValue for bool {
    fn kind() -> String {
        "true or false".into()
    }
    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        match node.value {
            Value::Bool(value) => Some(value),
            Value::Int(0) => Some(false),
            Value::Int(1) => Some(true),
            _ => {
                cx.wrong_type(node, "true or false");
                None
            }
        }
    }
    fn show(&self) -> String {
        self.to_string()
    }
    fn is_falsy(&self) -> bool {
        !self
    }
}

impl FieldValue for String {
    fn kind() -> String {
        "text".into()
    }
    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        let text = as_text(node);
        match text {
            None => cx.wrong_type(node, "text"),
            // No system has such paths, and programs end a text there.
            Some(text) if text.contains('\0') => {
                cx.error("expected text without the character NUL (`\\0`)");
                return None;
            }
            Some(_) => {}
        }
        text.map(str::to_owned)
    }
    fn show(&self) -> String {
        if self.is_empty() { "\"\"".into() } else { self.clone() }
    }
    fn is_falsy(&self) -> bool {
        self.is_empty()
    }
    fn for_each_text(&self, f: &mut dyn FnMut(&str, &str)) {
        f("", self);
    }
}

impl<T: FieldValue> FieldValue for Option<T> {
    const NULLABLE: bool = true;
    const HAS_CHECKS: bool = T::HAS_CHECKS;
    const HAS_INPUTS: bool = T::HAS_INPUTS;
    fn kind() -> String {
        T::kind()
    }
    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        T::read(node, cx).map(Some)
    }
    fn null() -> Option<Self> {
        Some(None)
    }
    fn show(&self) -> String {
        self.as_ref().map_or_else(|| "null".into(), T::show)
    }
    fn is_falsy(&self) -> bool {
        self.as_ref().is_none_or(T::is_falsy)
    }
    fn check_support(&self, path: &str, report: &mut SupportReport) {
        if let Some(value) = self {
            value.check_support(path, report);
        }
    }
    fn collect_inputs(&self, path: &str, out: &mut Vec<Input>) {
        if let Some(value) = self {
            value.collect_inputs(path, out);
        }
    }
    fn for_each_text(&self, f: &mut dyn FnMut(&str, &str)) {
        if let Some(value) = self {
            value.for_each_text(f);
        }
    }
    fn section() -> Option<SectionInfo> {
        T::section()
    }
    fn values() -> Vec<(&'static str, SupportLevel)> {
        T::values()
    }
}

impl<T: FieldValue> FieldValue for Box<T> {
    const HAS_CHECKS: bool = T::HAS_CHECKS;
    const HAS_INPUTS: bool = T::HAS_INPUTS;
    fn kind() -> String {
        T::kind()
    }
    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        T::read(node, cx).map(Self::new)
    }
    fn show(&self) -> String {
        (**self).show()
    }
    fn is_falsy(&self) -> bool {
        (**self).is_falsy()
    }
    fn check_support(&self, path: &str, report: &mut SupportReport) {
        (**self).check_support(path, report);
    }
    fn collect_inputs(&self, path: &str, out: &mut Vec<Input>) {
        (**self).collect_inputs(path, out);
    }
    fn section() -> Option<SectionInfo> {
        T::section()
    }
}

impl<T: FieldValue> FieldValue for Vec<T> {
    const HAS_CHECKS: bool = T::HAS_CHECKS;
    const HAS_INPUTS: bool = T::HAS_INPUTS;
    fn kind() -> String {
        format!("list of {}", T::kind())
    }
    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        match &node.value {
            Value::List(items) => read_items(items, cx),
            _ => {
                cx.wrong_type(node, &format!("a {} (lines that begin with `- `)", Self::kind()));
                None
            }
        }
    }
    fn show(&self) -> String {
        show_items(self)
    }
    fn is_falsy(&self) -> bool {
        self.is_empty()
    }
    fn check_support(&self, path: &str, report: &mut SupportReport) {
        for (index, item) in self.iter().enumerate() {
            item.check_support(&format!("{path}[{index}]"), report);
        }
    }
    fn collect_inputs(&self, path: &str, out: &mut Vec<Input>) {
        for (index, item) in self.iter().enumerate() {
            item.collect_inputs(&format!("{path}[{index}]"), out);
        }
    }
    fn for_each_text(&self, f: &mut dyn FnMut(&str, &str)) {
        for (index, item) in self.iter().enumerate() {
            item.for_each_text(&mut |subpath, text| f(&format!("[{index}]{subpath}"), text));
        }
    }
    fn section() -> Option<SectionInfo> {
        T::section()
    }
    fn values() -> Vec<(&'static str, SupportLevel)> {
        T::values()
    }
}

/// Reports the first number in a value that JSON cannot store, at its key. False if there is none.
fn report_non_finite(node: &Node, cx: &mut ReadContext) -> bool {
    match &node.value {
        Value::Float(value) if !value.is_finite() => {
            cx.error("numbers must be finite here: .inf and .nan cannot be stored");
            true
        }
        Value::List(items) => items
            .iter()
            .enumerate()
            .any(|(index, item)| cx.descend(&format!("[{index}]"), item.mark, |cx| report_non_finite(item, cx))),
        Value::Map(entries) => entries
            .iter()
            .any(|entry| cx.descend(&entry.key, entry.mark, |cx| report_non_finite(&entry.node, cx))),
        _ => false,
    }
}

impl FieldValue for FreeMap {
    fn kind() -> String {
        "map".into()
    }
    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        match node.to_json() {
            Some(serde_json::Value::Object(map)) => Some(map),
            Some(_) => {
                cx.wrong_type(node, "a map (`key: value` lines)");
                None
            }
            None => {
                report_non_finite(node, cx);
                None
            }
        }
    }
    fn show(&self) -> String {
        serde_json::Value::Object(self.clone()).to_string()
    }
    fn is_falsy(&self) -> bool {
        self.is_empty()
    }
}

impl FieldValue for serde_json::Value {
    fn kind() -> String {
        "any".into()
    }
    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        let json = node.to_json();
        if json.is_none() {
            report_non_finite(node, cx);
        }
        cx.record_positions(node, POSITION_DEPTH);
        json
    }
    fn show(&self) -> String {
        show_json(self)
    }
    fn is_falsy(&self) -> bool {
        is_falsy_json(self)
    }
}
