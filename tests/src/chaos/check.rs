//! The invariants that must hold after every round.

use super::Cluster;
use super::events::Event;
use super::files::{Files, files_below};
use super::round::RoundOutcome;
use super::work::Workload;
use crate::UNREACHABLE;
use crate::processes::processes_with_argument;
use aitk_common::hash::ContentHash;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

/// How long workers and storage may take to clean up after the job has ended. A coordinator gives a transfer up one minute
/// after its client vanished.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(90);

/// Describes every violated invariant.
#[must_use]
pub fn violations(cluster: &mut Cluster, outcome: &RoundOutcome) -> Vec<String> {
    let mut violations: Vec<String> = outcome.stuck.iter().cloned().collect();
    for job in &outcome.jobs {
        let Some(id) = &job.id else {
            violations.push(format!(
                "{} was never acknowledged",
                cluster.workloads[job.workload].config
            ));
            continue;
        };
        cluster.acknowledged.insert(id.clone());
        violations.extend(check_result(cluster, id, &cluster.workloads[job.workload]));
        for (id, seen) in &job.members {
            violations.extend(check_history(cluster, id, seen));
        }
    }
    violations.extend(check_queue(cluster));
    violations.extend(check_leftovers(cluster));
    violations.extend(check_processes(cluster));
    violations
}

