//! Checks a config before anything is sent or trained: the family of its model, its data sets, the files that it will
//! write. `aitk validate` shows the whole report; `run` and `submit` print a summary and the warnings, and stop at
//! errors.

mod complete_controls;
#[cfg(feature = "embedded")]
mod dataset;
#[cfg(feature = "embedded")]
mod embeddings;
mod inputs;
#[cfg(feature = "embedded")]
mod location;
mod models;
mod output;
mod report;
#[cfg(feature = "embedded")]
mod settings;
#[cfg(feature = "embedded")]
mod sizes;
mod text;

pub use complete_controls::CompleteControls;
pub use models::ModelReport;
pub use report::{ProcessReport, Report};

use crate::exit::Exit;
use crate::failure::Failure;
use crate::output::Ui;
use crate::output::format::printable;
use aitk_common::job::repository::is_commit;
use aitk_common::job::{Input, JobSpec, LoadedJob};
use aitk_common::plan::image_batches::ImageBatch;
use std::collections::BTreeMap;
use std::path::Path;

/// Checks a config before the coordinator is asked where it fits: all models, and which of them could not be checked. What else would stop
/// a submission is a warning, because the data may be elsewhere. Returns the largest batches of its data sets, which the prediction of memory needs.
///
/// # Errors
/// When a model belongs to a family, or is in a format, that this release does not support, or when files are missing
/// or damaged.
pub async fn check_before_fit(ui: &Ui, loaded: &LoadedJob, directory: &Path) -> Result<Vec<ImageBatch>, Failure> {
    let report = Report::new(loaded, Vec::new(), directory).await;
    for note in report.models.iter().filter_map(|model| model.unchecked.as_deref()) {
        ui.notice(&printable(note));
    }
    fail_on(report.models.iter().filter_map(|model| model.problem.clone()).collect())?;
    for problem in report.problems() {
        ui.warn(&printable(&format!("`aitk submit` would stop here: {problem}")));
    }
    Ok(report.image_batches())
}

/// Checks the models for which `wanted` returns true. Returns the hub's current commits of those that are repositories.
///
/// # Errors
/// As [`check_before_fit`].
pub async fn check_selected_models(
    ui: &Ui,
    spec: &JobSpec,
    directory: &Path,
    wanted: impl Fn(&Input) -> bool,
) -> Result<Commits, Failure> {
    let models = models::inspect_models(spec, directory, wanted).await;
    for note in models.iter().filter_map(|model| model.unchecked.as_deref()) {
        ui.notice(&printable(note));
    }
    fail_on(models.iter().filter_map(|model| model.problem.clone()).collect())?;
    Ok(commits(models))
}

/// Checks a config before a run or a submission. Prints one line for each data set and training, warnings, and what
/// could not be checked. `local`: the job runs on this machine, so its output folders are checked, and warnings that
/// the training itself logs are left out.
///
/// # Errors
/// When there is a problem that would make the job fail.
pub async fn check_before_start(
    ui: &Ui,
    loaded: &LoadedJob,
    directory: &Path,
    local: bool,
) -> Result<Checked, Failure> {
    let report = Report::new(loaded, Vec::new(), directory).await;
    for line in report.summary() {
        ui.notice(&printable(&line));
    }
    let gated = report.models.iter().filter(|model| local && model.gated);
    let gated: Vec<String> = gated.filter_map(|model| model.unchecked.clone()).collect();
    for note in report.unchecked.iter().filter(|note| !gated.contains(note)) {
        ui.notice(&printable(note));
    }
    let (mut warnings, mut problems) = (report.data_warnings(local), report.problems());
    problems.extend(gated);
    warnings.extend(report.short_of_memory.clone());
    if local {
        warnings.extend(output::disk_warnings(report.disk_needs(), &loaded.spec, directory));
        problems.extend(output::folder_problems(&loaded.spec, directory));
    } else {
        // Those of reading the config were shown before; a job that runs here logs these.
        warnings.extend(report.warnings.clone());
    }
    for warning in warnings {
        ui.warn(&printable(&warning));
    }
    fail_on(problems)?;
    Ok(Checked {
        image_batches: report.image_batches(),
        complete_controls: report.complete_controls(),
        commits: commits(report.models),
    })
}

fn commits(models: Vec<ModelReport>) -> Commits {
    let commits = models.into_iter().filter_map(|model| Some((model.path, model.commit?)));
    commits.filter(|(_, commit)| is_commit(commit)).collect()
}

/// What was found about a job that can start.
#[derive(Clone, Debug, Default)]
pub struct Checked {
    /// The hub's commits of its models.
    pub commits: Commits,
    /// The largest batches of its data sets.
    pub image_batches: Vec<ImageBatch>,
    /// The data sets whose control images or masks all exist.
    pub complete_controls: CompleteControls,
}

/// Model repositories that are not on this machine, each with the hub's current commit.
pub type Commits = BTreeMap<String, String>;

fn fail_on(mut problems: Vec<String>) -> Result<(), Failure> {
    problems.dedup();
    if problems.is_empty() {
        return Ok(());
    }
    let lines: Vec<String> = problems.iter().map(|problem| printable(problem)).collect();
    Err(Failure::new(Exit::Failed, lines.join("\n")).hint("`aitk validate CONFIG` shows the full report"))
}
