//! Benchmark of the scheduler alone: how many decisions it makes per second, and what a waiting job costs.
//!
//!     cargo bench -p aitk-coordinator --bench scheduler
//!
//! A decision is a device that becomes free and the choice of the next job for it, with everything that belongs to it:
//! the end of the old attempt, the new one, its events and records as effects (which are dropped: no store, no wire).
//! Rates are per second of CPU time, on one thread; Linux only, because of the memory. Short queues are
//! filled and drained several times, because one run is shorter than the resolution of the clock.
//!
//! Then the time of single requests with 50,000 waiting jobs: in the scheduler, and in SQLite, which stores their changes while
//! the scheduler waits.

use aitk_common::attempt::Outcome;
use aitk_common::capability::{Device, DeviceKind, DeviceRef};
use aitk_common::control_plane::{AttemptRef, PROTOCOL_VERSION, Registration, UnixMillis};
use aitk_common::id::{JobId, UserName, WorkerId};
use aitk_common::plan::demand::Demand;
use aitk_common::plan::need::MemoryNeed;
use aitk_common::plan::profile::MemoryProfile;
use aitk_coordinator::store::{SqlStore, Store};
use aitk_scheduler::{
    Dependency, DependencyCondition, Effect, Event, ListQuery, NewArray, NewJob, Payload, Record, Requirements,
    SessionId, Settings, State, Ticket,
};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::{TimeVal, TimeValLike};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

const GIB: u64 = 1 << 30;
const WORKERS: u64 = 200;
const DECISIONS: u64 = 200_000;

fn resident() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = pages.split(' ').nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
    pages * 4096
}

/// CPU time of this process, so that load of other programs does not count. (The figure in
/// `/proc/self/schedstat` only moves when the clock ticks.)
fn cpu_time() -> Duration {
    let Ok(usage) = getrusage(UsageWho::RUSAGE_SELF) else {
        return Duration::ZERO;
    };
    let micros = |time: TimeVal| time.num_microseconds().unsigned_abs();
    Duration::from_micros(micros(usage.user_time()) + micros(usage.system_time()))
}

/// Creates a submission: jobs of ten users, three priorities and four families, as in a lab.
fn job(number: u64, fits: bool) -> Event {
    Event::JobSubmitted {
        ticket: Ticket(1),
        job: Box::new(new_job(number, fits)),
    }
}

fn new_job(number: u64, fits: bool) -> NewJob {
    let families = ["sd1", "sdxl", "flux", "sd3"];
    let family = families[(number % 4) as usize];
    let bytes = |gib: u64| gib * GIB + number % 4 * GIB / 2;
    let need = MemoryNeed::new([[20, 16, 12, 8].map(bytes); 2], [bytes(30); 4]);
    let requirements = Requirements {
        priority: (number / 7 % 3) as i64,
        owner: UserName::new(format!("user{}", number % 10)),
        demand: Some(Demand {
            family: family.into(),
            millipasses: 1_000_000,
            memory: Some(need),
        }),
        // Jobs that fit on no device all differ from each other.
        memory: (!fits).then_some(1024 * GIB + number),
        retries: 3,
        ..Requirements::default()
    };
    NewJob {
        id: JobId::new(format!("j{number:08x}")),
        seed: number,
        name: "a_lora_of_my_cat".into(),
        kind: "extension".into(),
        requirements,
        local: false,
        idempotency_key: None,
        sees_all: true,
        after: Vec::new(),
        not_before: None,
        trace: None,
        user_limits_apply: false,
        config_bytes: 0,
        payload: Arc::new(Payload::default()),
    }
}

fn worker(number: u64) -> Event {
    let sizes = [24, 24, 48, 80];
    let budget = sizes[(number % 4) as usize] * GIB;
    let device = Device {
        id: DeviceRef {
            kind: DeviceKind::Cuda,
            index: 0,
        },
        name: format!("card {}", number % 4),
        architecture: "sm_89".into(),
        memory_total: budget,
        memory_budget: budget,
        dtypes: Vec::new(),
        attention: Vec::new(),
        profile: MemoryProfile::FullGpu,
        gflops: 0,
    };
    let id = WorkerId::new(format!("w{number}"));
    Event::WorkerRegistered {
        session: SessionId(number + 1),
        fresh_id: id.clone(),
        same_machine: false,
        registration: Box::new(Registration {
            protocol: PROTOCOL_VERSION,
            worker: Some(id.clone()),
            name: id.to_string(),
            version: String::new(),
            host: String::new(),
            devices: vec![device],
            labels: BTreeMap::new(),
            running: Vec::new(),
            confinement: None,
            offers: Vec::new(),
            outputs_on_request: false,
        }),
    }
}

struct Bench {
    state: State,
    now: UnixMillis,
    running: VecDeque<(SessionId, AttemptRef)>,
    submitted: u64,
}

impl Bench {
    fn new() -> Self {
        Self {
            state: State::new(Settings::from_lease(Duration::from_secs(60))),
            now: UnixMillis(1_000_000),
            running: VecDeque::new(),
            submitted: 0,
        }
    }

