//! Which paths a job may name when it does not run in place.

use super::error::Finding;
use super::repository::is_repository;
use super::schema::{Input, InputKind};
use super::spec::JobSpec;

/// Maximum characters of a path in a message.
const SHOWN: usize = 120;

impl JobSpec {
    /// Returns an error for each path that the job may not name. Each path must be an input that was sent with the job
    /// (`is_input`) or, for a model, the name of a repository. The file system is not read, so the result does not reveal
    /// whether a file exists on this machine.
    #[must_use]
    pub fn foreign_paths(&self, is_input: impl Fn(&str) -> bool) -> Vec<Finding> {
        let foreign = |input: &Input| !is_input(&input.config_path) && !input.may_be_repository();
        self.inputs()
            .into_iter()
            .filter(foreign)
            .map(|input| self.finding(input.key, not_an_input_message(&input.config_path)))
            .collect()
    }

    /// The Hugging Face repositories that the job's models come from.
    pub fn repositories<'a>(&'a self, is_input: impl Fn(&str) -> bool + 'a) -> impl Iterator<Item = Input> + 'a {
        let from_hub = move |input: &Input| input.may_be_repository() && !is_input(&input.config_path);
        self.inputs().into_iter().filter(from_hub)
    }
}

impl Input {
    /// Whether this can be a repository: a model with a name like `ORG/NAME`.
    #[must_use]
    pub fn may_be_repository(&self) -> bool {
        matches!(self.kind, InputKind::Model | InputKind::LanguageModel | InputKind::Vae)
            && is_repository(&self.config_path)
    }
}

/// The message about a path that is not an input of its job; the same whether the path exists or not.
#[must_use]
pub fn not_an_input_message(path: &str) -> String {
    let mut shown: String = path.chars().take(SHOWN).flat_map(char::escape_debug).collect();
    if path.chars().nth(SHOWN).is_some() {
        shown.push('…');
    }
    format!(
        "`{shown}` is not an input of this job: a job may read only files that were sent with it, and models \
         by repository name (ORG/NAME); submit the config again with `aitk submit`, which sends the files it names"
    )
}

#[cfg(test)]
mod tests;
