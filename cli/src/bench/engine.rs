//! `aitk bench engine`: measures parts of models on this machine. Each runs in a child process, so that its peak memory
//! is its own, and running out of memory ends only that one.

use crate::args::BenchEngineArgs;
use crate::child_process::child_output;
use crate::context::Context;
use crate::embedded::find_devices;
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::output::format::size;
use crate::output::{Column, Table};
use aitk_common::capability::DeviceRef;
use aitk_worker::bench::{BENCHMARKS, Benchmark, BenchmarkResult, measure};
use aitk_worker::probe::{DeviceSelection, label};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::process::Command;

/// The longest time that a benchmark is repeated.
const MAX_DURATION: Duration = Duration::from_secs(3600);

pub(super) async fn run(context: &Context, args: &BenchEngineArgs) -> CommandResult {
    let ui = context.ui(true);
    let benchmarks = select_benchmarks(args.only.as_deref())?;
    if args.list {
        return list(context, args, &benchmarks);
    }
    if args.here {
        let result = measure_here(&benchmarks, args).await?;
        ui.data(&json!(result).to_string())?;
        return Ok(Exit::Ok);
    }
    let duration = duration(args)?;
    check_dtype(&args.dtype)?;
    let devices = find_devices(args.device.as_deref()).await?;
    let device = devices
        .first()
        .ok_or_else(|| Failure::failed("this machine has no usable device"))?;
    ui.notice(&format!(
        "{} ({}): time of one run, operations per second, peak memory",
        device.name, device.architecture
    ));
    let mut results = Vec::new();
    let mut failed = 0;
    for benchmark in benchmarks {
        ui.notice(&format!("{}: {}", benchmark.name, benchmark.about));
        let command = child_command(&ChildBenchmark {
            benchmark,
            device: device.id,
            dtype: &args.dtype,
            duration,
        })?;
        let output = child_output(command, None).await;
        match output.and_then(|output| parse_result(&output)) {
            Ok(result) => {
                if !args.json {
                    ui.data(&result_line(&result))?;
                }
                results.push(result);
            }
            Err(failure) => {
                failed += 1;
                ui.warn(&format!("{}: {}", benchmark.name, failure.message));
            }
        }
    }
    if args.json {
        ui.data(&pretty(&json!(results)))?;
    }
    if failed > 0 {
        return Err(Failure::failed(format!("{failed} benchmarks failed")));
    }
    Ok(Exit::Ok)
}

/// Returns the benchmark with this name, else all whose names contain the text.
fn select_benchmarks(only: Option<&str>) -> Result<Vec<&'static Benchmark>, Failure> {
    let Some(only) = only else {
        return Ok(BENCHMARKS.iter().collect());
    };
    if let Some(benchmark) = Benchmark::named(only) {
        return Ok(vec![benchmark]);
    }
    let some: Vec<_> = BENCHMARKS
        .iter()
        .filter(|benchmark| benchmark.name.contains(only))
        .collect();
    if some.is_empty() {
        return Err(Failure::usage(format!("no benchmark has `{only}` in its name"))
            .hint("`aitk bench engine --list` lists all"));
    }
    Ok(some)
}

