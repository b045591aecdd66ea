//! Replaces paths of this machine's cache in an attempt's messages by the paths in its config.

use aitk_common::attempt::{AttemptSpec, ChildEvent, Outcome};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Pairs of a local path and the path in the config; the longest local path first.
#[derive(Debug, Default)]
pub(crate) struct PathRedactor(Vec<(String, String)>);

impl PathRedactor {
    /// The redactor for an attempt; empty for a job that runs in place, whose paths are those of its user.
    pub(crate) fn for_attempt(spec: &AttemptSpec) -> Self {
        match spec.output_root {
            Some(_) => Self::new(&spec.inputs),
            None => Self::default(),
        }
    }

    fn new(inputs: &BTreeMap<String, PathBuf>) -> Self {
        let name = |(config_path, local_path): (&String, &PathBuf)| {
            let config_path = match config_path.trim_end_matches('/') {
                "" => config_path,
                short => short,
            };
            (local_path.display().to_string(), config_path.to_owned())
        };
        let mut names: Vec<_> = inputs
            .iter()
            .map(name)
            .filter(|(local_path, _)| !local_path.is_empty())
            .collect();
        names.sort_by_key(|(local_path, _)| std::cmp::Reverse(local_path.len()));
        Self(names)
    }

    /// Replaces the paths in the text of an event.
    pub(crate) fn redact_event(&self, event: ChildEvent) -> ChildEvent {
        match event {
            ChildEvent::Log { level, message } => ChildEvent::Log {
                level,
                message: self.redact(message),
            },
            ChildEvent::Finished {
                outcome: Outcome::Failed { cause, message },
            } => ChildEvent::Finished {
                outcome: Outcome::Failed {
                    cause,
                    message: self.redact(message),
                },
            },
            other => other,
        }
    }

    /// Replaces the paths in a text.
    pub(crate) fn redact(&self, mut text: String) -> String {
        for (local_path, config_path) in &self.0 {
            if text.contains(local_path.as_str()) {
                text = replace_path(&text, local_path, config_path);
            }
        }
        text
    }
}

/// Replaces every `local_path` that is followed by the end of a path component.
fn replace_path(text: &str, local_path: &str, config_path: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(local_path) {
        out.push_str(before);
        out.push_str(if ends_component(after) { config_path } else { local_path });
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Returns whether a path component ends here. A full stop ends a sentence or begins a suffix.
fn ends_component(after: &str) -> bool {
    let mut next = after.trim_start_matches('.').chars();
    !next
        .next()
        .is_some_and(|c| c.is_alphanumeric() || matches!(c, '_' | '-'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use aitk_common::attempt::FailureCause;

    fn names() -> PathRedactor {
        let inputs = [
            ("~/models/sd15/", "/cache/trees/ab"),
            ("data/cats", "/cache/trees/ab12"),
            ("my.safetensors", "/cache/trees/cd/my.safetensors"),
        ];
        let inputs = inputs.map(|(config_path, local_path)| (config_path.to_owned(), PathBuf::from(local_path)));
        PathRedactor::new(&inputs.into())
    }

    #[test]
    fn local_paths_become_those_of_the_config() {
        for (before, after) in [
            (
                "/cache/trees/ab/unet/config.json: not valid JSON",
                "~/models/sd15/unet/config.json: not valid JSON",
            ),
            ("`/cache/trees/ab12`: no images", "`data/cats`: no images"),
            (
                "/cache/trees/ab12/a.png and /cache/trees/ab/b",
                "data/cats/a.png and ~/models/sd15/b",
            ),
            ("no weights in /cache/trees/ab.", "no weights in ~/models/sd15."),
            ("/cache/trees/cd/my.safetensors: cut off", "my.safetensors: cut off"),
            // Other paths.
            ("/cache/trees/abc/x", "/cache/trees/abc/x"),
            ("/cache/trees/ab.json", "/cache/trees/ab.json"),
            ("nothing", "nothing"),
        ] {
            assert_eq!(names().redact(before.to_owned()), after);
        }
    }

    #[test]
    fn failures_and_log_lines_are_redacted_and_artifact_paths_are_not() {
        let names = names();
        let message = "/cache/trees/ab12: no images".to_owned();
        let failed = |message: &str| ChildEvent::Finished {
            outcome: Outcome::Failed {
                cause: FailureCause::BadInput,
                message: message.to_owned(),
            },
        };
        assert_eq!(names.redact_event(failed(&message)), failed("data/cats: no images"));
        let log = |message: &str| ChildEvent::Log {
            level: "warn".to_owned(),
            message: message.to_owned(),
        };
        assert_eq!(names.redact_event(log(&message)), log("data/cats: no images"));
        let artifact = ChildEvent::Artifact {
            kind: "image".to_owned(),
            path: "/cache/trees/ab12/a.png".into(),
            name: "a.png".to_owned(),
            step: None,
            index: None,
        };
        assert_eq!(names.redact_event(artifact.clone()), artifact);
    }
}
