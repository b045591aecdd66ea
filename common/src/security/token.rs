//! Access tokens: secrets of 256 random bits that every call carries.
//!
//! A token comes from `AITK_TOKEN`, from the file named by `AITK_TOKEN_FILE`, or from a file that the caller knows (such as a
//! coordinator's own). A token file that other users can read is refused, as ssh does with keys.
//! Tokens are compared in constant time, and `Debug` does not print them.

use crate::fsutil::{self, FsError};
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use subtle::ConstantTimeEq;

/// The environment variable that holds a token.
pub const TOKEN_VARIABLE: &str = "AITK_TOKEN";
/// The environment variable that names a token's file.
pub const TOKEN_FILE_VARIABLE: &str = "AITK_TOKEN_FILE";
/// The prefix of generated tokens, by which secret scanners recognise a token in a repository.
const PREFIX: &str = "aitk_";
/// The minimum length of a token.
const MIN_CHARS: usize = 16;
/// The maximum length of a token.
const MAX_CHARS: usize = 512;

/// The secret that authenticates a client.
#[derive(Clone)]
pub struct Token(String);

/// An error while reading a token.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// No token is configured.
    #[error("no token: set {TOKEN_VARIABLE}, or {TOKEN_FILE_VARIABLE} to a file that holds it")]
    Missing,
    /// The text is not a token.
    #[error(
        "the token from {origin} is invalid: expected {MIN_CHARS} to {MAX_CHARS} visible characters without spaces"
    )]
    Malformed {
        /// Where the text came from.
        origin: String,
    },
    /// Other users can read the token file.
    #[error("the token file {path} can be read by other users (mode {mode:o}); run: chmod 600 {path}")]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The token file could not be read or written.
    #[error(transparent)]
    Fs(#[from] FsError),
}

impl Token {
    /// Generates a token of 256 bits from the system's random source.
    ///
    /// # Panics
    /// When the system has no random source.
    #[must_use]
    pub fn generate() -> Self {
        Self::generate_with(PREFIX)
    }

    /// [`Self::generate`] with another prefix.
    pub(super) fn generate_with(prefix: &str) -> Self {
        let mut random = [0; 32];
        getrandom::fill(&mut random).expect("the system has a random source");
        Self(format!("{prefix}{}", hex::encode(random)))
    }

    /// Parses a token. Surrounding white space is ignored. `origin` is named in errors.
    ///
    /// # Errors
    /// [`TokenError::Malformed`].
    pub fn parse(text: &str, origin: &str) -> Result<Self, TokenError> {
        let text = text.trim();
        if !(MIN_CHARS..=MAX_CHARS).contains(&text.len()) || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(TokenError::Malformed {
                origin: origin.to_owned(),
            });
        }
        Ok(Self(text.to_owned()))
    }

    /// Reads a token file. On Unix only its owner may have read access.
    ///
    /// # Errors
    /// [`TokenError`].
    pub fn read(path: &Path) -> Result<Self, TokenError> {
        let fail = |error| FsError::new("read the token file", path, error);
        let file = File::open(path).map_err(fail)?;
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = file.metadata().map_err(fail)?.permissions().mode() & 0o777;
            if mode & 0o077 != 0 {
                return Err(TokenError::Exposed {
                    path: path.to_owned(),
                    mode,
                });
            }
        }
        let mut text = String::new();
        file.take(4096).read_to_string(&mut text).map_err(fail)?;
        Self::parse(&text, &path.display().to_string())
    }

    /// Reads the token file, or creates one (mode 0600) if it does not exist.
    ///
    /// # Errors
    /// [`TokenError`].
    pub fn read_or_create(path: &Path) -> Result<Self, TokenError> {
        match Self::read(path) {
            Err(TokenError::Fs(error)) if error.io().kind() == std::io::ErrorKind::NotFound => {}
            other => return other,
        }
        let token = Self::generate();
        fsutil::create_dir_all(fsutil::folder_of(path))?;
        fsutil::write_private(path, format!("{}\n", token.0).as_bytes())?;
        Ok(token)
    }

    /// Reads the token from the environment: `AITK_TOKEN` first, then `AITK_TOKEN_FILE`. `None` when neither is set.
    ///
    /// # Errors
    /// [`TokenError`].
    pub fn from_env(env: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>, TokenError> {
        let set = |name: &str| env(name).filter(|value| !value.is_empty());
        if let Some(text) = set(TOKEN_VARIABLE) {
            return Self::parse(&text, TOKEN_VARIABLE).map(Some);
        }
        set(TOKEN_FILE_VARIABLE)
            .map(|path| Self::read(Path::new(&path)))
            .transpose()
    }

    /// Whether `offered` is this token, compared in constant time.
    #[must_use]
    pub fn is(&self, offered: &str) -> bool {
        self.0.as_bytes().ct_eq(offered.as_bytes()).into()
    }

    /// The secret itself.
    #[must_use]
    pub fn secret(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_equals_only_itself_and_is_not_printed() {
        let (one, two) = (Token::generate(), Token::generate());
        assert!(one.is(one.secret()) && !one.is(two.secret()) && !one.is("") && !one.is(&one.secret()[1..]));
        assert_eq!(one.secret().len(), PREFIX.len() + 64);
        assert!(!format!("{one:?}").contains(&one.secret()[5..9]));
    }

    #[test]
    fn invalid_tokens_are_refused_without_repeating_them() {
        for bad in [
            "",
            "short",
            "with a space in between",
            "zeile\numbruch-im-text",
            "ümläute-ümläute-ümläute",
        ] {
            let error = Token::parse(bad, "AITK_TOKEN").unwrap_err().to_string();
            assert!(
                error.contains("AITK_TOKEN") && (bad.is_empty() || !error.contains(bad)),
                "{error}"
            );
        }
    }

    #[test]
    fn the_token_variable_takes_precedence_over_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/token");
        let made = Token::read_or_create(&path).unwrap();
        assert!(Token::read_or_create(&path).unwrap().is(made.secret()));
        let file = path.to_str().unwrap().to_owned();
        let of_file = |name: &str| (name == TOKEN_FILE_VARIABLE).then(|| file.clone());
        assert!(Token::from_env(&of_file).unwrap().unwrap().is(made.secret()));
        let both = |name: &str| {
            if name == TOKEN_VARIABLE {
                Some("0123456789abcdef".to_owned())
            } else {
                of_file(name)
            }
        };
        assert!(Token::from_env(&both).unwrap().unwrap().is("0123456789abcdef"));
        assert!(Token::from_env(&|_| None).unwrap().is_none());
    }

    #[cfg(unix)]
    #[test]
    fn a_token_file_readable_by_others_is_refused_with_the_chmod_command() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        Token::read_or_create(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        let error = Token::read(&path).unwrap_err().to_string();
        assert!(error.contains("chmod 600") && error.contains("640"), "{error}");
    }
}
