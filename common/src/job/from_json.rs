//! Reads a submitted job (`job_json`) and repeats every check that reading its config makes.
//!
//! A client may send any JSON. The JSON is converted back to the config that it came from and read by the same reader; the
//! result must be the same job. So JSON can contain neither a value that the reader refuses nor one that it never produces.
//! Unknown keys are ignored, here and by the worker: no code reads them, and refusing them would exclude every client that is
//! newer than its coordinator.

use super::caption::CaptionProcess;
use super::change::{self, Change};
use super::derived;
use super::error::{Finding, JobError};
use super::extension::ExtensionProcess;
use super::extract::{ExtractProcess, RescaleLoraProcess};
use super::limits::MAX_DEPTH;
use super::lm_export::LmExportProcess;
use super::lm_generate::LmGenerateProcess;
use super::lm_trainer::LmTrainerProcess;
use super::node::{Entry, Mark, Node, Value, shorten};
use super::process::{GenerateProcess, Img2ImgProcess, ProcessKind, TrainerProcess};
use super::repository::{is_commit, is_repository};
use super::schema::{FieldValue, ReadContext, SectionInfo, join};
use super::spec::{ConfigSection, JobSpec};
use serde::Deserialize;
use serde_json::Value as Json;
use std::collections::HashMap;
use std::sync::LazyLock;

/// Values of a job: numbers, texts, lists, maps. A job with the maximum number of prompts, with their positions, has 180,000.
const MAX_VALUES: usize = 250_000;
/// Keys of one section; the largest section knows 120.
const MAX_SECTION_KEYS: usize = 1_000;
/// Bytes of the name of the job's config file, which appears in messages.
const MAX_FILE_NAME: usize = 4_096;
/// A process is two levels deeper in a job's JSON than in its config.
const MAX_JSON_DEPTH: usize = MAX_DEPTH + 2;

impl JobSpec {
    /// Parses JSON text and calls [`JobSpec::from_value`].
    ///
    /// # Errors
    /// Invalid JSON, and the errors of [`JobSpec::from_value`].
    pub fn from_json(text: &str) -> Result<Self, JobError> {
        let json = serde_json::from_str(text).map_err(|error| job_error(error.to_string()))?;
        Self::from_value(&json)
    }

    /// Reads a job from JSON with the same checks as for its config.
    ///
    /// # Errors
    /// [`JobError::Invalid`] with every error.
    pub fn from_value(json: &Json) -> Result<Self, JobError> {
        check_limits(json).map_err(job_error)?;
        let spec = Self::deserialize(json);
        let mut cx = ReadContext::new(None);
        let read = Self::read(&to_config(json, spec.as_ref().ok()), None, &mut cx);
        let spec = match spec {
            Ok(spec) => spec,
            Err(error) if cx.errors.is_empty() => return Err(job_error(error.to_string())),
            // The reader's errors name the key; serde's does not.
            Err(_) => {
                return Err(JobError::Invalid {
                    findings: cx.errors.into_iter().map(without_position).collect(),
                });
            }
        };
        if spec
            .file
            .as_deref()
            .is_some_and(|file| file.len() > MAX_FILE_NAME || file.contains(char::is_control))
        {
            return Err(job_error(
                "`file` is not a printable file name of at most 4096 bytes".into(),
            ));
        }
        let mut findings: Vec<Finding> = cx
            .errors
            .into_iter()
            .map(|found| spec.finding(found.key, found.message))
            .collect();
        if findings.is_empty() {
            findings.extend(match read {
                Some(read) => spec.find_difference(read),
                None => Some(spec.finding(String::new(), "the job could not be understood".into())),
            });
        }
        findings.extend(spec.check_part());
        findings.extend(spec.check_revisions());
        if findings.is_empty() {
            Ok(spec)
        } else {
            Err(JobError::Invalid { findings })
        }
    }

