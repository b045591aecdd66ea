//! Adds the file, line and key of the config to an error of a running job.

use aitk_common::job::{Input, JobSpec};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Prefixes the message with the file, line and key that it is about, if it names a key, or a path that the config names.
/// `local_paths`: path in the config -> path on this machine.
pub(crate) fn with_config_location(job: &Value, local_paths: &BTreeMap<String, PathBuf>, message: String) -> String {
    let Ok(job) = JobSpec::deserialize(job) else {
        return message;
    };
    let local = |input: &Input| Some(local_paths.get(&input.config_path)?.display().to_string());
    match job.finding_named_in(&message, "", local) {
        Some(finding) => finding.to_string(),
        None => message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aitk_common::job::{Format, LoadOptions, parse};

    const CONFIG: &str = "job: extension
config:
  name: x
  process:
    - type: sd_trainer
      training_folder: out
      model: {name_or_path: models/sd, arch: sd15}
      network: {type: lora}
      datasets:
        - folder_path: data/cats
      train:
        steps: 4
";

    #[test]
    fn an_error_of_a_running_job_names_its_line_in_the_config() {
        let job = parse(CONFIG, Format::Yaml, Some("my.yaml"), &LoadOptions::default())
            .unwrap()
            .spec;
        let job = serde_json::to_value(job).unwrap();
        let placed = |message: &str| with_config_location(&job, &BTreeMap::new(), message.to_owned());
        let key = placed("`train.steps` is too small for a warmup of 10");
        assert!(
            key.starts_with("my.yaml:12:") && key.ends_with("for a warmup of 10"),
            "{key}"
        );
        let path = placed("data/cats/7.png: this is not an image");
        assert!(path.starts_with("my.yaml:10:") && path.contains("7.png"), "{path}");
        // Messages about nothing in the config stay unchanged.
        for message in ["the device ran out of memory", "a `` and `nothing`"] {
            assert_eq!(placed(message), message);
        }
    }

    #[test]
    fn a_key_that_the_message_begins_with_stands_there_once() {
        let text = CONFIG.replace("data/cats", "steps");
        let job = parse(&text, Format::Yaml, Some("my.yaml"), &LoadOptions::default());
        let job = serde_json::to_value(job.unwrap().spec).unwrap();
        let placed = |message: &str| with_config_location(&job, &BTreeMap::new(), message.to_owned());
        assert_eq!(
            placed("train.steps: expected more"),
            "my.yaml:12:9: config.process[0].train.steps: expected more"
        );
        // A key that the config does not have is at its section.
        let key = placed("train.lr_factors: `steps` is not a factor");
        assert!(
            key.starts_with("my.yaml:11:") && key.ends_with(".train: train.lr_factors: `steps` is not a factor"),
            "{key}"
        );
        // A path has precedence over a key of one word.
        let path = placed("steps: no images");
        assert!(path.contains(".datasets[0].folder_path: steps: no images"), "{path}");
        let path = placed("/x/steps/a.png: no image");
        assert_eq!(path, "/x/steps/a.png: no image");
        let local = BTreeMap::from([("steps".to_owned(), PathBuf::from("/x/steps"))]);
        let path = with_config_location(&job, &local, path);
        assert!(path.starts_with("my.yaml:10:"), "{path}");
        assert_eq!(placed("another `type` is needed"), "another `type` is needed");
    }

    #[test]
    fn errors_of_an_extension_are_about_what_they_name() {
        let text = "job: extension
config:
  name: x
  training_folder: out
  process:
    - type: extension:data
      inputs: {data: in}
      config: {steps: 3}
";
        let job = parse(text, Format::Yaml, Some("my.yaml"), &LoadOptions::default());
        let job = serde_json::to_value(job.unwrap().spec).unwrap();
        let placed = |message: &str| with_config_location(&job, &BTreeMap::new(), message.to_owned());
        for message in [
            "the extension `data` sent `done` at step 3 of 9: its progress or its end is wrong",
            "the extension `data` sent no message of the protocol: `type` is missing in it",
            "the extension `data` exited with code 3, before it sent `done`; the end of its standard error: in/a.txt: gone",
        ] {
            assert_eq!(placed(message), message);
        }
        let config = placed("the extension `data` does not accept its config: `config.steps` is \"in\"");
        assert!(
            config.starts_with("my.yaml:8:") && config.contains(".config.steps: the extension"),
            "{config}"
        );
        assert_eq!(
            placed("inputs.data: in: No such file or directory"),
            "my.yaml:7:16: config.process[0].inputs.data: in: No such file or directory"
        );
    }
}
