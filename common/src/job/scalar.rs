//! Resolves the types of unquoted scalars by the rules of ai-toolkit's YAML 1.1 loader: `yes` and `off` are booleans, a
//! leading zero means octal, `1:30` is a base-60 number, and, beyond plain YAML 1.1, `1e-4` is a float. Dates stay text.

use super::node::Value;

/// Returns the typed value of an unquoted scalar.
#[must_use]
pub fn resolve(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Value::Null,
        "yes" | "Yes" | "YES" | "true" | "True" | "TRUE" | "on" | "On" | "ON" => return Value::Bool(true),
        "no" | "No" | "NO" | "false" | "False" | "FALSE" | "off" | "Off" | "OFF" => return Value::Bool(false),
        ".inf" | ".Inf" | ".INF" | "+.inf" | "+.Inf" | "+.INF" => return Value::Float(f64::INFINITY),
        "-.inf" | "-.Inf" | "-.INF" => return Value::Float(f64::NEG_INFINITY),
        ".nan" | ".NaN" | ".NAN" => return Value::Float(f64::NAN),
        _ => {}
    }
    // Numbers are short; this also bounds the work per scalar.
    if text.len() > 400 || !text.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '+' | '-' | '.')) {
        return Value::Text(text.to_owned());
    }
    integer(text)
        .or_else(|| float(text))
        .unwrap_or_else(|| Value::Text(text.to_owned()))
}

fn signed(text: &str) -> (bool, &str) {
    match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    }
}

fn integer(text: &str) -> Option<Value> {
    let (negative, body) = signed(text);
    if body.contains(':') {
        let mut total: i64 = 0;
        for part in sexagesimal(body)? {
            let part: i64 = part.parse().ok()?;
            total = total.checked_mul(60)?.checked_add(part)?;
        }
        return Some(Value::Int(if negative { -total } else { total }));
    }
    let (radix, digits) = if let Some(digits) = body.strip_prefix("0b") {
        (2, digits)
    } else if let Some(digits) = body.strip_prefix("0x") {
        (16, digits)
    } else if body.len() > 1 && body.starts_with('0') {
        (8, &body[1..])
    } else {
        (10, body)
    };
    let first_is_digit = digits.starts_with(|c: char| c.is_digit(radix) || (radix != 10 && c == '_'));
    if !first_is_digit || !digits.chars().all(|c| c == '_' || c.is_digit(radix)) {
        return None;
    }
    let clean: String = digits.chars().filter(|&c| c != '_').collect();
    if clean.is_empty() {
        return None;
    }
    let magnitude = i128::from_str_radix(&clean, radix).ok();
    let value = magnitude.map(|value| if negative { -value } else { value });
    match value.and_then(|value| i64::try_from(value).ok()) {
        Some(value) => Some(Value::Int(value)),
        // Beyond i64: keep the magnitude as a float.
        None if radix == 10 => clean
            .parse()
            .ok()
            .map(|value: f64| Value::Float(if negative { -value } else { value })),
        None => None,
    }
}

/// Splits and checks the base-60 digits of `1:30` or `12:05:09`. The caller removes a fraction first.
fn sexagesimal(body: &str) -> Option<Vec<String>> {
    let parts: Vec<String> = body.split(':').map(|part| part.replace('_', "")).collect();
    let (first, rest) = parts.split_first()?;
    let is_digits = |part: &String| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let ok = is_digits(first)
        && !first.starts_with('0')
        && rest
            .iter()
            .all(|part| is_digits(part) && part.len() <= 2 && part.parse::<u32>().is_ok_and(|value| value < 60));
    ok.then_some(parts)
}

fn float(text: &str) -> Option<Value> {
    let (negative, body) = signed(text);
    let sign = if negative { -1.0 } else { 1.0 };
    if let Some((whole, fraction)) = body.split_once('.')
        && whole.contains(':')
        && fraction.bytes().all(|byte| byte.is_ascii_digit() || byte == b'_')
    {
        let mut total = 0.0;
        for part in sexagesimal(whole)? {
            total = total * 60.0 + part.parse::<f64>().ok()?;
        }
        let fraction: f64 = format!("0.{}", fraction.replace('_', ""))
            .trim_end_matches('.')
            .parse()
            .ok()?;
        return Some(Value::Float(sign * (total + fraction)));
    }
    let (mantissa, exponent) = match body.find(['e', 'E']) {
        Some(at) => (&body[..at], Some(&body[at + 1..])),
        None => (body, None),
    };
    let (whole, fraction) = match mantissa.split_once('.') {
        Some((whole, fraction)) => (whole, Some(fraction)),
        None => (mantissa, None),
    };
    let digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit() || byte == b'_');
    let has_point = fraction.is_some();
    let fraction = fraction.unwrap_or("");
    if !digits(whole) || !digits(fraction) || (!has_point && exponent.is_none()) {
        return None;
    }
    if whole.is_empty() {
        // `.5`; YAML 1.1 has no sign before it.
        if fraction.is_empty() || fraction.starts_with('_') || body.len() != text.len() {
            return None;
        }
    } else if !whole.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    if let Some(exponent) = exponent {
        let (_, digits) = signed(exponent);
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
    }
    let clean = body.replace('_', "");
    clean.parse::<f64>().ok().map(|value| Value::Float(sign * value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalars_get_their_yaml_1_1_types() {
        let text = |text: &str| Value::Text(text.into());
        let cases = [
            ("", Value::Null),
            ("~", Value::Null),
            ("yes", Value::Bool(true)),
            ("Off", Value::Bool(false)),
            ("y", text("y")),
            ("12", Value::Int(12)),
            ("-12", Value::Int(-12)),
            ("+12", Value::Int(12)),
            ("1_000", Value::Int(1000)),
            ("010", Value::Int(8)),
            ("0", Value::Int(0)),
            ("08", text("08")),
            ("0x1F", Value::Int(31)),
            ("0b101", Value::Int(5)),
            ("1:30", Value::Int(90)),
            ("-1:30", Value::Int(-90)),
            ("1:30.5", Value::Float(90.5)),
            ("1:99", text("1:99")),
            ("1e-4", Value::Float(1e-4)),
            ("1E5", Value::Float(1e5)),
            ("1.5e3", Value::Float(1500.0)),
            ("-1.5", Value::Float(-1.5)),
            ("1.", Value::Float(1.0)),
            (".5", Value::Float(0.5)),
            ("-.5", text("-.5")),
            (".", text(".")),
            ("-", text("-")),
            ("1e", text("1e")),
            ("1.2.3", text("1.2.3")),
            ("2024-01-31", text("2024-01-31")),
            ("9999999999", Value::Int(9_999_999_999)),
            ("99999999999999999999", Value::Float(1e20)),
            (".inf", Value::Float(f64::INFINITY)),
            ("1b", text("1b")),
            ("wan22_14b:t2v", text("wan22_14b:t2v")),
        ];
        for (source, expected) in cases {
            assert_eq!(resolve(source), expected, "{source}");
        }
        assert!(matches!(resolve(".nan"), Value::Float(value) if value.is_nan()));
    }
}
