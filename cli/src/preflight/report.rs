//! Everything that is known of a config.

use super::models::{self, ModelReport};
use super::output;
#[cfg(feature = "embedded")]
use crate::context::env;
use crate::output::format::size;
#[cfg(feature = "embedded")]
use crate::paths::expand;
use aitk_common::control::Forecast;
#[cfg(feature = "embedded")]
use aitk_common::job::InputKind;
use aitk_common::job::{JobSpec, LoadedJob};
use aitk_common::plan::demand::Demand;
use aitk_common::plan::output::RunOutput;
use aitk_common::plan::parameter_counts::ParameterCounts;
use aitk_common::plan::profile::MemoryProfile;
#[cfg(feature = "embedded")]
use aitk_engine::processes::TrainingPreview;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// What `aitk validate` shows.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// The job's name.
    pub name: String,
    /// What the config's keys gave rise to.
    pub warnings: Vec<String>,
    /// Its models.
    pub models: Vec<ModelReport>,
    /// Files of prompts and control images that are not there.
    pub missing: Vec<String>,
    /// Its trainings.
    pub trainings: Vec<ProcessReport>,
    /// Images that it generates, where that is known.
    pub images: Option<u64>,
    /// Bytes of memory that it needs, by where and with which memory profile.
    pub memory: BTreeMap<String, u64>,
    /// Where it could run, from a coordinator.
    pub forecast: Option<Forecast>,
    /// What `aitk run` would meet on this machine: no place or no room for what it writes.
    pub here: Vec<String>,
    /// What makes it likely to fail for want of memory.
    pub short_of_memory: Option<String>,
    /// Why a coordinator would refuse it.
    pub refused: Option<String>,
    /// What was not checked, and why.
    pub unchecked: Vec<String>,
}

/// What is known of one training.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ProcessReport {
    /// Its number in `config.process`.
    pub process: usize,
    /// Steps.
    pub steps: u64,
    /// Its data; none in a program without the engine.
    #[cfg(feature = "embedded")]
    pub data: TrainingPreview,
    /// What it writes.
    pub output: RunOutput,
    /// The most that saves and exact states take at one time, in bytes.
    pub disk_bytes: Option<u64>,
}

impl Report {
    /// Looks at a config that was read without errors.
    pub async fn of(loaded: &LoadedJob, warnings: Vec<String>, directory: &Path) -> Self {
        let spec = &loaded.spec;
        let mut report = Self {
            name: spec.name.clone(),
            warnings,
            models: models::look(spec, directory, |_| true).await,
            images: crate::job_file::images(spec, directory),
            missing: models::missing_inputs(spec, directory),
            ..Self::default()
        };
        report
            .unchecked
            .extend(report.models.iter().filter_map(|model| model.unchecked.clone()));
        let anatomy = crate::job_file::anatomy(loaded, directory);
        report.trainings = trainings(loaded, anatomy, directory).await;
        #[cfg(not(feature = "embedded"))]
        if !report.trainings.is_empty() {
            let why = "the data sets: this aitk was built as a small client, without the engine that reads them";
            report.unchecked.push(why.to_owned());
        }
        if report.runs_here() {
            report.memory = memory(loaded, anatomy);
        }
        report.short_of_memory = short_of_memory(spec, &report.memory);
        report.here = output::problems(spec, directory);
        report.here.extend(output::warnings(&report, spec, directory));
        report
    }

    /// Whether nothing was found that says otherwise.
    fn runs_here(&self) -> bool {
        self.models.iter().all(|model| model.problem.is_none())
    }

    /// What would end the job.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let mut problems: Vec<String> = self.models.iter().filter_map(|model| model.problem.clone()).collect();
        problems.extend(self.missing.iter().cloned());
        problems.extend(self.refused.iter().cloned());
        #[cfg(feature = "embedded")]
        problems.extend(
            self.trainings
                .iter()
                .flat_map(|training| training.data.problems.clone()),
        );
        #[cfg(feature = "embedded")]
        problems.extend(
            self.trainings
                .iter()
                .flat_map(|training| training.data.datasets.iter().filter_map(super::text::problem_of)),
        );
        let mut seen = std::collections::BTreeSet::new();
        problems.retain(|problem| seen.insert(problem.clone()));
        problems
    }
}

/// Whether the budget that the job names is below all that is predicted. A prediction is no reason to refuse it.
fn short_of_memory(spec: &JobSpec, predicted: &BTreeMap<String, u64>) -> Option<String> {
    let budget = spec.cluster.memory_budget?.0;
    let least = *predicted.values().min().filter(|least| **least > budget)?;
    Some(format!(
        "cluster.memory_budget is {}, and at least {} are predicted: the job will probably run out of memory",
        size(budget),
        size(least)
    ))
}

#[cfg_attr(not(feature = "embedded"), allow(unused_variables, clippy::unused_async))]
async fn trainings(loaded: &LoadedJob, anatomy: Option<ParameterCounts>, directory: &Path) -> Vec<ProcessReport> {
    let mut out = Vec::new();
    for (process, training) in loaded.spec.process.iter().enumerate() {
        let Some(training) = training.trainer() else {
            continue;
        };
        let output = RunOutput::of(training, anatomy);
        out.push(ProcessReport {
            process,
            steps: training.train.steps,
            #[cfg(feature = "embedded")]
            data: {
                let inputs = loaded.spec.inputs().into_iter();
                let data = |kind| {
                    matches!(
                        kind,
                        InputKind::Dataset | InputKind::PromptFile | InputKind::ControlImages
                    )
                };
                let here = |path: String| {
                    let place = expand(&path, directory, &env);
                    (path, place)
                };
                let inputs = inputs
                    .filter(|input| data(input.kind))
                    .map(|input| here(input.config_path))
                    .collect();
                let (spec, training) = (loaded.spec.clone(), training.clone());
                // Many thousand headers may have to be read.
                let looked =
                    tokio::task::spawn_blocking(move || aitk_engine::processes::preview(&spec, &training, &inputs));
                looked.await.unwrap_or_default()
            },
            disk_bytes: output.disk_bytes(),
            output,
        });
    }
    out
}

/// Predicted memory: on a GPU with everything in memory and at the least, and on the CPU.
fn memory(loaded: &LoadedJob, anatomy: Option<ParameterCounts>) -> BTreeMap<String, u64> {
    let job = serde_json::to_value(&loaded.spec).unwrap_or_default();
    let Some(need) = Demand::of_job(&job, anatomy).and_then(|demand| demand.memory) else {
        return BTreeMap::new();
    };
    let places = [
        ("gpu, full_gpu", MemoryProfile::FullGpu, false),
        ("gpu, extreme", MemoryProfile::Extreme, false),
        ("CPU, cpu_only", MemoryProfile::CpuOnly, true),
    ];
    places
        .into_iter()
        .map(|(name, profile, cpu)| (name.to_owned(), need.under(profile, cpu)))
        .collect()
}
