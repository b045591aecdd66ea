//! Adds the file, line and key of the config to an error of a running job.

use aitk_common::job::{Input, JobSpec};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What comes before the output of an extension's program in a message: no words of ours.
const PROGRAM_OUTPUT: &str = "; the end of its standard error: ";

/// Prefixes the message with the file, line and key that it is about, if it names a key, or a path that the config names.
/// `local_paths`: path in the config -> path on this machine.
pub(crate) fn with_config_location(job: &Value, local_paths: &BTreeMap<String, PathBuf>, message: String) -> String {
    let Ok(job) = JobSpec::deserialize(job) else {
        return message;
    };
    match find_key(&job, local_paths, &message) {
        Some((key, true)) => {
            // The finding begins with the whole key.
            let rest = message.split_once(": ").map_or("", |(_, rest)| rest);
            job.finding(key, rest.to_owned()).to_string()
        }
        Some((key, false)) => job.finding(key, message).to_string(),
        None => message,
    }
}

/// The key that a message is about, and whether the message begins with it.
fn find_key(job: &JobSpec, local_paths: &BTreeMap<String, PathBuf>, message: &str) -> Option<(String, bool)> {
    let local = |input: &Input| Some(local_paths.get(&input.config_path)?.display().to_string());
    let about_input = |text: &str| job.input_named_in(text, local).map(|input| input.key);
    let own = match job.extension() {
        Some(name) => {
            let begin = format!("the extension `{name}`");
            message.strip_prefix(begin.as_str()).unwrap_or(message)
        }
        None => message,
    };
    let own = own.split(PROGRAM_OUTPUT).next().unwrap_or(own);
    if let Some((beginning, rest)) = own.split_once(": ") {
        let is_path = about_input(beginning).is_some();
        if let Some(key) = known_key(job, beginning).filter(|_| beginning.contains('.') || !is_path) {
            return Some((key, !rest.is_empty()));
        }
        let section = beginning
            .split_once('.')
            .filter(|_| !is_path && !beginning.contains(['/', ' ']));
        if let Some(key) = section.and_then(|(section, _)| known_key(job, section)) {
            return Some((key, false));
        }
    }
    // Keys in messages look like `train.lr`; a single word may be anything.
    let quoted = own.split('`').skip(1).step_by(2).filter(|quoted| quoted.contains('.'));
    // An extension is the only process of its job. Keys of its own settings have no positions.
    let own_setting = |quoted: &str| {
        let is_own = job.extension().is_some() && quoted.starts_with("config.");
        is_own.then(|| format!("config.process[0].{quoted}"))
    };
    let mut keys = quoted.filter_map(|quoted| own_setting(quoted).or_else(|| known_key(job, quoted)));
    keys.next().or_else(|| about_input(own)).map(|key| (key, false))
}

/// The only key of the config that is this one, or ends with it.
fn known_key(job: &JobSpec, text: &str) -> Option<String> {
    let is_it = |key: &&String| {
        let before = key.strip_suffix(text);
        before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
    };
    let mut keys = job.positions.keys().filter(is_it);
    match (text.is_empty(), keys.next(), keys.next()) {
        (false, Some(key), None) => Some(key.clone()),
        _ => None,
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
