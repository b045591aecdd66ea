//! Formatting of errors for logs and answers.

/// Formats an error with its causes in one line.
pub(crate) fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut inner = error.source();
    while let Some(source) = inner {
        text.push_str(": ");
        text.push_str(&source.to_string());
        inner = source.source();
    }
    text
}