    /// Returns the job with other values for some keys, written as in [`super::LoadOptions::changes`], and new warnings.
    /// Everything else stays, including the replaced `[name]` and `${VAR}`. `part` is removed, so the result is the whole job.
    ///
    /// # Errors
    /// [`JobError::Invalid`] with every error: at a changed key on the command line, at another key where the job's file has it, with the
    /// changed keys.
    pub fn with_changes(&self, changes: &[Change]) -> Result<(Self, Vec<Finding>), JobError> {
        let json = serde_json::to_value(self).map_err(|error| job_error(error.to_string()))?;
        let mut config = to_config(&json, Some(self));
        derived::remove_derived_keys(&mut config, self);
        let mut before = ReadContext::new(None);
        // The user saw these warnings when the job was submitted.
        let _ = Self::read(&config, None, &mut before);
        let changed = change::apply_changes(&mut config, changes, None).map_err(|found| JobError::Invalid {
            findings: vec![change::on_command_line(found)],
        })?;
        let mut cx = ReadContext::new(None);
        let read = Self::read(&config, None, &mut cx);
        let errors = std::mem::take(&mut cx.errors).into_iter();
        let mut findings: Vec<Finding> = errors
            .map(|error| self.locate_error(error, changes, &changed))
            .collect();
        change::refuse_unknown_keys(&changed, &mut cx);
        findings.extend(cx.errors.into_iter().map(change::on_command_line));
        // A change may have no effect because of another key; the warning is then at that other key.
        let is_new =
            |warning: &Finding| !before.warnings.contains(warning) || change::overlaps_change(&warning.key, &changed);
        let warnings = cx.warnings.into_iter().filter(is_new).map(without_position).collect();
        let Some(read) = read.filter(|_| findings.is_empty()) else {
            return Err(match findings.is_empty() {
                true => job_error(format!("the job could not be understood{}", changed_keys(changes))),
                false => JobError::Invalid { findings },
            });
        };
        let mut spec = Self {
            file: self.file.clone(),
            positions: self.positions.clone(),
            part: None,
            revisions: self.revisions.clone(),
            ..read
        };
        if self.config.name.is_none() {
            spec.config.name = None;
        }
        // Changed values have no position in the file.
        spec.positions.retain(|key, _| !change::is_changed(key, &changed));
        Ok((spec, warnings))
    }

    /// Adds the position to an error of the changed job: the command line, or that of a key which the changes made wrong.
    fn locate_error(&self, error: Finding, changes: &[Change], changed: &[String]) -> Finding {
        if change::is_changed(&error.key, changed) {
            return change::on_command_line(error);
        }
        let message = format!("{}{}", error.message, changed_keys(changes));
        self.finding(error.key, message)
    }

    /// Checks `part`: only jobs of one `to_folder` process have parts, and the range must not be empty.
    fn check_part(&self) -> Option<Finding> {
        let part = self.part?;
        let is_generate_job =
            matches!(self.process.as_slice(), [only] if matches!(only.kind, ProcessKind::Generate(_)));
        (!is_generate_job || part.from >= part.to).then(|| {
            let message = "a part needs a job of one `to_folder` process, and `from` below `to`";
            self.finding("part".into(), message.into())
        })
    }

    /// Checks that each revision maps a repository to a commit id, because both become parts of a URL and of a path.
    fn check_revisions(&self) -> Option<Finding> {
        let is_invalid = |(repository, commit): &(&String, &String)| !is_repository(repository) || !is_commit(commit);
        let (repository, _) = self.revisions.iter().find(is_invalid)?;
        let message = format!(
            "`{}`: expected a repository, ORG/NAME, and the id of a commit",
            shorten(repository)
        );
        Some(self.finding("revisions".into(), message))
    }

    /// Returns an error at the first value that differs from the job read from its own config.
    fn find_difference(&self, mut read: Self) -> Option<Finding> {
        if self.config.name.is_none() {
            read.config.name = None;
        }
        let read = Self {
            file: self.file.clone(),
            positions: self.positions.clone(),
            part: self.part,
            revisions: self.revisions.clone(),
            ..read
        };
        if read == *self {
            return None;
        }
        let jsons = [self, &read].map(|job| {
            let mut json = serde_json::to_value(job).unwrap_or_default();
            if let Some(map) = json.as_object_mut() {
                map.remove("positions");
            }
            json
        });
        let key = first_difference(&jsons[0], &jsons[1], "").unwrap_or_default();
        let message = "has a value that no config can produce; submit the config again".to_owned();
        Some(self.finding(config_key(&key), message))
    }
}

/// Creates an error about the whole job.
fn job_error(message: String) -> JobError {
    JobError::Invalid {
        findings: vec![Finding {
            message,
            ..Finding::default()
        }],
    }
}

/// The end of a message about a job with these changes.
fn changed_keys(changes: &[Change]) -> String {
    if changes.is_empty() {
        return String::new();
    }
    let keys: Vec<&str> = changes.iter().map(|change| change.key.as_str()).collect();
    format!("; changed on the command line: {}", keys.join(", "))
}

/// Removes line and column: the reconstructed config has no text.
fn without_position(finding: Finding) -> Finding {
    Finding {
        line: None,
        column: None,
        ..finding
    }
}

