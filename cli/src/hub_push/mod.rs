//! Uploads the results of a training to Hugging Face: `aitk push`, and `save.push_to_hub` of `aitk run`.

mod files;
mod model_card;

use crate::config::{self, ReadOptions};
use crate::context::env;
use crate::exit::Exit;
use crate::failure::Failure;
use crate::output::Ui;
use crate::output::format::{plural, printable, shell_word, size};
use aitk_common::hub::HubEnvironment;
use aitk_common::hub::push::{HubWriter, PushError, Pushed, Source, Upload, check_endpoint};
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::repository::is_repository;
use aitk_common::job::{dotenv, env_with};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// What to upload, and where to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Push {
    /// The run folder.
    pub folder: PathBuf,
    /// The repository, `ORG/NAME`.
    pub repo: String,
    /// Whether a new repository is private.
    pub private: bool,
}

/// The files of a push.
#[derive(Clone, Debug)]
pub struct PushPlan {
    push: Push,
    files: Vec<Upload>,
}

impl Push {
    /// The push of a training whose config has `push_to_hub`. `job`: the job's name; `directory`: what its paths are relative to.
    #[must_use]
    pub fn of_training(process: &TrainerProcess, job: &str, directory: &Path) -> Option<Self> {
        let repo = process.save.hf_repo_id.clone().filter(|_| process.save.push_to_hub)?;
        let root = process.training_folder.as_deref().unwrap_or("output");
        let name = process.name.as_deref().filter(|name| !name.is_empty()).unwrap_or(job);
        Some(Self {
            folder: crate::paths::expand(root, directory, &env).join(name),
            repo,
            private: process.save.hf_private,
        })
    }

    /// The command that uploads the same.
    #[must_use]
    pub fn command(&self) -> String {
        let folder = shell_word(&printable(&self.folder.display().to_string()));
        let private = if self.private { " --private" } else { "" };
        format!("aitk push {folder} --repo {}{private}", printable(&self.repo))
    }

    /// Checks before a training that its results may be uploaded at its end, as far as the hub says. A hub that cannot be reached is a
    /// warning.
    ///
    /// # Errors
    /// When there is no token, or the hub does not accept it.
    pub async fn check(&self, ui: &Ui, directory: &Path) -> Result<(), Failure> {
        check_repository(&self.repo)?;
        let (endpoint, token) = hub(directory)?;
        let checked = match HubWriter::new(&endpoint, &token, &self.repo) {
            Ok(writer) => writer.check_token().await,
            Err(error) => Err(error),
        };
        match checked {
            Ok(()) => Ok(()),
            Err(error @ PushError::NotAllowed { .. }) => {
                Err(Failure::new(Exit::Unauthorised, printable(&error.to_string())))
            }
            Err(error) => {
                ui.warn(&format!(
                    "whether {endpoint} accepts the token is not known: {}",
                    printable(&error.to_string())
                ));
                Ok(())
            }
        }
    }

    /// Reads which files there are, and writes the model card unless the folder has a README.md.
    ///
    /// # Errors
    /// When the folder has no saves, or the name of the repository is invalid.
    pub fn plan(self, ui: &Ui, directory: &Path) -> Result<PushPlan, Failure> {
        check_repository(&self.repo)?;
        let mut files = files::files(&self.folder)?;
        if !files.iter().any(|file| file.name == files::README) {
            let (name, process) = training(&self.folder, directory).unwrap_or_else(|failure| {
                ui.warn(&format!(
                    "the model card names neither the base model nor prompts, because the config cannot be read: {}",
                    printable(&failure.message)
                ));
                (String::new(), None)
            });
            let folder_name = self
                .folder
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            let name = if name.is_empty() { folder_name } else { name };
            let card = model_card::model_card(&printable(&name), &self.repo, process.as_ref(), &files);
            files.push(Upload {
                name: files::README.to_owned(),
                source: Source::Text(card),
            });
        }
        Ok(PushPlan { push: self, files })
    }
}

impl PushPlan {
    /// The files, by their names in the repository, with their sizes in bytes.
    #[must_use]
    pub fn files(&self) -> Vec<(&str, u64)> {
        self.files
            .iter()
            .map(|file| (file.name.as_str(), file_size(file)))
            .collect()
    }

