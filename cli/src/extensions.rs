//! The values of `--allow-extension`, for the worker that runs in this program.

use crate::exit::Exit;
use crate::failure::Failure;
use aitk_common::job::JobSpec;
use std::path::Path;

/// Makes the programs absolute. The worker checks everything else.
#[must_use]
pub fn absolute_programs(values: &[String], directory: &Path) -> Vec<String> {
    let absolute = |value: &String| match value.split_once('=') {
        Some((name, program)) if !program.is_empty() => format!("{name}={}", directory.join(program).display()),
        _ => value.clone(),
    };
    values
        .iter()
        .filter(|value| !value.trim().is_empty())
        .map(absolute)
        .collect()
}

/// Checks that the extension of a job, if it has one, is allowed.
///
/// # Errors
/// What to add to the command.
pub fn check_allowed(spec: &JobSpec, allowed: &[String]) -> Result<(), Failure> {
    let Some(name) = spec.extension() else { return Ok(()) };
    let is_allowed = |value: &String| value.split_once('=').is_some_and(|(allowed, _)| allowed == name);
    match allowed.iter().any(is_allowed) {
        true => Ok(()),
        false => {
            let message = format!("the config runs the extension `{name}`, which is not allowed here");
            let hint = format!(
                "an extension is a program on this machine: if you trust it, add --allow-extension {name}=/PATH/OF/PROGRAM (`aitk help \
                 extensions`)"
            );
            Err(Failure::new(Exit::NothingFits, message).hint(hint))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_become_absolute() {
        let values = ["a=bin/x", "b=/opt/y", "c", ""].map(str::to_owned);
        assert_eq!(
            absolute_programs(&values, Path::new("/home/u")),
            ["a=/home/u/bin/x", "b=/opt/y", "c"]
        );
    }
}
