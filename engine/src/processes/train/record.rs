//! What a run keeps of its steps: `metrics.jsonl`, and the curve that is drawn from it.

use super::super::Context;
use super::Run;
use crate::error::{EngineError, Result};
use crate::training::StepReport;
use aitk_common::checkpoint::Checkpoint;
use aitk_common::fsutil;
use aitk_common::plot::Curve;
use aitk_common::step_metrics::{self, METRICS_FILE, PLOT_FILE, StepMetrics};
use candle_core::{Device, Tensor};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The losses so far, as a file of a checkpoint: a run that goes on elsewhere has the whole curve.
pub(super) const ROLE: &str = "losses";

/// The numbers of a run's steps, on disk and in memory.
pub(super) struct StepRecord {
    path: PathBuf,
    file: Option<File>,
    /// What the checkpoint knows that the run goes on from.
    known: Vec<StepMetrics>,
    begun: Instant,
    steps: Vec<u64>,
    losses: Vec<f64>,
    rates: Vec<f64>,
    /// When a line was last told, and at which step.
    told: (Instant, u64),
}

impl StepRecord {
    /// Of a run folder. Nothing is read or written before [`Self::open`].
    pub(super) fn new(folder: &Path) -> Self {
        let now = Instant::now();
        Self {
            path: folder.join(METRICS_FILE),
            file: None,
            known: Vec::new(),
            begun: now,
            steps: Vec::new(),
            losses: Vec::new(),
            rates: Vec::new(),
            told: (now, 0),
        }
    }

    /// The run goes on from this checkpoint.
    pub(super) fn take(&mut self, checkpoint: &Checkpoint) {
        self.known = losses_of(checkpoint);
    }

    /// Goes on after `start` steps: what the file has of later ones is removed, what it lacks of earlier ones comes from
    /// the checkpoint.
    pub(super) fn open(&mut self, start: u64) -> Result<()> {
        let failed = |error| EngineError::io(&self.path, error);
        let mut known: BTreeMap<u64, StepMetrics> = self.known.drain(..).map(|one| (one.step, one)).collect();
        if self.path.is_file() {
            let here = step_metrics::read(File::open(&self.path).map_err(failed)?).map_err(failed)?;
            known.extend(here.into_iter().map(|one| (one.step, one)));
        }
        known.retain(|step, _| *step <= start);
        fsutil::write_atomic(&self.path, |out| {
            for one in known.values() {
                writeln!(out, "{}", serde_json::to_string(one)?)?;
            }
            Ok(())
        })?;
        self.file = Some(File::options().append(true).open(&self.path).map_err(failed)?);
        self.steps = known.keys().copied().collect();
        self.losses = known.values().map(|one| one.loss().unwrap_or(f64::NAN)).collect();
        let rate = |one: &StepMetrics| one.values.get("lr").copied().unwrap_or(f64::NAN);
        self.rates = known.values().map(rate).collect();
        self.begin(start);
        Ok(())
    }

    /// Training begins, or goes on after something else: seconds count from here.
    pub(super) fn begin(&mut self, step: u64) {
        self.begun = Instant::now();
        self.told = (self.begun, step);
    }

    /// Keeps the numbers of a step. The answer is a warning, once, when they cannot be written.
    pub(super) fn step(&mut self, step: u64, report: &StepReport) -> Option<String> {
        self.steps.push(step);
        self.losses.push(report.loss);
        self.rates.push(report.lr);
        let mut values = BTreeMap::from([("loss".to_owned(), report.loss), ("lr".to_owned(), report.lr)]);
        if let Some(norm) = report.grad_norm {
            values.insert("grad_norm".to_owned(), norm);
        }
        let line = StepMetrics {
            step,
            values,
            time: step_metrics::now(),
            seconds: Some((self.begun.elapsed().as_secs_f64() * 1000.0).round() / 1000.0),
            memory: resident_bytes(),
        };
        let file = self.file.as_mut()?;
        let text = serde_json::to_string(&line).unwrap_or_default();
        // One call: a kill does not leave half a line.
        match file.write_all(format!("{text}\n").as_bytes()) {
            Ok(()) => None,
            Err(error) => {
                self.file = None;
                Some(format!(
                    "{}: cannot be written any more: {error}; training goes on",
                    self.path.display()
                ))
            }
        }
    }

