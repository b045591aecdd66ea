//! Control images: the file of each image, and its pixels in the size of the image.

use super::allowed_paths::AllowedPaths;
use super::augment::{SpatialChange, moved};
use super::control_files::{self, ControlsBeside};
use super::discover::suffix_rank;
use super::half::half_of;
use super::pixels::apply_plan;
use super::training_image::{Control, TrainingImage};
use crate::error::{EngineError, Result};
use crate::image_io::{self, Filter};
use candle_core::{Device, Tensor};
use std::collections::HashMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The side of a control image with `full_size_control_images: false`, as in ai-toolkit.
const SMALL_SIDE: u32 = 512;

/// What the control images of a data set are to its images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlRole {
    /// What the model changes into the image (FLUX.1 Kontext).
    Condition,
    /// The negative end of a slider whose positive end is the image.
    Negative,
    /// What the image is compared with while it is trained (`unconditional_path`).
    Paired,
}

impl ControlRole {
    /// What such an image is called in messages.
    fn noun(self) -> &'static str {
        match self {
            Self::Condition => "control image",
            Self::Negative => "negative image",
            Self::Paired => "paired image",
        }
    }

    /// The config key of its folders.
    fn key(self) -> &'static str {
        match self {
            Self::Condition => "datasets: control_path",
            Self::Negative => "slider.datasets: neg_folder",
            Self::Paired => "datasets: unconditional_path",
        }
    }
}

/// Where the control images of a data set are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlSource {
    /// In folders: for each image, one of them has a file with the image's stem.
    Folders(Vec<PathBuf>),
    /// In `_controls` beside each image, made of it.
    Beside(ControlsBeside),
}

/// The control images of a data set.
#[derive(Clone, Debug, PartialEq)]
pub struct ControlOptions {
    /// What they are to the images.
    pub role: ControlRole,
    /// Where they are.
    pub source: ControlSource,
    /// The colour behind transparent control images. `None`: transparency is dropped, as of training images.
    pub background: Option<[u8; 3]>,
    /// Flip, scale and crop a control image like its image. Otherwise it is squeezed to 512 x 512, then to the size of its image.
    pub full_size: bool,
}

impl ControlOptions {
    /// What they are called in messages, all of them.
    #[must_use]
    pub fn noun(&self) -> &'static str {
        match self.role {
            ControlRole::Condition => "control images",
            ControlRole::Negative => "negative images",
            ControlRole::Paired => "paired images",
        }
    }

    /// Those beside the images that are made where they are missing.
    #[must_use]
    pub fn generated(&self) -> Option<&ControlsBeside> {
        match &self.source {
            ControlSource::Beside(beside) if beside.generator.is_some() => Some(beside),
            _ => None,
        }
    }

    /// The folders, if the control images are in folders of their own.
    #[must_use]
    pub fn folders(&self) -> &[PathBuf] {
        match &self.source {
            ControlSource::Folders(folders) => folders,
            ControlSource::Beside(_) => &[],
        }
    }

    /// Checks that the folders exist.
    ///
    /// # Errors
    /// When a folder does not exist.
    pub(super) fn check_folders_exist(&self) -> Result<()> {
        match self.folders().iter().find(|folder| !folder.is_dir()) {
            Some(folder) => Err(EngineError::bad_input(format!(
                "{}: there is no such folder of {}s ({})",
                folder.display(),
                self.role.noun(),
                self.role.key()
            ))),
            None => Ok(()),
        }
    }

    /// Lists the files of the folders. `stay_in_folder`: a file outside its folder is an error. `data_set`: what may be opened of the data
    /// set.
    ///
    /// # Errors
    /// When a folder cannot be read.
    pub(super) fn list(&self, stay_in_folder: bool, data_set: &AllowedPaths) -> Result<ControlFiles> {
        self.check_folders_exist()?;
        let folders = self
            .folders()
            .iter()
            .map(|path| ControlFolder::list(path, stay_in_folder));
        Ok(ControlFiles {
            role: self.role,
            folders: folders.collect::<Result<_>>()?,
            beside: match &self.source {
                ControlSource::Beside(beside) => Some((beside.clone(), data_set.clone())),
                ControlSource::Folders(_) => None,
            },
        })
    }
}

/// The files of a folder of control images by their stems.
struct ControlFolder {
    path: PathBuf,
    files: HashMap<OsString, PathBuf>,
    allowed_paths: AllowedPaths,
}

