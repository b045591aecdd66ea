//! Predicts the memory and the work of a training of a code model (`lm_trainer`).

use super::json::number;
use super::need::MemoryNeed;
use super::parameter_counts::ParameterCounts;
use super::shapes::LanguageShapes;
use super::training_fit::AutoKeys;
use super::training_memory::TrainingMemory;
use serde_json::Value;

/// The family under which measured speeds of language models are stored.
pub(super) const FAMILY: &str = "language_model";
/// Floating-point operations of a pass of a family without published passes.
const FLOPS_PER_PASS: f64 = 6.5e12;
/// Steps that are assumed where the config has epochs.
const ASSUMED_STEPS: f64 = 1000.0;

/// What is known of a process of type `lm_trainer`.
pub(super) struct Estimate {
    /// The amount of work in passes.
    pub(super) passes: f64,
    /// The peak memory. `None`: the model is not known.
    pub(super) memory: Option<MemoryNeed>,
}

/// Estimates the needs of a process of type `lm_trainer`. What its config leaves to the machine (`auto`) is counted with its smallest value, so that
/// the job may be placed wherever it can run.
pub(super) fn estimate(body: &Value, counts: Option<ParameterCounts>) -> Estimate {
    let counts = counts.filter(|counts| counts.denoiser > 0);
    let known = counts.map(|counts| ParameterCounts {
        decoder: Some(
            counts
                .decoder
                .unwrap_or_else(|| LanguageShapes::of_parameters(counts.denoiser)),
        ),
        ..counts
    });
    let positions = known
        .and_then(|counts| counts.decoder)
        .map_or(0, |shapes| shapes.positions);
    let smallest = AutoKeys::of(body).smallest(positions);
    let steps = number(body, "/train/steps").unwrap_or(ASSUMED_STEPS).max(1.0);
    let parameters = counts.map_or(1e9, |counts| counts.denoiser as f64);
    let rows = number(body, "/train/batch_size").unwrap_or(1.0).clamp(1.0, 1e6);
    let accumulation = number(body, "/train/gradient_accumulation").unwrap_or(1.0).max(1.0);
    let tokens = accumulation * rows * f64::from(smallest.context);
    let is_full = body.get("network").is_none_or(Value::is_null);
    Estimate {
        passes: steps * flops_per_token(is_full, smallest.checkpointed) * parameters * tokens / FLOPS_PER_PASS,
        memory: known
            .and_then(|counts| TrainingMemory::new(body, counts))
            .map(|memory| memory.memory_need(smallest)),
    }
}

/// Floating-point operations for each parameter and token: two in the forward pass, as many for the gradients of the activations, and of the
/// weights if these are trained; and the forward pass again.
fn flops_per_token(is_full: bool, checkpointed: bool) -> f64 {
    4.0 + if is_full { 2.0 } else { 0.0 } + if checkpointed { 2.0 } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::estimate;
    use crate::capability::DeviceKind;
    use crate::plan::parameter_counts::{CompactWeights, ParameterCounts};
    use crate::plan::profile::MemoryProfile;
    use serde_json::{Value, json};

    fn counts(parameters: u64) -> ParameterCounts {
        ParameterCounts {
            denoiser: parameters,
            denoiser_stored: CompactWeights {
                halves: parameters / 20 * 19,
                ..CompactWeights::default()
            },
            ..ParameterCounts::default()
        }
    }

    fn gib(body: &Value, profile: MemoryProfile, kind: DeviceKind) -> f64 {
        let need = estimate(body, Some(counts(3_030_371_328))).memory.unwrap();
        need.under(profile, kind) as f64 / f64::from(1 << 30)
    }

    #[test]
    fn needs_grow_with_what_is_trained_and_shrink_with_the_profile() {
        let lora = json!({"network": {"linear": 16}, "context": 1024, "model": {"dtype": "bfloat16"}});
        let full = json!({"context": 1024, "model": {"dtype": "bfloat16"}});
        let cuda = |body: &Value| gib(body, MemoryProfile::FullGpu, DeviceKind::Cuda);
        // 5.6 GiB of weights; Adam keeps 8 bytes for each.
        assert!((6.0..12.0).contains(&cuda(&lora)), "{}", cuda(&lora));
        assert!((33.0..50.0).contains(&cuda(&full)), "{}", cuda(&full));
        let small = gib(&lora, MemoryProfile::Extreme, DeviceKind::Cpu);
        assert!(
            small < 5.0 && small < gib(&lora, MemoryProfile::CpuOnly, DeviceKind::Cpu),
            "{small}"
        );
        let longer = json!({"network": {"linear": 16}, "context": 8192, "model": {"dtype": "bfloat16"}});
        assert!(cuda(&longer) > cuda(&lora) + 1.0);
        let kept = json!({"network": {"linear": 16}, "context": 8192, "model": {"dtype": "bfloat16"}, "train":
            {"gradient_checkpointing": false}});
        assert!(cuda(&kept) > cuda(&longer) + 5.0);
        let quantised =
            json!({"network": {"linear": 16}, "model": {"dtype": "bfloat16", "quantize": true, "qtype": "nf4"}});
        assert!(cuda(&quantised) < cuda(&lora) - 2.0);
    }

    #[test]
    fn without_the_model_the_memory_is_unknown_and_odd_numbers_are_bounded() {
        let body = json!({"train": {"steps": 1e300, "batch_size": 1e300}, "context": 1e300});
        assert_eq!(estimate(&body, None).memory, None);
        assert!(estimate(&body, Some(counts(u64::MAX))).memory.is_some());
        let steps = |steps: u64| estimate(&json!({"train": {"steps": steps}}), Some(counts(1 << 30))).passes;
        assert!((steps(200) / steps(100) - 2.0).abs() < 0.01);
    }
}
