//! The predicted bytes of a process in each of its phases: those of live tensors, for tests that compare them with the engine, and
//! those of the process on a CPU (`examples/memory_parts.rs`).

use super::device_factors::{CPU, Need, Phase};
use super::families;
use super::family::FamilySpeed;
use super::image_batches::ImageBatch;
use super::job_memory::{Job, WorkKind};
use super::json::text;
use super::parameter_counts::ParameterCounts;
use super::profile::MemoryProfile;
use super::walk::{Backend, Form};
use serde_json::Value;

/// The largest number of bytes of live tensors in each phase, besides weights, adapters and optimizer state.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PhaseBytes {
    /// Encoding a prompt.
    pub text: f64,
    /// A pass of the denoiser over the largest image; 0 in a training.
    pub denoising: f64,
    /// Decoding that image; 0 in a training.
    pub decoding: f64,
    /// Encoding the largest image of the data sets; 0 in a generation.
    pub encoding: f64,
    /// The forward and the backward pass of a training step, with its gradients; 0 in a generation.
    pub step: f64,
}

/// Predicts the bytes of a process (`JobSpec.process[i]` as JSON) in portable mode. `None`: the planner does not know the
/// steps of its family.
#[must_use]
pub fn portable_phases(
    process: &Value,
    counts: Option<ParameterCounts>,
    batches: &[ImageBatch],
    profile: MemoryProfile,
) -> Option<PhaseBytes> {
    phases(process, counts, batches, profile, Form::Portable)
}

/// As [`portable_phases`], with emulated kernels for CUDA.
#[must_use]
pub fn emulated_phases(
    process: &Value,
    counts: Option<ParameterCounts>,
    batches: &[ImageBatch],
    profile: MemoryProfile,
) -> Option<PhaseBytes> {
    phases(process, counts, batches, profile, Form::EmulatedKernels)
}

/// As [`portable_phases`], with the engine's kernels for CPUs.
#[must_use]
pub fn cpu_phases(
    process: &Value,
    counts: Option<ParameterCounts>,
    batches: &[ImageBatch],
    profile: MemoryProfile,
) -> Option<PhaseBytes> {
    phases(process, counts, batches, profile, Form::Cpu)
}

/// What a job needs on a CPU under a profile, with its parts.
#[derive(Clone, Debug, PartialEq)]
pub struct CpuNeed {
    /// Predicted bytes of the process.
    pub total: f64,
    /// Bytes of weights that stay in memory.
    pub weights: f64,
    /// Bytes of weights that were quantised when they were loaded.
    pub quantised: f64,
    /// The largest number of bytes that come and go.
    pub recycled: f64,
    /// The fraction of the held bytes that is in small tensors of an adapter.
    pub small_fraction: f64,
    /// Its phases.
    pub phases: Vec<CpuPhase>,
}

/// The bytes of a phase besides the weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CpuPhase {
    /// What the job does in it.
    pub name: &'static str,
    /// Bytes that stay for the whole phase or longer.
    pub held: f64,
    /// Bytes that come and go. Weights that are not in memory in this phase are subtracted.
    pub transient: f64,
    /// Predicted bytes of the process if this phase were the only one.
    pub total: f64,
}

/// Predicts what a process (`JobSpec.process[i]` as JSON) needs on a CPU. `None`: the planner does not know the steps of its family.
#[must_use]
pub fn cpu_need(
    process: &Value,
    counts: Option<ParameterCounts>,
    batches: &[ImageBatch],
    profile: MemoryProfile,
) -> Option<CpuNeed> {
    let need = job_of(process, counts, batches)?.need(profile, Backend::CPU);
    let of_phase = |phase: &Phase| CpuPhase {
        name: phase.name,
        held: phase.held,
        transient: phase.transient,
        total: Need {
            phases: vec![*phase],
            ..need.clone()
        }
        .bytes(&CPU),
    };
    Some(CpuNeed {
        total: need.bytes(&CPU),
        weights: need.weights,
        quantised: need.quantised,
        recycled: need.recycled,
        small_fraction: need.small_fraction,
        phases: need.phases.iter().map(of_phase).collect(),
    })
}

