//! Bounds of what a config may be. Far above anything a person writes; they keep hostile files cheap.

use super::error::Finding;
use super::node::Mark;

/// Bytes of a config file.
pub const MAX_BYTES: u64 = 10 * 1024 * 1024;
/// Lists and maps inside each other.
pub const MAX_DEPTH: usize = 64;
/// Bytes of the tree after aliases, variables and names were filled in; a value counts for 64 and its text.
pub const MAX_EXPANDED: usize = 64 * 1024 * 1024;
/// What one value costs besides its text.
pub(crate) const NODE_COST: usize = 64;

pub(crate) fn finding(file: Option<&str>, mark: Mark, key: &str, message: impl Into<String>) -> Finding {
    Finding {
        file: file.map(str::to_owned),
        line: Some(mark.line),
        column: Some(mark.column),
        key: key.to_owned(),
        message: message.into(),
    }
}

pub(crate) fn too_deep() -> String {
    format!("more than {MAX_DEPTH} lists and maps inside each other; a config needs fewer than ten")
}

pub(crate) fn too_large() -> String {
    format!(
        "the config grows beyond {} MiB when aliases and variables are filled in",
        MAX_EXPANDED >> 20
    )
}
