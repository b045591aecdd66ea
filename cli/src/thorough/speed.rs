//! Measures the benchmarks of `aitk bench engine` that suit a device, in every dtype that works there.

use super::report::SpeedReport;
use crate::bench::engine::{ChildBenchmark, child_command, parse_result};
use crate::child_process::child_output;
use crate::output::Ui;
use crate::views::device as device_name;
use aitk_common::capability::{Device, DeviceKind};
use aitk_worker::bench::{BENCHMARKS, Benchmark};
use std::time::{Duration, Instant};

/// How long each benchmark is repeated. Shorter than `aitk bench engine` does, so that the whole check takes minutes.
const DURATION: Duration = Duration::from_millis(500);
/// One benchmark may take this long, with making its weights.
const TIME_PER_BENCHMARK: Duration = Duration::from_secs(120);

/// Why a benchmark was not measured, if the time did not suffice. It is not a problem.
const OUT_OF_TIME: &str = "skipped: the time for this device was over";

/// Whether a benchmark suits a device: it takes seconds there.
fn is_suitable(benchmark: &Benchmark, device: &Device) -> bool {
    let most_flops = match device.id.kind {
        DeviceKind::Cpu if device.id.is_portable() => 2_000_000_000,
        DeviceKind::Cpu => 100_000_000_000,
        // Making the weights of a whole SDXL takes longer than the rest.
        DeviceKind::Cuda | DeviceKind::Metal if benchmark.name.starts_with("unet_sdxl") => 0,
        DeviceKind::Cuda | DeviceKind::Metal => u64::MAX,
    };
    // In portable mode the whole weight is widened for each row, and a step of an optimizer has a tensor for each of its operations.
    let is_slow_in_portable_mode = benchmark.name.starts_with("adamw") || benchmark.name.starts_with("linear_one_row");
    let is_slow_portable = device.id.is_portable() && is_slow_in_portable_mode;
    let measures_the_disk = benchmark.name == "safetensors_load_512mib";
    !is_slow_portable && !measures_the_disk && benchmark.flops <= most_flops
}

/// Measures until `remaining` is zero.
pub(super) async fn measure(ui: &Ui, device: &Device, remaining: impl Fn() -> Duration) -> Vec<SpeedReport> {
    let name = device_name(device.id);
    let mut reports = Vec::new();
    for benchmark in BENCHMARKS.iter().filter(|benchmark| is_suitable(benchmark, device)) {
        ui.notice(&format!("{name}: {}", benchmark.about));
        let mut results = Vec::new();
        for dtype in &device.dtypes {
            let limit = remaining().min(TIME_PER_BENCHMARK);
            let measured = if limit.is_zero() {
                Err(OUT_OF_TIME.to_owned())
            } else {
                measure_one(benchmark, device, dtype, limit).await
            };
            results.push((dtype.clone(), measured));
        }
        reports.push(SpeedReport::new(benchmark.name, benchmark.flops, results));
    }
    reports
}

async fn measure_one(benchmark: &Benchmark, device: &Device, dtype: &str, limit: Duration) -> Result<f64, String> {
    let command = child_command(&ChildBenchmark {
        benchmark,
        device: device.id,
        dtype,
        duration: DURATION,
    });
    let start = Instant::now();
    let output = match command {
        Ok(command) => child_output(command, Some(limit)).await,
        Err(failure) => Err(failure),
    };
    let result = output.and_then(|output| parse_result(&output));
    result.map(|result| result.seconds).map_err(|failure| {
        let ran_out = limit < TIME_PER_BENCHMARK && start.elapsed() >= limit;
        if ran_out {
            OUT_OF_TIME.to_owned()
        } else {
            failure.message
        }
    })
}
