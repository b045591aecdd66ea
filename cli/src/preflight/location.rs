//! The places in a config that messages about a process are about.

use crate::context::env;
use crate::paths::expand;
use aitk_common::job::{Finding, Input, JobSpec};
use std::path::Path;

/// A message as a finding at the key of this process that it names, or at that of an input that it names. `None`: it names neither.
pub(super) fn named_finding(spec: &JobSpec, process: usize, directory: &Path, message: &str) -> Option<Finding> {
    let local = |input: &Input| Some(expand(&input.config_path, directory, &env).display().to_string());
    spec.finding_named_in(message, &format!("config.process[{process}]."), local)
}

/// Prefixes a problem with the file, line and key of this process that it is about, if it names a key or an input.
pub(super) fn at_key(spec: &JobSpec, process: usize, directory: &Path, problem: &str) -> String {
    named_finding(spec, process, directory, problem).map_or_else(|| problem.to_owned(), |found| found.to_string())
}