fn check_limits(json: &Json) -> Result<(), String> {
    let mut left = MAX_VALUES;
    let mut open = vec![(json, 0_usize)];
    while let Some((value, depth)) = open.pop() {
        if depth > MAX_JSON_DEPTH {
            return Err(super::limits::too_deep());
        }
        let inside: Vec<&Json> = match value {
            Json::Array(items) => items.iter().collect(),
            Json::Object(map) => map.values().collect(),
            _ => continue,
        };
        let Some(rest) = left.checked_sub(inside.len()) else {
            return Err(format!(
                "the job has more than {MAX_VALUES} values; long lists of prompts can go into a file or into several jobs"
            ));
        };
        left = rest;
        open.extend(inside.into_iter().map(|value| (value, depth + 1)));
    }
    Ok(())
}

/// The keys of a section that are sections themselves.
#[derive(Default)]
struct SectionTree(HashMap<&'static str, SectionTree>);

impl SectionTree {
    fn of(section: Option<SectionInfo>) -> Self {
        let fields = section.map(|section| section.fields).unwrap_or_default();
        let nested = fields
            .into_iter()
            .filter_map(|field| Some((field.key, Self::of(Some(field.nested?)))));
        Self(nested.collect())
    }
}

/// The sections of a job: `config`, `cluster`, and each process kind by its JSON name.
static SECTION_TREES: LazyLock<HashMap<&'static str, SectionTree>> = LazyLock::new(|| {
    HashMap::from([
        ("config", SectionTree::of(ConfigSection::section())),
        ("cluster", SectionTree::default()),
        ("train", SectionTree::of(TrainerProcess::section())),
        ("lm_train", SectionTree::of(LmTrainerProcess::section())),
        ("generate", SectionTree::of(GenerateProcess::section())),
        ("img2_img", SectionTree::of(Img2ImgProcess::section())),
        ("lm_generate", SectionTree::of(LmGenerateProcess::section())),
        ("lm_export", SectionTree::of(LmExportProcess::section())),
        ("caption", SectionTree::of(CaptionProcess::section())),
        ("extract", SectionTree::of(ExtractProcess::section())),
        ("rescale_lora", SectionTree::of(RescaleLoraProcess::section())),
        ("extension", SectionTree::of(ExtensionProcess::section())),
    ])
});

/// Converts a job's JSON to a config document.
fn to_config(json: &Json, spec: Option<&JobSpec>) -> Node {
    let mut document = Vec::new();
    if let Some(job) = json.get("job") {
        document.push(entry("job", json_to_node(job, None)));
    }
    let mut config = match json
        .get("config")
        .map(|config| json_to_node(config, SECTION_TREES.get("config")))
    {
        Some(Node {
            value: Value::Map(entries),
            ..
        }) => entries,
        _ => Vec::new(),
    };
    config.retain(|entry| !matches!(entry.key.as_str(), "name" | "process"));
    if let Some(name) = json.get("name") {
        config.push(entry("name", json_to_node(name, None)));
    }
    if let Some(list) = json.get("process") {
        let processes = match list.as_array() {
            Some(list) => plain_node(Value::List(list.iter().map(process_node).collect())),
            None => json_to_node(list, None),
        };
        config.push(entry("process", processes));
    }
    document.push(entry("config", plain_node(Value::Map(config))));
    if let Some(meta) = json.get("meta") {
        document.push(entry("meta", json_to_node(meta, None)));
    }
    if let Some(constraints) = json.get("cluster") {
        document.push(entry("cluster", cluster_node(constraints, spec)));
    }
    plain_node(Value::Map(document))
}

/// Converts `{"type": …, "kind": {"train": {…}}}` to a process of a config.
fn process_node(json: &Json) -> Node {
    let kind = json.get("kind").and_then(Json::as_object);
    let body = match kind.and_then(|kinds| kinds.iter().next()) {
        Some((kind, body)) if kind == "rare" => json_to_node(body.get("keys").unwrap_or(&Json::Null), None),
        Some((kind, body)) => json_to_node(body, SECTION_TREES.get(kind.as_str())),
        None => plain_node(Value::Null),
    };
    let Value::Map(mut entries) = body.value else {
        return body;
    };
    entries.retain(|entry| entry.key != "type");
    let own_type = kind.and_then(|kinds| kinds.get("extension")?.get("type"));
    if let Some(of_type) = own_type.or_else(|| json.get("type")) {
        entries.push(entry("type", json_to_node(of_type, None)));
    }
    plain_node(Value::Map(entries))
}

