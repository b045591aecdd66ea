//! Adds the file, line and key of the config to an error of a running job.

use aitk_common::job::JobSpec;
use serde::Deserialize;
use serde_json::Value;

/// Prefixes the message with the file, line and key that it is about, if it names a key, or a path that the config
/// names.
pub(crate) fn with_config_location(job: &Value, message: String) -> String {
    let Ok(job) = JobSpec::deserialize(job) else {
        return message;
    };
    match find_key(&job, &message) {
        Some(key) => job.finding(key, message).to_string(),
        None => message,
    }
}

fn find_key(job: &JobSpec, message: &str) -> Option<String> {
    // Keys in messages look like `train.lr`.
    for quoted in message.split('`').skip(1).step_by(2) {
        let matches_quoted = |key: &&String| {
            let before = key.strip_suffix(quoted);
            before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
        };
        let mut keys = job.positions.keys().filter(matches_quoted);
        if let (false, Some(key), None) = (quoted.is_empty(), keys.next(), keys.next()) {
            return Some(key.clone());
        }
    }
    // A file or a folder that the config names.
    job.input_named_in(message, |_| None).map(|input| input.key)
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
        let placed = |message: &str| with_config_location(&job, message.to_owned());
        let key = placed("`train.steps` is too small for a warmup of 10");
        assert!(
            key.starts_with("my.yaml:12:") && key.ends_with("for a warmup of 10"),
            "{key}"
        );
        let path = placed("data/cats/7.png: this is no image");
        assert!(path.starts_with("my.yaml:10:") && path.contains("7.png"), "{path}");
        // Messages about nothing in the config stay unchanged.
        for message in ["the device ran out of memory", "a `` and `nothing`"] {
            assert_eq!(placed(message), message);
        }
    }
}
