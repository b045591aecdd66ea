//! What keeps an attempt to its own files: part of what a worker says about itself.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Whether one kind of access is confined, and by what.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Protection {
    /// Whether it is in force. Measured: a process tried what is forbidden, and was refused.
    pub in_force: bool,
    /// What enforces it (`Landlock ABI 7`), or why nothing does.
    pub by: String,
}

impl Protection {
    /// Something that is enforced.
    #[must_use]
    pub fn by(what: impl Into<String>) -> Self {
        Self {
            in_force: true,
            by: what.into(),
        }
    }

    /// Something that is not enforced, with the reason.
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
    /// They read their inputs, libraries and devices, and write their own folder; nothing else.
    pub files: Protection,
    /// They have no sockets.
    pub network: Protection,
    /// They start no programs and cannot use the system calls that only attacks and administrators need.
    pub syscalls: Protection,
    /// Memory and number of threads are limited for each attempt (a control group).
    pub limits: Protection,
}

impl Confinement {
    /// Nothing is in force, for this reason.
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

    /// Whether files and network are confined: what `--require-sandbox` demands.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.files.in_force && self.network.in_force
    }

    /// The parts with their names, for screens.
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
    fn a_sentence_says_what_is_missing() {
        let mut confinement = Confinement::none("this system has no Landlock");
        assert!(!confinement.holds());
        confinement.files = Protection::by("Landlock ABI 7");
        assert!(!confinement.holds());
        confinement.network = Protection::by("seccomp");
        assert!(confinement.holds());
        let text = confinement.to_string();
        assert!(
            text.starts_with("files: Landlock ABI 7; network: seccomp; syscalls: NOT confined (this system"),
            "{text}"
        );
    }
}