    fn step(&mut self, event: Event) -> u64 {
        self.now = self.now.after(Duration::from_millis(1));
        let mut placed = 0;
        for effect in self.state.handle(self.now, event) {
            if let Effect::Assign(session, assigned) = effect {
                self.running.push_back((session, assigned.held));
                placed += 1;
            }
        }
        placed
    }

    fn submit(&mut self, count: u64, fits: bool) -> Duration {
        let start = cpu_time();
        for _ in 0..count {
            let event = job(self.submitted, fits);
            self.submitted += 1;
            self.step(event);
        }
        cpu_time().saturating_sub(start)
    }

    fn connect(&mut self) {
        for number in 0..WORKERS {
            self.step(worker(number));
        }
    }

    /// Ends attempts one after another. Returns the number of decisions and their CPU time.
    fn decide(&mut self, count: u64) -> (u64, Duration) {
        let start = cpu_time();
        let mut decisions = 0;
        while decisions < count {
            let Some((session, held)) = self.running.pop_front() else {
                break;
            };
            decisions += self.step(Event::Finished {
                session,
                request: 1,
                held,
                outcome: Outcome::Completed,
            });
        }
        (decisions, cpu_time().saturating_sub(start))
    }
}

/// Measures single requests in the scheduler and in SQLite.
struct Requests {
    bench: Bench,
    store: SqlStore,
    runtime: tokio::runtime::Runtime,
    lines: Vec<String>,
}

impl Requests {
    fn new(folder: &std::path::Path) -> Option<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .ok()?;
        let store = runtime.block_on(SqlStore::sqlite(&folder.join("aitk.db"))).ok()?;
        Some(Self {
            bench: Bench::new(),
            store,
            runtime,
            lines: Vec::new(),
        })
    }

    /// Measures one request and adds its line to the result.
    fn event(&mut self, what: &str, event: Event) {
        let (scheduler, records, sqlite) = self.handle(event);
        self.lines.push(format!(
            "  {what}: scheduler {:.1} ms, {records} records in SQLite {:.1} ms",
            scheduler.as_secs_f64() * 1e3,
            sqlite.as_secs_f64() * 1e3
        ));
    }

    /// Handles requests without measuring, and stores their records together.
    fn prepare(&mut self, events: impl IntoIterator<Item = Event>) {
        let mut records = Vec::new();
        for event in events {
            self.bench.now = self.bench.now.after(Duration::from_millis(1));
            for effect in self.bench.state.handle(self.bench.now, event) {
                match effect {
                    Effect::Persist(record) => records.push(record),
                    Effect::Assign(session, assigned) => self.bench.running.push_back((session, assigned.held)),
                    _ => {}
                }
            }
            if records.len() > 2000 {
                self.store(&std::mem::take(&mut records));
            }
        }
        self.store(&records);
    }

    fn store(&self, records: &[Record]) {
        if let Err(error) = self.runtime.block_on(self.store.commit(records, &[])) {
            print_line(&format!("the store failed: {error}"));
        }
    }

    /// Returns the scheduler's time, the number of records, and SQLite's time for them.
    fn handle(&mut self, event: Event) -> (Duration, usize, Duration) {
        self.bench.now = self.bench.now.after(Duration::from_millis(1));
        let start = cpu_time();
        let effects = self.bench.state.handle(self.bench.now, event);
        let scheduler = cpu_time().saturating_sub(start);
        let mut records = Vec::new();
        for effect in effects {
            match effect {
                Effect::Persist(record) => records.push(record),
                Effect::Assign(session, assigned) => self.bench.running.push_back((session, assigned.held)),
                Effect::Reply(_, Err(refusal)) => print_line(&format!("refused: {refusal}")),
                _ => {}
            }
        }
        let start = Instant::now();
        self.store(&records);
        (scheduler, records.len(), start.elapsed())
    }

    fn list(&mut self, what: &str, listing: &ListQuery) {
        let start = cpu_time();
        let page = self.bench.state.list(self.bench.now, listing, |_| true, |_| false);
        let took = cpu_time().saturating_sub(start).as_secs_f64() * 1e3;
        self.lines
            .push(format!("  {what}: scheduler {took:.1} ms, {} rows", page.jobs.len()));
    }

    fn all(mut self, waiting: u64) -> Vec<String> {
        let array = |id: &str, first: u64, change: &dyn Fn(&mut NewJob)| Event::ArraySubmitted {
            ticket: Ticket(1),
            array: Box::new(NewArray {
                id: JobId::new(id),
                name: "an_array".into(),
                at_most: None,
                split: false,
                idempotency_key: None,
                members: (0..1000)
                    .map(|index| {
                        let mut job = new_job(first + index, true);
                        job.id = JobId::new(format!("{id}-{index}"));
                        job.name = job.id.to_string();
                        change(&mut job);
                        job
                    })
                    .collect(),
            }),
        };
        let unplaceable = |number: u64| Event::JobSubmitted {
            ticket: Ticket(1),
            job: Box::new(new_job(number, false)),
        };
        self.prepare((0..waiting).map(|number| job(number, true)));
        self.event("submit one", job(waiting, true));
        self.event("submit an array of 1,000", array("ja", 2 * waiting, &|_| {}));
        self.list("a page of the list", &ListQuery::default());
        let members = ListQuery {
            all: true,
            members: true,
            name_part: Some("my_cat".into()),
            ..ListQuery::default()
        };
        self.list("a page of all jobs whose names hold a text", &members);
        self.event("the first worker", worker(0));
        self.prepare((1..WORKERS).map(worker));
        self.event("one worker more", worker(WORKERS));
        self.event("a tick", Event::Tick);
        let (ticket, now) = (Ticket(1), true);
        let text = || "ja".to_owned();
        let priority = Event::PriorityRequested {
            ticket,
            job: text(),
            priority: 3,
        };
        self.event("give an array of 1,000 another priority", priority);
        self.event("pause it", Event::PauseRequested { ticket, job: text() });
        self.event("resume it", Event::ResumeRequested { ticket, job: text() });
        self.event(
            "stop it",
            Event::StopRequested {
                ticket,
                job: text(),
                now,
            },
        );
        self.event("remove it", Event::RemoveRequested { ticket, job: text() });
        // All jobs depend on one job, which fits on no device and waits until it is stopped.
        for (name, first) in [("stop", 10_000_000), ("end", 20_000_000)] {
            self.prepare([unplaceable(first)]);
            let before = JobId::new(format!("j{first:08x}"));
            let after = |job: &mut NewJob| {
                let condition = if name == "stop" {
                    DependencyCondition::Completed
                } else {
                    DependencyCondition::Ended
                };
                let job_of = before.to_string();
                job.after = vec![Dependency { job: job_of, condition }];
            };
            self.prepare(
                (0..waiting / 1000).map(|part| array(&format!("j{name}{part}"), first + 1 + part * 1000, &after)),
            );
            let stop = Event::StopRequested {
                ticket,
                job: before.to_string(),
                now,
            };
            let meaning = if name == "stop" {
                "go on waiting"
            } else {
                "may start then"
            };
            self.event(&format!("stop a job that {waiting} start after, which {meaning}"), stop);
        }
        self.prepare((0..waiting / 5).map(|number| unplaceable(30_000_000 + number)));
        self.event("a worker beside 10,000 jobs that all differ", worker(WORKERS + 1));
        // All of them end.
        let stop = |number: u64| Event::StopRequested {
            ticket,
            job: format!("j{number:08x}"),
            now,
        };
        self.prepare((0..waiting).map(stop));
        let expire = Event::Expire {
            jobs_before: Some(UnixMillis(u64::MAX)),
            checkpoints_before: None,
        };
        self.event("forget ended jobs, one step", expire);
        self.runtime.block_on(self.store.close());
        self.lines
    }
}

