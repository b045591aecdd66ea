//! The token that opens the coordinator: made at the first start, kept in a file that only its owner reads.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Shorter ones can be guessed.
const LEAST: usize = 16;

/// Why there is no token.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The file cannot be read or made.
    #[error("the token file {} cannot be used", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Others on this machine can read it.
    #[error("the token file {} can be read by other users (mode {mode:o}); `chmod 600` it", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// It does not hold a token.
    #[error(
        "the token in {place} cannot be used: expected {LEAST} or more printable ASCII characters without spaces; remove it and a new one is made"
    )]
    Bad {
        /// File, or `the configuration`.
        place: String,
    },
}

/// Checks a token that was given.
///
/// # Errors
/// [`TokenError::Bad`]
pub(crate) fn checked(token: &str, place: &str) -> Result<String, TokenError> {
    let token = token.trim();
    if token.len() < LEAST || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(TokenError::Bad {
            place: place.to_owned(),
        });
    }
    Ok(token.to_owned())
}

/// Reads the token file; makes it, with a fresh token, when it is not there.
///
/// # Errors
/// [`TokenError`]
pub(crate) fn read_or_make(path: &Path) -> Result<String, TokenError> {
    match read(path)? {
        Some(token) => Ok(token),
        None => make(path),
    }
}

fn read(path: &Path) -> Result<Option<String>, TokenError> {
    let failed = |source| TokenError::File {
        path: path.to_owned(),
        source,
    };
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = metadata.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(TokenError::Open {
                path: path.to_owned(),
                mode,
            });
        }
    }
    // Nobody's token has a megabyte; a wrong path may.
    if metadata.len() > 4096 {
        return Err(TokenError::Bad {
            place: path.display().to_string(),
        });
    }
    let text = std::fs::read_to_string(path).map_err(failed)?;
    checked(&text, &path.display().to_string()).map(Some)
}

fn make(path: &Path) -> Result<String, TokenError> {
    let failed = |source| TokenError::File {
        path: path.to_owned(),
        source,
    };
    // Two random UUIDs: 244 bits that nobody guesses.
    let token = format!("{}{}", uuid::Uuid::new_v4().simple(), uuid::Uuid::new_v4().simple());
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.mode(0o600);
    }
    let mut file = options.open(path).map_err(failed)?;
    let written = file
        .write_all(format!("{token}\n").as_bytes())
        .and_then(|()| file.sync_all());
    if let Err(error) = written {
        // A half token would be refused at every later start.
        let _ = std::fs::remove_file(path);
        return Err(failed(error));
    }
    Ok(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn made_once_then_read_and_nobody_elses() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let token = read_or_make(&path).unwrap();
        assert_eq!(token.len(), 64);
        assert_eq!(read_or_make(&path).unwrap(), token);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
            assert!(matches!(read_or_make(&path), Err(TokenError::Open { .. })));
        }
    }

    #[test]
    fn short_or_broken_tokens_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let _ = make(&path).unwrap();
        std::fs::write(&path, "short\n").unwrap();
        assert!(matches!(read_or_make(&path), Err(TokenError::Bad { .. })));
        assert!(checked("0123456789 abcdef", "x").is_err());
    }
}
