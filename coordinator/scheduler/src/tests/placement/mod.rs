//! The placement test bed: mixed machines, jobs of several families, and where a person would put them.
//!
//! A case is a table row: the pool, what runs already, the job, where it goes (machine, profile), and words that the
//! explanation must have. Devices are named by their memory: `4090` has 24 GB, `3060` 12, `2080` 8, `1060` 6; `mac` is a
//! Mac with 64 GB, `cpu` a CPU with 32 GB. Budgets are what the probes tell of such machines when idle.

mod cases;
mod parts;

use super::*;
use crate::model::{Speed, Worker};
use aitk_common::plan::demand::Demand;
use serde_json::json;

const GIB: u64 = 1 << 30;

/// A worker with one device, by its name in the cases. `4090.2` is another machine of the same make.
fn machine(name: &str) -> Registration {
    let (kind, card, total, budget) = match name.split('.').next().unwrap_or(name) {
        "4090" => (DeviceKind::Cuda, "NVIDIA GeForce RTX 4090", 24 * GIB, 22 * GIB),
        "3060" => (DeviceKind::Cuda, "NVIDIA GeForce RTX 3060", 12 * GIB, 11 * GIB),
        "2080" => (DeviceKind::Cuda, "NVIDIA GeForce RTX 2080", 8 * GIB, 57 * GIB / 8),
        "1060" => (DeviceKind::Cuda, "NVIDIA GeForce GTX 1060", 6 * GIB, 21 * GIB / 4),
        "mac" => (DeviceKind::Metal, "Apple M4 Max", 64 * GIB, 45 * GIB),
        "cpu" => (DeviceKind::Cpu, "AMD EPYC (8 cores)", 32 * GIB, 24 * GIB),
        other => panic!("no machine {other}"),
    };
    let device = Device {
        name: card.into(),
        memory_total: total,
        memory_budget: budget,
        profile: match kind {
            DeviceKind::Cpu => MemoryProfile::CpuOnly,
            _ => MemoryProfile::for_gpu_budget(budget),
        },
        ..device(kind, 0)
    };
    registration(&name.replace('.', "-"), vec![device], Vec::new())
}

/// A job as its config would have it.
#[derive(Clone)]
struct Ask {
    json: serde_json::Value,
    wants: Wants,
}

fn train(arch: &str, side: u32, dtype: &str, rank: u32) -> Ask {
    Ask {
        json: json!({"process": [{"kind": {"train": {
            "model": {"arch": arch, "quantize": false}, "network": {"linear": rank},
            "train": {"steps": 2000, "batch_size": 1, "dtype": dtype, "optimizer": "adamw8bit"},
            "datasets": [{"resolution": [side]}]}}}]}),
        wants: retries(3),
    }
}

/// A LoRA as people train them: SD at 512, SDXL and FLUX at 1024, bf16, rank 16.
fn lora(arch: &str) -> Ask {
    train(arch, if arch == "sd1" { 512 } else { 1024 }, "bfloat16", 16)
}

/// Twenty steps of one image at the family's size.
fn images(arch: &str) -> Ask {
    let side = if arch == "sd1" { 512 } else { 1024 };
    Ask {
        json: json!({"process": [{"kind": {"generate": {
            "model": {"arch": arch, "dtype": "float16"},
            "generate": {"width": side, "height": side, "sample_steps": 20, "guidance_scale": 7.0, "prompts": ["a"]}}}}]}),
        wants: retries(3),
    }
}

/// A full fine-tune.
fn full(arch: &str) -> Ask {
    let mut ask = lora(arch);
    ask.json["process"][0]["kind"]["train"]["network"] = json!(null);
    ask
}

/// One that takes most of a card of 24 GB.
fn large() -> Ask {
    full("sdxl").set("/train/optimizer", json!("adafactor"))
}

/// A job of which nothing is known.
fn unknown() -> Ask {
    Ask {
        json: json!({}),
        wants: retries(3),
    }
}

impl Ask {
    fn set(mut self, pointer: &str, value: serde_json::Value) -> Self {
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        let body = self.json["process"][0]["kind"]
            .as_object_mut()
            .unwrap()
            .values_mut()
            .next()
            .unwrap();
        body.pointer_mut(parent).unwrap()[key] = value;
        self
    }

    fn with(mut self, change: impl FnOnce(&mut Wants)) -> Self {
        change(&mut self.wants);
        self
    }

    fn on(self, kind: DeviceKind) -> Self {
        self.with(|wants| wants.device = Some(kind))
    }

    fn profile(self, profile: MemoryProfile) -> Self {
        self.with(|wants| wants.profile = Some(profile))
    }

    fn memory(self, gib: u64) -> Self {
        self.with(|wants| wants.memory = Some(gib * GIB))
    }

    fn wants(&self) -> Wants {
        Wants {
            demand: Demand::of_job(&self.json, None),
            ..self.wants.clone()
        }
    }
}

