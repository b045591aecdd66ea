//! The metrics of a run's steps: `metrics.jsonl`, and the plot of the loss.

use super::tensorboard::EventLog;
use crate::error::{EngineError, Result};
use crate::training::StepReport;
use aitk_common::checkpoint::Checkpoint;
use aitk_common::fsutil;
use aitk_common::plot::Curve;
use aitk_common::step_metrics::{self, METRICS_FILE, StepMetrics};
use candle_core::{Device, Tensor};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The name of the metric of the validation loss.
pub(super) const VALIDATION_METRIC: &str = "val/loss";

/// The role of the checkpoint file with all losses so far, so that a run resumed on another machine has the whole
/// curve.
pub(crate) const ROLE: &str = "losses";

/// The measurements of a step besides its losses.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StepMeasurements {
    /// The loss on the images of `train.validation_config`, if it was measured after this step.
    pub(crate) validation: Option<f64>,
    /// The share of the step's time in which it waited for images, read and encoded them.
    pub(crate) data_share: Option<f64>,
    /// For a language model: the exponential of the loss, and of that on held-out documents, and the tokens per second.
    pub(crate) perplexity: Option<f64>,
    pub(crate) validation_perplexity: Option<f64>,
    pub(crate) tokens_per_second: Option<f64>,
}

impl StepMeasurements {
    /// The metrics, by name.
    pub(crate) fn values(&self) -> impl Iterator<Item = (String, f64)> {
        let named = [
            (VALIDATION_METRIC, self.validation),
            ("data_share", self.data_share),
            ("perplexity", self.perplexity),
            ("val/perplexity", self.validation_perplexity),
            ("tokens_per_second", self.tokens_per_second),
        ];
        named
            .into_iter()
            .filter_map(|(name, value)| Some((name.to_owned(), value?)))
    }
}

/// Records the metrics of a run's steps on disk and in memory.
pub(crate) struct StepRecorder {
    path: PathBuf,
    file: Option<File>,
    /// The metrics in the checkpoint from which the run resumes.
    earlier: Vec<StepMetrics>,
    /// The step after which the run resumes.
    resumed: Option<StepMetrics>,
    start: Instant,
    steps: Vec<u64>,
    losses: Vec<f64>,
    learning_rates: Vec<f64>,
    /// The losses on the images of `train.validation_config`; NaN after the steps without one.
    validations: Vec<f64>,
    /// Time and step of the last call of [`Self::seconds_per_step`].
    last_report: (Instant, u64),
    /// The metrics for TensorBoard.
    events: Option<EventLog>,
}

impl StepRecorder {
    /// A recorder for a run folder, and for TensorBoard with `events`. Nothing is read or written before [`Self::open`].
    pub(crate) fn new(folder: &Path, events: Option<EventLog>) -> Self {
        let now = Instant::now();
        Self {
            path: folder.join(METRICS_FILE),
            file: None,
            earlier: Vec::new(),
            resumed: None,
            start: now,
            steps: Vec::new(),
            losses: Vec::new(),
            learning_rates: Vec::new(),
            validations: Vec::new(),
            last_report: (now, 0),
            events,
        }
    }

    /// Takes over the metrics in the checkpoint from which the run resumes.
    pub(crate) fn load_checkpoint(&mut self, checkpoint: &Checkpoint) {
        self.earlier = losses_of(checkpoint);
    }

