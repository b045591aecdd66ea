//! The published configs of the families that the planner walks, one file a family.

mod parts;
mod sd1;
mod sd2;
mod sdxl;

pub(super) use parts::UNetFamily;

/// The family of this name; `None` for those that have published figures only (`family.rs`).
pub(super) fn of(name: &str) -> Option<&'static UNetFamily> {
    match name {
        "sd1" => Some(&sd1::SD1),
        "sd2" => Some(&sd2::SD2),
        "sdxl" => Some(&sdxl::SDXL),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_shapes_are_within_the_limits() {
        for name in ["sd1", "sd2", "sdxl"] {
            let family = of(name).unwrap();
            assert_eq!(family.shapes.checked(), Some(family.shapes), "{name}");
            assert_eq!(family.shapes.text_encoders().count(), family.text_prefixes.len());
        }
    }
}