fn list(context: &Context, args: &BenchEngineArgs, benchmarks: &[&'static Benchmark]) -> CommandResult {
    let ui = context.ui(true);
    if args.json {
        let benchmarks = benchmarks
            .iter()
            .map(|benchmark| json!({ "work": benchmark.name, "about": benchmark.about, "flops": benchmark.flops }));
        ui.data(&pretty(&benchmarks.collect()))?;
        return Ok(Exit::Ok);
    }
    let mut table = Table::new(&[Column::fixed("BENCHMARK"), Column::text("WHAT IT IS", 20)]);
    for benchmark in benchmarks {
        table.row([benchmark.name.to_owned(), benchmark.about.to_owned()]);
    }
    ui.table(&table)?;
    Ok(Exit::Ok)
}

/// Formats indented JSON without `schema_version`.
fn pretty(value: &Value) -> String {
    format!("{value:#}")
}

/// Measures in this process. It does not probe for devices, because probing computes and would create the thread pool
/// too early.
async fn measure_here(benchmarks: &[&'static Benchmark], args: &BenchEngineArgs) -> Result<BenchmarkResult, Failure> {
    let choice = args.device.as_deref().unwrap_or("cpu").parse::<DeviceSelection>();
    let (&[benchmark], Ok(DeviceSelection::Listed(devices))) = (benchmarks, choice) else {
        return Err(Failure::usage("--here takes one benchmark and one device"));
    };
    let device = devices.first().copied();
    let device = device.ok_or_else(|| Failure::usage("--here takes one device"))?;
    let (dtype, duration) = (args.dtype.clone(), duration(args)?);
    let measured = tokio::task::spawn_blocking(move || measure(benchmark, device, &dtype, duration)).await;
    measured
        .map_err(|error| Failure::failed(error.to_string()))?
        .map_err(|error| Failure::failed(crate::failure::chain(&error)))
}

fn duration(args: &BenchEngineArgs) -> Result<Duration, Failure> {
    let duration = Duration::try_from_secs_f64(args.seconds).ok();
    duration
        .filter(|duration| *duration <= MAX_DURATION)
        .ok_or_else(|| Failure::usage(format!("--seconds takes 0 to {}", MAX_DURATION.as_secs())))
}

/// Checks the name of a dtype before each benchmark fails for it.
fn check_dtype(name: &str) -> Result<(), Failure> {
    let parsed = aitk_engine::device::parse_dtype(name);
    parsed
        .map(drop)
        .map_err(|error| Failure::usage(format!("--dtype: {error}")))
}

/// What a child process measures.
pub(crate) struct ChildBenchmark<'a> {
    /// The benchmark.
    pub benchmark: &'a Benchmark,
    /// Where.
    pub device: DeviceRef,
    /// The dtype of weights and activations.
    pub dtype: &'a str,
    /// How long it is repeated.
    pub duration: Duration,
}

/// Returns the command of a child process that measures.
///
/// # Errors
/// When the path of this program is unknown.
pub(crate) fn child_command(measured: &ChildBenchmark<'_>) -> Result<Command, Failure> {
    let program = std::env::current_exe().map_err(|error| Failure::failed(error.to_string()))?;
    let mut command = Command::new(program);
    command
        .args(["bench", "engine", "--here", "--json", "--only", measured.benchmark.name])
        .args(["--device", &label(measured.device), "--dtype", measured.dtype])
        .args(["--seconds", &measured.duration.as_secs_f64().to_string()])
        // As in a worker: candle's own thread pool waits by spinning, so only the engine's threads are used.
        .env("CANDLE_NUM_THREADS", "1");
    Ok(command)
}

/// Reads what such a child process printed.
///
/// # Errors
/// When it is not a result.
pub(crate) fn parse_result(output: &str) -> Result<BenchmarkResult, Failure> {
    serde_json::from_str(output)
        .map_err(|error| Failure::failed(format!("the child process printed invalid JSON: {error}")))
}

fn result_line(result: &BenchmarkResult) -> String {
    let rate = if result.flops > 0 {
        format!("{:8.1} GFLOP/s", result.flops as f64 / result.seconds / 1e9)
    } else {
        " ".repeat(16)
    };
    format!(
        "{:<36}{:>10.4} s{rate}{:>12}",
        result.work,
        result.seconds,
        size(result.peak_bytes)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exact_name_wins_over_parts_of_names() {
        assert_eq!(select_benchmarks(Some("unet_sd15_lora_step_64")).unwrap().len(), 1);
        assert_eq!(select_benchmarks(Some("sd15_lora_step")).unwrap().len(), 2);
        assert_eq!(select_benchmarks(None).unwrap().len(), BENCHMARKS.len());
        let none = select_benchmarks(Some("sd99"))
            .err()
            .map(|failure| failure.message)
            .unwrap_or_default();
        assert!(none.contains("sd99"), "{none}");
    }

    #[test]
    fn an_unknown_dtype_is_a_usage_error() {
        assert_eq!(check_dtype("bf16"), Ok(()));
        let failure = check_dtype("int3").unwrap_err();
        assert_eq!(failure.exit, Exit::Usage);
        assert!(failure.message.contains("int3"), "{}", failure.message);
    }

    #[test]
    fn a_line_fits_a_terminal() {
        let result = BenchmarkResult {
            work: "unet_sd15_lora_step_64_recomputed".to_owned(),
            seconds: 123.4567,
            flops: 2_432_043_569_152,
            peak_bytes: 12 << 30,
            runs: 3,
        };
        assert!(result_line(&result).len() <= 80, "{}", result_line(&result).len());
    }
}
