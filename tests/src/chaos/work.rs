//! The jobs of a round, from submission to end.

use super::events::Event;
use super::files::Files;
use crate::cluster::TestCluster;
use crate::follower::Follower;
use crate::hub;
use crate::jobs;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Steps of the training job.
const STEPS: u32 = 30;
/// Steps between two checkpoints.
const SAVE_EVERY: u32 = 5;
/// Steps between two sets of images: some fall on a checkpoint, some do not.
const SAMPLE_EVERY: u32 = 10;
/// Pause before a submission that was not acknowledged is repeated.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// A job to submit, and the results of a run without faults.
pub struct Workload {
    /// The name of its config file.
    pub config: &'static str,
    /// The folder of its results below the output folder of `aitk artifacts get`.
    pub folder: &'static str,
    /// The number of parts into which the job is split; `None` for one job.
    pub parts: Option<u32>,
    /// The files of a run without faults.
    pub expected: Files,
}

impl Workload {
    /// Trains a LoRA.
    #[must_use]
    pub fn training(root: &Path) -> Self {
        jobs::write_dataset(&root.join("dataset"), 4);
        let text = jobs::training_config("shapes", root, STEPS, SAVE_EVERY);
        let text = text.replace("sample_every: 1000000", &format!("sample_every: {SAMPLE_EVERY}"));
        let work = Self::new(root, "job.yaml", "shapes", None, &text);
        let names: Vec<&str> = work.expected.names().collect();
        assert!(names.contains(&"shapes.safetensors"), "{names:?}");
        Self {
            folder: "shapes",
            ..work
        }
    }

    /// Generates images with a model from the hub.
    #[must_use]
    pub fn with_hub_model(root: &Path) -> Self {
        let text = jobs::image_config("hubbed", &root.join("hubbed"), 1, None);
        let work = Self::new(root, "hubbed.yaml", "hubbed", None, &text);
        // The same model, by the name that the hub has for it.
        let text = text.replace(&jobs::tiny_model().display().to_string(), hub::MODEL);
        assert!(text.contains(hub::MODEL), "{text}");
        std::fs::write(root.join(work.config), text).expect("the job can be written");
        work
    }

    /// Generates images, in one job or split into parts.
    #[must_use]
    pub fn images(root: &Path, parts: Option<u32>) -> Self {
        let (config, name, repeats) = match parts {
            None => ("images.yaml", "images", 2),
            Some(_) => ("parts.yaml", "parts", 4),
        };
        let text = jobs::image_config(name, &root.join(name), repeats, parts);
        let work = Self::new(root, config, name, parts, &text);
        let names: Vec<&str> = work.expected.names().collect();
        assert_eq!(names.len(), 3 * repeats as usize, "{names:?}");
        work
    }

    fn new(root: &Path, config: &'static str, output: &str, parts: Option<u32>, text: &str) -> Self {
        std::fs::write(root.join(config), text).expect("the job can be written");
        jobs::run_config(root, config);
        Self {
            config,
            folder: "",
            parts,
            expected: Files::below(&root.join(output)),
        }
    }
}

/// A submission that is repeated with the same key until it is acknowledged, and then followed.
pub struct Submission {
    /// The index of its workload.
    pub workload: usize,
    /// How often it was submitted.
    pub submissions: u32,
    /// The job id; `None` until the submission is acknowledged.
    pub id: Option<String>,
    /// The job, or the members of the array.
    pub members: Vec<Member>,
    key: String,
    parts: Option<u32>,
    config: &'static str,
    log: PathBuf,
    running: Option<Child>,
    next_attempt: Instant,
}

/// A job that is followed.
pub struct Member {
    /// The job id.
    pub id: String,
    /// The name of the worker that runs it.
    pub worker: Option<String>,
    /// Whether its follower has seen its end.
    pub is_over: bool,
    follower: Follower,
}

impl Member {
    /// The events that its follower has seen.
    pub fn seen_events(&mut self) -> Vec<Event> {
        self.follower.events().to_vec()
    }
}

impl Submission {
    /// Prepares a submission with this idempotency key.
    #[must_use]
    pub fn new(test_cluster: &TestCluster, index: usize, workload: &Workload, key: String) -> Self {
        Self {
            workload: index,
            submissions: 0,
            id: None,
            members: Vec::new(),
            key,
            parts: workload.parts,
            config: workload.config,
            log: test_cluster.setup().folder.join("submit.log"),
            running: None,
            next_attempt: Instant::now(),
        }
    }

    /// Whether all its jobs have ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.id.is_some() && self.members.iter().all(|member| member.is_over)
    }

    /// Submits the job if it is not acknowledged yet. Returns the new events of its jobs.
    pub fn poll(&mut self, test_cluster: &TestCluster) -> Vec<Event> {
        if self.id.is_none() {
            self.submit(test_cluster);
            return Vec::new();
        }
        let mut new_events = Vec::new();
        for member in &mut self.members {
            if member.follower.was_unreachable() {
                member.follower = Follower::start(test_cluster, &member.id);
            }
            // Checked before the events are read, so no event after the end is missed.
            member.is_over = member.follower.has_ended();
            for event in member.follower.new_events() {
                if event.is_assignment() {
                    member.worker = Some(event.worker().to_owned());
                } else if event.is_end_of_attempt() {
                    member.worker = None;
                }
                new_events.push(event.clone());
            }
        }
        new_events
    }

    fn submit(&mut self, test_cluster: &TestCluster) {
        let Some(running) = &mut self.running else {
            if Instant::now() >= self.next_attempt {
                self.submissions += 1;
                self.running = Some(self.start(test_cluster));
            }
            return;
        };
        let Ok(Some(status)) = running.try_wait() else {
            return;
        };
        let mut stdout = String::new();
        if let Some(pipe) = running.stdout.as_mut() {
            let _ = pipe.read_to_string(&mut stdout);
        }
        self.running = None;
        self.next_attempt = Instant::now() + RETRY_PAUSE;
        if !status.success() {
            return;
        }
        let id = stdout.trim().to_owned();
        let ids = match self.parts {
            None => vec![id.clone()],
            Some(parts) => (0..parts).map(|part| format!("{id}-{part}")).collect(),
        };
        let follow = |id: String| Member {
            follower: Follower::start(test_cluster, &id),
            id,
            worker: None,
            is_over: false,
        };
        self.members = ids.into_iter().map(follow).collect();
        self.id = Some(id);
    }

    fn start(&self, test_cluster: &TestCluster) -> Child {
        let log = File::options().create(true).append(true).open(&self.log);
        let mut command = test_cluster.command("aitk");
        command.args(["submit", self.config, "--idempotency-key", &self.key]);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log.expect("the log file opens"));
        command.spawn().expect("aitk starts")
    }
}

impl Drop for Submission {
    fn drop(&mut self) {
        if let Some(running) = &mut self.running {
            let _ = running.kill();
            let _ = running.wait();
        }
    }
}
