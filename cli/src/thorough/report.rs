//! The report of the thorough check, as JSON and for a terminal.

use crate::failure::Failure;
use crate::output::format::printable;
use crate::output::{Column, Table, Ui};
use crate::views::device as device_name;
use aitk_common::capability::DeviceRef;
use serde::Serialize;
use std::collections::BTreeMap;

/// The results of all devices.
#[derive(Debug, Serialize)]
pub struct ThoroughReport {
    /// How long everything took.
    pub(super) seconds: f64,
    pub(super) devices: Vec<DeviceReport>,
}

/// The results of one device.
#[derive(Debug, Serialize)]
pub(super) struct DeviceReport {
    pub(super) device: DeviceRef,
    pub(super) name: String,
    pub(super) architecture: String,
    pub(super) seconds: f64,
    pub(super) dtypes: Vec<DtypeReport>,
    pub(super) memory: Vec<MemoryReport>,
    pub(super) speed: Vec<SpeedReport>,
}

/// The demo's training in one dtype, compared with the CPU in f32.
#[derive(Debug, Serialize)]
pub(super) struct DtypeReport {
    dtype: String,
    /// What was compared; none if the training failed.
    comparison: Option<Comparison>,
    /// Why the training failed.
    error: Option<String>,
}

/// How far a training differs from the reference.
#[derive(Debug, Serialize)]
pub(super) struct Comparison {
    /// The largest difference of a step's loss, relative to the reference.
    pub(super) loss_difference: f64,
    pub(super) image_before: ImageDifference,
    pub(super) image_after: ImageDifference,
    /// What differs by more than is expected.
    pub(super) failures: Vec<String>,
}

/// How far images differ, in units of 1/255.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct ImageDifference {
    /// The mean over all channels of all pixels.
    pub(super) mean: f64,
    /// The largest.
    pub(super) largest: u8,
}

/// The memory that a job took.
#[derive(Debug, Serialize)]
pub(super) struct MemoryReport {
    job: String,
    predicted_gib: Option<f64>,
    taken_gib: Option<f64>,
    error: Option<String>,
}

/// The speed of one benchmark.
#[derive(Debug, Serialize)]
pub(super) struct SpeedReport {
    benchmark: String,
    /// Floating-point operations of one run.
    flops: u64,
    /// Dtype -> seconds of one run.
    seconds: BTreeMap<String, f64>,
    /// Dtype -> why it was not measured.
    errors: BTreeMap<String, String>,
}

/// More memory than this above the prediction is a problem: jobs can run out of memory.
const MOST_ABOVE_PREDICTION: f64 = 0.05;

impl DtypeReport {
    pub(super) fn new(dtype: &str, compared: Result<Comparison, String>) -> Self {
        let (comparison, error) = match compared {
            Ok(comparison) => (Some(comparison), None),
            Err(error) => (None, Some(error)),
        };
        Self {
            dtype: dtype.to_owned(),
            comparison,
            error,
        }
    }

    fn is_right(&self) -> bool {
        self.comparison.as_ref().is_some_and(|found| found.failures.is_empty())
    }
}

impl MemoryReport {
    pub(super) fn new(job: String, measured: Result<(Option<f64>, Option<f64>), String>) -> Self {
        let (measured, error) = match measured {
            Ok(measured) => (measured, None),
            Err(error) => ((None, None), Some(error)),
        };
        Self {
            job,
            predicted_gib: measured.0,
            taken_gib: measured.1,
            error,
        }
    }

    /// By how much the prediction is too large, as a fraction of what the job took.
    fn excess(&self) -> Option<f64> {
        Some(self.predicted_gib? / self.taken_gib.filter(|taken| *taken > 0.0)? - 1.0)
    }
}

impl SpeedReport {
    pub(super) fn new(benchmark: &str, flops: u64, results: Vec<(String, Result<f64, String>)>) -> Self {
        let (mut seconds, mut errors) = (BTreeMap::new(), BTreeMap::new());
        for (dtype, result) in results {
            match result {
                Ok(value) => drop(seconds.insert(dtype, value)),
                Err(error) => drop(errors.insert(dtype, error)),
            }
        }
        Self {
            benchmark: benchmark.to_owned(),
            flops,
            seconds,
            errors,
        }
    }
}

impl ThoroughReport {
    /// What is wrong, one sentence each.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        self.devices.iter().flat_map(DeviceReport::problems).collect()
    }

    /// Prints the report.
    ///
    /// # Errors
    /// When standard output cannot be written.
    pub fn show(&self, ui: &Ui) -> Result<(), Failure> {
        self.devices.iter().try_for_each(|device| device.show(ui))
    }
}