    /// Uploads the files.
    ///
    /// # Errors
    /// When there is no token, the hub refuses it, or it cannot be reached.
    pub async fn upload(&self, ui: &Ui, directory: &Path, message: &str) -> Result<Pushed, Failure> {
        let (endpoint, token) = hub(directory)?;
        let writer = HubWriter::new(&endpoint, &token, &self.push.repo).map_err(|error| self.failure(error))?;
        writer
            .create(self.push.private)
            .await
            .map_err(|error| self.failure(error))?;
        let total: u64 = self.files.iter().map(file_size).sum();
        let indicator = Mutex::new(ui.byte_progress("uploading", total));
        let sent = |bytes| {
            if let Ok(mut indicator) = indicator.lock() {
                indicator.add(bytes);
            }
        };
        let pushed = writer.push(&self.files, message, &sent).await;
        drop(indicator);
        let pushed = pushed.map_err(|error| self.failure(error))?;
        ui.notice(&format!(
            "uploaded {} ({}, {} of them sent as large files) to {}",
            plural(self.files.len() as u64, "file"),
            size(total),
            size(pushed.sent_bytes),
            pushed.page
        ));
        Ok(pushed)
    }

    fn failure(&self, error: PushError) -> Failure {
        let again = format!(
            "`{}` uploads it again; what the hub has already is not sent twice",
            self.push.command()
        );
        let exit = match &error {
            PushError::Unavailable(_) => Exit::Unreachable,
            PushError::NotAllowed { .. } => Exit::Unauthorised,
            _ => Exit::Failed,
        };
        Failure::new(exit, printable(&error.to_string())).hint(again)
    }
}

/// The hub's address and the user's token: of the environment, or of `.env` in the current folder.
///
/// # Errors
/// Without a token, with one that cannot be sent, with an address that must not get it, or when `HF_HUB_OFFLINE` is set.
pub fn hub(directory: &Path) -> Result<(String, String), Failure> {
    let variables = dotenv(directory).map_err(|error| Failure::failed(error.to_string()))?;
    let environment = HubEnvironment::from_env(&env_with(variables));
    if environment.offline {
        return Err(Failure::new(
            Exit::Unreachable,
            "HF_HUB_OFFLINE is set, so that nothing is uploaded to Hugging Face: unset it to upload",
        ));
    }
    check_endpoint(&environment.endpoint).map_err(|error| Failure::usage(printable(&error.to_string())))?;
    match environment.token {
        Some(token) if !token.bytes().all(|byte| byte.is_ascii_graphic()) => Err(Failure::new(
            Exit::Unauthorised,
            "HF_TOKEN is not a token: it has a space, a line break or another character that no token has",
        )),
        Some(token) => Ok((environment.endpoint, token)),
        None => Err(Failure::new(Exit::Unauthorised, "there is no token for Hugging Face").hint(format!(
            "create one with the right to write at {}/settings/tokens, and set HF_TOKEN (or write it to .env, or run `hf auth login`)",
            environment.endpoint
        ))),
    }
}

/// The name and the training of a run folder's config.
fn training(folder: &Path, directory: &Path) -> Result<(String, Option<TrainerProcess>), Failure> {
    let names = ["config.yaml", "config.json", "config.jsonc"];
    let Some(path) = names.iter().map(|name| folder.join(name)).find(|path| path.is_file()) else {
        return Err(Failure::not_found(format!("{} has no config", folder.display())));
    };
    let (loaded, _warnings) = config::read_with_warnings(&path, directory, ReadOptions::default())?;
    let spec = loaded.spec;
    let own_name = folder.file_name().and_then(|name| name.to_str());
    let trainings = spec.process.iter().filter_map(|process| process.trainer());
    let name_of = |process: &TrainerProcess| process.name.clone().filter(|name| !name.is_empty());
    let process = trainings
        .clone()
        .find(|process| name_of(process).as_deref() == own_name)
        .or_else(|| trainings.clone().next())
        .cloned();
    Ok((spec.name, process))
}

fn check_repository(repo: &str) -> Result<(), Failure> {
    match is_repository(repo) {
        true => Ok(()),
        false => Err(Failure::usage(format!(
            "{} is not the name of a repository: expected ORG/NAME or USER/NAME, such as me/my_lora",
            printable(repo)
        ))),
    }
}

fn file_size(file: &Upload) -> u64 {
    match &file.source {
        Source::Text(text) => text.len() as u64,
        Source::File(path) => std::fs::metadata(path).map_or(0, |info| info.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without `--private` it would make a public repository where none exists yet.
    #[test]
    fn the_command_of_a_push_makes_the_same_repository() {
        let push = |folder: &str, private| Push {
            folder: PathBuf::from(folder),
            repo: "me/cat".to_owned(),
            private,
        };
        assert_eq!(
            push("/output/my lora", true).command(),
            "aitk push '/output/my lora' --repo me/cat --private"
        );
        assert_eq!(
            push("/output/cat", false).command(),
            "aitk push /output/cat --repo me/cat"
        );
    }
}
