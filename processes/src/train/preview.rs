//! A preview of a training before anything is loaded or sent: `aitk validate`.

use super::super::preview_spec::preview_spec;
use super::data::uses_regularisation;
use super::image_batches::image_batch;
use super::options;
use crate::data::{DatasetContents, DatasetOptions, DatasetReport};
use crate::error::{EngineError, Result};
use crate::{Context, LogFile, OutputRequests, StopSignal};
use aitk_common::job::JobSpec;
use aitk_common::job::controls::ControlType;
use aitk_common::job::process::TrainerProcess;
use aitk_common::plan::image_batches::{ImageBatch, largest_batches};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Up to this many steps, those that use regularisation images are counted one by one; above, half of the steps are
/// assumed to.
const MAX_COUNTED_STEPS: u64 = 1_000_000;

/// A preview of the data of a training.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TrainingPreview {
    /// The report on each data set at each resolution.
    pub datasets: Vec<DatasetReport>,
    /// Errors that would fail the training before its first step.
    pub problems: Vec<String>,
    /// Steps in the config.
    pub steps: u64,
    /// Batches per epoch of the training sets.
    pub batches: u64,
    /// Steps per epoch. `None` if no training set can be read.
    pub steps_per_epoch: Option<f64>,
    /// Epochs that the steps make.
    pub epochs: Option<f64>,
    /// The data sets, as indices in `datasets` of the config, whose control images or masks of a type all exist: the network that would make them
    /// is not needed.
    #[serde(skip)]
    pub complete_controls: Vec<(usize, ControlType)>,
}

/// Reads the data of a training as the training does: the same files, captions and buckets. `inputs`: the local path of
/// each path in the config. No image is decoded, and nothing is written.
#[must_use]
pub fn preview(job: &JobSpec, process: &TrainerProcess, inputs: &BTreeMap<String, PathBuf>) -> TrainingPreview {
    let mut preview = TrainingPreview {
        steps: process.train.steps,
        ..TrainingPreview::default()
    };
    if let Err(error) = preview.read_data(job, process, inputs) {
        preview.problems.push(error.to_string());
    }
    preview
}

impl TrainingPreview {
    /// The largest batches of its data sets. `process`: the index of the training in `config.process`. Empty if a data set
    /// cannot be read.
    #[must_use]
    pub fn image_batches(&self, process: usize) -> Vec<ImageBatch> {
        if !self.problems.is_empty() {
            return Vec::new();
        }
        let batches = self.datasets.iter().flat_map(|set| {
            let buckets = set.buckets.iter();
            buckets.map(move |bucket| image_batch(process, (bucket.width, bucket.height), set.batch_size))
        });
        largest_batches(batches)
    }

    fn read_data(&mut self, job: &JobSpec, process: &TrainerProcess, inputs: &BTreeMap<String, PathBuf>) -> Result<()> {
        options::check_supported(process, &job.name)?;
        let spec = preview_spec(inputs)?;
        let mut events = Vec::new();
        let cx = Context {
            spec: &spec,
            job,
            events: &mut events,
            stop: &StopSignal::new(),
            requests: &OutputRequests::new(),
            log_file: LogFile::default(),
        };
        let names = process.split_datasets();
        let divisibility = process.model.arch.name.bucket_divisibility();
        // An entry with several resolutions gives one data set for each, with the same files.
        let mut contents_by_options: Vec<(DatasetOptions, DatasetContents)> = Vec::new();
        let reads_same_files = |a: &DatasetOptions, b: &DatasetOptions| {
            (
                &a.path,
                &a.caption_ext,
                &a.default_caption,
                a.short_captions,
                &a.controls,
                &a.masks,
                &a.captions_file,
                &a.excluded,
            ) == (
                &b.path,
                &b.caption_ext,
                &b.default_caption,
                b.short_captions,
                &b.controls,
                &b.masks,
                &b.captions_file,
                &b.excluded,
            )
        };
        for (options, section) in options::dataset_options(process, &cx)?.into_iter().zip(&names) {
            let position = contents_by_options
                .iter()
                .position(|(other, _)| reads_same_files(other, &options));
            let contents = match position {
                Some(position) => Ok(position),
                None => DatasetContents::read(&options).map(|contents| {
                    contents_by_options.push((options.clone(), contents));
                    contents_by_options.len() - 1
                }),
            };
            let name = section.path().unwrap_or_default();
            let report = contents.and_then(|index| match contents_by_options.get(index) {
                Some((_, contents)) => DatasetReport::from_contents(&options, name, divisibility, contents),
                None => DatasetReport::read(&options, name, divisibility),
            });
            match report {
                Ok(report) => self.datasets.push(report),
                // The same folder at another resolution has the same problem.
                Err(error) if self.problems.contains(&error.to_string()) => {}
                Err(error) => self.problems.push(error.to_string()),
            }
        }
        if self.problems.is_empty() {
            self.find_complete_controls(process);
        }
        let training_sets = self.datasets.iter().filter(|set| !set.regularisation);
        self.batches = training_sets.map(|set| set.batches).sum();
        if self.batches == 0 {
            if self.problems.is_empty() && !process.samples_for_slider() {
                return Err(EngineError::bad_input(match names.is_empty() {
                    true => "the job has no data set: add `datasets` with a `folder_path`",
                    false => "every data set is a regularisation set (`is_reg`): add one to train on",
                }));
            }
            return Ok(());
        }
        let micro_batches = process.train.gradient_accumulation.max(1);
        #[allow(clippy::cast_precision_loss)]
        let per_epoch = self.batches as f64 / micro_batches as f64;
        let has_regularisation = self.datasets.iter().any(|set| set.regularisation);
        let training_steps = match (has_regularisation, self.steps) {
            (false, steps) => steps,
            (true, steps) if steps > MAX_COUNTED_STEPS => steps / 2,
            (true, steps) => (1..=steps).filter(|step| !uses_regularisation(*step, process)).count() as u64,
        };
        self.steps_per_epoch = Some(per_epoch);
        #[allow(clippy::cast_precision_loss)]
        let epochs = training_steps as f64 / per_epoch;
        self.epochs = Some(epochs);
        Ok(())
    }

    /// Finds the data sets whose control images or masks all exist. The reports are those of all data sets, in the order of
    /// [`TrainerProcess::split_datasets`].
    fn find_complete_controls(&mut self, process: &TrainerProcess) {
        let mut reports = self.datasets.iter();
        for (index, dataset) in process.datasets.iter().enumerate() {
            let reports = reports.by_ref().take(dataset.resolution.len());
            let (controls, masks) = reports.fold((0, 0), |(controls, masks), set| {
                (controls + set.controls_to_make, masks + set.masks_to_make)
            });
            for (kind, to_make) in [(dataset.condition_type(), controls), (dataset.mask_type(), masks)] {
                let kind = kind.filter(|kind| to_make == 0 && dataset.control_generator(*kind).is_some());
                self.complete_controls.extend(kind.map(|kind| (index, kind)));
            }
        }
    }
}
