//! What must hold after a round, whatever happened in it.

use super::Cluster;
use super::events::Event;
use super::round::Ended;
use super::work::Work;
use crate::UNREACHABLE;
use crate::processes::processes_about;
use aitk_common::hash::ContentHash;
use aitk_common::step_metrics::{LOG_FILE, METRICS_FILE};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, Instant};

/// How long workers and storage may take to put things away after the job has ended. A coordinator gives up a transfer whose
/// other end vanished after a minute.
const TIDY: Duration = Duration::from_secs(90);

/// The files of a run by name. The moment in an image's name is left out: `samples/__000000010_0.png`, `_3.png`.
#[derive(PartialEq, Eq)]
pub struct Files {
    files: BTreeMap<String, Vec<u8>>,
    /// Those of which there are two, of different moments.
    doubled: Vec<String>,
}

impl Files {
    /// Reads the files below a run folder, without its hidden folder and without the two that tell when something happened.
    ///
    /// # Panics
    /// When a file cannot be read.
    #[must_use]
    pub fn below(folder: &Path) -> Self {
        let (mut files, mut doubled) = (BTreeMap::new(), Vec::new());
        for path in files_below(folder) {
            let Some(name) = path.strip_prefix(folder).ok().and_then(Path::to_str) else {
                continue;
            };
            if name.starts_with('.') || name.ends_with(METRICS_FILE) || name.ends_with(LOG_FILE) {
                continue;
            }
            let bytes = std::fs::read(&path).expect("a result can be read");
            let name = without_moment(name);
            if files.insert(name.clone(), bytes).is_some() {
                doubled.push(name);
            }
        }
        Self { files, doubled }
    }

    /// Their names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(String::as_str)
    }

    /// How these differ from the expected ones, in words.
    #[must_use]
    pub fn differences(&self, expected: &Self) -> Vec<String> {
        let mut found = Vec::new();
        for name in &self.doubled {
            found.push(format!("{name} was made twice"));
        }
        for name in expected.names().filter(|name| !self.files.contains_key(*name)) {
            found.push(format!("{name} is missing"));
        }
        for (name, bytes) in &self.files {
            match expected.files.get(name) {
                None => found.push(format!("{name} should not be there")),
                Some(other) if other != bytes => found.push(format!("{name} has other bytes")),
                Some(_) => {}
            }
        }
        found
    }
}

/// `samples/1724085406830__000000010_0.png` as `samples/__000000010_0.png`.
fn without_moment(name: &str) -> String {
    let (folder, file) = name
        .rsplit_once('/')
        .map_or((String::new(), name), |(folder, file)| (format!("{folder}/"), file));
    let digits = file.bytes().take_while(u8::is_ascii_digit).count();
    match file.get(digits..) {
        Some(rest) if digits >= 12 && rest.starts_with('_') => format!("{folder}{rest}"),
        _ => name.to_owned(),
    }
}

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.files.keys()).finish()
    }
}

/// Everything that does not hold, in words.
#[must_use]
pub fn violations(cluster: &mut Cluster, ended: &Ended) -> Vec<String> {
    let mut violations: Vec<String> = ended.stuck.iter().cloned().collect();
    for job in &ended.jobs {
        let Some(id) = &job.id else {
            violations.push(format!("{} was never acknowledged", cluster.work[job.work].config));
            continue;
        };
        cluster.acknowledged.insert(id.clone());
        violations.extend(result(cluster, id, &cluster.work[job.work]));
        for (id, watched) in &job.members {
            violations.extend(history(cluster, id, watched));
        }
    }
    violations.extend(queue(cluster));
    violations.extend(left_behind(cluster));
    violations.extend(words(cluster));
    violations
}

