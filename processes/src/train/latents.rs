//! Encodes the images of a run before its model is loaded, so that the denoiser is not in memory while the codec works.

use super::super::context::Context;
use super::super::rate::Progress;
use super::data::TrainingData;
use super::fingerprints::vae_fingerprint;
use super::images_ahead::{ImageRequest, ImagesAhead};
use super::options;
use crate::data::{Dataset, TrainingImage};
use crate::device::Compute;
use crate::error::Result;
use crate::models::codec::Codec;
use crate::training::LatentStore;
use aitk_common::job::process::TrainerProcess;
use std::path::Path;

/// How many images are read together, on all cores, while those before them are encoded.
const READ_TOGETHER: usize = 8;

fn is_cached(dataset: &Dataset) -> bool {
    dataset.options.cache_latents || dataset.options.cache_latents_to_disk
}

/// Whether the latents of a data set are cached.
pub(super) fn are_cached(data: &TrainingData) -> bool {
    data.datasets.iter().any(is_cached)
}

/// The latents of a run, none of which is in memory yet. `vae_path`: the file or folder of the codec.
///
/// # Errors
/// When the codec's files cannot be read.
pub(super) fn store(process: &TrainerProcess, vae_path: &Path, codec: &dyn Codec) -> Result<LatentStore> {
    let weights = vae_fingerprint(vae_path)?;
    Ok(LatentStore::new(&weights, &options::latent_space(process), codec))
}

/// Encodes every image and control image whose latents are cached, one at a time, so that no latent depends on which others are missing.
/// Those that an earlier run encoded are read. `None`: the run should stop.
///
/// # Errors
/// When the codec cannot be loaded or an image cannot be read, or the disk is full.
pub(super) fn encode(
    process: &TrainerProcess,
    data: &TrainingData,
    compute: &Compute,
    cx: &mut Context<'_>,
) -> Result<Option<LatentStore>> {
    cx.phase("caching latents");
    let loaded = cx.load_codec(&process.model, compute)?;
    let codec = loaded.codec();
    let mut latents = store(process, loaded.path(), codec)?;
    let cached = || data.datasets.iter().filter(|dataset| is_cached(dataset));
    let total: u64 = cached().map(|dataset| dataset.items.len() as u64).sum();
    let (mut progress, mut done) = (Progress::new(), 0);
    let mut ahead = ImagesAhead::for_device(&compute.device);
    // An adapter sees the pixels.
    let control_of = |item: &'_ TrainingImage| item.control.clone().filter(|_| process.adapter.is_none());
    for (number, dataset) in (0..).zip(cached()) {
        let (in_memory, on_disk) = (dataset.options.cache_latents, dataset.options.cache_latents_to_disk);
        let mut groups = (0..).zip(dataset.items.chunks(READ_TOGETHER)).peekable();
        while let Some((group, items)) = groups.next() {
            let mut loaded = ahead.take((number, group))?.unwrap_or_default();
            if let Some((next, items)) = groups.peek().filter(|_| ahead.is_enabled()) {
                let request = |item: &TrainingImage| {
                    let control = control_of(item).filter(|control| !latents.has(item, Some(control), on_disk));
                    ImageRequest::for_latents(item, !latents.has(item, None, on_disk), control.as_ref())
                };
                ahead.start((number, *next), items.iter().map(request).collect());
            }
            for (place, item) in items.iter().enumerate() {
                if cx.stop.is_set() {
                    return Ok(None);
                }
                let loaded = loaded.get_mut(place).map(std::mem::take).unwrap_or_default();
                latents.get(item, loaded.pixels, codec, in_memory, on_disk)?;
                if let Some(control) = control_of(item) {
                    latents.get_control((item, &control), loaded.control, codec, in_memory, on_disk)?;
                }
                done += 1;
                progress.step(cx, done, total);
            }
        }
    }
    Ok(Some(latents))
}
