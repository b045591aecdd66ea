//! Tests of parts of one job on unequal devices: which device runs which part, which parts wait, and which are taken over.

use super::*;
use aitk_common::job::cluster::Split;

const CARDS: [(&str, &str, f64); 3] = [
    ("NVIDIA GeForce RTX 4090", "sd1", 0.01),
    ("NVIDIA GeForce RTX 3060", "sd1", 0.03),
    ("NVIDIA GeForce GTX 1060", "sd1", 0.075),
];
/// Thousandths of passes for one image of [`images`].
const IMAGE: u64 = 40_000;

/// A scheduler with machines whose speeds were measured.
struct TestBed {
    world: World,
    sessions: BTreeMap<String, SessionId>,
}

impl TestBed {
    fn new(cluster: &[&str]) -> Self {
        let mut bed = Self {
            world: World::new(),
            sessions: BTreeMap::new(),
        };
        for (device, family, seconds_per_pass) in CARDS {
            bed.world.state.speeds.restore(&Speed {
                device: device.into(),
                family: family.into(),
                nanoseconds_per_pass: (seconds_per_pass * 1e9) as u64,
                unit: WORK_UNIT,
            });
        }
        for name in cluster {
            bed.connect(name);
        }
        bed
    }

    fn connect(&mut self, name: &str) {
        self.world.sessions += 1;
        let session = SessionId(self.world.sessions);
        self.sessions.insert(name.replace('.', "-"), session);
        self.world.step(Event::WorkerRegistered {
            session,
            fresh_id: WorkerId::new("fresh"),
            same_machine: false,
            registration: Box::new(machine(name)),
        });
    }

    /// Submits a job of `parts` parts with `images_each` images each.
    fn submit_parts(
        &mut self,
        id: &str,
        parts: u64,
        images_each: u64,
        at_most: Option<u32>,
        change: impl Fn(&mut Requirements),
    ) {
        let member = |part| {
            let mut requirements = images("sd1")
                .with(|requirements| requirements.exclusive = true)
                .requirements();
            change(&mut requirements);
            if let Some(demand) = &mut requirements.demand {
                demand.millipasses = IMAGE * images_each;
            }
            new_job(&format!("{id}-{part}"), requirements)
        };
        let members = (0..parts).map(member).collect();
        self.world.array(id, members, at_most, true).unwrap();
    }

    fn parts(&mut self, parts: u64, images_each: u64) {
        self.submit_parts("j", parts, images_each, None, |_| ());
    }

    /// The running parts, such as `4090: j-0; 3060: j-1`.
    fn running(&self) -> String {
        let live = self
            .world
            .state
            .live
            .keys()
            .filter_map(|id| self.world.state.job(id)?.live_attempt().map(|one| (one, id)));
        let mut running: Vec<String> = live.map(|(one, id)| format!("{}: {id}", one.worker_name)).collect();
        running.sort();
        running.join("; ")
    }

    fn held(&self, job: &str) -> (SessionId, AttemptRef) {
        let current = self.world.state.jobs[&JobId::new(job)]
            .live_attempt()
            .unwrap_or_else(|| panic!("{job} does not run"));
        (
            self.sessions[&current.worker_name],
            AttemptRef {
                attempt: current.id.clone(),
                epoch: current.epoch,
            },
        )
    }

    fn finish(&mut self, job: &str, outcome: Outcome) {
        let (session, held) = self.held(job);
        self.world.finish(session, &held, outcome);
    }

    fn report_progress(&mut self, job: &str, done: u64, total: u64) {
        let (session, held) = self.held(job);
        let seq = self.world.state.jobs[&JobId::new(job)].live.unwrap().seq + 1;
        let report = Report::Progress(Progress {
            done,
            total,
            seconds_per_step: None,
        });
        let time = self.world.now;
        self.world.step(Event::AttemptEvent {
            session,
            held,
            seq,
            time,
            report,
        });
    }

