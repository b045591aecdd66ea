//! What a training comes to, told before anything is loaded or sent: `aitk validate`.

use super::data::takes_regularisation;
use super::options;
use crate::data::{DatasetContents, DatasetOptions, DatasetReport};
use crate::error::{EngineError, Result};
use crate::processes::{Context, LogFile, StopSignal};
use aitk_common::attempt::AttemptSpec;
use aitk_common::job::JobSpec;
use aitk_common::job::process::TrainerProcess;
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Steps whose regularisation turns are counted one by one; of more, every second one is taken for such.
const COUNTED: u64 = 1_000_000;

/// What the data of a training comes to.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TrainingPreview {
    /// Each data set at each resolution.
    pub datasets: Vec<DatasetReport>,
    /// What would end the training before its first step.
    pub problems: Vec<String>,
    /// Steps that the config asks for.
    pub steps: u64,
    /// Batches of one pass over the training sets.
    pub batches: u64,
    /// Steps of one pass; none without a training set that can be read.
    pub steps_per_epoch: Option<f64>,
    /// Passes that the steps make.
    pub epochs: Option<f64>,
}

/// Looks at the data of a training as the training does: the same files, captions and buckets. `inputs` says where the paths
/// of the config lie. Nothing is decoded, and nothing is written.
#[must_use]
pub fn preview(job: &JobSpec, process: &TrainerProcess, inputs: &BTreeMap<String, PathBuf>) -> TrainingPreview {
    let mut preview = TrainingPreview {
        steps: process.train.steps,
        ..TrainingPreview::default()
    };
    if let Err(error) = preview.look(job, process, inputs) {
        preview.problems.push(error.to_string());
    }
    preview
}

impl TrainingPreview {
    fn look(&mut self, job: &JobSpec, process: &TrainerProcess, inputs: &BTreeMap<String, PathBuf>) -> Result<()> {
        options::check(process, &job.name)?;
        let spec = in_place(inputs)?;
        let mut events = Vec::new();
        let cx = Context {
            spec: &spec,
            job,
            events: &mut events,
            stop: &StopSignal::new(),
            log_file: LogFile::default(),
        };
        let names = process.split_datasets();
        let divisibility = process.model.arch.name.bucket_divisibility();
        // A list of resolutions is a data set for each, of the same files.
        let mut looked: Vec<(DatasetOptions, DatasetContents)> = Vec::new();
        let same = |a: &DatasetOptions, b: &DatasetOptions| {
            (&a.path, &a.caption_ext, &a.default_caption, a.short_captions)
                == (&b.path, &b.caption_ext, &b.default_caption, b.short_captions)
        };
        for (options, section) in options::datasets(process, &cx)?.into_iter().zip(&names) {
            let known = looked.iter().position(|(other, _)| same(other, &options));
            let contents = match known {
                Some(known) => Ok(known),
                None => DatasetContents::read(&options).map(|contents| {
                    looked.push((options.clone(), contents));
                    looked.len() - 1
                }),
            };
            let name = section.path().unwrap_or_default();
            let report = contents.and_then(|at| match looked.get(at) {
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
        let plain = self.datasets.iter().filter(|set| !set.regularisation);
        self.batches = plain.map(|set| set.batches).sum();
        if self.batches == 0 {
            if self.problems.is_empty() {
                return Err(EngineError::bad_input(match names.is_empty() {
                    true => "the job has no data set: add `datasets` with a `folder_path`",
                    false => "every data set is a regularisation set (`is_reg`): add one to train on",
                }));
            }
            return Ok(());
        }
        let accumulated = process.train.gradient_accumulation.max(1);
        #[allow(clippy::cast_precision_loss)]
        let per_epoch = self.batches as f64 / accumulated as f64;
        let regularised = self.datasets.iter().any(|set| set.regularisation);
        let plain_steps = match (regularised, self.steps) {
            (false, steps) => steps,
            (true, steps) if steps > COUNTED => steps / 2,
            (true, steps) => (1..=steps).filter(|step| !takes_regularisation(*step, process)).count() as u64,
        };
        self.steps_per_epoch = Some(per_epoch);
        #[allow(clippy::cast_precision_loss)]
        let epochs = plain_steps as f64 / per_epoch;
        self.epochs = Some(epochs);
        Ok(())
    }
}

/// An attempt that runs in place. Made of text, so that fields with a default need not be known here.
fn in_place(inputs: &BTreeMap<String, PathBuf>) -> Result<AttemptSpec> {
    let spec = json!({
        "job_id": "validate", "attempt_id": "validate", "epoch": 1, "job": {}, "config_text": "", "config_format": "yaml",
        "inputs": inputs, "output_root": null, "resume_from": null, "device": {"kind": "cpu", "index": 0},
        "profile": "cpu_only", "seed": 0,
    });
    serde_json::from_value(spec).map_err(|error| EngineError::Internal(format!("an attempt that looks ahead: {error}")))
}
