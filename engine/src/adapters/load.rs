//! Attaches a LoRA file to a model.

use super::adapter_file::{AdapterFile, FileLayers};
use super::file_layer::Site;
use super::handle::{AdapterHandle, Multiplier};
use super::names::{LayerIndex, saved_name};
use super::weight_adapter::WeightAdapter;
use crate::error::{EngineError, Result};
use crate::families::{self, AdapterNames, Model, Part, PartRole};
use crate::nn::{LayerAdapter, LayerMut, NormAdapter};
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::PartPaths;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

/// A LoRA file that is attached to a model.
#[derive(Debug)]
pub struct LoadedAdapter {
    /// The strength, which can be changed at any time.
    pub multiplier: Multiplier,
    /// The number of layers with an adapter of this file.
    pub layers: usize,
    /// Names in the file that match no layer of the model. They are ignored; callers warn.
    pub unknown: Vec<String>,
    /// See [`AdapterFile::alpha_is_unknown`]: alpha is taken to be the rank.
    pub alpha_is_unknown: bool,
}

/// Loads a LoRA file and attaches its layers to the models in `parts`.
///
/// # Errors
/// When the file is damaged or not a LoRA, a shape does not match its layer, or no name matches a layer.
pub fn load_lora(parts: &mut [Part<'_>], path: &Path, multiplier: f64) -> Result<LoadedAdapter> {
    load_file(parts, AdapterFile::open(path)?, multiplier)
}

/// What an adapter file changes of a model, to merge it. Nothing is attached.
#[derive(Debug)]
pub struct LoadedChanges {
    /// The file.
    pub file: LoadedAdapter,
    /// The adapters of linear layers, convolutions and embedding layers, by the names of the layers in their part.
    pub layers: BTreeMap<String, Arc<dyn WeightAdapter>>,
    /// Those of norms.
    pub norms: BTreeMap<String, Arc<dyn NormAdapter>>,
}

/// Loads a LoRA file for a part of a model, to merge it.
///
/// # Errors
/// As [`load_lora`].
pub fn load_changes(part: &mut Part<'_>, path: &Path, multiplier: f64) -> Result<LoadedChanges> {
    let (mut layers, mut norms) = (BTreeMap::new(), BTreeMap::new());
    let file = load_with(
        std::slice::from_mut(part),
        AdapterFile::open(path)?,
        multiplier,
        &mut |name, _, adapter| match adapter {
            FileAdapter::Layer(adapter) => drop(layers.insert(name.to_owned(), adapter)),
            FileAdapter::Norm(adapter) => drop(norms.insert(name.to_owned(), adapter)),
        },
    )?;
    Ok(LoadedChanges { file, layers, norms })
}

/// Checks that a LoRA file can be attached to the model of a family at `model`, from configs, names and shapes only. `parts`: where
/// parts come from that `model` does not have.
///
/// # Errors
/// As [`load_lora`], and when the model cannot be loaded.
pub fn check_lora(path: &Path, model: &Path, arch: ArchName, parts: &PartPaths) -> Result<()> {
    let mut model = families::load_without_weights(model, arch, parts)?;
    load_file(&mut model.parts(), AdapterFile::open_layout(path)?, 1.0).map(drop)
}

/// Loads a LoRA file and attaches its layers of the denoiser, for LoRAs that change the denoiser alone.
///
/// # Errors
/// As [`load_lora`], and when all layers of the file are of text encoders.
pub fn load_denoiser_lora(model: &mut dyn Model, path: &Path, multiplier: f64) -> Result<LoadedAdapter> {
    load_denoiser_file(model, AdapterFile::open(path)?, multiplier)
}

/// As [`check_lora`], for LoRAs that change the denoiser alone.
///
/// # Errors
/// As [`load_denoiser_lora`], and when the model cannot be loaded.
pub fn check_denoiser_lora(path: &Path, model: &Path, arch: ArchName, parts: &PartPaths) -> Result<()> {
    let mut model = families::load_without_weights(model, arch, parts)?;
    load_denoiser_file(&mut *model, AdapterFile::open_layout(path)?, 1.0).map(drop)
}

/// [`load_denoiser_lora`] of a file that was read.
fn load_denoiser_file(model: &mut dyn Model, file: AdapterFile, multiplier: f64) -> Result<LoadedAdapter> {
    check_has_denoiser_layers(&file)?;
    let mut parts = model.parts();
    parts.retain(|part| part.role == PartRole::Denoiser);
    load_file(&mut parts, file, multiplier)
}

/// Refuses a file whose layers are all of text encoders.
fn check_has_denoiser_layers(file: &AdapterFile) -> Result<()> {
    if !has_text_layers_only(file) {
        return Ok(());
    }
    Err(EngineError::WeightsFile {
        reason: format!(
            "all of its {} layers are of text encoders, but `assistant_lora_path`, `inference_lora_path` and accuracy recovery adapters \
             change the denoiser alone: `model.lora_path` changes both",
            file.modules.len()
        ),
        path: file.path.clone(),
    })
}

/// The layers of the denoiser that a LoRA file changes, by their dotted diffusers paths. Reads configs, names and shapes only. `parts`:
/// as for [`check_lora`].
///
/// # Errors
/// As [`check_denoiser_lora`].
pub fn adapted_layers(path: &Path, model: &Path, arch: ArchName, parts: &PartPaths) -> Result<BTreeSet<String>> {
    let file = AdapterFile::open_layout(path)?;
    check_has_denoiser_layers(&file)?;
    let mut model = families::load_without_weights(model, arch, parts)?;
    let mut parts = model.parts();
    let index = index_layers(&mut parts)?;
    let (found, unknown) = file.resolve(&index)?;
    check_fits(&parts, &file, &found, &unknown)?;
    let denoisers: Vec<&str> = parts
        .iter()
        .filter(|part| part.role == PartRole::Denoiser)
        .map(|part| part.id)
        .collect();
    let layers = found.into_keys().filter(|(part, _)| denoisers.contains(part));
    Ok(layers.map(|(_, path)| path).collect())
}

/// [`load_lora`] of a file that was read.
fn load_file(parts: &mut [Part<'_>], file: AdapterFile, multiplier: f64) -> Result<LoadedAdapter> {
    load_with(parts, file, multiplier, &mut |_, layer, adapter| {
        attach_file_adapter(layer, adapter);
    })
}

/// Calls `place` with each layer that a file changes and its adapter.
fn load_with(
    parts: &mut [Part<'_>],
    file: AdapterFile,
    multiplier: f64,
    place: &mut dyn FnMut(&str, LayerMut<'_>, FileAdapter),
) -> Result<LoadedAdapter> {
    let index = index_layers(parts)?;
    let (found, unknown) = file.resolve(&index)?;
    check_fits(parts, &file, &found, &unknown)?;
    let layers = found.len();
    let handle = AdapterHandle::new(multiplier);
    make_adapters(parts, &file, found, &handle, place)?;
    Ok(LoadedAdapter {
        multiplier: handle.multiplier.clone(),
        layers,
        unknown,
        alpha_is_unknown: file.alpha_is_unknown(),
    })
}

/// Checks that a file was made for a model of this family.
///
/// # Errors
/// When no layer, or no layer of the transformer, is in the model.
pub(super) fn check_fits(parts: &[Part<'_>], file: &AdapterFile, found: &FileLayers, unknown: &[String]) -> Result<()> {
    if found.is_empty() {
        let origin = file.origin().unwrap_or_else(|| "another model family".to_owned());
        return Err(EngineError::WeightsFile {
            reason: format!(
                "none of its {} layers is in this model (the first is `{}`): it was made for {origin}",
                file.modules.len(),
                file.modules.first().map_or("", |m| m.stem.as_str())
            ),
            path: file.path.clone(),
        });
    }
    if let Some(first) = without_transformer(parts, found, unknown) {
        let origin = file.origin().unwrap_or_else(|| "another model family".to_owned());
        return Err(EngineError::WeightsFile {
            reason: format!(
                "no layer of it is in this model's transformer, only {} of a text encoder that families share (`{first}` is \
                 unknown): it was made for {origin}",
                found.len()
            ),
            path: file.path.clone(),
        });
    }
    Ok(())
}

/// Attaches the layers of a LoRA file that are in text encoders, for text encoders without their model. Returns how many there
/// are; a file that has layers of the denoiser may have none.
///
/// # Errors
/// When the file is damaged or not a LoRA, a shape does not match its layer, or all layers of the file are of other text encoders.
pub fn load_text_lora(parts: &mut [Part<'_>], path: &Path) -> Result<usize> {
    let file = AdapterFile::open(path)?;
    let (mut found, unknown) = file.resolve(&index_layers(parts)?)?;
    // Such a file is not loaded with the denoiser, where its layers would be looked for again.
    if has_text_layers_only(&file) {
        check_fits(parts, &file, &found, &unknown)?;
    }
    let of_text: Vec<&str> = parts
        .iter()
        .filter(|part| part.role == PartRole::TextEncoder)
        .map(|part| part.id)
        .collect();
    found.retain(|(id, _), _| of_text.contains(id));
    let layers = found.len();
    let handle = AdapterHandle::new(1.0);
    make_adapters(parts, &file, found, &handle, &mut |_, layer, adapter| {
        attach_file_adapter(layer, adapter);
    })?;
    Ok(layers)
}

/// The adapter that a file has for a layer.
enum FileAdapter {
    Layer(Arc<dyn WeightAdapter>),
    Norm(Arc<dyn NormAdapter>),
}

fn attach_file_adapter(layer: LayerMut<'_>, adapter: FileAdapter) {
    match (layer, adapter) {
        (LayerMut::Norm(norm), FileAdapter::Norm(adapter)) => norm.adapters.push(adapter),
        (layer, FileAdapter::Layer(adapter)) => attach_adapter(layer, adapter),
        // Layers have no adapters of norms.
        (_, FileAdapter::Norm(_)) => {}
    }
}

/// Makes the adapters of these layers of a file, and calls `place` with each layer, its name and its adapter.
fn make_adapters(
    parts: &mut [Part<'_>],
    file: &AdapterFile,
    mut found: FileLayers,
    handle: &Arc<AdapterHandle>,
    place: &mut dyn FnMut(&str, LayerMut<'_>, FileAdapter),
) -> Result<()> {
    for Part {
        id,
        role,
        lora_prefix,
        lora_names,
        layers,
        ..
    } in parts.iter_mut()
    {
        let mut visit = |name: &str, layer: LayerMut<'_>| -> Result<()> {
            let Some(tensors) = found.remove(&(*id, name.to_owned())) else {
                return Ok(());
            };
            let weight = layer.weight().clone();
            let site = Site {
                name: saved_name(*lora_names, *role, lora_prefix, name),
                names: *lora_names,
                weight: &weight,
                handle,
            };
            let failed = |reason: String| {
                let origin = file
                    .origin()
                    .map_or_else(String::new, |origin| format!("; it was made for {origin}"));
                EngineError::WeightsFile {
                    path: file.path.clone(),
                    reason: format!("layer `{name}`: {reason}{origin}"),
                }
            };
            let adapter = match &layer {
                LayerMut::Norm(norm) => tensors
                    .norm_adapter(site, norm.own_bias().is_some())
                    .map(FileAdapter::Norm),
                LayerMut::Embedding(_) => tensors.embedding_adapter(site).map(FileAdapter::Layer),
                LayerMut::Linear(_) | LayerMut::Conv2d(_) | LayerMut::Conv1d(_) | LayerMut::Conv3d(_) => {
                    tensors.adapter(site).map(FileAdapter::Layer)
                }
            };
            place(name, layer, adapter.map_err(failed)?);
            Ok(())
        };
        layers.visit_layers(&mut visit)?;
        layers.visit_embeddings(&mut visit)?;
        layers.visit_norms(&mut visit)?;
    }
    Ok(())
}

/// The first unknown name, if a transformer gets none of the file's layers and they are not all of text encoders: families
/// share those, so that they may match those of another family.
fn without_transformer<'a>(parts: &[Part<'_>], found: &FileLayers, unknown: &'a [String]) -> Option<&'a String> {
    let mut transformers = parts
        .iter()
        .filter(|part| part.role.predicts() && part.lora_names == AdapterNames::Peft);
    transformers.find(|part| !found.keys().any(|(id, _)| *id == part.id))?;
    unknown.iter().find(|name| !is_of_text(name))
}

/// Whether all layers of a LoRA file are of text encoders, by their names.
///
/// # Errors
/// When the file is damaged or not a LoRA.
pub fn is_text_lora(path: &Path) -> Result<bool> {
    AdapterFile::open_layout(path).map(|file| has_text_layers_only(&file))
}

fn has_text_layers_only(file: &AdapterFile) -> bool {
    file.modules.iter().all(|module| is_of_text(&module.stem))
}

/// Whether a name in a LoRA file is one of a text encoder.
#[must_use]
pub fn is_of_text(name: &str) -> bool {
    name.starts_with("lora_te") || name.starts_with("text_encoder")
}

/// Indexes all layers of the models by name.
pub(super) fn index_layers(parts: &mut [Part<'_>]) -> Result<LayerIndex> {
    let mut index = LayerIndex::default();
    for part in parts.iter_mut() {
        let mut named = Vec::new();
        let mut name_layer = |name: &str, layer: LayerMut<'_>| {
            named.push((name.to_owned(), layer.weight().dims().first().copied().unwrap_or(0)));
            Ok(())
        };
        part.layers.visit_layers(&mut name_layer)?;
        part.layers.visit_embeddings(&mut name_layer)?;
        index.add(part, &named);
        let mut norms = Vec::new();
        part.layers.visit_norms(&mut |name, norm| {
            norms.push((name.to_owned(), norm.weight().dims().first().copied().unwrap_or(0)));
            Ok(())
        })?;
        index.add_norms(part.id, &norms);
    }
    Ok(index)
}

/// Adds an adapter to a layer.
pub(super) fn attach_adapter(layer: LayerMut<'_>, adapter: Arc<dyn LayerAdapter>) {
    match layer {
        LayerMut::Linear(l) => l.adapters.push(adapter),
        LayerMut::Conv2d(c) => c.adapters.push(adapter),
        LayerMut::Conv1d(c) => c.adapters.push(adapter),
        LayerMut::Conv3d(c) => c.adapters.push(adapter),
        LayerMut::Embedding(e) => e.adapters.push(adapter),
        // Norms have adapters of their own (`NormAdapter`).
        LayerMut::Norm(_) => {}
    }
}
