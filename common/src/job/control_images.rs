//! Checks that models which change an image get one, and trainings of an adapter, and that no others do.

use super::dataset::DatasetConfig;
use super::process::{ProcessKind, TrainerProcess};
use super::prompt::PromptFlags;
use super::read_context::join;
use super::schema::SupportReport;

/// Which models take control images, for messages.
const WHO_TAKES_ONE: &str =
    "only FLUX.1 Kontext (`arch: flux_kontext`) and trainings of an `adapter` take control images: remove it";

/// Reports control images of data sets and samples that the process does not use, and samples without the control image that the
/// model needs.
pub(super) fn check_control_process(process: &ProcessKind, path: &str, report: &mut SupportReport) {
    match process {
        ProcessKind::Train(process) => {
            if !process.takes_control_images() {
                let message = format!(
                    "`arch: {}` is trained without them: {WHO_TAKES_ONE}",
                    process.model.arch.name
                );
                check_no_control_folders(&process.datasets, path, &message, report);
            }
            check_samples(process, path, report);
        }
        ProcessKind::Img2Img(process) => {
            let arch = process.model.arch.name;
            if arch.takes_control_image() {
                let message = format!(
                    "`arch: {arch}` changes a control image, which `batch_img2img` does not give: use `type: to_folder` and prompts with \
                     `--ctrl_img PATH`"
                );
                report.error(join(path, "model.arch"), message);
            }
            let message = "`batch_img2img` changes the images of `folder_path`, and only trainings use control images: remove the key";
            check_no_control_folders(&process.datasets, path, message, report);
        }
        _ => {}
    }
}

/// Reports data sets with control images.
fn check_no_control_folders(datasets: &[DatasetConfig], path: &str, message: &str, report: &mut SupportReport) {
    for (index, dataset) in datasets.iter().enumerate() {
        if let Some(key) = dataset.control_key() {
            report.error(join(path, &format!("datasets[{index}].{key}")), message);
        }
    }
}

/// Reports samples of a training without the control image that the model needs, or with one that it does not take.
fn check_samples(process: &TrainerProcess, path: &str, report: &mut SupportReport) {
    let takes_control = process.takes_control_images();
    // Samples without one get one of the adapter's.
    let has_own = process
        .adapter
        .as_ref()
        .is_some_and(|adapter| !adapter.test_img_path.is_empty());
    process.for_each_sample(path, &mut |key, prompt_key, item| {
        let flag = PromptFlags::parse(&item.prompt).ctrl_img;
        let has_control = flag
            .as_ref()
            .or(item.ctrl_img.as_ref())
            .is_some_and(|path| !path.is_empty());
        if takes_control && !has_control && process.adapter.is_some() {
            if !has_own && !process.train.disable_sampling {
                report.error(
                    prompt_key,
                    "the sample has no control image, which an `adapter` needs: add the flag `--ctrl_img PATH` to the prompt, the key \
                     `ctrl_img` to the entry of `samples`, or `adapter.test_img_path`; or set `train.disable_sampling: true`",
                );
            }
        } else if takes_control && !has_control && !process.train.disable_sampling {
            report.error(
                prompt_key,
                "the sample has no image to change, which FLUX.1 Kontext needs: add the flag `--ctrl_img PATH` to the prompt, or the key \
                 `ctrl_img` to the entry of `samples`; or set `train.disable_sampling: true`",
            );
        } else if !takes_control && (flag.is_some() || item.ctrl_img.is_some()) {
            let key = match flag {
                Some(_) => prompt_key,
                None => join(&key, "ctrl_img"),
            };
            report.error(key, format!("the sample's control image: {WHO_TAKES_ONE}"));
        }
    });
}

/// Reports a prompt of a generation at `key` without the control image that the model needs, or with one (`control`, the flag
/// `--ctrl_img`) that it does not take. Prompts in files are checked when the process reads them.
pub(super) fn check_control_flag(process: &ProcessKind, control: Option<&str>, key: &str, report: &mut SupportReport) {
    let ProcessKind::Generate(process) = process else {
        return;
    };
    let takes_control = process.model.arch.name.takes_control_image();
    let has_control = control.is_some_and(|path| !path.is_empty());
    if takes_control && !has_control {
        report.error(
            key,
            "the prompt has no image to change: add the flag `--ctrl_img PATH`, which FLUX.1 Kontext needs",
        );
    } else if control.is_some() && !takes_control {
        report.error(key, format!("the prompt's flag `--ctrl_img`: {WHO_TAKES_ONE}"));
    }
}

