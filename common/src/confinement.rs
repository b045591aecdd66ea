//! How a worker's attempts are sandboxed. Workers report this when they register.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Whether one kind of access is confined, and by which mechanism.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Protection {
    /// Whether it is enforced. Measured: a test process attempted forbidden operations and was refused.
    pub in_force: bool,
    /// The mechanism that enforces it (`Landlock ABI 7`), or the reason why nothing does.
    pub by: String,
}

impl Protection {
    /// An enforced protection.
    #[must_use]
    pub fn enforced_by(what: impl Into<String>) -> Self {
        Self {
            in_force: true,
            by: what.into(),
        }
    }

    /// A protection that is not enforced, with the reason.
    #[must_use]
    pub fn missing(reason: impl Into<String>) -> Self {
        Self {
            in_force: false,
            by: reason.into(),
        }
    }
}

impl fmt::Display for Protection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.in_force {
            true => f.write_str(&self.by),
            false => write!(f, "NOT confined ({})", self.by),
        }
    }
}

/// How the attempts of a worker are confined.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confinement {
    /// Attempts read only their inputs, libraries and devices, and write only their own folder.
    pub files: Protection,
    /// Attempts cannot open sockets.
    pub network: Protection,
    /// Attempts cannot start programs or use privileged and rarely needed system calls.
    pub syscalls: Protection,
    /// A control group limits each attempt's memory and number of threads.
    pub limits: Protection,
}

impl Confinement {
    /// No protection is enforced, for this reason.
    #[must_use]
    pub fn none(reason: &str) -> Self {
        let missing = || Protection::missing(reason);
        Self {
            files: missing(),
            network: missing(),
            syscalls: missing(),
            limits: missing(),
        }
    }

    /// Whether files and network are confined, as `--require-sandbox` requires.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.files.in_force && self.network.in_force
    }

    /// The protections with their display names.
    #[must_use]
    pub fn parts(&self) -> [(&'static str, &Protection); 4] {
        [
            ("files", &self.files),
            ("network", &self.network),
            ("syscalls", &self.syscalls),
            ("limits", &self.limits),
        ]
    }
}

impl fmt::Display for Confinement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (name, part)) in self.parts().into_iter().enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}{name}: {part}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_display_text_names_missing_protections() {
        let mut confinement = Confinement::none("this system has no Landlock");
        assert!(!confinement.holds());
        confinement.files = Protection::enforced_by("Landlock ABI 7");
        assert!(!confinement.holds());
        confinement.network = Protection::enforced_by("seccomp");
        assert!(confinement.holds());
        let text = confinement.to_string();
        assert!(
            text.starts_with("files: Landlock ABI 7; network: seccomp; syscalls: NOT confined (this system"),
            "{text}"
        );
    }
}