    /// Opens the file to continue after step `start_step`: lines of later steps are removed, and missing earlier ones
    /// are added from the checkpoint.
    pub(crate) fn open(&mut self, start_step: u64) -> Result<()> {
        let failed = |error| EngineError::io(&self.path, error);
        let mut earlier: BTreeMap<u64, StepMetrics> = self.earlier.drain(..).map(|entry| (entry.step, entry)).collect();
        if self.path.is_file() {
            earlier.extend(self.on_disk()?.into_iter().map(|entry| (entry.step, entry)));
        }
        earlier.retain(|step, _| *step <= start_step);
        fsutil::write_atomic(&self.path, |out| {
            for entry in earlier.values() {
                writeln!(out, "{}", serde_json::to_string(entry)?)?;
            }
            Ok(())
        })?;
        self.file = Some(File::options().append(true).open(&self.path).map_err(failed)?);
        self.steps = earlier.keys().copied().collect();
        self.losses = earlier.values().map(|entry| entry.loss().unwrap_or(f64::NAN)).collect();
        let column = |name: &str| {
            let value = |entry: &StepMetrics| entry.values.get(name).copied().unwrap_or(f64::NAN);
            earlier.values().map(value).collect::<Vec<f64>>()
        };
        (self.learning_rates, self.validations) = (column("lr"), column(VALIDATION_METRIC));
        if let Some(events) = &mut self.events {
            events.set_earlier(earlier.values().cloned());
        }
        self.resumed = earlier.pop_last().map(|(_, entry)| entry);
        self.begin(start_step);
        Ok(())
    }

    /// Starts the clock: seconds are counted from here.
    pub(crate) fn begin(&mut self, step: u64) {
        self.start = Instant::now();
        self.last_report = (self.start, step);
    }

    /// Records the metrics of a step. Returns a warning, once, if the file cannot be written.
    pub(crate) fn step(&mut self, step: u64, report: &StepReport, measured: StepMeasurements) -> Option<String> {
        self.steps.push(step);
        self.losses.push(report.loss);
        self.learning_rates.push(report.lr);
        self.validations.push(measured.validation.unwrap_or(f64::NAN));
        let mut values = BTreeMap::from([("loss".to_owned(), report.loss), ("lr".to_owned(), report.lr)]);
        if let Some(norm) = report.grad_norm {
            values.insert("grad_norm".to_owned(), norm);
        }
        values.extend(measured.values());
        let line = StepMetrics {
            step,
            values,
            time: step_metrics::now(),
            seconds: Some((self.start.elapsed().as_secs_f64() * 1000.0).round() / 1000.0),
            memory: resident_bytes(),
        };
        self.write(&line)
    }

    /// The metrics in the file.
    pub(crate) fn on_disk(&self) -> Result<Vec<StepMetrics>> {
        let failed = |error| EngineError::io(&self.path, error);
        step_metrics::read(File::open(&self.path).map_err(failed)?).map_err(failed)
    }

    /// Adds the loss on fixed images to the step after which the run resumes. Returns the metrics of that step; `None`: they are
    /// not known.
    pub(crate) fn add_validation(&mut self, step: u64, loss: f64) -> Option<StepMetrics> {
        let mut line = self.resumed.take().filter(|line| line.step == step)?;
        line.values.insert(VALIDATION_METRIC.to_owned(), loss);
        *self.validations.last_mut()? = loss;
        // A reader takes the last line of a step.
        let _warning = self.write(&line);
        Some(line)
    }

    /// Writes the metrics of a step. Returns a warning if a file cannot be written, once for each file.
    fn write(&mut self, line: &StepMetrics) -> Option<String> {
        let for_tensorboard = self.events.as_mut().and_then(|events| events.step(line));
        self.write_line(line).or(for_tensorboard)
    }

    fn write_line(&mut self, line: &StepMetrics) -> Option<String> {
        let file = self.file.as_mut()?;
        let text = serde_json::to_string(line).unwrap_or_default();
        // A single write, so that a kill leaves no partial line.
        match file.write_all(format!("{text}\n").as_bytes()) {
            Ok(()) => None,
            Err(error) => {
                self.file = None;
                Some(format!(
                    "{}: cannot write metrics: {error}; training continues without them",
                    self.path.display()
                ))
            }
        }
    }

    /// Mean wall time per step since the last call.
    pub(crate) fn seconds_per_step(&mut self, step: u64) -> Option<f64> {
        let (last_time, last_step) = std::mem::replace(&mut self.last_report, (Instant::now(), step));
        let steps = step.checked_sub(last_step).filter(|steps| *steps > 0)?;
        Some(last_time.elapsed().as_secs_f64() / steps as f64)
    }

