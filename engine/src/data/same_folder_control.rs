//! Control images that are other images of the data set, drawn each time (`control_from_same_folder`).

use super::training_image::{Control, TrainingImage};
use crate::rng::TorchGenerator;
use std::collections::BTreeMap;
use std::path::Path;

/// How the control images that are drawn are composited over a colour and fitted to their images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SameFolderControlOptions {
    /// The colour behind transparent images.
    pub background: [u8; 3],
    /// As [`Control::full_size`].
    pub full_size: bool,
}

impl SameFolderControlOptions {
    /// Identifies the options in a checkpoint's hash. The text must not change.
    #[must_use]
    pub fn identity(&self) -> String {
        format!(
            "control images from the same folder {:?} {}",
            self.background, self.full_size
        )
    }

    /// Draws the control image of an item: one of the data set's images (`items`) in the item's folder, each as likely as another, and
    /// itself only if it is alone there.
    #[must_use]
    pub fn draw(&self, items: &[TrainingImage], item: &TrainingImage, generator: &mut TorchGenerator) -> Control {
        // Repeats and flipped copies are the same file.
        let in_folder = items.iter().filter(|other| other.path.parent() == item.path.parent());
        let mut files: BTreeMap<&Path, &str> = in_folder.map(|other| (&*other.path, &*other.content)).collect();
        if files.len() > 1 {
            files.remove(&*item.path);
        }
        let drawn = generator.randint(0, files.len().max(1) as i64, 1)[0];
        let (path, content) = files
            .into_iter()
            .nth(drawn as usize)
            .unwrap_or((&item.path, &item.content));
        Control {
            half: None,
            path: path.to_path_buf(),
            content: content.to_owned(),
            background: Some(self.background),
            full_size: self.full_size,
        }
    }
}
