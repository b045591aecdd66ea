//! Hugging Face tokens that a worker's owner keeps for users of the cluster: `FOLDER/USER/NAME`. A job names a token of
//! its own user; the token itself is sent only to the hub.

use aitk_common::id::UserName;
use aitk_common::job::cluster::SecretName;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;

/// The largest token file, in bytes: larger than any token.
const MAX_TOKEN_BYTES: u64 = 4 << 10;

/// The folder with the tokens, if there is one.
#[derive(Clone, Debug, Default)]
pub(crate) struct UserTokens(Option<PathBuf>);

impl UserTokens {
    /// Warns of a folder that does not exist. It may be mounted later.
    pub(crate) fn new(folder: Option<PathBuf>) -> Self {
        if let Some(folder) = folder.as_deref().filter(|folder| !folder.is_dir()) {
            tracing::warn!(
                "--hub-secrets: {} is not a folder: until it is, jobs that name a token of their user (cluster.hub_token) fail",
                folder.display()
            );
        }
        Self(folder)
    }

    /// Reads the token that a job of this user names.
    ///
    /// # Errors
    /// The reason, without the token.
    pub(crate) fn token(&self, owner: Option<&UserName>, name: &SecretName) -> Result<String, String> {
        let name = &name.0;
        let Some(owner) = owner else {
            return Err(format!(
                "cluster.hub_token: {name}: the coordinator does not say whose job this is; update it"
            ));
        };
        let Some(folder) = &self.0 else {
            return Err(format!(
                "cluster.hub_token: {name}: this worker keeps no tokens of users; its owner gives it a folder (--hub-secrets) with \
                 the token in the file {owner}/{name}"
            ));
        };
        // Neither name can lead out of the folder.
        if UserName::parse(owner.as_str()).is_err() || !SecretName::is_name(name) {
            return Err(format!(
                "cluster.hub_token: {name:?} of user {owner:?} is not the name of a secret"
            ));
        }
        let error_message =
            |problem: String| format!("cluster.hub_token: {name} of user {owner} on this worker: {problem}");
        // On file systems that ignore case `Anna` opens `anna`, who is another user.
        let entries = std::fs::read_dir(folder).map_err(|error| error_message(error.to_string()))?;
        let is_there = entries.flatten().any(|entry| entry.file_name() == owner.as_str());
        let mut options = std::fs::OpenOptions::new();
        // A pipe would block the worker, and a link could lead out of the folder.
        options
            .read(true)
            .custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK);
        let opened = match is_there {
            true => options.open(folder.join(owner.as_str()).join(name)),
            false => Err(std::io::ErrorKind::NotFound.into()),
        };
        let file = opened.map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => error_message(format!(
                "the token does not exist; the worker's owner puts the token into {owner}/{name} in the folder of --hub-secrets"
            )),
            _ => error_message(error.to_string()),
        })?;
        let data = file.metadata().map_err(|error| error_message(error.to_string()))?;
        if !data.is_file() || data.len() > MAX_TOKEN_BYTES {
            return Err(error_message("expected a small file with the token".to_owned()));
        }
        if data.mode() & 0o077 != 0 {
            return Err(error_message("others can read its file; chmod 600 it".to_owned()));
        }
        let mut text = String::new();
        let read = file.take(MAX_TOKEN_BYTES).read_to_string(&mut text);
        read.map_err(|error| error_message(error.to_string()))?;
        let token = text.trim();
        if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(error_message("its file contains no token".to_owned()));
        }
        Ok(token.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_user_gets_only_their_own_tokens() {
        let folder = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str, mode: u32| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        put("anna/hf", " hf_annas\n", 0o600);
        put("anna/open", "hf_open", 0o644);
        put("anna/empty", "\n", 0o600);
        put("ben/hf", "hf_bens", 0o600);
        put("outside", "hf_outside", 0o600);
        std::os::unix::fs::symlink(folder.path().join("outside"), folder.path().join("anna/link")).unwrap();
        nix::unistd::mkfifo(&folder.path().join("anna/pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let tokens = UserTokens::new(Some(folder.path().to_owned()));
        let (anna, ben) = (UserName::new("anna"), UserName::new("ben"));
        let named = |name: &str| SecretName(name.to_owned());
        assert_eq!(tokens.token(Some(&anna), &named("hf")), Ok("hf_annas".to_owned()));
        assert_eq!(tokens.token(Some(&ben), &named("hf")), Ok("hf_bens".to_owned()));
        for (owner, name, expected) in [
            (&anna, "other", "does not exist"),
            (&anna, "open", "chmod 600"),
            (&anna, "empty", "contains no token"),
            (&anna, "../outside", "not the name of a secret"),
            (&anna, "../ben/hf", "not the name of a secret"),
            (&anna, "..", "not the name of a secret"),
            (&UserName::new(".."), "outside", "not the name of a secret"),
            (&anna, "pipe", "expected a small file"),
            (&anna, "link", "cluster.hub_token: link of user anna"),
        ] {
            let error = tokens.token(Some(owner), &named(name)).unwrap_err();
            assert!(error.contains(expected) && !error.contains("hf_"), "{name}: {error}");
        }
        assert!(tokens.token(None, &named("hf")).unwrap_err().contains("whose job"));
        let none = UserTokens::default().token(Some(&anna), &named("hf")).unwrap_err();
        assert!(none.contains("--hub-secrets") && none.contains("anna/hf"), "{none}");
    }
}
