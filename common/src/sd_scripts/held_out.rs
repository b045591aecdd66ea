//! Images that are held out of the training and validated: `validation_split`, `validation_seed`, `validate_every_n_steps`,
//! `validate_every_n_epochs` and `max_validation_steps`, as `split_train_val` of sd-scripts divides a folder.

use super::python_random::PythonRandom;
use super::report::{Import, Section};
use crate::fsutil::regular;
use crate::job::limits::{MAX_CAPTION_BYTES, MAX_VALIDATION_ITEMS};
use crate::job::naming;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// The timesteps of a model, and how many of them sd-scripts validates at: evenly between `min_timestep` and `max_timestep`.
const TIMESTEPS: i64 = 1000;
const VALIDATED: i64 = 4;

/// A folder's images, divided.
#[derive(Debug, PartialEq)]
pub(super) struct Split {
    /// Those that are not trained.
    pub excluded: Vec<PathBuf>,
    /// Those that are validated: where `share` times the images is not a whole number, one of them may be trained, too.
    pub validated: Vec<PathBuf>,
}

/// Divides images that are sorted by their paths.
pub(super) fn split(mut images: Vec<PathBuf>, share: f64, seed: i64) -> Split {
    let count = images.len() as f64;
    PythonRandom::new(seed).shuffle(&mut images);
    let trained = (count * (1.0 - share)).ceil() as usize;
    let validated = images.len() - ((count * share).round_ties_even() as usize).min(images.len());
    Split {
        excluded: images.iter().skip(trained).cloned().collect(),
        validated: images.into_iter().skip(validated).collect(),
    }
}

/// What the captions of a folder's images are.
pub(super) struct Captions<'a> {
    pub extension: &'a str,
    pub default: &'a str,
    pub prefix: Option<&'a str>,
    pub suffix: Option<&'a str>,
}

impl Captions<'_> {
    /// The caption file of an image: its name with the extension in place of its own. `None`: the extension is refused as that of the data set.
    fn file(&self, image: &Path) -> Option<PathBuf> {
        let mut name = image.file_stem()?.to_os_string();
        let dot = if self.extension.starts_with('.') { "" } else { "." };
        let suffix = format!("{dot}{}", self.extension);
        naming::check_suffix(&suffix).ok()?;
        name.push(suffix);
        Some(image.with_file_name(name))
    }

    fn of(&self, image: &Path) -> String {
        let text = self
            .file(image)
            .and_then(|file| regular::read_text(&file, MAX_CAPTION_BYTES).ok());
        let first = text
            .as_deref()
            .map(|text| text.trim_start_matches('\u{feff}').lines().next().unwrap_or("").trim());
        let parts = [self.prefix, Some(first.unwrap_or(self.default)), self.suffix];
        let parts: Vec<&str> = parts.into_iter().flatten().collect();
        parts.join(" ")
    }
}

/// The validated images of all data sets.
#[derive(Default)]
pub(super) struct HeldOut {
    items: Vec<Value>,
    /// The side of the square of the first data set with such images.
    resolution: u32,
    batch_size: u64,
    /// A data set has another resolution.
    differs: bool,
}

impl HeldOut {
    /// Adds images of a folder: `folder` is its path in the config.
    pub(super) fn add(&mut self, folder: &str, images: &[PathBuf], captions: &Captions<'_>, size: (u32, u64)) {
        let (resolution, batch_size) = size;
        if self.items.is_empty() {
            (self.resolution, self.batch_size) = (resolution, batch_size);
        }
        self.differs |= self.resolution != resolution && !images.is_empty();
        for image in images {
            let name = image.file_name().unwrap_or_default();
            let path = Path::new(folder).join(name);
            self.items
                .push(json!({"image_path": path.to_string_lossy(), "prompt": captions.of(image)}));
        }
    }

