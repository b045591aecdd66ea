//! The two models of an extraction, layer by layer.

use crate::adapters::{ModelLayer, model_layers};
use crate::error::{EngineError, Result};
use crate::families::{self, LoadOptions, PartRole, SelectedParts};
use crate::weights::{Index, Weight};
use aitk_common::job::arch::ArchName;
use aitk_common::job::schema::SupportLevel;
use aitk_common::model_files::{self, Family, Inventory, ModelFileKind};
use aitk_common::plan::memory_options::MemoryOptions;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// A layer of both models, with the same shape.
#[derive(Debug)]
pub(super) struct LayerPair {
    /// The layer of the base model.
    pub(super) base: ModelLayer,
    /// The weight of the fine-tune.
    pub(super) tuned: Weight,
}

/// Two models of one family.
#[derive(Debug)]
pub(super) struct ModelPair {
    pub(super) arch: ArchName,
    /// The layers that a LoRA can change.
    pub(super) layers: Vec<LayerPair>,
    /// What the selected text encoders are that are not extracted, because the fine-tune does not have them.
    pub(super) left_out: Vec<String>,
}

/// Opens a base model and its fine-tune. Their layers' weights stay in their files.
///
/// # Errors
/// When one cannot be opened, they are of different families, or their layers differ in name or shape.
pub(super) fn open(base: &Path, tuned: &Path, selected: SelectedParts) -> Result<ModelPair> {
    if !selected.denoiser && !selected.text_encoders {
        return Err(EngineError::bad_input(
            "`extract_unet` and `extract_text_encoder` are both false, so there is nothing to extract: set one of them to true",
        ));
    }
    let (base_family, base_evidence) = family_of(base)?;
    let (tuned_family, tuned_evidence) = family_of(tuned)?;
    let arch = match (base_family.arch, tuned_family.arch) {
        // FLUX.1 Kontext has the tensors of dev.
        (Some(ArchName::Flux), Some(ArchName::FluxKontext)) => ArchName::Flux,
        (Some(arch), Some(of_tuned)) if arch == of_tuned => arch,
        _ => {
            return Err(EngineError::bad_input(format!(
                "the models belong to different families: {} is {base_family} ({base_evidence}), and {} is {tuned_family} \
                 ({tuned_evidence}): give a base model and its own fine-tune",
                base.display(),
                tuned.display()
            )));
        }
    };
    let (mut base_layers, missing) = layers(base, arch, selected)?;
    let (tuned_layers, missing_in_tuned) = layers(tuned, tuned_family.arch.unwrap_or(arch), selected)?;
    let has_text = |layers: &[ModelLayer]| layers.iter().any(|layer| layer.role == PartRole::TextEncoder);
    if !missing.is_empty() && (has_text(&tuned_layers) || !selected.denoiser) {
        return Err(EngineError::bad_input(format!(
            "{} has no {}: give a base model with it, or set `extract_text_encoder: false`",
            base.display(),
            missing.join(" and no ")
        )));
    }
    if !selected.denoiser && !missing_in_tuned.is_empty() && !has_text(&tuned_layers) {
        return Err(EngineError::bad_input(format!(
            "{} has no {}, and with `extract_unet: false` nothing else is extracted: give a fine-tune with it",
            tuned.display(),
            missing_in_tuned.join(" and no ")
        )));
    }
    // A text encoder that the fine-tune does not have is that of the base model.
    let in_tuned: BTreeSet<&str> = tuned_layers.iter().map(|layer| layer.part).collect();
    base_layers.retain(|layer| layer.role != PartRole::TextEncoder || in_tuned.contains(layer.part));
    Ok(ModelPair {
        arch,
        layers: pairs(base_layers, tuned_layers, [base, tuned])?,
        left_out: missing_in_tuned,
    })
}

