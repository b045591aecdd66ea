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
    /// Reads the values of `--allow-extension`: `NAME=PROGRAM`. `directory`: the folder that relative paths begin at.
    ///
    /// # Errors
    /// The value, and what is wrong with it.
    pub(crate) fn parse(texts: &[String], directory: &Path) -> Result<Self, String> {
        let mut programs = BTreeMap::new();
        for text in texts.iter().filter(|text| !text.trim().is_empty()) {
            let wrong = |why: &str| format!("{text}: {why}");
            let (name, program) = match text.split_once('=') {
                Some((name, program)) if !program.is_empty() => (name, program),
                _ => {
                    return Err(wrong(
                        "expected NAME=PROGRAM, the name of the extension and the path of its program",
                    ));
                }
            };
            check_extension_name(name).map_err(|why| wrong(&format!("the name of an extension, {why}")))?;
            let program = check_program(&directory.join(program)).map_err(|why| wrong(&why))?;
            if programs.insert(name.to_owned(), program).is_some() {
                return Err(wrong(&format!("the extension `{name}` is given twice")));
            }
        }
        Ok(Self(programs))
    }

    /// The same values as absolute paths without links.
    fn values(&self) -> Vec<String> {
        let value = |(name, program): (&String, &PathBuf)| format!("{name}={}", program.display());
        self.0.iter().map(value).collect()
    }

    /// Refuses a program that could read the worker's own data: its key, and the inputs of all users. `data_dir` is without links.
    ///
    /// # Errors
    /// The value of `--allow-extension`, and what is wrong with it.
    pub(crate) fn check_data_dir(&self, data_dir: &Path) -> Result<(), String> {
        let holds_data = |program: &Path| program.parent().is_some_and(|folder| data_dir.starts_with(folder));
        match self.0.iter().find(|(_, program)| holds_data(program)) {
            None => Ok(()),
            Some((name, program)) => Err(format!(
                "{name}={}: put the program into a folder of its own: it may read the folder that it is in, and that holds the worker's \
                 data folder {}",
                program.display(),
                data_dir.display()
            )),
        }
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

/// Checks the values of `--allow-extension`, `NAME=PROGRAM`, and makes their paths absolute. `directory`: the folder that relative
/// paths begin at.
///
/// # Errors
/// The first wrong value, and what is wrong with it: an error of the command line.
pub fn check_allowed_programs(values: &[String], directory: &Path) -> Result<Vec<String>, String> {
    let allowed = AllowedExtensions::parse(values, directory)?;
    Ok(allowed.values())
}

/// Checks a program, and returns its path without links.
fn check_program(program: &Path) -> Result<PathBuf, String> {
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
        AllowedExtensions::parse(&[text.to_owned()], Path::new("/"))
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
            AllowedExtensions::parse(&[text.clone(), text], Path::new("/"))
                .unwrap_err()
                .contains("twice")
        );
        let real = folder.path().canonicalize().unwrap();
        for (data_dir, is_refused) in [
            (real.clone(), true),
            (real.join("data/worker"), true),
            (real.with_extension("data"), false),
        ] {
            let refused = allowed
                .check_data_dir(&data_dir)
                .is_err_and(|why| why.starts_with("my-tool="));
            assert_eq!(refused, is_refused, "{}", data_dir.display());
        }
        let relative = ["my-tool=program".to_owned()];
        let absolute = check_allowed_programs(&relative, folder.path()).unwrap();
        assert_eq!(absolute, [format!("my-tool={}", program.display())]);
        for (wrong, expected) in [
            ("my-tool", "my-tool: expected NAME=PROGRAM"),
            ("my-tool=", "my-tool=: expected NAME=PROGRAM"),
            ("=/bin/sh", "=/bin/sh: the name of an extension"),
            ("My=/bin/sh", "My=/bin/sh: the name of an extension"),
            ("a=no-such-program", "a=no-such-program: No such file"),
            ("a=/no/such/program", "No such file"),
            ("a=/usr", "executable"),
        ] {
            assert!(parse(wrong).unwrap_err().contains(expected), "{wrong}");
        }
        assert!(parse("").unwrap().labels().next().is_none());
    }
}