    /// Passes this many seconds, with heartbeats of all machines.
    fn pass(&mut self, seconds: u64) {
        for _ in 0..seconds {
            let live: Vec<String> = self.world.state.live.keys().map(ToString::to_string).collect();
            for job in live {
                let (session, held) = self.held(&job);
                self.world.heartbeat(session, &[held]);
            }
            self.world.pass(1);
        }
    }

    fn reason(&self, job: &str) -> String {
        self.world.view(job).reason
    }

    /// A 3060 that runs the last part, `j-1`, of 400 images: it has generated some of them at its usual speed, 1.2 s each.
    fn with_a_slow_last_part() -> Self {
        let mut bed = Self::new(&["3060"]);
        bed.parts(2, 400);
        bed.finish("j-0", Outcome::Completed);
        bed.report_progress("j-1", 0, 400);
        bed.pass(12);
        bed.report_progress("j-1", 10, 400);
        bed
    }
}

fn two_gpus_and_a_cpu_leave_the_cpu_idle(bed: &mut TestBed) {
    bed.parts(10, 4);
    assert_eq!(
        bed.running(),
        "3060: j-1; 4090: j-0",
        "the CPU would take a hundred times as long"
    );
    bed.finish("j-0", Outcome::Completed);
    bed.finish("j-2", Outcome::Completed);
    assert_eq!(bed.running(), "3060: j-1; 4090: j-3");
}

fn the_slow_gpu_starts_no_last_part(bed: &mut TestBed) {
    bed.parts(2, 4);
    assert_eq!(bed.running(), "4090: j-0", "it ends both before the 3060 would end one");
    assert_eq!(
        bed.reason("j-1"),
        "not started on 3060 cuda:0: faster devices will finish all waiting parts before it would finish this one: 4090 cuda:0"
    );
}

fn the_slow_gpu_helps_with_many_parts(bed: &mut TestBed) {
    bed.parts(5, 4);
    assert_eq!(
        bed.running(),
        "3060: j-1; 4090: j-0",
        "in its 4.8 s the 4090 ends two of the three that wait"
    );
}

fn the_slow_gpu_starts_when_the_fast_one_leaves(bed: &mut TestBed) {
    bed.parts(2, 4);
    let session = bed.sessions["4090"];
    bed.world.step(Event::WorkerLeaving {
        session,
        reason: String::new(),
    });
    assert_eq!(bed.running(), "3060: j-1; 4090: j-0");
}

fn the_slow_gpu_starts_when_the_fast_one_is_overdue(bed: &mut TestBed) {
    bed.parts(2, 4);
    bed.pass(1);
    assert_eq!(bed.running(), "4090: j-0");
    bed.pass(1);
    assert_eq!(bed.running(), "3060: j-1; 4090: j-0", "1.6 s are over");
}

fn equal_gpus_share_the_parts(bed: &mut TestBed) {
    bed.parts(2, 4);
    assert_eq!(bed.running(), "3060-2: j-1; 3060: j-0");
}

fn an_idle_faster_gpu_takes_a_part_over(bed: &mut TestBed) {
    *bed = TestBed::with_a_slow_last_part();
    assert_eq!(bed.running(), "3060: j-1");
    bed.connect("4090");
    bed.pass(1);
    let (session, held) = bed.held("j-1");
    let is_stop = |effect: &Effect| matches!(effect, Effect::Send(to, ToWorker::Stop { held: one, save: true }) if *to == session && *one == held);
    assert!(bed.world.last.iter().any(is_stop), "{:?}", bed.world.last);
    assert_eq!(bed.reason("j-1"), "continues on 4090 cuda:0, which is faster and idle");
    bed.finish("j-1", Outcome::stopped());
    assert_eq!(bed.running(), "4090: j-1");
    assert_eq!(bed.world.state.jobs[&JobId::new("j-1")].failures, 0);
}

