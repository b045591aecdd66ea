//! Valid jobs with one value turned hostile, through what the coordinator checks, what the worker checks, and, for some of
//! those that pass, through a real attempt, beside files that no job may touch.
//!
//! The other tests include a short form. The long one, with how many and from which seed:
//!
//! ```text
//! AITK_HOSTILE_JOBS=100000 AITK_HOSTILE_SEED=1 cargo test -p aitk-worker --test it hostile_jobs -- --nocapture
//! ```
#![allow(clippy::print_stdout, reason = "figures for whoever asks for them")]

mod draw;
mod watch;

use aitk_common::attempt::Outcome;
use aitk_common::capability::{DeviceKind, DeviceRef};
use aitk_common::control::{Assignment, Submission};
use aitk_common::hash::ContentHash;
use aitk_common::id::{AttemptId, Epoch, JobId, TaskId};
use aitk_common::job::{InputKind, JobSpec};
use aitk_common::plan::profile::MemoryProfile;
use aitk_worker::runner::{self, Launch, Spawner, Wanted};
use draw::{Dice, INPUTS, Space};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use watch::{Canary, MARK, listing, marked};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures");
/// Jobs of the short form.
const JOBS: usize = 2_000;
/// Attempts of the short form; the long one makes one for so many jobs.
const ATTEMPTS: usize = 6;
const JOBS_PER_ATTEMPT: usize = 500;
/// An attempt that does what it was asked for may take as long as it likes; nobody waits for it here.
const ATTEMPT_TIME: Duration = Duration::from_secs(3);
/// What checking jobs may take of memory.
const MEMORY: u64 = 1 << 30;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Bytes that this process held at most; none where the kernel does not say.
fn peak() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().trim_end_matches(" kB").parse::<u64>().ok()? << 10)
}

fn submission(job: &Value) -> Submission {
    Submission {
        config_text: String::new(),
        config_format: "yaml".into(),
        job_json: job.to_string(),
        inputs: INPUTS
            .map(|path| (path.to_owned(), ContentHash::of(path.as_bytes())))
            .into(),
        local: false,
        idempotency_key: None,
        owner: None,
        anatomy: None,
        images: Some(1),
    }
}

fn assignment(submission: &Submission) -> Assignment {
    Assignment {
        job: JobId::new("j1"),
        task: TaskId::new("j1-0"),
        attempt: AttemptId::new("j1-0-1"),
        epoch: Epoch(1),
        job_json: submission.job_json.clone(),
        config_text: String::new(),
        config_format: "yaml".into(),
        inputs: submission.inputs.clone(),
        local: false,
        resume: None,
        device: DeviceRef {
            kind: DeviceKind::Cpu,
            index: 0,
        },
        profile: MemoryProfile::CpuOnly,
        seed: 7,
        generated: Vec::new(),
        trace: None,
        owner: None,
    }
}

/// What is true of every job that passes, however it was made.
fn is_harmless(job: &Value) {
    let spec = JobSpec::from_value(job).unwrap();
    let mut names = vec![spec.name.as_str()];
    names.extend(spec.process.iter().filter_map(|process| process.name()));
    for name in names.into_iter().filter(|name| !name.is_empty()) {
        let mut parts = Path::new(name).components();
        let only =
            matches!((parts.next(), parts.next()), (Some(std::path::Component::Normal(part)), None) if part == name);
        assert!(only && !name.contains(['\0', '\\', '\n']), "{name:?}");
    }
    for input in spec.inputs() {
        let of_hub = matches!(input.kind, InputKind::Model | InputKind::Vae)
            && input.config_path.split('/').count() == 2
            && !input.config_path.contains("..")
            && !input.config_path.starts_with(['/', '~', '.']);
        assert!(INPUTS.contains(&input.config_path.as_str()) || of_hub, "{input:?}");
    }
}