/// Converts `cluster`: a config has times and sizes as text, the job's JSON as numbers.
fn cluster_node(json: &Json, spec: Option<&JobSpec>) -> Node {
    let mut read = json_to_node(json, SECTION_TREES.get("cluster"));
    let (Value::Map(entries), Some(spec)) = (&mut read.value, spec) else {
        return read;
    };
    let cluster = &spec.cluster;
    for entry in entries {
        let value = match entry.key.as_str() {
            "not_before" => cluster.not_before.map(|time| Value::Text(time.show())),
            "split" => cluster.split.map(|split| match split {
                super::cluster::Split::Auto => Value::Text("auto".into()),
                super::cluster::Split::Parts(parts) => Value::Int(parts.into()),
            }),
            _ => match format_time_span(&entry.node) {
                Some(text) => Some(Value::Text(text)),
                None => continue,
            },
        };
        entry.node.value = value.unwrap_or(Value::Null);
    }
    read
}

/// Formats `{"secs": 60, "nanos": 0}` as `60s`.
fn format_time_span(node: &Node) -> Option<String> {
    let integer = |key| match node.get(key).map(|node| &node.value) {
        Some(Value::Int(number)) => Some(*number),
        _ => None,
    };
    let (seconds, nanos) = (integer("secs")?, integer("nanos")?);
    (nanos == 0 && node.entries()?.len() == 2).then(|| format!("{seconds}s"))
}

fn entry(key: &str, node: Node) -> Entry {
    Entry {
        key: key.to_owned(),
        mark: Mark::default(),
        node,
    }
}

fn plain_node(value: Value) -> Node {
    Node {
        mark: Mark::default(),
        value,
        plain: None,
    }
}

/// Converts JSON to a node. In a section's JSON, rare keys are below `rare`; in a config they are beside the other keys.
fn json_to_node(json: &Json, section: Option<&SectionTree>) -> Node {
    plain_node(match json {
        Json::Null => Value::Null,
        Json::Bool(value) => Value::Bool(*value),
        Json::Number(number) => match number.as_i64() {
            Some(value) => Value::Int(value),
            None => Value::Float(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::Text(text.clone()),
        Json::Array(items) => Value::List(items.iter().map(|item| json_to_node(item, section)).collect()),
        Json::Object(map) => {
            let mut entries = Vec::with_capacity(map.len());
            for (key, value) in map {
                match value {
                    Json::Object(rare) if section.is_some() && key == "rare" => {
                        entries.extend(rare.iter().map(|(key, value)| entry(key, json_to_node(value, None))));
                    }
                    value => {
                        let nested = section.and_then(|section| section.0.get(key.as_str()));
                        entries.push(entry(key, json_to_node(value, nested)));
                    }
                }
            }
            if section.is_some() {
                // The reader searches all entries for each known key.
                entries.truncate(MAX_SECTION_KEYS);
            }
            Value::Map(entries)
        }
    })
}

/// Returns the path of the first value that differs.
fn first_difference(one: &Json, other: &Json, path: &str) -> Option<String> {
    if one == other {
        return None;
    }
    match (one, other) {
        (Json::Object(one), Json::Object(other)) => {
            let keys = one.keys().chain(other.keys().filter(|key| !one.contains_key(*key)));
            let mut inside = keys.filter_map(|key| {
                let (one, other) = (
                    one.get(key).unwrap_or(&Json::Null),
                    other.get(key).unwrap_or(&Json::Null),
                );
                first_difference(one, other, &join(path, &shorten(key)))
            });
            inside.next().or_else(|| Some(path.to_owned()))
        }
        (Json::Array(one), Json::Array(other)) if one.len() == other.len() => {
            let mut inside = one
                .iter()
                .zip(other)
                .enumerate()
                .filter_map(|(index, (one, other))| first_difference(one, other, &format!("{path}[{index}]")));
            inside.next()
        }
        _ => Some(path.to_owned()),
    }
}

/// Converts `process[0].kind.train.train.steps` to `config.process[0].train.steps`.
fn config_key(key: &str) -> String {
    let Some((process, rest)) = key.split_once("].kind.").filter(|_| key.starts_with("process[")) else {
        return match key.starts_with("process[") {
            true => format!("config.{key}"),
            false => key.to_owned(),
        };
    };
    let body = rest.split_once('.').map_or("", |(_, body)| body);
    join(&format!("config.{process}]"), body)
}

#[cfg(test)]
mod tests;
