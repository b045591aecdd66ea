//! The values of `--allow-extension`, for the worker that runs in this program.

use crate::exit::Exit;
use crate::failure::Failure;
use aitk_common::job::JobSpec;
use std::path::Path;

/// Checks the programs, and makes their paths absolute.
///
/// # Errors
/// When a value is wrong: an error of the command line.
pub fn absolute_programs(values: &[String], directory: &Path) -> Result<Vec<String>, Failure> {
    let checked = aitk_worker::check_allowed_programs(values, directory);
    checked.map_err(|wrong| {
        let hint = "give NAME=PROGRAM, such as --allow-extension my-tool=program/my_tool.py (`aitk help extensions`)";
        Failure::usage(format!("--allow-extension {wrong}")).hint(hint)
    })
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
    fn wrong_values_are_errors_of_the_command_line() {
        let absolute = |values: &[&str]| {
            let values: Vec<String> = values.iter().map(|value| (*value).to_owned()).collect();
            absolute_programs(&values, Path::new("/"))
        };
        assert_eq!(absolute(&["", " "]).unwrap(), Vec::<String>::new());
        for wrong in ["py", "py=", "=x", "PY=x", "py=nope.py", "py=usr"] {
            let failure = absolute(&[wrong]).unwrap_err();
            assert_eq!(failure.exit, Exit::Usage);
            let shown = failure.render(false);
            assert!(shown.contains(&format!("--allow-extension {wrong}: ")), "{shown}");
        }
        let twice = absolute(&["sh=bin/../bin/sh", "sh=usr/bin/env"]);
        assert!(twice.is_err());
    }
}
