//! Where a run on this machine writes: whether there can be a folder, and whether the disk has room.

use crate::context::env;
use crate::output::format::size;
use crate::paths::{expand, free_space, nearest};
use aitk_common::job::{JobSpec, Process, ProcessKind};
use std::path::Path;

use super::Report;

/// What ends the run: a file where its folder would be.
pub(super) fn problems(spec: &JobSpec, directory: &Path) -> Vec<String> {
    let folders = spec.process.iter().enumerate().filter_map(|(index, process)| {
        let (key, folder) = folder_of(process)?;
        let mut path = expand(folder, directory, &env);
        if process.trainer().is_some() {
            path.push(&spec.name);
        }
        let there = nearest(&path);
        let in_the_way = there.exists() && !there.is_dir();
        in_the_way.then(|| {
            let problem = format!(
                "{} is a file, and the results go into a folder of that name",
                there.display()
            );
            spec.finding(format!("config.process[{index}].{key}"), problem)
                .to_string()
        })
    });
    folders.collect()
}

/// Says of trainings for which the disk has less room than they will take.
pub(super) fn warnings(report: &Report, spec: &JobSpec, directory: &Path) -> Vec<String> {
    let trainings = report.trainings.iter().filter_map(|training| {
        let takes = training.disk_bytes?;
        let (_, folder) = folder_of(spec.process.get(training.process)?)?;
        let free = free_space(&expand(folder, directory, &env))?;
        (takes > free).then(|| {
            format!(
                "the training takes at most {} on the disk of {folder}, without samples, and {} are free there",
                size(takes),
                size(free)
            )
        })
    });
    trainings.collect()
}

/// The key and the value that say where the results go.
fn folder_of(process: &Process) -> Option<(&'static str, &str)> {
    match &process.kind {
        ProcessKind::Train(process) => Some(("training_folder", process.training_folder.as_deref()?)),
        ProcessKind::Generate(process) => Some(("output_folder", &process.output_folder)),
        ProcessKind::Img2Img(process) => Some(("output_folder", &process.output_folder)),
        _ => None,
    }
}
