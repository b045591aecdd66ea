//! The predicted bytes of live tensors in each phase of a process, for tests that compare them with the engine.

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

fn phases(
    process: &Value,
    counts: Option<ParameterCounts>,
    batches: &[ImageBatch],
    profile: MemoryProfile,
    form: Form,
) -> Option<PhaseBytes> {
    let (kind, body) = process.get("kind")?.as_object()?.iter().next()?;
    let task = match kind.as_str() {
        "train" => WorkKind::Training,
        _ => WorkKind::Generation,
    };
    let family = families::of(FamilySpeed::of(text(body, "/model/arch")?)?.name)?;
    let job = Job::new(task, body, family, counts, batches);
    let backend = match form {
        Form::Cpu => Backend::CPU,
        form => job.backend(form),
    };
    Some(job.phases(profile, backend))
}
