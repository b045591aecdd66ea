//! One round: the job is submitted, the wounds are made at their moments, everything heals, the job ends.

use super::Cluster;
use super::events::Event;
use super::plan::{Plan, What, When, Whose, Wound};
use crate::fault::Fault;
use crate::follower::Follower;
use crate::processes::{LogTail, Process};
use nix::sys::signal::Signal;
use std::time::{Duration, Instant};

/// A wound that waits for longer than this is made anyway.
const LONGEST_WAIT: Duration = Duration::from_secs(20);
/// How long a whole round may take: every outage, several leases, and a machine with other work to do.
const LIMIT: Duration = Duration::from_secs(420);
/// How often the round looks around.
const LOOK: Duration = Duration::from_millis(4);

/// A round that is over.
pub struct Ended {
    /// The job.
    pub job: String,
    /// What was followed while it ran.
    pub watched: Vec<Event>,
    /// The wounds that were made, with the time since the submission.
    pub made: Vec<(Duration, Wound)>,
    /// How long the job took.
    pub took: Duration,
}

/// What gets better by itself, and when.
struct Cure {
    at: Instant,
    what: Cured,
}

enum Cured {
    Machine { at: usize, empty: bool },
    Frozen { at: usize, id: u32 },
    Coordinator,
    Storage,
}

struct Round<'a> {
    cluster: &'a mut Cluster,
    job: String,
    follower: Follower,
    requests: LogTail,
    busy: Option<String>,
    cures: Vec<Cure>,
    coordinator_is_down: bool,
}

/// Runs a round.
///
/// # Panics
/// When the job does not end in time.
#[must_use]
pub fn run(cluster: &mut Cluster, plan: &Plan) -> Ended {
    let job = cluster.pool.aitk_ok(["submit", "job.yaml"]).trim().to_owned();
    let begun = Instant::now();
    let follower = Follower::start(&cluster.pool, &job);
    let requests = cluster.s3.process.tail_from_now();
    let mut round = Round {
        cluster,
        job,
        follower,
        requests,
        busy: None,
        cures: Vec::new(),
        coordinator_is_down: false,
    };
    let made = round.wound(plan, begun);
    let took = begun.elapsed();
    round.cure_all();
    Ended {
        watched: round.follower.events().to_vec(),
        job: round.job,
        made,
        took,
    }
}

impl Round<'_> {
    /// Makes the wounds, and waits for the end of the job.
    fn wound(&mut self, plan: &Plan, begun: Instant) -> Vec<(Duration, Wound)> {
        let mut made = Vec::new();
        let mut waiting = plan.wounds.iter().copied();
        let mut next = waiting.next();
        let mut ready = Instant::now();
        let mut due: Option<Instant> = None;
        loop {
            let over = self.follower.is_ended();
            let news = self.look();
            self.cure(Instant::now());
            if over {
                return made;
            }
            assert!(
                begun.elapsed() < LIMIT,
                "the job {} has not ended after {LIMIT:?}\n{plan}\nmade: {made:?}\n{}",
                self.job,
                self.cluster.tails()
            );
            if let Some(wound) = next {
                let is_moment = ready.elapsed() > LONGEST_WAIT || news.contains(&wound.when);
                if due.is_none() && is_moment {
                    due = Some(Instant::now() + wound.delay);
                }
                if due.is_some_and(|due| Instant::now() >= due) {
                    self.make(wound.what);
                    made.push((begun.elapsed(), wound));
                    next = waiting.next();
                    (ready, due) = (Instant::now(), None);
                }
            }
            std::thread::sleep(LOOK);
        }
    }

    /// What has just happened.
    fn look(&mut self) -> Vec<When> {
        let mut news = vec![When::Next];
        for event in self.follower.news() {
            if event.is_assignment() {
                self.busy = Some(event.worker().to_owned());
                news.push(When::Staging);
            }
            if event.kind() == "checkpoint" {
                news.push(When::Commit);
            }
            if event.kind() == "phase" && event.name() == "sampling" {
                news.push(When::Sampling);
            }
        }
        let requests = self.requests.lines();
        if requests
            .iter()
            .any(|line| line.starts_with("begin ") && line.contains(" PUT "))
        {
            news.push(When::Upload);
        }
        news
    }

    fn machine(&self, whose: Whose) -> usize {
        let busy = self
            .cluster
            .machines
            .iter()
            .position(|machine| Some(&machine.name) == self.busy.as_ref());
        let busy = busy.unwrap_or(0);
        match whose {
            Whose::Busy => busy,
            Whose::Idle => 1 - busy,
        }
    }

    fn make(&mut self, what: What) {
        let now = Instant::now();
        match what {
            What::KillWorker { whose, back, empty } => {
                let at = self.machine(whose);
                if let Some(mut process) = self.cluster.machines[at].process.take() {
                    process.kill();
                    self.later(now + back, Cured::Machine { at, empty });
                }
            }
            What::KillChild => {
                let at = self.machine(Whose::Busy);
                let children = self.cluster.machines[at].process.as_ref().map(Process::children);
                for child in children.unwrap_or_default() {
                    crate::processes::send(child, Signal::SIGKILL);
                }
            }
            What::KillCoordinator { back } => {
                if !self.coordinator_is_down {
                    self.cluster.pool.coordinator.kill();
                    self.coordinator_is_down = true;
                    self.later(now + back, Cured::Coordinator);
                }
            }
            What::Freeze { whose, time } => {
                let at = self.machine(whose);
                if let Some(process) = &self.cluster.machines[at].process {
                    process.signal(Signal::SIGSTOP);
                    let id = process.id();
                    self.later(now + time, Cured::Frozen { at, id });
                }
            }
            What::Storage { fault, time } => {
                self.cures.retain(|cure| !matches!(cure.what, Cured::Storage));
                self.cluster.s3.set(fault);
                self.later(now + time, Cured::Storage);
            }
        }
    }

    fn later(&mut self, at: Instant, what: Cured) {
        self.cures.push(Cure { at, what });
    }

    /// Heals what is due.
    fn cure(&mut self, now: Instant) {
        let (due, rest): (Vec<Cure>, Vec<Cure>) = std::mem::take(&mut self.cures)
            .into_iter()
            .partition(|cure| cure.at <= now);
        self.cures = rest;
        for cure in due {
            match cure.what {
                Cured::Machine { at, empty } => {
                    let name = self.cluster.machines[at].name.clone();
                    if empty {
                        let _ = std::fs::remove_dir_all(self.cluster.pool.worker_dir(&name));
                    }
                    self.cluster.machines[at].process = Some(self.cluster.pool.worker(&name));
                }
                Cured::Frozen { at, id } => {
                    if let Some(process) = self.cluster.machines[at].process.as_ref().filter(|p| p.id() == id) {
                        process.signal(Signal::SIGCONT);
                    }
                }
                Cured::Coordinator => {
                    self.cluster.pool.restart_coordinator();
                    self.coordinator_is_down = false;
                }
                Cured::Storage => self.cluster.s3.set(Fault::None),
            }
        }
    }

    fn cure_all(&mut self) {
        let end_of_time = Instant::now() + Duration::from_secs(3600);
        self.cure(end_of_time);
        self.cluster.heal();
    }
}
