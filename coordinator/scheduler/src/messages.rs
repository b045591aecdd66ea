//! Reasons, sizes and times as text for people. Nothing reads these texts back.

use super::model::DependencyCondition;
use super::reasons::{Availability, DependencyJob, FenceReason, FitLine, JobLabel, JobStatus, WaitReason};
use super::state::classes::FitError;
use aitk_common::control_plane::JobState;
use aitk_common::job::extension::EXTENSION_PREFIX;
use aitk_common::plan::profile::MemoryProfile;
use std::collections::BTreeSet;
use std::time::Duration;

/// The most jobs ahead in the queue that a reason counts.
pub(super) const MAX_AHEAD: usize = 1000;

/// The reason that is shown when no worker is connected.
pub(super) const NO_WORKER: &str = "no worker is connected; `aitk-worker` starts one";

/// Why a waiting job waits.
pub(super) fn wait_reason(reason: &WaitReason<'_>) -> String {
    match reason {
        WaitReason::CheckpointUpload { offer, left } => format!(
            "waits up to {} s for its checkpoint of step {}, which {} saved and now sends",
            left.as_secs(),
            offer.step,
            offer.worker_name
        ),
        WaitReason::Paused { job, stopped } => {
            format!("{}; `aitk resume {job}` lets it go on", stopped.unwrap_or("paused"))
        }
        WaitReason::Dependency { before, condition } => dependency(before, *condition),
        WaitReason::StartTime { left } => {
            format!("starts in {} at the earliest, as its config asks", duration_text(*left))
        }
        WaitReason::UncountedRetry { seconds, last } => format!("tried again in {seconds} s; before: {last}"),
        WaitReason::Retry {
            number,
            max,
            seconds,
            last,
        } => format!("try {number} of {max} in {seconds} s; before: {last}"),
        WaitReason::StorageFull { free, reserved } => {
            let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
            format!(
                "waits: the coordinator's disk is full ({:.1} GiB free, {:.1} GiB reserved)",
                gib(*free),
                gib(*reserved)
            )
        }
        WaitReason::StorageRefusal { error } => {
            format!("waits until the object storage accepts the coordinator again: {error}")
        }
        WaitReason::ArrayLimit { array, at_most } => {
            format!(
                "at most {at_most} jobs of its array {array} may run at the same time; one of them has to end first"
            )
        }
        WaitReason::NoWorker => NO_WORKER.into(),
        WaitReason::Quota { owner, quota } => {
            let devices = if *quota == 1 { "device" } else { "devices" };
            format!("user {owner} may hold {quota} {devices} at once and does; one of those jobs has to end first")
        }
        WaitReason::StartsNow => "starts now".into(),
        WaitReason::NoDeviceFits(fit_errors) => no_device(fit_errors.iter().collect()),
        WaitReason::NoDeviceAccepts { fitting, first } => {
            let devices = match fitting {
                1 => "the only device that fits takes no jobs".to_owned(),
                several => format!("none of the {several} devices that fit takes jobs"),
            };
            format!("{devices}: {}", availability(first))
        }
        WaitReason::Preempting(job) => format!("starts when {} has saved and given way", job_label(job)),
        WaitReason::LeftToFaster { device, faster } => {
            format!("not started on {device}: {}", left_to_faster(faster))
        }
        WaitReason::InQueue { ahead, devices } => {
            let devices = match devices {
                1 => "the one device that fits is".to_owned(),
                several => format!("all {several} devices that fit are"),
            };
            match ahead {
                Some(0) => format!("next in line; {devices} busy"),
                Some(ahead) => format!("{ahead} ahead in line; {devices} busy"),
                None => format!("more than {MAX_AHEAD} ahead in line; {devices} busy"),
            }
        }
    }
}

