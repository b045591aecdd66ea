//! The whole job, as the coordinator stores it and a worker runs it.

use super::cluster::ClusterConfig;
use super::declare::section;
use super::error::{Finding, Support};
use super::limits::{MAX_LABELS, MAX_PROCESSES};
use super::node::Node;
use super::process::{JobKind, Process, ProcessKind};
use super::schema::{FieldValue, Input, ReadContext, SupportReport};
use super::values::{FreeMap, TextSource};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

section! {
    /// The body of a job.
    pub struct ConfigSection("config") {
        /// Name of the job. It names the folder and the files, and replaces `[name]`.
        name: Option<String> = None, Works, shown "required";
        /// The processes that the job runs, in order. What an earlier process writes is read by another job, with `cluster.after`: the files that a job reads exist before it starts.
        process [required]: Vec<Process> = Vec::new(), Works;
        /// Device to use; ignored.
        device: Option<String> = None, Accepted("the scheduler assigns the device; `cluster.device` requests a kind");
        /// Default of the processes' `training_folder`.
        training_folder: Option<String> = None, Works;
        /// `job: extract`: folder of the files.
        output_folder: Option<String> = None, Works;
        /// The model is Stable Diffusion 2.x (`job: train`, `job: extract`).
        is_v2: bool = false, Accepted("the family is recognised by the model's files");
        /// Default of the processes' `log_dir`.
        log_dir: Option<String> = None, Works;
        /// No effect here: the seed is read per process.
        training_seed: Option<i64> = None, Ignored("it is read per process: move it into `process`");
        /// `job: extract`: model to subtract.
        base_model: Option<String> = None, Works, input Model;
        /// `job: extract`: fine-tuned model.
        extract_model: Option<String> = None, Works, input Model;
        /// `job: extract`: extract the U-Net, or the transformer.
        extract_unet: bool = true, Works;
        /// `job: extract`: extract the text encoders.
        extract_text_encoder: bool = true, Works;
        /// `job: extract`: number format of the file.
        dtype: super::dtype::DType = super::dtype::DType::F16, Works;
    }
}

section! {
    /// A whole config.
    pub struct Document("job") {
        /// Kind of job.
        job [required]: JobKind = JobKind::Extension, Works;
        /// Body of the job.
        config [required]: ConfigSection = ConfigSection::default(), Works;
        /// Copied into the metadata of every safetensors file that the job writes.
        meta: FreeMap = FreeMap::new(), Works;
        /// Where and when the job runs.
        cluster: ClusterConfig = ClusterConfig::default(), Works;
    }
}

/// A validated job with every default set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobSpec {
    /// Kind of job.
    pub job: JobKind,
    /// Its name.
    pub name: String,
    /// Copied into the metadata of every safetensors file that the job writes.
    pub meta: FreeMap,
    /// Its processes, in order. Never empty.
    pub process: Vec<Process>,
    /// Constraints on where and when it runs.
    pub cluster: ClusterConfig,
    /// The keys of `config` other than `name` and `process`. Defaults for processes are already copied into them.
    pub config: Box<ConfigSection>,
    /// The config file, for findings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Key path -> line and column in that file, for findings. Only keys with a value.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub positions: BTreeMap<String, (u32, u32)>,
    /// Only these images of the job: the coordinator splits a job into parts. Not a config key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<ImageRange>,
    /// Repository of a model -> the newest commit when the job was submitted, so that every attempt uses the same model. Not a
    /// config key.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub revisions: BTreeMap<String, String>,
}

/// A half-open range of image indices of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRange {
    /// The first index.
    pub from: u64,
    /// One past the last index.
    pub to: u64,
}