    /// The losses and learning rates as tensors of a checkpoint. Times are left out, so that the same steps give the
    /// same bytes.
    pub(crate) fn tensors(&self) -> Result<BTreeMap<String, Tensor>> {
        let steps: Vec<i64> = self
            .steps
            .iter()
            .map(|step| i64::try_from(*step).unwrap_or(i64::MAX))
            .collect();
        let mut tensors = BTreeMap::from([
            ("step".to_owned(), Tensor::new(steps, &Device::Cpu)?),
            ("loss".to_owned(), Tensor::new(self.losses.clone(), &Device::Cpu)?),
            ("lr".to_owned(), Tensor::new(self.learning_rates.clone(), &Device::Cpu)?),
        ]);
        if self.validations.iter().any(|loss| !loss.is_nan()) {
            let losses = Tensor::new(self.validations.clone(), &Device::Cpu)?;
            tensors.insert(VALIDATION_METRIC.to_owned(), losses);
        }
        Ok(tensors)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// The plot of the losses so far; `None` without any.
    pub(crate) fn png(&self, title: &str) -> Option<Vec<u8>> {
        let curve = Curve {
            title: title.to_owned(),
            metric: "loss".to_owned(),
            points: self.steps.iter().copied().zip(self.losses.iter().copied()).collect(),
        };
        curve.png()
    }
}

/// Reads the metrics of earlier steps from a checkpoint; empty for a checkpoint of an earlier version.
fn losses_of(checkpoint: &Checkpoint) -> Vec<StepMetrics> {
    let read = || -> Option<Vec<StepMetrics>> {
        let tensors = candle_core::safetensors::load(checkpoint.file_with_role(ROLE)?, &Device::Cpu).ok()?;
        let steps = tensors.get("step")?.to_vec1::<i64>().ok()?;
        let column = |name: &str| tensors.get(name)?.to_vec1::<f64>().ok();
        let (losses, learning_rates) = (column("loss")?, column("lr")?);
        let validations = column(VALIDATION_METRIC).unwrap_or_else(|| vec![f64::NAN; steps.len()]);
        let rows = steps.into_iter().zip(losses).zip(learning_rates).zip(validations);
        let entry = |(((step, loss), rate), validation): (((i64, f64), f64), f64)| {
            let mut values = BTreeMap::from([("loss".to_owned(), loss), ("lr".to_owned(), rate)]);
            if !validation.is_nan() {
                values.insert(VALIDATION_METRIC.to_owned(), validation);
            }
            StepMetrics {
                step: u64::try_from(step).unwrap_or(0),
                values,
                ..StepMetrics::default()
            }
        };
        Some(rows.map(entry).collect())
    };
    read().unwrap_or_default()
}

/// The resident memory of this process in bytes; `None` where there is no `/proc`.
fn resident_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn report(loss: f64) -> StepReport {
        StepReport {
            loss,
            lr: 1e-4,
            preservation: None,
            grad_norm: Some(1.0),
            warning: None,
        }
    }

    fn steps(folder: &Path) -> Vec<u64> {
        let file = File::open(folder.join(METRICS_FILE)).unwrap();
        step_metrics::read(file)
            .unwrap()
            .iter()
            .map(|entry| entry.step)
            .collect()
    }

    #[test]
    fn resuming_from_an_earlier_step_replaces_later_lines() {
        let folder = tempfile::tempdir().unwrap();
        let open = |start| {
            let mut record = StepRecorder::new(folder.path(), None);
            record.open(start).unwrap();
            record
        };
        let mut record = open(0);
        for step in 1..=7 {
            assert_eq!(record.step(step, &report(0.5), StepMeasurements::default()), None);
        }
        assert_eq!(steps(folder.path()), [1, 2, 3, 4, 5, 6, 7]);
        let mut resumed = open(5);
        assert_eq!(resumed.losses.len(), 5);
        resumed.step(6, &report(0.25), StepMeasurements::default());
        assert_eq!(steps(folder.path()), [1, 2, 3, 4, 5, 6]);
        // A run that starts from the beginning keeps no line.
        open(0);
        assert_eq!(steps(folder.path()), [0_u64; 0]);
    }
}