fn dependency(before: &DependencyJob<'_>, condition: DependencyCondition) -> String {
    let ends = match condition {
        DependencyCondition::Completed => "",
        DependencyCondition::Ended => " to end",
        DependencyCondition::Failed => " to fail",
    };
    match before {
        DependencyJob::Job(before)
            if condition == DependencyCondition::Completed
                && matches!(before.state, JobState::Failed | JobState::Stopped) =>
        {
            format!(
                "waits for {} ({}), which has {}; `aitk resume {}` lets that go on, `aitk stop` ends this one",
                before.id, before.name, before.state, before.id
            )
        }
        DependencyJob::Job(before) => {
            format!(
                "waits for {} ({}){ends}, which is {}",
                before.id, before.name, before.state
            )
        }
        DependencyJob::Array { id, name, counts } => format!("waits for the array {id} ({name}){ends}: {counts}"),
        DependencyJob::Unknown(id) => format!("waits for {id}, which is not known any more; `aitk stop` ends this one"),
    }
}

/// Whether a device takes a job now, and if not, why.
pub(super) fn availability(availability: &Availability<'_>) -> String {
    match availability {
        Availability::Ready => "free".into(),
        Availability::RunsHere => "runs here".into(),
        Availability::Drained { worker } => format!("{worker} is drained"),
        Availability::Leaving { worker } => format!("{worker} is leaving"),
        Availability::Quarantined { worker, reason } => {
            format!("quarantined: {reason}; `aitk worker undrain {worker}` frees it")
        }
        Availability::Reserved(job) => {
            format!("reserved for {}, which moves here from a slower device", job_label(job))
        }
        Availability::Busy(jobs) => {
            let jobs: Vec<String> = jobs
                .iter()
                .map(|(job, preempted)| {
                    let doing = if *preempted { ", which saves and gives way" } else { "" };
                    format!("{}{doing}", job_label(job))
                })
                .collect();
            format!("busy with {}", jobs.join(" and "))
        }
        Availability::LeftToFaster { faster } => left_to_faster(faster),
        Availability::TooSlow { times, fastest, kind } => format!(
            "it would take about {times:.0} times as long as on {fastest}; `cluster.device: {}` allows it",
            kind.name()
        ),
    }
}

fn left_to_faster(faster: &BTreeSet<String>) -> String {
    let faster: Vec<&str> = faster.iter().map(String::as_str).collect();
    format!(
        "faster devices will finish all waiting parts before it would finish this one: {}",
        faster.join(" and ")
    )
}

fn job_label(label: &JobLabel<'_>) -> String {
    match label {
        JobLabel::Own { id, name } => format!("{id} ({name})"),
        JobLabel::OfUser(owner) => format!("a job of {owner}"),
        JobLabel::Unknown(id) => id.to_string(),
    }
}

/// A job that does not wait.
pub(super) fn job_status(status: &JobStatus<'_>) -> String {
    let state = status.state;
    let stands = match &status.running {
        Some((since, worker, device)) => format!("{state} for {} on {worker} {device}", duration_text(*since)),
        None => state.to_string(),
    };
    match status.reason.as_str() {
        "" => stands,
        reason => format!("{stands}: {reason}"),
    }
}

/// One line of a forecast: a device on which the job fits.
pub(super) fn fit_line(line: &FitLine<'_>) -> String {
    let need = match line.bytes {
        Some(bytes) => format!("{} of {}", gib(bytes), gib(line.budget)),
        None => format!("the whole {}, because the need is unknown", gib(line.budget)),
    };
    let time = match line.seconds {
        Some(seconds) if seconds.is_finite() => {
            let time = duration_text(Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX));
            let how = if line.is_speed_measured { "" } else { ", a guess" };
            format!(", about {time}{how}")
        }
        _ => String::new(),
    };
    let availability = availability(line.availability);
    format!("{}: {} ({need}{time}); {availability}", line.device, line.profile)
}

/// Why an attempt is fenced, for the worker's log.
pub(super) fn fence_reason(reason: FenceReason) -> String {
    match reason {
        FenceReason::Unknown => "no such attempt is known here".into(),
        FenceReason::WrongEpoch { reported, known } => format!("its epoch is {known}, not {reported}"),
        FenceReason::Superseded { epoch, newest } => format!("epoch {epoch} was followed by epoch {newest}"),
        FenceReason::Ended(state) => format!("it has ended: {}", state.name()),
        FenceReason::OtherWorker => "it belongs to another worker".into(),
    }
}

