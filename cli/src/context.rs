//! The context of a command: global flags, folders, environment.

use crate::api::Api;
use crate::args::Global;
use crate::failure::Failure;
use crate::output::Ui;
use crate::paths::Paths;
use crate::settings::{Flags, Settings};
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

impl Context {
    /// Creates the context from the environment and the current folder.
    ///
    /// # Errors
    /// When the current folder does not exist any more.
    pub fn new(global: Global) -> Result<Self, Failure> {
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
        Api::from_settings(&self.settings()?).await
    }

    /// Creates the output for this command.
    #[must_use]
    pub fn ui(&self, no_progress: bool) -> Ui {
        Ui::from_env(&env, self.global.no_color, no_progress).verbose(self.global.verbose > 0)
    }
}
