//! `metrics.jsonl` of a run folder: one line for each step, in the order of the steps.
//!
//! A step that is done again after a run went back to a checkpoint replaces what was written of it and after it.

use crate::control::any_number;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read};

/// The file's name.
pub const METRICS_FILE: &str = "metrics.jsonl";
/// The file with everything that a run said.
pub const LOG_FILE: &str = "log.txt";
/// The curve of the loss.
pub const PLOT_FILE: &str = "loss.png";
/// A line that is longer was not written by us.
const LONGEST_LINE: u64 = 64 << 10;

/// The numbers of one step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Steps done with it.
    pub step: u64,
    /// `loss`, `loss/…`, `lr`, `grad_norm`. One that diverged is a text: `"NaN"`, `"inf"`.
    #[serde(flatten, with = "any_number")]
    pub values: BTreeMap<String, f64>,
    /// When it was done, RFC 3339.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub time: String,
    /// Seconds since training began or went on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// Bytes of memory that the process had then, where that can be told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
}

impl StepMetrics {
    /// Its loss.
    #[must_use]
    pub fn loss(&self) -> Option<f64> {
        let names = ["loss", "loss/loss"];
        names.iter().find_map(|name| self.values.get(*name)).copied()
    }
}

/// Reads such a file. A line that is damaged, as the last one of a killed run may be, is passed over; a step that comes again
/// replaces what was told of it and of later ones.
///
/// # Errors
/// When it cannot be read.
pub fn read(from: impl Read) -> io::Result<Vec<StepMetrics>> {
    let mut reader = BufReader::new(from);
    let mut all: Vec<StepMetrics> = Vec::new();
    loop {
        let mut line = Vec::new();
        if (&mut reader).take(LONGEST_LINE).read_until(b'\n', &mut line)? == 0 {
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

/// Now, as the file has it: RFC 3339 in UTC, with milliseconds.
#[must_use]
pub fn now() -> String {
    format!("{:.3}", jiff::Timestamp::now())
}

/// The line of a step for people: `step 10/500  loss 0.1230  lr 1e-4  1.20 s/it`. The number of all steps is `total`, or `steps` of
/// the values.
#[must_use]
pub fn step_line(step: u64, total: Option<u64>, values: &BTreeMap<String, f64>) -> Option<String> {
    let value = |names: &[&str]| names.iter().find_map(|name| values.get(*name)).copied();
    let loss = value(&["loss", "loss/loss"]);
    let rate = value(&["lr", "learning_rate"]);
    if loss.is_none() && rate.is_none() {
        return None;
    }
    let told = values
        .get("steps")
        .copied()
        .filter(|steps| steps.is_finite() && *steps >= 1.0);
    let mut line = match (total, told) {
        (Some(total), _) => format!("step {step}/{total}"),
        (None, Some(total)) => format!("step {step}/{total:.0}"),
        (None, None) => format!("step {step}"),
    };
    if let Some(loss) = loss {
        line += &format!("  loss {}", plain(loss));
    }
    if let Some(rate) = rate {
        line += &format!("  lr {}", plain(rate));
    }
    match values.get("seconds_per_step") {
        Some(seconds) if *seconds >= 1.0 => line += &format!("  {seconds:.2} s/it"),
        Some(seconds) if *seconds > 0.0 => line += &format!("  {:.2} it/s", 1.0 / seconds),
        _ => {}
    }
    Some(line)
}

/// A loss or rate in few digits: `0.1230`, `1e-4`, `1.25e-5`.
fn plain(value: f64) -> String {
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
    fn what_is_written_is_read_and_a_repeated_step_replaces_what_followed() {
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
    fn a_step_is_one_short_line() {
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
        let told = BTreeMap::from([("loss".to_owned(), 0.5), ("steps".to_owned(), 500.0)]);
        assert_eq!(step_line(10, None, &told).unwrap(), "step 10/500  loss 0.5000");
        let fast = BTreeMap::from([("loss".to_owned(), f64::NAN), ("seconds_per_step".to_owned(), 0.25)]);
        assert_eq!(step_line(1, None, &fast).unwrap(), "step 1  loss NaN  4.00 it/s");
    }
}
