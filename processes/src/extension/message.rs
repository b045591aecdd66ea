//! The messages between an attempt and the program of an extension: one JSON object per line (docs/extensions.md).

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// The version of the protocol.
pub(super) const VERSION: u64 = 1;

/// A message to the program.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum HostMessage<'a> {
    /// Start: sent once, after the program's `hello`.
    Start {
        version: u64,
        config: &'a serde_json::Map<String, serde_json::Value>,
        inputs: &'a BTreeMap<&'a str, &'a Path>,
        output: &'a Path,
        device: &'a str,
        seed: u64,
        /// A folder to resume from. Always null in this version.
        resume: Option<&'a Path>,
    },
    /// Save and end.
    Stop,
}

/// A message from the program.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum ProgramMessage {
    /// The first message.
    Hello {
        version: u64,
        #[serde(default)]
        name: Option<String>,
        #[serde(default)]
        config_schema: Option<serde_json::Value>,
    },
    /// Steps done.
    Progress {
        step: u64,
        total: u64,
        #[serde(default)]
        loss: Option<f64>,
    },
    /// A line for the log.
    Log { level: String, message: String },
    /// A complete file below the output folder.
    Artifact { path: String },
    /// All work is done.
    Done,
    /// The work failed.
    Error { message: String },
}

/// Parses one line of the program.
///
/// # Errors
/// What is wrong with the line.
pub(super) fn parse(line: &[u8]) -> Result<ProgramMessage, String> {
    let text = std::str::from_utf8(line).map_err(|error| {
        format!(
            "sent a line that is not UTF-8 (byte {} of it): standard output is for messages alone, so print text to standard error",
            error.valid_up_to() + 1
        )
    })?;
    serde_json::from_str(text.trim()).map_err(|error| {
        format!(
            "sent a line that is not a message of the protocol ({error}): `{}`; standard output is for messages alone, so print text \
             to standard error",
            shorten(text.trim(), 120)
        )
    })
}

/// The beginning of a text, without control characters.
pub(super) fn shorten(text: &str, max: usize) -> String {
    let mut short: String = text
        .chars()
        .take(max)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    if text.chars().nth(max).is_some() {
        short.push('…');
    }
    short
}
