//! The speed of each model family before anything is measured.

/// The speed of a model family.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FamilySpeed {
    /// The name as in `model.arch`.
    pub name: &'static str,
    /// Seconds per unit of work on an average CUDA GPU. A unit is one denoiser pass of one 512 x 512 image.
    pub seconds_per_unit: f64,
}

/// The known families. Speeds are roughly those published for an RTX 3090.
const FAMILIES: [FamilySpeed; 7] = [
    speed("sd1", 0.05),
    speed("sd2", 0.05),
    speed("sdxl", 0.1),
    speed("sd3", 0.2),
    speed("flux", 0.3),
    speed("zimage", 0.2),
    speed("qwen_image", 0.5),
];

/// Seconds per unit of work for unknown families.
pub const UNKNOWN_SECONDS_PER_UNIT: f64 = 0.2;

const fn speed(name: &'static str, seconds_per_unit: f64) -> FamilySpeed {
    FamilySpeed { name, seconds_per_unit }
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arch_names_map_to_families() {
        assert_eq!(FamilySpeed::of("flex1").unwrap().name, "flux");
        assert_eq!(FamilySpeed::of("sdxl:v-pred").unwrap().name, "sdxl");
        assert_eq!(FamilySpeed::of("wan21"), None);
    }
}
