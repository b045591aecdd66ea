//! Opens and reads untrusted paths safely.
//!
//! A path in a config may lead to a pipe, which blocks until a writer opens it, or to a device such as `/dev/zero`, which
//! never ends. Only regular files are opened; the file type is checked again after opening, in case the file was replaced;
//! and whole files are read up to a size limit. Symbolic links are followed, because users keep their files behind them.

use std::fs::{File, FileType, OpenOptions};
use std::io::{self, Read};
use std::path::Path;

/// Opens a regular file. Returns it with its length in bytes.
///
/// # Errors
/// The system's error; [`io::ErrorKind::IsADirectory`] for a folder, [`io::ErrorKind::InvalidData`] for other special files.
pub fn open(path: &Path) -> io::Result<(File, u64)> {
    // Checked before opening, because opening some devices has side effects.
    check_regular(std::fs::metadata(path)?.file_type())?;
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        // The file may have been replaced by a pipe, whose `open` would block.
        options.custom_flags(nix::fcntl::OFlag::O_NONBLOCK.bits());
    }
    let file = options.open(path)?;
    let info = file.metadata()?;
    check_regular(info.file_type())?;
    Ok((file, info.len()))
}

/// Reads a regular file of at most `limit` bytes.
///
/// # Errors
/// As [`open`]; [`io::ErrorKind::InvalidData`] when it is longer.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let (file, length) = open(path)?;
    let mut bytes = Vec::new();
    if length <= limit {
        // One more byte than allowed, because the file may grow while it is read.
        file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    }
    if length.max(bytes.len() as u64) > limit {
        return Err(invalid(format!(
            "the file has more than the {limit} bytes that are allowed here"
        )));
    }
    Ok(bytes)
}

/// [`read`] of UTF-8 text.
///
/// # Errors
/// As [`read`]; [`io::ErrorKind::InvalidData`] when it is not UTF-8.
pub fn read_text(path: &Path, limit: u64) -> io::Result<String> {
    String::from_utf8(read(path, limit)?).map_err(|_| invalid("the file is not UTF-8 text".into()))
}

/// Checks that a file type is that of a regular file.
///
/// # Errors
/// [`io::ErrorKind::IsADirectory`]; [`io::ErrorKind::InvalidData`], which names the type, for other special files.
fn check_regular(kind: FileType) -> io::Result<()> {
    if kind.is_file() {
        return Ok(());
    }
    if kind.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    Err(invalid(format!(
        "it is {}, not a file",
        special_kind(kind).unwrap_or("something else")
    )))
}

/// Describes the type of a special file. None for regular files, folders and links.
#[must_use]
pub fn special_kind(kind: FileType) -> Option<&'static str> {
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
    fn pipes_devices_and_sockets_are_refused_without_blocking() {
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
    fn the_limit_applies_to_files_whose_size_the_kernel_reports_as_zero() {
        // The kernel reports a length of 0.
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
