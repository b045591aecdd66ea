//! Inputs that are named inside prompts (`--ctrl_img path`).

use super::process::ProcessKind;
use super::prompt::PromptFlags;
use super::sample::SampleConfig;
use super::schema::{Input, InputKind};
use super::spec::JobSpec;
use super::values::TextSource;

pub(crate) fn from_prompts(job: &JobSpec, out: &mut Vec<Input>) {
    for (index, process) in job.process.iter().enumerate() {
        let path = format!("config.process[{index}]");
        match &process.kind {
            ProcessKind::Train(process) => {
                samples(&process.sample, &format!("{path}.sample"), out);
                if let Some(first) = &process.first_sample {
                    samples(first, &format!("{path}.first_sample"), out);
                }
            }
            ProcessKind::Generate(process) => {
                if let TextSource::List(prompts) = &process.generate.prompts {
                    for (index, text) in prompts.iter().enumerate() {
                        prompt(text, || format!("{path}.generate.prompts[{index}]"), out);
                    }
                }
            }
            _ => {}
        }
    }
}

fn samples(sample: &SampleConfig, path: &str, out: &mut Vec<Input>) {
    for (index, item) in sample.samples.iter().enumerate() {
        prompt(&item.prompt, || format!("{path}.samples[{index}].prompt"), out);
    }
}

fn prompt(text: &str, key: impl Fn() -> String, out: &mut Vec<Input>) {
    if let Some(config_path) = PromptFlags::parse(text).ctrl_img.filter(|path| !path.is_empty()) {
        out.push(Input {
            config_path,
            kind: InputKind::ControlImages,
            key: key(),
        });
    }
}
