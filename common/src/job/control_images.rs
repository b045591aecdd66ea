//! Checks that models which change an image get one, and that no other model does.

use super::dataset::DatasetConfig;
use super::process::{ProcessKind, TrainerProcess};
use super::prompt::PromptFlags;
use super::read_context::join;
use super::schema::SupportReport;

/// Which models take control images, for messages.
const WHO_TAKES_ONE: &str = "only FLUX.1 Kontext (`arch: flux_kontext`) takes control images";

/// Reports control images of data sets and samples that the process does not use, and samples without the control image that the
/// model needs.
pub(super) fn check_control_process(process: &ProcessKind, path: &str, report: &mut SupportReport) {
    match process {
        ProcessKind::Train(process) => {
            if !process.model.arch.name.takes_control_image() {
                let message = format!("`arch: {}` is trained without them: {WHO_TAKES_ONE}", process.model.arch.name);
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
            let message = "`batch_img2img` changes the images of `folder_path`; only trainings use control images";
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
    let takes_control = process.model.arch.name.takes_control_image();
    process.for_each_sample(path, &mut |key, prompt_key, item| {
        let flag = PromptFlags::parse(&item.prompt).ctrl_img;
        let has_control = flag
            .as_ref()
            .or(item.ctrl_img.as_ref())
            .is_some_and(|path| !path.is_empty());
        if takes_control && !has_control && !process.train.disable_sampling {
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
    let ProcessKind::Generate(process) = process else { return };
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
