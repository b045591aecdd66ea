//! Checks the output folders of a run on this machine: that they can be created and written to, and that the disk has
//! enough free space.

use crate::context::env;
use crate::output::format::size;
use crate::paths::{can_write_in, expand, free_space, nearest_existing};
use aitk_common::job::{JobSpec, Process, ProcessKind};
use std::path::Path;

/// Returns an error for each output folder whose path, or a part of it, is a file, or in which this user may not write.
pub(super) fn folder_problems(spec: &JobSpec, directory: &Path) -> Vec<String> {
    let log_folder = |process: &Process| Some(("log_dir", process.trainer()?.log_dir.clone()?));
    let folders = spec.process.iter().enumerate().flat_map(|(index, process)| {
        let results = output_folder(process).map(|(key, folder)| (key, folder.to_owned()));
        let both = results.into_iter().chain(log_folder(process));
        both.map(move |(key, folder)| (index, process, key, folder))
    });
    let problems = folders.filter_map(|(index, process, key, folder)| {
        let mut path = expand(&folder, directory, &env);
        let has_run_folder =
            process.trainer().is_some() || process.lm_trainer().is_some() || process.extension().is_some();
        if key != "log_dir" && has_run_folder {
            path.push(&spec.name);
        }
        let problem = folder_problem(&path, can_write_in)?;
        Some(
            spec.finding(format!("config.process[{index}].{key}"), problem)
                .to_string(),
        )
    });
    problems.collect()
}

/// Why results cannot be written into a folder, which need not exist. `can_write`: whether this user may create files in a folder.
fn folder_problem(folder: &Path, can_write: impl Fn(&Path) -> bool) -> Option<String> {
    let existing = nearest_existing(folder);
    let shown = existing.display();
    if existing.exists() && !existing.is_dir() {
        return Some(format!(
            "{shown} is a file, and the results go into a folder of that name"
        ));
    }
    (!can_write(existing)).then(|| {
        format!(
            "this user may not write in {shown}, and the results go into {}: change the permissions, or give another folder",
            folder.display()
        )
    })
}

/// Returns a warning for each training that may write more than the disk has free. `trainings`: the index of each in
/// `config.process`, and the bytes that it writes at most.
pub(super) fn disk_warnings(
    trainings: impl Iterator<Item = (usize, u64)>,
    spec: &JobSpec,
    directory: &Path,
) -> Vec<String> {
    let warnings = trainings.filter_map(|(process, needed)| {
        let (_, folder) = output_folder(spec.process.get(process)?)?;
        let free = free_space(&expand(folder, directory, &env))?;
        (needed > free).then(|| {
            format!(
                "the training writes up to {} to the disk of {folder}, samples not counted, and only {} are free there",
                size(needed),
                size(free)
            )
        })
    });
    warnings.collect()
}

/// Returns the key and the value of the folder that a process writes to.
fn output_folder(process: &Process) -> Option<(&'static str, &str)> {
    match &process.kind {
        ProcessKind::Train(process) => Some(("training_folder", process.training_folder.as_deref()?)),
        ProcessKind::LmTrain(process) => Some(("training_folder", process.training_folder.as_deref()?)),
        ProcessKind::Extension(process) => Some(("training_folder", process.training_folder.as_deref()?)),
        ProcessKind::Generate(process) => Some(("output_folder", &process.output_folder)),
        ProcessKind::Img2Img(process) => Some(("output_folder", &process.output_folder)),
        ProcessKind::LmGenerate(process) => Some(("output_folder", &process.output_folder)),
        ProcessKind::LmExport(process) => Some(("output_folder", &process.output_folder)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_that_cannot_be_written_to_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let results = folder.path().join("out/cat");
        assert_eq!(folder_problem(&results, |_| true), None);
        let asked = std::cell::RefCell::new(Vec::new());
        let problem = folder_problem(&results, |folder| {
            asked.borrow_mut().push(folder.to_owned());
            false
        });
        let problem = problem.unwrap();
        assert!(
            problem.contains("may not write in") && problem.contains(&results.display().to_string()),
            "{problem}"
        );
        // The folder in which the first missing one would be created.
        assert_eq!(asked.into_inner(), [folder.path()]);
        std::fs::write(folder.path().join("out"), "").unwrap();
        let problem = folder_problem(&results, |_| true).unwrap();
        assert!(problem.contains("out is a file"), "{problem}");
    }
}