fn a_part_is_taken_over_only_once(bed: &mut TestBed) {
    *bed = TestBed::new(&["1060"]);
    bed.parts(2, 400);
    bed.finish("j-0", Outcome::Completed);
    bed.connect("3060");
    bed.pass(1);
    bed.finish("j-1", Outcome::stopped());
    assert_eq!(bed.running(), "3060: j-1");
    bed.connect("4090");
    bed.report_progress("j-1", 0, 400);
    bed.pass(12);
    bed.report_progress("j-1", 10, 400);
    bed.pass(2);
    assert!(bed.world.state.jobs[&JobId::new("j-1")].preemption.is_none());
}

fn a_takeover_that_saves_too_little_is_not_made(bed: &mut TestBed) {
    *bed = TestBed::new(&["3060"]);
    bed.parts(2, 40);
    bed.finish("j-0", Outcome::Completed);
    bed.connect("4090");
    bed.pass(3);
    assert!(
        bed.world.state.jobs[&JobId::new("j-1")].preemption.is_none(),
        "46 s instead of 48"
    );
}

fn no_part_is_taken_over_while_parts_wait(bed: &mut TestBed) {
    *bed = TestBed::new(&["3060"]);
    bed.parts(3, 400);
    bed.connect("4090");
    bed.pass(1);
    assert_eq!(bed.running(), "3060: j-0; 4090: j-1");
    assert!(bed.world.state.jobs[&JobId::new("j-0")].preemption.is_none());
}

fn no_slower_gpu_takes_a_part_over(bed: &mut TestBed) {
    *bed = TestBed::with_a_slow_last_part();
    bed.connect("1060");
    bed.pass(3);
    assert!(bed.world.state.jobs[&JobId::new("j-1")].preemption.is_none());
}

fn only_higher_levels_take_a_reserved_device(bed: &mut TestBed) {
    *bed = TestBed::with_a_slow_last_part();
    bed.connect("4090");
    bed.pass(1);
    let other = images("sd1")
        .with(|requirements| requirements.device = Some(DeviceKind::Cuda))
        .with(|requirements| requirements.exclusive = true);
    bed.world.submit("k", other.requirements());
    assert_eq!(bed.world.view("k").state, JobState::Queued);
    let devices = bed
        .world
        .state
        .explain_job(bed.world.now, &JobId::new("k"))
        .unwrap()
        .devices;
    assert!(
        devices.iter().any(|device| device
            .description
            .ends_with("reserved for j-1 (j-1), which moves here from a slower device")),
        "{devices:?}"
    );
    bed.world
        .submit("l", other.with(|requirements| requirements.priority = 5).requirements());
    assert_eq!(bed.running(), "3060: j-1; 4090: l");
    bed.finish("j-1", Outcome::stopped());
    assert_eq!(
        bed.running(),
        "3060: j-1; 4090: l",
        "it came first, and there is its old device"
    );
}

fn at_most_two_at_a_time(bed: &mut TestBed) {
    bed.submit_parts("j", 4, 4, Some(2), |_| ());
    assert_eq!(bed.running(), "3060-2: j-1; 3060: j-0");
    assert!(
        bed.reason("j-2").starts_with("at most 2 jobs of its array j may run"),
        "{}",
        bed.reason("j-2")
    );
}

fn a_quota_counts_parts(bed: &mut TestBed) {
    bed.world.state.settings.quotas.everyone = Some(1);
    bed.parts(4, 4);
    assert_eq!(bed.running(), "3060: j-0");
    assert!(
        bed.reason("j-1").contains("may hold 1 device at once"),
        "{}",
        bed.reason("j-1")
    );
}

fn small_parts_share_a_gpu(bed: &mut TestBed) {
    bed.submit_parts("j", 4, 400, None, |requirements| requirements.exclusive = false);
    assert_eq!(bed.running(), "4090: j-0; 4090: j-1; 4090: j-2");
}

