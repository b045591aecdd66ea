//! Parts of one job over unequal devices: who draws what, who waits for whom, and who takes over.

use super::*;
use aitk_common::job::cluster::Split;

const CARDS: [(&str, &str, f64); 3] = [
    ("NVIDIA GeForce RTX 4090", "sd1", 0.01),
    ("NVIDIA GeForce RTX 3060", "sd1", 0.03),
    ("NVIDIA GeForce GTX 1060", "sd1", 0.075),
];
/// Units of an image of [`images`].
const IMAGE: u64 = 40_000;

/// Machines whose speeds were measured, and what runs on them.
struct Bed {
    world: World,
    sessions: BTreeMap<String, SessionId>,
}

impl Bed {
    fn new(pool: &[&str]) -> Self {
        let mut bed = Self {
            world: World::new(),
            sessions: BTreeMap::new(),
        };
        for (device, family, seconds_per_unit) in CARDS {
            bed.world.state.speeds.take_over(&Speed {
                device: device.into(),
                family: family.into(),
                nanoseconds_per_unit: (seconds_per_unit * 1e9) as u64,
            });
        }
        for name in pool {
            bed.comes(name);
        }
        bed
    }

    fn comes(&mut self, name: &str) {
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

    /// A job that is cut into so many parts of so many images each.
    fn cut(&mut self, id: &str, parts: u64, images_each: u64, at_most: Option<u32>, change: impl Fn(&mut Wants)) {
        let member = |part| {
            let mut wants = images("sd1").with(|wants| wants.alone = true).wants();
            change(&mut wants);
            if let Some(demand) = &mut wants.demand {
                demand.millipasses = IMAGE * images_each;
            }
            new_job(&format!("{id}-{part}"), wants)
        };
        let members = (0..parts).map(member).collect();
        self.world.array(id, members, at_most, true).unwrap();
    }

    fn parts(&mut self, parts: u64, images_each: u64) {
        self.cut("j", parts, images_each, None, |_| ());
    }

    /// `4090: j-0; 3060: j-1`, those that run.
    fn runs(&self) -> String {
        let live = self
            .world
            .state
            .live
            .keys()
            .filter_map(|id| self.world.state.job(id)?.current().map(|one| (one, id)));
        let mut said: Vec<String> = live.map(|(one, id)| format!("{}: {id}", one.worker_name)).collect();
        said.sort();
        said.join("; ")
    }

    fn held(&self, job: &str) -> (SessionId, HeldAttempt) {
        let current = self.world.state.jobs[&JobId::new(job)]
            .current()
            .unwrap_or_else(|| panic!("{job} does not run"));
        (
            self.sessions[&current.worker_name],
            HeldAttempt {
                attempt: current.id.clone(),
                epoch: current.epoch,
            },
        )
    }

    fn ends(&mut self, job: &str, outcome: Outcome) {
        let (session, held) = self.held(job);
        self.world.finish(session, &held, outcome);
    }

    fn says(&mut self, job: &str, done: u64, total: u64) {
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

    /// So many seconds, in which every machine beats.
    fn pass(&mut self, seconds: u64) {
        for _ in 0..seconds {
            let live: Vec<String> = self.world.state.live.keys().map(ToString::to_string).collect();
            for job in live {
                let (session, held) = self.held(&job);
                self.world.beat(session, &[held]);
            }
            self.world.pass(1);
        }
    }

    fn reason(&self, job: &str) -> String {
        self.world.view(job).reason
    }

    /// A 3060 with the last part, `j-1`, of 400 images: it has drawn some of them at its usual speed, 1.2 s each.
    fn slow_one_at_work() -> Self {
        let mut bed = Self::new(&["3060"]);
        bed.parts(2, 400);
        bed.ends("j-0", Outcome::Completed);
        bed.says("j-1", 0, 400);
        bed.pass(12);
        bed.says("j-1", 10, 400);
        bed
    }
}

fn forty_prompts_on_two_cards_and_a_cpu(bed: &mut Bed) {
    bed.parts(10, 4);
    assert_eq!(
        bed.runs(),
        "3060: j-1; 4090: j-0",
        "the CPU would take a hundred times as long"
    );
    bed.ends("j-0", Outcome::Completed);
    bed.ends("j-2", Outcome::Completed);
    assert_eq!(bed.runs(), "3060: j-1; 4090: j-3");
}

fn the_slow_card_is_idle_at_the_end(bed: &mut Bed) {
    bed.parts(2, 4);
    assert_eq!(bed.runs(), "4090: j-0", "it ends both before the 3060 would end one");
    assert_eq!(
        bed.reason("j-1"),
        "not begun on 3060 cuda:0: faster devices are through with all that waits before it would be with this part, 4090 cuda:0"
    );
}

fn the_slow_card_helps_where_it_pays(bed: &mut Bed) {
    bed.parts(5, 4);
    assert_eq!(
        bed.runs(),
        "3060: j-1; 4090: j-0",
        "in its 4.8 s the 4090 ends two of the three that wait"
    );
}

fn when_the_fast_one_goes_the_slow_one_begins(bed: &mut Bed) {
    bed.parts(2, 4);
    let session = bed.sessions["4090"];
    bed.world.step(Event::WorkerLeaving {
        session,
        reason: String::new(),
    });
    assert_eq!(bed.runs(), "3060: j-1; 4090: j-0");
}

fn a_fast_one_that_says_nothing_is_not_waited_for(bed: &mut Bed) {
    bed.parts(2, 4);
    bed.pass(1);
    assert_eq!(bed.runs(), "4090: j-0");
    bed.pass(1);
    assert_eq!(bed.runs(), "3060: j-1; 4090: j-0", "1.6 s are over");
}

fn equal_cards_share(bed: &mut Bed) {
    bed.parts(2, 4);
    assert_eq!(bed.runs(), "3060-2: j-1; 3060: j-0");
}

fn an_idle_fast_one_takes_over_once(bed: &mut Bed) {
    *bed = Bed::slow_one_at_work();
    assert_eq!(bed.runs(), "3060: j-1");
    bed.comes("4090");
    bed.pass(1);
    let (session, held) = bed.held("j-1");
    let told = |effect: &Effect| matches!(effect, Effect::Send(to, ToWorker::Stop { held: one, save: true }) if *to == session && *one == held);
    assert!(bed.world.last.iter().any(told), "{:?}", bed.world.last);
    assert_eq!(
        bed.reason("j-1"),
        "goes on on 4090 cuda:0, which is faster and has nothing else to do"
    );
    bed.ends("j-1", Outcome::stopped());
    assert_eq!(bed.runs(), "4090: j-1");
    assert_eq!(bed.world.state.jobs[&JobId::new("j-1")].failures, 0);
}

fn nothing_is_taken_over_twice(bed: &mut Bed) {
    *bed = Bed::new(&["1060"]);
    bed.parts(2, 400);
    bed.ends("j-0", Outcome::Completed);
    bed.comes("3060");
    bed.pass(1);
    bed.ends("j-1", Outcome::stopped());
    assert_eq!(bed.runs(), "3060: j-1");
    bed.comes("4090");
    bed.says("j-1", 0, 400);
    bed.pass(12);
    bed.says("j-1", 10, 400);
    bed.pass(2);
    assert!(bed.world.state.jobs[&JobId::new("j-1")].recall.is_none());
}

fn a_change_that_costs_more_than_it_saves_is_not_made(bed: &mut Bed) {
    *bed = Bed::new(&["3060"]);
    bed.parts(2, 40);
    bed.ends("j-0", Outcome::Completed);
    bed.comes("4090");
    bed.pass(3);
    assert!(
        bed.world.state.jobs[&JobId::new("j-1")].recall.is_none(),
        "46 s instead of 48"
    );
}

fn nobody_is_robbed_while_parts_wait(bed: &mut Bed) {
    *bed = Bed::new(&["3060"]);
    bed.parts(3, 400);
    bed.comes("4090");
    bed.pass(1);
    assert_eq!(bed.runs(), "3060: j-0; 4090: j-1");
    assert!(bed.world.state.jobs[&JobId::new("j-0")].recall.is_none());
}

fn a_slower_one_takes_nothing_over(bed: &mut Bed) {
    *bed = Bed::slow_one_at_work();
    bed.comes("1060");
    bed.pass(3);
    assert!(bed.world.state.jobs[&JobId::new("j-1")].recall.is_none());
}

fn a_kept_device_is_for_those_who_stand_higher(bed: &mut Bed) {
    *bed = Bed::slow_one_at_work();
    bed.comes("4090");
    bed.pass(1);
    let other = images("sd1")
        .with(|wants| wants.device = Some(DeviceKind::Cuda))
        .with(|wants| wants.alone = true);
    bed.world.submit("k", other.wants());
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
            .ends_with("kept for j-1 (j-1), which comes from a slower device")),
        "{devices:?}"
    );
    bed.world.submit("l", other.with(|wants| wants.priority = 5).wants());
    assert_eq!(bed.runs(), "3060: j-1; 4090: l");
    bed.ends("j-1", Outcome::stopped());
    assert_eq!(
        bed.runs(),
        "3060: j-1; 4090: l",
        "it came first, and there is its old device"
    );
}