impl JobSpec {
    /// Reads a document in which variables are already replaced. `name_override` names the job when the config does not.
    ///
    /// Returns `None` on failure, with the errors in `cx.errors`.
    pub(crate) fn read(root: &Node, name_override: Option<&str>, cx: &mut ReadContext) -> Option<Self> {
        if root.entries().is_none() {
            cx.wrong_type(root, "a map with the keys `job` and `config`");
            return None;
        }
        let document = Document::read(root, cx)?;
        let Document {
            job,
            config: mut body,
            meta,
            cluster,
            ..
        } = document;
        if body.name.as_deref().is_none_or(|name| name.trim().is_empty()) {
            body.name = name_override.map(str::to_owned);
        }
        match body.name.as_deref() {
            None if root.get("config").is_some_and(|config| config.entries().is_some()) => {
                cx.missing_at("config.name", "`config` needs a `name`, or give one with `--name`");
            }
            Some(name) => {
                if let Err(why) = super::naming::check_name(name) {
                    cx.error_at("config.name", why);
                }
            }
            None => {}
        }
        let mut process = std::mem::take(&mut body.process);
        let named = root.get("config").and_then(|config| config.get("process"));
        if process.is_empty() && named.is_some_and(|node| node.value == super::node::Value::List(Vec::new())) {
            cx.error_at("config.process", "needs at least one process");
        }
        cx.check_item_count("config.process", process.len(), MAX_PROCESSES);
        cx.check_item_count("cluster.labels", cluster.labels.0.len(), MAX_LABELS);
        for (index, process) in process.iter_mut().enumerate().take(MAX_PROCESSES) {
            inherit_job_keys(process, index, job, &body, cx);
        }
        check_result_paths(&process, &body, cx);
        check_extension_is_alone(&process, cx);
        super::misplaced_keys::name_sections(&process, cx);
        if !cx.errors.is_empty() {
            return None;
        }
        let mut positions = std::mem::take(&mut cx.positions);
        // `positions` must list only keys with a value.
        positions.retain(|key, _| !cx.nulls.contains(key));
        Some(Self {
            job,
            name: body.name.clone().unwrap_or_default(),
            meta,
            process,
            cluster,
            config: Box::new(body),
            file: cx.file.clone(),
            positions,
            part: None,
            revisions: BTreeMap::new(),
        })
    }

    /// Returns every value that may be a path on this machine and is opened. Values without effect are left out.
    #[must_use]
    pub fn inputs(&self) -> Vec<Input> {
        let mut inputs = Vec::new();
        // `job: extract` has its models beside the processes; `process` there is empty.
        self.config.collect_inputs("config", &mut inputs);
        self.process.collect_inputs("config.process", &mut inputs);
        let unopened = self.unopened_keys();
        inputs.retain(|input| !unopened.contains(&input.key));
        self.add_prompt_inputs(&mut inputs);
        let mut unique: Vec<Input> = Vec::with_capacity(inputs.len());
        for input in inputs {
            if !unique.contains(&input) {
                unique.push(input);
            }
        }
        unique
    }

    /// The number of images the job generates, if its only process is a `to_folder`; `lines` counts the prompts in a file.
    #[must_use]
    pub fn image_count(&self, lines: impl Fn(&str) -> Option<usize>) -> Option<u64> {
        let [
            Process {
                kind: ProcessKind::Generate(process),
                ..
            },
        ] = self.process.as_slice()
        else {
            return None;
        };
        let prompts = match &process.generate.prompts {
            TextSource::List(list) => list.len(),
            TextSource::File(file) => lines(file)?,
        };
        Some(process.generate.image_count(prompts))
    }

    /// Returns the keys and values with which this release cannot run the job, and those that it ignores.
    #[must_use]
    pub fn unsupported(&self) -> Support {
        let mut report = SupportReport::default();
        self.job.check_support("job", &mut report);
        if report.errors.is_empty() {
            self.config.check_support("config", &mut report);
            self.process.check_support("config.process", &mut report);
            self.cluster.check_support("cluster", &mut report);
            self.check_flag_support(&mut report);
        }
        Support {
            errors: self.findings(report.errors),
            has_unsupported: report.has_unsupported,
            warnings: self.findings(report.warnings),
        }
    }

    fn findings(&self, found: Vec<(String, String)>) -> Vec<Finding> {
        let mut findings: Vec<Finding> = found
            .into_iter()
            .map(|(key, message)| self.finding(key, message))
            .collect();
        findings.sort_by_key(|finding| (finding.line.unwrap_or(u32::MAX), finding.column));
        findings
    }

    /// Creates a finding at a key, with the nearest known position.
    #[must_use]
    pub fn finding(&self, key: String, message: String) -> Finding {
        let mut position = None;
        let mut path = key.as_str();
        while position.is_none() && !path.is_empty() {
            position = self.positions.get(path).copied();
            path = super::schema::parent(path);
        }
        Finding {
            file: self.file.clone(),
            line: position.map(|(line, _)| line),
            column: position.map(|(_, column)| column),
            key,
            message,
        }
    }
}