#[cfg(test)]
mod tests {
    use crate::job::{Format, JobSpec, LoadOptions, parse};

    fn job(kind: &str, arch: &str, keys: &str) -> JobSpec {
        let text = format!(
            "job: extension\nconfig:\n  name: a\n  process:\n    - type: {kind}\n      model: {{name_or_path: m, arch: {arch}}}\n{keys}"
        );
        parse(&text, Format::Yaml, Some("a.yaml"), &LoadOptions::default())
            .unwrap()
            .spec
    }

    fn training(arch: &str, set: &str, more: &str) -> JobSpec {
        let keys = format!(
            "      training_folder: output\n      network: {{type: lora, linear: 8}}\n      datasets:\n        - folder_path: images\n{set}{more}"
        );
        job("sd_trainer", arch, &keys)
    }

    /// The only error: its line, key and message.
    fn error(spec: &JobSpec) -> (u32, String, String) {
        let report = spec.unsupported();
        assert_eq!(report.errors.len(), 1, "{report}");
        let error = &report.errors[0];
        let key = error.key.strip_prefix("config.process[0].").unwrap().to_owned();
        (error.line.unwrap(), key, error.message.clone())
    }

    fn inputs(spec: &JobSpec) -> Vec<String> {
        let mut paths: Vec<String> = spec.inputs().into_iter().map(|input| input.config_path).collect();
        paths.retain(|path| path != "m");
        paths.dedup();
        paths
    }

    const FLOW: &str = "      train: {noise_scheduler: flowmatch}\n";

    #[test]
    fn folders_of_control_images_are_inputs_of_models_that_take_them() {
        for (set, expected) in [
            ("          control_path: before\n", &["images", "before"][..]),
            (
                "          control_path: [before, also]\n",
                &["images", "before", "also"],
            ),
            ("          control_path_1: before\n", &["images", "before"]),
            ("          control_path: ''\n", &["images"]),
            ("", &["images"]),
        ] {
            let spec = training("flux_kontext", set, FLOW);
            let report = spec.unsupported();
            assert!(
                report.errors.is_empty() && report.warnings.is_empty(),
                "{set}: {report}"
            );
            let mut found = inputs(&spec);
            found.sort();
            found.dedup();
            let mut expected = expected.to_vec();
            expected.sort_unstable();
            assert_eq!(found, expected, "{set}");
        }
        let options = "          control_path: before\n          full_size_control_images: false\n          \
                       control_transparent_color: [255, 0, 9]\n";
        assert!(training("flux_kontext", options, FLOW).unsupported().is_ok());
    }

    #[test]
    fn control_images_from_the_same_folder_are_one_each_and_not_from_another_folder() {
        let drawn = "          control_from_same_folder: true\n";
        let spec = training("flux_kontext", drawn, FLOW);
        assert!(spec.unsupported().is_ok(), "{}", spec.unsupported());
        assert_eq!(inputs(&spec), ["images"]);
        for (more, key, text) in [
            (
                "          control_path: before\n",
                "control_from_same_folder",
                "`control_path`",
            ),
            (
                "          num_controls_from_same_folder: 2\n",
                "num_controls_from_same_folder",
                "expected 1",
            ),
        ] {
            let (_, found, message) = error(&training("flux_kontext", &format!("{drawn}{more}"), FLOW));
            assert_eq!(found, format!("datasets[0].{key}"));
            assert!(message.contains(text), "{message}");
        }
        for (set, key) in [
            (
                format!("{drawn}          cache_latents_to_disk: true\n"),
                "cache_latents_to_disk",
            ),
            (
                "          num_controls_from_same_folder: 3\n".to_owned(),
                "num_controls_from_same_folder",
            ),
        ] {
            let report = training("flux_kontext", &set, FLOW).unsupported();
            assert!(report.errors.is_empty(), "{report}");
            let keys: Vec<&str> = report.warnings.iter().map(|warning| warning.key.as_str()).collect();
            assert_eq!(keys, [format!("config.process[0].datasets[0].{key}")]);
        }
    }

