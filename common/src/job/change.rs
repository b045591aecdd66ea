//! Keys that are given another value than the file has: `aitk submit --sweep`.

use super::error::Finding;
use super::limits::finding;
use super::node::{Entry, Mark, Node, Value, shorten};
use super::scalar::resolve;
use super::schema::{Cx, join};

/// Keys of the document itself; whatever else a path begins with lies in its process.
const TOP: [&str; 4] = ["job", "config", "meta", "cluster"];
/// Deeper paths lead to nothing.
const STEPS_MOST: usize = 16;

/// Another value for a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Its path: `config.process[0].train.lr`, or `train.lr` of the only process.
    pub key: String,
    /// A YAML scalar.
    pub value: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Key(String),
    Index(usize),
}

/// Makes the changes. Returns the whole path of each key.
///
/// # Errors
/// The first path that leads nowhere.
pub(super) fn apply(root: &mut Node, changes: &[Change], file: Option<&str>) -> Result<Vec<String>, Finding> {
    let mut paths = Vec::with_capacity(changes.len());
    for change in changes {
        let wrong = |mark: Mark, message: String| finding(file, mark, &change.key, message);
        let steps = steps(root, &change.key).map_err(|message| wrong(root.mark, message))?;
        let value = Node {
            mark: root.mark,
            value: value(&change.value),
            plain: (!is_quoted(&change.value)).then(|| change.value.trim().to_owned()),
        };
        set(root, &steps, value).map_err(|(mark, message)| wrong(mark, message))?;
        paths.push(shown(&steps));
    }
    Ok(paths)
}

/// Keys of changes that no section has are errors: elsewhere in a config they are ignored with a warning.
pub(super) fn refuse_unknown(paths: &[String], cx: &mut Cx) {
    let below =
        |path: &str, key: &str| path == key || path.strip_prefix(key).is_some_and(|rest| rest.starts_with(['.', '[']));
    let unknown: Vec<Finding> = cx
        .warnings
        .iter()
        .filter(|warning| cx.unknown.contains(&warning.key) && paths.iter().any(|path| below(path, &warning.key)))
        .cloned()
        .collect();
    for mut finding in unknown {
        finding.message = finding
            .message
            .replace("; it is ignored", "; `aitk help config-keys` lists all");
        cx.errors.push(finding);
    }
}

fn is_quoted(text: &str) -> bool {
    let text = text.trim();
    ['\'', '"']
        .iter()
        .any(|quote| text.len() > 1 && text.starts_with(*quote) && text.ends_with(*quote))
}

fn value(text: &str) -> Value {
    let text = text.trim();
    match text.get(1..text.len().saturating_sub(1)) {
        Some(inner) if is_quoted(text) => Value::Text(inner.to_owned()),
        _ => resolve(text),
    }
}

/// The steps from the top of the document.
fn steps(root: &Node, key: &str) -> Result<Vec<Step>, String> {
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
                    "`[{}` is no place in a list; expected `[0]`, `[1]` and so on",
                    shorten(index)
                )
            })?));
        }
    }
    if steps.len() > STEPS_MOST {
        return Err(format!("a path of {} steps leads nowhere", steps.len()));
    }
    let first = match steps.first() {
        Some(Step::Key(first)) => first.clone(),
        _ => String::new(),
    };
    if TOP.contains(&first.as_str()) {
        return Ok(steps);
    }
    let mut whole = vec![Step::Key("config".into())];
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
        whole.extend([Step::Key("process".into()), Step::Index(0)]);
    }
    whole.extend(steps);
    Ok(whole)
}

fn shown(steps: &[Step]) -> String {
    steps.iter().fold(String::new(), |path, step| match step {
        Step::Key(key) => join(&path, key),
        Step::Index(index) => format!("{path}[{index}]"),
    })
}

fn set(node: &mut Node, steps: &[Step], value: Node) -> Result<(), (Mark, String)> {
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
                Some(entry) => set(&mut entry.node, rest, value),
                None => Ok(()),
            }
        }
        (Step::Index(index), Value::List(items)) => {
            let count = items.len();
            match items.get_mut(*index) {
                Some(item) => set(item, rest, value),
                None => Err((mark, format!("there is no `[{index}]` in a list of {count}"))),
            }
        }
        (Step::Key(key), _) => Err((mark, format!("`{}` cannot be below {described}", shorten(key)))),
        (Step::Index(index), _) => Err((mark, format!("`[{index}]` wants a list, and this is {described}"))),
    }
}

/// Appends to the job's name, unless that has it already.
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
    fn keys_are_found_from_the_process_or_from_the_top() {
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
    fn keys_that_are_not_there_are_errors_with_the_nearest() {
        let near = with(&[("train.stepz", "1")], "").unwrap_err();
        assert!(
            near.starts_with("cat.yaml:") && near.contains("train.stepz") && near.contains("did you mean `steps`?"),
            "{near}"
        );
        for (key, value, says) in [
            ("train.no_such_thing_here", "1", "has no key"),
            ("nowhere.at_all", "1", "has no key `nowhere`"),
            ("train.lr.deeper", "1", "cannot be below the number"),
            ("datasets[3].caption_ext", "txt", "no `[3]` in a list of 1"),
            ("datasets[x].caption_ext", "txt", "no place in a list"),
            ("train..lr", "1", "expected the path of a key"),
            ("train.steps", "many", "train.steps: expected"),
        ] {
            let error = with(&[(key, value)], "").unwrap_err();
            assert!(error.contains(says), "{key}: {error}");
        }
    }
}
