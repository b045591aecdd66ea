//! Runs this program again as a child process, and collects what it reports.

use crate::child_process::child_output;
use crate::failure::Failure;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::process::Command;

/// The name of the loss among the metrics.
const LOSS: &str = "loss/loss";

/// What a job of `aitk run` reported.
#[derive(Debug, Default)]
pub(super) struct JobOutcome {
    /// The loss of each step.
    pub losses: BTreeMap<u64, f64>,
    /// Other metrics: their last values.
    pub metrics: BTreeMap<String, f64>,
    /// Images: (step, index) -> file.
    pub images: BTreeMap<(u64, u64), PathBuf>,
}

/// Runs a config with `aitk run` on a device, in `folder`.
///
/// # Errors
/// When it fails, with its last message, or does not end in time.
pub(super) async fn run_job(
    folder: &Path,
    config: &Path,
    device: &str,
    limit: Duration,
) -> Result<JobOutcome, Failure> {
    let program = std::env::current_exe().map_err(|error| Failure::failed(error.to_string()))?;
    let mut command = Command::new(program);
    command.arg("run").arg(config).args(["--device", device, "--json"]);
    command.current_dir(folder);
    let output = child_output(command, Some(limit)).await?;
    Ok(parse_events(&output))
}

/// Reads the lines that `aitk run --json` prints.
fn parse_events(output: &str) -> JobOutcome {
    let mut outcome = JobOutcome::default();
    for event in output
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
    {
        match event.get("event").and_then(Value::as_str) {
            Some("metrics") => {
                let step = event.get("step").and_then(Value::as_u64).unwrap_or_default();
                let values = event.get("values").and_then(Value::as_object);
                for (name, value) in values.into_iter().flatten() {
                    // A number that is not finite is written as text.
                    let value = value
                        .as_f64()
                        .or_else(|| value.as_str()?.parse().ok())
                        .unwrap_or(f64::NAN);
                    if name == LOSS {
                        outcome.losses.insert(step, value);
                    } else {
                        outcome.metrics.insert(name.clone(), value);
                    }
                }
            }
            Some("artifact") if event.get("kind").and_then(Value::as_str).is_some_and(is_image) => {
                let number = |name: &str| event.get(name).and_then(Value::as_u64).unwrap_or_default();
                if let Some(path) = event.get("local_path").and_then(Value::as_str) {
                    outcome.images.insert((number("step"), number("index")), path.into());
                }
            }
            _ => {}
        }
    }
    outcome
}

fn is_image(kind: &str) -> bool {
    matches!(kind, "sample" | "image")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_collected() {
        let lines = concat!(
            "{\"event\":\"metrics\",\"step\":1,\"values\":{\"loss/loss\":0.5,\"lr\":1e-4}}\n",
            "not JSON\n",
            "{\"event\":\"metrics\",\"step\":2,\"values\":{\"loss/loss\":\"NaN\",\"memory/peak_gib\":1.5}}\n",
            "{\"event\":\"artifact\",\"kind\":\"sample\",\"step\":2,\"index\":1,\"local_path\":\"/a/b.jpg\"}\n",
        );
        let outcome = parse_events(lines);
        assert_eq!(outcome.losses[&1].to_bits(), 0.5f64.to_bits());
        assert!(outcome.losses[&2].is_nan());
        assert_eq!(outcome.metrics["memory/peak_gib"].to_bits(), 1.5f64.to_bits());
        assert_eq!(outcome.images[&(2, 1)], Path::new("/a/b.jpg"));
    }
}
