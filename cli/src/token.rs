//! Reading a token file.

use crate::exit::Exit;
use crate::failure::Failure;
use std::io::Read;
use std::path::Path;

/// No token is longer; a file that is, is something else.
const LONGEST: u64 = 4096;

/// Reads a token, refusing a file that others may read.
///
/// # Errors
/// When the file is missing, empty, too long, unreadable, or readable by others; code 4.
pub fn read(path: &Path) -> Result<String, Failure> {
    let refuse =
        |problem: String| Failure::new(Exit::Unauthorised, format!("token file {}: {problem}", path.display()));
    let file = std::fs::File::open(path).map_err(|error| {
        refuse(error.to_string()).hint("--token-file, AITK_TOKEN_FILE and the settings files may name another one")
    })?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = file
            .metadata()
            .map_err(|error| refuse(error.to_string()))?
            .permissions()
            .mode();
        if mode & 0o077 != 0 {
            return Err(refuse(format!("others may read it (mode {:03o})", mode & 0o777))
                .hint(format!("chmod 600 {}", path.display())));
        }
    }
    let mut text = String::new();
    file.take(LONGEST + 1)
        .read_to_string(&mut text)
        .map_err(|error| refuse(error.to_string()))?;
    match text.trim() {
        "" => Err(refuse("it is empty".to_owned())),
        _ if text.len() as u64 > LONGEST => Err(refuse(format!("it is longer than {LONGEST} bytes; that is no token"))),
        token => Ok(token.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_token_that_others_may_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        assert_eq!(read(&path).unwrap_err().exit, Exit::Unauthorised);
        std::fs::write(&path, "s3cret\n").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        let failure = read(&path).unwrap_err();
        assert!(
            failure.message.contains("mode 640") && failure.hints[0].starts_with("chmod 600"),
            "{failure:?}"
        );
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(read(&path).unwrap(), "s3cret");
        std::fs::write(&path, " \n").unwrap();
        assert!(read(&path).unwrap_err().message.contains("empty"));
    }
}