/// Attempts on the tiny model, each in a folder of its own beside the canary.
struct Bench {
    root: tempfile::TempDir,
    staged: BTreeMap<String, PathBuf>,
    spawner: Spawner,
    made: usize,
    completed: usize,
}

impl Bench {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let staged = root.path().join("staged");
        let fixtures = Path::new(FIXTURES);
        copy(&fixtures.join("tiny_sd"), &staged.join("model"));
        for folder in ["data", "masks"] {
            std::fs::create_dir_all(staged.join(folder)).unwrap();
            image::RgbImage::from_fn(64, 64, |x, y| image::Rgb([x as u8, y as u8, 90]))
                .save(staged.join(folder).join("a.png"))
                .unwrap();
        }
        std::fs::write(staged.join("data/a.txt"), "a circle").unwrap();
        std::fs::write(staged.join("words.txt"), "one\ntwo\n").unwrap();
        std::fs::copy(
            fixtures.join("pipelines/lora.safetensors"),
            staged.join("lora.safetensors"),
        )
        .unwrap();
        let inputs = INPUTS.map(|name| (name.to_owned(), staged.join(name)));
        Self {
            root,
            staged: inputs.into(),
            spawner: Spawner::start(tokio::runtime::Handle::current()).unwrap(),
            made: 0,
            completed: 0,
        }
    }

    /// Runs one, and looks through all that it said and wrote.
    async fn attempt(&mut self, job: &Value) {
        self.made += 1;
        let folder = self.root.path().join("attempts").join(self.made.to_string());
        for part in ["tmp", "output"] {
            std::fs::create_dir_all(folder.join(part)).unwrap();
        }
        let spec = json!({
            "job_id": "j1", "attempt_id": "j1-0-1", "epoch": 1,
            "job": JobSpec::from_value(job).unwrap(),
            "config_text": "", "config_format": "yaml", "inputs": self.staged, "output_root": folder.join("output"),
            "resume_from": null, "device": {"kind": "cpu", "index": 0}, "profile": "cpu_only", "seed": 7,
        });
        std::fs::write(folder.join("spec.json"), spec.to_string()).unwrap();
        let launch = Launch {
            command: vec![env!("CARGO_BIN_EXE_aitk-worker").into()],
            spec: folder.join("spec.json"),
            work_dir: Some(folder.clone()),
            temp_dir: folder.join("tmp"),
            grace: ATTEMPT_TIME,
            memory_limited: true,
            cuda_cache: None,
            groups: None,
            sandbox_profile: None,
            progress_timeout: None,
        };
        let (wanted, wishes) = tokio::sync::watch::channel(Wanted::Run);
        let (events, mut heard) = tokio::sync::mpsc::channel(64);
        let listen = async {
            let mut said = Vec::new();
            while let Some(event) = heard.recv().await {
                said.push(serde_json::to_string(&event).unwrap());
            }
            said
        };
        let end = async {
            tokio::time::sleep(ATTEMPT_TIME).await;
            wanted.send_replace(Wanted::Kill);
            std::future::pending::<()>().await;
        };
        let ran = async { tokio::join!(runner::run(&self.spawner, launch, wishes, events), listen) };
        let (outcome, said) = tokio::select! {
            ran = ran => ran,
            () = end => unreachable!(),
        };
        self.completed += usize::from(outcome == Outcome::Completed);
        let told = format!("{outcome:?}\n{}", said.join("\n"));
        assert!(!told.contains(MARK), "{told}");
        assert!(!told.contains("a fault in aitk"), "{told}\n{job}");
        assert_eq!(marked(&folder), Vec::<PathBuf>::new());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else {
            std::fs::copy(entry.path(), to).unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_hostile_value_reaches_nothing_and_breaks_nothing() {
    let jobs = number("AITK_HOSTILE_JOBS").map_or(JOBS, |jobs| usize::try_from(jobs).unwrap());
    let seed = number("AITK_HOSTILE_SEED").unwrap_or(1);
    let attempts = if jobs > JOBS { jobs / JOBS_PER_ATTEMPT } else { ATTEMPTS };
    let mut bench = Bench::new();
    let root = bench.root.path().to_owned();
    let canary = Canary::place(&root.join("canary"));
    let pipe = root.join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let space = Space::new(&root.join("canary"), "../../canary", &pipe);
    let mut dice = Dice(seed);
    let (mut accepted, mut refused, mut waiting) = (0_usize, BTreeMap::<String, usize>::new(), 0_usize);
    let mut slowest = Duration::ZERO;
    let began = Instant::now();
    for number in 0..jobs {
        let valid = space.valid(&mut dice);
        let (job, what) = space.hostile(valid, &mut dice);
        let submission = submission(&job);
        let one = Instant::now();
        let at_coordinator = aitk_coordinator::check_submission(&submission);
        slowest = slowest.max(one.elapsed());
        let at_worker = aitk_worker::check_assignment(&assignment(&submission));
        match at_coordinator {
            Err(problem) => {
                assert!(!problem.is_empty() && problem.len() < 8_000, "{what}: {problem}");
                let kind = what
                    .split(" -> ")
                    .next()
                    .unwrap_or_default()
                    .split('/')
                    .nth(1)
                    .unwrap_or_default();
                *refused.entry(kind.to_owned()).or_default() += 1;
            }
            Ok(()) => {
                accepted += 1;
                waiting += 1;
                // The worker is of the same version, so it knows no rule more; of its own it checks all of them again.
                assert!(at_worker.is_ok(), "{what}: {at_worker:?}");
                is_harmless(&job);
                // Texts most of all become paths.
                let due = bench.made * jobs < attempts * number || bench.made == 0;
                if due && waiting > 0 && (what.contains("-> \"") || waiting > 20) {
                    waiting = 0;
                    bench.attempt(&job).await;
                    canary
                        .is_untouched()
                        .unwrap_or_else(|how| panic!("{what}: {how}\n{job}"));
                }
            }
        }
    }
    // One that nothing was done to comes through: what is refused is refused for a reason.
    let plain = space.valid(&mut Dice(0));
    aitk_coordinator::check_submission(&submission(&plain)).unwrap();
    canary.is_untouched().unwrap();
    let own = listing(&root).into_keys().filter(|path| {
        let below = path.strip_prefix(&root).unwrap();
        !["staged", "canary", "attempts", "pipe"]
            .iter()
            .any(|known| below.starts_with(known))
    });
    assert_eq!(
        own.collect::<Vec<_>>(),
        Vec::<PathBuf>::new(),
        "files beside the attempts"
    );
    let refused_in_all: usize = refused.values().sum();
    println!(
        "{jobs} jobs from seed {seed} in {:?}: {accepted} accepted, {refused_in_all} refused by their first key {refused:?}; {} attempts, \
         {} of them completed; slowest check {slowest:?}; peak {} MiB",
        began.elapsed(),
        bench.made,
        bench.completed,
        peak().unwrap_or(0) >> 20,
    );
    assert!(
        accepted > jobs / 20 && refused_in_all > jobs / 4,
        "{accepted} of {jobs} were accepted"
    );
    assert!(bench.made >= attempts.min(4), "{} attempts", bench.made);
    if let Some(peak) = peak() {
        assert!(peak < MEMORY, "{peak} bytes");
    }
}

/// The watch itself would see it.
#[cfg(target_os = "linux")]
#[test]
fn a_touched_canary_is_seen() {
    let folder = tempfile::tempdir().unwrap();
    let canary = Canary::place(&folder.path().join("canary"));
    canary.is_untouched().unwrap();
    assert_eq!(marked(folder.path()).len(), 4);
    canary.is_untouched().unwrap_err();
    let other = Canary::place(&folder.path().join("other"));
    std::fs::write(folder.path().join("other/home/new"), "x").unwrap();
    other.is_untouched().unwrap_err();
}
