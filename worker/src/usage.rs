//! What an attempt's process really takes of memory, phase by phase, and how that compares with what was predicted.

use aitk_common::attempt::{AttemptSpec, ChildEvent};
use aitk_common::capability::{DeviceKind, DeviceRef};
use aitk_common::plan::demand::Demand;
use aitk_common::plan::need::MemoryNeed;
use aitk_common::plan::parameter_counts::ParameterCounts;
use aitk_common::plan::profile::MemoryProfile;
use aitk_engine::device::take_peak;
use aitk_engine::device::threads::stack_space;
use aitk_engine::processes::at_home;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::collections::BTreeMap;
use std::path::PathBuf;

const GIB: f64 = 1_073_741_824.0;

/// From here on the peak counts anew, where the system can do that.
pub(crate) fn forget_peak() {
    #[cfg(target_os = "linux")]
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// The most memory that this process held at once; 0 where the system does not tell.
pub(crate) fn peak() -> u64 {
    #[cfg(target_os = "linux")]
    {
        of_status("VmHWM:")
    }
    #[cfg(not(target_os = "linux"))]
    {
        use nix::sys::resource::{UsageWho, getrusage};
        // Macs count bytes here; elsewhere it is KiB.
        let most = getrusage(UsageWho::RUSAGE_SELF).map_or(0, |usage| usage.max_rss());
        u64::try_from(most).unwrap_or(0)
    }
}

/// Bytes of a line of `/proc/self/status`; 0 where there is none.
fn of_status(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

/// The peak of each phase of an attempt so far.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    device: Option<DeviceRef>,
    phase: Option<String>,
    /// In the order in which they first came.
    phases: Vec<Phase>,
    step: u64,
}

#[derive(Debug, PartialEq)]
struct Phase {
    name: String,
    /// Bytes of main memory.
    host: u64,
    /// Bytes of a GPU's memory, where its driver tells.
    device: Option<u64>,
}

impl Usage {
    /// What is held on this device counts too.
    pub(crate) fn watch(&mut self, device: DeviceRef) {
        self.device = Some(device);
    }

    /// Looks at what the attempt says.
    pub(crate) fn see(&mut self, event: &ChildEvent) {
        match event {
            ChildEvent::Phase { name } => {
                self.leave();
                self.phase = Some(name.clone());
            }
            ChildEvent::Progress { done, .. } => self.step = *done,
            _ => {}
        }
    }

    fn leave(&mut self) {
        let Some(name) = self.phase.take() else { return };
        let host = peak();
        forget_peak();
        let device = self.device.and_then(take_peak);
        self.add(Phase { name, host, device });
    }

    fn add(&mut self, phase: Phase) {
        match self.phases.iter_mut().find(|known| known.name == phase.name) {
            Some(known) => {
                known.host = known.host.max(phase.host);
                known.device = known.device.max(phase.device);
            }
            None => self.phases.push(phase),
        }
    }

    /// Lines for the log and numbers for the metrics: the peak, of which phase, and what was predicted.
    pub(crate) fn report(mut self, spec: &AttemptSpec) -> Vec<ChildEvent> {
        self.leave();
        let on_cpu = spec.device.kind == DeviceKind::Cpu;
        let predicted = needed(spec).map(|need| need.under(spec.profile, on_cpu));
        let host: Vec<_> = self.phases.iter().map(|phase| (&*phase.name, phase.host)).collect();
        let device = self
            .phases
            .iter()
            .filter_map(|phase| Some((&*phase.name, phase.device?)));
        let device: Vec<_> = device.collect();
        let mut values = BTreeMap::new();
        let mut lines = Vec::new();
        // What is predicted for a GPU is predicted of its own memory.
        for (place, key, phases, predicted) in [
            ("host", "memory/peak_gib", host, predicted.filter(|_| on_cpu)),
            ("device", "memory/device_peak_gib", device, predicted),
        ] {
            let most = phases.iter().map(|(_, bytes)| *bytes).max().filter(|most| *most > 0);
            let Some(most) = most else { continue };
            values.insert(key.to_owned(), gib(most));
            let mut words = format!("{place} memory: at most {:.2} GiB", gib(most));
            if let Some(predicted) = predicted {
                values.insert("memory/predicted_gib".into(), gib(predicted));
                let profile = spec.profile.name();
                words.push_str(&format!(", {:.2} GiB predicted under {profile}", gib(predicted)));
            }
            let phases: Vec<_> = phases
                .iter()
                .map(|(name, bytes)| format!("{name} {:.2}", gib(*bytes)))
                .collect();
            words.push_str(&format!(" ({})", phases.join(", ")));
            lines.push(ChildEvent::Log {
                level: "info".into(),
                message: words,
            });
        }
        if !values.is_empty() {
            lines.push(ChildEvent::Metrics {
                step: self.step,
                values,
            });
        }
        lines
    }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / GIB
}

/// What the plan says that this attempt takes.
fn needed(spec: &AttemptSpec) -> Option<MemoryNeed> {
    let model = model(spec)?;
    Demand::of_job(&spec.job, ParameterCounts::read(&model))?.memory
}

/// Where the model of the job's first process lies here, as the engine finds it.
fn model(spec: &AttemptSpec) -> Option<PathBuf> {
    let named = spec.job.pointer("/process/0/kind")?.as_object()?.values().next()?;
    let model = named.pointer("/model/name_or_path")?.as_str()?;
    let here = spec.inputs.get(model).cloned();
    // Only a job that runs in place looks anywhere else.
    here.or_else(|| spec.output_root.is_none().then(|| at_home(model)))
}

/// `cluster.memory_budget`, in bytes.
fn budget(spec: &AttemptSpec) -> Option<u64> {
    spec.job.pointer("/cluster/memory_budget")?.as_u64()
}

/// Memory that the stacks of the compute threads and what is mapped of files later may take, beyond what is counted.
const SLACK: u64 = 16 << 20;

/// Holds this process to the budget that its job names, or to what its worker lets it have, where it computes on the CPU: the
/// kernel refuses what it asks for beyond. Says what could not be done. Must be called when the compute threads are there.
///
/// The budget is of all that the process holds at its peak, the program itself as well. The kernel limits address space of
/// data, so what is held of files (the program) comes off the budget, and the stacks of the threads, which are large and
/// hardly used, are let off.
pub(crate) fn keep_to_budget(spec: &AttemptSpec) -> Option<String> {
    let on_cpu = spec.device.kind == DeviceKind::Cpu;
    let (budget, most) = (budget(spec).filter(|_| on_cpu), spec.memory_limit.filter(|_| on_cpu));
    let bytes = budget.into_iter().chain(most).min()?;
    // Macs do not heed this limit.
    if !cfg!(target_os = "linux") {
        budget?;
        return Some("`cluster.memory_budget` chooses the memory profile; this system does not enforce it".into());
    }
    let (_, most) = getrlimit(Resource::RLIMIT_DATA).unwrap_or((0, u64::MAX));
    let files = of_status("RssFile:").saturating_add(of_status("RssShmem:"));
    let bytes = bytes.saturating_sub(files.saturating_add(SLACK));
    let bytes = bytes.saturating_add(stack_space()).min(most);
    let error = setrlimit(Resource::RLIMIT_DATA, bytes, bytes).err()?;
    let what = budget.map_or("the limit of the worker", |_| "`cluster.memory_budget`");
    Some(format!("{what} cannot be enforced: {error}"))
}

/// For an attempt that ran out of memory: the numbers, and what to try next.
pub(crate) fn advice(spec: &AttemptSpec, total: u64) -> String {
    let on_cpu = spec.device.kind == DeviceKind::Cpu;
    let gib = |bytes: u64| format!("{:.2} GiB", bytes as f64 / GIB);
    let need = needed(spec);
    let under = |profile: MemoryProfile| {
        let bytes = need.map(|need| need.under(profile, on_cpu));
        bytes.map_or_else(String::new, |bytes| format!(", predicted to need {}", gib(bytes)))
    };
    let allowed = match budget(spec) {
        Some(bytes) => format!("{} is allowed (`cluster.memory_budget`)", gib(bytes)),
        None if on_cpu => format!("this machine, or the group that the worker runs in, has {}", gib(total)),
        None => "the device has no more".to_owned(),
    };
    let next = match spec.profile.smaller() {
        Some(next) => format!(
            "next to try is `cluster.memory_profile: {}`{}",
            next.name(),
            under(next)
        ),
        None => "there is no smaller profile: use a smaller resolution or batch, or quantise the model".to_owned(),
    };
    let name = spec.profile.name();
    format!(
        "it ran under the memory profile {name}{}, and {allowed}; {next}",
        under(spec.profile)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[cfg(target_os = "linux")]
    #[test]
    fn the_peak_is_at_least_what_is_held() {
        forget_peak();
        let held = vec![1u8; 64 << 20];
        assert!(peak() >= held.len() as u64 && held.iter().all(|byte| *byte == 1));
    }

    #[test]
    fn the_model_is_looked_for_where_the_engine_finds_it() {
        let home = std::env::var_os("HOME").expect("tests run for a user");
        let staged = BTreeMap::from([("~/sd15".to_owned(), PathBuf::from("/cache/1"))]);
        let found = |path: &str, inputs: &BTreeMap<String, PathBuf>, root: Option<&str>| {
            let spec = json!({
                "job_id": "j", "attempt_id": "j-0-1", "epoch": 1, "config_text": "", "config_format": "yaml", "inputs": inputs,
                "job": {"process": [{"kind": {"train": {"model": {"name_or_path": path}}}}]}, "output_root": root,
                "resume_from": null, "device": {"kind": "cpu", "index": 0}, "profile": "cpu_only", "seed": 0
            });
            model(&serde_json::from_value(spec).unwrap())
        };
        let none = BTreeMap::new();
        assert_eq!(found("~/sd15", &staged, None), Some(PathBuf::from("/cache/1")));
        assert_eq!(found("~/sd15", &none, None), Some(PathBuf::from(home).join("sd15")));
        assert_eq!(found("models/sd15", &staged, None), Some(PathBuf::from("models/sd15")));
        assert_eq!(found("~/sd15", &staged, Some("/out")), Some(PathBuf::from("/cache/1")));
        assert_eq!(found("models/sd15", &staged, Some("/out")), None);
    }

    #[test]
    fn a_phase_that_comes_again_keeps_its_most() {
        let phase = |name: &str, host, device| Phase {
            name: name.to_owned(),
            host,
            device,
        };
        let mut usage = Usage::default();
        for seen in [
            phase("train", 5, None),
            phase("sample", 7, Some(4)),
            phase("train", 3, Some(9)),
        ] {
            usage.add(seen);
        }
        assert_eq!(usage.phases, [phase("train", 5, Some(9)), phase("sample", 7, Some(4))]);
    }
}
