//! The feature extractor of a training (`train.latent_feature_extractor_path`).

use super::super::context::Context;
use crate::checkpointing::Checkpointing;
use crate::error::{EngineError, Result};
use crate::families::{self, Model};
use crate::models::codec::Codec;
use crate::models::feature_extractor::FeatureExtractor;
use crate::training::FeatureLoss;
use aitk_common::job::feature_extractor::FeatureExtractorSource;
use aitk_common::job::process::TrainerProcess;
use aitk_common::model_files::PartPaths;
use candle_core::Device;
use std::path::Path;
use std::sync::Arc;

/// The loss of the feature extractor of a training, if it has one.
///
/// # Errors
/// When its file cannot be read, is of something else, or is for other latents.
pub(super) fn load(
    process: &TrainerProcess,
    model: &dyn Model,
    (device, checkpointing): (&Device, Checkpointing),
    cx: &mut Context<'_>,
) -> Result<Option<FeatureLoss>> {
    let Some(source) = process.feature_extractor() else {
        return Ok(None);
    };
    let path = cx.local_path(source.path)?;
    let second = source.second.map(|path| cx.local_path(path)).transpose()?;
    let codec = model.codec();
    let extractor = FeatureExtractor::open((&path, second.as_deref()), model.dtype(), device)
        .map_err(|error| at_key(source, &error))?;
    check_fit(source, &extractor, codec)?;
    let decoder = match extractor.sees_pixels() {
        true => codec.pixel_decoder(checkpointing),
        false => None,
    };
    if extractor.sees_pixels() && decoder.is_none() {
        return Err(EngineError::Unsupported(format!(
            "train.{}: {} compares images, and this model makes others: use a network of version 1 or 2",
            source.key,
            extractor.name()
        )));
    }
    let name = extractor.name();
    cx.log(
        "info",
        format!("features of the images are compared: {name} of {}", path.display()),
    );
    Ok(Some(FeatureLoss {
        extractor: Arc::new(extractor.with_checkpointing(checkpointing)),
        decoder,
        partial_step: source.partial_step,
        weight: source.weight,
    }))
}

/// Checks the files of the feature extractor of a training, its network and a second one, from names and shapes alone. `model`: the path of the base model, and where parts
/// come from that it does not have. `None`: it is not on this machine.
///
/// # Errors
/// The error with which the training would end after loading the model; or an error of the model.
pub fn check_feature_extractor(
    process: &TrainerProcess,
    paths: (&Path, Option<&Path>),
    model: Option<(&Path, &PartPaths)>,
) -> Result<()> {
    let Some(source) = process.feature_extractor() else {
        return Ok(());
    };
    let extractor = FeatureExtractor::open_layout(paths).map_err(|error| at_key(source, &error))?;
    match model {
        Some((model, parts)) => {
            let model = families::load_without_weights(model, process.model.arch.name, parts)?;
            check_fit(source, &extractor, model.codec())
        }
        None => Ok(()),
    }
}

fn check_fit(source: FeatureExtractorSource<'_>, extractor: &FeatureExtractor, codec: &dyn Codec) -> Result<()> {
    if source.partial_step && !matches!(extractor, FeatureExtractor::Tips(_)) {
        return Err(EngineError::bad_input(format!(
            "train.latent_feature_extractor_partial_step: `{}` is {}, and only TIPSv2 (`v7`, `v8`) compares images after a \
             step: remove this key",
            source.path,
            extractor.name()
        )));
    }
    let channels = codec.latent_channels().first().copied().unwrap_or(0);
    extractor
        .check_channels(channels)
        .map_err(|message| EngineError::bad_input(format!("train.{}: {}: {message}", source.key, source.path)))
}

fn at_key(source: FeatureExtractorSource<'_>, error: &EngineError) -> EngineError {
    EngineError::bad_input(format!("train.{}: {error}", source.key))
}
