//! What prompts hold besides words: inputs (`--ctrl_img path`) and flags with mistakes.

use super::node::shorten;
use super::process::ProcessKind;
use super::prompt::PromptFlags;
use super::sample::SampleConfig;
use super::schema::{Cx, Input, InputKind};
use super::spec::JobSpec;
use super::values::TextSource;

/// Adds the files that prompts name.
pub(crate) fn from_prompts(job: &JobSpec, out: &mut Vec<Input>) {
    for (index, process) in job.process.iter().enumerate() {
        each_prompt(&process.kind, &format!("config.process[{index}]"), &mut |key, text| {
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

/// Says which flags of prompts cannot be understood.
pub(crate) fn check_prompts(process: &ProcessKind, path: &str, cx: &mut Cx) {
    each_prompt(process, path, &mut |key, text| {
        let flags = PromptFlags::parse(text);
        for problem in flags.problems {
            cx.error_at(&key, problem);
        }
        for flag in flags.unknown {
            let message = format!(
                "`--{}` is not a prompt flag; it and the text after it are dropped",
                shorten(&flag)
            );
            cx.warn_at(&key, message);
        }
    });
}

fn each_prompt(process: &ProcessKind, path: &str, f: &mut dyn FnMut(String, &str)) {
    match process {
        ProcessKind::Train(process) => {
            samples(&process.sample, &format!("{path}.sample"), f);
            if let Some(first) = &process.first_sample {
                samples(first, &format!("{path}.first_sample"), f);
            }
        }
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

fn samples(sample: &SampleConfig, path: &str, f: &mut dyn FnMut(String, &str)) {
    let from_prompts = !sample.prompts.is_empty() && sample.prompts.len() == sample.samples.len();
    for (index, item) in sample.samples.iter().enumerate() {
        if from_prompts && sample.prompts.get(index) == Some(&item.prompt) {
            f(format!("{path}.prompts[{index}]"), &item.prompt);
        } else {
            f(format!("{path}.samples[{index}].prompt"), &item.prompt);
        }
    }
}