/// Why no connected device fits a job: the error that came closest to fitting.
pub(super) fn no_device(mut errors: Vec<&FitError>) -> String {
    errors.sort();
    // A device without memory says nothing about the job, unless there is no other.
    let closest = errors.iter().rev().find(|error| ***error != FitError::NoBudget);
    match closest {
        None => "no connected device has memory to offer".into(),
        Some(FitError::OtherMachine) => "it runs in place, and no worker of this machine is connected".into(),
        Some(FitError::MissingLabel(key, _)) if key.starts_with(EXTENSION_PREFIX) => {
            let name = key.strip_prefix(EXTENSION_PREFIX).unwrap_or(key);
            format!(
                "no connected worker allows the extension `{name}`: the owner of a worker can, with --allow-extension \
                 {name}=/PATH/OF/PROGRAM"
            )
        }
        Some(FitError::MissingLabel(key, value)) => {
            format!("no connected worker has all its labels; not found: {key}: {value}")
        }
        Some(FitError::OtherKind(kind)) => format!("no connected device is of kind {}", kind.name()),
        Some(FitError::UnsupportedProfile(profile)) => match profile {
            MemoryProfile::CpuOnly => "it asks for the profile cpu_only, and no connected device is a CPU".into(),
            other => format!(
                "it asks for the profile {}, and no connected device is a GPU",
                other.name()
            ),
        },
        Some(FitError::PredictedMemory {
            budget,
            needed,
            profile,
        }) => format!(
            "it needs about {} with the profile {}; the most that a connected device has is {}. \
             If you know better, set `cluster.memory_budget`",
            gib(*needed),
            profile.name(),
            gib(*budget)
        ),
        Some(FitError::RequestedMemory { budget, requested }) => format!(
            "it asks for {} of device memory; the largest device that fits otherwise has {}",
            gib(*requested),
            gib(*budget)
        ),
        Some(FitError::NoBudget) => "no connected device has memory to offer".into(),
    }
}

/// Why a job does not fit on one device.
pub(super) fn not_this_device(error: &FitError) -> String {
    match error {
        FitError::NoBudget => "offers no memory".into(),
        FitError::OtherMachine => "is another machine, and the job runs in place".into(),
        FitError::MissingLabel(key, _) if key.starts_with(EXTENSION_PREFIX) => {
            let name = key.strip_prefix(EXTENSION_PREFIX).unwrap_or(key);
            format!("its worker does not allow the extension `{name}`")
        }
        FitError::MissingLabel(key, value) => format!("its worker lacks the label {key}: {value}"),
        FitError::OtherKind(kind) => format!("the job asks for {}", kind.name()),
        FitError::UnsupportedProfile(profile) => format!("the profile {} is not for it", profile.name()),
        FitError::PredictedMemory {
            budget,
            needed,
            profile,
        } => format!(
            "too small: even {} needs about {}, and it has {}",
            profile.name(),
            gib(*needed),
            gib(*budget)
        ),
        FitError::RequestedMemory { budget, requested } => format!(
            "too small: the job asks for {}, and it has {}",
            gib(*requested),
            gib(*budget)
        ),
    }
}

/// Bytes as text, in GiB with one decimal.
pub fn gib(bytes: u64) -> String {
    let tenths = u128::from(bytes) * 10 / (1 << 30);
    format!("{}.{} GiB", tenths / 10, tenths % 10)
}

/// A duration as text: its two largest units, rounded up to seconds.
pub(super) fn duration_text(time: Duration) -> String {
    let seconds = time.as_millis().div_ceil(1000);
    let units = [(86_400, "d"), (3600, "h"), (60, "min"), (1, "s")];
    let Some(first) = units.iter().position(|(size, _)| seconds >= *size) else {
        return "0 s".into();
    };
    let (size, unit) = units[first];
    let whole = format!("{} {unit}", seconds / size);
    match units.get(first + 1) {
        Some((next, unit)) if seconds % size / next > 0 => format!("{whole} {} {unit}", seconds % size / next),
        _ => whole,
    }
}
