//! Parses JSON with Python's non-standard numbers.

/// Parses JSON as Python writes it: `Infinity`, `-Infinity` and `NaN`, which are not valid JSON, become `null`.
///
/// # Errors
/// When the text is otherwise not JSON.
pub fn parse_json(text: &str) -> serde_json::Result<serde_json::Value> {
    let mut cleaned = String::with_capacity(text.len());
    let mut rest = text;
    let mut in_string = false;
    while let Some(c) = rest.chars().next() {
        let word = ["-Infinity", "Infinity", "NaN"]
            .into_iter()
            .find(|word| !in_string && rest.starts_with(word));
        if let Some(word) = word {
            cleaned.push_str("null");
            rest = &rest[word.len()..];
            continue;
        }
        let mut taken = c.len_utf8();
        if c == '\\' && in_string {
            taken += rest[taken..].chars().next().map_or(0, char::len_utf8);
        } else if c == '"' {
            in_string = !in_string;
        }
        cleaned.push_str(&rest[..taken]);
        rest = &rest[taken..];
    }
    serde_json::from_str(&cleaned)
}
