//! The folders of this user: the XDG folders on every system, folders below `~` when they are not set.

use nix::unistd::{AccessFlags, access};
use std::path::{Path, PathBuf};

/// The folders of this user. Paths only; nothing is created here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    /// `$XDG_CONFIG_HOME/aitk`, default `~/.config/aitk`.
    pub config: PathBuf,
    /// `$XDG_DATA_HOME/aitk`, default `~/.local/share/aitk`: the data of `aitk up`.
    pub data: PathBuf,
    /// `$XDG_CACHE_HOME/aitk`, default `~/.cache/aitk`.
    pub cache: PathBuf,
    /// `$XDG_STATE_HOME/aitk`, default `~/.local/state/aitk`: `up.json`, the private folders of `aitk run`.
    pub state: PathBuf,
    /// `~`, for `~/Library` on a Mac.
    home: PathBuf,
}

impl Paths {
    /// Reads the folders from an environment. A relative path is ignored, as the XDG specification says.
    #[must_use]
    pub fn from_env(env: &dyn Fn(&str) -> Option<String>) -> Self {
        let home = env("HOME")
            .filter(|home| !home.is_empty())
            .map_or_else(|| PathBuf::from("/"), PathBuf::from);
        let xdg = |name: &str, fallback: &str| {
            env(name)
                .map(PathBuf::from)
                .filter(|path| path.is_absolute())
                .unwrap_or_else(|| home.join(fallback))
                .join("aitk")
        };
        Self {
            config: xdg("XDG_CONFIG_HOME", ".config"),
            data: xdg("XDG_DATA_HOME", ".local/share"),
            cache: xdg("XDG_CACHE_HOME", ".cache"),
            state: xdg("XDG_STATE_HOME", ".local/state"),
            home,
        }
    }

    /// Returns the user's settings file. On a Mac `~/Library/Application Support/aitk` is used when only that exists.
    #[must_use]
    pub fn user_config(&self) -> PathBuf {
        let usual = self.config.join("config.yaml");
        let mac = self.home.join("Library/Application Support/aitk/config.yaml");
        if cfg!(target_os = "macos") && !usual.exists() && mac.exists() {
            mac
        } else {
            usual
        }
    }

    /// Returns the file in which a running `aitk up` writes its address for other commands.
    #[must_use]
    pub fn up_state(&self) -> PathBuf {
        self.state.join("up.json")
    }
}

/// Returns the path, or its nearest ancestor that exists. A file that is created at the path will be on the same disk.
#[must_use]
pub fn nearest_existing(path: &Path) -> &Path {
    path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"))
}

/// Whether this user may create files in a folder.
#[must_use]
pub fn can_write_in(folder: &Path) -> bool {
    access(folder, AccessFlags::W_OK | AccessFlags::X_OK).is_ok()
}

/// Returns the bytes that this user may still write on the disk of a path, which need not exist; `None` if the system
/// reports none.
#[must_use]
pub fn free_space(path: &Path) -> Option<u64> {
    let space = nix::sys::statvfs::statvfs(nearest_existing(path)).ok()?;
    // Field types differ between systems.
    #[allow(clippy::useless_conversion)]
    let (blocks, bytes) = (u64::from(space.blocks_available()), u64::from(space.fragment_size()));
    Some(blocks.saturating_mul(bytes))
}

/// Formats a path for display: `~/…` if it is below the home folder.
#[must_use]
pub fn display_path(path: &Path, env: &dyn Fn(&str) -> Option<String>) -> String {
    if let Some(home) = env("HOME").filter(|home| home.len() > 1)
        && let Ok(rest) = path.strip_prefix(&home)
    {
        return format!("~/{}", rest.display());
    }
    path.display().to_string()
}

/// Expands `~/x` to `$HOME/x`, and joins relative paths to `base`.
#[must_use]
pub fn expand(path: &str, base: &Path, env: &dyn Fn(&str) -> Option<String>) -> PathBuf {
    if let Some(rest) = path.strip_prefix("~/")
        && let Some(home) = env("HOME")
    {
        return PathBuf::from(home).join(rest);
    }
    base.join(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_the_right_to_write_is_found() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        assert!(can_write_in(folder.path()));
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o555)).unwrap();
        // Root may write everywhere.
        assert_eq!(can_write_in(folder.path()), nix::unistd::Uid::effective().is_root());
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        assert!(!can_write_in(&folder.path().join("missing")));
    }

    #[test]
    fn xdg_wins_over_home_and_relative_values_are_ignored() {
        let env = |name: &str| match name {
            "HOME" => Some("/home/ada".to_owned()),
            "XDG_STATE_HOME" => Some("/var/state".to_owned()),
            "XDG_CACHE_HOME" => Some("relative".to_owned()),
            _ => None,
        };
        let paths = Paths::from_env(&env);
        assert_eq!(paths.up_state(), Path::new("/var/state/aitk/up.json"));
        assert_eq!(paths.cache, Path::new("/home/ada/.cache/aitk"));
        assert_eq!(paths.user_config(), Path::new("/home/ada/.config/aitk/config.yaml"));
        assert_eq!(display_path(&paths.cache, &env), "~/.cache/aitk");
        assert_eq!(expand("~/t", Path::new("/b"), &env), Path::new("/home/ada/t"));
        assert_eq!(expand("t", Path::new("/b"), &env), Path::new("/b/t"));
    }
}
