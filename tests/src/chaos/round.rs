//! One round: jobs are submitted, the faults are made at their moments, everything heals, the jobs end.

use super::Cluster;
use super::events::Event;
use super::inject::FaultInjector;
use super::plan::{FaultKind, Plan, PlannedFault, Target, Terms, Trigger};
use super::work::Submitted;
use crate::processes::LogTail;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A fault that waits for longer than this is made anyway.
const LONGEST_WAIT: Duration = Duration::from_secs(20);
/// How often the round looks around.
const LOOK: Duration = Duration::from_millis(4);
/// How often it looks who ended by himself.
const SUPERVISE: Duration = Duration::from_secs(1);
/// More than any round has.
const MOST_JOBS: usize = 24;

/// A round that is over.
pub struct Ended {
    /// The jobs, with what was followed while they ran.
    pub jobs: Vec<Done>,
    /// The faults that were made, with the time since the submission.
    pub made: Vec<(Duration, PlannedFault)>,
    /// How long it took until all jobs had ended.
    pub took: Duration,
    /// In words, when they did not.
    pub stuck: Option<String>,
}

/// A job, or the members of an array, at the end.
pub struct Done {
    /// Which work of the cluster's.
    pub work: usize,
    /// None: it was never acknowledged.
    pub id: Option<String>,
    /// How often it was submitted.
    pub tries: u32,
    /// Each job with what was followed.
    pub members: Vec<(String, Vec<Event>)>,
}

impl Ended {
    /// Attempts that were made.
    #[must_use]
    pub fn attempts(&self) -> usize {
        self.count(Event::is_assignment)
    }

    /// Events of this kind that were seen.
    #[must_use]
    pub fn count(&self, wanted: impl Fn(&Event) -> bool) -> usize {
        let members = self.jobs.iter().flat_map(|job| &job.members);
        members
            .map(|(_, events)| events.iter().filter(|event| wanted(event)).count())
            .sum()
    }
}

/// A row of faults, one after the other.
struct Track {
    waiting: VecDeque<PlannedFault>,
    ready: Instant,
    due: Option<Instant>,
}

struct Round<'a> {
    cluster: &'a mut Cluster,
    terms: Terms,
    seed: u64,
    jobs: Vec<Submitted>,
    requests: LogTail,
    injector: FaultInjector,
    /// Until when somebody is frozen for minutes.
    frozen_until: Option<Instant>,
}

/// Runs a round, and stops injecting faults after `most`.
#[must_use]
pub fn run(cluster: &mut Cluster, plan: &Plan, terms: &Terms, most: usize) -> Ended {
    cluster.begin_round();
    let begun = Instant::now();
    let requests = cluster.s3.process.tail_from_now();
    let mut round = Round {
        cluster,
        terms: *terms,
        seed: plan.seed,
        jobs: Vec::new(),
        requests,
        injector: FaultInjector::default(),
        frozen_until: None,
    };
    let made = round.inject_all(plan, begun, most);
    let took = begun.elapsed();
    round.injector.recover_all(round.cluster);
    let stuck = (took >= terms.limit).then(|| round.words(terms.limit));
    let jobs = round.jobs.iter_mut().map(|job| Done {
        work: job.work,
        id: job.id.clone(),
        tries: job.tries,
        members: job
            .members
            .iter_mut()
            .map(|member| (member.id.clone(), member.watched()))
            .collect(),
    });
    let jobs = jobs.collect();
    Ended {
        jobs,
        made,
        took,
        stuck,
    }
}

