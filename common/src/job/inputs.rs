//! Input paths and flags inside prompts (`--ctrl_img path`), and inputs that are never opened.

use super::control_images::{check_control_flag, check_control_process};
use super::negative_prompts::NegativePrompts;
use super::process::{JobKind, ProcessKind, TrainerProcess};
use super::prompt::PromptFlags;
use super::schema::{Input, InputKind, ReadContext, SupportReport};
use super::spec::JobSpec;
use super::values::TextSource;
use std::collections::BTreeSet;

/// The keys of image folders in the `slider` section at `path` that are not opened.
fn unopened_of_slider(process: &TrainerProcess, path: &str) -> Vec<String> {
    let mut keys = Vec::new();
    for (index, dataset) in process.slider.iter().flat_map(|slider| &slider.datasets).enumerate() {
        let (uses_pairs, set) = (process.kind.uses_image_pairs(), dataset.as_dataset());
        let opened = |folder: &Option<String>| {
            uses_pairs && (set.folder_path == *folder || set.control_path.first() == folder.as_ref())
        };
        let folders = [
            ("pair_folder", &dataset.pair_folder),
            ("pos_folder", &dataset.pos_folder),
            ("neg_folder", &dataset.neg_folder),
        ];
        let unopened = folders.into_iter().filter(|(_, folder)| !opened(folder));
        keys.extend(unopened.map(|(key, _)| format!("{path}.datasets[{index}].{key}")));
    }
    keys
}

impl JobSpec {
    /// Returns the keys of inputs that are never opened, because another key replaces them or the process does not use them.
    pub(super) fn unopened_keys(&self) -> BTreeSet<String> {
        let mut keys = BTreeSet::new();
        if self.job != JobKind::Extract {
            keys.extend(["base_model", "extract_model"].map(|key| format!("config.{key}")));
        }
        for (index, process) in self.process.iter().enumerate() {
            if matches!(process.kind, ProcessKind::Generate(_) | ProcessKind::Img2Img(_)) {
                keys.insert(format!("config.process[{index}].model.assistant_lora_path"));
            }
            if let ProcessKind::Train(process) = &process.kind {
                for key in process.unopened_feature_extractors() {
                    keys.insert(format!("config.process[{index}].train.{key}"));
                }
                if !matches!(process.negative_prompts(), Some(NegativePrompts::File(_))) {
                    keys.insert(format!("config.process[{index}].train.negative_prompt"));
                }
                keys.extend(unopened_of_slider(process, &format!("config.process[{index}].slider")));
            }
            let (datasets, trains) = match &process.kind {
                ProcessKind::Train(process) => (&process.datasets, true),
                ProcessKind::Img2Img(process) => (&process.datasets, false),
                _ => continue,
            };
            for (number, dataset) in datasets.iter().enumerate() {
                for key in dataset.unopened_control_generators() {
                    keys.insert(format!("config.process[{index}].datasets[{number}].{key}"));
                }
                let unopened = [
                    ("folder_path", dataset.dataset_path.is_some()),
                    // The image's alpha channel wins.
                    ("mask_path", dataset.alpha_mask || !trains),
                    ("unconditional_path", !trains),
                    ("random_triggers", !trains),
                ];
                let unopened = unopened.into_iter().filter(|(_, is_unopened)| *is_unopened);
                keys.extend(unopened.map(|(key, _)| format!("config.process[{index}].datasets[{number}].{key}")));
            }
        }
        keys
    }

    /// Whether an input is the folder of a code model that is made anew, from its `config.json` alone.
    #[must_use]
    pub fn is_new_language_model(&self, input: &Input) -> bool {
        let is_of = |index: usize| input.key.starts_with(&format!("config.process[{index}]."));
        input.kind == InputKind::LanguageModel
            && self.process.iter().enumerate().any(|(index, process)| {
                is_of(index) && process.lm_trainer().is_some_and(|process| process.model.from_config)
            })
    }

    /// Returns the input that a message is about: the one with the longest path in it. A path counts where it is a whole one, or
    /// the beginning of one. `local`: the path of an input on this machine, if it is known.
    #[must_use]
    pub fn input_named_in(&self, message: &str, local: impl Fn(&Input) -> Option<String>) -> Option<Input> {
        let mut named: Option<(usize, Input)> = None;
        for input in self.inputs() {
            let paths = [Some(input.config_path.clone()), local(&input)];
            let paths = paths.into_iter().flatten();
            let length = paths
                .filter(|path| self.mentions(message, path))
                .map(|path| path.len())
                .max();
            // Of several keys with one path, the first.
            if let Some(length) = length
                && named.as_ref().is_none_or(|(longest, _)| length > *longest)
            {
                named = Some((length, input));
            }
        }
        named.map(|(_, input)| input)
    }

