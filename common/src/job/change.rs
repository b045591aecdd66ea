//! Changes of single keys of a config, such as those of `aitk submit --sweep`.

use super::error::Finding;
use super::node::{Entry, Mark, Node, Value, shorten};
use super::scalar::resolve;
use super::schema::{ReadContext, join};
use super::yaml;

/// Keys at the top level of the document. A path that begins with another key is relative to the process.
const TOP_LEVEL_KEYS: [&str; 4] = ["job", "config", "meta", "cluster"];
/// The file name in findings about changes from the command line.
const COMMAND_LINE: &str = "command line";
/// The maximum number of steps of a key path; no key is deeper.
const MAX_PATH_STEPS: usize = 16;

/// A new value for a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The path of the key: `config.process[0].train.lr`, or `train.lr` of the only process.
    pub key: String,
    /// A YAML scalar, or a list or map in one line: `[a, b]`, `{key: value}`.
    pub value: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Key(String),
    Index(usize),
}

/// Applies the changes. Returns the full paths of the changed keys and of the conflicting keys that were removed.
///
/// # Errors
/// The first change whose path or value is invalid.
pub(super) fn apply_changes(root: &mut Node, changes: &[Change], file: Option<&str>) -> Result<Vec<String>, Finding> {
    let mut paths = Vec::with_capacity(changes.len());
    for change in changes {
        let to_finding = |message: String| Finding {
            file: file.map(|_| COMMAND_LINE.to_owned()),
            line: None,
            column: None,
            key: change.key.clone(),
            message,
        };
        let steps = parse_path(root, &change.key).map_err(to_finding)?;
        let value = parse_value(&change.value, root.mark).map_err(to_finding)?;
        let is_null = value.value == Value::Null;
        set_value(root, &steps, value).map_err(to_finding)?;
        paths.push(format_path(&steps));
        if let Some(other) = conflicting_key(&steps).filter(|_| !is_null)
            && remove_key(root, &other)
        {
            paths.push(format_path(&other));
        }
    }
    Ok(paths)
}

/// Returns the key that would win over the changed one, so that it can be removed: the change must take effect.
fn conflicting_key(steps: &[Step]) -> Option<Vec<Step>> {
    let (around, section, key) = match steps {
        [around @ .., Step::Key(section), Step::Index(_), Step::Key(key)] => (around, section, key),
        [around @ .., Step::Key(section), Step::Key(key)] => (around, section, key),
        _ => return None,
    };
    // Only the sections of a process, not keys of the same name in `meta`.
    if !matches!(around, [Step::Key(top), .., Step::Index(_)] if top == "config") {
        return None;
    }
    let beside = |other: &str| {
        let mut path = steps[..steps.len() - 1].to_vec();
        path.push(Step::Key(other.into()));
        Some(path)
    };
    match (section.as_str(), key.as_str()) {
        ("network", "linear") => beside("rank"),
        ("network", "alpha") => beside("linear_alpha"),
        ("datasets", "folder_path") => beside("dataset_path"),
        ("model", "dtype") => {
            let mut path = around.to_vec();
            path.push(Step::Key("dtype".into()));
            Some(path)
        }
        _ => None,
    }
}

/// Turns warnings about unknown keys into errors if a change set the key. In the file, unknown keys are only warnings.
pub(super) fn refuse_unknown_keys(paths: &[String], cx: &mut ReadContext) {
    let unknown: Vec<Finding> = cx
        .warnings
        .iter()
        .filter(|warning| {
            cx.unknown.contains(&warning.key) && paths.iter().any(|path| is_at_or_below(path, &warning.key))
        })
        .cloned()
        .collect();
    for mut finding in unknown {
        set_command_line(&mut finding);
        finding.message = finding
            .message
            .replace("; it is ignored", "; `aitk help config-keys` lists all");
        cx.errors.push(finding);
    }
}

