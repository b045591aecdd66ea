//! Finds, reads and parses a config file into a [`LoadedJob`].

use super::change::{self, Change};
use super::error::{Finding, JobError};
use super::limits::{MAX_BYTES, finding};
use super::node::{Mark, Node, Value};
use super::schema::ReadContext;
use super::spec::JobSpec;
use super::{Format, json, template, universal, yaml};
use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// Options for loading a config.
#[derive(Clone, Copy)]
pub struct LoadOptions<'a> {
    /// `--name`: replaces `[name]` in place of `config.name`.
    pub name_override: Option<&'a str>,
    /// Looks up `${VAR}`.
    pub env: template::EnvLookup<'a>,
    /// The folder that contains `config/`. Unset: the current folder.
    pub search_dir: Option<&'a Path>,
    /// Changes of single keys, applied after parsing.
    pub changes: &'a [Change],
    /// Appended to the job's name, and to what replaces `[name]`.
    pub suffix: &'a str,
}

impl Default for LoadOptions<'_> {
    /// No name override, no variables, the current folder.
    fn default() -> Self {
        Self {
            name_override: None,
            env: &|_| None,
            search_dir: None,
            changes: &[],
            suffix: "",
        }
    }
}

/// A config that was read and validated.
#[derive(Clone, Debug)]
pub struct LoadedJob {
    /// The job.
    pub spec: JobSpec,
    /// The text as its user wrote it, variables unexpanded.
    pub text: String,
    /// Its file format.
    pub format: Format,
    /// The path of the file.
    pub path: Option<PathBuf>,
    /// Warnings, such as unknown keys and ignored nulls.
    pub warnings: Vec<Finding>,
}

/// Finds, reads and validates a config. `name` is a path, or the name of a file in `config/` with or
/// without its extension.
///
/// # Errors
/// There is no such file, it cannot be read, or it is not a valid config.
pub fn load(name: &str, options: &LoadOptions<'_>) -> Result<LoadedJob, JobError> {
    let path = find(name, options.search_dir)?;
    let shown = path.display().to_string();
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or("");
    let format = Format::from_name(extension).ok_or_else(|| JobError::UnknownFormat { path: shown.clone() })?;
    let text = read(&path, &shown)?;
    let mut job = parse(&text, format, Some(&shown), options)?;
    job.path = Some(path);
    Ok(job)
}

/// Parses and validates the text of a config. `file` is its name for messages.
///
/// # Errors
/// [`JobError::Invalid`] with every error.
pub fn parse(text: &str, format: Format, file: Option<&str>, options: &LoadOptions<'_>) -> Result<LoadedJob, JobError> {
    let invalid = |finding: Finding| JobError::Invalid {
        findings: vec![finding],
    };
    if text.len() as u64 > MAX_BYTES {
        return Err(invalid(too_large_file(file)));
    }
    let body = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut root = match format {
        Format::Yaml => parse_yaml(body, file),
        Format::Json => json::parse(body, false, file),
        Format::Jsonc => json::parse(body, true, file),
    }
    .map_err(invalid)?;
    let mut notes = Vec::new();
    if universal::is_universal(&root) {
        (root, notes) = universal::convert(&root, file).map_err(|findings| JobError::Invalid { findings })?;
    }
    let changed = change::apply_changes(&mut root, options.changes, file).map_err(invalid)?;
    let secrets = template::expand_variables(&mut root, options.env, file).map_err(invalid)?;
    if let Some(name) = options
        .name_override
        .map(str::to_owned)
        .or_else(|| name_in_config(&root))
    {
        let name = format!("{name}{}", options.suffix);
        template::replace_name(&mut root, &name, file).map_err(invalid)?;
    }
    change::append_to_name(&mut root, options.suffix);
    let suffixed_name = options.name_override.map(|name| format!("{name}{}", options.suffix));
    let mut cx = ReadContext::new(file.map(str::to_owned));
    cx.warnings = secrets;
    cx.warnings.append(&mut notes);
    let spec = JobSpec::read(&root, suffixed_name.as_deref(), &mut cx);
    change::refuse_unknown_keys(&changed, &mut cx);
    change::move_to_command_line(&mut cx.warnings, &changed);
    change::move_to_command_line(&mut cx.errors, &changed);
    let mut findings = cx.errors;
    match spec {
        Some(mut spec) if findings.is_empty() => {
            // Changed values have no position in the file.
            spec.positions.retain(|key, _| !change::is_changed(key, &changed));
            Ok(LoadedJob {
                spec,
                text: text.to_owned(),
                format,
                path: None,
                warnings: cx.warnings,
            })
        }
        _ => {
            findings.sort_by_key(|finding| (finding.line, finding.column));
            if findings.is_empty() {
                findings.push(finding(file, root.mark, "", "the config could not be understood"));
            }
            Err(JobError::Invalid { findings })
        }
    }
}

