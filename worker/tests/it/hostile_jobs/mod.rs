//! Valid jobs with one hostile value, passed through the coordinator's checks, the worker's checks and, for some of
//! those that pass, a real attempt, beside files that no job may touch.
//!
//! The normal test run is short. To run more, set the number of jobs and the seed:
//!
//! ```text
//! AITK_HOSTILE_JOBS=100000 AITK_HOSTILE_SEED=1 cargo test -p aitk-worker --test it hostile_jobs -- --nocapture
//! ```
#![allow(clippy::print_stdout, reason = "prints figures for --nocapture")]

mod canary;
mod job_generator;

use aitk_common::attempt::Outcome;
use aitk_common::capability::{DeviceKind, DeviceRef};
use aitk_common::control_plane::{Assignment, Submission};
use aitk_common::hash::ContentHash;
use aitk_common::id::{AttemptId, Epoch, JobId, TaskId};
use aitk_common::job::{InputKind, JobSpec};
use aitk_common::plan::profile::MemoryProfile;
use aitk_worker::runner::{self, DesiredState, Launch, PendingOutputs, Spawner};
use canary::{Canary, MARK, list_files, marked_files};
use job_generator::{INPUTS, JobGenerator, Rng};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures");
/// Jobs of the short run.
const JOBS: usize = 2_000;
/// Attempts of the short run; the long one makes one per `JOBS_PER_ATTEMPT` jobs.
const ATTEMPTS: usize = 6;
const JOBS_PER_ATTEMPT: usize = 500;
/// An attempt may run longer than this; the test then kills it.
const ATTEMPT_TIME: Duration = Duration::from_secs(3);
/// The memory that checking jobs may use, in bytes.
const MEMORY: u64 = 1 << 30;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// The peak memory of this process, in bytes; `None` if the kernel does not report it.
fn peak_memory() -> Option<u64> {
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
        parameter_counts: None,
        image_batches: Vec::new(),
        longest_prompt: None,
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

/// Checks the properties of every job that passes.
fn assert_harmless(job: &Value) {
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

/// Runs attempts on the tiny model, each in a folder of its own beside the canary.
struct AttemptRunner {
    root: tempfile::TempDir,
    staged: BTreeMap<String, PathBuf>,
    spawner: Spawner,
    attempts_run: usize,
    completed: usize,
}

impl AttemptRunner {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let staged = root.path().join("staged");
        let fixtures = Path::new(FIXTURES);
        copy(&fixtures.join("tiny_sd"), &staged.join("model"));
        // Its text encoder has other numbers.
        copy(&fixtures.join("tiny_sd"), &staged.join("tuned"));
        let text = Path::new("text_encoder/model.safetensors");
        let mut bytes = std::fs::read(staged.join("model").join(text)).unwrap();
        // The last byte of a number has its sign.
        let last = bytes.len() - 1;
        for byte in (0..20_000).map(|number| last - 4 * number).step_by(97) {
            bytes[byte] ^= 0x80;
        }
        std::fs::write(staged.join("tuned").join(text), bytes).unwrap();
        copy(&fixtures.join("tiny_flux"), &staged.join("flux"));
        for folder in ["data", "masks", "controls"] {
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
            attempts_run: 0,
            completed: 0,
        }
    }

    /// Runs an attempt, and checks all its messages and files.
    async fn attempt(&mut self, job: &Value) {
        self.attempts_run += 1;
        let folder = self.root.path().join("attempts").join(self.attempts_run.to_string());
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
            control_groups: None,
            causes: Default::default(),
            sandbox_profile: None,
            progress_timeout: None,
        };
        let (desired, desired_rx) = tokio::sync::watch::channel(DesiredState::Run);
        let (events, mut event_receiver) = tokio::sync::mpsc::channel(64);
        let listen = async {
            let mut messages = Vec::new();
            while let Some(event) = event_receiver.recv().await {
                messages.push(serde_json::to_string(&event).unwrap());
            }
            messages
        };
        let end = async {
            tokio::time::sleep(ATTEMPT_TIME).await;
            desired.send_replace(DesiredState::Kill);
            std::future::pending::<()>().await;
        };
        let ran = async {
            tokio::join!(
                runner::run(&self.spawner, launch, desired_rx, events, PendingOutputs::new()),
                listen
            )
        };
        let (outcome, messages) = tokio::select! {
            ran = ran => ran,
            () = end => unreachable!(),
        };
        self.completed += usize::from(outcome == Outcome::Completed);
        let output = format!("{outcome:?}\n{}", messages.join("\n"));
        assert!(!output.contains(MARK), "{output}");
        assert!(!output.contains("a fault in aitk"), "{output}\n{job}");
        assert_eq!(marked_files(&folder), Vec::<PathBuf>::new());
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
async fn jobs_with_a_hostile_value_access_and_break_nothing() {
    let jobs = number("AITK_HOSTILE_JOBS").map_or(JOBS, |jobs| usize::try_from(jobs).unwrap());
    let seed = number("AITK_HOSTILE_SEED").unwrap_or(1);
    let attempts = if jobs > JOBS { jobs / JOBS_PER_ATTEMPT } else { ATTEMPTS };
    let mut attempt_runner = AttemptRunner::new();
    let root = attempt_runner.root.path().to_owned();
    let canary = Canary::create(&root.join("canary"));
    let pipe = root.join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let generator = JobGenerator::new(&root.join("canary"), "../../canary", &pipe);
    let mut rng = Rng(seed);
    let (mut accepted, mut refused, mut since_attempt) = (0_usize, BTreeMap::<String, usize>::new(), 0_usize);
    let mut slowest = Duration::ZERO;
    let started_at = Instant::now();
    for number in 0..jobs {
        let valid = generator.valid(&mut rng);
        let (job, change) = generator.hostile(valid, &mut rng);
        let submission = submission(&job);
        let check_started = Instant::now();
        let at_coordinator = aitk_coordinator::check_submission(&submission);
        slowest = slowest.max(check_started.elapsed());
        let at_worker = aitk_worker::check_assignment(&assignment(&submission));
        match at_coordinator {
            Err(problem) => {
                assert!(!problem.is_empty() && problem.len() < 8_000, "{change}: {problem}");
                let kind = change
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
                since_attempt += 1;
                // The worker has the same version, so it knows no more rules; it checks all of them again.
                assert!(at_worker.is_ok(), "{change}: {at_worker:?}");
                assert_harmless(&job);
                // Texts are the most likely to become paths.
                let due = attempt_runner.attempts_run * jobs < attempts * number || attempt_runner.attempts_run == 0;
                if due && since_attempt > 0 && (change.contains("-> \"") || since_attempt > 20) {
                    since_attempt = 0;
                    attempt_runner.attempt(&job).await;
                    canary
                        .check_untouched()
                        .unwrap_or_else(|how| panic!("{change}: {how}\n{job}"));
                }
            }
        }
    }
    // An unchanged job passes.
    let plain = generator.valid(&mut Rng(0));
    aitk_coordinator::check_submission(&submission(&plain)).unwrap();
    canary.check_untouched().unwrap();
    let unexpected = list_files(&root).into_keys().filter(|path| {
        let below = path.strip_prefix(&root).unwrap();
        !["staged", "canary", "attempts", "pipe"]
            .iter()
            .any(|known| below.starts_with(known))
    });
    assert_eq!(
        unexpected.collect::<Vec<_>>(),
        Vec::<PathBuf>::new(),
        "files beside the attempts"
    );
    let refused_in_all: usize = refused.values().sum();
    println!(
        "{jobs} jobs from seed {seed} in {:?}: {accepted} accepted, {refused_in_all} refused by their first key {refused:?}; {} attempts, \
         {} of them completed; slowest check {slowest:?}; peak {} MiB",
        started_at.elapsed(),
        attempt_runner.attempts_run,
        attempt_runner.completed,
        peak_memory().unwrap_or(0) >> 20,
    );
    assert!(
        accepted > jobs / 20 && refused_in_all > jobs / 4,
        "{accepted} of {jobs} were accepted"
    );
    assert!(
        attempt_runner.attempts_run >= attempts.min(4),
        "{} attempts",
        attempt_runner.attempts_run
    );
    if let Some(peak_memory) = peak_memory() {
        assert!(peak_memory < MEMORY, "{peak_memory} bytes");
    }
}

/// The canary detects access.
#[cfg(target_os = "linux")]
#[test]
fn access_to_the_canary_is_detected() {
    let folder = tempfile::tempdir().unwrap();
    let canary = Canary::create(&folder.path().join("canary"));
    canary.check_untouched().unwrap();
    assert_eq!(marked_files(folder.path()).len(), 4);
    canary.check_untouched().unwrap_err();
    let other = Canary::create(&folder.path().join("other"));
    std::fs::write(folder.path().join("other/home/new"), "x").unwrap();
    other.check_untouched().unwrap_err();
}