/// Sets the position of findings about changed keys to the command line, because the file has another value there.
pub(super) fn move_to_command_line(findings: &mut [Finding], paths: &[String]) {
    for finding in findings {
        if is_changed(&finding.key, paths) {
            set_command_line(finding);
        }
    }
}

/// Sets the position of a finding to the command line, whether the job is from a file or not.
pub(super) fn on_command_line(finding: Finding) -> Finding {
    Finding {
        file: Some(COMMAND_LINE.to_owned()),
        line: None,
        column: None,
        ..finding
    }
}

fn set_command_line(finding: &mut Finding) {
    finding.file = finding.file.take().map(|_| COMMAND_LINE.to_owned());
    (finding.line, finding.column) = (None, None);
}

/// Whether the key was changed, or is below a changed key.
pub(super) fn is_changed(key: &str, paths: &[String]) -> bool {
    paths.iter().any(|path| is_at_or_below(key, path))
}

/// Whether the key was changed, is below a changed key, or contains one.
pub(super) fn overlaps_change(key: &str, paths: &[String]) -> bool {
    paths
        .iter()
        .any(|path| is_at_or_below(key, path) || is_at_or_below(path, key))
}

/// Whether the path is the key or is below it.
fn is_at_or_below(path: &str, key: &str) -> bool {
    path == key || path.strip_prefix(key).is_some_and(|rest| rest.starts_with(['.', '[']))
}

fn is_quoted(text: &str) -> bool {
    let text = text.trim();
    ['\'', '"']
        .iter()
        .any(|quote| text.len() > 1 && text.starts_with(*quote) && text.ends_with(*quote))
}

/// Parses a value: a YAML scalar, or a list or map in YAML's one-line notation.
fn parse_value(text: &str, mark: Mark) -> Result<Node, String> {
    let text = text.trim();
    // `[name]` is the placeholder for the job's name, not a list.
    if text.starts_with('{') || (text.starts_with('[') && !text.starts_with("[name]")) {
        let expected =
            "expected a list such as [a, b] or a map such as {key: value}; put a text that begins like one in quotes";
        return match yaml::parse(text, None) {
            Ok(node) => Ok(node),
            Err(finding) => Err(format!("{expected}: {}", finding.message)),
        };
    }
    if is_quoted(text) {
        let expected = "expected one text in quotes, as in YAML";
        return match yaml::parse(text, None) {
            Ok(node) if matches!(node.value, Value::Text(_)) => Ok(node),
            Ok(_) => Err(expected.to_owned()),
            Err(finding) => Err(format!("{expected}: {}", finding.message)),
        };
    }
    Ok(Node {
        mark,
        value: resolve(text),
        plain: Some(text.to_owned()),
    })
}

/// Parses a key path into steps from the top of the document.
fn parse_path(root: &Node, key: &str) -> Result<Vec<Step>, String> {
    let mut steps = Vec::new();
    for part in key.split('.') {
        let name = part.split('[').next().unwrap_or_default();
        if name.is_empty() {
            return Err("expected the path of a key, such as `train.lr` or `config.process[0].train.lr`".into());
        }
        steps.push(Step::Key(name.to_owned()));
        for index in part.split('[').skip(1) {
            let number = index.strip_suffix(']').and_then(|number| number.parse().ok());
            steps.push(Step::Index(number.ok_or_else(|| {
                format!(
                    "`[{}` is not a list index; expected `[0]`, `[1]` and so on",
                    shorten(index)
                )
            })?));
        }
    }
    if steps.len() > MAX_PATH_STEPS {
        return Err(format!(
            "the path has {} steps; expected at most {MAX_PATH_STEPS}",
            steps.len()
        ));
    }
    let first = match steps.first() {
        Some(Step::Key(first)) => first.clone(),
        _ => String::new(),
    };
    if TOP_LEVEL_KEYS.contains(&first.as_str()) {
        return Ok(steps);
    }
    let mut full_path = vec![Step::Key("config".into())];
    if first != "process" {
        let processes = root.get("config").and_then(|config| config.get("process"));
        let count = match processes.map(|node| &node.value) {
            Some(Value::List(items)) => items.len(),
            _ => 1,
        };
        if count > 1 {
            return Err(format!(
                "the job has {count} processes: write `config.process[0].{key}`, or another number"
            ));
        }
        full_path.extend([Step::Key("process".into()), Step::Index(0)]);
    }
    full_path.extend(steps);
    Ok(full_path)
}