/// Checks the keys of `config` that an extraction needs.
fn check_extract_keys(
    process: &super::extract::ExtractProcess,
    index: usize,
    body: &ConfigSection,
    cx: &mut ReadContext,
) {
    let is_set = |value: &Option<String>| value.as_deref().is_some_and(|value| !value.is_empty());
    if index == 0 {
        for (key, value, what) in [
            ("base_model", &body.base_model, "the model that was fine-tuned"),
            ("extract_model", &body.extract_model, "its fine-tune"),
        ] {
            if !is_set(value) {
                cx.missing_at(
                    &format!("config.{key}"),
                    format!("`job: extract` needs a `{key}`: {what}"),
                );
            }
        }
    }
    if process.output_path.is_none() && !is_set(&body.output_folder) && !cx.is_reported("config.output_folder") {
        let message = "an extraction needs `config.output_folder`, or an `output_path`";
        cx.missing_at(&format!("config.process[{index}].output_path"), message);
    }
}

/// Checks that no extraction overwrites the file of another one.
fn check_result_paths(process: &[Process], body: &ConfigSection, cx: &mut ReadContext) {
    let mut writers = BTreeMap::new();
    for (index, process) in process.iter().enumerate().take(MAX_PROCESSES) {
        let ProcessKind::Extract(process) = &process.kind else {
            continue;
        };
        let name = body.name.as_deref().unwrap_or_default();
        let path = process.result_path(name, body.output_folder.as_deref());
        if let Some(first) = writers.insert(path.clone(), index) {
            let key = if process.output_path.is_some() {
                "output_path"
            } else {
                "filename"
            };
            let message = format!(
                "process[{first}] writes {} too: give each process its own file",
                super::node::shorten(&path)
            );
            cx.error_at(&format!("config.process[{index}].{key}"), message);
        }
    }
}

/// Checks that an extension is the only process of its job: its attempt is confined by other rules.
fn check_extension_is_alone(process: &[Process], cx: &mut ReadContext) {
    let extension = process.iter().position(|process| process.extension().is_some());
    if let Some(index) = extension.filter(|_| process.len() > 1) {
        let message = "an extension must be the only process of its job: move the other processes into another job";
        cx.error_at(&format!("config.process[{index}].type"), message);
    }
}

fn inherit_job_keys(process: &mut Process, index: usize, job: JobKind, body: &ConfigSection, cx: &mut ReadContext) {
    let path = format!("config.process[{index}]");
    let kind = process.process_type;
    // Where the kind of job could not be read, that is the error.
    if kind.job() != job && !cx.is_reported("job") {
        cx.error_at(
            &format!("{path}.type"),
            format!(
                "`{kind}` is a process of `job: {}`, but this is `job: {job}`; change one of them",
                kind.job()
            ),
        );
    }
    let mut inherit_folder = |folder: &mut Option<String>, what: &str| {
        if folder.is_none() {
            folder.clone_from(&body.training_folder);
        }
        if folder.is_none() && !cx.is_reported("config.training_folder") {
            let message = format!("{what} needs a `training_folder`, such as `output`");
            cx.missing_at(&format!("{path}.training_folder"), message);
        }
    };
    match &mut process.kind {
        ProcessKind::Train(process) => {
            if process.log_dir.is_none() {
                process.log_dir.clone_from(&body.log_dir);
            }
            // As in ai-toolkit, an empty name is none.
            process.log_dir.take_if(|folder| folder.trim().is_empty());
            inherit_folder(&mut process.training_folder, "a training");
        }
        ProcessKind::LmTrain(process) => inherit_folder(&mut process.training_folder, "a training"),
        ProcessKind::Extension(process) => inherit_folder(&mut process.training_folder, "an extension"),
        ProcessKind::Extract(process) => {
            check_extract_keys(process, index, body, cx);
            process.dtype = process.dtype.or(Some(body.dtype));
            process.extract_unet = process.extract_unet.or(Some(body.extract_unet));
            process.extract_text_encoder = process.extract_text_encoder.or(Some(body.extract_text_encoder));
        }
        _ => {}
    }
    process.kind.check_prompts(&path, cx);
    let named = process.name().map(super::naming::check_name);
    if let Some(Err(why)) = named {
        cx.error_at(&format!("{path}.name"), why);
    }
}
