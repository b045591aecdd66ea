//! The jobs of a round, from their submission to their end.

use super::check::Files;
use super::events::Event;
use crate::follower::Follower;
use crate::hub;
use crate::jobs;
use crate::pool::Pool;
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
/// Before a submission that was not acknowledged is made again.
const PAUSE: Duration = Duration::from_millis(500);

/// A kind of job, and what it makes when nobody disturbs it.
pub struct Work {
    /// Its config.
    pub config: &'static str,
    /// The folder of its results below that into which they are fetched.
    pub folder: &'static str,
    /// Of how many jobs the array is that it becomes; none: it is one job.
    pub parts: Option<u32>,
    /// Its results.
    pub expected: Files,
}

impl Work {
    /// Trains.
    #[must_use]
    pub fn training(root: &Path) -> Self {
        jobs::draw_dataset(&root.join("dataset"), 4);
        let text = jobs::training("shapes", root, STEPS, SAVE_EVERY);
        let text = text.replace("sample_every: 1000000", &format!("sample_every: {SAMPLE_EVERY}"));
        let work = Self::new(root, "job.yaml", "shapes", None, &text);
        let names: Vec<&str> = work.expected.names().collect();
        assert!(names.contains(&"shapes.safetensors"), "{names:?}");
        Self {
            folder: "shapes",
            ..work
        }
    }

    /// Draws images with a model that has to be fetched from the hub.
    #[must_use]
    pub fn of_hub(root: &Path) -> Self {
        let text = jobs::images("hubbed", &root.join("hubbed"), 1, None);
        let work = Self::new(root, "hubbed.yaml", "hubbed", None, &text);
        // The same model, by the name that the hub has for it.
        let text = text.replace(&jobs::tiny_model().display().to_string(), hub::MODEL);
        assert!(text.contains(hub::MODEL), "{text}");
        std::fs::write(root.join(work.config), text).expect("the job can be written");
        work
    }

    /// Draws images, in one piece or in several.
    #[must_use]
    pub fn images(root: &Path, parts: Option<u32>) -> Self {
        let (config, name, repeats) = match parts {
            None => ("images.yaml", "images", 2),
            Some(_) => ("parts.yaml", "parts", 4),
        };
        let text = jobs::images(name, &root.join(name), repeats, parts);
        let work = Self::new(root, config, name, parts, &text);
        let names: Vec<&str> = work.expected.names().collect();
        assert_eq!(names.len(), 3 * repeats as usize, "{names:?}");
        work
    }

    fn new(root: &Path, config: &'static str, made_in: &str, parts: Option<u32>, text: &str) -> Self {
        std::fs::write(root.join(config), text).expect("the job can be written");
        jobs::run_config(root, config);
        Self {
            config,
            folder: "",
            parts,
            expected: Files::below(&root.join(made_in)),
        }
    }
}

/// A submission: made again with the same key until it is acknowledged, then followed.
pub struct Submitted {
    /// Which work of the cluster's.
    pub work: usize,
    /// How often it was submitted.
    pub tries: u32,
    /// What the coordinator called it; none: not acknowledged yet.
    pub id: Option<String>,
    /// The job, or the members of the array.
    pub members: Vec<Member>,
    key: String,
    parts: Option<u32>,
    config: &'static str,
    log: PathBuf,
    running: Option<Child>,
    again: Instant,
}

/// A job that is followed.
pub struct Member {
    /// Its id.
    pub id: String,
    /// Where it runs.
    pub busy: Option<String>,
    /// Whoever follows it has seen its end.
    pub is_over: bool,
    follower: Follower,
}

impl Member {
    /// What was followed.
    pub fn watched(&mut self) -> Vec<Event> {
        self.follower.events().to_vec()
    }
}

impl Submitted {
    /// Begins to submit it. `key` is its own.
    #[must_use]
    pub fn new(pool: &Pool, at: usize, work: &Work, key: String) -> Self {
        Self {
            work: at,
            tries: 0,
            id: None,
            members: Vec::new(),
            key,
            parts: work.parts,
            config: work.config,
            log: pool.setup().folder.join("submit.log"),
            running: None,
            again: Instant::now(),
        }
    }

    /// Whether all is over.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.id.is_some() && self.members.iter().all(|member| member.is_over)
    }

    /// Goes on; what has happened to its jobs.
    pub fn look(&mut self, pool: &Pool) -> Vec<Event> {
        if self.id.is_none() {
            self.submit(pool);
            return Vec::new();
        }
        let mut news = Vec::new();
        for member in &mut self.members {
            if member.follower.found_nobody() {
                member.follower = Follower::start(pool, &member.id);
            }
            // Asked first: what comes with the look after the end is the last.
            member.is_over = member.follower.is_ended();
            for event in member.follower.news() {
                if event.is_assignment() {
                    member.busy = Some(event.worker().to_owned());
                } else if event.is_end_of_attempt() {
                    member.busy = None;
                }
                news.push(event.clone());
            }
        }
        news
    }

    fn submit(&mut self, pool: &Pool) {
        let Some(running) = &mut self.running else {
            if Instant::now() >= self.again {
                self.tries += 1;
                self.running = Some(self.start(pool));
            }
            return;
        };
        let Ok(Some(status)) = running.try_wait() else {
            return;
        };
        let mut said = String::new();
        if let Some(pipe) = running.stdout.as_mut() {
            let _ = pipe.read_to_string(&mut said);
        }
        self.running = None;
        self.again = Instant::now() + PAUSE;
        if !status.success() {
            return;
        }
        let id = said.trim().to_owned();
        let ids = match self.parts {
            None => vec![id.clone()],
            Some(parts) => (0..parts).map(|part| format!("{id}-{part}")).collect(),
        };
        let follow = |id: String| Member {
            follower: Follower::start(pool, &id),
            id,
            busy: None,
            is_over: false,
        };
        self.members = ids.into_iter().map(follow).collect();
        self.id = Some(id);
    }

    fn start(&self, pool: &Pool) -> Child {
        let log = File::options().create(true).append(true).open(&self.log);
        let mut command = pool.command("aitk");
        command.args(["submit", self.config, "--idempotency-key", &self.key]);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log.expect("the log file opens"));
        command.spawn().expect("aitk starts")
    }
}

impl Drop for Submitted {
    fn drop(&mut self) {
        if let Some(running) = &mut self.running {
            let _ = running.kill();
            let _ = running.wait();
        }
    }
}
