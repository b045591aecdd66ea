//! The two models of an extraction, layer by layer.

use crate::adapters::{ModelLayer, model_layers};
use crate::error::{EngineError, Result};
use crate::families::{self, LoadOptions, PartRole};
use crate::weights::{Index, Weight};
use aitk_common::job::arch::ArchName;
use aitk_common::job::schema::SupportLevel;
use aitk_common::model_files::{self, Family, Inventory, ModelFileKind, PartPaths};
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
}

/// Which parts are extracted.
#[derive(Clone, Copy, Debug)]
pub(super) struct SelectedParts {
    pub(super) denoiser: bool,
    pub(super) text_encoders: bool,
}

impl SelectedParts {
    fn contains(self, role: PartRole) -> bool {
        match role {
            PartRole::Denoiser => self.denoiser,
            PartRole::TextEncoder => self.text_encoders,
            PartRole::Codec | PartRole::LanguageModel => false,
        }
    }
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
    for path in [base, tuned] {
        check_not_quantised(path, selected)?;
    }
    // An extraction has no keys that could name them.
    if let Some(lack) = model_files::missing_parts(arch, base) {
        return Err(EngineError::bad_input(format!(
            "{lack}: give a base model with all parts, as a diffusers folder or as one file"
        )));
    }
    let base_layers = layers(base, arch, &PartPaths::default(), selected)?;
    // A fine-tune of a transformer may be its folder alone.
    let parts = PartPaths {
        extras: (arch.takes_parts() && base.is_dir()).then(|| base.to_path_buf()),
        ..PartPaths::default()
    };
    let tuned_arch = tuned_family.arch.unwrap_or(arch);
    let tuned_layers = layers(tuned, tuned_arch, &parts, selected)?;
    Ok(ModelPair {
        arch,
        layers: pairs(base_layers, tuned_layers, [base, tuned])?,
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

/// Refuses quantised weights: their difference to other weights is mostly what the quantisation rounded.
fn check_not_quantised(path: &Path, selected: SelectedParts) -> Result<()> {
    let denoisers = ["unet", "transformer"].iter().filter(|_| selected.denoiser);
    let text = ["text_encoder", "text_encoder_2"]
        .iter()
        .filter(|_| selected.text_encoders);
    let files: Vec<_> = match path.is_dir() {
        true => denoisers
            .chain(text)
            .map(|folder| path.join(folder))
            .filter(|folder| folder.is_dir())
            .collect(),
        false => vec![path.to_path_buf()],
    };
    for file in files {
        let kinds: BTreeSet<&str> = Index::open(&file)?.quantization_kinds();
        if !kinds.is_empty() {
            let kinds: Vec<&str> = kinds.into_iter().collect();
            return Err(EngineError::WeightsFile {
                path: file,
                reason: format!(
                    "it has {} weights, and the difference of quantised weights is mostly their rounding error: give the model with weights \
                     of 16 or 32 bits",
                    kinds.join(", ")
                ),
            });
        }
    }
    Ok(())
}

/// The layers of a model that are extracted.
fn layers(path: &Path, arch: ArchName, parts: &PartPaths, selected: SelectedParts) -> Result<Vec<ModelLayer>> {
    let options = LoadOptions {
        parts: parts.clone(),
        memory_options: MemoryOptions {
            denoiser_streamed: 1.0,
            text_streamed: 1.0,
            vae_streamed: 1.0,
            ..MemoryOptions::default()
        },
        ..LoadOptions::cpu()
    };
    let mut model = families::load(path, arch, &options)?;
    let mut parts = model.parts();
    parts.retain(|part| selected.contains(part.role));
    let mut layers = model_layers(&mut parts)?;
    layers.retain(ModelLayer::is_usual_target);
    Ok(layers)
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
