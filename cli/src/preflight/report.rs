//! The report of `aitk validate`: everything that can be checked about a config before it runs.

use super::complete_controls::CompleteControls;
#[cfg(feature = "embedded")]
use super::dataset::dataset_problem;
#[cfg(feature = "embedded")]
use super::location::at_key;
use super::models::{self, ModelReport};
use super::output;
#[cfg(feature = "embedded")]
use super::sizes;
#[cfg(feature = "embedded")]
use crate::context::env;
use crate::output::format::size;
#[cfg(feature = "embedded")]
use crate::paths::expand;
use crate::submission_data::largest_images;
use aitk_common::capability::DeviceKind;
use aitk_common::control_plane::Forecast;
#[cfg(feature = "embedded")]
use aitk_common::job::InputKind;
use aitk_common::job::{JobSpec, LoadedJob};
use aitk_common::plan::demand::Demand;
use aitk_common::plan::image_batches::ImageBatch;
use aitk_common::plan::output::RunOutput;
use aitk_common::plan::parameter_counts::ParameterCounts;
use aitk_common::plan::profile::MemoryProfile;
use aitk_common::plan::prompt_files::with_longest_prompt;
#[cfg(feature = "embedded")]
use aitk_processes::TrainingPreview;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// The result of checking a config. `aitk validate` shows all of it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// The job's name.
    pub name: String,
    /// Warnings about keys of the config.
    pub warnings: Vec<String>,
    /// What was found about each model.
    pub models: Vec<ModelReport>,
    /// Errors about files of prompts, control images and inputs of extensions that do not exist or cannot be read, about settings that do not
    /// fit the model, and about images that are too large for it.
    pub missing: Vec<String>,
    /// One report for each training process.
    pub trainings: Vec<ProcessReport>,
    /// Number of images that the job generates, if it is known.
    pub images: Option<u64>,
    /// Predicted memory in bytes, by kind of device and memory profile (`gpu, full_gpu`).
    pub memory: BTreeMap<String, u64>,
    /// The coordinator's answer where the job could run.
    pub forecast: Option<Forecast>,
    /// Problems that concern only `aitk run` on this machine: an output folder that cannot be created or written to, a
    /// disk without enough free space.
    #[serde(rename = "here")]
    pub local_warnings: Vec<String>,
    /// Warning that `cluster.memory_budget` is below the predicted memory.
    pub short_of_memory: Option<String>,
    /// Why the coordinator would refuse the job.
    #[serde(rename = "refused")]
    pub coordinator_refusal: Option<String>,
    /// The largest image of each process whose prompts are in a file, and of each that changes images.
    #[serde(skip)]
    largest_images: Vec<ImageBatch>,
    /// What was not checked, with the reason.
    pub unchecked: Vec<String>,
}

/// What was found about one training process.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ProcessReport {
    /// Its index in `config.process`.
    pub process: usize,
    /// Number of steps.
    pub steps: u64,
    /// Its data sets; absent in a build without the engine.
    #[cfg(feature = "embedded")]
    pub data: TrainingPreview,
    /// The files that it writes.
    pub output: RunOutput,
    /// Largest total size of saves and training states on the disk at one time, in bytes.
    pub disk_bytes: Option<u64>,
}

impl ProcessReport {
    #[cfg(feature = "embedded")]
    fn image_batches(&self) -> Vec<ImageBatch> {
        self.data.image_batches(self.process)
    }

    /// Nothing: this build cannot read data sets.
    #[cfg(not(feature = "embedded"))]
    fn image_batches(&self) -> Vec<ImageBatch> {
        Vec::new()
    }
}

impl Report {
    /// Checks a config that was read without errors. `warnings` are those of reading it; they are part of the report.
    pub async fn new(loaded: &LoadedJob, warnings: Vec<String>, directory: &Path) -> Self {
        let spec = &loaded.spec;
        let mut report = Self {
            name: spec.name.clone(),
            warnings,
            models: models::inspect_models(spec, directory, |_| true).await,
            images: crate::submission_data::images(spec, directory),
            largest_images: largest_images(spec, directory),
            missing: super::inputs::input_problems(spec, directory),
            ..Self::default()
        };
        report
            .unchecked
            .extend(report.models.iter().filter_map(|model| model.unchecked.clone()));
        #[cfg(feature = "embedded")]
        report
            .missing
            .extend(super::embeddings::embedding_problems(spec, directory).await);
        #[cfg(feature = "embedded")]
        report
            .missing
            .extend(super::settings::settings_problems(spec, directory).await);
        let counts = crate::submission_data::parameter_counts(loaded, directory);
        report.trainings = trainings(loaded, counts, directory).await;
        #[cfg(feature = "embedded")]
        {
            let changed = sizes::changed_sizes(spec, directory).await;
            report.largest_images.extend(sizes::changed_batches(&changed));
            let trainings = report.trainings.iter();
            let previews: Vec<_> = trainings.map(|training| (training.process, &training.data)).collect();
            let too_large = sizes::size_problems(spec, directory, &previews, &changed).await;
            report.missing.extend(too_large);
        }
        #[cfg(not(feature = "embedded"))]
        if !report.trainings.is_empty() {
            let why = "the data sets: this aitk was built as a small client, without the engine that reads them";
            report.unchecked.push(why.to_owned());
        }
        if report.models_are_usable() {
            report.memory = predicted_memory(
                loaded,
                counts,
                &report.image_batches(),
                crate::submission_data::longest_prompt(spec, directory),
            );
        }
        report.short_of_memory = short_of_memory(spec, &report.memory);
        report.warnings.extend(super::inputs::input_warnings(spec, directory));
        report.local_warnings = output::folder_problems(spec, directory);
        report
            .local_warnings
            .extend(output::disk_warnings(report.disk_needs(), spec, directory));
        report
    }