fn job_of<'a>(process: &'a Value, counts: Option<ParameterCounts>, batches: &[ImageBatch]) -> Option<Job<'a>> {
    let (kind, body) = process.get("kind")?.as_object()?.iter().next()?;
    let task = match kind.as_str() {
        "train" => WorkKind::Training,
        _ => WorkKind::Generation,
    };
    let family = families::of(FamilySpeed::of(text(body, "/model/arch")?)?.name)?;
    Some(Job::new(task, body, family, counts, batches))
}

fn phases(
    process: &Value,
    counts: Option<ParameterCounts>,
    batches: &[ImageBatch],
    profile: MemoryProfile,
    form: Form,
) -> Option<PhaseBytes> {
    let job = job_of(process, counts, batches)?;
    let backend = match form {
        Form::Cpu => Backend::CPU,
        form => job.backend(form),
    };
    Some(job.phases(profile, backend))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn lora(changes: &[(&str, Value)]) -> Value {
        let mut process = json!({"kind": {"train": {
            "model": {"arch": "sd1", "low_vram": false},
            "network": {"type": "lora", "linear": 16},
            "train": {"optimizer": "adamw", "dtype": "float32", "gradient_checkpointing": true},
            "save": {"dtype": "float32"},
            "datasets": [{"resolution": [256], "cache_latents": true}],
        }}});
        for (pointer, value) in changes {
            *process.pointer_mut(&format!("/kind/train/{pointer}")).unwrap() = value.clone();
        }
        process
    }

    fn phase(process: &Value, name: &str) -> CpuPhase {
        let need = cpu_need(process, None, &[], MemoryProfile::CpuOnly).unwrap();
        *need.phases.iter().find(|phase| phase.name == name).unwrap()
    }

    /// A number of the adapter has 4 bytes, its two moments 8. A file of 16 bits is written from a copy in 16 bits, one of 32 from the
    /// adapter itself.
    #[test]
    fn a_lora_is_saved_without_its_file_in_memory() {
        for dtype in ["float32", "float16"] {
            let saving = phase(&lora(&[("save/dtype", json!(dtype))]), "saving");
            let numbers = saving.held / 12.0;
            // Rank 16, in every linear layer of the U-Net.
            assert!(numbers > 1e6, "{numbers}");
            match dtype {
                "float16" => assert_eq!(saving.transient, 2.0 * numbers),
                _ => assert!(saving.transient < 0.1 * numbers, "{} of {numbers}", saving.transient),
            }
        }
    }

    /// Activations that the backward pass reads take their bytes, whether freed memory is returned at once (`low_vram`) or not.
    #[test]
    fn kept_activations_take_their_bytes() {
        for low_vram in [false, true] {
            let process = lora(&[
                ("train/gradient_checkpointing", json!(false)),
                ("model/low_vram", json!(low_vram)),
            ]);
            let step = phase(&process, "step");
            // The adapter, its moments and its gradients.
            let gradients = 4.0 * step.held / 16.0;
            let live = cpu_phases(&process, None, &[], MemoryProfile::CpuOnly).unwrap();
            let difference = live.step - gradients - step.transient;
            assert!(difference.abs() < 1.0, "{low_vram}: {difference} bytes");
        }
    }

    /// Without a phase there would be no prediction: the largest one is the prediction.
    #[test]
    fn the_largest_phase_is_the_prediction() {
        let need = cpu_need(&lora(&[]), None, &[], MemoryProfile::Extreme).unwrap();
        let largest = need.phases.iter().map(|phase| phase.total).fold(0.0, f64::max);
        assert_eq!(need.total, largest);
        let unknown = json!({"kind": {"train": {"model": {"arch": "unknown"}}}});
        assert_eq!(cpu_need(&unknown, None, &[], MemoryProfile::Extreme), None);
    }
}
