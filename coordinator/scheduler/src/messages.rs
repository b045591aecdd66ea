//! Misfits, sizes and times in words.

use super::state::classes::Misfit;
use aitk_common::plan::profile::MemoryProfile;
use std::time::Duration;

/// Why no device is for the job: the reason that came closest.
pub(super) fn no_device(mut misfits: Vec<&Misfit>) -> String {
    misfits.sort();
    // A device without memory says nothing about the job, unless there is no other.
    let closest = misfits.iter().rev().find(|misfit| ***misfit != Misfit::NoBudget);
    match closest {
        None => "no connected device has memory to offer".into(),
        Some(Misfit::OtherMachine) => "it runs in place, and no worker of this machine is connected".into(),
        Some(Misfit::Label(key, value)) => {
            format!("no connected worker carries all its labels; missing is {key}: {value}")
        }
        Some(Misfit::Kind(kind)) => format!("no connected device is of kind {}", kind.name()),
        Some(Misfit::Profile(profile)) => match profile {
            MemoryProfile::CpuOnly => "it asks for the profile cpu_only, and no connected device is a CPU".into(),
            other => format!(
                "it asks for the profile {}, and no connected device is a GPU",
                other.name()
            ),
        },
        Some(Misfit::Needs { most, needed, profile }) => format!(
            "it needs about {} with the profile {}; the most that a connected device has is {}. \
             If you know better, set `cluster.memory_budget`",
            gib(*needed),
            profile.name(),
            gib(*most)
        ),
        Some(Misfit::Asks { most, wanted }) => format!(
            "it asks for {} of device memory; the most that fits otherwise has {}",
            gib(*wanted),
            gib(*most)
        ),
        Some(Misfit::NoBudget) => "no connected device has memory to offer".into(),
    }
}

/// Why one device is not for the job.
pub(super) fn not_this_device(misfit: &Misfit) -> String {
    match misfit {
        Misfit::NoBudget => "offers no memory".into(),
        Misfit::OtherMachine => "is another machine, and the job runs in place".into(),
        Misfit::Label(key, value) => format!("its worker lacks the label {key}: {value}"),
        Misfit::Kind(kind) => format!("the job asks for {}", kind.name()),
        Misfit::Profile(profile) => format!("the profile {} is not for it", profile.name()),
        Misfit::Needs { most, needed, profile } => format!(
            "too small: even {} needs about {}, and it has {}",
            profile.name(),
            gib(*needed),
            gib(*most)
        ),
        Misfit::Asks { most, wanted } => format!(
            "too small: the job asks for {}, and it has {}",
            gib(*wanted),
            gib(*most)
        ),
    }
}

/// Bytes as people read them, with one decimal.
pub fn gib(bytes: u64) -> String {
    let tenths = u128::from(bytes) * 10 / (1 << 30);
    format!("{}.{} GiB", tenths / 10, tenths % 10)
}

/// A length of time as people say it: its two largest units.
pub(super) fn span(time: Duration) -> String {
    let seconds = time.as_millis().div_ceil(1000);
    let units = [(86_400, "d"), (3600, "h"), (60, "min"), (1, "s")];
    let Some(first) = units.iter().position(|(size, _)| seconds >= *size) else {
        return "0 s".into();
    };
    let (size, unit) = units[first];
    let whole = format!("{} {unit}", seconds / size);
    match units.get(first + 1) {
        // Seconds beside minutes, minutes beside hours; after days hours are enough.
        Some((next, unit)) if seconds % size / next > 0 => format!("{whole} {} {unit}", seconds % size / next),
        _ => whole,
    }
}
