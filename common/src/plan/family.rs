//! The speed of each model family before anything is measured.

use crate::capability::DeviceKind;

/// What is known about the speed of a model family.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FamilySpeed {
    /// The name as in `model.arch`.
    pub name: &'static str,
    /// Billions of floating-point operations of a pass of the published denoiser over one 512 x 512 image. Work is counted in such passes.
    pub gflops_per_pass: f64,
    /// The fraction of the rate of matrix products that a step reaches on a GPU. U-Nets have many small layers, whose launches
    /// take a large part of the time.
    gpu_fraction: f64,
}

const U_NET: f64 = 0.2;
const TRANSFORMER: f64 = 0.5;
/// The fraction that a step reaches on a CPU, of any family.
const CPU_FRACTION: f64 = 0.8;

/// The known families.
const FAMILIES: [FamilySpeed; 8] = [
    family("sd1", 803.0, U_NET),
    family("sd2", 803.0, U_NET),
    family("sdxl", 1_589.0, U_NET),
    // Stable Diffusion 3.5 large.
    family("sd3", 7_980.0, TRANSFORMER),
    family("flux", 21_500.0, TRANSFORMER),
    family("chroma", 15_500.0, TRANSFORMER),
    family("zimage", 13_000.0, TRANSFORMER),
    // 20 billion parameters.
    family("qwen_image", 45_000.0, TRANSFORMER),
];

/// A family that is not known.
const UNKNOWN: FamilySpeed = family("", 6_500.0, TRANSFORMER);

const fn family(name: &'static str, gflops_per_pass: f64, gpu_fraction: f64) -> FamilySpeed {
    FamilySpeed {
        name,
        gflops_per_pass,
        gpu_fraction,
    }
}

impl FamilySpeed {
    /// The family of a `model.arch`. Text after `:` is ignored.
    #[must_use]
    pub fn of(arch: &str) -> Option<&'static Self> {
        let name = match arch.split(':').next().unwrap_or(arch) {
            "sd15" => "sd1",
            "flex1" | "flux_kontext" => "flux",
            "qwen_image_edit" => "qwen_image",
            other => other,
        };
        FAMILIES.iter().find(|family| family.name == name)
    }

    /// The family, or one of medium size if it is not known.
    #[must_use]
    pub fn or_unknown(family: Option<&'static Self>) -> &'static Self {
        family.unwrap_or(&UNKNOWN)
    }

    /// Estimates the seconds per pass on a device whose matrix products run at `gflops` billions of floating-point operations
    /// per second. 0: the rate was not measured, and that of a usual device of this kind is assumed.
    #[must_use]
    pub fn estimated_seconds_per_pass(&self, kind: DeviceKind, gflops: u64) -> f64 {
        // An RTX 3090 in bf16, a Mac with an M-series Max chip in f16, a CPU with four cores in f32.
        let (usual, fraction) = match kind {
            DeviceKind::Cuda => (65_000, self.gpu_fraction),
            DeviceKind::Metal => (16_000, self.gpu_fraction),
            DeviceKind::Cpu => (200, CPU_FRACTION),
        };
        // The rate of a device that was busy when its worker started is too low. It must not keep the device from getting a first job,
        // whose speed replaces the estimate.
        let rate = if gflops == 0 { usual } else { gflops.max(usual / 3) };
        self.gflops_per_pass / (rate as f64 * fraction)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::families;
    use crate::plan::job_memory::{Job, WorkKind};
    use serde_json::Value;

    #[test]
    fn arch_names_map_to_families() {
        assert_eq!(FamilySpeed::of("flex1").unwrap().name, "flux");
        assert_eq!(FamilySpeed::of("sdxl:v-pred").unwrap().name, "sdxl");
        assert_eq!(FamilySpeed::of("wan21"), None);
    }

    #[test]
    fn the_operations_of_a_pass_are_those_of_the_published_model() {
        for speed in &FAMILIES {
            let Some(family) = families::of(speed.name) else {
                continue;
            };
            let job = Job::new(WorkKind::Generation, &Value::Null, family, None, &[]);
            let counted = job.published_pass() / 1e9;
            let name = speed.name;
            assert!(
                (counted / speed.gflops_per_pass - 1.0).abs() < 0.03,
                "{name}: {counted}"
            );
        }
    }

    #[test]
    fn a_measured_rate_replaces_the_usual_one() {
        let sdxl = FamilySpeed::of("sdxl").unwrap();
        let seconds = |gflops| sdxl.estimated_seconds_per_pass(DeviceKind::Cpu, gflops);
        assert!((seconds(400) * 2.0 / seconds(0) - 1.0).abs() < 1e-9);
        assert!((seconds(1) / seconds(66) - 1.0).abs() < 1e-9, "a busy device");
        // Stable Diffusion XL, LoRA with gradient checkpointing at 1024 x 1024 on an RTX 3090: 1.1 to 1.4 s are published.
        let step = 6_000.0 * 3.0 / sdxl.gflops_per_pass * sdxl.estimated_seconds_per_pass(DeviceKind::Cuda, 0);
        assert!((1.1..1.5).contains(&step), "{step} s");
    }
}
