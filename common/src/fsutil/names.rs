//! Checks untrusted file names before they become paths below a folder of aitk.
//!
//! A relative name with `/` between its components is accepted if every component is an ordinary file name on Linux,
//! macOS and Windows. Other names are refused and never repaired, because two parsers that repair a name differently
//! cause path traversal bugs. Nothing is percent-decoded: `%2e%2e` is
//! refused, so that a later decoder cannot turn it into `..`.

use std::path::{Path, PathBuf};

/// The length limit of a component in bytes, as on ext4, APFS and NTFS.
pub const MAX_PART_BYTES: usize = 255;
/// The length limit of a whole name in bytes.
pub const MAX_NAME_BYTES: usize = 1024;

/// A name that cannot be used as a path.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the name {name:?} cannot be used: {reason}; rename the file")]
pub struct BadName {
    /// The name, truncated for the message.
    pub name: String,
    /// The rule that it breaks.
    pub reason: &'static str,
}

/// Checks a relative name of one or more components, with `/` between them.
///
/// # Errors
/// [`BadName`] with the rule that it breaks.
pub fn check(name: &str) -> Result<(), BadName> {
    match check_name_rules(name) {
        None => Ok(()),
        Some(reason) => Err(BadName {
            name: truncated(name),
            reason,
        }),
    }
}

/// Checks a name of exactly one component.
///
/// # Errors
/// [`BadName`] with the rule that it breaks.
pub fn check_part(name: &str) -> Result<(), BadName> {
    if name.contains('/') {
        return Err(BadName {
            name: truncated(name),
            reason: "a '/' is not allowed here",
        });
    }
    check(name)
}

/// Checks a name and joins it to `folder`.
///
/// # Errors
/// [`BadName`].
pub fn below(folder: &Path, name: &str) -> Result<PathBuf, BadName> {
    check(name)?;
    let mut path = folder.to_owned();
    path.extend(name.split('/'));
    Ok(path)
}

fn truncated(name: &str) -> String {
    let mut short: String = name.chars().take(80).collect();
    if short.len() < name.len() {
        short.push('…');
    }
    short
}

fn check_name_rules(name: &str) -> Option<&'static str> {
    if name.is_empty() {
        return Some("it is empty");
    }
    if name.len() > MAX_NAME_BYTES {
        return Some("it is longer than 1024 bytes");
    }
    if name.starts_with('/') {
        return Some("it is an absolute path");
    }
    name.split('/').find_map(check_part_rules)
}

fn check_part_rules(part: &str) -> Option<&'static str> {
    if part.is_empty() {
        return Some("it has an empty part between two '/'");
    }
    if part == "." || part == ".." {
        return Some("'.' and '..' are not names");
    }
    if part.len() > MAX_PART_BYTES {
        return Some("a part of it is longer than 255 bytes");
    }
    if part.chars().any(|c| c.is_control() || is_invisible(c)) {
        return Some("it has a control or invisible character");
    }
    if part.contains('\\') {
        return Some("it has a backslash");
    }
    if part.contains(':') {
        return Some("it has a colon");
    }
    if part.contains(is_slash_or_dot_lookalike) {
        return Some("it has a character that some systems turn into '/', '\\', ':' or '.'");
    }
    let lower = part.to_ascii_lowercase();
    if ["%2e", "%2f", "%5c", "%3a", "%00", "%25"]
        .iter()
        .any(|code| lower.contains(code))
    {
        return Some("it has a percent-encoded '.', '/', '\\', ':', '%' or NUL");
    }
    if part.ends_with('.') || part.ends_with(' ') || part.starts_with(' ') {
        return Some("a part of it begins or ends with a space, or ends with a dot");
    }
    if is_reserved_on_windows(&lower) {
        return Some("it is a device name on Windows");
    }
    None
}

/// Zero-width and direction-changing characters, which make a displayed name differ from the real one.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}')
}

/// Characters that Unicode compatibility normalisation turns into a separator or a dot.
fn is_slash_or_dot_lookalike(c: char) -> bool {
    matches!(
        c,
        '\u{2024}'
            ..='\u{2026}'
                | '\u{2044}'
                | '\u{2215}'
                | '\u{2216}'
                | '\u{29f8}'
                | '\u{29f9}'
                | '\u{fe52}'
                | '\u{fe55}'
                | '\u{fe68}'
                | '\u{ff0e}'
                | '\u{ff0f}'
                | '\u{ff1a}'
                | '\u{ff3c}'
                | '\u{fffd}'
    )
}

fn is_reserved_on_windows(lower: &str) -> bool {
    let stem = lower.split('.').next().unwrap_or(lower).trim_end();
    matches!(stem, "con" | "prn" | "aux" | "nul" | "conin$" | "conout$")
        || stem
            .strip_prefix("com")
            .or_else(|| stem.strip_prefix("lpt"))
            .is_some_and(|rest| {
                matches!(rest, "¹" | "²" | "³") || (rest.len() == 1 && rest.bytes().all(|b| b.is_ascii_digit()))
            })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinary_names_are_accepted() {
        for good in [
            "a.png",
            "sub/folder/img (1).JPG",
            "ünïcode/日本.txt",
            "a..b",
            ".hidden",
            "100%.txt",
            "console.txt",
            "com.txt",
        ] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        assert_eq!(below(Path::new("/x"), "a/b").unwrap(), Path::new("/x/a/b"));
        assert!(check_part("a/b").is_err());
    }
}
