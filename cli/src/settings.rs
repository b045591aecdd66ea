//! Settings: the coordinator, the token, the webhook, and where each of them was set.
//!
//! Precedence: flag > environment > `./aitk.yaml` > settings file > a running `aitk up`. For the webhook: flag >
//! environment > settings file; `./aitk.yaml` cannot set it, because somebody else may have written that file.

use crate::failure::Failure;
use crate::paths::{Paths, expand};
use aitk_common::fsutil;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Where a setting comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A flag of this command line.
    Flag(&'static str),
    /// An environment variable.
    Env(&'static str),
    /// `aitk.yaml` in the current folder.
    Project(PathBuf),
    /// The user's settings file.
    User(PathBuf),
    /// The state file of a running `aitk up` on this machine.
    Up(PathBuf),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(flag) => write!(f, "flag {flag}"),
            Self::Env(name) => write!(f, "environment variable {name}"),
            Self::Project(path) => write!(f, "project file {}", path.display()),
            Self::User(path) => write!(f, "settings file {}", path.display()),
            Self::Up(path) => write!(f, "`aitk up` on this machine ({})", path.display()),
        }
    }
}

/// A value and its origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting<T> {
    /// The value.
    pub value: T,
    /// Where it was set.
    pub origin: Origin,
}

/// A secret text that `Debug` does not show.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a secret.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns the secret itself.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// The source of the token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenSource {
    /// The token itself (from `AITK_TOKEN`).
    Value(Secret),
    /// A file of mode 0600 with the token.
    File(PathBuf),
}

/// How to reach the coordinator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Its address.
    pub server: Option<Setting<String>>,
    /// The token.
    pub token: Option<Setting<TokenSource>>,
    /// A CA certificate to trust in addition to the system's.
    pub ca_file: Option<Setting<PathBuf>>,
}

/// The settings from flags.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    /// `--server`.
    pub server: Option<String>,
    /// `--token-file`.
    pub token_file: Option<PathBuf>,
    /// `--ca-file`.
    pub ca_file: Option<PathBuf>,
}

/// The state that a running `aitk up` writes for other commands of this user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpState {
    /// Its address: `http://127.0.0.1:7420`.
    pub server: String,
    /// The token file.
    pub token_file: PathBuf,
    /// A CA certificate to trust, if it uses TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_file: Option<PathBuf>,
    /// Its process id.
    pub pid: u32,
    /// Its data folder.
    pub data_dir: PathBuf,
    /// When it started (RFC 3339).
    pub started: String,
}

impl UpState {
    /// Reads the state file of `aitk up`; `None` if there is none.
    ///
    /// # Errors
    /// When the file exists but cannot be read or parsed.
    pub fn read(path: &Path) -> Result<Option<Self>, Failure> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Failure::file("read", path, &error)),
        };
        serde_json::from_str(&text).map(Some).map_err(|error| {
            Failure::failed(format!("{} is not a state file of `aitk up`: {error}", path.display()))
                .hint("delete the file; `aitk up` writes a new one")
        })
    }
}

/// The keys of `aitk.yaml` and of the settings file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct FileSettings {
    server: Option<String>,
    token_file: Option<String>,
    ca_file: Option<String>,
    notify_url: Option<String>,
    notify_private: Option<String>,
}

/// The user's webhook for ended jobs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotifyUrl {
    /// The address, which often contains a secret.
    pub url: Secret,
    /// Whether addresses without TLS and of private networks are allowed.
    pub allow_private: bool,
    /// Where it was set.
    pub origin: Origin,
}

impl NotifyUrl {
    /// Reads the address from the flag, `AITK_NOTIFY_URL`, or `notify_url:` of the settings file. `AITK_NOTIFY_PRIVATE` or
    /// `notify_private:` of the settings file allows private addresses.
    ///
    /// # Errors
    /// When the settings file cannot be read or parsed, or has an address and is readable by others.
    pub fn resolve(
        flag: Option<&str>,
        env: &dyn Fn(&str) -> Option<String>,
        paths: &Paths,
    ) -> Result<Option<Self>, Failure> {
        let env = |name: &str| env(name).filter(|value| !value.trim().is_empty());
        let path = paths.user_config();
        let user = read_file(&path)?;
        let url = with_origin(flag.map(str::to_owned), || Origin::Flag("--notify-url"))
            .or_else(|| with_origin(env("AITK_NOTIFY_URL"), || Origin::Env("AITK_NOTIFY_URL")))
            .or_else(|| with_origin(user.notify_url.clone(), || Origin::User(path.clone())));
        let Some(Setting { value, origin }) = url else {
            return Ok(None);
        };
        if matches!(origin, Origin::User(_)) {
            check_not_readable_by_others(&path)?;
        }
        let (text, from) = match env("AITK_NOTIFY_PRIVATE") {
            Some(text) => (Some(text), "AITK_NOTIFY_PRIVATE".to_owned()),
            None => (user.notify_private, format!("{}: notify_private", path.display())),
        };
        let allow_private = match text.as_deref().map(str::trim) {
            Some("true" | "yes" | "1") => true,
            None | Some("false" | "no" | "0") => false,
            Some(_) => return Err(Failure::usage(format!("{from}: expected true or false"))),
        };
        Ok(Some(Self {
            url: Secret::new(value),
            allow_private,
            origin,
        }))
    }
}

