//! `metrics.jsonl` of a run folder: one line per step, in the order of the steps.
//!
//! A run that resumes from a checkpoint repeats steps. The line of a repeated step replaces the earlier lines of that step and of
//! all later ones.

use crate::control_plane::non_finite;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read};

/// The file with the metrics of each step.
pub const METRICS_FILE: &str = "metrics.jsonl";
/// The run's log file.
pub const LOG_FILE: &str = "log.txt";
/// The plot of the loss.
pub const PLOT_FILE: &str = "loss.png";
/// The length limit of a line in bytes. aitk writes no longer ones.
const MAX_LINE_BYTES: u64 = 64 << 10;

/// The metrics of one step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// The number of the step, counted from 1.
    pub step: u64,
    /// `loss`, `loss/…`, `lr`, `grad_norm`. Non-finite values are written as text: `"NaN"`, `"inf"`.
    #[serde(flatten, with = "non_finite")]
    pub values: BTreeMap<String, f64>,
    /// When the step ended, RFC 3339.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub time: String,
    /// Seconds since training started or resumed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// The process's memory in bytes at that time, where the system reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
}

impl StepMetrics {
    /// The loss, if the step has one.
    #[must_use]
    pub fn loss(&self) -> Option<f64> {
        let names = ["loss", "loss/loss"];
        names.iter().find_map(|name| self.values.get(*name)).copied()
    }
}

/// Reads a metrics file. Damaged lines are skipped: the last line of a killed run may be incomplete. The line of a repeated step
/// replaces the earlier lines of that step and of later ones.
///
/// # Errors
/// The errors of the reader.
pub fn read(from: impl Read) -> io::Result<Vec<StepMetrics>> {
    let mut reader = BufReader::new(from);
    let mut all: Vec<StepMetrics> = Vec::new();
    loop {
        let mut line = Vec::new();
        if (&mut reader).take(MAX_LINE_BYTES).read_until(b'\n', &mut line)? == 0 {
            return Ok(all);
        }
        let Ok(one) = serde_json::from_slice::<StepMetrics>(&line) else {
            continue;
        };
        while all.last().is_some_and(|last| last.step >= one.step) {
            all.pop();
        }
        all.push(one);
    }
}

/// The current time as the file has it: RFC 3339 in UTC, with milliseconds.
#[must_use]
pub fn now() -> String {
    format!("{:.3}", jiff::Timestamp::now())
}

/// Formats the metrics of a step for display: `step 10/500  loss 0.1230  lr 1e-4  1.20 s/it`. The total number of steps is `total`,
/// or else the metric `steps`. None without a loss and a learning rate.
#[must_use]
pub fn step_line(step: u64, total: Option<u64>, values: &BTreeMap<String, f64>) -> Option<String> {
    let value = |names: &[&str]| names.iter().find_map(|name| values.get(*name)).copied();
    let loss = value(&["loss", "loss/loss"]);
    let rate = value(&["lr", "learning_rate"]);
    if loss.is_none() && rate.is_none() {
        return None;
    }
    let reported = values
        .get("steps")
        .copied()
        .filter(|steps| steps.is_finite() && *steps >= 1.0);
    let mut line = match (total, reported) {
        (Some(total), _) => format!("step {step}/{total}"),
        (None, Some(total)) => format!("step {step}/{total:.0}"),
        (None, None) => format!("step {step}"),
    };
    if let Some(loss) = loss {
        line += &format!("  loss {}", format_short(loss));
    }
    if let Some(rate) = rate {
        line += &format!("  lr {}", format_short(rate));
    }
    match values.get("seconds_per_step") {
        Some(seconds) if *seconds >= 1.0 => line += &format!("  {seconds:.2} s/it"),
        Some(seconds) if *seconds > 0.0 => line += &format!("  {:.2} it/s", 1.0 / seconds),
        _ => {}
    }
    Some(line)
}

/// Formats a loss or learning rate in few digits: `0.1230`, `1e-4`, `1.25e-5`.
fn format_short(value: f64) -> String {
    let size = value.abs();
    if !value.is_finite() || size == 0.0 {
        return value.to_string();
    }
    if (1e-2..1e4).contains(&size) {
        return format!("{value:.4}");
    }
    let text = format!("{value:.2e}");
    match text.split_once('e') {
        Some((digits, power)) => format!("{}e{power}", digits.trim_end_matches('0').trim_end_matches('.')),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64, loss: f64) -> StepMetrics {
        StepMetrics {
            step,
            values: BTreeMap::from([("loss".to_owned(), loss), ("lr".to_owned(), 1e-4)]),
            time: "2026-01-01T00:00:00.000Z".into(),
            seconds: Some(1.5),
            memory: None,
        }
    }

    #[test]
    fn metrics_round_trip_and_a_repeated_step_replaces_later_lines() {
        let mut text = String::new();
        for one in [step(1, 0.5), step(2, f64::NAN), step(3, 0.4), step(2, 0.3)] {
            text += &serde_json::to_string(&one).unwrap();
            text.push('\n');
        }
        assert!(
            text.starts_with(r#"{"step":1,"loss":0.5,"lr":0.0001,"time":"#),
            "{text}"
        );
        assert!(text.contains(r#""loss":"NaN""#), "{text}");
        text += "{\"step\":3,\"lo";
        let all = read(text.as_bytes()).unwrap();
        assert_eq!(all, [step(1, 0.5), step(2, 0.3)]);
        assert_eq!(all[1].loss(), Some(0.3));
    }

    #[test]
    fn a_step_is_formatted_as_one_line() {
        let values = BTreeMap::from([
            ("loss/loss".to_owned(), 0.123),
            ("learning_rate".to_owned(), 1e-4),
            ("seconds_per_step".to_owned(), 1.2),
        ]);
        assert_eq!(
            step_line(10, Some(500), &values).unwrap(),
            "step 10/500  loss 0.1230  lr 1e-4  1.20 s/it"
        );
        assert_eq!(step_line(10, None, &BTreeMap::new()), None);
        let with_total = BTreeMap::from([("loss".to_owned(), 0.5), ("steps".to_owned(), 500.0)]);
        assert_eq!(step_line(10, None, &with_total).unwrap(), "step 10/500  loss 0.5000");
        let fast = BTreeMap::from([("loss".to_owned(), f64::NAN), ("seconds_per_step".to_owned(), 0.25)]);
        assert_eq!(step_line(1, None, &fast).unwrap(), "step 1  loss NaN  4.00 it/s");
    }
}
