//! Where a process of the system under test runs: here, in a network of its own, with disks of its own, or with both.

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
    /// In the network namespace of this name, among the disks of this process.
    Both(String, u32),
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
            Self::Disks(owner) => among_disks(*owner, None, folder, program.as_ref()),
            Self::Both(network, owner) => among_disks(*owner, Some(network), folder, program.as_ref()),
        };
        command.current_dir(folder);
        command
    }
}

fn among_disks(owner: u32, network: Option<&str>, folder: &Path, program: &OsStr) -> Command {
    let mut command = crate::disks::enter(owner);
    if let Some(name) = network {
        // Where iproute2 keeps them.
        command.arg(format!("--net=/run/netns/{name}"));
    }
    // Entering changes the working folder.
    command.args(["--", "sh", "-c", r#"cd "$0" && exec "$@""#]);
    command.arg(folder).arg(program);
    command
}
