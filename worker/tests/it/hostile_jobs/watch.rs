//! Files that no job may touch, looked at from outside.

use aitk_common::hash::ContentHash;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What stands in every file that no job may read.
pub(super) const MARK: &str = "CANARY-5f3b9d-the-admins-token";

/// A folder that no job may touch.
pub(super) struct Canary {
    folder: PathBuf,
    before: BTreeMap<PathBuf, String>,
    #[cfg(target_os = "linux")]
    opened: nix::sys::inotify::Inotify,
}

impl Canary {
    pub(super) fn place(folder: &Path) -> Self {
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
        let before = listing(folder);
        #[cfg(target_os = "linux")]
        let opened = {
            use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
            let opened = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).unwrap();
            let mut folders: Vec<PathBuf> = before.keys().filter(|path| path.is_dir()).cloned().collect();
            folders.push(folder.to_owned());
            for folder in folders {
                opened.add_watch(&folder, AddWatchFlags::IN_ALL_EVENTS).unwrap();
            }
            opened
        };
        Self {
            folder: folder.to_owned(),
            before,
            #[cfg(target_os = "linux")]
            opened,
        }
    }

    /// Nothing in it was opened, listed, changed or added. The kernel says what was opened, where it can.
    pub(super) fn is_untouched(&self) -> Result<(), String> {
        #[cfg(target_os = "linux")]
        if let Ok(events) = self.opened.read_events()
            && let Some(event) = events.first()
        {
            return Err(format!("{:?} of {:?}", event.mask, event.name));
        }
        let now = listing(&self.folder);
        #[cfg(target_os = "linux")]
        // That was us.
        while self.opened.read_events().is_ok_and(|events| !events.is_empty()) {}
        if now != self.before {
            return Err(format!("{:?} became {now:?}", self.before));
        }
        Ok(())
    }
}

/// Everything below a folder, files with their hash.
pub(super) fn listing(folder: &Path) -> BTreeMap<PathBuf, String> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        let kind = entry.file_type().unwrap();
        let what = if kind.is_dir() {
            all.extend(listing(&path));
            "a folder".to_owned()
        } else if kind.is_file() {
            ContentHash::of(&std::fs::read(&path).unwrap()).to_hex()
        } else {
            format!("{kind:?}")
        };
        all.insert(path, what);
    }
    all
}

/// The files below a folder in which the mark stands.
pub(super) fn marked(folder: &Path) -> Vec<PathBuf> {
    let is_marked = |path: &PathBuf| {
        let bytes = std::fs::read(path).unwrap_or_default();
        bytes.windows(MARK.len()).any(|window| window == MARK.as_bytes())
    };
    listing(folder)
        .into_keys()
        .filter(|path| path.is_file() && is_marked(path))
        .collect()
}
