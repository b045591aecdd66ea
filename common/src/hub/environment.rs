//! What the environment says about Hugging Face: the variables and files of its own libraries.

use super::ENDPOINT;
use crate::fsutil::regular;
use std::io::Read;
use std::path::PathBuf;

/// The size limit of a file with a token.
const MAX_TOKEN_BYTES: u64 = 4096;

/// The hub's address, the user's token, and the folder where Hugging Face's libraries keep models.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HubEnvironment {
    /// `HF_ENDPOINT`.
    pub endpoint: String,
    /// `HF_TOKEN`, or the token that `hf auth login` saved: the file `HF_TOKEN_PATH`, by default `token` in `HF_HOME`.
    pub token: Option<String>,
    /// `HF_HUB_CACHE`, by default `hub` in `HF_HOME`; `HF_HOME` is by default `~/.cache/huggingface`. `None` without a home.
    pub cache: Option<PathBuf>,
    /// `HF_HUB_OFFLINE`: no request goes to the hub.
    pub offline: bool,
}

impl HubEnvironment {
    /// Reads it from an environment. An empty variable counts as unset.
    #[must_use]
    pub fn from_env(env: &dyn Fn(&str) -> Option<String>) -> Self {
        let set = |name: &str| env(name).filter(|value| !value.trim().is_empty());
        // A file for systemd or Docker has no shell that replaces the tilde; Hugging Face's libraries do it too.
        let folder = |name: &str| {
            let path = set(name)?;
            let in_home = path
                .strip_prefix('~')
                .filter(|rest| rest.is_empty() || rest.starts_with('/'));
            Some(match (in_home, set("HOME")) {
                (Some(rest), Some(home)) => PathBuf::from(home + rest),
                _ => PathBuf::from(path),
            })
        };
        let home = folder("HF_HOME").or_else(|| {
            let caches = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")));
            Some(caches?.join("huggingface"))
        });
        let token_file = folder("HF_TOKEN_PATH").or_else(|| Some(home.as_ref()?.join("token")));
        Self {
            endpoint: set("HF_ENDPOINT")
                .map(|url| url.trim().to_owned())
                .unwrap_or_else(|| ENDPOINT.to_owned()),
            token: set("HF_TOKEN")
                .map(|token| token.trim().to_owned())
                .or_else(|| saved_token(token_file?)),
            // The values that Hugging Face's libraries take for true.
            offline: set("HF_HUB_OFFLINE")
                .is_some_and(|value| matches!(value.trim().to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on")),
            cache: folder("HF_HUB_CACHE").or_else(|| Some(home?.join("hub"))),
        }
    }
}

/// The token in a file. `None` if there is no such file, or it holds anything but one line of printable ASCII.
fn saved_token(path: PathBuf) -> Option<String> {
    let (file, _) = regular::open(&path).ok()?;
    let mut text = String::new();
    file.take(MAX_TOKEN_BYTES).read_to_string(&mut text).ok()?;
    let token = text.trim();
    let is_token = !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic());
    is_token.then(|| token.to_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> HubEnvironment {
        let variables: Vec<(String, String)> = variables.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
        HubEnvironment::from_env(&move |name| {
            let found = variables.iter().find(|(key, _)| key == name);
            found.map(|(_, value)| value.clone())
        })
    }

    #[test]
    fn variables_name_the_folders_of_hugging_face() {
        let cache = |variables: &[(&str, &str)]| of(variables).cache;
        assert_eq!(cache(&[]), None);
        assert_eq!(cache(&[("HOME", "/h")]), Some("/h/.cache/huggingface/hub".into()));
        assert_eq!(
            cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]),
            Some("/x/huggingface/hub".into())
        );
        assert_eq!(cache(&[("HOME", "/h"), ("HF_HOME", "/f")]), Some("/f/hub".into()));
        assert_eq!(cache(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")]), Some("/c".into()));
        assert_eq!(cache(&[("HOME", "/h"), ("HF_HOME", "~/f")]), Some("/h/f/hub".into()));
        assert_eq!(cache(&[("HOME", "/h"), ("HF_HUB_CACHE", "~")]), Some("/h".into()));
        assert_eq!(
            cache(&[("HOME", "/h"), ("HF_HOME", "~ada/f")]),
            Some("~ada/f/hub".into())
        );
        assert_eq!(of(&[("HF_ENDPOINT", " ")]).endpoint, ENDPOINT);
        for (value, offline) in [
            ("1", true),
            ("ON", true),
            ("0", false),
            ("False", false),
            ("no", false),
            ("n", false),
            ("2", false),
            ("", false),
        ] {
            assert_eq!(of(&[("HF_HUB_OFFLINE", value)]).offline, offline, "{value}");
        }
    }

    #[test]
    fn a_token_comes_from_the_variable_or_from_the_file_that_a_login_wrote() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().to_str().unwrap();
        let token = |variables: &[(&str, &str)]| of(variables).token;
        assert_eq!(token(&[("HF_HOME", home)]), None, "no file");
        for (content, expected) in [
            ("hf_saved\n", Some("hf_saved")),
            ("", None),
            ("two\nlines", None),
            ("\u{1b}[2J", None),
        ] {
            std::fs::write(dir.path().join("token"), content).unwrap();
            assert_eq!(token(&[("HF_HOME", home)]).as_deref(), expected, "{content:?}");
        }
        std::fs::write(dir.path().join("token"), "hf_saved").unwrap();
        assert_eq!(
            token(&[("HF_HOME", home), ("HF_TOKEN", "hf_set")]).as_deref(),
            Some("hf_set")
        );
        assert_eq!(token(&[("HF_TOKEN", " hf_set\n")]).as_deref(), Some("hf_set"));
        std::fs::write(dir.path().join("other"), "hf_other").unwrap();
        let other = dir.path().join("other");
        let other = other.to_str().unwrap();
        assert_eq!(
            token(&[("HF_HOME", home), ("HF_TOKEN_PATH", other)]).as_deref(),
            Some("hf_other")
        );
    }
}