    /// Whether a message names a path, or a file below it.
    fn mentions(&self, message: &str, path: &str) -> bool {
        let path = match path.trim_end_matches('/') {
            "" => path,
            trimmed => trimmed,
        };
        if path.is_empty() {
            return false;
        }
        // A single word may stand in the text for something else, and in backticks for a key.
        let is_word = !path.contains(|c: char| !c.is_alphanumeric() && !matches!(c, '_' | '-'));
        let is_key = || self.positions.keys().any(|key| key.rsplit('.').next() == Some(path));
        message.match_indices(path).any(|(start, _)| {
            let (before, after) = (&message[..start], &message[start + path.len()..]);
            let is_quoted = before.ends_with('`') && after.starts_with('`');
            if is_word {
                return match after.chars().next() {
                    Some('/') => before.is_empty() || before.ends_with([' ', '`', '"', '\'', '(']),
                    Some(':') | None => before.is_empty(),
                    _ => is_quoted && !is_key(),
                };
            }
            let begins = !before.ends_with(|c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.'));
            // A full stop ends a sentence, or begins a suffix.
            let rest = after.trim_start_matches('.');
            begins && !rest.starts_with(|c: char| c.is_alphanumeric() || matches!(c, '_' | '-'))
        })
    }

    /// Adds the control images named in prompts.
    pub(super) fn add_prompt_inputs(&self, out: &mut Vec<Input>) {
        for (index, process) in self.process.iter().enumerate() {
            for_each_prompt(&process.kind, &format!("config.process[{index}]"), &mut |key, text| {
                if let Some(config_path) = PromptFlags::parse(text).ctrl_img.filter(|path| !path.is_empty()) {
                    out.push(Input {
                        config_path,
                        kind: InputKind::ControlImages,
                        key,
                    });
                }
            });
        }
    }

    /// Reports prompt flags that this release does not support, like the config keys of the same meaning.
    pub(super) fn check_flag_support(&self, report: &mut SupportReport) {
        for (index, process) in self.process.iter().enumerate() {
            let path = format!("config.process[{index}]");
            let has_adapter = matches!(&process.kind, ProcessKind::Train(process) if process.adapter.is_some());
            check_control_process(&process.kind, &path, report);
            for_each_prompt(&process.kind, &path, &mut |key, text| {
                let flags = PromptFlags::parse(text);
                check_control_flag(&process.kind, flags.ctrl_img.as_deref(), &key, report);
                if let Some(refused) = flags.refused() {
                    report.unsupported(key.as_str(), refused);
                }
                for message in flags.without_effect(has_adapter) {
                    report.warn(key.as_str(), message);
                }
            });
        }
    }
}

impl ProcessKind {
    /// Reports invalid and unknown prompt flags.
    pub(super) fn check_prompts(&self, path: &str, cx: &mut ReadContext) {
        for_each_prompt(self, path, &mut |key, text| {
            let flags = PromptFlags::parse(text);
            for message in flags.dropped() {
                cx.warn_at(&key, message);
            }
            for problem in flags.problems {
                cx.error_at(&key, problem);
            }
        });
    }
}

fn for_each_prompt(process: &ProcessKind, path: &str, f: &mut dyn FnMut(String, &str)) {
    match process {
        ProcessKind::Train(process) => process.for_each_sample(path, &mut |_, key, item| f(key, &item.prompt)),
        ProcessKind::Generate(process) => {
            if let TextSource::List(prompts) = &process.generate.prompts {
                for (index, text) in prompts.iter().enumerate() {
                    f(format!("{path}.generate.prompts[{index}]"), text);
                }
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use crate::job::{Format, Input, LoadOptions, parse};

    #[test]
    fn unsupported_prompt_flags_are_reported_like_their_keys() {
        let config = |prompt: &str| {
            let text = format!(
                "job: generate\nconfig:\n  name: a\n  process:\n    - type: to_folder\n      output_folder: out\n      model:\n        \
                 name_or_path: m\n      generate:\n        prompts:\n          - '{prompt}'\n"
            );
            let job = parse(&text, Format::Yaml, Some("a.yaml"), &LoadOptions::default()).unwrap();
            job.spec.unsupported()
        };
        let usual = config("a cat --w 512 --seed 3 --frames 1");
        assert!(usual.errors.is_empty() && usual.warnings.is_empty(), "{usual}");
        for flag in ["--frames 9", "--ctrl_img y.png"] {
            let found = config(&format!("a cat {flag}")).to_string();
            assert!(found.contains("a.yaml:11") && found.contains(&flag[..5]), "{found}");
            assert_eq!(config(&format!("a cat {flag}")).errors.len(), 1);
        }
        let kontext = |prompts: &str| {
            let text = format!(
                "job: generate\nconfig:\n  name: a\n  process:\n    - type: to_folder\n      output_folder: out\n      model:\n        \
                 name_or_path: m\n        arch: flux_kontext\n      generate:\n        sampler: flowmatch\n        prompts:\n{prompts}"
            );
            let job = parse(&text, Format::Yaml, Some("a.yaml"), &LoadOptions::default()).unwrap();
            (job.spec.unsupported(), job.spec.inputs())
        };
        let (usual, inputs) = kontext("          - 'a cat --ctrl_img y.png'\n");
        assert!(usual.errors.is_empty(), "{usual}");
        assert!(inputs.iter().any(|input| input.config_path == "y.png"), "{inputs:?}");
        for without in ["a cat", "a cat --ctrl_img "] {
            let (found, _) = kontext(&format!(
                "          - 'a cat --ctrl_img y.png'\n          - '{without}'\n"
            ));
            assert_eq!(found.errors.len(), 1, "{found}");
            let found = found.to_string();
            assert!(
                found.contains("a.yaml:14") && found.contains("--ctrl_img PATH"),
                "{found}"
            );
        }
        let quiet = config("a cat --fps 8 --ref 0.5");
        assert_eq!((quiet.errors.len(), quiet.warnings.len()), (0, 2), "{quiet}");
    }

    #[test]
    fn a_training_adapter_is_not_opened_to_generate_images() {
        let text = "job: generate\nconfig:\n  name: a\n  process:\n    - type: to_folder\n      output_folder: out\n      model:\n        \
                    name_or_path: models/flux\n        arch: flux\n        assistant_lora_path: lora.safetensors\n        \
                    extras_name_or_path: models/flux/extras\n        vae_path: models/flux\n      generate:\n        prompts: [a cat]\n";
        let spec = parse(text, Format::Yaml, Some("a.yaml"), &LoadOptions::default())
            .unwrap()
            .spec;
        let report = spec.unsupported();
        let shown = report.to_string();
        assert!(
            report.errors.is_empty() && shown.contains("a.yaml:10") && shown.contains("has no effect here"),
            "{shown}"
        );
        assert!(
            !spec
                .inputs()
                .iter()
                .any(|input| input.config_path == "lora.safetensors")
        );

        // Messages are about the longest path in them.
        let key = |message: &str| {
            let local = |input: &Input| Some(format!("/home/{}", input.config_path));
            spec.input_named_in(message, local).map(|input| input.key)
        };
        let ends = |message: &str, ending: &str| key(message).is_some_and(|key| key.ends_with(ending));
        assert!(ends(
            "/home/models/flux/extras/vae: wrong",
            "].model.extras_name_or_path"
        ));
        assert!(ends(
            "models/flux lacks /home/models/flux/extras",
            "].model.extras_name_or_path"
        ));
        assert!(ends("/home/models/flux: wrong", "].model.name_or_path"));
        assert_eq!(key("out of memory"), None);
    }

    #[test]
    fn a_short_path_counts_only_where_a_message_names_it() {
        let spec = |folder: &str| {
            let text = format!(
                "job: extension\nconfig:\n  name: a\n  process:\n    - type: sd_trainer\n      training_folder: out\n      model: \
                 {{name_or_path: models/sd, arch: sd15}}\n      network: {{type: lora}}\n      datasets:\n        - folder_path: \
                 {folder}\n      train: {{steps: 4}}\n"
            );
            parse(&text, Format::Yaml, Some("a.yaml"), &LoadOptions::default())
                .unwrap()
                .spec
        };
        let names = |folder: &str, message: &str| spec(folder).input_named_in(message, |_| None).is_some();
        for message in [
            "in: no images",
            "in/7.png: this is not an image",
            "no images in in/cats",
            "`in`: no images",
            "`in/7.png` is not an image",
        ] {
            assert!(names("in", message), "{message}");
        }
        for message in [
            "the training began",
            "no images in the folder",
            "an error in: step 3",
            "train.lr_factors: expected a string, found 3",
            "main/7.png: this is not an image",
        ] {
            assert!(!names("in", message), "{message}");
        }
        assert!(!names("name", "the extension has no `name`"));
        assert!(!names("type", "expected another `type` for this key"));
        for message in [
            "data/cats/7.png: this is not an image",
            "/home/u/data/cats/7.png: this is not an image",
            "cannot read data/cats, or data/dogs",
            "no images in data/cats.",
        ] {
            assert!(names("data/cats", message), "{message}");
            assert!(names("data/cats/", message), "{message}");
        }
        for message in ["data/cats2/7.png: wrong", "mydata/cats: wrong", "data/cats.json: wrong"] {
            assert!(!names("data/cats", message), "{message}");
        }
    }
}
