//! The extension of a job, and the label by which a worker announces that it allows one.

use super::extension::{EXTENSION_PREFIX, ExtensionProcess};
use super::process::{Process, ProcessKind};
use super::spec::JobSpec;
use std::collections::BTreeMap;

/// The value of the label by which a worker announces an extension. The label's key is the type of the process.
pub const ALLOWED: &str = "allowed";

impl Process {
    /// The process as an extension, if it is one.
    #[must_use]
    pub fn extension(&self) -> Option<&ExtensionProcess> {
        match &self.kind {
            ProcessKind::Extension(process) => Some(process),
            _ => None,
        }
    }
}

impl JobSpec {
    /// The name of the extension that the job runs, if it runs one. Such a job has no other process.
    #[must_use]
    pub fn extension(&self) -> Option<&str> {
        let process = self.process.iter().find_map(Process::extension)?;
        Some(process.kind.extension())
    }

    /// The labels that a worker must have to run the job: those of `cluster.labels`, and that of its extension.
    #[must_use]
    pub fn required_labels(&self) -> BTreeMap<String, String> {
        let mut labels = self.cluster.labels.0.clone();
        if let Some(name) = self.extension() {
            labels.insert(extension_label(name), ALLOWED.to_owned());
        }
        labels
    }
}

/// The key of the label by which a worker announces that it allows an extension.
#[must_use]
pub fn extension_label(name: &str) -> String {
    format!("{EXTENSION_PREFIX}{name}")
}

#[cfg(test)]
mod tests {
    use crate::job::{Format, JobSpec, LoadOptions, parse};

    fn read(process: &str) -> Result<JobSpec, String> {
        let text = format!("job: extension\nconfig:\n  name: a\n  training_folder: out\n  process:\n{process}");
        parse(&text, Format::Yaml, Some("a.yaml"), &LoadOptions::default())
            .map(|job| job.spec)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn an_extension_is_read_and_is_the_same_after_json() {
        let spec = read(
            "    - type: extension:my-tool_2\n      inputs: {captions: data, words: w.txt}\n      config: {steps: 3, nested: {a: [1, x]}}\n",
        )
        .unwrap();
        assert_eq!(spec.extension(), Some("my-tool_2"));
        let mut paths: Vec<_> = spec
            .inputs()
            .into_iter()
            .map(|input| (input.key, input.config_path))
            .collect();
        paths.sort();
        assert_eq!(
            paths[0],
            ("config.process[0].inputs.captions".to_owned(), "data".to_owned())
        );
        assert_eq!(paths[1].1, "w.txt");
        assert_eq!(spec.required_labels()["extension:my-tool_2"], "allowed");
        assert!(spec.unsupported().errors.is_empty());
        let json = serde_json::to_string(&spec).unwrap();
        assert_eq!(JobSpec::from_json(&json).unwrap(), spec);
        // The type stands twice in a job's JSON; both must name the same kind.
        let mixed = json.replace("\"type\":\"extension:my-tool_2\"", "\"type\":\"extension:NO\"");
        assert!(JobSpec::from_json(&mixed).is_err());
    }

    #[test]
    fn wrong_extensions_are_refused_with_the_key() {
        for (process, expected) in [
            ("    - type: extension:Upper\n", "a.yaml:6"),
            ("    - type: 'extension:'\n", "expected 1 to 64"),
            ("    - type: extension:../x\n", "expected 1 to 64"),
            (
                "    - type: extension:a\n      inputs: {../x: data}\n",
                "the name of an input",
            ),
            (
                "    - type: extension:a\n      inputs: {x: ''}\n",
                "the path of a file or a folder",
            ),
            ("    - type: extension:a\n      inputs: [x]\n", "inputs"),
            ("    - type: extension:a\n      config: 3\n", "config"),
            ("    - type: extension:a\n      name: ../b\n", "name"),
            ("    - type: extension:a\n    - type: extension:b\n", "only process"),
            ("    - type: no_such_process\n", "extension:NAME"),
        ] {
            let error = read(process).unwrap_err();
            assert!(error.contains(expected), "{process}: {error}");
        }
    }
}
