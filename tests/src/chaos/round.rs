//! One round: submits jobs, injects each fault at its trigger, ends all faults, and waits for the jobs.

use super::Cluster;
use super::events::Event;
use super::inject::FaultInjector;
use super::plan::{FaultKind, Plan, PlannedFault, RoundConfig, Target, Trigger};
use super::work::Submission;
use crate::processes::LogTail;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A fault whose trigger does not come within this time is injected anyway.
const MAX_TRIGGER_WAIT: Duration = Duration::from_secs(20);
/// Interval of the round's main loop.
const POLL_INTERVAL: Duration = Duration::from_millis(4);
/// How often it checks for processes that exited.
const SUPERVISE_INTERVAL: Duration = Duration::from_secs(1);
/// Limit of submissions in one round.
const MAX_JOBS: usize = 24;

/// The outcome of a round.
pub struct RoundOutcome {
    /// The jobs, with the events that were seen while they ran.
    pub jobs: Vec<SubmittedJob>,
    /// The injected faults, each with its time since the begin of the round.
    pub injected: Vec<(Duration, PlannedFault)>,
    /// How long it took until all jobs had ended.
    pub duration: Duration,
    /// A description of the unfinished jobs, if the round ran into its time limit.
    pub stuck: Option<String>,
}

/// A job, or the members of an array, at the end of a round.
pub struct SubmittedJob {
    /// The index in [`Cluster::workloads`].
    pub workload: usize,
    /// The job id; `None` if the submission was never acknowledged.
    pub id: Option<String>,
    /// How often it was submitted.
    pub submissions: u32,
    /// The id of each job, with its events.
    pub members: Vec<(String, Vec<Event>)>,
}

impl RoundOutcome {
    /// The number of attempts.
    #[must_use]
    pub fn attempts(&self) -> usize {
        self.count(Event::is_assignment)
    }

    /// The number of events for which `matches` is true.
    #[must_use]
    pub fn count(&self, matches: impl Fn(&Event) -> bool) -> usize {
        let members = self.jobs.iter().flat_map(|job| &job.members);
        members
            .map(|(_, events)| events.iter().filter(|event| matches(event)).count())
            .sum()
    }
}

/// A queue of faults that are injected one after another.
struct FaultQueue {
    waiting: VecDeque<PlannedFault>,
    ready: Instant,
    due: Option<Instant>,
}

struct Round<'a> {
    cluster: &'a mut Cluster,
    config: RoundConfig,
    seed: u64,
    jobs: Vec<Submission>,
    requests: LogTail,
    injector: FaultInjector,
    /// The end of a freeze that lasts for minutes.
    frozen_until: Option<Instant>,
}

/// Runs a round. Injects at most `max_faults` faults.
#[must_use]
pub fn run(cluster: &mut Cluster, plan: &Plan, config: &RoundConfig, max_faults: usize) -> RoundOutcome {
    cluster.begin_round();
    let begun = Instant::now();
    let requests = cluster.s3.process.tail_from_now();
    let mut round = Round {
        cluster,
        config: *config,
        seed: plan.seed,
        jobs: Vec::new(),
        requests,
        injector: FaultInjector::default(),
        frozen_until: None,
    };
    let injected = round.inject_all(plan, begun, max_faults);
    let duration = begun.elapsed();
    round.injector.recover_all(round.cluster);
    let stuck = (duration >= config.limit).then(|| round.describe_unfinished(config.limit));
    let jobs = round.jobs.iter_mut().map(|job| SubmittedJob {
        workload: job.workload,
        id: job.id.clone(),
        submissions: job.submissions,
        members: job
            .members
            .iter_mut()
            .map(|member| (member.id.clone(), member.seen_events()))
            .collect(),
    });
    let jobs = jobs.collect();
    RoundOutcome {
        jobs,
        injected,
        duration,
        stuck,
    }
}

