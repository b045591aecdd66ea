//! The largest images that a model can make or be trained on.

use super::model::Model;

/// The largest images for which a model has positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeLimit {
    /// Width and height in pixels.
    max: (usize, usize),
    /// Pipelines round sides down to a multiple of this many pixels.
    multiple: usize,
}

impl SizeLimit {
    /// The limit of a model. `None`: it has none. The model needs no weights.
    #[must_use]
    pub fn of(model: &dyn Model) -> Option<Self> {
        Some(Self {
            max: model.max_size()?,
            multiple: model.size_multiple().max(1),
        })
    }

    /// Checks that the model has positions for images of this width and height in pixels.
    ///
    /// # Errors
    /// When it does not have them: the reason, to which the caller adds where the size comes from.
    pub fn check(&self, width: u32, height: u32) -> Result<(), String> {
        let side = |side: u32| side as usize / self.multiple * self.multiple;
        match side(width) > self.max.0 || side(height) > self.max.1 {
            true => Err(format!(
                "an image of {width} x {height} pixels is too large: the model has positions for at most {} x {} pixels; choose a smaller size",
                self.max.0, self.max.1
            )),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::size_limit;
    use crate::testing::fixtures;
    use aitk_common::job::arch::ArchName;
    use aitk_common::model_files::PartPaths;

    /// Pixels of a token of the models here.
    const TOKEN: u32 = 16;

    #[test]
    fn images_beyond_the_positions_of_a_model_are_refused() {
        let parts = PartPaths {
            vae: Some(fixtures().join("tiny_flux/vae")),
            ..PartPaths::default()
        };
        // The tables have 16 and 32 positions.
        for (arch, folder, largest) in [
            (ArchName::Sd3, "tiny_sd35", 16 * TOKEN),
            (ArchName::Zimage, "tiny_zimage", 32 * TOKEN),
        ] {
            let limit = size_limit(&fixtures().join(folder), arch, &parts).unwrap().unwrap();
            assert_eq!(limit.check(largest, largest), Ok(()), "{folder}");
            // The pipeline rounds down to whole tokens.
            assert_eq!(limit.check(largest + TOKEN - 1, TOKEN), Ok(()), "{folder}");
            for (width, height) in [(largest + TOKEN, TOKEN), (TOKEN, largest + TOKEN)] {
                let problem = limit.check(width, height).unwrap_err();
                assert!(
                    problem.contains(&format!("at most {largest} x {largest} pixels")),
                    "{problem}"
                );
            }
        }
        let limit = size_limit(&fixtures().join("tiny_sd"), ArchName::Sd1, &PartPaths::default());
        assert_eq!(limit.unwrap(), None);
    }
}