/// What a case starts from beside the pool.
#[derive(Clone, Default)]
struct Given {
    /// Jobs that run already, in order.
    running: Vec<Ask>,
    /// Measured: card, family, seconds per unit.
    speeds: Vec<(&'static str, &'static str, f64)>,
    /// Machines whose caches have the job's data.
    cached: Vec<&'static str>,
    /// Machines on which it failed a moment ago.
    failed_on: Option<&'static str>,
    /// Drained machines.
    drained: Vec<&'static str>,
    /// Labels of machines.
    labels: Vec<(&'static str, &'static str, &'static str)>,
    /// Users' quota.
    quota: Option<u32>,
}

struct Case {
    name: &'static str,
    pool: &'static [&'static str],
    given: Given,
    ask: Ask,
    /// `machine profile`, or `waits`.
    goes: &'static str,
    /// Words of the reason when it waits, or of some line of the explanation.
    says: &'static [&'static str],
}

fn case(
    name: &'static str,
    pool: &'static [&'static str],
    ask: Ask,
    goes: &'static str,
    says: &'static [&'static str],
) -> Case {
    Case {
        name,
        pool,
        given: Given::default(),
        ask,
        goes,
        says,
    }
}

impl Case {
    fn given(mut self, change: impl FnOnce(&mut Given)) -> Self {
        change(&mut self.given);
        self
    }

    fn running(self, ask: Ask) -> Self {
        self.given(|given| given.running.push(ask))
    }
}

fn play(case: &Case) -> Result<(), String> {
    let mut world = World::new();
    world.state.settings.quotas.everyone = case.given.quota;
    let data = manifest("data");
    for name in case.pool {
        let mut registration = machine(name);
        for (machine, key, value) in &case.given.labels {
            if machine == name {
                registration.labels.insert((*key).into(), (*value).into());
            }
        }
        let id = WorkerId::new(name.replace('.', "-"));
        // What an earlier life of the coordinator learned of it.
        let known = Worker {
            id: id.clone(),
            name: registration.name.clone(),
            version: String::new(),
            host: String::new(),
            devices: Vec::new(),
            labels: BTreeMap::new(),
            confinement: None,
            registered: world.now,
            drained: case.given.drained.contains(name),
            health: Vec::new(),
            speeds: Vec::new(),
            has: if case.given.cached.contains(name) {
                vec![data]
            } else {
                Vec::new()
            },
            session: None,
            leaving: false,
            same_machine: false,
            last_seen: world.now,
        };
        world.state.workers.insert(id, known);
        for (device, family, seconds_per_unit) in &case.given.speeds {
            world.state.speeds.take_over(&Speed {
                device: (*device).into(),
                family: (*family).into(),
                nanoseconds_per_unit: (*seconds_per_unit * 1e9) as u64,
            });
        }
        world.sessions += 1;
        world.step(Event::WorkerRegistered {
            session: SessionId(world.sessions),
            fresh_id: WorkerId::new("fresh"),
            same_machine: false,
            registration: Box::new(registration),
        });
    }
    for (index, ask) in case.given.running.iter().enumerate() {
        let id = format!("r{index}");
        world.submit(&id, ask.wants());
        if world.view(&id).state != JobState::Running {
            return Err(format!("{id} should run: {}", world.view(&id).reason));
        }
    }
    let mut wants = case.ask.wants();
    wants.data = vec![data];
    if let Some(failed_on) = case.given.failed_on {
        fail_on(&mut world, failed_on, wants, case.pool);
    } else {
        let before = world.state.fit(&wants);
        world.submit("j", wants);
        let starts = world.view("j").state == JobState::Running;
        if before.devices.iter().any(|device| device.ready) != starts && case.given.quota.is_none() {
            return Err(format!("`fit` said otherwise: {before:?}"));
        }
    }
    let view = world.view("j");
    let goes = match view.attempts.last().filter(|attempt| attempt.state.is_live()) {
        Some(attempt) => format!("{} {}", attempt.worker_name, attempt.profile.name()),
        None => "waits".into(),
    };
    if goes != case.goes {
        return Err(format!("goes to `{goes}`, not `{}`: {}", case.goes, view.reason));
    }
    let explained = world.state.explain_job(world.now, &JobId::new("j")).unwrap();
    // As a second job like it would be told.
    let again = world.state.fit(&case.ask.wants());
    let mut said = vec![view.state.name().to_owned(), view.reason.clone(), explained.summary];
    said.extend(explained.devices.into_iter().map(|device| device.description));
    said.extend(
        again
            .devices
            .into_iter()
            .map(|device| device.description.replace("busy with j (j)", "free")),
    );
    for words in case.says {
        if !said.iter().any(|line| line.contains(words)) {
            return Err(format!("does not say {words:?}, but:\n  {}", said.join("\n  ")));
        }
    }
    Ok(())
}

