//! Where a process of the system under test runs: here, in a network of its own, or with disks of its own.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

/// A way to start a program. The process that is started becomes the program, so its id is the program's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Place {
    /// As any other process.
    #[default]
    Here,
    /// In the network namespace of this name.
    Network(String),
    /// Among the disks of this process.
    Disks(u32),
}

impl Place {
    /// The beginning of a command that runs `program` there, in `folder`.
    #[must_use]
    pub fn command(&self, program: impl AsRef<OsStr>, folder: &Path) -> Command {
        let mut command = match self {
            Self::Here => Command::new(program.as_ref()),
            Self::Network(name) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", name]).arg(program.as_ref());
                command
            }
            Self::Disks(owner) => {
                let mut command = crate::disks::enter(*owner);
                // Entering changes the working folder.
                command.args(["sh", "-c", r#"cd "$0" && exec "$@""#]);
                command.arg(folder).arg(program.as_ref());
                command
            }
        };
        command.current_dir(folder);
        command
    }
}
