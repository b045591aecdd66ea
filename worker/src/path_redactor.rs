//! Paths in what an attempt says: as its config names them, not as they lie in this machine's cache.

use aitk_common::attempt::{AttemptSpec, ChildEvent, Outcome};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What the inputs of an attempt are called, where they lie -> as they were written; the longest first.
#[derive(Debug, Default)]
pub(crate) struct PathRedactor(Vec<(String, String)>);

impl PathRedactor {
    /// Nothing for a job that runs in place: its paths are those of its user, and of a cache that is his own.
    pub(crate) fn of(spec: &AttemptSpec) -> Self {
        match spec.output_root {
            Some(_) => Self::new(&spec.inputs),
            None => Self::default(),
        }
    }

    fn new(inputs: &BTreeMap<String, PathBuf>) -> Self {
        let name = |(written, here): (&String, &PathBuf)| {
            let written = match written.trim_end_matches('/') {
                "" => written,
                short => short,
            };
            (here.display().to_string(), written.to_owned())
        };
        let mut names: Vec<_> = inputs.iter().map(name).filter(|(here, _)| !here.is_empty()).collect();
        names.sort_by_key(|(here, _)| std::cmp::Reverse(here.len()));
        Self(names)
    }

    /// The event with the paths in its text as they were written.
    pub(crate) fn event(&self, event: ChildEvent) -> ChildEvent {
        match event {
            ChildEvent::Log { level, message } => ChildEvent::Log {
                level,
                message: self.text(message),
            },
            ChildEvent::Finished {
                outcome: Outcome::Failed { cause, message },
            } => ChildEvent::Finished {
                outcome: Outcome::Failed {
                    cause,
                    message: self.text(message),
                },
            },
            other => other,
        }
    }

    pub(crate) fn text(&self, mut text: String) -> String {
        for (here, written) in &self.0 {
            if text.contains(here.as_str()) {
                text = replaced(&text, here, written);
            }
        }
        text
    }
}

/// Every `here` that ends where a part of a path does becomes `written`.
fn replaced(text: &str, here: &str, written: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(here) {
        out.push_str(before);
        out.push_str(if ends(after) { written } else { here });
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Whether a name cannot go on with this. A full stop ends a sentence or begins a suffix.
fn ends(after: &str) -> bool {
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
        let inputs = inputs.map(|(written, here)| (written.to_owned(), PathBuf::from(here)));
        PathRedactor::new(&inputs.into())
    }

    #[test]
    fn paths_are_those_of_the_config() {
        for (said, told) in [
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
            // Others.
            ("/cache/trees/abc/x", "/cache/trees/abc/x"),
            ("/cache/trees/ab.json", "/cache/trees/ab.json"),
            ("nothing", "nothing"),
        ] {
            assert_eq!(names().text(said.to_owned()), told);
        }
    }

    #[test]
    fn failures_and_log_lines_are_told_so_and_files_stay_where_they_are() {
        let names = names();
        let message = "/cache/trees/ab12: no images".to_owned();
        let failed = |message: &str| ChildEvent::Finished {
            outcome: Outcome::Failed {
                cause: FailureCause::BadInput,
                message: message.to_owned(),
            },
        };
        assert_eq!(names.event(failed(&message)), failed("data/cats: no images"));
        let log = |message: &str| ChildEvent::Log {
            level: "warn".to_owned(),
            message: message.to_owned(),
        };
        assert_eq!(names.event(log(&message)), log("data/cats: no images"));
        let artifact = ChildEvent::Artifact {
            kind: "image".to_owned(),
            path: "/cache/trees/ab12/a.png".into(),
            name: "a.png".to_owned(),
            step: None,
            index: None,
        };
        assert_eq!(names.event(artifact.clone()), artifact);
    }
}
