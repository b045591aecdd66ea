//! Rounds of chaos: a pool with two workers and an S3 server runs a training job while machines die, freeze and come
//! back and storage goes wrong, as a [`plan::Plan`] says that is drawn from a seed. After each round [`check`] looks at
//! everything that must hold.

pub mod check;
pub mod events;
pub mod plan;
pub mod round;

use crate::fault::Fault;
use crate::jobs;
use crate::pool::{Pool, Setup};
use crate::processes::Process;
use crate::s3::S3;
use check::Files;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Steps of the job.
const STEPS: u32 = 30;
/// Steps between two checkpoints.
const SAVE_EVERY: u32 = 5;
/// Steps between two sets of pictures: some fall on a checkpoint, some do not.
const SAMPLE_EVERY: u32 = 10;

/// One machine with a worker: its data folder stays when its process dies.
pub struct Machine {
    /// Its name and that of its folder.
    pub name: String,
    /// None while it is down.
    pub process: Option<Process>,
}

/// Everything that runs.
pub struct Cluster {
    /// Coordinator and command line.
    pub pool: Pool,
    /// Storage.
    pub s3: S3,
    /// Two of them.
    pub machines: Vec<Machine>,
    /// What a run makes that nobody disturbs.
    pub expected: Files,
    /// Everything lies below it.
    pub root: PathBuf,
}

impl Cluster {
    /// Makes the job, runs it once undisturbed on this machine (`aitk run`), then starts everything.
    ///
    /// # Panics
    /// When anything of that fails.
    #[must_use]
    pub fn start(s3_server: &str, root: &Path) -> Self {
        jobs::draw_dataset(&root.join("dataset"), 4);
        let text = jobs::training("shapes", root, STEPS, SAVE_EVERY);
        let text = text.replace("sample_every: 1000000", &format!("sample_every: {SAMPLE_EVERY}"));
        std::fs::write(root.join("job.yaml"), text).expect("the job can be written");
        let expected = undisturbed(root);
        let s3 = S3::start(s3_server, root);
        let setup = Setup::new(root).storage(s3.url(), s3.environment());
        let pool = Pool::start_with(Setup {
            lease: Duration::from_secs(4),
            // A round may hit the same stretch of work many times.
            retries: 50,
            ..setup
        });
        let mut cluster = Self {
            pool,
            s3,
            machines: Vec::new(),
            expected,
            root: root.to_path_buf(),
        };
        for name in ["left", "right"] {
            let process = Some(cluster.pool.worker(name));
            let name = name.to_owned();
            cluster.machines.push(Machine { name, process });
        }
        cluster
    }

    /// Puts everything right again.
    pub fn heal(&mut self) {
        self.s3.set(Fault::None);
        for at in 0..self.machines.len() {
            match &self.machines[at].process {
                Some(process) => process.signal(nix::sys::signal::Signal::SIGCONT),
                None => self.machines[at].process = Some(self.pool.worker(&self.machines[at].name)),
            }
        }
    }

    /// The ends of all logs, for a message.
    #[must_use]
    pub fn tails(&self) -> String {
        let mut tails = vec![self.pool.coordinator.tail()];
        for machine in self.machines.iter().filter_map(|machine| machine.process.as_ref()) {
            tails.push(machine.tail());
        }
        tails.join("\n")
    }
}

fn undisturbed(root: &Path) -> Files {
    jobs::run_undisturbed(root);
    let files = Files::below(&root.join("shapes"));
    assert!(files.names().any(|name| name == "shapes.safetensors"), "{files:?}");
    files
}
