//! What must hold after a round, whatever happened in it.

use super::Cluster;
use super::events::Event;
use super::round::Ended;
use crate::processes::processes_about;
use aitk_common::hash::ContentHash;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long workers and storage may take to put things away after the job has ended.
const TIDY: Duration = Duration::from_secs(30);

/// The files of a run by name. The moment in a sample's name is left out: `samples/__000000010_0.png`.
#[derive(PartialEq, Eq)]
pub struct Files(BTreeMap<String, Vec<u8>>);

impl Files {
    /// Reads the files below a run folder, without its hidden folder.
    ///
    /// # Panics
    /// When a file cannot be read.
    #[must_use]
    pub fn below(folder: &Path) -> Self {
        let files = files_below(folder).into_iter().filter_map(|path| {
            let name = path.strip_prefix(folder).ok()?.to_str()?;
            let bytes = std::fs::read(&path).expect("a result can be read");
            let name = match name.split_once("__") {
                Some((_, rest)) if name.starts_with("samples/") => format!("samples/__{rest}"),
                _ => name.to_owned(),
            };
            (!name.starts_with('.')).then_some((name, bytes))
        });
        Self(files.collect())
    }

    /// Their names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// How these differ from the expected ones, in words.
    #[must_use]
    pub fn differences(&self, expected: &Self) -> Vec<String> {
        let mut found = Vec::new();
        for name in expected.names().filter(|name| !self.0.contains_key(*name)) {
            found.push(format!("{name} is missing"));
        }
        for (name, bytes) in &self.0 {
            match expected.0.get(name) {
                None => found.push(format!("{name} should not be there")),
                Some(other) if other != bytes => found.push(format!("{name} has other bytes")),
                Some(_) => {}
            }
        }
        found
    }
}

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// Everything that does not hold, in words.
#[must_use]
pub fn faults(cluster: &Cluster, ended: &Ended) -> Vec<String> {
    let mut faults = Vec::new();
    faults.extend(result(cluster, &ended.job));
    faults.extend(history(cluster, ended));
    faults.extend(left_behind(cluster));
    faults
}

/// The job has completed, with the files of an undisturbed run.
fn result(cluster: &Cluster, job: &str) -> Vec<String> {
    let waited = cluster.pool.aitk(["wait", job, "--timeout", "60"]);
    if !waited.status.success() {
        let err = String::from_utf8_lossy(&waited.stderr);
        return vec![format!("the job did not complete: {}", err.trim())];
    }
    let out = cluster.root.join("out");
    let fetched = cluster.pool.aitk(["artifacts", "get", job, "-o", "out"]);
    let mut faults = if fetched.status.success() {
        Files::below(&out.join("shapes")).differences(&cluster.expected)
    } else {
        vec![format!(
            "no results: {}",
            String::from_utf8_lossy(&fetched.stderr).trim()
        )]
    };
    let _ = std::fs::remove_dir_all(&out);
    let jobs = cluster.pool.aitk_json(["ps", "--json"]);
    for job in jobs["jobs"].as_array().map_or(&[][..], Vec::as_slice) {
        if job["state"] != "completed" {
            faults.push(format!("a job is left: {job}"));
        }
    }
    faults
}

/// The job's log: attempts one after another, checkpoints that only go on, nothing of an attempt after its end, and
/// whoever followed it has seen every line once, in order, through every restart.
fn history(cluster: &Cluster, ended: &Ended) -> Vec<String> {
    let text = cluster.pool.aitk_ok(["watch", &ended.job, "--json"]);
    // Progress is told beside the log and is no line of it.
    let is_line = |event: &Event| event.kind() != "progress";
    let events: Vec<Event> = text.lines().filter_map(Event::read).filter(is_line).collect();
    let mut faults = Vec::new();
    let (mut live, mut step, mut cursor): (Option<String>, u64, u64) = (None, 0, 0);
    for event in &events {
        if event.cursor() <= cursor {
            faults.push(format!("line {} comes after line {cursor}: {event:?}", event.cursor()));
        }
        cursor = event.cursor();
        if event.is_assignment() {
            if let Some(other) = &live {
                faults.push(format!("{} began while {other} was alive", event.attempt()));
            }
            live = Some(event.attempt().to_owned());
        } else if !event.attempt().is_empty() && live.as_deref() != Some(event.attempt()) {
            faults.push(format!("a word of an attempt that has ended: {event:?}"));
        }
        if event.is_end_of_attempt() {
            live = None;
        }
        if event.kind() == "checkpoint" {
            if event.step() < step {
                faults.push(format!("the checkpoint went back from step {step} to {}", event.step()));
            }
            step = event.step();
        }
    }
    if let Some(live) = live {
        faults.push(format!("{live} never ended"));
    }
    let watched: Vec<u64> = ended
        .watched
        .iter()
        .filter(|event| is_line(event))
        .map(Event::cursor)
        .collect();
    let logged: Vec<u64> = events.iter().map(Event::cursor).collect();
    if watched != logged {
        faults.push(format!(
            "who watched the job saw other lines than its log has:\n{watched:?}\n{logged:?}"
        ));
    }
    faults
}

/// Waits a while for everything to be put away; then says what is not.
fn left_behind(cluster: &Cluster) -> Vec<String> {
    let begun = Instant::now();
    loop {
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
    let workers = cluster.pool.aitk_json(["workers", "--json"]);
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
        found.extend(remains_of_worker(&cluster.pool.worker_dir(&machine.name)));
    }
    for path in files_below(&cluster.pool.data_dir().join("transit")) {
        found.push(format!("{} is left of a transfer", path.display()));
    }
    found.extend(remains_in_store(&cluster.s3.root));
    found
}

/// A worker without attempts holds its cache and nothing else, and every blob in it is whole.
fn remains_of_worker(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder.join("attempts"))
        .into_iter()
        .flatten()
        .flatten()
    {
        found.push(format!("{} is left of an attempt", entry.path().display()));
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