/// What a command says. It is asked again while nobody leads: a crowded machine changes its leader without a fault, too.
fn ask<const N: usize>(cluster: &Cluster, arguments: [&str; N]) -> Output {
    let begun = Instant::now();
    loop {
        let output = cluster.pool().aitk(arguments);
        if output.status.code() != Some(UNREACHABLE) || begun.elapsed() > TIDY {
            return output;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// The same, of a command with `--json`; null when it fails.
fn ask_json<const N: usize>(cluster: &Cluster, arguments: [&str; N]) -> serde_json::Value {
    serde_json::from_slice(&ask(cluster, arguments).stdout).unwrap_or_default()
}

/// The job has completed, with the files of an undisturbed run.
fn result(cluster: &Cluster, job: &str, work: &Work) -> Vec<String> {
    let config = work.config;
    let waited = ask(cluster, ["wait", job, "--timeout", "60"]);
    if !waited.status.success() {
        let err = String::from_utf8_lossy(&waited.stderr);
        return vec![format!("{job}, {config}, did not complete: {}", err.trim())];
    }
    let out = cluster.root.join("out");
    let fetched = ask(cluster, ["artifacts", "get", job, "-o", "out"]);
    let violations = if fetched.status.success() {
        let differences = Files::below(&out.join(work.folder)).differences(&work.expected);
        differences
            .iter()
            .map(|words| format!("{job}, {config}: {words}"))
            .collect()
    } else {
        let err = String::from_utf8_lossy(&fetched.stderr);
        vec![format!("{job}, {config}: no results: {}", err.trim())]
    };
    let _ = std::fs::remove_dir_all(&out);
    violations
}

/// Every job that was ever acknowledged is known and completed, and there is no other.
fn queue(cluster: &Cluster) -> Vec<String> {
    let mut violations = Vec::new();
    let answer = ask_json(cluster, ["ps", "-a", "--json"]);
    let jobs = answer["jobs"].as_array().map_or(&[][..], Vec::as_slice);
    let mut known = BTreeSet::new();
    for job in jobs {
        let id = job["id"].as_str().unwrap_or_default();
        known.insert(id.to_owned());
        if job["state"] != "completed" {
            violations.push(format!("a job is left: {job}"));
        }
        if !cluster.acknowledged.contains(id) {
            violations.push(format!("{id} is there, and nobody submitted it: {job}"));
        }
    }
    for lost in cluster.acknowledged.difference(&known) {
        violations.push(format!("{lost} was acknowledged and is lost"));
    }
    violations
}

/// Nobody panicked, and nobody ended by himself.
fn words(cluster: &mut Cluster) -> Vec<String> {
    let mut violations: Vec<String> = std::mem::take(&mut cluster.own_ends);
    for text in &mut violations {
        *text = format!("ended by itself: {text}");
    }
    let folders = cluster.coordinators.iter().map(|pool| pool.setup().folder.clone());
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

/// The job's log: attempts one after another, checkpoints that only go on, nothing of an attempt after its end, and
/// whoever followed it has seen every line once, in order, through every restart.
fn history(cluster: &Cluster, job: &str, watched: &[Event]) -> Vec<String> {
    let shown = ask(cluster, ["watch", job, "--json"]);
    let text = String::from_utf8_lossy(&shown.stdout).into_owned();
    // Progress is told beside the log and is no line of it.
    let is_line = |event: &Event| event.kind() != "progress";
    let events: Vec<Event> = text.lines().filter_map(Event::read).filter(is_line).collect();
    let mut violations = Vec::new();
    let (mut live, mut step, mut cursor): (Option<String>, u64, u64) = (None, 0, 0);
    let mut newest = "";
    for event in &events {
        if event.cursor() <= cursor {
            violations.push(format!("line {} comes after line {cursor}: {event:?}", event.cursor()));
        }
        cursor = event.cursor();
        if event.is_assignment() {
            if let Some(other) = &live {
                violations.push(format!("{} began while {other} was alive", event.attempt()));
            }
            live = Some(event.attempt().to_owned());
            newest = event.attempt();
        } else if matches!(event.kind(), "checkpoint" | "artifact" | "artifact_removed")
            && live.is_none()
            && event.attempt() == newest
        {
            // Its worker had saved them, and brought them when it could.
        } else if !event.attempt().is_empty() && live.as_deref() != Some(event.attempt()) {
            violations.push(format!("a word of an attempt that has ended: {event:?}"));
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
    let watched: Vec<u64> = watched
        .iter()
        .filter(|event| is_line(event))
        .map(Event::cursor)
        .collect();
    let logged: Vec<u64> = events.iter().map(Event::cursor).collect();
    if watched != logged {
        violations.push(format!(
            "who watched the job saw other lines than its log has:\n{watched:?}\n{logged:?}"
        ));
    }
    for fault in &mut violations {
        *fault = format!("{job}: {fault}");
    }
    violations
}

/// Waits a while for everything to be put away; then says what is not.
fn left_behind(cluster: &mut Cluster) -> Vec<String> {
    let begun = Instant::now();
    loop {
        // Who was refused a moment ago may still end for that.
        cluster.supervise();
        let found = look_for_remains(cluster);
        if found.is_empty() || begun.elapsed() > TIDY {
            return found;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn look_for_remains(cluster: &Cluster) -> Vec<String> {
    let mut found = Vec::new();
    let attempts = format!("--spec {}", cluster.root.display());
    for (id, line) in processes_about(&attempts) {
        found.push(format!("process {id} is still there: {line}"));
    }
    let workers = ask_json(cluster, ["workers", "--json"]);
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
        found.push(format!("{up} workers are connected"));
    }
    for machine in &cluster.machines {
        found.extend(remains_of_worker(&machine.folder));
    }
    for pool in &cluster.coordinators {
        for path in files_below(&pool.data_dir().join("transit")) {
            found.push(format!("{} is left of a transfer", path.display()));
        }
    }
    found.extend(remains_in_store(&cluster.s3.root));
    found
}

/// A worker without attempts holds its cache and nothing else, and every blob in it is whole.
fn remains_of_worker(folder: &Path) -> Vec<String> {
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

/// Every object is whole, and no upload is left open.
fn remains_in_store(root: &Path) -> Vec<String> {
    let mut found = broken_blobs(&root.join("aitk/blobs"));
    for entry in std::fs::read_dir(root).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        // The server itself forgets an empty file when a request is cut at the moment in which it makes one.
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
        // One that is gone by now was no blob but a file on its way.
        let Ok((hash, _)) = std::fs::File::open(&path).and_then(ContentHash::of_reader) else {
            continue;
        };
        if hash.to_hex() != name {
            found.push(format!("{} is no whole blob", path.display()));
        }
    }
    found
}

fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(files_below(&path));
        } else {
            found.push(path);
        }
    }
    found
}
