//! The largest batches of a training's data sets, for the prediction of its memory.

use super::options;
use crate::data::DatasetScan;
use crate::error::Result;
use crate::{Context, LogFile, OutputRequests, StopSignal};
use aitk_common::attempt::AttemptSpec;
use aitk_common::job::JobSpec;
use aitk_common::job::process::TrainerProcess;
use aitk_common::plan::image_batches::{ImageBatch, largest_batches};

/// The largest batches of each training process of an attempt. Image sizes come from the cache that the training wrote, or from
/// the headers of the images; nothing is written. A process whose data cannot be read has none.
#[must_use]
pub(crate) fn image_batches(spec: &AttemptSpec) -> Vec<ImageBatch> {
    let Ok(job) = serde_json::from_value::<JobSpec>(spec.job.clone()) else {
        return Vec::new();
    };
    let trainings = job.process.iter().enumerate();
    let trainings = trainings.filter_map(|(index, process)| Some((index, process.trainer()?)));
    trainings
        .filter_map(|(index, process)| batches_of(spec, &job, index, process).ok())
        .flatten()
        .collect()
}

fn batches_of(spec: &AttemptSpec, job: &JobSpec, index: usize, process: &TrainerProcess) -> Result<Vec<ImageBatch>> {
    let mut events = Vec::new();
    let cx = Context {
        spec,
        job,
        events: &mut events,
        stop: &StopSignal::new(),
        requests: &OutputRequests::new(),
        log_file: LogFile::default(),
    };
    let divisibility = process.model.arch.name.bucket_divisibility();
    let mut batches = Vec::new();
    for options in options::dataset_options(process, &cx)? {
        let scan = DatasetScan::read(&options, false)?;
        let sizes = scan.bucket_sizes(&options, divisibility).into_iter();
        batches.extend(sizes.map(|size| image_batch(index, size, options.batch_size as u64)));
    }
    Ok(largest_batches(batches))
}

/// A batch of `images` images of this width and height.
pub(super) fn image_batch(process: usize, (width, height): (u32, u32), images: u64) -> ImageBatch {
    ImageBatch {
        process: u32::try_from(process).unwrap_or(u32::MAX),
        width,
        height,
        images: u32::try_from(images).unwrap_or(u32::MAX),
    }
}