/// Parses YAML that is no config, such as the header of a README.md.
///
/// # Errors
/// What is wrong, with its line.
pub fn yaml_to_json(text: &str) -> Result<serde_json::Value, String> {
    let node = yaml::parse(text, None).map_err(|finding| match finding.line {
        Some(line) => format!("line {line}: {}", finding.message),
        None => finding.message,
    })?;
    node.to_json().ok_or_else(|| "a number is no finite one".to_owned())
}

/// Parses YAML in which `${VAR}` may be anywhere.
fn parse_yaml(body: &str, file: Option<&str>) -> Result<Node, Finding> {
    let mut parsed = yaml::parse(&template::hide_variables(body), file);
    match &mut parsed {
        Ok(root) => template::restore_variables(root),
        Err(finding) => {
            template::restore_variables_in_text(&mut finding.message);
            template::restore_variables_in_text(&mut finding.key);
        }
    }
    parsed
}

fn name_in_config(root: &Node) -> Option<String> {
    let node = root.get("config")?.get("name")?;
    match &node.value {
        Value::Text(name) => Some(name.clone()),
        Value::Int(_) | Value::Float(_) => node.plain.clone(),
        _ => None,
    }
}

fn too_large_file(file: Option<&str>) -> Finding {
    let message = format!(
        "the config is larger than {} MiB; this is probably another file",
        MAX_BYTES >> 20
    );
    Finding {
        file: file.map(str::to_owned),
        message,
        ..Finding::default()
    }
}

fn read(path: &Path, shown: &str) -> Result<String, JobError> {
    let failed = |source| JobError::Read {
        path: shown.to_owned(),
        source,
    };
    let (file, _) = crate::fsutil::regular::open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(JobError::Invalid {
            findings: vec![too_large_file(Some(shown))],
        });
    }
    String::from_utf8(bytes).map_err(|error| {
        let good = error.utf8_error().valid_up_to();
        let before = String::from_utf8_lossy(error.as_bytes().get(..good).unwrap_or_default()).into_owned();
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().map_or(0, |last| last.chars().count()) + 1;
        let mark = Mark {
            line: u32::try_from(line).unwrap_or(u32::MAX),
            column: u32::try_from(column).unwrap_or(u32::MAX),
        };
        JobError::Invalid {
            findings: vec![finding(
                Some(shown),
                mark,
                "",
                "this is not UTF-8 text; save the file as UTF-8",
            )],
        }
    })
}

/// File extensions, in the order they are tried.
const EXTENSIONS: [&str; 4] = ["yaml", "yml", "json", "jsonc"];

/// Finds a config. A name without extension is searched in `config/` first; anything else is tried as a path first.
///
/// # Errors
/// [`JobError::NotFound`] with every path that was tried.
pub fn find(name: &str, search_dir: Option<&Path>) -> Result<PathBuf, JobError> {
    let root = search_dir.unwrap_or_else(|| Path::new(""));
    let folder = root.join("config");
    let path = Path::new(name);
    let has_extension = path
        .extension()
        .and_then(|extension| extension.to_str())
        .is_some_and(|text| Format::from_name(text).is_some());
    let mut candidates = Vec::new();
    if !has_extension && !name.is_empty() {
        candidates.extend(
            EXTENSIONS
                .iter()
                .map(|extension| folder.join(format!("{name}.{extension}"))),
        );
    }
    candidates.push(root.join(path));
    candidates.push(folder.join(path));
    if !has_extension && !name.is_empty() {
        candidates.extend(
            EXTENSIONS
                .iter()
                .map(|extension| root.join(format!("{name}.{extension}"))),
        );
    }
    let mut searched: Vec<String> = Vec::new();
    for candidate in candidates {
        if candidate.is_file() {
            return Ok(candidate);
        }
        let shown = candidate.display().to_string();
        if !searched.contains(&shown) {
            searched.push(shown);
        }
    }
    Err(JobError::NotFound {
        name: name.to_owned(),
        searched,
    })
}

/// Reads the variables of `.env` in a folder; empty if there is no such file.
///
/// # Errors
/// The file exists and cannot be read or parsed.
pub fn dotenv(folder: &Path) -> Result<BTreeMap<String, String>, JobError> {
    let path = folder.join(".env");
    if !path.is_file() {
        return Ok(BTreeMap::new());
    }
    let shown = path.display().to_string();
    let failed = |error: dotenvy::Error| match error {
        dotenvy::Error::Io(source) => JobError::Read {
            path: shown.clone(),
            source,
        },
        other => JobError::Invalid {
            findings: vec![Finding {
                file: Some(shown.clone()),
                message: format!("expected `NAME=value` lines: {other}"),
                ..Finding::default()
            }],
        },
    };
    dotenvy::from_path_iter(&path)
        .map_err(&failed)?
        .map(|pair| pair.map_err(&failed))
        .collect()
}

/// Returns a function that looks up a variable in the process environment, then in `dotenv`.
pub fn env_with(dotenv: BTreeMap<String, String>) -> impl Fn(&str) -> Option<String> {
    move |name| std::env::var(name).ok().or_else(|| dotenv.get(name).cloned())
}
