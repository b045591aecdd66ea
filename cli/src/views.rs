//! Jobs, workers and artifacts as tables and as JSON.

use crate::args::WorkerState;
use crate::exit::Exit;
use crate::output::format::{ago, duration, gib, number, rate, rfc3339, size};
use crate::output::{Column, Table};
use aitk_common::capability::DeviceRef;
use aitk_common::control_plane::{
    Artifact, AttemptState, JobEvent, JobState, JobView, UnixMillis, WorkerDeviceView, WorkerView,
};
use jiff::Timestamp;
use serde_json::{Value, json};
use std::time::Duration;

/// The smallest length at which ids are shown.
const SHORT_ID: usize = 9;

/// Converts a time from the coordinator. A value out of range becomes 1970.
#[must_use]
pub fn timestamp(time: UnixMillis) -> Timestamp {
    i64::try_from(time.0)
        .ok()
        .and_then(|ms| Timestamp::from_millisecond(ms).ok())
        .unwrap_or(Timestamp::UNIX_EPOCH)
}

/// Formats a device: `cuda:0`, `cpu`, `cpu:portable`.
#[must_use]
pub fn device(device: DeviceRef) -> String {
    match (device.kind.name(), device.index) {
        ("cpu", 0) => "cpu".to_owned(),
        _ if device.is_portable() => "cpu:portable".to_owned(),
        (kind, index) => format!("{kind}:{index}"),
    }
}

/// Returns the exit code for a job that has ended.
#[must_use]
pub fn job_exit(job: &JobView) -> Exit {
    match job.state {
        JobState::Completed => Exit::Ok,
        JobState::Stopped => Exit::Terminated,
        JobState::Failed
            if job
                .attempts
                .last()
                .is_some_and(|attempt| attempt.state == AttemptState::Lost) =>
        {
            Exit::Internal
        }
        JobState::Queued | JobState::Running | JobState::Stopping | JobState::Failed => Exit::Failed,
    }
}

/// Returns the length to which ids are shortened: at least 9, and long enough that all are different.
#[must_use]
pub fn id_length<'a>(ids: impl Iterator<Item = &'a str>) -> usize {
    let mut ids: Vec<&str> = ids.collect();
    ids.sort_unstable();
    let shared = ids
        .windows(2)
        .map(|pair| pair[0].bytes().zip(pair[1].bytes()).take_while(|(a, b)| a == b).count());
    shared.max().map_or(SHORT_ID, |shared| SHORT_ID.max(shared + 1))
}

/// Returns the beginning of an id.
#[must_use]
pub fn short_id(id: &str, length: usize) -> &str {
    id.get(..length).unwrap_or(id)
}

/// Returns the estimated remaining time of a job, if it is known.
fn eta(job: &JobView) -> Option<Duration> {
    let progress = job.progress.filter(|_| is_active(job))?;
    let remaining = progress
        .total
        .checked_sub(progress.done)
        .filter(|&remaining| remaining > 0)?;
    Duration::try_from_secs_f64(progress.seconds_per_step? * remaining as f64).ok()
}

fn is_active(job: &JobView) -> bool {
    matches!(job.state, JobState::Running | JobState::Stopping)
}

/// Returns a short text about what a job is doing, or the reason for its state.
#[must_use]
pub fn job_detail(job: &JobView) -> String {
    let location = job
        .attempts
        .last()
        .map(|attempt| format!("{} {}", attempt.worker_name, device(attempt.device)));
    match job.state {
        JobState::Running | JobState::Stopping => {
            let mut parts: Vec<String> = location.into_iter().collect();
            parts.extend(job.phase.clone().filter(|phase| !phase.is_empty()));
            if parts.is_empty() || job.paused {
                parts.extend(Some(job.reason.clone()).filter(|reason| !reason.is_empty()));
            }
            parts.join(", ")
        }
        JobState::Queued | JobState::Stopped | JobState::Failed => job.reason.clone(),
        JobState::Completed => match job.run_time() {
            Some(took) => format!("took {}", duration(took)),
            None => job.reason.clone(),
        },
    }
}