/// Refuses a file that other users may read. A webhook's address is a secret, because anyone who knows it can post to
/// the chat.
fn check_not_readable_by_others(path: &Path) -> Result<(), Failure> {
    let mode = std::fs::metadata(path)
        .map_err(|error| Failure::file("read", path, &error))?
        .permissions()
        .mode();
    if mode & 0o077 == 0 {
        return Ok(());
    }
    Err(Failure::failed(format!(
        "{} has notify_url and is readable by other users (mode {:03o})",
        path.display(),
        mode & 0o777
    ))
    .hint(format!("chmod 600 {}", path.display())))
}

impl Settings {
    /// Reads the settings in order of precedence. `directory` is the current folder.
    ///
    /// # Errors
    /// When a settings file exists but cannot be read or parsed.
    pub fn resolve(
        flags: &Flags,
        env: &dyn Fn(&str) -> Option<String>,
        directory: &Path,
        paths: &Paths,
    ) -> Result<Self, Failure> {
        let env = |name: &str| env(name).filter(|value| !value.is_empty());
        let project_path = directory.join("aitk.yaml");
        let user_path = paths.user_config();
        let project = read_file(&project_path)?;
        if project.notify_url.is_some() || project.notify_private.is_some() {
            return Err(Failure::failed(format!(
                "{}: notify_url and notify_private are settings of the settings file",
                project_path.display()
            ))
            .hint(format!(
                "somebody else may have made this folder, so it must not choose where notifications are sent; move them to {}",
                user_path.display()
            )));
        }
        let user = read_file(&user_path)?;
        let project_dir = directory.to_path_buf();
        let user_dir = user_path.parent().unwrap_or(directory).to_path_buf();
        let in_project = || Origin::Project(project_path.clone());
        let in_user = || Origin::User(user_path.clone());

        let mut server = with_origin(flags.server.clone(), || Origin::Flag("--server"))
            .or_else(|| with_origin(env("AITK_SERVER"), || Origin::Env("AITK_SERVER")))
            .or_else(|| with_origin(project.server.clone(), in_project))
            .or_else(|| with_origin(user.server.clone(), in_user));
        let mut ca_file = with_origin(flags.ca_file.clone(), || Origin::Flag("--ca-file"))
            .or_else(|| with_origin(env("AITK_CA_FILE").map(PathBuf::from), || Origin::Env("AITK_CA_FILE")))
            .or_else(|| {
                with_origin(
                    project.ca_file.as_deref().map(|p| expand(p, &project_dir, &env)),
                    in_project,
                )
            })
            .or_else(|| with_origin(user.ca_file.as_deref().map(|p| expand(p, &user_dir, &env)), in_user));

        let file = |path: PathBuf| TokenSource::File(path);
        let mut token = with_origin(flags.token_file.clone().map(file), || Origin::Flag("--token-file"))
            .or_else(|| {
                let value = env("AITK_TOKEN").map(|text| TokenSource::Value(Secret::new(text.trim())));
                with_origin(value, || Origin::Env("AITK_TOKEN"))
            })
            .or_else(|| {
                with_origin(env("AITK_TOKEN_FILE").map(|p| file(p.into())), || {
                    Origin::Env("AITK_TOKEN_FILE")
                })
            })
            .or_else(|| {
                with_origin(
                    project
                        .token_file
                        .as_deref()
                        .map(|p| file(expand(p, &project_dir, &env))),
                    in_project,
                )
            });
        // Somebody else may have written the project file: the server that it names must not get the user's token.
        if token.is_none()
            && !matches!(
                &server,
                Some(Setting {
                    origin: Origin::Project(_),
                    ..
                })
            )
        {
            token = with_origin(
                user.token_file.as_deref().map(|p| file(expand(p, &user_dir, &env))),
                in_user,
            );
        }

        // A running `aitk up` is used when no server is set, or when the server is its own address. In the second case
        // a token from the settings file does not apply, because it is for the settings file's server.
        let up_path = paths.up_state();
        if let Some(up) = UpState::read(&up_path)?
            && server
                .as_ref()
                .is_none_or(|server| server.value.trim_end_matches('/') == up.server)
        {
            let origin = || Origin::Up(up_path.clone());
            let in_user_file = |origin: &Origin| matches!(origin, Origin::User(_));
            if !server.as_ref().is_some_and(|server| in_user_file(&server.origin)) {
                token = token.filter(|token| !in_user_file(&token.origin));
                ca_file = ca_file.filter(|ca_file| !in_user_file(&ca_file.origin));
            }
            server = server.or_else(|| with_origin(Some(up.server), origin));
            token = token.or_else(|| with_origin(Some(TokenSource::File(up.token_file)), origin));
            ca_file = ca_file.or_else(|| with_origin(up.ca_file, origin));
        }
        Ok(Self { server, token, ca_file })
    }

