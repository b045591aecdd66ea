//! Tests of placement on mixed machines with jobs of several families.
//!
//! A case is a table row: the cluster, the jobs that run already, the job, where it is placed (machine, profile), and texts that
//! the explanation must contain. Devices are named by their model: `4090` has 24 GB, `3060` 12, `2080` 8, `1060` 6; `mac` is a
//! Mac with 64 GB, `cpu` a CPU with 32 GB. Budgets are those that the probes report for such machines when idle.

mod cases;
mod parts;

use super::*;
use crate::model::{Speed, Worker};
use aitk_common::plan::demand::{Demand, WORK_UNIT};
use serde_json::json;

const GIB: u64 = 1 << 30;

/// A worker with one device, by its name in the cases. `4090.2` is another machine with the same device.
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

/// A job with its config.
#[derive(Clone)]
struct TestJob {
    json: serde_json::Value,
    requirements: Requirements,
}

fn train(arch: &str, side: u32, dtype: &str, rank: u32) -> TestJob {
    TestJob {
        json: json!({"process": [{"kind": {"train": {
            "model": {"arch": arch, "quantize": false}, "network": {"linear": rank},
            "train": {"steps": 2000, "batch_size": 1, "dtype": dtype, "optimizer": "adamw8bit"},
            "datasets": [{"resolution": [side]}]}}}]}),
        requirements: ordinary(),
    }
}

/// A typical LoRA training: SD at 512, SDXL and FLUX at 1024, bf16, rank 16.
fn lora(arch: &str) -> TestJob {
    train(arch, if arch == "sd1" { 512 } else { 1024 }, "bfloat16", 16)
}

/// One image with twenty steps at the family's native size.
fn images(arch: &str) -> TestJob {
    let side = if arch == "sd1" { 512 } else { 1024 };
    TestJob {
        json: json!({"process": [{"kind": {"generate": {
            "model": {"arch": arch, "dtype": "float16"},
            "generate": {"width": side, "height": side, "sample_steps": 20, "guidance_scale": 7.0, "prompts": ["a"]}}}}]}),
        requirements: ordinary(),
    }
}

/// A full fine-tune.
fn full(arch: &str) -> TestJob {
    let mut job = lora(arch);
    job.json["process"][0]["kind"]["train"]["network"] = json!(null);
    job
}

/// A job that takes most of a GPU with 24 GB.
fn large() -> TestJob {
    full("sdxl")
        .set("/train/optimizer", json!("adafactor"))
        .set("/train/dtype", json!("float32"))
}

/// A job without a prediction.
fn unknown() -> TestJob {
    TestJob {
        json: json!({}),
        requirements: ordinary(),
    }
}

impl TestJob {
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

    fn with(mut self, change: impl FnOnce(&mut Requirements)) -> Self {
        change(&mut self.requirements);
        self
    }

    fn on(self, kind: DeviceKind) -> Self {
        self.with(|requirements| requirements.device = Some(kind))
    }

    fn profile(self, profile: MemoryProfile) -> Self {
        self.with(|requirements| requirements.profile = Some(profile))
    }

    fn memory(self, gib: u64) -> Self {
        self.with(|requirements| requirements.memory = Some(gib * GIB))
    }

    fn requirements(&self) -> Requirements {
        Requirements {
            demand: Demand::of_job(&self.json, None, &[]),
            ..self.requirements.clone()
        }
    }
}

/// The initial state of a case beside the cluster.
#[derive(Clone, Default)]
struct Setup {
    /// Jobs that run already, in order.
    running: Vec<TestJob>,
    /// Measured speeds: device name, family, seconds per pass.
    speeds: Vec<(&'static str, &'static str, f64)>,
    /// Machines that have the job's data in their caches.
    cached: Vec<&'static str>,
    /// The machine on which the job's last attempt failed.
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
    cluster: &'static [&'static str],
    setup: Setup,
    job: TestJob,
    /// `machine profile`, or `waits`.
    placed_on: &'static str,
    /// Texts that the reason or a line of the explanation contains.
    explanation: &'static [&'static str],
}

