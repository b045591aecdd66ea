//! Which parts of a repository are fetched.

/// Which parts of a repository a job needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RepositoryParts {
    /// The whole model.
    All,
    /// Text encoders, tokenizers, VAE and scheduler of a model, without its denoiser, which takes most of the bytes and is not used.
    Extras,
}

impl RepositoryParts {
    /// What the config key that names a repository needs of it.
    pub(crate) fn of_key(key: &str) -> Self {
        match [".extras_name_or_path", ".te_name_or_path"]
            .iter()
            .any(|end| key.ends_with(end))
        {
            true => Self::Extras,
            false => Self::All,
        }
    }
}