impl DeviceReport {
    fn problems(&self) -> Vec<String> {
        let device = device_name(self.device);
        let mut problems = Vec::new();
        for found in &self.dtypes {
            let failures = found.comparison.iter().flat_map(|comparison| &comparison.failures);
            problems.extend(
                failures
                    .chain(&found.error)
                    .map(|failure| format!("{device}, {}: {failure}", found.dtype)),
            );
        }
        for found in &self.memory {
            if let Some(error) = &found.error {
                problems.push(format!("{device}, {}: {error}", found.job));
            }
            if let Some(excess) = found.excess().filter(|excess| *excess < -MOST_ABOVE_PREDICTION) {
                problems.push(format!(
                    "{device}, {}: it took {:.0} % more memory than predicted, so jobs can run out of memory",
                    found.job,
                    100.0 * (1.0 / (1.0 + excess) - 1.0)
                ));
            }
        }
        for found in &self.speed {
            for (dtype, error) in &found.errors {
                if !error.starts_with("skipped") {
                    problems.push(format!("{device}, {dtype}, benchmark {}: {error}", found.benchmark));
                }
            }
        }
        problems
    }

    fn show(&self, ui: &Ui) -> Result<(), Failure> {
        ui.data(&format!(
            "\nThorough check of {}: {} ({}), {:.0} s",
            device_name(self.device),
            printable(&self.name),
            printable(&self.architecture),
            self.seconds
        ))?;
        ui.data("  the demo's training of 20 steps, compared with the CPU in f32")?;
        let mut table = Table::new(&[
            Column::fixed("  DTYPE"),
            Column::number("LOSSES"),
            Column::number("IMAGES BEFORE"),
            Column::number("AFTER"),
            Column::fixed("RESULT"),
        ]);
        for found in &self.dtypes {
            let cells = found.comparison.as_ref().map(|found| {
                let image = |difference: ImageDifference| format!("{:.2}/255", difference.mean);
                [
                    format!("{:.4} %", 100.0 * found.loss_difference),
                    image(found.image_before),
                    image(found.image_after),
                ]
            });
            let [losses, before, after] = cells.unwrap_or_default();
            let result = if found.is_right() { "right" } else { "wrong" };
            table.row([format!("  {}", found.dtype), losses, before, after, result.to_owned()]);
        }
        ui.table(&table)?;
        ui.data("  memory")?;
        let mut table = Table::new(&[
            Column::text("  JOB", 20),
            Column::number("PREDICTED"),
            Column::number("TAKEN"),
            Column::number("TOO MUCH"),
        ]);
        for found in &self.memory {
            let gib =
                |value: Option<f64>| value.map_or_else(|| "unknown".to_owned(), |value| format!("{value:.2} GiB"));
            let excess = found
                .excess()
                .map_or_else(String::new, |excess| format!("{:+.0} %", 100.0 * excess));
            table.row([
                format!("  {}", found.job),
                gib(found.predicted_gib),
                gib(found.taken_gib),
                excess,
            ]);
        }
        ui.table(&table)?;
        self.show_speed(ui)
    }

    /// Seconds and operations per second, a column for each dtype.
    fn show_speed(&self, ui: &Ui) -> Result<(), Failure> {
        let dtypes = [("f32", "F32"), ("bf16", "BF16"), ("f16", "F16")];
        let dtypes = dtypes.into_iter();
        let dtypes: Vec<_> = dtypes
            .filter(|(dtype, _)| self.dtypes.iter().any(|found| found.dtype == *dtype))
            .collect();
        ui.data("  seconds (and GFLOP/s) of benchmarks")?;
        let mut columns = vec![Column::fixed("  BENCHMARK")];
        columns.extend(dtypes.iter().map(|(_, title)| Column::number(title)));
        let mut table = Table::new(&columns);
        for found in &self.speed {
            let mut row = vec![format!("  {}", found.benchmark)];
            row.extend(dtypes.iter().map(|(dtype, _)| match found.seconds.get(*dtype) {
                Some(seconds) if found.flops > 0 => {
                    format!("{seconds:.4} ({:.0})", found.flops as f64 / seconds / 1e9)
                }
                Some(seconds) => format!("{seconds:.4}"),
                None => "none".to_owned(),
            }));
            table.row(row);
        }
        ui.table(&table)
    }
}
