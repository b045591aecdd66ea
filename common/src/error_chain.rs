//! An error with its causes as one line.

use std::error::Error;

/// Formats an error and its causes as one line. A cause that the text names already is left out: some errors have theirs in their own text.
#[must_use]
pub fn error_chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut inner = error.source();
    while let Some(cause) = inner {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        inner = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fsutil::FsError;
    use std::io;

    #[derive(Debug, thiserror::Error)]
    #[error("no token was given")]
    struct NoToken {
        source: FsError,
    }

    #[test]
    fn each_cause_is_named_once() {
        let error = NoToken {
            source: FsError::new("read", "/data/token", io::Error::other("the disk is gone")),
        };
        assert_eq!(
            error_chain(&error),
            "no token was given: could not read /data/token: the disk is gone"
        );
    }
}