/// The job runs on one machine, fails there, and is placed again.
fn fail_on(world: &mut World, name: &str, wants: Wants, pool: &[&str]) {
    // The others come later.
    for (index, other) in pool.iter().enumerate() {
        if *other != name {
            world.step(Event::WorkerLost {
                session: SessionId(index as u64 + 1),
            });
        }
    }
    world.submit("j", wants);
    let session = SessionId(pool.iter().position(|other| *other == name).unwrap() as u64 + 1);
    world.beat(session, &[held("j", 1)]);
    world.finish(session, &held("j", 1), failed(FailureCause::DiskFull));
    for other in pool.iter().filter(|other| **other != name) {
        world.sessions += 1;
        world.step(Event::WorkerRegistered {
            session: SessionId(world.sessions),
            fresh_id: WorkerId::new("fresh"),
            same_machine: false,
            registration: Box::new(machine(other)),
        });
    }
    world.pass(2);
}

#[test]
fn every_case_goes_where_a_person_would_put_it() {
    let cases: Vec<Case> = cases::alone().into_iter().chain(cases::mixed()).collect();
    assert!(cases.len() >= 60, "{} cases", cases.len());
    let names: std::collections::BTreeSet<_> = cases.iter().map(|case| case.name).collect();
    assert_eq!(names.len(), cases.len(), "two cases of one name");
    let wrong: Vec<String> = cases
        .iter()
        .filter_map(|case| play(case).err().map(|why| format!("{}: {why}", case.name)))
        .collect();
    assert!(
        wrong.is_empty(),
        "{} of {}:\n{}",
        wrong.len(),
        cases.len(),
        wrong.join("\n")
    );
}

#[test]
fn an_explanation_reads_as_one_would_say_it() {
    let mut world = World::new();
    for name in ["4090", "1060", "cpu"] {
        world.sessions += 1;
        world.step(Event::WorkerRegistered {
            session: SessionId(world.sessions),
            fresh_id: WorkerId::new("fresh"),
            same_machine: false,
            registration: Box::new(machine(name)),
        });
    }
    world.submit("j1", lora("flux").wants());
    world.submit("j2", lora("flux").wants());
    let forecast = world.state.explain_job(world.now, &JobId::new("j2")).unwrap();
    assert_eq!(forecast.summary, "next in line; the one device that fits is busy");
    let words: Vec<&str> = forecast
        .devices
        .iter()
        .map(|device| device.description.as_str())
        .collect();
    assert_eq!(words.len(), 3);
    assert!(
        words[0].starts_with("4090 cuda:0: gpu_poor (")
            && words[0].ends_with("GiB of 22.0 GiB, about 3 h 28 min, a guess); busy with j1 (j1)"),
        "{}",
        words[0]
    );
    assert!(
        words[1].starts_with("cpu cpu: extreme (") && words[1].contains("it would take about 1"),
        "{}",
        words[1]
    );
    assert!(
        words[2].starts_with("1060 cuda:0: too small: even extreme needs about")
            && words[2].ends_with("and it has 5.2 GiB"),
        "{}",
        words[2]
    );
    let before = world.state.fit(&images("sdxl").wants());
    assert!(
        before.summary.starts_with("would start now on 1060 cuda:0: gpu_poor ("),
        "{}",
        before.summary
    );
}

#[test]
fn speeds_are_learned_from_finished_work() {
    let mut world = World::new();
    let one = world.worker("w1", machine("4090").devices, Vec::new());
    world.submit("j1", lora("sd1").wants());
    let report = |world: &mut World, seq, done| {
        let event = Event::AttemptEvent {
            session: one,
            held: held("j1", 1),
            seq,
            time: UnixMillis(1),
            report: Report::Progress(Progress {
                done,
                total: 2000,
                seconds_per_step: Some(f64::NAN),
            }),
        };
        world.step(event);
    };
    report(&mut world, 1, 0);
    world.pass(5);
    report(&mut world, 2, 50);
    world.finish(one, &held("j1", 1), Outcome::Completed);
    // 50 steps of 4 units in 5 seconds.
    let speed = &world.state.workers[&WorkerId::new("w1")].speeds[0];
    assert_eq!(speed.nanoseconds_per_unit, 25_000_000);
    let persisted = world
        .last
        .iter()
        .any(|effect| matches!(effect, Effect::Persist(Record::Worker(worker)) if !worker.speeds.is_empty()));
    assert!(persisted, "what was learned survives a restart");
    let forecast = world.state.fit(&lora("sd1").wants());
    assert!(
        forecast.devices[0].measured && forecast.devices[0].description.contains("about 3 min 20 s)"),
        "{forecast:?}"
    );
}

#[test]
fn a_job_that_its_own_budget_is_too_small_for_is_not_tried_again() {
    let mut world = World::new();
    let session = world.cpu("w1");
    let wants = Wants {
        memory: Some(8),
        retries: 3,
        ..lora("sd1").wants()
    };
    world.submit("j1", wants);
    let view = world.view("j1");
    assert_eq!(view.attempts[0].profile, MemoryProfile::Extreme, "{}", view.reason);
    world.finish(session, &held("j1", 1), failed(FailureCause::OutOfMemory));
    let view = world.view("j1");
    assert_eq!(
        (view.state, view.attempts.len()),
        (JobState::Failed, 1),
        "{}",
        view.reason
    );
}
