//! A report in words.

#[cfg(feature = "embedded")]
use super::report::ProcessReport;
use super::report::Report;
use crate::output::format::fold;
use crate::output::format::{gib, printable, size};
#[cfg(feature = "embedded")]
use aitk_engine::data::{DatasetReport, Files};

/// Columns of the names on the left.
const NAMES: usize = 10;
/// Sizes that are listed.
#[cfg(feature = "embedded")]
const BUCKETS: usize = 8;

impl Report {
    /// One line for each data set and training.
    #[must_use]
    pub fn summary(&self) -> Vec<String> {
        #[cfg(feature = "embedded")]
        {
            let sets = self.trainings.iter().flat_map(|training| &training.data.datasets);
            let mut lines: Vec<String> = sets.map(one_line).collect();
            lines.extend(
                self.trainings
                    .iter()
                    .filter(|training| training.data.problems.is_empty())
                    .map(passes),
            );
            lines
        }
        #[cfg(not(feature = "embedded"))]
        self.trainings
            .iter()
            .map(|training| format!("{} steps", training.steps))
            .collect()
    }

    /// What should be known about the data before it is trained. `short`: without what the training says itself.
    #[must_use]
    pub fn data_warnings(&self, short: bool) -> Vec<String> {
        #[cfg(feature = "embedded")]
        {
            let mut warnings = Vec::new();
            for set in self.trainings.iter().flat_map(|training| &training.data.datasets) {
                for warning in warnings_of(set, short) {
                    // The same files at several resolutions have the same to be said of them.
                    if !warnings.contains(&warning) {
                        warnings.push(warning);
                    }
                }
            }
            warnings
        }
        #[cfg(not(feature = "embedded"))]
        {
            let _ = short;
            Vec::new()
        }
    }

    /// The whole report for a terminal of this width, or for a pipe.
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
                + self.here.len()
                + usize::from(self.short_of_memory.is_some()),
        );
        let verdict = match (problems, warnings) {
            (0, 0) => "no problems".to_owned(),
            (0, warnings) => format!("no problems, {}", many(warnings as u64, "warning")),
            (problems, 0) => many(problems as u64, "problem"),
            (problems, warnings) => format!(
                "{}, {}",
                many(problems as u64, "problem"),
                many(warnings as u64, "warning")
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
            out.section("images", [many(images, "image")]);
        }
        let warning = |words: &String| format!("warning: {words}");
        out.section(
            "here",
            self.here.iter().map(|words| format!("warning for `aitk run`: {words}")),
        );
        out.section("memory", self.short_of_memory.iter().map(warning));
        let problem = |problem: &String| format!("problem: {problem}");
        out.section("files", self.missing.iter().map(problem));
        out.section("cluster", self.refused.iter().map(problem));
        if let Some(forecast) = &self.forecast {
            let devices = forecast.devices.iter().map(|device| {
                let mark = match (device.fits, device.ready) {
                    (_, true) => "+",
                    (true, false) => "~",
                    (false, false) => "-",
                };
                format!("{mark} {}", device.description)
            });
            out.section("fit", std::iter::once(forecast.summary.clone()).chain(devices));
        } else if !self.memory.is_empty() {
            let memory = self
                .memory
                .iter()
                .map(|(place, bytes)| format!("{} ({place})", gib(*bytes)));
            out.section(
                "memory",
                [format!("predicted: {}", memory.collect::<Vec<_>>().join(", "))],
            );
        }
        if !self.unchecked.is_empty() {
            out.section("unchecked", self.unchecked.iter().cloned());
        }
        out.lines
    }

    #[cfg(not(feature = "embedded"))]
    fn trainings(&self, out: &mut Sections) {
        for training in &self.trainings {
            out.section("training", [many(training.steps, "step")]);
            out.section("writes", [training.writes()]);
        }
    }

    #[cfg(feature = "embedded")]
    fn trainings(&self, out: &mut Sections) {
        for training in &self.trainings {
            for set in &training.data.datasets {
                out.section("data", dataset(set));
            }
            for problem in &training.data.problems {
                out.section("data", [format!("problem: {problem}")]);
            }
            out.section("training", [passes(training)]);
            out.section("writes", [training.writes()]);
        }
    }
}

impl super::ProcessReport {
    fn writes(&self) -> String {
        let output = &self.output;
        let mut parts = Vec::new();
        let each = output
            .save_bytes
            .map_or(String::new(), |bytes| format!(" of {}", size(bytes)));
        parts.push(match output.saves {
            0 => format!("a save{each} at the end"),
            saves if saves == output.saves_kept => format!("{}{each} and one at the end", many(saves, "save")),
            saves => format!(
                "{}{each}, of which {} stay, and one at the end",
                many(saves, "save"),
                output.saves_kept
            ),
        });
        if let Some(bytes) = output.state_bytes {
            parts.push(format!("states to go on from, {} each", size(bytes)));
        }
        parts.push(many(output.samples, "sample image"));
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
            let room = self.width.map(|width| width.saturating_sub(NAMES).max(20));
            let folded = room.map_or_else(|| vec![line.clone()], |room| fold(&line, room));
            for piece in folded {
                self.lines.push(format!("{name:<NAMES$}{piece}"));
                name = "";
            }
        }
    }
}

fn many(count: u64, what: &str) -> String {
    match count {
        1 => format!("1 {what}"),
        count => format!("{count} {what}s"),
    }
}

