//! The context of a command: global flags, folders, environment.

use crate::api::Api;
use crate::args::Global;
use crate::failure::Failure;
use crate::output::Ui;
use crate::paths::Paths;
use crate::settings::{Flags, Settings};
use std::ffi::OsString;
use std::path::PathBuf;

/// The context of a command.
pub struct Context {
    /// Global flags.
    pub global: Global,
    /// This user's folders.
    pub paths: Paths,
    /// The folder that the command runs in.
    pub directory: PathBuf,
}

/// Reads a variable of the process environment. A value that is not UTF-8 counts as unset.
#[must_use]
pub fn env(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The variables that name the folders of this user.
const FOLDER_VARIABLES: [&str; 5] = [
    "HOME",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
    "XDG_CACHE_HOME",
    "XDG_STATE_HOME",
];

/// Refuses a folder of this user that is not UTF-8 text: it would count as unset, and other folders would be used in its place.
fn check_folders(env: impl Fn(&'static str) -> Option<OsString>) -> Result<(), Failure> {
    let set = FOLDER_VARIABLES.into_iter().filter_map(|name| Some((name, env(name)?)));
    let mut wrong = set.filter(|(_, value)| value.to_str().is_none());
    match wrong.next() {
        None => Ok(()),
        Some((name, value)) => Err(Failure::failed(format!(
            "the variable {name} is not UTF-8 text: {}",
            PathBuf::from(value).display()
        ))
        .hint(format!("set {name} to a folder whose path is UTF-8 text"))),
    }
}

impl Context {
    /// Creates the context from the environment and the current folder.
    ///
    /// # Errors
    /// When the current folder does not exist any more, or a folder of this user is not UTF-8 text.
    pub fn new(global: Global) -> Result<Self, Failure> {
        check_folders(std::env::var_os)?;
        let directory = std::env::current_dir()
            .map_err(|error| Failure::failed(format!("the current folder cannot be used: {error}")))?;
        Ok(Self {
            global,
            paths: Paths::from_env(&env),
            directory,
        })
    }

    /// Returns which coordinator and which token to use.
    ///
    /// # Errors
    /// When a settings file is wrong.
    pub fn settings(&self) -> Result<Settings, Failure> {
        let flags = Flags {
            server: self.global.server.clone(),
            token_file: self.global.token_file.clone(),
            ca_file: self.global.ca_file.clone(),
        };
        Settings::resolve(&flags, &env, &self.directory, &self.paths)
    }

    /// Connects to the coordinator.
    ///
    /// # Errors
    /// As [`Api::from_settings`].
    pub async fn api(&self) -> Result<Api, Failure> {
        let ui = self.ui(true);
        let api = Api::from_settings(&self.settings()?).await?;
        Ok(api.with_wait_notice(move |text| ui.notice(text)))
    }

    /// Creates the output for this command.
    #[must_use]
    pub fn ui(&self, no_progress: bool) -> Ui {
        Ui::from_env(&env, self.global.no_color, no_progress).verbose(self.global.verbose > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::check_folders;
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt;

    #[test]
    fn a_folder_that_is_not_utf_8_is_refused_by_its_variable() {
        let env = |variable: &'static str, value: &'static [u8]| {
            move |name: &'static str| (name == variable).then(|| OsString::from_vec(value.to_vec()))
        };
        assert!(check_folders(|_| None).is_ok());
        assert!(check_folders(env("HOME", "/home/ä".as_bytes())).is_ok());
        for name in ["HOME", "XDG_STATE_HOME"] {
            let error = check_folders(env(name, b"/home/\xff")).unwrap_err().render(false);
            assert!(error.contains(&format!("{name} is not UTF-8 text")), "{error}");
        }
    }
}