    /// Returns the address of the coordinator.
    ///
    /// # Errors
    /// When no server is set anywhere.
    pub fn server(&self) -> Result<&Setting<String>, Failure> {
        self.server.as_ref().ok_or_else(|| {
            Failure::usage("no coordinator is set")
                .hint("give --server URL, set AITK_SERVER, or write `server: URL` into ./aitk.yaml")
                .hint("`aitk up` starts a coordinator here; `aitk run CONFIG` needs none")
        })
    }
}

/// Replaces settings in a file; other lines are kept. A setting without a value is removed.
///
/// # Errors
/// When the file cannot be read, parsed or written.
pub fn save(path: &Path, settings: &[(&str, Option<String>)]) -> Result<(), Failure> {
    let is_private = read_file(path)?.notify_url.is_some();
    let old = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(Failure::file("read", path, &error)),
    };
    let named = |line: &str| {
        settings
            .iter()
            .any(|(key, _)| line.split_once(':').is_some_and(|(k, _)| k.trim() == *key))
    };
    let mut text = String::new();
    for line in old.lines().filter(|line| !named(line)) {
        text.push_str(line);
        text.push('\n');
    }
    for (key, value) in settings {
        if let Some(value) = value {
            let quote = if value.contains('"') { '\'' } else { '"' };
            text.push_str(&format!("{key}: {quote}{value}{quote}\n"));
        }
    }
    let write = |out: &mut std::io::BufWriter<&std::fs::File>| std::io::Write::write_all(out, text.as_bytes());
    let written = match is_private {
        true => fsutil::write_private(path, text.as_bytes()),
        false => fsutil::write_atomic(path, write),
    };
    written.map_err(|error| Failure::file("write", path, error.io()))
}

fn with_origin<T>(value: Option<T>, origin: impl FnOnce() -> Origin) -> Option<Setting<T>> {
    value.map(|value| Setting {
        value,
        origin: origin(),
    })
}

fn read_file(path: &Path) -> Result<FileSettings, Failure> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(FileSettings::default()),
        Err(error) => return Err(Failure::file("read", path, &error)),
    };
    parse_file(&text).map_err(|(line, problem)| {
        Failure::failed(format!("{}:{line}: {problem}", path.display()))
            .hint("expected lines `server: URL`, `token_file: PATH`, `ca_file: PATH`; in the settings file also `notify_url: URL` and `notify_private: true`")
    })
}

/// Parses flat `key: value` lines, a small part of YAML: comments and quotes, nothing nested. An error has the line
/// number.
fn parse_file(text: &str) -> Result<FileSettings, (usize, String)> {
    let mut settings = FileSettings::default();
    for (index, line) in text.lines().enumerate() {
        let number = index + 1;
        let bare = line.trim();
        if bare.is_empty() || bare.starts_with('#') || bare == "---" {
            continue;
        }
        if line.starts_with([' ', '\t']) {
            return Err((number, "nested settings are not supported".to_owned()));
        }
        let (key, value) = line
            .split_once(':')
            .ok_or_else(|| (number, "expected `key: value`".to_owned()))?;
        let value = unquote(value.trim()).map_err(|problem| (number, problem))?;
        let slot = match key.trim() {
            "server" => &mut settings.server,
            "token_file" => &mut settings.token_file,
            "ca_file" => &mut settings.ca_file,
            "notify_url" => &mut settings.notify_url,
            "notify_private" => &mut settings.notify_private,
            "token" => {
                let problem = "a token is not allowed in a settings file; put it into a file of its own with mode \
                               0600, and set `token_file` to that file";
                return Err((number, problem.to_owned()));
            }
            other => return Err((number, format!("'{other}' is not a setting"))),
        };
        if slot.is_some() {
            return Err((number, format!("'{}' is set twice", key.trim())));
        }
        *slot = Some(value).filter(|value| !value.is_empty());
    }
    Ok(settings)
}