#[cfg(feature = "embedded")]
fn place(set: &DatasetReport) -> String {
    let kind = if set.regularisation { ", regularisation" } else { "" };
    format!("{} at {}{kind}", set.path, set.resolution)
}

#[cfg(feature = "embedded")]
fn one_line(set: &DatasetReport) -> String {
    format!(
        "{}: {}, {} with captions, {}, {} of {} a pass",
        place(set),
        many(set.images, "image"),
        set.captioned,
        many(set.buckets.len() as u64, "size"),
        match set.batches {
            1 => "1 batch".to_owned(),
            batches => format!("{batches} batches"),
        },
        set.batch_size
    )
}

#[cfg(feature = "embedded")]
fn passes(training: &ProcessReport) -> String {
    let steps = many(training.steps, "step");
    match (training.data.steps_per_epoch, training.data.epochs) {
        (Some(each), Some(epochs)) => format!(
            "{steps}, {} a pass over the data: {} {}",
            short(each),
            short(epochs),
            if short(epochs) == "1" { "pass" } else { "passes" }
        ),
        _ => steps,
    }
}

/// `14`, `1.5`.
#[cfg(feature = "embedded")]
fn short(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// What of the files of a data set ends its training.
#[cfg(feature = "embedded")]
pub(super) fn problem_of(set: &DatasetReport) -> Option<String> {
    let listed = listed(
        "end too early, and training stops at such a file; take them out, or copy them again",
        &set.cut_off,
    );
    (set.cut_off.count > 0).then(|| format!("{}: {listed}", set.path))
}

#[cfg(feature = "embedded")]
fn listed(what: &str, files: &Files) -> String {
    let more = if files.count > files.first.len() as u64 {
        ", …"
    } else {
        ""
    };
    format!("{} {what}: {}{more}", files.count, files.first.join(", "))
}

#[cfg(feature = "embedded")]
fn warnings_of(set: &DatasetReport, short: bool) -> Vec<String> {
    let mut warnings = Vec::new();
    let path = &set.path;
    if !short {
        warnings.extend(set.caption_warning.clone());
        if set.unreadable.count > 0 {
            warnings.push(format!(
                "{path}: {}",
                listed("cannot be read and are skipped", &set.unreadable)
            ));
        }
    }
    if set.too_small.count > 0 && set.too_small.count * 10 >= set.images {
        warnings.push(format!(
            "{path}: {} of {} images have fewer pixels than the resolution {} asks for: {}",
            set.too_small.count,
            set.images,
            set.resolution,
            set.too_small.first.join(", ")
        ));
    }
    let media = [
        ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".jxl", ".mp4", ".mov", ".webm", ".jfif",
    ];
    let images: Vec<String> = set
        .ignored
        .iter()
        .filter(|(ending, _)| media.contains(&ending.as_str()))
        .map(|(ending, count)| format!("{count} {ending}"))
        .collect();
    if !images.is_empty() {
        warnings.push(format!(
            "{path}: {} are not used: images are .jpg, .jpeg, .png or .webp",
            images.join(", ")
        ));
    }
    warnings
}

#[cfg(feature = "embedded")]
fn dataset(set: &DatasetReport) -> Vec<String> {
    let mut lines = vec![place(set)];
    let mut found = format!("{}, {} with captions", many(set.images, "image"), set.captioned);
    if let (Some(default), true) = (&set.default_caption, set.uncaptioned.count > 0) {
        found += &format!(", {} with the default caption `{default}`", set.uncaptioned.count);
    }
    if let Some(masks) = set.masks {
        found += &format!(", {masks} with masks");
    }
    lines.push(found);
    let own = |said: String| {
        let own = said.strip_prefix(&format!("{}: ", set.path)).map(str::to_owned);
        own.unwrap_or(said)
    };
    lines.extend(problem_of(set).map(|problem| format!("problem: {}", own(problem))));
    let warnings = warnings_of(set, false).into_iter();
    lines.extend(warnings.map(|warning| format!("warning: {}", own(warning))));
    if set.too_small.count > 0 && set.too_small.count * 10 < set.images {
        lines.push(listed("with fewer pixels than the resolution", &set.too_small));
    }
    let rest: Vec<String> = set
        .ignored
        .iter()
        .map(|(ending, count)| format!("{count} {ending}"))
        .collect();
    if !rest.is_empty() {
        lines.push(format!("not used: {}", rest.join(", ")));
    }
    if set.control_files > 0 {
        lines.push(format!("not used: {} in _controls", many(set.control_files, "file")));
    }
    let sizes = set
        .buckets
        .iter()
        .take(BUCKETS)
        .map(|bucket| format!("{}x{} {}", bucket.width, bucket.height, bucket.images));
    let more = match set.buckets.len().saturating_sub(BUCKETS) {
        0 => String::new(),
        more => format!(", and {more} more"),
    };
    lines.push(format!("sizes: {}{more}", sizes.collect::<Vec<_>>().join(", ")));
    let copies = if set.copies > 1 {
        format!(" x {} copies with flips", set.copies)
    } else {
        String::new()
    };
    let repeats = if set.repeats > 1 {
        format!(" x {} repeats", set.repeats)
    } else {
        String::new()
    };
    lines.push(format!(
        "{}{repeats}{copies}: {} a pass, in {} batches of {}",
        many(set.images, "image"),
        set.items,
        set.batches,
        set.batch_size
    ));
    lines
}
