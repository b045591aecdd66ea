//! Files that no job may touch, and checks that they were not touched.

use aitk_common::hash::ContentHash;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The text in every file that no job may read.
pub(super) const MARK: &str = "CANARY-5f3b9d-the-admins-token";

/// A folder that no job may touch.
pub(super) struct Canary {
    folder: PathBuf,
    before: BTreeMap<PathBuf, String>,
    #[cfg(target_os = "linux")]
    inotify: nix::sys::inotify::Inotify,
}

impl Canary {
    pub(super) fn create(folder: &Path) -> Self {
        for (name, text) in [
            ("secret.txt", MARK.to_owned()),
            ("home/.docker/config.json", format!("{{\"auth\": \"{MARK}\"}}")),
            (
                "model/model_index.json",
                format!("{{\"_class_name\": \"StableDiffusionPipeline\", \"x\": \"{MARK}\"}}"),
            ),
            ("data/a.txt", MARK.to_owned()),
        ] {
            let path = folder.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let before = list_files(folder);
        #[cfg(target_os = "linux")]
        let inotify = {
            use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
            let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).unwrap();
            let mut folders: Vec<PathBuf> = before.keys().filter(|path| path.is_dir()).cloned().collect();
            folders.push(folder.to_owned());
            for folder in folders {
                inotify.add_watch(&folder, AddWatchFlags::IN_ALL_EVENTS).unwrap();
            }
            inotify
        };
        Self {
            folder: folder.to_owned(),
            before,
            #[cfg(target_os = "linux")]
            inotify,
        }
    }

    /// Checks that nothing in the folder was opened, listed, changed or added. Where possible the kernel reports
    /// accesses.
    pub(super) fn check_untouched(&self) -> Result<(), String> {
        #[cfg(target_os = "linux")]
        if let Ok(events) = self.inotify.read_events()
            && let Some(event) = events.first()
        {
            return Err(format!("{:?} of {:?}", event.mask, event.name));
        }
        let now = list_files(&self.folder);
        #[cfg(target_os = "linux")]
        // Discard the events of our own listing.
        while self.inotify.read_events().is_ok_and(|events| !events.is_empty()) {}
        if now != self.before {
            return Err(format!("{:?} became {now:?}", self.before));
        }
        Ok(())
    }
}

/// Lists everything below a folder, files with their hash.
pub(super) fn list_files(folder: &Path) -> BTreeMap<PathBuf, String> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        let kind = entry.file_type().unwrap();
        let entry_content = if kind.is_dir() {
            all.extend(list_files(&path));
            "a folder".to_owned()
        } else if kind.is_file() {
            ContentHash::of(&std::fs::read(&path).unwrap()).to_hex()
        } else {
            format!("{kind:?}")
        };
        all.insert(path, entry_content);
    }
    all
}

/// Lists the files below a folder that contain the mark.
pub(super) fn marked_files(folder: &Path) -> Vec<PathBuf> {
    let is_marked = |path: &PathBuf| {
        let bytes = std::fs::read(path).unwrap_or_default();
        bytes.windows(MARK.len()).any(|window| window == MARK.as_bytes())
    };
    list_files(folder)
        .into_keys()
        .filter(|path| path.is_file() && is_marked(path))
        .collect()
}