/// Runs a command, and repeats it while no coordinator leads. On a busy machine the leader may change without a fault, too.
fn run<const N: usize>(cluster: &Cluster, arguments: [&str; N]) -> Output {
    let begun = Instant::now();
    loop {
        let output = cluster.test_cluster().aitk(arguments);
        if output.status.code() != Some(UNREACHABLE) || begun.elapsed() > CLEANUP_TIMEOUT {
            return output;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Runs a command with `--json` and parses its output; null when it fails.
fn run_json<const N: usize>(cluster: &Cluster, arguments: [&str; N]) -> serde_json::Value {
    serde_json::from_slice(&run(cluster, arguments).stdout).unwrap_or_default()
}

/// The job has completed with the same files as a run without faults.
fn check_result(cluster: &Cluster, job: &str, workload: &Workload) -> Vec<String> {
    let config = workload.config;
    let waited = run(cluster, ["wait", job, "--timeout", "60"]);
    if !waited.status.success() {
        let err = String::from_utf8_lossy(&waited.stderr);
        return vec![format!("{job}, {config}, did not complete: {}", err.trim())];
    }
    let out = cluster.root.join("out");
    let fetched = run(cluster, ["artifacts", "get", job, "-o", "out"]);
    let violations = if fetched.status.success() {
        let differences = Files::below(&out.join(workload.folder)).differences(&workload.expected);
        differences
            .iter()
            .map(|difference| format!("{job}, {config}: {difference}"))
            .collect()
    } else {
        let err = String::from_utf8_lossy(&fetched.stderr);
        vec![format!(
            "{job}, {config}: its results cannot be fetched: {}",
            err.trim()
        )]
    };
    let _ = std::fs::remove_dir_all(&out);
    violations
}

/// Every acknowledged job exists and is completed, and no other job exists.
fn check_queue(cluster: &Cluster) -> Vec<String> {
    let mut violations = Vec::new();
    let answer = run_json(cluster, ["ps", "-a", "--json"]);
    let jobs = answer["jobs"].as_array().map_or(&[][..], Vec::as_slice);
    let mut known = BTreeSet::new();
    for job in jobs {
        let id = job["id"].as_str().unwrap_or_default();
        known.insert(id.to_owned());
        if job["state"] != "completed" {
            violations.push(format!("a job is not completed: {job}"));
        }
        if !cluster.acknowledged.contains(id) {
            violations.push(format!("{id} exists, but no submission of it was acknowledged: {job}"));
        }
    }
    for lost in cluster.acknowledged.difference(&known) {
        violations.push(format!("{lost} was acknowledged, but does not exist"));
    }
    violations
}

/// No process panicked or exited on its own.
fn check_processes(cluster: &mut Cluster) -> Vec<String> {
    let mut violations: Vec<String> = std::mem::take(&mut cluster.unexpected_exits);
    for text in &mut violations {
        *text = format!("exited on its own: {text}");
    }
    let folders = cluster
        .coordinators
        .iter()
        .map(|test_cluster| test_cluster.setup().folder.clone());
    for entry in folders.flat_map(std::fs::read_dir).flatten().flatten() {
        let path = entry.path();
        if path.extension().is_none_or(|extension| extension != "log") {
            continue;
        }
        let text = std::fs::read(&path).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines = text.lines().filter(|line| line.contains("panicked at"));
        violations.extend(lines.map(|line| format!("{}: {line}", path.display())));
    }
    violations
}

/// The job's log is consistent: attempts do not overlap, checkpoints only go forward, no event belongs to an attempt that has
/// ended, and the follower saw every event once and in order, through every restart.
fn check_history(cluster: &Cluster, job: &str, seen: &[Event]) -> Vec<String> {
    let shown = run(cluster, ["watch", job, "--json"]);
    let text = String::from_utf8_lossy(&shown.stdout).into_owned();
    // Progress is streamed, but not part of the log.
    let is_logged = |event: &Event| event.kind() != "progress";
    let events: Vec<Event> = text.lines().filter_map(Event::read).filter(is_logged).collect();
    let mut violations = Vec::new();
    let (mut live, mut step, mut cursor): (Option<String>, u64, u64) = (None, 0, 0);
    let mut newest = "";
    for event in &events {
        if event.cursor() <= cursor {
            violations.push(format!(
                "cursor {} comes after cursor {cursor}: {event:?}",
                event.cursor()
            ));
        }
        cursor = event.cursor();
        if event.is_assignment() {
            if let Some(other) = &live {
                violations.push(format!("{} began before {other} ended", event.attempt()));
            }
            live = Some(event.attempt().to_owned());
            newest = event.attempt();
        } else if matches!(event.kind(), "checkpoint" | "artifact" | "artifact_removed")
            && live.is_none()
            && event.attempt() == newest
        {
            // The worker stored them before the end and reported them later.
        } else if !event.attempt().is_empty() && live.as_deref() != Some(event.attempt()) {
            violations.push(format!("an event of an attempt that has ended: {event:?}"));
        }
        if event.is_end_of_attempt() {
            live = None;
        }
        if event.kind() == "checkpoint" {
            if event.step() < step {
                violations.push(format!("the checkpoint went back from step {step} to {}", event.step()));
            } else if event.step() == step {
                violations.push(format!("the checkpoint of step {step} was committed twice"));
            }
            step = event.step();
        }
    }
    if let Some(live) = live {
        violations.push(format!("{live} never ended"));
    }
    let seen: Vec<u64> = seen
        .iter()
        .filter(|event| is_logged(event))
        .map(Event::cursor)
        .collect();
    let logged: Vec<u64> = events.iter().map(Event::cursor).collect();
    if seen != logged {
        violations.push(format!(
            "the follower saw other events than the log has:\nseen {seen:?}\nlog  {logged:?}"
        ));
    }
    for violation in &mut violations {
        *violation = format!("{job}: {violation}");
    }
    violations
}

/// Waits for the clean-up, then describes what is left.
fn check_leftovers(cluster: &mut Cluster) -> Vec<String> {
    let begun = Instant::now();
    loop {
        // A worker that was revoked a moment ago may still exit.
        cluster.supervise();
        let found = find_leftovers(cluster);
        if found.is_empty() || begun.elapsed() > CLEANUP_TIMEOUT {
            return found;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn find_leftovers(cluster: &Cluster) -> Vec<String> {
    let mut found = Vec::new();
    let attempts = format!("--spec {}", cluster.root.display());
    for (id, line) in processes_with_argument(&attempts) {
        found.push(format!("process {id} still runs: {line}"));
    }
    let workers = run_json(cluster, ["workers", "--json"]);
    let connected = workers["workers"].as_array().map_or(&[][..], Vec::as_slice);
    for worker in connected.iter().filter(|worker| worker["connected"] == true) {
        for device in worker["devices"].as_array().map_or(&[][..], Vec::as_slice) {
            if !device["job"].is_null() {
                found.push(format!("{} still has a job: {device}", worker["name"]));
            }
        }
    }
    let up = connected.iter().filter(|worker| worker["connected"] == true).count();
    if up != cluster.machines.len() {
        found.push(format!("{up} of {} workers are connected", cluster.machines.len()));
    }
    for machine in &cluster.machines {
        found.extend(worker_leftovers(&machine.folder));
    }
    for test_cluster in &cluster.coordinators {
        for path in files_below(&test_cluster.data_dir().join("transit")) {
            found.push(format!("{} is left of a transfer", path.display()));
        }
    }
    found.extend(storage_leftovers(&cluster.s3.root));
    found
}

/// A worker without attempts has nothing but its cache, and every blob in it is intact.
fn worker_leftovers(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for (part, what) in [("attempts", "an attempt"), ("kept", "a checkpoint that was kept")] {
        for entry in std::fs::read_dir(folder.join(part)).into_iter().flatten().flatten() {
            found.push(format!("{} is left of {what}", entry.path().display()));
        }
    }
    for path in files_below(folder) {
        if path
            .components()
            .any(|part| part.as_os_str().as_encoded_bytes().starts_with(b".tmp-"))
        {
            found.push(format!("{} is half-written", path.display()));
        }
    }
    found.extend(broken_blobs(&folder.join("cache/blobs")));
    found
}

/// Every object is intact, and no upload is unfinished.
fn storage_leftovers(root: &Path) -> Vec<String> {
    let mut found = broken_blobs(&root.join("aitk/blobs"));
    for entry in std::fs::read_dir(root).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        // The S3 server leaves an empty file when a request is cut while it creates the file.
        let is_empty = entry.metadata().is_ok_and(|data| data.len() == 0);
        if (name.starts_with(".tmp.") && !is_empty) || name.starts_with(".upload") {
            found.push(format!("{name} is left in the store"));
        }
    }
    found
}

fn broken_blobs(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for path in files_below(folder) {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        // A file that is gone by now was a temporary one.
        let Ok((hash, _)) = std::fs::File::open(&path).and_then(ContentHash::of_reader) else {
            continue;
        };
        if hash.to_hex() != name {
            found.push(format!("the content of {} does not match its hash", path.display()));
        }
    }
    found
}