    /// Wall time of a step since the last time this was asked.
    pub(super) fn seconds_per_step(&mut self, step: u64) -> Option<f64> {
        let (then, before) = std::mem::replace(&mut self.told, (Instant::now(), step));
        let steps = step.checked_sub(before).filter(|steps| *steps > 0)?;
        Some(then.elapsed().as_secs_f64() / steps as f64)
    }

    /// As tensors of a checkpoint. No times, so that the same steps make the same bytes.
    pub(super) fn tensors(&self) -> Result<BTreeMap<String, Tensor>> {
        let steps: Vec<i64> = self
            .steps
            .iter()
            .map(|step| i64::try_from(*step).unwrap_or(i64::MAX))
            .collect();
        Ok(BTreeMap::from([
            ("step".to_owned(), Tensor::new(steps, &Device::Cpu)?),
            ("loss".to_owned(), Tensor::new(self.losses.clone(), &Device::Cpu)?),
            ("lr".to_owned(), Tensor::new(self.rates.clone(), &Device::Cpu)?),
        ]))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    fn png(&self, title: &str) -> Option<Vec<u8>> {
        let curve = Curve {
            title: title.to_owned(),
            points: self.steps.iter().copied().zip(self.losses.iter().copied()).collect(),
        };
        curve.png()
    }
}

impl Run<'_> {
    /// Draws the curve of the loss and announces it. Not being able to is no reason to stop.
    pub(super) fn draw_losses(&self, cx: &mut Context<'_>, step: u64) {
        let Some(png) = self.record.png(&format!("{}   {step} steps", cx.job.name)) else {
            return;
        };
        let path = self.folder.path.join(PLOT_FILE);
        match fsutil::write_atomic(&path, |out| out.write_all(&png)) {
            Ok(()) => cx.artifact("plot", &self.folder.root, &path, Some(step), None),
            Err(error) => cx.log("warn", format!("the curve of the loss is not drawn: {error}")),
        }
    }
}

/// What a checkpoint knows of the steps before it; nothing in one of an earlier version.
fn losses_of(checkpoint: &Checkpoint) -> Vec<StepMetrics> {
    let read = || -> Option<Vec<StepMetrics>> {
        let tensors = candle_core::safetensors::load(checkpoint.file_with_role(ROLE)?, &Device::Cpu).ok()?;
        let steps = tensors.get("step")?.to_vec1::<i64>().ok()?;
        let column = |name: &str| tensors.get(name)?.to_vec1::<f64>().ok();
        let (losses, rates) = (column("loss")?, column("lr")?);
        let rows = steps.into_iter().zip(losses).zip(rates);
        let one = |((step, loss), rate): ((i64, f64), f64)| StepMetrics {
            step: u64::try_from(step).unwrap_or(0),
            values: BTreeMap::from([("loss".to_owned(), loss), ("lr".to_owned(), rate)]),
            ..StepMetrics::default()
        };
        Some(rows.map(one).collect())
    };
    read().unwrap_or_default()
}

/// Bytes of memory that this process has; none where the system does not tell a file.
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
            grad_norm: Some(1.0),
            warning: None,
        }
    }

    fn steps(folder: &Path) -> Vec<u64> {
        let file = File::open(folder.join(METRICS_FILE)).unwrap();
        step_metrics::read(file).unwrap().iter().map(|one| one.step).collect()
    }

    #[test]
    fn a_run_that_goes_back_replaces_what_came_after() {
        let folder = tempfile::tempdir().unwrap();
        let open = |start| {
            let mut record = StepRecord::new(folder.path());
            record.open(start).unwrap();
            record
        };
        let mut record = open(0);
        for step in 1..=7 {
            assert_eq!(record.step(step, &report(0.5)), None);
        }
        assert_eq!(steps(folder.path()), [1, 2, 3, 4, 5, 6, 7]);
        let mut again = open(5);
        assert_eq!(again.losses.len(), 5);
        again.step(6, &report(0.25));
        assert_eq!(steps(folder.path()), [1, 2, 3, 4, 5, 6]);
        // A run that begins anew has nothing of the one before.
        open(0);
        assert_eq!(steps(folder.path()), [0_u64; 0]);
    }
}
