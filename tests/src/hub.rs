//! A hub of models with one model, its switches and its log.

use crate::jobs::tiny_model;
use crate::place::Place;
use crate::processes::{Process, free_address};
use crate::server_fault::ServerFault;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// The model that the hub has.
pub const MODEL: &str = "lab/tiny";
/// Commits that one process of the hub gives away, at most.
const COMMITS: u64 = 1 << 32;

/// A hub.
pub struct Hub {
    program: PathBuf,
    folder: PathBuf,
    place: Place,
    address: SocketAddr,
    fault_file: PathBuf,
    root: PathBuf,
    starts: u64,
    /// None while it refuses connections.
    process: Option<Process>,
}

impl Hub {
    /// Starts the server program at `program` (`env!("CARGO_BIN_EXE_hub-server")` in a test) below `folder`.
    ///
    /// # Panics
    /// When its folders cannot be made.
    #[must_use]
    pub fn start(program: &str, folder: &Path) -> Self {
        Self::start_in(program, folder, free_address(), &Place::Here)
    }

    /// Starts it somewhere.
    ///
    /// # Panics
    /// When its folders cannot be made.
    #[must_use]
    pub fn start_in(program: &str, folder: &Path, address: SocketAddr, place: &Place) -> Self {
        let root = folder.join("hub");
        let (organisation, name) = MODEL.split_once('/').expect("a repository has an owner");
        std::fs::create_dir_all(root.join(organisation)).expect("the hub's folder can be made");
        std::os::unix::fs::symlink(tiny_model(), root.join(organisation).join(name)).expect("the model can be linked");
        let mut hub = Self {
            program: PathBuf::from(program),
            folder: folder.to_path_buf(),
            place: place.clone(),
            address,
            fault_file: folder.join("hub-fault"),
            root,
            starts: 0,
            process: None,
        };
        hub.come_back();
        hub
    }

    /// What whoever fetches models finds in its environment.
    #[must_use]
    pub fn environment(&self) -> Vec<(String, String)> {
        vec![("HF_ENDPOINT".to_owned(), format!("http://{}", self.address))]
    }

    /// From now on this goes wrong.
    ///
    /// # Panics
    /// When the switch cannot be written.
    pub fn set(&self, fault: ServerFault) {
        fault.write(&self.fault_file);
    }

    /// From now on connections are refused.
    pub fn go_away(&mut self) {
        self.process = None;
    }

    /// Takes connections again. Nothing happens if it does already.
    pub fn come_back(&mut self) {
        if self.process.is_some() {
            return;
        }
        let mut command = self.place.command(&self.program, &self.folder);
        command.args(["--address", &self.address.to_string()]);
        command.arg("--fault-file").arg(&self.fault_file);
        command.args(["--first-commit", &(self.starts * COMMITS + 1).to_string()]);
        command.arg(&self.root);
        self.starts += 1;
        self.process = Some(Process::start("hub", &self.folder, &mut command));
    }
}
