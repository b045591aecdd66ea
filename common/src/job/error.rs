//! Errors and warnings about job configs, each with its file, line, column and key.

use serde::{Deserialize, Serialize};
use std::fmt;

/// An error or a warning about one key of a config.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The file, as the user named it, or `command line`. Unset when the config did not come from a file.
    pub file: Option<String>,
    /// Line, counted from 1. Unset when the position is unknown.
    pub line: Option<u32>,
    /// Column, counted from 1.
    pub column: Option<u32>,
    /// The key with its path: `config.process[0].train.lr`. Empty for the document as a whole.
    pub key: String,
    /// What is wrong, what was expected, what to do.
    pub message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.file, self.line, self.column) {
            (Some(file), Some(line), Some(column)) => write!(f, "{file}:{line}:{column}: ")?,
            (Some(file), Some(line), None) => write!(f, "{file}:{line}: ")?,
            (Some(file), None, _) => write!(f, "{file}: ")?,
            (None, Some(line), Some(column)) => write!(f, "line {line}, column {column}: ")?,
            (None, Some(line), None) => write!(f, "line {line}: ")?,
            (None, None, _) => {}
        }
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.message)
    }
}

/// Findings in one summary.
const SUMMARY_FINDINGS: usize = 5;
/// Characters of each finding in a summary.
const SUMMARY_CHARS: usize = 400;

/// Joins the first findings into one message of bounded length, because a gRPC status message must fit into the HTTP/2 headers.
#[must_use]
pub fn summary(findings: &[Finding]) -> String {
    let shown = findings.iter().take(SUMMARY_FINDINGS);
    let lines: Vec<String> = shown
        .map(|finding| finding.to_string().chars().take(SUMMARY_CHARS).collect())
        .collect();
    lines.join("\n")
}

/// The keys and values with which a job cannot run, and those without effect.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Support {
    /// With these the job must not start: what this release does not support, and what does not fit the model or another key.
    pub errors: Vec<Finding>,
    /// Whether one of the errors is a key or value that this release does not support: ignoring it would change the result.
    #[serde(default)]
    pub has_unsupported: bool,
    /// These are ignored; the result is still the requested one.
    pub warnings: Vec<Finding>,
}

impl Support {
    /// Whether the job can run.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.errors.is_empty()
    }
}

impl fmt::Display for Support {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.errors.is_empty() {
            writeln!(f, "cannot run:")?;
            for finding in &self.errors {
                writeln!(f, "  error: {finding}")?;
            }
        }
        for finding in &self.warnings {
            writeln!(f, "  warning: {finding}")?;
        }
        Ok(())
    }
}

/// Why a job config could not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// No such config.
    #[error("no config `{name}`: looked for {}", searched.join(", "))]
    NotFound {
        /// The name or path that was asked for.
        name: String,
        /// The paths that were tried, in order.
        searched: Vec<String>,
    },
    /// The file could not be read.
    #[error("{path}: cannot be read: {source}")]
    Read {
        /// The file.
        path: String,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The file extension is not that of a known format.
    #[error("{path}: a config is a .yaml, .yml, .json or .jsonc file; rename it")]
    UnknownFormat {
        /// The file.
        path: String,
    },
    /// The config has errors, in the order of the document.
    #[error("{}", lines(findings))]
    Invalid {
        /// The errors; never empty.
        findings: Vec<Finding>,
    },
}

impl JobError {
    /// The errors of [`JobError::Invalid`]; empty for other variants.
    #[must_use]
    pub fn findings(&self) -> &[Finding] {
        match self {
            Self::Invalid { findings } => findings,
            _ => &[],
        }
    }
}

fn lines(findings: &[Finding]) -> String {
    let texts: Vec<String> = findings.iter().map(ToString::to_string).collect();
    texts.join("\n")
}
