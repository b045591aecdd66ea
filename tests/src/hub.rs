//! A model hub with one model, that can be given faults.

use crate::jobs::tiny_model;
use crate::namespaces::Namespaces;
use crate::processes::{Process, free_address};
use crate::server_fault::ServerFault;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// The repository of the only model.
pub const MODEL: &str = "lab/tiny";
/// An upper limit of the commits that one process of the hub names.
const COMMITS_PER_PROCESS: u64 = 1 << 32;

/// A running or stopped hub.
pub struct Hub {
    program: PathBuf,
    folder: PathBuf,
    namespaces: Namespaces,
    address: SocketAddr,
    fault_file: PathBuf,
    root: PathBuf,
    starts: u64,
    /// `None` while it is stopped and refuses connections.
    process: Option<Process>,
}

impl Hub {
    /// Starts the server program at `program` (`env!("CARGO_BIN_EXE_hub-server")` in a test) below `folder`.
    ///
    /// # Panics
    /// When its folders cannot be created.
    #[must_use]
    pub fn start(program: &str, folder: &Path) -> Self {
        Self::start_in(program, folder, free_address(), &Namespaces::Host)
    }

    /// Starts it in these namespaces.
    ///
    /// # Panics
    /// When its folders cannot be created.
    #[must_use]
    pub fn start_in(program: &str, folder: &Path, address: SocketAddr, namespaces: &Namespaces) -> Self {
        let root = folder.join("hub");
        let (organisation, name) = MODEL.split_once('/').expect("a repository has an owner");
        std::fs::create_dir_all(root.join(organisation)).expect("the hub's folder can be made");
        std::os::unix::fs::symlink(tiny_model(), root.join(organisation).join(name)).expect("the model can be linked");
        let mut hub = Self {
            program: PathBuf::from(program),
            folder: folder.to_path_buf(),
            namespaces: namespaces.clone(),
            address,
            fault_file: folder.join("hub-fault"),
            root,
            starts: 0,
            process: None,
        };
        hub.start_again();
        hub
    }

    /// The environment variables of processes that fetch models.
    #[must_use]
    pub fn environment(&self) -> Vec<(String, String)> {
        vec![("HF_ENDPOINT".to_owned(), format!("http://{}", self.address))]
    }

    /// Sets the current fault.
    ///
    /// # Panics
    /// When the fault file cannot be written.
    pub fn set_fault(&self, fault: ServerFault) {
        fault.write(&self.fault_file);
    }

    /// Stops the hub: connections are refused.
    pub fn stop(&mut self) {
        self.process = None;
    }

    /// Starts the hub again. Does nothing while it runs.
    pub fn start_again(&mut self) {
        if self.process.is_some() {
            return;
        }
        let mut command = self.namespaces.command(&self.program, &self.folder);
        command.args(["--address", &self.address.to_string()]);
        command.arg("--fault-file").arg(&self.fault_file);
        command.args(["--first-commit", &(self.starts * COMMITS_PER_PROCESS + 1).to_string()]);
        command.arg(&self.root);
        self.starts += 1;
        self.process = Some(Process::start("hub", &self.folder, &mut command));
    }
}