/// Builds the table of `aitk ps`.
#[must_use]
pub fn jobs_table(jobs: &[JobView], now: Timestamp, for_scripts: bool) -> Table {
    let length = if for_scripts {
        usize::MAX
    } else {
        id_length(jobs.iter().map(|job| job.id.as_str()))
    };
    let numbers = |job: &JobView| {
        let active = is_active(job);
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let speed = job
            .progress
            .and_then(|progress| progress.seconds_per_step)
            .filter(|_| active);
        [
            or_none(job.loss.filter(|_| active).map(number)),
            or_none(speed.map(rate)),
            or_none(eta(job).map(duration)),
        ]
    };
    // For people these columns are left out when they are empty, so that reasons have more space. A script always gets
    // them.
    let numbered = for_scripts || jobs.iter().any(|job| numbers(job).iter().any(|cell| cell != "-"));
    let mut columns = vec![
        Column::fixed("ID"),
        Column::text("NAME", 8),
        Column::fixed("STATE"),
        Column::number("STEP"),
    ];
    if numbered {
        columns.extend([Column::number("LOSS"), Column::number("SPEED"), Column::number("ETA")]);
    }
    columns.push(Column::number("SINCE"));
    let mut table = Table::with_notes(&columns, "DETAIL");
    for job in jobs {
        let step = match (job.progress, job.checkpoint_step) {
            (Some(progress), _) => format!("{}/{}", progress.done, progress.total),
            (None, Some(saved)) => saved.to_string(),
            (None, None) => "-".to_owned(),
        };
        let since = job.ended.or(job.started).unwrap_or(job.created);
        let mut cells = vec![
            short_id(job.id.as_str(), length).to_owned(),
            job.name.clone(),
            job.status().to_owned(),
            step,
        ];
        if numbered {
            cells.extend(numbers(job));
        }
        cells.push(ago(timestamp(since), now));
        table.row(cells);
        table.note(&job_detail(job));
    }
    table
}

/// Returns the states of a worker's device, the most important first. It is empty for a worker without devices that is
/// only connected.
#[must_use]
pub fn device_states(worker: &WorkerView, slot: Option<&WorkerDeviceView>) -> Vec<WorkerState> {
    let busy = slot.is_some_and(|slot| !slot.jobs.is_empty());
    let states = [
        (!worker.connected, WorkerState::Away),
        (worker.leaving, WorkerState::Leaving),
        (slot.is_some_and(|slot| slot.quarantined), WorkerState::Quarantined),
        (worker.drained, WorkerState::Drained),
        (busy && worker.connected, WorkerState::Running),
    ];
    let found: Vec<WorkerState> = states
        .into_iter()
        .filter(|(is, _)| *is)
        .map(|(_, state)| state)
        .collect();
    match (found.is_empty(), slot) {
        (true, Some(_)) => vec![WorkerState::Idle],
        _ => found,
    }
}

/// Returns the details of a device beside its state: what runs there, why it is quarantined, when it was last seen.
fn device_detail(worker: &WorkerView, slot: Option<&WorkerDeviceView>, length: usize, now: Timestamp) -> String {
    let mut parts = Vec::new();
    // The first state is in its own column, and running jobs are listed below.
    let more = device_states(worker, slot).into_iter().skip(1);
    parts.extend(
        more.filter(|state| *state != WorkerState::Running)
            .map(|state| state.name().to_owned()),
    );
    let runs: Vec<&str> = slot
        .iter()
        .flat_map(|slot| &slot.jobs)
        .map(|job| short_id(job.as_str(), length))
        .collect();
    if !worker.connected {
        parts.push(format!("last seen {}", ago(timestamp(worker.last_seen), now)));
    }
    if !runs.is_empty() {
        parts.push(format!("runs {}", runs.join(" ")));
    }
    if let Some(slot) = slot.filter(|slot| slot.quarantined && !slot.quarantine_reason.is_empty()) {
        parts.push(slot.quarantine_reason.clone());
    }
    parts.join("; ")
}