fn main() {
    // `cargo test` also runs benches, without this flag.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let mut lines = Vec::new();
    if let Some(requests) = tempfile::tempdir()
        .ok()
        .and_then(|folder| Requests::new(&folder.keep()))
    {
        lines.push("single requests with 50,000 waiting jobs:".to_owned());
        lines.extend(requests.all(50_000));
    }
    if std::env::args().any(|argument| argument == "requests") {
        for line in lines {
            print_line(&line);
        }
        return;
    }
    for waiting in [1_000, 10_000, 100_000, 1_000_000] {
        let before = resident();
        let mut bytes = None;
        let (mut submitted, mut submitting) = (0, Duration::ZERO);
        let (mut decisions, mut deciding) = (0, Duration::ZERO);
        while decisions < DECISIONS {
            let mut bench = Bench::new();
            submitting += bench.submit(waiting, true);
            submitted += waiting;
            bytes.get_or_insert_with(|| resident().saturating_sub(before));
            bench.connect();
            let (made, took) = bench.decide(DECISIONS.min(waiting * 3 / 4));
            decisions += made;
            deciding += took;
        }
        let bytes = bytes.unwrap_or_default();
        lines.push(format!(
            "{waiting:>9} waiting: {:>9.0} decisions/s, {:>9.0} submissions/s, {:>5} bytes per waiting job ({} MB in all)",
            decisions as f64 / deciding.as_secs_f64(),
            submitted as f64 / submitting.as_secs_f64(),
            bytes / waiting,
            bytes / 1_000_000
        ));
    }
    let mut bench = Bench::new();
    bench.submit(10_000, false);
    bench.submit(300_000, true);
    bench.connect();
    let (decisions, took) = bench.decide(DECISIONS);
    let rate = decisions as f64 / took.as_secs_f64();
    lines.push(format!(
        "  beside 10,000 different jobs that fit on no device: {rate:>9.0} decisions/s"
    ));
    for line in lines {
        print_line(&line);
    }
}

/// Prints a line of the result.
#[expect(clippy::print_stdout, reason = "the result of a benchmark")]
fn print_line(line: &str) {
    println!("{line}");
}
