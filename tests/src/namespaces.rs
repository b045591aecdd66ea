//! Linux namespaces in which a process of the system under test runs: the test's own, a network namespace, a mount namespace
//! with its own disks, or both.

use nix::unistd::Uid;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

/// The namespaces for a program. The started process becomes the program, so its process id is the program's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Namespaces {
    /// Those of the test itself.
    #[default]
    Host,
    /// The network namespace with this name.
    Network(String),
    /// The mount namespace of the process with this id.
    Mount(u32),
    /// The network namespace with this name, and the mount namespace of the process with this id.
    Both(String, u32),
}

impl Namespaces {
    /// A command that runs `program` in these namespaces and in `folder`. Arguments can be added.
    #[must_use]
    pub fn command(&self, program: impl AsRef<OsStr>, folder: &Path) -> Command {
        let mut command = match self {
            Self::Host => Command::new(program.as_ref()),
            Self::Network(name) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", name]).arg(program.as_ref());
                command
            }
            Self::Mount(owner) => in_mount_namespace(*owner, None, folder, program.as_ref()),
            Self::Both(network, owner) => in_mount_namespace(*owner, Some(network), folder, program.as_ref()),
        };
        command.current_dir(folder);
        command
    }
}

fn in_mount_namespace(owner: u32, network: Option<&str>, folder: &Path, program: &OsStr) -> Command {
    let mut command = enter(owner);
    if let Some(name) = network {
        // iproute2 keeps network namespaces here.
        command.arg(format!("--net=/run/netns/{name}"));
    }
    // `nsenter` changes the working directory.
    command.args(["--", "sh", "-c", r#"cd "$0" && exec "$@""#]);
    command.arg(folder).arg(program);
    command
}

/// The command that enters the mount namespace of a process. `--` and a program have to be added.
#[must_use]
pub fn enter(owner: u32) -> Command {
    let mut command = Command::new("nsenter");
    command.args(["--target", &owner.to_string()]);
    if !Uid::effective().is_root() {
        command.args(["--user", "--preserve-credentials"]);
    }
    command.arg("--mount");
    command
}