    /// An option for which the steps of an epoch have to be known.
    pub(super) fn needs_epoch(&self, import: &Import<'_>) -> Option<&'static str> {
        let by_epochs = !self.items.is_empty() && !import.settings.is_set("validate_every_n_steps");
        let option = match import.settings.is_set("validate_every_n_epochs") {
            true => "validate_every_n_epochs",
            false => "validation_split",
        };
        by_epochs.then_some(option)
    }

    /// `train.validation_config`. `epoch`: steps of an epoch.
    pub(super) fn section(mut self, import: &mut Import<'_>, epoch: Option<u64>) -> Option<Section> {
        let steps = import.whole_from("validate_every_n_steps", 1, 0);
        let epochs = import.whole_from("validate_every_n_epochs", 1, 1);
        let batches = import.whole_from("max_validation_steps", 0, u64::MAX);
        let max = batches.saturating_mul(self.batch_size.max(1));
        self.items.truncate(usize::try_from(max).unwrap_or(usize::MAX));
        if self.items.is_empty() {
            return None;
        }
        if self.items.len() > MAX_VALIDATION_ITEMS {
            let message = format!(
                "aitk measures the loss on the first {MAX_VALIDATION_ITEMS} of the {} images that are held out",
                self.items.len()
            );
            import.note("validation_split", message);
            self.items.truncate(MAX_VALIDATION_ITEMS);
        }
        if self.differs {
            let message = format!(
                "data sets have several resolutions, and aitk validates all images at that of the first, {}",
                self.resolution
            );
            import.note("validation_split", message);
        }
        let every = match steps {
            0 => epochs.saturating_mul(epoch.unwrap_or(1)),
            steps => steps,
        };
        let mut section = Section::new();
        section.insert("validation_items".into(), self.items.into());
        section.insert("resolution".into(), json!(self.resolution));
        section.insert("validate_every_n_steps".into(), json!(every));
        section.insert("validation_sigmas".into(), json!(levels(import)));
        Some(section)
    }
}

/// The noise levels at which sd-scripts validates (`validation_timesteps` of train_network.py).
fn levels(import: &Import<'_>) -> Vec<f64> {
    // The timesteps of transformers are drawn without these options.
    let side = |option: &str, default: i64| {
        let given = import.settings.whole(option).filter(|_| !import.script.is_flow());
        given.filter(|timestep| *timestep > 0).unwrap_or(default)
    };
    let (min, end) = (side("min_timestep", 0), side("max_timestep", TIMESTEPS));
    let range = end.saturating_sub(min);
    let timestep = |place: i64| min.saturating_add(range.saturating_mul(place).div_euclid(VALIDATED + 1));
    let level = |place: i64| timestep(place) as f64 / TIMESTEPS as f64;
    (1..=VALIDATED).map(level).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_divided_as_in_sd_scripts() {
        let images: Vec<PathBuf> = (0..10).map(|number| PathBuf::from(format!("{number}.png"))).collect();
        let names = |paths: &[PathBuf]| {
            let names: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
            names.join(" ")
        };
        // The order after `random.seed(42)`: 7 3 2 8 5 6 9 4 0 1.
        for (share, excluded, validated) in [
            (0.2, "0.png 1.png", "0.png 1.png"),
            (0.25, "0.png 1.png", "0.png 1.png"),
            (0.35, "4.png 0.png 1.png", "9.png 4.png 0.png 1.png"),
            (0.0, "", ""),
        ] {
            let found = split(images.clone(), share, 42);
            assert_eq!(
                (names(&found.excluded), names(&found.validated)),
                (excluded.into(), validated.into()),
                "{share}"
            );
        }
        assert_eq!(split(images.clone(), 1.0, 42).excluded.len(), 10);
        assert_eq!(split(Vec::new(), 0.5, 0).excluded.len(), 0);
    }

    #[test]
    fn the_caption_file_has_the_image_s_name_with_another_extension() {
        let file = |image: &str, extension| {
            let captions = Captions {
                extension,
                default: "",
                prefix: None,
                suffix: None,
            };
            captions.file(Path::new(image))
        };
        let named = |name: &str| Some(PathBuf::from(name));
        assert_eq!(file("cats/a.b.png", ".txt"), named("cats/a.b.txt"));
        assert_eq!(file("cats/a.png", "txt"), named("cats/a.txt"));
        assert_eq!(file("cats/a.png", "..txt"), named("cats/a..txt"));
        for extension in ["a/b", "/b", "../b"] {
            assert_eq!(file("cats/a.png", extension), None, "{extension}");
        }
    }
}