fn at_most_two_at_a_time(bed: &mut Bed) {
    bed.cut("j", 4, 4, Some(2), |_| ());
    assert_eq!(bed.runs(), "3060-2: j-1; 3060: j-0");
    assert!(
        bed.reason("j-2").starts_with("2 of its array j may run"),
        "{}",
        bed.reason("j-2")
    );
}

fn a_quota_counts_parts(bed: &mut Bed) {
    bed.world.state.settings.quotas.everyone = Some(1);
    bed.parts(4, 4);
    assert_eq!(bed.runs(), "3060: j-0");
    assert!(
        bed.reason("j-1").contains("may hold 1 devices"),
        "{}",
        bed.reason("j-1")
    );
}

fn small_parts_share_a_card(bed: &mut Bed) {
    bed.cut("j", 4, 400, None, |wants| wants.alone = false);
    assert_eq!(bed.runs(), "4090: j-0; 4090: j-1; 4090: j-2");
}

fn a_job_after_all_parts(bed: &mut Bed) {
    bed.parts(2, 400);
    let after = NewJob {
        after: vec!["j".into()],
        ..new_job("z", retries(0))
    };
    bed.world.step(Event::JobSubmitted {
        ticket: Ticket(1),
        job: Box::new(after),
    });
    bed.ends("j-0", Outcome::Completed);
    assert_eq!(
        bed.reason("z"),
        "waits for the array j (j_name): 1 completed, 1 running"
    );
    bed.ends("j-1", Outcome::Completed);
    assert_eq!(bed.world.view("z").state, JobState::Running);
}

