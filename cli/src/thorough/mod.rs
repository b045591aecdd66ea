//! `aitk doctor --thorough`: runs real jobs and benchmarks on each device, and compares them with the CPU.
//!
//! Everything that computes runs in a child process of this program, with a time limit: a driver that crashes or hangs
//! ends one check, not the report.

mod check_jobs;
mod child;
mod compare;
mod memory;
mod report;
mod speed;

pub use report::ThoroughReport;

use crate::args::DoctorArgs;
use crate::embedded::PrivateFolder;
use crate::failure::Failure;
use crate::output::Ui;
use crate::paths::Paths;
use crate::views::device as device_name;
use aitk_common::capability::{Device, DeviceKind};
use check_jobs::{CheckJobs, Training};
use report::{DeviceReport, DtypeReport, MemoryReport};
use std::time::{Duration, Instant};

/// How long the checks of one device may take. What is left after it is skipped, and the report says so.
const TIME_PER_GPU: Duration = Duration::from_secs(330);
const TIME_PER_CPU: Duration = Duration::from_secs(1200);

/// The device with which all others are compared.
const REFERENCE_DEVICE: &str = "cpu";

/// Checks `devices`, one after another. Progress is printed on standard error.
///
/// # Errors
/// When the folder for models and results cannot be written, or the reference on the CPU fails.
pub async fn check(ui: &Ui, paths: &Paths, devices: &[Device], args: &DoctorArgs) -> Result<ThoroughReport, Failure> {
    let start = Instant::now();
    let folder = PrivateFolder::new(&paths.state.join("run"))?;
    let jobs = CheckJobs::unpack(&folder.path().join("check"), args.steps)?;
    ui.notice("reference: the demo's training and images on the CPU, in f32");
    let reference = jobs.train("reference", REFERENCE_DEVICE, "f32", TIME_PER_CPU).await?;
    let mut reports = Vec::new();
    for device in devices {
        let limit = match (args.time, device.id.kind) {
            (Some(seconds), _) => Duration::from_secs(seconds),
            (None, DeviceKind::Cpu) => TIME_PER_CPU,
            (None, DeviceKind::Cuda | DeviceKind::Metal) => TIME_PER_GPU,
        };
        reports.push(check_device(ui, &jobs, &reference, device, limit).await);
    }
    Ok(ThoroughReport {
        seconds: start.elapsed().as_secs_f64(),
        devices: reports,
    })
}

async fn check_device(
    ui: &Ui,
    jobs: &CheckJobs,
    reference: &Training,
    device: &Device,
    limit: Duration,
) -> DeviceReport {
    let start = Instant::now();
    let name = device_name(device.id);
    let remaining = || limit.saturating_sub(start.elapsed());
    let mut dtypes = Vec::new();
    for dtype in &device.dtypes {
        ui.notice(&format!("{name}: the demo's training and images in {dtype}"));
        let job = format!("train_{}_{dtype}", name.replace(':', "_"));
        let compared = match jobs.train(&job, &name, dtype, remaining()).await {
            Ok(training) => compare::compare(reference, &training, dtype).map_err(|failure| failure.message),
            Err(failure) => Err(failure.message),
        };
        dtypes.push(DtypeReport::new(dtype, compared));
    }
    ui.notice(&format!("{name}: memory of larger jobs, compared with the predictions"));
    let memory = memory::measure(ui, jobs, device, remaining()).await;
    let memory =
        memory.unwrap_or_else(|failure| vec![MemoryReport::new("larger jobs".to_owned(), Err(failure.message))]);
    let speed = speed::measure(ui, device, remaining).await;
    DeviceReport {
        device: device.id,
        name: device.name.clone(),
        architecture: device.architecture.clone(),
        seconds: start.elapsed().as_secs_f64(),
        dtypes,
        memory,
        speed,
    }
}