    #[test]
    fn control_images_of_other_models_are_refused_at_their_key() {
        for (set, key) in [
            ("          control_path: before\n", "datasets[0].control_path"),
            ("          control_path_2: before\n", "datasets[0].control_path_2"),
            (
                "          control_from_same_folder: true\n",
                "datasets[0].control_from_same_folder",
            ),
        ] {
            for arch in ["flux", "sd3", "zimage"] {
                let (line, found, message) = error(&training(arch, set, FLOW));
                assert_eq!((line, found.as_str()), (11, key), "{message}");
                assert!(
                    message.contains(&format!("`arch: {arch}`")) && message.contains("flux_kontext"),
                    "{message}"
                );
            }
            let (line, found, _) = error(&job(
                "batch_img2img",
                "sd1",
                &format!("      output_folder: out\n      datasets:\n        - folder_path: images\n{set}"),
            ));
            assert_eq!((line, found.as_str()), (10, key));
        }
        let (line, key, message) = error(&job(
            "batch_img2img",
            "flux_kontext",
            "      output_folder: out\n      datasets:\n        - folder_path: images\n",
        ));
        assert_eq!((line, key.as_str()), (6, "model.arch"));
        assert!(message.contains("`type: to_folder`"), "{message}");
        for (sample, key) in [
            ("        prompts: ['a cat --ctrl_img a.png']\n", "sample.prompts[0]"),
            (
                "        samples: [{prompt: 'a cat --ctrl_img a.png'}]\n",
                "sample.samples[0].prompt",
            ),
            (
                "        samples: [{prompt: a cat, ctrl_img: a.png}]\n",
                "sample.samples[0].ctrl_img",
            ),
        ] {
            let more = format!("{FLOW}      sample:\n        sampler: flowmatch\n{sample}");
            let (line, found, message) = error(&training("flux", "", &more));
            assert_eq!((line, found.as_str()), (14, key), "{message}");
            assert!(message.contains("flux_kontext"), "{message}");
        }
    }

    #[test]
    fn every_sample_of_a_model_that_changes_images_has_one() {
        let spec = |section: &str, samples: &str, train: &str| {
            let more = format!(
                "      train: {{noise_scheduler: flowmatch{train}}}\n      {section}:\n        sampler: flowmatch\n        {samples}\n"
            );
            training("flux_kontext", "", &more)
        };
        for section in ["sample", "first_sample"] {
            for samples in [
                "prompts: ['make it red  --ctrl_img a.png']",
                "samples: [{prompt: make it red, ctrl_img: a.png}]",
                "samples: [{prompt: make it red --ctrl_img a.png, ctrl_img: b.png}]",
            ] {
                let spec = spec(section, samples, "");
                assert!(
                    spec.unsupported().errors.is_empty(),
                    "{samples}: {}",
                    spec.unsupported()
                );
                assert!(inputs(&spec).contains(&"a.png".to_owned()), "{samples}");
            }
            for (samples, key) in [
                ("prompts: [make it red]", "prompts[0]"),
                ("prompts: ['make it red --ctrl_img ']", "prompts[0]"),
                ("samples: [{prompt: make it red}]", "samples[0].prompt"),
                // An empty flag replaces the key, as other flags do.
                (
                    "samples: [{prompt: 'make it red --ctrl_img ', ctrl_img: a.png}]",
                    "samples[0].prompt",
                ),
            ] {
                let (line, found, message) = error(&spec(section, samples, ""));
                assert_eq!((line, found), (14, format!("{section}.{key}")), "{message}");
                assert!(
                    message.contains("--ctrl_img PATH") && message.contains("disable_sampling"),
                    "{message}"
                );
                assert!(
                    spec(section, samples, ", disable_sampling: true")
                        .unsupported()
                        .errors
                        .is_empty()
                );
            }
        }
    }
}