fn a_job_after_all_parts(bed: &mut TestBed) {
    bed.parts(2, 400);
    let after = NewJob {
        after: vec!["j".into()],
        ..new_job("z", retries(0))
    };
    bed.world.step(Event::JobSubmitted {
        ticket: Ticket(1),
        job: Box::new(after),
    });
    bed.finish("j-0", Outcome::Completed);
    assert_eq!(
        bed.reason("z"),
        "waits for the array j (j_name): 1 completed, 1 running"
    );
    bed.finish("j-1", Outcome::Completed);
    assert_eq!(bed.world.view("z").state, JobState::Running);
}

fn only_long_jobs_are_split(bed: &mut TestBed) {
    let requirements = |images: u64| {
        let mut requirements = self::images("sd1").requirements();
        if let Some(demand) = &mut requirements.demand {
            demand.millipasses = IMAGE * images;
        }
        requirements
    };
    let parts = |bed: &TestBed, images, split| bed.world.state.part_count(&requirements(images), images, split);
    // 0.4 s an image on the 4090: a minute is 150 of them.
    assert_eq!(parts(bed, 100, Split::Auto), 1);
    assert_eq!(parts(bed, 450, Split::Auto), 3);
    assert_eq!(parts(bed, 5000, Split::Auto), 8, "two devices; the CPU is too slow");
    assert_eq!(parts(bed, 100, Split::Parts(7)), 7);
    assert_eq!(parts(bed, 5, Split::Parts(7)), 5);
    let exclusive = TestBed::new(&["4090"]);
    assert_eq!(parts(&exclusive, 5000, Split::Auto), 1, "one device gains nothing");
}

type Case = (&'static str, &'static [&'static str], fn(&mut TestBed));

const CASES: &[Case] = &[
    (
        "two GPUs and a CPU leave the CPU idle",
        &["4090", "3060", "cpu"],
        two_gpus_and_a_cpu_leave_the_cpu_idle,
    ),
    (
        "the slow GPU starts no last part",
        &["4090", "3060"],
        the_slow_gpu_starts_no_last_part,
    ),
    (
        "the slow GPU helps with many parts",
        &["4090", "3060"],
        the_slow_gpu_helps_with_many_parts,
    ),
    (
        "the slow GPU starts when the fast one leaves",
        &["4090", "3060"],
        the_slow_gpu_starts_when_the_fast_one_leaves,
    ),
    (
        "the slow GPU starts when the fast one is overdue",
        &["4090", "3060"],
        the_slow_gpu_starts_when_the_fast_one_is_overdue,
    ),
    (
        "equal GPUs share the parts",
        &["3060", "3060.2"],
        equal_gpus_share_the_parts,
    ),
    (
        "an idle faster GPU takes a part over",
        &[],
        an_idle_faster_gpu_takes_a_part_over,
    ),
    ("a part is taken over only once", &[], a_part_is_taken_over_only_once),
    (
        "a takeover that saves too little is not made",
        &[],
        a_takeover_that_saves_too_little_is_not_made,
    ),
    (
        "no part is taken over while parts wait",
        &[],
        no_part_is_taken_over_while_parts_wait,
    ),
    ("no slower GPU takes a part over", &[], no_slower_gpu_takes_a_part_over),
    (
        "only higher levels take a reserved device",
        &[],
        only_higher_levels_take_a_reserved_device,
    ),
    (
        "at most two at a time",
        &["3060", "3060.2", "3060.3"],
        at_most_two_at_a_time,
    ),
    ("a quota counts parts", &["3060", "3060.2"], a_quota_counts_parts),
    ("small parts share a GPU", &["4090"], small_parts_share_a_gpu),
    ("a job after all parts", &["3060", "3060.2"], a_job_after_all_parts),
    (
        "only long jobs are split",
        &["4090", "3060", "cpu"],
        only_long_jobs_are_split,
    ),
];

#[test]
fn parts_are_placed_as_expected() {
    let mut wrong = Vec::new();
    for (name, cluster, play) in CASES {
        let played = std::panic::catch_unwind(|| play(&mut TestBed::new(cluster)));
        if played.is_err() {
            wrong.push(*name);
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {}: {wrong:?}; what is wrong stands above",
        wrong.len(),
        CASES.len()
    );
}