/// The family of a model, and what shows it.
fn family_of(path: &Path) -> Result<(Family, String)> {
    if !path.exists() {
        return Err(EngineError::bad_input(format!(
            "{}: no such model: expected a diffusers folder, or a .safetensors checkpoint",
            path.display()
        )));
    }
    let identity = model_files::identify(&Inventory::open(path));
    let arch = match &identity {
        ModelFileKind::Model { family, .. } => family.arch,
        _ => None,
    };
    let is_run = arch.is_some_and(|arch| matches!(arch.status(), SupportLevel::Works));
    match identity {
        ModelFileKind::Model { family, evidence, .. } if is_run && family.variant.is_none() => Ok((family, evidence)),
        ModelFileKind::Model { family, evidence, .. } => Err(EngineError::Unsupported(format!(
            "{} is {family} ({evidence}), from which this release extracts nothing",
            path.display()
        ))),
        other => match model_files::check_supported(&path.display().to_string(), ArchName::Sd1, &other) {
            Err(refusal) => Err(EngineError::Unsupported(refusal.to_string())),
            Ok(()) => Err(EngineError::Internal(format!("{} has no family", path.display()))),
        },
    }
}

/// The layers of a model that are extracted, and what the selected text encoders are that it does not have.
fn layers(path: &Path, arch: ArchName, selected: SelectedParts) -> Result<(Vec<ModelLayer>, Vec<String>)> {
    let options = LoadOptions {
        memory_options: MemoryOptions {
            denoiser_streamed: 1.0,
            text_streamed: 1.0,
            ..MemoryOptions::default()
        },
        ..LoadOptions::cpu()
    };
    let mut parts = families::load_adapted(path, arch, selected, &options)?;
    // The denoiser, which is last, first: its message is the one that helps.
    for index in parts.indexes().rev() {
        check_not_quantised(index)?;
    }
    let mut layers = model_layers(&mut parts.parts())?;
    layers.retain(ModelLayer::is_usual_target);
    Ok((layers, parts.missing().to_vec()))
}

/// Refuses quantised weights: their difference to other weights is mostly what the quantisation rounded.
fn check_not_quantised(index: &Index) -> Result<()> {
    let kinds: Vec<&str> = index.quantization_kinds().into_iter().collect();
    if kinds.is_empty() {
        return Ok(());
    }
    Err(EngineError::WeightsFile {
        path: index.path().to_path_buf(),
        reason: format!(
            "it has {} weights, and the difference of quantised weights is mostly their rounding error: give the model with weights of 16 or \
             32 bits",
            kinds.join(", ")
        ),
    })
}

/// The layers of two models side by side.
fn pairs(base: Vec<ModelLayer>, tuned: Vec<ModelLayer>, [base_path, tuned_path]: [&Path; 2]) -> Result<Vec<LayerPair>> {
    let mismatch = |problem: String| {
        Err(EngineError::bad_input(format!(
            "the models do not fit together: {problem}: give a base model and its own fine-tune"
        )))
    };
    let only_in = |layer: &ModelLayer, path: &Path| {
        mismatch(format!(
            "only {} has a layer `{}.{}`",
            path.display(),
            layer.part,
            layer.path
        ))
    };
    let mut others: BTreeMap<_, ModelLayer> = tuned
        .into_iter()
        .map(|layer| ((layer.part, layer.path.clone()), layer))
        .collect();
    let mut pairs = Vec::with_capacity(base.len());
    for layer in base {
        let Some(other) = others.remove(&(layer.part, layer.path.clone())) else {
            return only_in(&layer, base_path);
        };
        let (dims, other_dims) = (layer.weight.dims(), other.weight.dims());
        if dims != other_dims {
            return mismatch(format!(
                "layer `{}.{}` has the shape {dims:?} in {} and {other_dims:?} in {}",
                layer.part,
                layer.path,
                base_path.display(),
                tuned_path.display()
            ));
        }
        pairs.push(LayerPair {
            base: layer,
            tuned: other.weight,
        });
    }
    match others.values().next() {
        Some(layer) => only_in(layer, tuned_path),
        None => Ok(pairs),
    }
}