fn format_path(steps: &[Step]) -> String {
    steps.iter().fold(String::new(), |path, step| match step {
        Step::Key(key) => join(&path, key),
        Step::Index(index) => format!("{path}[{index}]"),
    })
}

fn set_value(node: &mut Node, steps: &[Step], value: Node) -> Result<(), String> {
    let Some((step, rest)) = steps.split_first() else {
        *node = Node {
            mark: node.mark,
            ..value
        };
        return Ok(());
    };
    if node.value == Value::Null && matches!(step, Step::Key(_)) {
        (node.value, node.plain) = (Value::Map(Vec::new()), None);
    }
    let (mark, described) = (node.mark, node.describe());
    match (step, &mut node.value) {
        (Step::Key(key), Value::Map(entries)) => {
            let known = entries.iter().position(|entry| entry.key == *key);
            let at = known.unwrap_or(entries.len());
            if known.is_none() {
                let null = Node {
                    mark,
                    value: Value::Null,
                    plain: None,
                };
                entries.push(Entry {
                    key: key.clone(),
                    mark,
                    node: null,
                });
            }
            match entries.get_mut(at) {
                Some(entry) => set_value(&mut entry.node, rest, value),
                None => Ok(()),
            }
        }
        (Step::Index(index), Value::List(items)) => {
            let count = items.len();
            match items.get_mut(*index) {
                Some(item) => set_value(item, rest, value),
                None => Err(format!("there is no `[{index}]` in a list of {count}")),
            }
        }
        (Step::Key(key), Value::List(_)) if key.parse::<usize>().is_ok() => Err(format!(
            "an item of a list is named in brackets: `[{key}]`, not `.{key}`"
        )),
        (Step::Key(key), Value::List(_)) => Err(format!(
            "`{0}` is below an item of a list: name the item, such as `[0].{0}`",
            shorten(key)
        )),
        (Step::Key(key), _) => Err(format!("`{}` cannot be below {described}", shorten(key))),
        (Step::Index(index), _) => Err(format!("`[{index}]` needs a list, found {described}")),
    }
}

/// Removes the key with this full path, if it exists.
pub(super) fn remove(root: &mut Node, key: &str) {
    if let Ok(steps) = parse_path(root, key) {
        remove_key(root, &steps);
    }
}

/// Removes a key. Returns whether it existed.
fn remove_key(node: &mut Node, steps: &[Step]) -> bool {
    match (steps, &mut node.value) {
        ([Step::Key(key)], Value::Map(entries)) => {
            let before = entries.len();
            entries.retain(|entry| entry.key != *key);
            entries.len() < before
        }
        ([Step::Key(key), rest @ ..], Value::Map(entries)) => {
            let entry = entries.iter_mut().find(|entry| entry.key == *key);
            entry.is_some_and(|entry| remove_key(&mut entry.node, rest))
        }
        ([Step::Index(index), rest @ ..], Value::List(items)) => {
            items.get_mut(*index).is_some_and(|item| remove_key(item, rest))
        }
        _ => false,
    }
}