/// Builds the table of `aitk workers`: a row per device, with its details as a note.
#[must_use]
pub fn workers_table(workers: &[WorkerView], now: Timestamp) -> Table {
    let columns = [
        // Wide, because users type the name into other commands.
        Column::text("WORKER", 22),
        Column::text("DEVICE", 10),
        Column::number("BUDGET"),
        Column::number("MEMORY"),
        Column::fixed("PROFILE"),
        Column::fixed("STATE"),
    ];
    let mut table = Table::with_notes(&columns, "DETAIL");
    let length = id_length(
        workers
            .iter()
            .flat_map(|w| &w.devices)
            .flat_map(|d| d.jobs.iter().map(|id| id.as_str())),
    );
    let state = |worker: &WorkerView, slot: Option<&WorkerDeviceView>| {
        let first = device_states(worker, slot).first().map(|state| state.name());
        first.unwrap_or("no device").to_owned()
    };
    for worker in workers {
        if worker.devices.is_empty() {
            let none = || "-".to_owned();
            table.row([worker.name.clone(), none(), none(), none(), none(), state(worker, None)]);
            table.note(&device_detail(worker, None, length, now));
        }
        for slot in &worker.devices {
            table.row([
                worker.name.clone(),
                format!("{} {}", device(slot.device.id), slot.device.name),
                gib(slot.device.memory_budget),
                gib(slot.device.memory_total),
                slot.device.profile.name().to_owned(),
                state(worker, Some(slot)),
            ]);
            table.note(&device_detail(worker, Some(slot), length, now));
        }
    }
    table
}

/// Builds the table of `aitk artifacts ls`.
#[must_use]
pub fn artifacts_table(artifacts: &[Artifact]) -> Table {
    let columns = [
        Column::text("NAME", 24),
        Column::fixed("KIND"),
        Column::number("STEP"),
        Column::number("SIZE"),
    ];
    let mut table = Table::new(&columns);
    for artifact in artifacts {
        let step = artifact.step.map_or_else(|| "-".to_owned(), |step| step.to_string());
        table.row([artifact.name.clone(), artifact.kind.clone(), step, size(artifact.bytes)]);
    }
    table
}

/// Serialises a value of the coordinator, with the fields `times` as RFC 3339.
fn with_times(value: impl serde::Serialize, times: &[&str]) -> Value {
    let mut value = serde_json::to_value(value).unwrap_or(Value::Null);
    for name in times {
        if let Some(slot) = value.get_mut(name)
            && let Some(ms) = slot.as_u64()
        {
            *slot = rfc3339(timestamp(UnixMillis(ms))).into();
        }
    }
    value
}

/// Converts a job to JSON.
#[must_use]
pub fn job_json(job: &JobView) -> Value {
    let mut value = with_times(job, &["created", "started", "ended"]);
    value["status"] = job.status().into();
    value["attempts"] = job
        .attempts
        .iter()
        .map(|attempt| with_times(attempt, &["created", "ended"]))
        .collect();
    value
}

/// Converts a worker to JSON.
#[must_use]
pub fn worker_json(worker: &WorkerView) -> Value {
    with_times(worker, &["last_seen"])
}

/// Returns a line about how a connected worker confines attempts; the reasons are in `--json`.
#[must_use]
pub fn confinement_line(worker: &WorkerView) -> Option<String> {
    let confinement = worker.confinement.as_ref().filter(|_| worker.connected)?;
    let parts = confinement.parts();
    let named = |in_force: bool| {
        let names = parts.iter().filter(|(_, part)| part.in_force == in_force);
        names.map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
    };
    let (confined, open) = (named(true), named(false));
    let confined = if confined.is_empty() { "nothing" } else { &confined };
    let open = if open.is_empty() {
        String::new()
    } else {
        format!("; not {open}")
    };
    Some(format!("{} confines {confined}{open}", worker.name))
}