impl Round<'_> {
    /// Injects the faults and waits for the end of all jobs. Returns the injected faults.
    fn inject_all(&mut self, plan: &Plan, begun: Instant, max_faults: usize) -> Vec<(Duration, PlannedFault)> {
        let mut injected = Vec::new();
        let mut fault_queues: Vec<FaultQueue> = (0..self.config.fault_queues).map(|_| FaultQueue::new()).collect();
        let count = fault_queues.len();
        for (index, fault) in plan.faults.iter().enumerate() {
            fault_queues[index % count].waiting.push_back(*fault);
        }
        let mut last_supervised = Instant::now();
        while begun.elapsed() < self.config.limit {
            let faults_left = injected.len() < max_faults && fault_queues.iter().any(|queue| !queue.waiting.is_empty());
            let frozen = self.frozen_until.is_some_and(|until| Instant::now() < until);
            self.submit(faults_left || frozen);
            let triggers = self.poll();
            self.injector.recover(self.cluster, Instant::now());
            if last_supervised.elapsed() > SUPERVISE_INTERVAL {
                self.cluster.supervise();
                last_supervised = Instant::now();
            }
            let all_over = self.jobs.iter().all(Submission::is_over);
            if all_over && !(self.config.keep_busy && (faults_left || frozen)) {
                break;
            }
            for queue in &mut fault_queues {
                if injected.len() >= max_faults {
                    break;
                }
                if let Some(fault) = queue.next_due(&triggers)
                    && self.inject(fault.kind)
                {
                    injected.push((begun.elapsed(), fault));
                }
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        injected
    }

    /// Submits the next job if fewer than `config.jobs` run; after the first ones only with `keep_busy`.
    fn submit(&mut self, keep_busy: bool) {
        let alive = self.jobs.iter().filter(|job| !job.is_over()).count();
        let first = self.jobs.len() < self.config.jobs;
        let replace = keep_busy && self.config.keep_busy && self.jobs.len() < MAX_JOBS;
        if alive < self.config.jobs && (first || replace) {
            let index = self.jobs.len() % self.cluster.workloads.len();
            let key = format!("round-{}-{}", self.seed, self.jobs.len());
            let workload = &self.cluster.workloads[index];
            self.jobs
                .push(Submission::new(self.cluster.test_cluster(), index, workload, key));
        }
    }

    /// The triggers that have occurred since the last call.
    fn poll(&mut self) -> Vec<Trigger> {
        let mut triggers = vec![Trigger::Next];
        for job in &mut self.jobs {
            for event in job.poll(self.cluster.test_cluster()) {
                if event.is_assignment() {
                    triggers.push(Trigger::Staging);
                }
                if event.kind() == "checkpoint" {
                    triggers.push(Trigger::Commit);
                }
                if event.kind() == "phase" && matches!(event.name(), "sampling" | "generating") {
                    triggers.push(Trigger::Sampling);
                }
            }
        }
        let requests = self.requests.lines();
        if requests
            .iter()
            .any(|line| line.starts_with("begin ") && line.contains(" PUT "))
        {
            triggers.push(Trigger::Upload);
        }
        triggers
    }

    /// The index of the target machine. Takes one of the others when no machine is busy, or none is idle.
    fn machine(&self, target: Target) -> usize {
        let members = || self.jobs.iter().flat_map(|job| &job.members);
        let is_busy = |index: &usize| {
            let name = Some(&self.cluster.machines[*index].name);
            members().any(|member| member.worker.as_ref() == name && !member.is_over)
        };
        let all = 0..self.cluster.machines.len();
        let (busy, idle): (Vec<usize>, Vec<usize>) = all.partition(is_busy);
        let (preferred, others, number) = match target {
            Target::Busy(number) => (busy, idle, number),
            Target::Idle(number) => (idle, busy, number),
        };
        let candidates = if preferred.is_empty() { others } else { preferred };
        candidates[usize::from(number) % candidates.len()]
    }

    /// Injects a fault. Returns false when it could not be injected.
    fn inject(&mut self, fault: FaultKind) -> bool {
        let machine = match fault {
            FaultKind::KillWorker { target, .. }
            | FaultKind::KillChild { target }
            | FaultKind::HangChild { target }
            | FaultKind::Revoke { target, .. }
            | FaultKind::Freeze { target, .. }
            | FaultKind::Link { target, .. } => self.machine(target),
            _ => 0,
        };
        let injected = self.injector.inject(self.cluster, &fault, machine);
        if let (true, true, FaultKind::Freeze { time, .. } | FaultKind::FreezeLeader { time }) =
            (injected, fault.is_long(), fault)
        {
            self.frozen_until = Some(Instant::now() + time);
        }
        injected
    }

    /// Describes the jobs that have not ended.
    fn describe_unfinished(&self, limit: Duration) -> String {
        let mut text = format!("some jobs have not ended after {limit:?}:");
        for job in self.jobs.iter().filter(|job| !job.is_over()) {
            let unfinished = job.members.iter().filter(|member| !member.is_over);
            let members: Vec<String> = unfinished
                .map(|member| format!("{} on {:?}", member.id, member.worker))
                .collect();
            let config = self.cluster.workloads[job.workload].config;
            text += &format!(
                "\n{config} {:?}, submitted {} times: {members:?}",
                job.id, job.submissions
            );
        }
        text
    }
}

impl FaultQueue {
    fn new() -> Self {
        Self {
            waiting: VecDeque::new(),
            ready: Instant::now(),
            due: None,
        }
    }

    /// Removes and returns the next fault if it is due now.
    fn next_due(&mut self, triggers: &[Trigger]) -> Option<PlannedFault> {
        let fault = self.waiting.front()?;
        let is_triggered = self.ready.elapsed() > MAX_TRIGGER_WAIT || triggers.contains(&fault.trigger);
        if self.due.is_none() && is_triggered {
            self.due = Some(Instant::now() + fault.delay);
        }
        if self.due.is_none_or(|due| Instant::now() < due) {
            return None;
        }
        (self.ready, self.due) = (Instant::now(), None);
        self.waiting.pop_front()
    }
}
