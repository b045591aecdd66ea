//! `init`: writes a commented job file.

use crate::args::InitArgs;
use crate::context::Context;
use crate::download::disk_failure;
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::output::format::shell_path;
use aitk_common::fsutil;
use std::io::Write;
use std::path::{Path, PathBuf};

const TEMPLATE: &str = include_str!("../templates/job.yaml");

pub(super) fn init(context: &Context, args: &InitArgs) -> CommandResult {
    let ui = context.ui(true);
    let path = file_of(&args.path);
    if !args.force && path.symlink_metadata().is_ok() {
        return Err(
            Failure::new(Exit::Conflict, format!("{} exists already", path.display()))
                .hint("give another name, or --force to overwrite it"),
        );
    }
    fsutil::create_dir_all(fsutil::folder_of(&path)).map_err(|error| disk_failure(&error))?;
    let argument = shell_path(&path);
    let text = TEMPLATE.replace("THIS_FILE", &argument);
    fsutil::write_atomic(&path, |out| out.write_all(text.as_bytes())).map_err(|error| disk_failure(&error))?;
    ui.data(&path.display().to_string())?;
    ui.notice("fill in the model, the data set and the trigger word, then:");
    ui.notice(&format!("  aitk validate {argument}"));
    ui.notice(&format!("  aitk run {argument}"));
    Ok(Exit::Ok)
}

/// Returns the path of the file to write; for a folder `job.yaml` in it. A name without `.yaml` or `.yml` is a folder.
fn file_of(path: &Path) -> PathBuf {
    let names_folder = path.to_string_lossy().ends_with('/') || path.is_dir();
    let is_config = path.extension().is_some_and(|ext| ext == "yaml" || ext == "yml");
    if names_folder || !is_config {
        path.join("job.yaml")
    } else {
        path.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_template_is_a_valid_config() {
        use aitk_common::job::{Format, LoadOptions, parse};
        let job = parse(TEMPLATE, Format::Yaml, None, &LoadOptions::default()).unwrap();
        assert!(job.warnings.is_empty(), "{:?}", job.warnings);
        let support = job.spec.unsupported();
        assert!(support.errors.is_empty() && support.warnings.is_empty(), "{support}");
    }

    #[test]
    fn folders_and_files_are_distinguished() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(file_of(dir.path()), dir.path().join("job.yaml"));
        assert_eq!(file_of(Path::new("config/")), Path::new("config/job.yaml"));
        assert_eq!(file_of(Path::new("config/a.yaml")), Path::new("config/a.yaml"));
        assert_eq!(file_of(Path::new("new")), Path::new("new/job.yaml"));
    }
}
