//! What tests of predictions share: jobs, and what is predicted for them.

use super::*;
use crate::capability::DeviceKind;
use crate::plan::profile::MemoryProfile;
use serde_json::json;

pub(super) const GIB: f64 = 1_073_741_824.0;

/// The training of a LoRA, with images of 512 pixels and of `side`.
pub(super) fn lora(arch: &str, side: u32, dtype: &str, rank: u32) -> Value {
    json!({"job": "extension", "name": "a", "process": [{"type": "sd_trainer", "kind": {"train": {
        "model": {"arch": arch}, "network": {"linear": rank},
        "train": {"steps": 1000, "batch_size": 1, "dtype": dtype, "gradient_checkpointing": true, "optimizer": "adamw8bit"},
        "datasets": [{"resolution": [512, side]}]}}}]})
}

/// GiB on a GPU under each profile.
pub(super) fn gib(job: &Value) -> [f64; 4] {
    let need = Demand::of_job(job, None, &[]).unwrap().memory.unwrap();
    MemoryProfile::on(false).map(|profile| need.under(profile, DeviceKind::Cuda) as f64 / GIB)
}

/// GiB on a CPU under each profile, for generating square images with Stable Diffusion 1.5.
pub(super) fn generation_gib(model: &Value, side: u32, counts: Option<ParameterCounts>) -> [f64; 4] {
    let mut job = json!({"process": [{"kind": {"generate": {"model": {"arch": "sd1"},
        "generate": {"width": side, "height": side, "guidance_scale": 7.0, "prompts": ["a"]}}}}]});
    let keys = job.pointer_mut("/process/0/kind/generate/model").unwrap();
    keys.as_object_mut().unwrap().extend(model.as_object().unwrap().clone());
    let need = Demand::of_job(&job, counts, &[]).unwrap().memory.unwrap();
    MemoryProfile::on(true).map(|profile| need.under(profile, DeviceKind::Cpu) as f64 / GIB)
}
