//! Checks the output folders of a run on this machine: that they can be created, and that the disk has enough free
//! space.

use crate::context::env;
use crate::output::format::size;
use crate::paths::{expand, free_space, nearest_existing};
use aitk_common::job::{JobSpec, Process, ProcessKind};
use std::path::Path;

/// Returns an error for each output folder whose path, or a part of it, is a file.
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
        let existing = nearest_existing(&path);
        let is_file = existing.exists() && !existing.is_dir();
        is_file.then(|| {
            let problem = format!(
                "{} is a file, and the results go into a folder of that name",
                existing.display()
            );
            spec.finding(format!("config.process[{index}].{key}"), problem)
                .to_string()
        })
    });
    problems.collect()
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
