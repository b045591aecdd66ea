//! Files that come from outside, opened so that nothing hangs and nothing has no end.
//!
//! A path in a config may lead to a pipe, which waits for a writer for ever, or to a device such as `/dev/zero`, which
//! never ends. Only regular files are opened; what was opened is looked at again, so that nobody changes it in between;
//! and what is read as a whole has a limit. Symbolic links are followed: people keep their files behind them.

use std::fs::{File, FileType, OpenOptions};
use std::io::{self, Read};
use std::path::Path;

/// Opens a regular file, and says how long it is.
///
/// # Errors
/// What the system says; [`io::ErrorKind::InvalidData`] for what is no regular file, [`io::ErrorKind::IsADirectory`] for a
/// folder.
pub fn open(path: &Path) -> io::Result<(File, u64)> {
    // Some devices do something when they are opened.
    refuse_special(std::fs::metadata(path)?.file_type())?;
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        // Another file may have taken its place: a pipe must not hold us.
        options.custom_flags(nix::fcntl::OFlag::O_NONBLOCK.bits());
    }
    let file = options.open(path)?;
    let info = file.metadata()?;
    refuse_special(info.file_type())?;
    Ok((file, info.len()))
}

/// Reads a regular file of at most so many bytes.
///
/// # Errors
/// As [`open`]; [`io::ErrorKind::InvalidData`] when it is longer.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let (file, length) = open(path)?;
    let mut bytes = Vec::new();
    if length <= most {
        // It may grow while it is read.
        file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    }
    if length.max(bytes.len() as u64) > most {
        return Err(invalid(format!(
            "the file has more than the {most} bytes that are allowed here"
        )));
    }
    Ok(bytes)
}

/// [`read`] of UTF-8 text.
///
/// # Errors
/// As [`read`]; [`io::ErrorKind::InvalidData`] when it is not UTF-8.
pub fn read_text(path: &Path, most: u64) -> io::Result<String> {
    String::from_utf8(read(path, most)?).map_err(|_| invalid("the file is not UTF-8 text".into()))
}

/// Refuses what is neither a regular file nor a folder.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] with what it is; [`io::ErrorKind::IsADirectory`].
fn refuse_special(kind: FileType) -> io::Result<()> {
    if kind.is_file() {
        return Ok(());
    }
    if kind.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    Err(invalid(format!(
        "it is {}, not a file",
        special(kind).unwrap_or("something else")
    )))
}

/// What a special file is, in words: none for files, folders and links.
#[must_use]
pub fn special(kind: FileType) -> Option<&'static str> {
    if kind.is_file() || kind.is_dir() || kind.is_symlink() {
        return None;
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        for (is, what) in [
            (kind.is_fifo(), "a pipe"),
            (kind.is_char_device() || kind.is_block_device(), "a device"),
            (kind.is_socket(), "a socket"),
        ] {
            if is {
                return Some(what);
            }
        }
    }
    Some("a special file")
}

fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use nix::sys::stat::Mode;

    #[test]
    fn pipes_devices_and_sockets_are_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let (pipe, socket) = (folder.path().join("pipe"), folder.path().join("socket"));
        nix::unistd::mkfifo(&pipe, Mode::S_IRWXU).unwrap();
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        std::os::unix::fs::symlink(&pipe, folder.path().join("link")).unwrap();
        for (path, what) in [
            (pipe.as_path(), "a pipe"),
            (&folder.path().join("link"), "a pipe"),
            (&socket, "a socket"),
            (Path::new("/dev/zero"), "a device"),
        ] {
            let error = read(path, 10).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            assert!(error.to_string().contains(what), "{}: {error}", path.display());
        }
        assert_eq!(read(folder.path(), 10).unwrap_err().kind(), io::ErrorKind::IsADirectory);
        assert_eq!(
            read(&folder.path().join("none"), 10).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
    }

    #[test]
    fn what_has_no_length_of_its_own_is_cut_at_the_limit() {
        // The kernel says 0 bytes of a file that has some.
        let status = Path::new("/proc/self/status");
        if status.exists() {
            assert!(
                read(status, 10)
                    .unwrap_err()
                    .to_string()
                    .contains("more than the 10 bytes")
            );
            assert!(!read(status, 1 << 20).unwrap().is_empty());
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, "0123456789").unwrap();
        assert_eq!(read(&path, 10).unwrap().len(), 10);
        assert!(read(&path, 9).is_err());
        std::fs::write(&path, [0xff]).unwrap();
        assert!(read_text(&path, 10).unwrap_err().to_string().contains("UTF-8"));
    }
}