impl Round<'_> {
    /// Makes the faults, and waits for the end of all jobs.
    fn inject_all(&mut self, plan: &Plan, begun: Instant, most: usize) -> Vec<(Duration, PlannedFault)> {
        let mut made = Vec::new();
        let mut tracks: Vec<Track> = (0..self.terms.tracks).map(|_| Track::new()).collect();
        let count = tracks.len();
        for (at, fault) in plan.faults.iter().enumerate() {
            tracks[at % count].waiting.push_back(*fault);
        }
        let mut supervised = Instant::now();
        while begun.elapsed() < self.terms.limit {
            let faults_left = made.len() < most && tracks.iter().any(|track| !track.waiting.is_empty());
            let frozen = self.frozen_until.is_some_and(|until| Instant::now() < until);
            self.submit(faults_left || frozen);
            let news = self.look();
            self.injector.recover(self.cluster, Instant::now());
            if supervised.elapsed() > SUPERVISE {
                self.cluster.supervise();
                supervised = Instant::now();
            }
            let all_over = self.jobs.iter().all(Submitted::is_over);
            if all_over && !(self.terms.keep_busy && (faults_left || frozen)) {
                break;
            }
            for track in &mut tracks {
                if made.len() >= most {
                    break;
                }
                if let Some(fault) = track.next(&news)
                    && self.make(fault.what)
                {
                    made.push((begun.elapsed(), fault));
                }
            }
            std::thread::sleep(LOOK);
        }
        made
    }

    /// Keeps the pool busy.
    fn submit(&mut self, more: bool) {
        let alive = self.jobs.iter().filter(|job| !job.is_over()).count();
        let first = self.jobs.len() < self.terms.jobs;
        let again = more && self.terms.keep_busy && self.jobs.len() < MOST_JOBS;
        if alive < self.terms.jobs && (first || again) {
            let at = self.jobs.len() % self.cluster.work.len();
            let key = format!("round-{}-{}", self.seed, self.jobs.len());
            let work = &self.cluster.work[at];
            self.jobs.push(Submitted::new(self.cluster.pool(), at, work, key));
        }
    }

    /// What has just happened.
    fn look(&mut self) -> Vec<Trigger> {
        let mut news = vec![Trigger::Next];
        for job in &mut self.jobs {
            for event in job.look(self.cluster.pool()) {
                if event.is_assignment() {
                    news.push(Trigger::Staging);
                }
                if event.kind() == "checkpoint" {
                    news.push(Trigger::Commit);
                }
                if event.kind() == "phase" && matches!(event.name(), "sampling" | "generating") {
                    news.push(Trigger::Sampling);
                }
            }
        }
        let requests = self.requests.lines();
        if requests
            .iter()
            .any(|line| line.starts_with("begin ") && line.contains(" PUT "))
        {
            news.push(Trigger::Upload);
        }
        news
    }

    fn machine(&self, target: Target) -> usize {
        let members = || self.jobs.iter().flat_map(|job| &job.members);
        let is_busy = |at: &usize| {
            let name = Some(&self.cluster.machines[*at].name);
            members().any(|member| member.busy.as_ref() == name && !member.is_over)
        };
        let all = 0..self.cluster.machines.len();
        let (busy, idle): (Vec<usize>, Vec<usize>) = all.partition(is_busy);
        let (wanted, others, number) = match target {
            Target::Busy(number) => (busy, idle, number),
            Target::Idle(number) => (idle, busy, number),
        };
        let among = if wanted.is_empty() { others } else { wanted };
        among[usize::from(number) % among.len()]
    }

    fn make(&mut self, what: FaultKind) -> bool {
        let at = match what {
            FaultKind::KillWorker { target, .. }
            | FaultKind::KillChild { target }
            | FaultKind::HangChild { target }
            | FaultKind::Refuse { target, .. }
            | FaultKind::Freeze { target, .. }
            | FaultKind::Line { target, .. } => self.machine(target),
            _ => 0,
        };
        let made = self.injector.make(self.cluster, &what, at);
        if let (true, true, FaultKind::Freeze { time, .. } | FaultKind::FreezeLeader { time }) =
            (made, what.is_long(), what)
        {
            self.frozen_until = Some(Instant::now() + time);
        }
        made
    }

    /// What is not over.
    fn words(&self, limit: Duration) -> String {
        let mut words = format!("not everything has ended after {limit:?}:");
        for job in self.jobs.iter().filter(|job| !job.is_over()) {
            let over = job.members.iter().filter(|member| !member.is_over);
            let members: Vec<String> = over
                .map(|member| format!("{} on {:?}", member.id, member.busy))
                .collect();
            let config = self.cluster.work[job.work].config;
            words += &format!("\n{config} {:?}, submitted {} times: {members:?}", job.id, job.tries);
        }
        words
    }
}

impl Track {
    fn new() -> Self {
        Self {
            waiting: VecDeque::new(),
            ready: Instant::now(),
            due: None,
        }
    }

    /// The next fault if it is to be made now.
    fn next(&mut self, news: &[Trigger]) -> Option<PlannedFault> {
        let fault = self.waiting.front()?;
        let is_moment = self.ready.elapsed() > LONGEST_WAIT || news.contains(&fault.when);
        if self.due.is_none() && is_moment {
            self.due = Some(Instant::now() + fault.delay);
        }
        if self.due.is_none_or(|due| Instant::now() < due) {
            return None;
        }
        (self.ready, self.due) = (Instant::now(), None);
        self.waiting.pop_front()
    }
}
