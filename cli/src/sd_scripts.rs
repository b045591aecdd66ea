//! Imports configs of sd-scripts and of the kohya GUI, for `aitk import` and for every command that takes a config.

use crate::exit::Exit;
use crate::failure::Failure;
use crate::output::format::{printable, shell_path};
use aitk_common::fsutil::regular;
use aitk_common::job::Finding;
use aitk_common::sd_scripts::{Imported, Script, Source, SourceFormat, import, is_preset};
use std::path::{Path, PathBuf};

/// Bytes of a config that is read to find out what it is.
const MAX_BYTES: u64 = 10 << 20;

/// How a config is imported.
#[derive(Clone, Copy, Default)]
pub struct ImportOptions<'a> {
    /// The data set config, instead of the one that the config names.
    pub dataset_config: Option<&'a Path>,
    /// The script that the config is for.
    pub script: Option<Script>,
}

/// An imported config, and the path of its file.
pub struct ImportedFile {
    /// The file.
    pub path: PathBuf,
    /// What it became.
    pub imported: Imported,
}

/// Imports a config, if it is one of sd-scripts or of the kohya GUI; other configs give `None`. A name is looked up in `directory`
/// and in its folder `config`.
///
/// # Errors
/// When the file cannot be read, or cannot be imported.
pub fn import_file(
    config: &Path,
    directory: &Path,
    options: ImportOptions<'_>,
) -> Result<Option<ImportedFile>, Failure> {
    let extension = config
        .extension()
        .and_then(|extension| extension.to_str())
        .unwrap_or("");
    let format = match extension.to_lowercase().as_str() {
        "toml" => SourceFormat::Toml,
        "json" => SourceFormat::GuiPreset,
        _ => return Ok(None),
    };
    let candidates = [directory.join(config), directory.join("config").join(config)];
    let Some(path) = candidates.into_iter().find(|path| path.exists()) else {
        return match format {
            SourceFormat::Toml => Err(Failure::not_found(format!(
                "{}: no such file",
                printable(&config.display().to_string())
            ))),
            SourceFormat::GuiPreset => Ok(None),
        };
    };
    let shown = printable(&config.display().to_string());
    let text = match regular::read_text(&path, MAX_BYTES) {
        Ok(text) => text,
        // Another reader opens this file as a job config in JSON, and reports the error.
        Err(_) if format == SourceFormat::GuiPreset => return Ok(None),
        Err(error) => return Err(Failure::failed(format!("{shown}: cannot be read: {error}"))),
    };
    if format == SourceFormat::GuiPreset && !is_preset(&text) {
        return Ok(None);
    }
    let source = Source {
        text: &text,
        format,
        file: &shown,
        directory,
        dataset_config: options.dataset_config,
        script: options.script,
    };
    match import(source) {
        Ok(imported) => Ok(Some(ImportedFile { path, imported })),
        Err(errors) => Err(failure(config, &errors)),
    }
}

fn failure(config: &Path, errors: &[Finding]) -> Failure {
    let lines: Vec<String> = errors.iter().map(|error| printable(&error.to_string())).collect();
    let failure = Failure::new(Exit::Failed, lines.join("\n"));
    let script = errors
        .iter()
        .find_map(|error| error.message.split("--script ").nth(1)?.split(' ').next());
    if let Some(script) = script {
        let config = printable(&shell_path(config));
        return failure.hint(format!("for example: aitk run {config} --script {script}"));
    }
    failure.hint("`aitk help sd-scripts` says what becomes of each option")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_of_a_hint_can_be_copied() {
        let error = Finding {
            message: "name it, for example with --script train_db or --script sdxl_train".to_owned(),
            ..Finding::default()
        };
        let failure = failure(Path::new("my configs/a.toml"), &[error]);
        let text = failure.render(false);
        assert!(
            text.contains("aitk run 'my configs/a.toml' --script train_db"),
            "{text}"
        );
    }
}