impl ControlFolder {
    fn list(path: &Path, stay_in_folder: bool) -> Result<Self> {
        let mut files: HashMap<OsString, PathBuf> = HashMap::new();
        let failed = |error| EngineError::io(path, error);
        for entry in std::fs::read_dir(path).map_err(failed)? {
            let file = entry.map_err(failed)?.path();
            let (Some(rank), Some(stem)) = (suffix_rank(&file), file.file_stem()) else {
                continue;
            };
            match files.get(stem) {
                // The order of ai-toolkit: jpg, jpeg, png, webp.
                Some(other) if (suffix_rank(other), other.as_path()) <= (Some(rank), file.as_path()) => {}
                _ => {
                    files.insert(stem.to_owned(), file);
                }
            }
        }
        Ok(Self {
            path: path.to_path_buf(),
            files,
            allowed_paths: match stay_in_folder {
                true => AllowedPaths::below(path)?,
                false => AllowedPaths::any(),
            },
        })
    }
}

/// The files of the control images of a data set.
pub(super) struct ControlFiles {
    role: ControlRole,
    /// Of folders of their own.
    folders: Vec<ControlFolder>,
    /// Those beside the images, and what may be opened there.
    beside: Option<(ControlsBeside, AllowedPaths)>,
}

impl ControlFiles {
    /// The control image of an image. `None`: it has none.
    ///
    /// # Errors
    /// When several folders have one, or the file is not a readable image below its folder.
    pub(super) fn find(&self, image: &Path) -> Result<Option<PathBuf>> {
        if let Some((beside, allowed_paths)) = &self.beside {
            return beside.find(image, allowed_paths);
        }
        let Some(stem) = image.file_stem() else { return Ok(None) };
        let mut found: Option<&PathBuf> = None;
        for folder in &self.folders {
            let Some(file) = folder.files.get(stem) else { continue };
            folder.allowed_paths.check(file)?;
            if let Some(first) = found {
                return Err(EngineError::bad_input(format!(
                    "{} has two {}s, {} and {} ({}): there must be one; remove one of the files",
                    image.display(),
                    self.role.noun(),
                    first.display(),
                    file.display(),
                    self.role.key()
                )));
            }
            found = Some(file);
        }
        Ok(found.cloned())
    }

    /// Checks that a file beside a control image may be opened.
    ///
    /// # Errors
    /// When it is outside of its folder.
    pub(super) fn check(&self, path: &Path) -> Result<()> {
        let folder = self.folders.iter().find(|folder| path.starts_with(&folder.path));
        folder.map_or(Ok(()), |folder| folder.allowed_paths.check(path))
    }

    /// The error about images without a control image: the first of them, and how many there are among `images`.
    pub(super) fn missing(&self, data_set: &Path, missing: &[PathBuf], images: usize) -> EngineError {
        if let Some((beside, _)) = &self.beside {
            return control_files::missing(data_set, beside.kind, missing, images);
        }
        let first = missing.first().map(PathBuf::as_path).unwrap_or_else(|| Path::new(""));
        let stem = first.file_stem().unwrap_or_default().to_string_lossy();
        let folders: Vec<String> = self
            .folders
            .iter()
            .map(|folder| folder.path.display().to_string())
            .collect();
        let advice = match self.role {
            ControlRole::Condition => {
                "Add one for each image, or move images without one to a data set without `control_path`"
            }
            ControlRole::Negative => "Add one for each image, or move images without one to another folder",
            ControlRole::Paired => {
                "Add one for each image, or move images without one to a data set without `unconditional_path`"
            }
        };
        EngineError::bad_input(format!(
            "{}: {} of {images} images have no {}. The first is {}: there is no {stem}.jpg, {stem}.jpeg, {stem}.png or \
             {stem}.webp in {} ({}). {advice}",
            data_set.display(),
            missing.len(),
            self.role.noun(),
            first.display(),
            folders.join(" or "),
            self.role.key(),
        ))
    }
}

/// Loads the control image of an item in the size of the item: [3, h, w] from -1 to 1, float32 on the CPU. Its pixels move as those of
/// the item did.
///
/// # Errors
/// When the control image is missing, damaged, or needs too much memory.
pub fn load_control(item: &TrainingImage, control: &Control, moves: &[SpatialChange]) -> Result<Tensor> {
    let image = match control.background {
        Some(background) => image_io::open_rgb_over(&control.path, background)?,
        None => image_io::open_rgb(&control.path)?,
    };
    let image = half_of(image, control.half);
    if control.full_size {
        let cropped = moved(apply_plan(image, item), moves);
        return image_io::to_tensor(&cropped, &Device::Cpu);
    }
    let small = image_io::resize(&image, SMALL_SIDE, SMALL_SIDE, Filter::Bicubic);
    let small = moved(small, moves);
    let pixels = image_io::to_tensor(&small, &Device::Cpu)?;
    let (width, height) = item.plan.bucket;
    image_io::interpolate_bilinear(&pixels, height as usize, width as usize)
}
