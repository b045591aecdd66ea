//! What can be known of a config before anything is sent or trained: the family of its model, its data, what it will write.
//! `aitk validate` shows all of it; `run` and `submit` open with what is worth saying, and refuse what cannot work.

mod models;
mod output;
mod report;
mod text;

pub use models::ModelReport;
pub use report::{ProcessReport, Report};

use crate::exit::Exit;
use crate::failure::Failure;
use crate::output::Ui;
use crate::output::format::printable;
use aitk_common::job::repository::is_commit;
use aitk_common::job::{Input, JobSpec, LoadedJob};
use std::collections::BTreeMap;
use std::path::Path;

/// Refuses models that no engine here runs, and says what could not be checked.
///
/// # Errors
/// When the files of a model say that it is of a family, or in a format, that this release does not run.
pub async fn check_models(ui: &Ui, loaded: &LoadedJob, directory: &Path) -> Result<(), Failure> {
    check_some(ui, &loaded.spec, directory, |_| true).await.map(|_| ())
}

/// As [`check_models`], of those models that `wanted` takes. The answer has the commits of those that the hub has.
///
/// # Errors
/// As there.
pub async fn check_some(
    ui: &Ui,
    spec: &JobSpec,
    directory: &Path,
    wanted: impl Fn(&Input) -> bool,
) -> Result<Commits, Failure> {
    let models = models::look(spec, directory, wanted).await;
    for note in models.iter().filter_map(|model| model.unchecked.as_deref()) {
        ui.notice(&printable(note));
    }
    refuse(models.iter().filter_map(|model| model.problem.clone()).collect())?;
    Ok(commits(models))
}

/// Opens a run or a submission: one line for each data set and training, warnings, and what could not be checked. `here`: it runs
/// on this machine, so what it writes must have a place, and the training itself says the rest a moment later.
///
/// # Errors
/// When there is a problem that would end the job.
pub async fn open_with(ui: &Ui, loaded: &LoadedJob, directory: &Path, here: bool) -> Result<Commits, Failure> {
    let report = Report::of(loaded, Vec::new(), directory).await;
    for line in report.summary() {
        ui.notice(&printable(&line));
    }
    for note in &report.unchecked {
        ui.notice(&printable(note));
    }
    let (mut warnings, mut problems) = (report.data_warnings(here), report.problems());
    warnings.extend(report.short_of_memory.clone());
    if here {
        warnings.extend(output::warnings(&report, &loaded.spec, directory));
        problems.extend(output::problems(&loaded.spec, directory));
    }
    for warning in warnings {
        ui.warn(&printable(&warning));
    }
    refuse(problems)?;
    Ok(commits(report.models))
}

fn commits(models: Vec<ModelReport>) -> Commits {
    let commits = models.into_iter().filter_map(|model| Some((model.path, model.commit?)));
    commits.filter(|(_, commit)| is_commit(commit)).collect()
}

/// Repositories of models that are not on this machine -> the commit that the hub has now.
pub type Commits = BTreeMap<String, String>;

fn refuse(mut problems: Vec<String>) -> Result<(), Failure> {
    problems.dedup();
    if problems.is_empty() {
        return Ok(());
    }
    let lines: Vec<String> = problems.iter().map(|problem| printable(problem)).collect();
    Err(Failure::new(Exit::Failed, lines.join("\n")).hint("`aitk validate CONFIG` shows everything that was found"))
}
