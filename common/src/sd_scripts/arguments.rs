//! Lists of `name=value`, as `network_args` and `optimizer_args` have them.

use super::report::Import;
use super::settings::Settings;
use serde_json::Value;

/// An argument.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Argument {
    pub name: String,
    pub text: String,
}

impl Argument {
    /// Splits `name=value`.
    pub(super) fn split(text: &str) -> Option<Self> {
        let (name, value) = text.split_once('=')?;
        Some(Self {
            name: name.trim().to_owned(),
            text: value.trim().trim_matches('"').to_owned(),
        })
    }

    /// Its value as Python's literal: a number, `True`, `None`, a text in quotes, a tuple or list of numbers.
    pub(super) fn literal(&self) -> Option<Value> {
        literal(&self.text)
    }

    /// Its value as a number.
    pub(super) fn number(&self) -> Option<f64> {
        self.text.trim().parse().ok().filter(|number: &f64| number.is_finite())
    }

    /// Whether LyCORIS takes it for true (`str_bool`): any text but `False`.
    pub(super) fn is_not_false(&self) -> bool {
        !self.text.eq_ignore_ascii_case("false")
    }

    /// Whether Python treats the value as false: an empty text, `False`, `None` or 0.
    pub(super) fn is_off(&self) -> bool {
        matches!(
            self.text.trim().to_lowercase().as_str(),
            "" | "false" | "none" | "0" | "0.0"
        )
    }
}

/// The arguments of an option; what is not one is left out.
pub(super) fn parse_arguments(settings: &Settings, option: &str) -> Vec<Argument> {
    let texts = settings.texts(option);
    texts.iter().filter_map(|text| Argument::split(text)).collect()
}

/// Splits the arguments of an option. What is not a `name=value`, or is there twice, is an error.
pub(super) fn arguments(import: &mut Import<'_>, option: &str) -> Vec<Argument> {
    let mut found: Vec<Argument> = Vec::new();
    let settings = import.settings;
    for text in settings.texts(option) {
        let Some(argument) = Argument::split(text) else {
            let shown: String = text.chars().take(60).collect();
            import.error(
                option,
                format!("expected name=value, found \"{}\"", shown.escape_debug()),
            );
            continue;
        };
        if found.iter().any(|other| other.name == argument.name) {
            let name = argument.name.escape_debug();
            import.error(option, format!("`{name}` is given twice"));
            continue;
        }
        found.push(argument);
    }
    found
}

fn literal(text: &str) -> Option<Value> {
    let text = text.trim();
    if let Some(value) = scalar(text) {
        return Some(value);
    }
    let bare = text
        .strip_prefix(['(', '['])
        .and_then(|rest| rest.strip_suffix([')', ']']));
    let inner = bare.unwrap_or(text);
    if bare.is_none() && !inner.contains(',') {
        return None;
    }
    let items = inner.split(',').map(str::trim).filter(|item| !item.is_empty());
    items.map(scalar).collect::<Option<Vec<_>>>().map(Value::from)
}

/// A literal that is not a tuple or list. Lists are read by [`literal`] alone, without recursion: thousands of brackets inside each
/// other would use up the stack.
fn scalar(text: &str) -> Option<Value> {
    match text {
        "True" | "true" => return Some(Value::Bool(true)),
        "False" | "false" => return Some(Value::Bool(false)),
        "None" => return Some(Value::Null),
        _ => {}
    }
    if let Ok(whole) = text.parse::<i64>() {
        return Some(Value::from(whole));
    }
    if let Ok(number) = text.parse::<f64>() {
        return number.is_finite().then(|| Value::from(number));
    }
    ['\'', '"']
        .into_iter()
        .find_map(|quote| {
            let inner = text.strip_prefix(quote)?.strip_suffix(quote)?;
            // Otherwise the texts of a list without brackets would be one text.
            (!inner.contains(quote)).then_some(inner)
        })
        .map(Value::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn literals_are_read_as_python_reads_them() {
        for (text, expected) in [
            ("True", json!(true)),
            (" None ", json!(null)),
            ("-3", json!(-3)),
            ("1e-4", json!(1e-4)),
            ("'a, b'", json!("a, b")),
            ("(0.9, 0.99)", json!([0.9, 0.99])),
            ("[1,]", json!([1])),
            ("0.9, None", json!([0.9, null])),
            ("()", json!([])),
            ("'a', 'b'", json!(["a", "b"])),
        ] {
            assert_eq!(literal(text), Some(expected), "{text}");
        }
        for text in ["", "'", "nan", "1e999", "x", "(1, x)", "(1, inf)", "((1, 2), 3)"] {
            assert_eq!(literal(text), None, "{text}");
        }
    }

    /// A stack of 2 MiB, which a test has, holds far fewer calls than there are brackets.
    #[test]
    fn brackets_inside_each_other_are_no_literal() {
        let depth = 200_000;
        let text = format!("{}1{}", "(".repeat(depth), ")".repeat(depth));
        assert_eq!(literal(&text), None);
    }
}