/// Converts an event to JSON, with the id of its job.
#[must_use]
pub fn event_json(job: &str, event: &JobEvent) -> Value {
    let mut line = json!({ "job": job });
    if let (Value::Object(line), Value::Object(fields)) = (&mut line, with_times(event, &["time"])) {
        line.extend(fields);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::tests::job;
    use aitk_common::capability::{Device, DeviceKind};
    use aitk_common::confinement::{Confinement, Protection};
    use aitk_common::control_plane::{AttemptView, EventBody, Progress};
    use aitk_common::id::{AttemptId, Epoch, JobId, WorkerId};
    use aitk_common::plan::profile::MemoryProfile;
    use unicode_width::UnicodeWidthStr;

    fn attempt(state: AttemptState) -> AttemptView {
        AttemptView {
            id: AttemptId::new("a1"),
            epoch: Epoch(1),
            worker: WorkerId::new("w1"),
            worker_name: "the-box-under-the-desk".to_owned(),
            device: DeviceRef {
                kind: DeviceKind::Cuda,
                index: 0,
            },
            profile: MemoryProfile::FullGpu,
            memory: None,
            state,
            created: UnixMillis(1000),
            ended: None,
            message: String::new(),
        }
    }

    fn jobs() -> Vec<JobView> {
        let name = "a_lora_of_my_cat_with_a_very_long_name_that_never_ends_and_goes_on";
        let mut running = job("0193aaaa-1", name, JobState::Running, 0);
        running.attempts.push(attempt(AttemptState::Running));
        running.phase = Some("training".to_owned());
        running.loss = Some(0.123_46);
        running.progress = Some(Progress {
            done: 1200,
            total: 20_000,
            seconds_per_step: Some(0.4),
        });
        let mut queued = job("0193aaab-2", "sdxl", JobState::Queued, 0);
        queued.reason = "waits for a device with 24.0 GiB: the-box-under-the-desk has 11.2 GiB free".to_owned();
        vec![running, queued]
    }

    #[test]
    fn tables_fit_eighty_columns_with_long_names() {
        let now = timestamp(UnixMillis(3_600_000));
        let lines = jobs_table(&jobs(), now, false).aligned(80);
        for line in &lines {
            assert!(line.width() <= 80, "{line}");
        }
        assert!(lines[1].starts_with("0193aaaa-  a_lora"), "{}", lines[1]);
        let numbers = "running  1200/20000  0.1235  2.50 it/s  2h 05m  1h ago";
        assert!(lines[1].ends_with(numbers), "{}", lines[1]);
        // The location of one job and the reason of the other are not cut.
        assert_eq!(lines[2], "  the-box-under-the-desk cuda:0, training");
        let why = "waits for a device with 24.0 GiB: the-box-under-the-desk has 11.2 GiB free";
        assert_eq!(lines[4], format!("  {why}"));
        let device = Device {
            id: DeviceRef {
                kind: DeviceKind::Cuda,
                index: 1,
            },
            name: "NVIDIA RTX PRO 6000 Blackwell Workstation Edition".to_owned(),
            architecture: "sm_120".to_owned(),
            memory_total: 96 << 30,
            memory_budget: 95 << 30,
            dtypes: vec![],
            attention: vec![],
            profile: MemoryProfile::FullGpu,
            gflops: 0,
        };
        let worker = WorkerView {
            id: WorkerId::new("w1"),
            name: "the-box-under-the-desk".to_owned(),
            version: "0.1.0".to_owned(),
            host: "box".to_owned(),
            connected: true,
            leaving: false,
            drained: false,
            last_seen: UnixMillis(0),
            devices: vec![WorkerDeviceView {
                device,
                jobs: vec![JobId::new("0193aaaa-1")],
                reserved: 0,
                faults: 3,
                quarantined: true,
                quarantine_reason: "3 faults in a row, the last one: CUDA error 700".to_owned(),
            }],
            labels: std::collections::BTreeMap::new(),
            confinement: None,
        };
        let mut confined = worker.clone();
        assert_eq!(confinement_line(&confined), None);
        let mut confinement = Confinement::none("this kernel has no Landlock");
        confined.confinement = Some(confinement.clone());
        let line = confinement_line(&confined).unwrap();
        assert_eq!(
            line,
            "the-box-under-the-desk confines nothing; not files, network, syscalls, limits"
        );
        confinement.files = Protection::enforced_by("Landlock ABI 7");
        confinement.network = Protection::enforced_by("seccomp");
        confined.confinement = Some(confinement);
        let line = confinement_line(&confined).unwrap();
        assert_eq!(
            line,
            "the-box-under-the-desk confines files, network; not syscalls, limits"
        );
        assert!(line.width() <= 80);
        let lines = workers_table(&[worker], now).aligned(80);
        for line in &lines {
            assert!(line.width() <= 80, "{line}");
        }
        // The state and its reason are not cut.
        assert!(lines[1].starts_with("the-box-under-the-desk  cuda:1 "), "{}", lines[1]);
        assert!(lines[1].ends_with("quarantined"), "{}", lines[1]);
        assert_eq!(
            lines[2],
            "  runs 0193aaaa-; 3 faults in a row, the last one: CUDA error 700"
        );
        let artifact = Artifact {
            name: format!("{}/samples/1724085406830__000000500_0.jpg", "x".repeat(90)),
            kind: "sample".to_owned(),
            hash: None,
            bytes: 123_456,
            step: Some(500),
            index: Some(0),
            local_path: None,
        };
        for line in artifacts_table(&[artifact]).aligned(80) {
            assert!(line.width() <= 80, "{line}");
        }
    }

    #[test]
    fn shortened_ids_stay_different() {
        assert_eq!(id_length(["0193aaaa-1", "0193aaab-2"].into_iter()), 9);
        assert_eq!(id_length(["0193aaaa-1", "0193aaaa-2"].into_iter()), 10);
        assert_eq!(id_length(std::iter::empty()), 9);
        assert_eq!(short_id("abc", 8), "abc");
    }

    #[test]
    fn the_exit_code_of_a_job_depends_on_how_it_ended() {
        let mut lost = job("a", "a", JobState::Failed, 0);
        assert_eq!(job_exit(&lost), Exit::Failed);
        lost.attempts.push(attempt(AttemptState::Lost));
        assert_eq!(job_exit(&lost), Exit::Internal);
        assert_eq!(job_exit(&job("a", "a", JobState::Stopped, 0)), Exit::Terminated);
        assert_eq!(job_exit(&job("a", "a", JobState::Completed, 0)), Exit::Ok);
    }

    #[test]
    fn json_has_rfc_3339_times() {
        let value = job_json(&jobs()[0]);
        assert_eq!(value["created"], "1970-01-01T00:00:00.000Z");
        assert_eq!(value["attempts"][0]["created"], "1970-01-01T00:00:01.000Z");
        assert_eq!(value["state"], "running");
        assert_eq!(value["status"], "running");
        let mut paused = job("j", "j", JobState::Queued, 0);
        paused.paused = true;
        let value = job_json(&paused);
        assert_eq!(
            (&value["state"], &value["status"]),
            (&"queued".into(), &"paused".into())
        );
        let body = EventBody::Log {
            level: "info".to_owned(),
            message: "hi".to_owned(),
        };
        let event = JobEvent {
            cursor: 4,
            time: UnixMillis(5),
            attempt: None,
            body,
        };
        let text = event_json("j", &event).to_string();
        assert_eq!(
            text,
            r#"{"job":"j","cursor":4,"time":"1970-01-01T00:00:00.005Z","attempt":null,"event":"log","level":"info","message":"hi"}"#
        );
    }
}
