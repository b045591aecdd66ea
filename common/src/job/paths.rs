//! What the paths of a job may be when it does not run in place.

use super::error::Finding;
use super::repository::is_repository;
use super::schema::{Input, InputKind};
use super::spec::JobSpec;

/// Characters of a path that a message repeats.
const SHOWN: usize = 120;

impl JobSpec {
    /// Which paths a job may not name when it runs in an attempt of its own: each has to be an input that was sent with
    /// the job (`is_input`) or, for a model, the name of a repository. Nothing is looked up on this machine, so the answer
    /// is the same whether such a file is here or not.
    #[must_use]
    pub fn foreign_paths(&self, is_input: impl Fn(&str) -> bool) -> Vec<Finding> {
        let foreign = |input: &Input| !is_input(&input.config_path) && !input.may_be_repository();
        self.inputs()
            .into_iter()
            .filter(foreign)
            .map(|input| self.finding(input.key, not_an_input_message(&input.config_path)))
            .collect()
    }

    /// The repositories on Hugging Face that the job's models come from.
    pub fn repositories<'a>(&'a self, is_input: impl Fn(&str) -> bool + 'a) -> impl Iterator<Item = Input> + 'a {
        let from_hub = move |input: &Input| input.may_be_repository() && !is_input(&input.config_path);
        self.inputs().into_iter().filter(from_hub)
    }
}

impl Input {
    /// Whether this can name a repository: a model that is called `ORG/NAME`.
    #[must_use]
    pub fn may_be_repository(&self) -> bool {
        matches!(self.kind, InputKind::Model | InputKind::Vae) && is_repository(&self.config_path)
    }
}

/// What is said of a path that is no input of its job; the same whether it exists or not.
#[must_use]
pub fn not_an_input_message(path: &str) -> String {
    let mut shown: String = path.chars().take(SHOWN).flat_map(char::escape_debug).collect();
    if path.chars().nth(SHOWN).is_some() {
        shown.push('…');
    }
    format!(
        "`{shown}` is not an input of this job: a job reads what was sent with it, and models by the name of their \
         repository (ORG/NAME); submit the config again with `aitk submit`, which sends what it names"
    )
}

#[cfg(test)]
mod tests;
