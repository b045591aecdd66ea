//! Measures the memory of an attempt's process, phase by phase, compares it with the prediction, and limits it.

use aitk_common::attempt::{AttemptSpec, ChildEvent};
use aitk_common::capability::{DeviceKind, DeviceRef};
use aitk_common::job::JobSpec;
use aitk_common::plan::demand::Demand;
use aitk_common::plan::device_factors::CUDA_CONTEXT;
use aitk_common::plan::image_batches::ImageBatch;
use aitk_common::plan::need::MemoryNeed;
use aitk_common::plan::parameter_counts::ParameterCounts;
use aitk_common::plan::profile::MemoryProfile;
use aitk_common::plan::prompt_files::{largest_images_in_files, longest_line, with_longest_prompt};
use aitk_common::plan::training_memory::new_model_counts;
use aitk_engine::device::threads::stack_space;
use aitk_engine::device::{DevicePeak, end_phase};
use aitk_processes::{expand_home, image_batches};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

const GIB: f64 = 1_073_741_824.0;
/// The metric with the predicted memory.
const PREDICTED: &str = "memory/predicted_gib";

/// Resets the peak memory of this process, if the system supports it.
pub(crate) fn reset_peak_memory() {
    #[cfg(target_os = "linux")]
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// The peak memory of this process, in bytes; 0 if the system does not report it.
pub(crate) fn peak_memory() -> u64 {
    #[cfg(target_os = "linux")]
    {
        proc_status_bytes("VmHWM:")
    }
    #[cfg(not(target_os = "linux"))]
    {
        use nix::sys::resource::{UsageWho, getrusage};
        // macOS counts bytes here; other systems count KiB.
        let max = getrusage(UsageWho::RUSAGE_SELF).map_or(0, |usage| usage.max_rss());
        u64::try_from(max).unwrap_or(0)
    }
}

/// The value of a line of `/proc/self/status`, in bytes; 0 if there is none.
fn proc_status_bytes(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

/// The peak memory of each phase of an attempt so far.
#[derive(Debug, Default)]
pub(crate) struct MemoryUsage {
    device: Option<DeviceRef>,
    phase: Option<String>,
    /// In the order of their first appearance.
    phases: Vec<Phase>,
    step: u64,
    /// The bytes that the attempt's process itself predicts, because it chose what they depend on.
    predicted: Option<u64>,
}

#[derive(Debug, PartialEq)]
struct Phase {
    name: String,
    /// Bytes of main memory.
    host: u64,
    /// Memory of the GPU, if the driver reports it.
    device: Option<DevicePeak>,
}

impl MemoryUsage {
    /// Counts the memory of this device, too.
    pub(crate) fn set_device(&mut self, device: DeviceRef) {
        self.device = Some(device);
    }

    /// Follows the phases and steps in the attempt's events.
    pub(crate) fn record_event(&mut self, event: &ChildEvent) {
        match event {
            ChildEvent::Phase { name } => {
                self.end_phase();
                self.phase = Some(name.clone());
            }
            ChildEvent::Progress { done, .. } => self.step = *done,
            ChildEvent::Metrics { values, .. } => {
                if let Some(gib) = values.get(PREDICTED) {
                    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
                    let bytes = (gib * GIB).clamp(0.0, 1e18) as u64;
                    self.predicted = Some(bytes);
                }
            }
            _ => {}
        }
    }

    fn end_phase(&mut self) {
        let Some(name) = self.phase.take() else { return };
        let host = peak_memory();
        reset_peak_memory();
        let device = self.device.and_then(end_phase);
        self.add_phase(Phase { name, host, device });
    }

    fn add_phase(&mut self, phase: Phase) {
        match self.phases.iter_mut().find(|known| known.name == phase.name) {
            Some(known) => {
                known.host = known.host.max(phase.host);
                known.device = match (known.device, phase.device) {
                    (Some(a), Some(b)) => Some(DevicePeak {
                        allocated: a.allocated.max(b.allocated),
                        reserved: a.reserved.max(b.reserved),
                    }),
                    (a, b) => a.or(b),
                };
            }
            None => self.phases.push(phase),
        }
    }

    /// Returns log lines and metrics: the peak per phase, and the prediction.
    pub(crate) fn report(mut self, spec: &AttemptSpec) -> Vec<ChildEvent> {
        self.end_phase();
        let on_cpu = spec.device.kind == DeviceKind::Cpu;
        let predicted = self.predicted.or_else(|| {
            let need = predicted_need(spec, &image_batches(spec))?;
            Some(need.under(spec.profile, spec.device.kind))
        });
        let host: Vec<_> = self.phases.iter().map(|phase| (&*phase.name, phase.host)).collect();
        let device = self
            .phases
            .iter()
            .filter_map(|phase| Some((&*phase.name, phase.device?.allocated)));
        let device: Vec<_> = device.collect();
        let reserved = self
            .phases
            .iter()
            .filter_map(|phase| Some(phase.device?.reserved))
            .max();
        let mut values = BTreeMap::new();
        let mut lines = Vec::new();
        // The prediction for a GPU is about the GPU's memory.
        for (memory_kind, key, phases, predicted) in [
            ("host", "memory/peak_gib", host, predicted.filter(|_| on_cpu)),
            ("device", "memory/device_peak_gib", device, predicted),
        ] {
            let max = phases.iter().map(|(_, bytes)| *bytes).max().filter(|max| *max > 0);
            let Some(max) = max else { continue };
            values.insert(key.to_owned(), gib(max));
            let mut message = format!("{memory_kind} memory: at most {:.3} GiB", gib(max));
            if let Some(predicted) = predicted {
                values.insert(PREDICTED.into(), gib(predicted));
                let profile = spec.profile.name();
                message.push_str(&format!(", {:.3} GiB predicted under {profile}", gib(predicted)));
            }
            let phases: Vec<_> = phases
                .iter()
                .map(|(name, bytes)| format!("{name} {:.3}", gib(*bytes)))
                .collect();
            message.push_str(&format!(" ({})", phases.join(", ")));
            if let Some(reserved) = reserved.filter(|_| memory_kind == "device") {
                let process = reserved.saturating_add(CUDA_CONTEXT);
                values.insert("memory/device_process_gib".to_owned(), gib(process));
                message.push_str(&format!(
                    ", the process {:.3} GiB: {:.3} reserved for tensors, and the driver's context",
                    gib(process),
                    gib(reserved)
                ));
            }
            lines.push(ChildEvent::Log {
                level: "info".into(),
                message,
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

/// The predicted memory of this attempt, with the prompts in its files. `batches`: the largest of its data sets, if they were seen.
fn predicted_need(spec: &AttemptSpec, batches: &[ImageBatch]) -> Option<MemoryNeed> {
    let named = first_process(spec)?;
    let model = local_path(spec, named.pointer("/model/name_or_path")?.as_str()?)?;
    let counts = match named.pointer("/model/from_config").and_then(Value::as_bool) {
        Some(true) => new_model_counts(&model),
        _ => ParameterCounts::read(&model),
    };
    let prompts = named.pointer("/generate/prompts").and_then(Value::as_str);
    let longest = prompts.and_then(|file| longest_line(&local_path(spec, file)?));
    let job = with_longest_prompt(spec.job.clone(), longest);
    let mut batches = batches.to_vec();
    if let Ok(parsed) = JobSpec::deserialize(&spec.job) {
        batches.extend(largest_images_in_files(&parsed, |file| local_path(spec, file)));
    }
    Demand::of_job(&job, counts, &batches)?.memory
}

/// The job's first process.
fn first_process(spec: &AttemptSpec) -> Option<&Value> {
    spec.job.pointer("/process/0/kind")?.as_object()?.values().next()
}

/// The path on this machine of a path in the config, as the engine resolves it.
fn local_path(spec: &AttemptSpec, path: &str) -> Option<PathBuf> {
    let staged_path = spec.inputs.get(path).cloned();
    // Only a job that runs in place may use other paths.
    staged_path.or_else(|| spec.output_root.is_none().then(|| expand_home(path)))
}

/// `cluster.memory_budget`, in bytes.
fn memory_budget(spec: &AttemptSpec) -> Option<u64> {
    spec.job.pointer("/cluster/memory_budget")?.as_u64()
}

/// Allowance for memory that is not counted: stacks of the compute threads, and files that are mapped later.
const UNCOUNTED_BYTES: u64 = 16 << 20;

/// Limits the memory of this process on the CPU to the job's budget or the worker's limit: the kernel refuses larger
/// allocations. Returns a warning if that failed. Call it after the compute threads were started.
///
/// The budget covers the peak of the whole process, including the program. The kernel limits the address space of
/// data, so memory that is backed by files (the program) is subtracted, and the stacks of the threads, which are
/// large and hardly used, are added.
pub(crate) fn limit_memory(spec: &AttemptSpec) -> Option<String> {
    let on_cpu = spec.device.kind == DeviceKind::Cpu;
    let (budget, worker_limit) = (
        memory_budget(spec).filter(|_| on_cpu),
        spec.memory_limit.filter(|_| on_cpu),
    );
    let bytes = budget.into_iter().chain(worker_limit).min()?;
    // macOS does not enforce this limit.
    if !cfg!(target_os = "linux") {
        budget?;
        return Some("`cluster.memory_budget` chooses the memory profile; this system does not enforce it".into());
    }
    let (_, hard_limit) = getrlimit(Resource::RLIMIT_DATA).unwrap_or((0, u64::MAX));
    let files = proc_status_bytes("RssFile:").saturating_add(proc_status_bytes("RssShmem:"));
    let bytes = bytes.saturating_sub(files.saturating_add(UNCOUNTED_BYTES));
    let bytes = bytes.saturating_add(stack_space()).min(hard_limit);
    let error = setrlimit(Resource::RLIMIT_DATA, bytes, bytes).err()?;
    let what = budget.map_or("the limit of the worker", |_| "`cluster.memory_budget`");
    Some(format!("{what} cannot be enforced: {error}"))
}

/// Explains an out-of-memory failure: the numbers, and what to try next.
pub(crate) fn out_of_memory_advice(spec: &AttemptSpec, total: u64) -> String {
    let on_cpu = spec.device.kind == DeviceKind::Cpu;
    let gib = |bytes: u64| format!("{:.2} GiB", bytes as f64 / GIB);
    // The worker itself does not read the images of a job; only the attempt's process does.
    let need = predicted_need(spec, &[]);
    let under = |profile: MemoryProfile| {
        let bytes = need.map(|need| need.under(profile, spec.device.kind));
        bytes.map_or_else(String::new, |bytes| format!(", predicted to need {}", gib(bytes)))
    };
    let allowed = match memory_budget(spec) {
        Some(bytes) => format!("{} is allowed (`cluster.memory_budget`)", gib(bytes)),
        None if on_cpu => format!(
            "this machine, or the control group that the worker runs in, has {}",
            gib(total)
        ),
        None => "the device has no more".to_owned(),
    };
    let next = match spec.profile.smaller() {
        Some(next) => format!(
            "next to try is `cluster.memory_profile: {}`{}",
            next.name(),
            under(next)
        ),
        None => {
            "there is no smaller profile: use a smaller resolution, context or batch, or quantise the model".to_owned()
        }
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
    use aitk_common::job::{Format, LoadOptions, parse};
    use serde_json::json;

    #[cfg(target_os = "linux")]
    #[test]
    fn the_peak_is_at_least_the_memory_in_use() {
        reset_peak_memory();
        let held = vec![1u8; 64 << 20];
        assert!(peak_memory() >= held.len() as u64 && held.iter().all(|byte| *byte == 1));
    }

    #[test]
    fn the_model_path_is_the_one_that_the_engine_resolves() {
        let home = std::env::var_os("HOME").expect("tests run for a user");
        let staged = BTreeMap::from([("~/sd15".to_owned(), PathBuf::from("/cache/1"))]);
        let found = |path: &str, inputs: &BTreeMap<String, PathBuf>, root: Option<&str>| {
            let spec = json!({
                "job_id": "j", "attempt_id": "j-0-1", "epoch": 1, "config_text": "", "config_format": "yaml", "inputs": inputs,
                "job": {"process": [{"kind": {"train": {"model": {"name_or_path": path}}}}]}, "output_root": root,
                "resume_from": null, "device": {"kind": "cpu", "index": 0}, "profile": "cpu_only", "seed": 0
            });
            let spec: AttemptSpec = serde_json::from_value(spec).unwrap();
            let model = first_process(&spec).unwrap().pointer("/model/name_or_path").unwrap();
            local_path(&spec, model.as_str().unwrap())
        };
        let none = BTreeMap::new();
        assert_eq!(found("~/sd15", &staged, None), Some(PathBuf::from("/cache/1")));
        assert_eq!(found("~/sd15", &none, None), Some(PathBuf::from(home).join("sd15")));
        assert_eq!(found("models/sd15", &staged, None), Some(PathBuf::from("models/sd15")));
        assert_eq!(found("~/sd15", &staged, Some("/out")), Some(PathBuf::from("/cache/1")));
        assert_eq!(found("models/sd15", &staged, Some("/out")), None);
    }

    #[test]
    fn the_prediction_counts_the_largest_image_of_a_file_of_prompts() {
        let folder = tempfile::tempdir().unwrap();
        let prompts = folder.path().join("prompts.txt");
        let config = "job: generate\nconfig:\n  name: a\n  process:\n    - type: to_folder\n      output_folder: out\n      model: \
                      {name_or_path: m}\n      generate: {prompts: prompts.txt, width: 512, height: 512}\n";
        let job = parse(config, Format::Yaml, None, &LoadOptions::default()).unwrap().spec;
        let spec = json!({
            "job_id": "j", "attempt_id": "j-0-1", "epoch": 1, "config_text": "", "config_format": "yaml", "job": job,
            "inputs": {"prompts.txt": prompts, "m": folder.path().join("m")}, "output_root": null, "resume_from": null,
            "device": {"kind": "cpu", "index": 0}, "profile": "cpu_only", "seed": 0
        });
        let spec: AttemptSpec = serde_json::from_value(spec).unwrap();
        let predicted = |text: &str| {
            std::fs::write(&prompts, text).unwrap();
            predicted_need(&spec, &[]).unwrap().under(spec.profile, DeviceKind::Cpu)
        };
        assert_eq!(predicted("a\nb --w 512"), predicted("a"));
        assert!(predicted("a\nb --w 2048 --h 2048") > predicted("a"));
    }

    #[test]
    fn a_repeated_phase_keeps_its_maximum() {
        let phase = |name: &str, host, device: Option<[u64; 2]>| Phase {
            name: name.to_owned(),
            host,
            device: device.map(|[allocated, reserved]| DevicePeak { allocated, reserved }),
        };
        let mut usage = MemoryUsage::default();
        for seen in [
            phase("train", 5, None),
            phase("sample", 7, Some([4, 8])),
            phase("train", 3, Some([9, 9])),
            phase("sample", 6, Some([5, 7])),
        ] {
            usage.add_phase(seen);
        }
        assert_eq!(
            usage.phases,
            [phase("train", 5, Some([9, 9])), phase("sample", 7, Some([5, 8]))]
        );
    }
}