fn a_tiny_job_stays_whole_and_a_long_one_is_cut(bed: &mut Bed) {
    let wants = |images: u64| {
        let mut wants = self::images("sd1").wants();
        if let Some(demand) = &mut wants.demand {
            demand.millipasses = IMAGE * images;
        }
        wants
    };
    let parts = |bed: &Bed, images, split| bed.world.state.parts(&wants(images), images, split);
    // 0.4 s an image on the 4090: a minute is 150 of them.
    assert_eq!(parts(bed, 100, Split::Auto), 1);
    assert_eq!(parts(bed, 450, Split::Auto), 3);
    assert_eq!(parts(bed, 5000, Split::Auto), 8, "two devices; the CPU is too slow");
    assert_eq!(parts(bed, 100, Split::Parts(7)), 7);
    assert_eq!(parts(bed, 5, Split::Parts(7)), 5);
    let alone = Bed::new(&["4090"]);
    assert_eq!(parts(&alone, 5000, Split::Auto), 1, "one device gains nothing");
}

type Case = (&'static str, &'static [&'static str], fn(&mut Bed));

const CASES: &[Case] = &[
    (
        "forty prompts on two cards and a CPU",
        &["4090", "3060", "cpu"],
        forty_prompts_on_two_cards_and_a_cpu,
    ),
    (
        "the slow card is idle at the end",
        &["4090", "3060"],
        the_slow_card_is_idle_at_the_end,
    ),
    (
        "the slow card helps where it pays",
        &["4090", "3060"],
        the_slow_card_helps_where_it_pays,
    ),
    (
        "when the fast one goes the slow one begins",
        &["4090", "3060"],
        when_the_fast_one_goes_the_slow_one_begins,
    ),
    (
        "a fast one that says nothing is not waited for",
        &["4090", "3060"],
        a_fast_one_that_says_nothing_is_not_waited_for,
    ),
    ("equal cards share", &["3060", "3060.2"], equal_cards_share),
    (
        "an idle fast one takes over once",
        &[],
        an_idle_fast_one_takes_over_once,
    ),
    ("nothing is taken over twice", &[], nothing_is_taken_over_twice),
    (
        "a change that costs more than it saves is not made",
        &[],
        a_change_that_costs_more_than_it_saves_is_not_made,
    ),
    (
        "nobody is robbed while parts wait",
        &[],
        nobody_is_robbed_while_parts_wait,
    ),
    ("a slower one takes nothing over", &[], a_slower_one_takes_nothing_over),
    (
        "a kept device is for those who stand higher",
        &[],
        a_kept_device_is_for_those_who_stand_higher,
    ),
    (
        "at most two at a time",
        &["3060", "3060.2", "3060.3"],
        at_most_two_at_a_time,
    ),
    ("a quota counts parts", &["3060", "3060.2"], a_quota_counts_parts),
    ("small parts share a card", &["4090"], small_parts_share_a_card),
    ("a job after all parts", &["3060", "3060.2"], a_job_after_all_parts),
    (
        "a tiny job stays whole and a long one is cut",
        &["4090", "3060", "cpu"],
        a_tiny_job_stays_whole_and_a_long_one_is_cut,
    ),
];

#[test]
fn parts_go_where_a_person_would_put_them() {
    let mut wrong = Vec::new();
    for (name, pool, play) in CASES {
        let played = std::panic::catch_unwind(|| play(&mut Bed::new(pool)));
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