/// Appends a suffix to the job's name, unless it ends with it already.
pub(super) fn append_to_name(root: &mut Node, suffix: &str) {
    let Value::Map(entries) = &mut root.value else { return };
    let config = entries.iter_mut().find(|entry| entry.key == "config");
    let Some(Value::Map(entries)) = config.map(|config| &mut config.node.value) else {
        return;
    };
    let Some(name) = entries.iter_mut().find(|entry| entry.key == "name") else {
        return;
    };
    let text = match &name.node.value {
        Value::Text(text) => text.clone(),
        Value::Int(_) | Value::Float(_) => name.node.plain.clone().unwrap_or_default(),
        _ => return,
    };
    if !text.trim().is_empty() && !text.ends_with(suffix) {
        (name.node.value, name.node.plain) = (Value::Text(format!("{text}{suffix}")), None);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Format, JobError, LoadOptions, parse};
    use super::*;

    const TEXT: &str = "job: extension\nconfig:\n  name: cat\n  process:\n  - type: sd_trainer\n    training_folder: out/[name]\n    \
                        model: {name_or_path: m, arch: sd15}\n    network: {type: lora, linear: 4}\n    train: {lr: 1e-4, steps: 10}\n    \
                        datasets: [{folder_path: d}]\n";

    fn with(changes: &[(&str, &str)], suffix: &str) -> Result<serde_json::Value, String> {
        let changes: Vec<Change> = changes
            .iter()
            .map(|(key, value)| Change {
                key: (*key).into(),
                value: (*value).into(),
            })
            .collect();
        let options = LoadOptions {
            changes: &changes,
            suffix,
            ..LoadOptions::default()
        };
        match parse(TEXT, Format::Yaml, Some("cat.yaml"), &options) {
            Ok(loaded) => Ok(serde_json::to_value(&loaded.spec).unwrap()),
            Err(JobError::Invalid { findings }) => Err(findings[0].to_string()),
            Err(other) => Err(other.to_string()),
        }
    }

    #[test]
    fn a_key_path_may_begin_at_the_process_or_at_the_document() {
        let job = with(
            &[
                ("train.lr", "2e-3"),
                ("config.process[0].network.linear", "16"),
                ("process[0].train.steps", "7"),
                ("cluster.priority", "3"),
                ("sample.neg", "'1, 2'"),
                ("datasets[0].caption_ext", "txt"),
            ],
            "_a",
        )
        .unwrap();
        let train = &job["process"][0]["kind"]["train"];
        assert_eq!(
            (&train["train"]["lr"], &train["train"]["steps"]),
            (&2e-3.into(), &7.into())
        );
        assert_eq!(
            (&train["network"]["linear"], &job["cluster"]["priority"]),
            (&16.into(), &3.into())
        );
        assert_eq!(
            (&job["name"], &train["training_folder"]),
            (&"cat_a".into(), &"out/cat_a".into())
        );
        assert_eq!(train["sample"]["neg"], "1, 2");
    }

    #[test]
    fn quotes_are_those_of_yaml() {
        for (value, expected) in [("'it''s'", "it's"), (r#""a\tb""#, "a\tb"), ("'7'", "7"), ("''", "")] {
            let job = with(&[("sample.neg", value)], "").unwrap();
            assert_eq!(job["process"][0]["kind"]["train"]["sample"]["neg"], expected, "{value}");
        }
        for invalid in ["'a' and 'b'", "'a': 'b'"] {
            let error = with(&[("sample.neg", invalid)], "").unwrap_err();
            assert!(error.contains("expected one text in quotes"), "{error}");
        }
    }

    #[test]
    fn a_change_may_set_a_list_or_a_map() {
        let job = with(
            &[
                ("network.network_kwargs.ignore_if_contains", "[attn1, 'attn 2']"),
                ("datasets[0].resolution", "[64, 128]"),
                ("cluster.labels", "{zone: lab}"),
                ("meta.note", "'[a]'"),
                ("config.process[0].training_folder", "[name]/out"),
            ],
            "",
        )
        .unwrap();
        let train = &job["process"][0]["kind"]["train"];
        let ignored = &train["network"]["network_kwargs"]["ignore_if_contains"];
        assert_eq!(*ignored, serde_json::json!(["attn1", "attn 2"]));
        assert_eq!(job["cluster"]["labels"], serde_json::json!({"zone": "lab"}));
        assert_eq!(
            (&job["meta"]["note"], &train["training_folder"]),
            (&"[a]".into(), &"cat/out".into())
        );
        for invalid in ["[a", "{a: 1", "[a] b"] {
            let error = with(&[("sample.neg", invalid)], "").unwrap_err();
            assert!(
                error.starts_with("command line: ") && error.contains("expected a list"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_changed_key_wins_over_a_conflicting_key_of_the_file() {
        let ranked = TEXT.replace("linear: 4", "rank: 4");
        let generate = "job: generate\nconfig:\n  name: cat\n  process:\n  - type: to_folder\n    output_folder: out\n    \
                     dtype: bf16\n    model: {name_or_path: m}\n    generate: {prompts: [a]}\n";
        let read = |text: &str, key: &str, value: &str| {
            let changes = [Change {
                key: key.into(),
                value: value.into(),
            }];
            let options = LoadOptions {
                changes: &changes,
                ..LoadOptions::default()
            };
            let loaded = parse(text, Format::Yaml, Some("cat.yaml"), &options).unwrap();
            (serde_json::to_value(&loaded.spec).unwrap(), loaded.warnings)
        };
        let (job, warnings) = read(&ranked, "network.linear", "16");
        let network = &job["process"][0]["kind"]["train"]["network"];
        assert_eq!((&network["linear"], warnings), (&16.into(), Vec::new()));
        assert!(network["rank"].is_null());
        let (job, _) = read(generate, "model.dtype", "float32");
        let process = &job["process"][0]["kind"]["generate"];
        assert_eq!(process["dtype"], "float32");
        assert_eq!(process["model"]["dtype"], "float32");
        assert!(job["positions"]["config.process[0].dtype"].is_null());
        let scaled = TEXT.replace("linear: 4", "linear: 4, linear_alpha: 2");
        let (job, _) = read(&scaled, "network.alpha", "8");
        assert_eq!(job["process"][0]["kind"]["train"]["network"]["linear_alpha"], 8.0);
        let moved = TEXT.replace("folder_path: d", "dataset_path: d");
        let (job, _) = read(&moved, "datasets[0].folder_path", "other");
        let dataset = &job["process"][0]["kind"]["train"]["datasets"][0];
        assert_eq!(dataset["folder_path"], "other");
        assert!(dataset["dataset_path"].is_null());
        // A change to `null` keeps the conflicting key, and `meta` is not a section.
        let (job, _) = read(&ranked, "network.linear", "null");
        assert_eq!(job["process"][0]["kind"]["train"]["network"]["linear"], 4);
        let noted = format!("{TEXT}meta: {{network: {{rank: 4}}}}\n");
        let (job, _) = read(&noted, "meta.network.linear", "16");
        assert_eq!(job["meta"]["network"]["rank"], 4);
    }

    #[test]
    fn unknown_keys_in_changes_are_errors_with_a_suggestion() {
        let near = with(&[("train.stepz", "1")], "").unwrap_err();
        assert!(
            near.starts_with("command line: ")
                && near.contains("train.stepz")
                && near.contains("did you mean `steps`?"),
            "{near}"
        );
        for (key, value, expected) in [
            ("train.no_such_thing_here", "1", "has no key"),
            ("nowhere.at_all", "1", "has no key `nowhere`"),
            ("train.lr.deeper", "1", "cannot be below the number"),
            ("datasets.caption_ext", "txt", "such as `[0].caption_ext`"),
            ("datasets[3].caption_ext", "txt", "no `[3]` in a list of 1"),
            ("datasets[x].caption_ext", "txt", "is not a list index"),
            ("train..lr", "1", "expected the path of a key"),
            ("train.steps", "many", "train.steps: expected"),
        ] {
            let error = with(&[(key, value)], "").unwrap_err();
            assert!(error.contains(expected), "{key}: {error}");
            assert!(error.starts_with("command line: "), "{error}");
        }
    }
}