fn case(
    name: &'static str,
    cluster: &'static [&'static str],
    job: TestJob,
    placed_on: &'static str,
    explanation: &'static [&'static str],
) -> Case {
    Case {
        name,
        cluster,
        setup: Setup::default(),
        job,
        placed_on,
        explanation,
    }
}

impl Case {
    fn setup(mut self, change: impl FnOnce(&mut Setup)) -> Self {
        change(&mut self.setup);
        self
    }

    fn running(self, job: TestJob) -> Self {
        self.setup(|setup| setup.running.push(job))
    }
}

fn run_case(case: &Case) -> Result<(), String> {
    let mut world = World::new();
    world.state.settings.quotas.everyone = case.setup.quota;
    let data = manifest("data");
    for name in case.cluster {
        let mut registration = machine(name);
        for (machine, key, value) in &case.setup.labels {
            if machine == name {
                registration.labels.insert((*key).into(), (*value).into());
            }
        }
        let id = WorkerId::new(name.replace('.', "-"));
        // What the scheduler knew of it before a restart.
        let known = Worker {
            outputs_on_request: true,
            id: id.clone(),
            name: registration.name.clone(),
            version: String::new(),
            host: String::new(),
            devices: Vec::new(),
            labels: BTreeMap::new(),
            confinement: None,
            registered: world.now,
            drained: case.setup.drained.contains(name),
            health: Vec::new(),
            speeds: Vec::new(),
            cached_inputs: if case.setup.cached.contains(name) {
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
        for (device, family, seconds_per_pass) in &case.setup.speeds {
            world.state.speeds.restore(&Speed {
                device: (*device).into(),
                family: (*family).into(),
                nanoseconds_per_pass: (*seconds_per_pass * 1e9) as u64,
                unit: WORK_UNIT,
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
    for (index, job) in case.setup.running.iter().enumerate() {
        let id = format!("r{index}");
        world.submit(&id, job.requirements());
        if world.view(&id).state != JobState::Running {
            return Err(format!("{id} should run: {}", world.view(&id).reason));
        }
    }
    let mut requirements = case.job.requirements();
    requirements.data = vec![data];
    if let Some(failed_on) = case.setup.failed_on {
        fail_on(&mut world, failed_on, requirements, case.cluster);
    } else {
        let before = world.state.forecast_new_job(&requirements);
        world.submit("j", requirements);
        let starts = world.view("j").state == JobState::Running;
        if before.devices.iter().any(|device| device.can_start_now) != starts && case.setup.quota.is_none() {
            return Err(format!("`forecast_new_job` said otherwise: {before:?}"));
        }
    }
    let view = world.view("j");
    let placed_on = match view.attempts.last().filter(|attempt| attempt.state.is_live()) {
        Some(attempt) => format!("{} {}", attempt.worker_name, attempt.profile.name()),
        None => "waits".into(),
    };
    if placed_on != case.placed_on {
        return Err(format!(
            "goes to `{placed_on}`, not `{}`: {}",
            case.placed_on, view.reason
        ));
    }
    let explained = world.state.explain_job(world.now, &JobId::new("j")).unwrap();
    // The forecast for a second job like it.
    let second = world.state.forecast_new_job(&case.job.requirements());
    let mut lines = vec![view.state.name().to_owned(), view.reason.clone(), explained.summary];
    lines.extend(explained.devices.into_iter().map(|device| device.description));
    lines.extend(
        second
            .devices
            .into_iter()
            .map(|device| device.description.replace("busy with j (j)", "free")),
    );
    for text in case.explanation {
        if !lines.iter().any(|line| line.contains(text)) {
            return Err(format!("does not say {text:?}, but:\n  {}", lines.join("\n  ")));
        }
    }
    Ok(())
}

/// Lets the job fail on one machine, so that it is placed again.
fn fail_on(world: &mut World, name: &str, requirements: Requirements, cluster: &[&str]) {
    // The other machines connect later.
    for (index, other) in cluster.iter().enumerate() {
        if *other != name {
            world.step(Event::SessionClosed {
                session: SessionId(index as u64 + 1),
            });
        }
    }
    world.submit("j", requirements);
    let session = SessionId(cluster.iter().position(|other| *other == name).unwrap() as u64 + 1);
    world.heartbeat(session, &[held("j", 1)]);
    world.finish(session, &held("j", 1), failed(FailureCause::DiskFull));
    for other in cluster.iter().filter(|other| **other != name) {
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
fn every_placement_case_holds() {
    let cases: Vec<Case> = cases::alone().into_iter().chain(cases::mixed()).collect();
    assert!(cases.len() >= 60, "{} cases", cases.len());
    let names: std::collections::BTreeSet<_> = cases.iter().map(|case| case.name).collect();
    assert_eq!(names.len(), cases.len(), "two cases of one name");
    let wrong: Vec<String> = cases
        .iter()
        .filter_map(|case| run_case(case).err().map(|why| format!("{}: {why}", case.name)))
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
fn a_forecast_describes_every_device() {
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
    let two_images = || lora("flux").set("/train/batch_size", json!(2)).requirements();
    world.submit("j1", two_images());
    world.submit("j2", two_images());
    let forecast = world.state.explain_job(world.now, &JobId::new("j2")).unwrap();
    assert_eq!(forecast.summary, "next in line; the one device that fits is busy");
    let texts: Vec<&str> = forecast
        .devices
        .iter()
        .map(|device| device.description.as_str())
        .collect();
    assert_eq!(texts.len(), 3);
    assert!(
        texts[0].starts_with("4090 cuda:0: gpu_poor (")
            && texts[0].ends_with("GiB of 22.0 GiB, about 10 h 59 min, a guess); busy with j1 (j1)"),
        "{}",
        texts[0]
    );
    assert!(
        texts[1].starts_with("cpu cpu: extreme (") && texts[1].contains("it would take about 312 times"),
        "{}",
        texts[1]
    );
    assert!(
        texts[2].starts_with("1060 cuda:0: too small: even extreme needs about")
            && texts[2].ends_with("and it has 5.2 GiB"),
        "{}",
        texts[2]
    );
    let before = world.state.forecast_new_job(&images("sdxl").requirements());
    assert!(
        before.summary.starts_with("would start now on 1060 cuda:0: gpu_poor ("),
        "{}",
        before.summary
    );
}

#[test]
fn speeds_are_measured_from_completed_attempts() {
    let mut world = World::new();
    let one = world.worker("w1", machine("4090").devices, Vec::new());
    world.submit("j1", lora("sd1").requirements());
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
    // 50 of 2000 steps in 5 seconds.
    let units = lora("sd1")
        .requirements()
        .demand
        .map(|demand| demand.passes() / 2000.0 * 50.0);
    let expected = 5e9 / units.unwrap();
    let speed = &world.state.workers[&WorkerId::new("w1")].speeds[0];
    assert!((speed.nanoseconds_per_pass as f64 / expected - 1.0).abs() < 1e-6);
    assert_eq!(speed.unit, WORK_UNIT);
    let mut restored = crate::state::speeds::Speeds::default();
    restored.restore(&Speed {
        unit: WORK_UNIT - 1,
        ..speed.clone()
    });
    assert_eq!(restored, Default::default(), "a speed in another unit is ignored");
    let persisted = world
        .last
        .iter()
        .any(|effect| matches!(effect, Effect::Persist(Record::Worker(worker)) if !worker.speeds.is_empty()));
    assert!(persisted, "what was learned survives a restart");
    let forecast = world.state.forecast_new_job(&lora("sd1").requirements());
    assert!(
        forecast.devices[0].is_speed_measured && forecast.devices[0].description.contains("about 3 min 20 s)"),
        "{forecast:?}"
    );
}

#[test]
fn a_job_that_exceeds_its_own_memory_budget_is_not_retried() {
    let mut world = World::new();
    let session = world.cpu("w1");
    let requirements = Requirements {
        memory: Some(8),
        retries: 3,
        ..lora("sd1").requirements()
    };
    world.submit("j1", requirements);
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
