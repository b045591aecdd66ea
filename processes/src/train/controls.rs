//! Makes the control images and masks of a run that are missing (`datasets[].controls`), before its data sets are opened and its model is loaded.

use super::super::context::Context;
use super::super::rate::Progress;
use super::options;
use crate::data::{ControlOptions, ControlsBeside, DatasetScan, MaskOptions};
use crate::device;
use crate::error::{EngineError, Result};
use crate::image_io;
use crate::models::control_generator::ControlGenerator;
use aitk_common::job::controls::ControlGeneratorSource;
use aitk_common::job::process::TrainerProcess;
use image::RgbImage;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The images that a network makes control images of, each once.
struct Work {
    beside: ControlsBeside,
    images: BTreeSet<PathBuf>,
}

/// Makes control images that are missing. False: the run should stop.
///
/// # Errors
/// When a data set cannot be read, a network cannot be loaded, an image is damaged, or the disk is full.
pub(super) fn generate(process: &TrainerProcess, cx: &mut Context<'_>) -> Result<bool> {
    let work = missing(process, cx)?;
    let total: u64 = work.iter().map(|work| work.images.len() as u64).sum();
    if total == 0 {
        return Ok(true);
    }
    cx.phase("making control images");
    let compute = device::open_with_dtype(cx.spec.device, "float32")?;
    let (mut progress, mut done) = (Progress::new(), 0);
    for Work { beside, images } in work {
        let network = beside.generator.as_deref().unwrap_or_default();
        let path = cx.local_path(network)?;
        let generator =
            ControlGenerator::open(beside.kind, &path, &compute.device).map_err(|error| at_key(&beside, &error))?;
        let count = images.len();
        cx.log(
            "info",
            format!("making {count} control images of type `{}` with {network}", beside.kind),
        );
        let mut is_unwritable = false;
        for image in &images {
            if cx.stop.is_set() {
                return Ok(false);
            }
            let made = generator.generate(image)?;
            let path = write(&beside, image, &made)?;
            if path.parent() == beside.cache.as_deref() && !beside.writes_cache && !is_unwritable {
                is_unwritable = true;
                cx.log(
                    "warn",
                    format!(
                        "{}: control images cannot be written beside this image; they are in {}",
                        image.display(),
                        beside.cache.as_deref().unwrap_or(Path::new("")).display()
                    ),
                );
            }
            done += 1;
            progress.step(cx, done, total);
        }
    }
    Ok(true)
}

/// The control images that are missing, for each type and network. Errors in the data are found before the first one is made.
fn missing(process: &TrainerProcess, cx: &Context<'_>) -> Result<Vec<Work>> {
    let mut all: Vec<Work> = Vec::new();
    if process.control_generators().next().is_none() {
        return Ok(all);
    }
    for options in options::dataset_options(process, cx)? {
        let scan = DatasetScan::read(&options, false)?;
        let controls = options.controls.as_ref().and_then(ControlOptions::generated);
        let masks = options.masks.as_ref().and_then(MaskOptions::generated);
        for beside in controls.into_iter().chain(masks) {
            let images = scan.images_without(beside)?;
            match all.iter_mut().find(|work| work.beside == *beside) {
                Some(work) => work.images.extend(images),
                None => all.push(Work {
                    beside: beside.clone(),
                    images: images.into_iter().collect(),
                }),
            }
        }
    }
    all.retain(|work| !work.images.is_empty());
    Ok(all)
}

/// Writes the control image of an image to the first path that can be written. A full disk is an error.
fn write(beside: &ControlsBeside, image: &Path, made: &RgbImage) -> Result<PathBuf> {
    let mut failure = None;
    for path in beside.new_paths(image)? {
        let folder = path.parent().unwrap_or(Path::new(""));
        let created = std::fs::create_dir_all(folder).map_err(|error| EngineError::io(folder, error));
        match created.and_then(|()| image_io::save(made, &path, &[])) {
            Ok(()) => return Ok(path),
            Err(full @ EngineError::DiskFull { .. }) => return Err(full),
            Err(error) => failure = Some(error),
        }
    }
    Err(failure.unwrap_or_else(|| EngineError::Internal("a control image has no path".into())))
}

/// Checks the file of a network that makes control images, from names and shapes alone.
///
/// # Errors
/// The error with which the training would end.
pub fn check_control_generator(source: &ControlGeneratorSource<'_>, path: &Path) -> Result<()> {
    match ControlGenerator::open_layout(source.kind, path) {
        Ok(_) => Ok(()),
        Err(error) => Err(EngineError::bad_input(format!("{}: {error}", source.key))),
    }
}

fn at_key(beside: &ControlsBeside, error: &EngineError) -> EngineError {
    let key = beside.kind.generator_key().unwrap_or("controls");
    EngineError::bad_input(format!("datasets: {key}: {error}"))
}
