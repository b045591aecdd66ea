//! Finds the key of the config that a message is about, for messages that come from code which sees no config: the engine's.

use super::error::Finding;
use super::schema::Input;
use super::spec::JobSpec;

/// What comes before the output of an extension's program in a message: no words of ours.
const PROGRAM_OUTPUT: &str = "; the end of its standard error: ";

impl JobSpec {
    /// The message as a finding at the key that it is about: one that it names, or that of a path that it names. `None`: it names none.
    /// `section`: the beginning of the keys that count, such as `config.process[0].`; empty: all keys. `local`: the path of an input on this
    /// machine, if it is known.
    #[must_use]
    pub fn finding_named_in(
        &self,
        message: &str,
        section: &str,
        local: impl Fn(&Input) -> Option<String>,
    ) -> Option<Finding> {
        let (key, begins_with_key) = self.key_named_in(message, section, local)?;
        let rest = match begins_with_key {
            // The finding begins with the whole key.
            true => message.split_once(": ").map_or("", |(_, rest)| rest),
            false => message,
        };
        Some(self.finding(key, rest.to_owned()))
    }

    /// The key that a message is about, and whether the message begins with it.
    fn key_named_in(
        &self,
        message: &str,
        section: &str,
        local: impl Fn(&Input) -> Option<String>,
    ) -> Option<(String, bool)> {
        let about_input = |text: &str| {
            let input = self.input_named_in(text, &local)?;
            input.key.starts_with(section).then_some(input.key)
        };
        let own = match self.extension() {
            Some(name) => {
                let begin = format!("the extension `{name}`");
                message.strip_prefix(begin.as_str()).unwrap_or(message)
            }
            None => message,
        };
        let own = own.split(PROGRAM_OUTPUT).next().unwrap_or(own);
        if let Some((beginning, rest)) = own.split_once(": ") {
            let is_path = about_input(beginning).is_some();
            if let Some(key) = self
                .known_key(section, beginning)
                .filter(|_| beginning.contains('.') || !is_path)
            {
                return Some((key, !rest.is_empty()));
            }
            let parent = beginning
                .split_once('.')
                .filter(|_| !is_path && !beginning.contains(['/', ' ']));
            if let Some(key) = parent.and_then(|(parent, _)| self.known_key(section, parent)) {
                return Some((key, false));
            }
        }
        // Keys in messages look like `train.lr`; a single word may be anything.
        let quoted = own.split('`').skip(1).step_by(2).filter(|quoted| quoted.contains('.'));
        // An extension is the only process of its job. Keys of its own settings have no positions.
        let own_setting = |quoted: &str| {
            let is_own = self.extension().is_some() && quoted.starts_with("config.");
            is_own.then(|| format!("config.process[0].{quoted}"))
        };
        let mut keys = quoted.filter_map(|quoted| own_setting(quoted).or_else(|| self.known_key(section, quoted)));
        keys.next().or_else(|| about_input(own)).map(|key| (key, false))
    }

    /// The only key of the section that is this one, or ends with it.
    fn known_key(&self, section: &str, text: &str) -> Option<String> {
        let is_it = |key: &&String| {
            let before = key.strip_suffix(text);
            key.starts_with(section) && before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
        };
        let mut keys = self.positions.keys().filter(is_it);
        match (text.is_empty(), keys.next(), keys.next()) {
            (false, Some(key), None) => Some(key.clone()),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::job::{Format, LoadOptions, parse};

    /// The worker's tests have more messages.
    #[test]
    fn a_message_is_about_a_key_of_its_process() {
        let process = |data: &str| {
            format!(
                "    - type: sd_trainer\n      training_folder: out\n      model: {{name_or_path: models/sd}}\n      network: {{type: lora}}\n      \
                 datasets:\n        - folder_path: {data}\n      train:\n        steps: 4\n"
            )
        };
        let text = format!(
            "job: extension\nconfig:\n  name: x\n  process:\n{}{}",
            process("cats"),
            process("dogs")
        );
        let job = parse(&text, Format::Yaml, Some("my.yaml"), &LoadOptions::default());
        let job = job.unwrap().spec;
        let found = |message: &str, section: &str| {
            let finding = job.finding_named_in(message, section, |_| None);
            finding.map(|finding| finding.to_string())
        };
        let second = "config.process[1].";
        assert_eq!(
            found("`train.steps` is too small", second).as_deref(),
            Some("my.yaml:20:9: config.process[1].train.steps: `train.steps` is too small")
        );
        assert_eq!(
            found("train.steps: expected more", second).as_deref(),
            Some("my.yaml:20:9: config.process[1].train.steps: expected more")
        );
        assert_eq!(
            found("dogs: no images", second).as_deref(),
            Some("my.yaml:18:11: config.process[1].datasets[0].folder_path: dogs: no images")
        );
        // In the whole job it may be either key.
        assert_eq!(found("train.steps: expected more", ""), None);
        assert_eq!(found("cats: no images", second), None);
        assert_eq!(found("the device ran out of memory", second), None);
    }
}
