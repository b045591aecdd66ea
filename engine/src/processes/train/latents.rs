//! Encodes the images of a run before its model is loaded, so that the denoiser is not in memory while the codec works.

use super::super::context::Context;
use super::super::rate::Progress;
use super::data::TrainingData;
use super::fingerprints::vae_fingerprint;
use super::options;
use crate::data::Dataset;
use crate::device::Compute;
use crate::error::Result;
use crate::models::codec::Codec;
use crate::training::LatentStore;
use aitk_common::job::process::TrainerProcess;
use std::path::Path;

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

/// Encodes every image and control image whose latents are cached. Those that an earlier run encoded are read. `None`: the run should
/// stop.
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
    for dataset in cached() {
        let (in_memory, on_disk) = (dataset.options.cache_latents, dataset.options.cache_latents_to_disk);
        for item in &dataset.items {
            if cx.stop.is_set() {
                return Ok(None);
            }
            latents.get(item, None, codec, in_memory, on_disk)?;
            // An adapter sees the pixels.
            if let Some(control) = item.control.as_ref().filter(|_| process.adapter.is_none()) {
                latents.get_control((item, control), None, codec, in_memory, on_disk)?;
            }
            done += 1;
            progress.step(cx, done, total);
        }
    }
    Ok(Some(latents))
}
