//! The published configs of the families that the planner walks, one file a family.

mod chroma;
mod flux;
mod parts;
mod sd1;
mod sd2;
mod sd3;
mod sdxl;
mod zimage;

pub(super) use parts::Family;

/// The family of this name; `None`: the planner does not know its steps.
pub(super) fn of(name: &str) -> Option<&'static Family> {
    match name {
        "sd1" => Some(&sd1::SD1),
        "sd2" => Some(&sd2::SD2),
        "sdxl" => Some(&sdxl::SDXL),
        "chroma" => Some(&chroma::CHROMA),
        "flux" => Some(&flux::FLUX),
        "sd3" => Some(&sd3::SD3),
        "zimage" => Some(&zimage::ZIMAGE),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_shapes_are_within_the_limits() {
        for name in ["sd1", "sd2", "sdxl", "chroma", "flux", "sd3", "zimage"] {
            let family = of(name).unwrap();
            assert_eq!(family.shapes.checked(), Some(family.shapes), "{name}");
            assert_eq!(family.shapes.text_encoders().count(), family.text_prefixes.len());
        }
    }
}
