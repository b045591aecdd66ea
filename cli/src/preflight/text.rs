//! Renders a report as text.

#[cfg(feature = "embedded")]
use super::dataset::{dataset_lines, dataset_summary, dataset_warnings};
use super::report::{ProcessReport, Report};
use crate::output::format::{fold, plural, printable, size};
use aitk_common::plan::profile::MemoryProfile;
use std::collections::BTreeMap;

const GIB: f64 = 1_073_741_824.0;

/// Width of the column with the section names.
const NAME_COLUMNS: usize = 10;

impl Report {
    /// Returns one line for each data set and training.
    #[must_use]
    pub fn summary(&self) -> Vec<String> {
        #[cfg(feature = "embedded")]
        {
            let sets = self.trainings.iter().flat_map(|training| &training.data.datasets);
            let mut lines: Vec<String> = sets.map(dataset_summary).collect();
            lines.extend(
                self.trainings
                    .iter()
                    .filter(|training| training.data.problems.is_empty())
                    .map(epochs_line),
            );
            lines
        }
        #[cfg(not(feature = "embedded"))]
        self.trainings
            .iter()
            .map(|training| format!("{} steps", training.steps))
            .collect()
    }

    /// Returns the warnings about the data. `brief` leaves out those that the training itself logs.
    #[must_use]
    pub fn data_warnings(&self, brief: bool) -> Vec<String> {
        #[cfg(feature = "embedded")]
        {
            let mut warnings = Vec::new();
            for set in self.trainings.iter().flat_map(|training| &training.data.datasets) {
                for warning in dataset_warnings(set, brief) {
                    // The same files at several resolutions give the same warnings.
                    if !warnings.contains(&warning) {
                        warnings.push(warning);
                    }
                }
            }
            warnings
        }
        #[cfg(not(feature = "embedded"))]
        {
            let _ = brief;
            Vec::new()
        }
    }

    /// Returns the lines of the whole report, folded to `width` columns; `None` (a pipe): not folded.
    #[must_use]
    pub fn text(&self, config: &str, width: Option<usize>) -> Vec<String> {
        let mut out = Sections {
            width,
            lines: Vec::new(),
        };
        let (problems, warnings) = (
            self.problems().len(),
            self.warnings.len()
                + self.data_warnings(false).len()
                + self.local_warnings.len()
                + usize::from(self.short_of_memory.is_some()),
        );
        let verdict = match (problems, warnings) {
            (0, 0) => "no problems".to_owned(),
            (0, warnings) => format!("no problems, {}", plural(warnings as u64, "warning")),
            (problems, 0) => plural(problems as u64, "problem"),
            (problems, warnings) => format!(
                "{}, {}",
                plural(problems as u64, "problem"),
                plural(warnings as u64, "warning")
            ),
        };
        out.lines
            .push(printable(&format!("{config} ({}): {verdict}", self.name)));
        if self.warnings.is_empty() {
            out.section("keys", ["every key is known and works".to_owned()]);
        } else {
            out.section(
                "keys",
                self.warnings.iter().map(|warning| format!("warning: {warning}")),
            );
        }
        for model in &self.models {
            let mut lines = vec![match &model.family {
                Some(family) => format!("{}: {family}", model.path),
                None => model.path.clone(),
            }];
            match (&model.problem, &model.evidence, &model.unchecked) {
                (Some(problem), ..) => lines.push(format!("problem: {problem}")),
                (None, Some(evidence), _) => lines.push(evidence.clone()),
                (None, None, Some(why)) => lines.push(format!("not checked: {why}")),
                _ => {}
            }
            if let Some(commit) = &model.commit {
                lines.push(format!("commit {commit} at the hub"));
            }
            out.section("model", lines);
        }
        self.trainings(&mut out);
        if let Some(images) = self.images {
            out.section("images", [plural(images, "image")]);
        }
        let warning = |text: &String| format!("warning: {text}");
        out.section(
            "here",
            self.local_warnings
                .iter()
                .map(|text| format!("warning for `aitk run`: {text}")),
        );
        out.section("memory", self.short_of_memory.iter().map(warning));
        let problem = |problem: &String| format!("problem: {problem}");
        out.section("files", self.missing.iter().map(problem));
        out.section("cluster", self.coordinator_refusal.iter().map(problem));
        if let Some(forecast) = &self.forecast {
            let devices = forecast.devices.iter().map(|device| {
                let mark = match (device.fits, device.can_start_now) {
                    (_, true) => "+",
                    (true, false) => "~",
                    (false, false) => "-",
                };
                format!("{mark} {}", device.description)
            });
            out.section("fit", std::iter::once(forecast.summary.clone()).chain(devices));
        } else if !self.memory.is_empty() {
            out.section("memory", memory_lines(&self.memory));
        }
        if !self.unchecked.is_empty() {
            out.section("unchecked", self.unchecked.iter().cloned());
        }
        out.lines
    }

