//! `import`: prints the config that one of sd-scripts or of the kohya GUI becomes.

use crate::args::ImportArgs;
use crate::context::Context;
use crate::download::disk_failure;
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::output::format::{printable, shell_path};
use crate::sd_scripts::{ImportOptions, import_file};
use aitk_common::fsutil;
use aitk_common::sd_scripts::Script;
use std::io::Write;

pub(super) fn import(context: &Context, args: &ImportArgs) -> CommandResult {
    let ui = context.ui(true);
    let script = args.script.as_deref().map(Script::from_name).transpose();
    let options = ImportOptions {
        dataset_config: args.dataset_config.as_deref(),
        script: script.map_err(|why| Failure::usage(format!("--script: {why}")))?,
    };
    let shown = printable(&args.config.display().to_string());
    let Some(file) = import_file(&args.config, &context.directory, options)? else {
        if !context.directory.join(&args.config).exists() {
            return Err(Failure::not_found(format!("{shown}: no such file")));
        }
        return Err(Failure::failed(format!(
            "{shown} is neither a .toml file of sd-scripts nor a .json preset of the kohya GUI"
        ))
        .hint("configs of ai-toolkit need no import: aitk run CONFIG"));
    };
    for note in &file.imported.notes {
        ui.warn(&printable(&note.to_string()));
    }
    let yaml = &file.imported.yaml;
    let Some(output) = &args.output else {
        ui.data(yaml.trim_end())?;
        return Ok(Exit::Ok);
    };
    let path = context.directory.join(output);
    if !args.force && path.symlink_metadata().is_ok() {
        return Err(
            Failure::new(Exit::Conflict, format!("{} exists already", output.display()))
                .hint("give another name, or --force to overwrite it"),
        );
    }
    if let Some(folder) = path.parent().filter(|folder| !folder.is_dir()) {
        return Err(Failure::not_found(format!("{}: no such folder", folder.display())));
    }
    fsutil::write_atomic(&path, |out| out.write_all(yaml.as_bytes())).map_err(|error| disk_failure(&error))?;
    ui.data(&output.display().to_string())?;
    ui.notice(&format!("to train it: aitk run {}", shell_path(output)));
    Ok(Exit::Ok)
}