fn unquote(value: &str) -> Result<String, String> {
    for quote in ['"', '\''] {
        if let Some(rest) = value.strip_prefix(quote) {
            let (inner, after) = rest
                .split_once(quote)
                .ok_or_else(|| "a quote is not closed".to_owned())?;
            let after = after.trim();
            if !after.is_empty() && !after.starts_with('#') {
                return Err("there is text after the closing quote".to_owned());
            }
            return Ok(inner.to_owned());
        }
    }
    let end = value.find(" #").unwrap_or(value.len());
    let value = if value.starts_with('#') {
        ""
    } else {
        value[..end].trim()
    };
    Ok(if matches!(value, "~" | "null") {
        String::new()
    } else {
        value.to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    struct TestHome {
        dir: tempfile::TempDir,
        env: BTreeMap<String, String>,
    }

    impl TestHome {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let home = dir.path().join("home").display().to_string();
            Self {
                dir,
                env: BTreeMap::from([("HOME".to_owned(), home)]),
            }
        }

        fn write(&self, name: &str, text: &str) {
            let path = self.dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }

        fn resolve(&self, flags: &Flags) -> Result<Settings, Failure> {
            let env = |name: &str| self.env.get(name).cloned();
            Settings::resolve(flags, &env, self.dir.path(), &Paths::from_env(&env))
        }
    }

    fn server(settings: &Settings) -> (&str, String) {
        let server = settings.server().unwrap();
        (&server.value, server.origin.to_string())
    }

    #[test]
    fn settings_are_read_in_order_of_precedence() {
        let mut home = TestHome::new();
        assert_eq!(
            home.resolve(&Flags::default())
                .unwrap()
                .server()
                .unwrap_err()
                .exit
                .code(),
            2
        );
        let up =
            r#"{"server":"http://up:1","token_file":"/t/up","pid":1,"data_dir":"/d","started":"2026-01-01T00:00:00Z"}"#;
        home.write("home/.local/state/aitk/up.json", up);
        let settings = home.resolve(&Flags::default()).unwrap();
        assert_eq!(server(&settings).0, "http://up:1");
        assert_eq!(settings.token.unwrap().value, TokenSource::File("/t/up".into()));

        home.write(
            "home/.config/aitk/config.yaml",
            "server: http://user:1\ntoken_file: tok # mine\n",
        );
        let settings = home.resolve(&Flags::default()).unwrap();
        assert_eq!(server(&settings).0, "http://user:1");
        let user_token = home.dir.path().join("home/.config/aitk/tok");
        assert_eq!(settings.token.unwrap().value, TokenSource::File(user_token));

        home.write("aitk.yaml", "# the lab\nserver: \"http://project:1\"\n");
        let settings = home.resolve(&Flags::default()).unwrap();
        assert_eq!(server(&settings).0, "http://project:1");
        assert!(server(&settings).1.starts_with("project file"));
        assert_eq!(settings.token, None, "a project file must not get the user's token");

        home.env.insert("AITK_SERVER".to_owned(), "http://env:1".to_owned());
        home.env.insert("AITK_TOKEN".to_owned(), "secret".to_owned());
        let settings = home.resolve(&Flags::default()).unwrap();
        assert_eq!(server(&settings).1, "environment variable AITK_SERVER");
        assert!(!format!("{settings:?}").contains("secret"));

        let flags = Flags {
            server: Some("http://flag:1".to_owned()),
            ..Flags::default()
        };
        assert_eq!(server(&home.resolve(&flags).unwrap()).1, "flag --server");
    }

    #[test]
    fn the_address_of_aitk_up_gets_its_token() {
        let home = TestHome::new();
        let up =
            r#"{"server":"http://up:1","token_file":"/t/up","pid":1,"data_dir":"/d","started":"2026-01-01T00:00:00Z"}"#;
        home.write("home/.local/state/aitk/up.json", up);
        let named = Flags {
            server: Some("http://up:1/".to_owned()),
            ..Flags::default()
        };
        assert!(home.resolve(&named).unwrap().token.is_some());
        let other = Flags {
            server: Some("http://other:1".to_owned()),
            ..Flags::default()
        };
        assert!(home.resolve(&other).unwrap().token.is_none());
        // The token that `aitk login` stored is for another coordinator.
        home.write(
            "home/.config/aitk/config.yaml",
            "server: http://user:1\ntoken_file: /t/user\n",
        );
        let token = |flags| match home.resolve(flags).unwrap().token.unwrap().value {
            TokenSource::File(path) => path,
            TokenSource::Value(_) => panic!(),
        };
        assert_eq!(token(&named), Path::new("/t/up"));
        assert_eq!(token(&other), Path::new("/t/user"));
        assert_eq!(token(&Flags::default()), Path::new("/t/user"));
    }

    #[test]
    fn errors_in_settings_files_have_the_line() {
        for (text, wanted) in [
            ("server", "aitk.yaml:1: expected `key: value`"),
            ("\nservr: x", "aitk.yaml:2: 'servr' is not a setting"),
            ("token: abc", "0600"),
            ("server: x\nserver: y", "set twice"),
            ("server:\n  url: x", "nested"),
            ("server: \"x", "not closed"),
        ] {
            let home = TestHome::new();
            home.write("aitk.yaml", text);
            let failure = home.resolve(&Flags::default()).unwrap_err();
            assert!(failure.message.contains(wanted), "{text:?}: {}", failure.message);
        }
    }

    #[test]
    fn only_the_user_sets_the_webhook() {
        let mut home = TestHome::new();
        let url = |home: &TestHome, flag| {
            let env = |name: &str| home.env.get(name).cloned();
            let found = NotifyUrl::resolve(flag, &env, &Paths::from_env(&env));
            found.map(|found| found.map(|found| (found.url.expose().to_owned(), found.allow_private)))
        };
        assert_eq!(url(&home, None).unwrap(), None);
        let path = home.dir.path().join("home/.config/aitk/config.yaml");
        home.write(
            "home/.config/aitk/config.yaml",
            "notify_url: https://user/secret\nnotify_private: true\n",
        );
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
        let exposed = url(&home, None).unwrap_err().render(false);
        assert!(
            exposed.contains("chmod 600") && !exposed.contains("secret"),
            "{exposed}"
        );
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        assert_eq!(
            url(&home, None).unwrap(),
            Some(("https://user/secret".to_owned(), true))
        );
        // `aitk login` keeps the setting and the mode of the file.
        save(&path, &[("server", Some("https://new:1".to_owned()))]).unwrap();
        assert_eq!(
            url(&home, None).unwrap(),
            Some(("https://user/secret".to_owned(), true))
        );

        home.env.insert("AITK_NOTIFY_URL".to_owned(), "https://env".to_owned());
        home.env.insert("AITK_NOTIFY_PRIVATE".to_owned(), "0".to_owned());
        assert_eq!(url(&home, None).unwrap(), Some(("https://env".to_owned(), false)));
        assert_eq!(
            url(&home, Some("https://flag")).unwrap(),
            Some(("https://flag".to_owned(), false))
        );
        home.env.insert("AITK_NOTIFY_PRIVATE".to_owned(), "perhaps".to_owned());
        assert_eq!(url(&home, None).unwrap_err().exit.code(), 2);

        home.write("aitk.yaml", "notify_url: https://evil\n");
        let refused = home.resolve(&Flags::default()).unwrap_err();
        assert!(refused.message.contains("settings of the settings file"), "{refused}");
    }

    #[test]
    fn saved_settings_replace_old_ones_and_keep_other_lines() {
        let home = TestHome::new();
        let path = home.dir.path().join("config/config.yaml");
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, "# mine\nserver: http://old\nca_file: gone.pem\n").unwrap();
        let token = "/home/o'neil/a b: c".to_owned();
        let new = [
            ("server", Some("https://new:1".to_owned())),
            ("token_file", Some(token.clone())),
            ("ca_file", None),
        ];
        for _ in 0..2 {
            save(&path, &new).unwrap();
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(text.starts_with("# mine\n") && text.lines().count() == 3, "{text}");
            let read = parse_file(&text).unwrap();
            assert_eq!((read.server.as_deref(), read.ca_file), (Some("https://new:1"), None));
            assert_eq!(read.token_file, Some(token.clone()));
        }
        std::fs::write(&path, "nonsense").unwrap();
        assert!(save(&path, &new).is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "nonsense");
    }
}