    #[cfg(not(feature = "embedded"))]
    fn trainings(&self, out: &mut Sections) {
        for training in &self.trainings {
            out.section("training", [plural(training.steps, "step")]);
            out.section("writes", [training.output_line()]);
        }
    }

    #[cfg(feature = "embedded")]
    fn trainings(&self, out: &mut Sections) {
        for training in &self.trainings {
            for set in &training.data.datasets {
                out.section("data", dataset_lines(set));
            }
            for problem in &training.data.problems {
                out.section("data", [format!("problem: {problem}")]);
            }
            out.section("training", [epochs_line(training)]);
            out.section("writes", [training.output_line()]);
        }
    }
}

impl ProcessReport {
    fn output_line(&self) -> String {
        let output = &self.output;
        let mut parts = Vec::new();
        let each = output
            .save_bytes
            .map_or(String::new(), |bytes| format!(" of {}", size(bytes)));
        parts.push(match output.saves {
            0 => format!("one save{each} at the end"),
            saves if saves == output.saves_kept => format!("{}{each} and one at the end", plural(saves, "save")),
            saves => format!(
                "{}{each}, of which the newest {} are kept, and one at the end",
                plural(saves, "save"),
                output.saves_kept
            ),
        });
        if let Some(bytes) = output.state_bytes {
            parts.push(format!("states to resume from, {} each", size(bytes)));
        }
        parts.push(plural(output.samples, "sample image"));
        let disk = self.disk_bytes.map_or(String::new(), |bytes| {
            format!("; at most {} on the disk, without samples", size(bytes))
        });
        format!("{}{disk}", parts.join("; "))
    }
}

/// The lines of a report, with the name of each section on the left.
struct Sections {
    width: Option<usize>,
    lines: Vec<String>,
}

impl Sections {
    fn section(&mut self, name: &str, lines: impl IntoIterator<Item = String>) {
        let mut name = name;
        for line in lines {
            let line = printable(&line);
            let columns = self.width.map(|width| width.saturating_sub(NAME_COLUMNS).max(20));
            let folded = columns.map_or_else(|| vec![line.clone()], |columns| fold(&line, columns));
            for piece in folded {
                self.lines.push(format!("{name:<NAME_COLUMNS$}{piece}"));
                name = "";
            }
        }
    }
}

#[cfg(feature = "embedded")]
fn epochs_line(training: &ProcessReport) -> String {
    let steps = plural(training.steps, "step");
    match (training.data.steps_per_epoch, training.data.epochs) {
        (Some(each), Some(epochs)) => format!(
            "{steps}, {} per epoch: {} {}",
            short_number(each),
            short_number(epochs),
            if short_number(epochs) == "1" { "epoch" } else { "epochs" }
        ),
        _ => steps,
    }
}

/// `14`, `1.5`.
#[cfg(feature = "embedded")]
fn short_number(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// The predicted memory: what the columns are, and a line for each kind of device.
fn memory_lines(memory: &BTreeMap<String, u64>) -> Vec<String> {
    let kinds = [
        ("gpu", "NVIDIA GPU", false),
        ("metal", "Apple GPU", false),
        ("processor", "CPU", true),
    ];
    let of_kind = |(key, label, on_cpu): (&str, &str, bool)| {
        let profiles = MemoryProfile::on(on_cpu).map(MemoryProfile::name);
        let bytes = profiles.map(|profile| memory.get(&format!("{key}, {profile}")).copied().unwrap_or(0));
        let [all, balanced, poor, extreme] = bytes.map(|bytes| format!("{:.1}", bytes as f64 / GIB));
        row(label, [&all, &balanced, &poor, &extreme])
    };
    let columns = row("predicted: GiB", ["all", "balanced", "gpu_poor", "extreme"]);
    std::iter::once(columns).chain(kinds.into_iter().map(of_kind)).collect()
}

/// A line of the memory table.
fn row(label: &str, [all, balanced, poor, extreme]: [&str; 4]) -> String {
    format!("{label:<14}{all:>7}{balanced:>11}{poor:>11}{extreme:>10}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_of_the_memory_table_end_below_their_columns() {
        let profiles = MemoryProfile::on(false).map(MemoryProfile::name);
        let memory: BTreeMap<String, u64> = (profiles.iter().zip(1u64..))
            .map(|(profile, gib)| (format!("gpu, {profile}"), gib << 30))
            .collect();
        let lines = memory_lines(&memory);
        let ends = |line: &str, words: &[&str]| -> Vec<usize> {
            words.iter().map(|word| line.find(word).unwrap() + word.len()).collect()
        };
        assert_eq!(
            ends(&lines[0], &["all", "balanced", "gpu_poor", "extreme"]),
            ends(&lines[1], &["1.0", "2.0", "3.0", "4.0"]),
            "{lines:?}"
        );
    }
}