    /// Returns the process index and the largest size on the disk in bytes of each training for which it is known.
    pub(super) fn disk_needs(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        self.trainings
            .iter()
            .filter_map(|training| Some((training.process, training.disk_bytes?)))
    }

    /// Returns the largest batches of the trainings whose data sets could be read, and the largest images of files of prompts and of
    /// processes that change images.
    #[must_use]
    pub fn image_batches(&self) -> Vec<ImageBatch> {
        let batches = self.trainings.iter().flat_map(ProcessReport::image_batches);
        batches.chain(self.largest_images.iter().copied()).collect()
    }

    /// Returns the data sets whose control images or masks all exist.
    #[cfg(feature = "embedded")]
    pub(super) fn complete_controls(&self) -> CompleteControls {
        let of_training = |training: &ProcessReport| {
            let process = training.process;
            let complete = training.data.complete_controls.iter();
            complete
                .map(|(dataset, kind)| (process, *dataset, *kind))
                .collect::<Vec<_>>()
        };
        CompleteControls(self.trainings.iter().flat_map(of_training).collect())
    }

    /// Returns none: this build cannot read data sets.
    #[cfg(not(feature = "embedded"))]
    pub(super) fn complete_controls(&self) -> CompleteControls {
        CompleteControls::default()
    }

    /// Whether no model has a problem.
    fn models_are_usable(&self) -> bool {
        self.models.iter().all(|model| model.problem.is_none())
    }

    /// Returns the errors that would make the job fail, without duplicates.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let mut problems: Vec<String> = self.models.iter().filter_map(|model| model.problem.clone()).collect();
        problems.extend(self.missing.iter().cloned());
        problems.extend(self.coordinator_refusal.iter().cloned());
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
                .flat_map(|training| training.data.datasets.iter().filter_map(dataset_problem)),
        );
        let mut seen = std::collections::BTreeSet::new();
        problems.retain(|problem| seen.insert(problem.clone()));
        problems
    }
}

/// Returns a warning if `cluster.memory_budget` is below the smallest predicted memory. It is only a warning because
/// the prediction may be wrong.
fn short_of_memory(spec: &JobSpec, predicted: &BTreeMap<String, u64>) -> Option<String> {
    let budget = spec.cluster.memory_budget?.0;
    let smallest = *predicted.values().min().filter(|smallest| **smallest > budget)?;
    Some(format!(
        "cluster.memory_budget is {}, but the predicted memory is at least {}: the job will probably run out of memory",
        size(budget),
        size(smallest)
    ))
}

#[cfg_attr(not(feature = "embedded"), allow(unused_variables, clippy::unused_async))]
async fn trainings(loaded: &LoadedJob, counts: Option<ParameterCounts>, directory: &Path) -> Vec<ProcessReport> {
    let mut reports = Vec::new();
    for (process, training) in loaded.spec.process.iter().enumerate() {
        let Some(training) = training.trainer() else {
            continue;
        };
        let output = RunOutput::of(training, counts);
        reports.push(ProcessReport {
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
                let with_local_path = |path: String| {
                    let local = expand(&path, directory, &env);
                    (path, local)
                };
                let inputs = inputs
                    .filter(|input| data(input.kind))
                    .map(|input| with_local_path(input.config_path))
                    .collect();
                let (spec, training) = (loaded.spec.clone(), training.clone());
                // It may read the headers of many thousand images.
                let previewed = tokio::task::spawn_blocking(move || aitk_processes::preview(&spec, &training, &inputs));
                let mut data = previewed.await.unwrap_or_default();
                for problem in &mut data.problems {
                    *problem = at_key(&loaded.spec, process, directory, problem);
                }
                data
            },
            disk_bytes: output.disk_bytes(),
            output,
        });
    }
    reports
}

/// Predicts the memory in bytes by device and profile, the keys of `memory` in `validate --json`: with CUDA (`gpu`), with Metal, and on
/// the CPU.
fn predicted_memory(
    loaded: &LoadedJob,
    counts: Option<ParameterCounts>,
    batches: &[ImageBatch],
    longest_prompt: Option<u64>,
) -> BTreeMap<String, u64> {
    let job = serde_json::to_value(&loaded.spec).unwrap_or_default();
    let job = with_longest_prompt(job, longest_prompt);
    let Some(need) = Demand::of_job(&job, counts, batches).and_then(|demand| demand.memory) else {
        return BTreeMap::new();
    };
    let kinds = [
        ("gpu", DeviceKind::Cuda),
        ("metal", DeviceKind::Metal),
        ("processor", DeviceKind::Cpu),
    ];
    let of_kind = |(name, kind): (&str, DeviceKind)| {
        let profiles = MemoryProfile::on(kind == DeviceKind::Cpu);
        profiles.map(|profile| (format!("{name}, {}", profile.name()), need.under(profile, kind)))
    };
    kinds.into_iter().flat_map(of_kind).collect()
}
