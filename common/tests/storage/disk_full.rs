//! A full disk gives its own error and leaves the previous checkpoint intact.

use crate::support::{folder_for_role, reexecute, save};
use aitk_common::checkpoint::{Checkpoint, CheckpointWriter};
use aitk_common::fsutil;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

const ROLE: &str = "too-large";
/// More bytes than the file size limit and the disk of these tests allow.
const TOO_MANY_BYTES: usize = 3 << 20;

/// Checks the behaviour when `TOO_MANY_BYTES` do not fit in `folder`.
fn check_disk_full(folder: &Path) {
    let mut writer = CheckpointWriter::new(folder, 2).unwrap();
    writer.add_bytes("small", "small", b"fits").unwrap();
    // The error is recognised even when the code that writes wraps it.
    let error = writer
        .add_file("large", "large", |out| {
            out.write_all(&vec![1; TOO_MANY_BYTES])
                .map_err(|error| std::io::Error::other(format!("while serialising: {error}")))
        })
        .unwrap_err();
    assert!(
        error.is_disk_full() && error.to_string().contains("disk full"),
        "{error:?}"
    );
    assert!(error.to_string().contains("large"), "{error}");
    drop(writer);
    let error = fsutil::write_atomic(&folder.join("file"), |out| out.write_all(&vec![1; TOO_MANY_BYTES])).unwrap_err();
    assert!(error.is_disk_full(), "{error:?}");
    #[cfg(feature = "storage")]
    check_blob_does_not_fit(folder);
    assert_eq!(Checkpoint::newest(folder).unwrap().unwrap().step(), 1);
    let left: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .flatten()
        .map(|entry| entry.file_name())
        .collect();
    assert_eq!(left, ["step_000000001"], "{left:?}");
}

#[cfg(feature = "storage")]
fn check_blob_does_not_fit(folder: &Path) {
    use aitk_common::hash::ContentHash;
    use aitk_common::storage::{BlobStore, ObjectBlobs};
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let memory = ObjectBlobs::open("memory://").unwrap();
        let bytes = vec![1_u8; TOO_MANY_BYTES];
        let hash = ContentHash::of(&bytes);
        memory.put_bytes(hash, bytes.clone().into()).await.unwrap();
        let error = memory.get_to_file(hash, &folder.join("blob")).await.unwrap_err();
        assert!(error.is_disk_full(), "{error:?}");
        let store = ObjectBlobs::open(folder.join("store").to_str().unwrap()).unwrap();
        let error = store.put_bytes(hash, bytes.into()).await.unwrap_err();
        assert!(error.is_disk_full(), "{error:?}");
        assert_eq!(store.has(&[hash]).await.unwrap(), [false]);
    });
    fs::remove_dir_all(folder.join("store")).unwrap();
}

/// The child process that runs under a file size limit.
#[test]
fn child() {
    if let Some(folder) = folder_for_role(ROLE) {
        check_disk_full(&folder);
    }
}

#[cfg(unix)]
#[test]
fn a_file_size_limit_counts_as_a_full_disk() {
    let place = tempfile::tempdir().unwrap();
    save(place.path(), 1, 100);
    let inner = reexecute("disk_full::child", ROLE, place.path());
    // The signal SIGXFSZ is ignored, so that writing fails with an error instead.
    let mut command = Command::new("sh");
    command
        .args(["-c", "trap '' XFSZ; ulimit -f 1000; exec \"$0\" \"$@\""])
        .arg(inner.get_program())
        .args(inner.get_args());
    command.envs(inner.get_envs().filter_map(|(key, value)| Some((key, value?))));
    let output = command.stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_file_system_gives_the_disk_full_error() {
    struct Mounted<'a>(&'a Path);
    impl Drop for Mounted<'_> {
        fn drop(&mut self) {
            let _ = Command::new("umount").arg(self.0).status();
        }
    }
    let place = tempfile::tempdir().unwrap();
    let mount = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"])
        .arg(place.path())
        .output();
    match mount {
        Ok(output) if output.status.success() => {}
        Ok(output) => {
            return crate::skip::skip("tmpfs", String::from_utf8_lossy(&output.stderr).trim());
        }
        Err(error) => return crate::skip::skip("tmpfs", format!("`mount`: {error}")),
    }
    let _mounted = Mounted(place.path());
    save(place.path(), 1, 100);
    check_disk_full(place.path());
}
