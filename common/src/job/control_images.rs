//! Checks that models which change an image get one, and that no other model does.

use super::process::ProcessKind;
use super::read_context::join;
use super::schema::SupportReport;

/// Reports a process that cannot run FLUX.1 Kontext: only `to_folder` gives each image a control image.
pub(super) fn check_control_process(process: &ProcessKind, path: &str, report: &mut SupportReport) {
    let (arch, reason) = match process {
        ProcessKind::Train(process) => (process.model.arch.name, "is not trained yet"),
        ProcessKind::Img2Img(process) => (
            process.model.arch.name,
            "changes a control image, which `batch_img2img` does not give",
        ),
        _ => return,
    };
    if arch.takes_control_image() {
        let message = format!(
            "`arch: {arch}` {reason}; this release generates images with it: use `type: to_folder` and prompts with `--ctrl_img PATH`"
        );
        report.error(join(path, "model.arch"), message);
    }
}

/// Reports a prompt at `key` without the control image that the model needs, or with one (`control`, the flag `--ctrl_img`) that it does not
/// take. Prompts in files are checked when the process reads them.
pub(super) fn check_control_flag(process: &ProcessKind, control: Option<&str>, key: &str, report: &mut SupportReport) {
    let takes_control =
        matches!(process, ProcessKind::Generate(process) if process.model.arch.name.takes_control_image());
    let has_control = control.is_some_and(|path| !path.is_empty());
    if takes_control && !has_control {
        report.error(
            key,
            "the prompt has no image to change: add the flag `--ctrl_img PATH`, which FLUX.1 Kontext needs",
        );
    } else if control.is_some() && !takes_control {
        report.error(
            key,
            "the prompt's flag `--ctrl_img`: this release uses control images only to generate with FLUX.1 Kontext (`arch: flux_kontext`)",
        );
    }
}
