//! The programs that a worker's owner allows as extensions, by name (docs/extensions.md).

use aitk_common::attempt::ExtensionProgram;
use aitk_common::job::extension::check_extension_name;
use aitk_common::job::extension_job::{ALLOWED, extension_label};
use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The allowed programs by the names of their extensions.
#[derive(Clone, Debug, Default)]
pub(crate) struct AllowedExtensions(BTreeMap<String, PathBuf>);

impl AllowedExtensions {
    /// Reads the values of `--allow-extension`: `NAME=/PATH/OF/PROGRAM`.
    ///
    /// # Errors
    /// What is wrong with a value.
    pub(crate) fn parse(texts: &[String]) -> Result<Self, String> {
        let mut programs = BTreeMap::new();
        for text in texts.iter().filter(|text| !text.trim().is_empty()) {
            let (name, program) = text
                .split_once('=')
                .ok_or_else(|| format!("`{text}`: expected NAME=/PATH/OF/PROGRAM"))?;
            check_extension_name(name).map_err(|why| format!("the name of an extension, {why}"))?;
            let program = check_program(Path::new(program)).map_err(|why| format!("{name}: {program}: {why}"))?;
            if programs.insert(name.to_owned(), program).is_some() {
                return Err(format!("{name} is given twice"));
            }
        }
        Ok(Self(programs))
    }

    /// The labels by which the worker announces what it allows.
    pub(crate) fn labels(&self) -> impl Iterator<Item = (String, String)> + '_ {
        self.0.keys().map(|name| (extension_label(name), ALLOWED.to_owned()))
    }

    /// The program of an extension that may send nothing for so long. `None`: it is not allowed.
    pub(crate) fn program(&self, name: &str, silence: Duration) -> Option<ExtensionProgram> {
        let program = self.0.get(name)?.clone();
        let name = name.to_owned();
        Some(ExtensionProgram { name, program, silence })
    }
}

/// Checks a program, and returns its path without links.
fn check_program(program: &Path) -> Result<PathBuf, String> {
    if !program.is_absolute() {
        return Err("expected an absolute path".to_owned());
    }
    let real = program.canonicalize().map_err(|error| error.to_string())?;
    let metadata = real.metadata().map_err(|error| error.to_string())?;
    if !metadata.is_file() || metadata.permissions().mode() & 0o111 == 0 {
        return Err("expected an executable file (chmod +x)".to_owned());
    }
    // Its folder is readable for it, so it must not be one that holds everything.
    let folder_is_root = real.parent().is_none_or(|folder| folder.parent().is_none());
    let home = std::env::var_os("HOME")
        .map(PathBuf::from)
        .and_then(|home| home.canonicalize().ok());
    if folder_is_root || home.is_some_and(|home| real.parent() == Some(&home)) {
        return Err("put the program into a folder of its own: it may read the folder that it is in".to_owned());
    }
    Ok(real)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<AllowedExtensions, String> {
        AllowedExtensions::parse(&[text.to_owned()])
    }

    #[test]
    fn only_named_programs_are_allowed() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().canonicalize().unwrap().join("program");
        std::fs::write(&program, "#!/bin/sh\n").unwrap();
        let text = format!("my-tool={}", program.display());
        assert!(parse(&text).unwrap_err().contains("executable"));
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let allowed = parse(&text).unwrap();
        assert_eq!(allowed.program("my-tool", Duration::ZERO).unwrap().program, program);
        assert_eq!(allowed.program("other", Duration::ZERO), None);
        assert_eq!(
            allowed.labels().collect::<Vec<_>>(),
            [("extension:my-tool".into(), "allowed".into())]
        );
        assert!(
            AllowedExtensions::parse(&[text.clone(), text])
                .unwrap_err()
                .contains("twice")
        );
        for (wrong, expected) in [
            ("my-tool", "NAME=/PATH"),
            ("My=/bin/sh", "the name of an extension"),
            ("a=sh", "absolute"),
            ("a=/no/such/program", "No such file"),
            ("a=/usr", "executable"),
        ] {
            assert!(parse(wrong).unwrap_err().contains(expected), "{wrong}");
        }
        assert!(parse("").unwrap().labels().next().is_none());
    }
}
