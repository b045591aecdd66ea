//! Converts adapter files between the dialects of other programs (`aitk convert`).
//!
//! Layers are matched by the names and shapes of a model's files, whose weights are not read. Where a dialect has no alpha, the scale
//! alpha / rank is multiplied into `up`, which is exact if it is a power of two. Layers that the original release joins (q, k and v) are
//! joined or split.

mod dialect;
mod join;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

pub use dialect::Dialect;

use super::adapter_file::{AdapterFile, FileLayers};
use super::dora;
use super::file_layer::{FileLayer, Site};
use super::handle::AdapterHandle;
use super::load::{check_fits, is_of_text};
use super::lora::LoraTensors;
use super::names::{LayerIndex, LayerKey, NamedLayers};
use super::save::is_finite;
use super::whole_layer::WHOLE_LAYER;
use crate::error::{EngineError, Result};
use crate::families::{self, AdapterNames, LoadOptions, LoadedParts, SelectedParts};
use crate::svd::Svd;
use crate::weights::{Index, Weight};
use aitk_common::job::arch::ArchName;
use aitk_common::job::dtype::DType as SaveDType;
use aitk_common::model_files::{self, Inventory, ModelFileKind};
use candle_core::{DType, Device, Tensor};
use dialect::{NamedLayer, PartLayers};
use join::{join, scale};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// What a file is converted to.
#[derive(Clone, Copy, Debug)]
pub struct Conversion {
    /// The names of layers and tensors.
    pub dialect: Dialect,
    /// The number format; `None`: that of the file.
    pub dtype: Option<SaveDType>,
    /// The highest rank of a layer of the model: layers of a higher one, and of other types than LoRA, become LoRAs of this rank, by
    /// singular values. A layer of the file that joins several of them (q, k and v; in FLUX.1 the MLP too) has the sum of their ranks,
    /// because they have different `down` matrices.
    pub rank: Option<usize>,
}

/// A converted file.
#[derive(Debug)]
pub struct ConvertedAdapter {
    /// Its tensors, on the CPU.
    pub tensors: BTreeMap<String, Tensor>,
    /// The metadata of the file.
    pub metadata: BTreeMap<String, String>,
    /// The number of layers in the new file.
    pub layers: usize,
    /// Names in the file that match no layer of the model. They are left out.
    pub unknown: Vec<String>,
    /// The number of layers whose difference of a bias is left out, since a LoRA has none.
    pub lost_biases: usize,
    /// The number format of the new file.
    pub dtype: DType,
}

/// Converts the adapter file at `path` for the model at `model`.
///
/// # Errors
/// When a file is damaged, the adapter does not fit the model, or the dialect has no form for it.
pub fn convert_lora(path: &Path, model: &Path, conversion: Conversion) -> Result<ConvertedAdapter> {
    let file = AdapterFile::open(path)?;
    let arch = arch_of(model)?;
    let selected = SelectedParts {
        denoiser: true,
        text_encoders: true,
    };
    let options = LoadOptions {
        loaded: LoadedParts::Nothing,
        ..LoadOptions::cpu()
    };
    let mut adapted = families::load_adapted(model, arch, selected, &options)?;
    let mut parts = Vec::new();
    let mut index = LayerIndex::default();
    let mut weights = BTreeMap::new();
    let missing = adapted.missing().to_vec();
    let mut parts_of_model = adapted.parts();
    for part in &mut parts_of_model {
        let (id, mut layers) = (part.id, Vec::new());
        part.layers.visit_layers(&mut |name, layer| {
            let weight = layer.weight().clone();
            layers.push((name.to_owned(), weight.dims().first().copied().unwrap_or(0)));
            weights.insert((id, name.to_owned()), weight);
            Ok(())
        })?;
        index.add(part, &layers);
        parts.push(PartLayers::of(part, layers));
    }
    refuse_norms(&file.path)?;
    let (found, unknown) = file.resolve(&index)?;
    // A file of another family has such names too: `check_fits` says what it was made for.
    let may_fit = !found.is_empty() || file.modules.iter().all(|module| is_of_text(&module.stem));
    let of_text = unknown.iter().find(|name| is_of_text(name));
    if let (Some(name), true) = (of_text, may_fit && !missing.is_empty()) {
        return Err(EngineError::bad_input(format!(
            "{} has layers of text encoders, such as `{name}`, and {} has no {}: give a model with it, such as the base model, as a diffusers \
             folder or as one file",
            file.path.display(),
            model.display(),
            missing.join(" and no ")
        )));
    }
    check_fits(&parts_of_model, &file, &found, &unknown)?;
    let file_error = |reason: String| EngineError::WeightsFile {
        path: file.path.clone(),
        reason,
    };
    let dtype = match conversion.dtype {
        Some(SaveDType::F32) => DType::F32,
        Some(SaveDType::F16) => DType::F16,
        Some(SaveDType::BF16) => DType::BF16,
        Some(SaveDType::F8) => return Err(EngineError::bad_input("adapters are not saved in float8: use float16")),
        None => stored_dtype(&Index::open(&file.path)?),
    };
    let mut converter = Converter {
        conversion,
        dtype,
        weights,
        tensors: BTreeMap::new(),
        layers: 0,
        resized: 0,
        lost_biases: 0,
    };
    for part in &parts {
        converter.add_part(part, arch, &found).map_err(file_error)?;
    }
    let mut metadata = file.metadata;
    // The alphas that it has are in the tensors now.
    metadata.retain(|key, _| key != "lora_adapter_metadata" && !key.starts_with("sshs_"));
    if converter.resized > 0 {
        // As sd-scripts writes it where layers have ranks of their own.
        for key in ["ss_network_dim", "ss_network_alpha"] {
            if let Some(value) = metadata.get_mut(key) {
                "Dynamic".clone_into(value);
            }
        }
    }
    Ok(ConvertedAdapter {
        tensors: converter.tensors,
        metadata,
        layers: converter.layers,
        lost_biases: converter.lost_biases,
        unknown,
        dtype,
    })
}

/// Refuses a file with differences of norms (`network.all_layers`, `train_norm`), which would be lost.
fn refuse_norms(path: &Path) -> Result<()> {
    let index = Index::open(path)?;
    let is_of_norm =
        |(name, shape): &(&str, &[usize])| (name.ends_with(".diff") && shape.len() == 1) || name.ends_with(".w_norm");
    let mut norms = index.tensors().filter(is_of_norm).map(|(name, _)| name);
    let Some(first) = norms.next() else { return Ok(()) };
    Err(EngineError::Unsupported(format!(
        "{}: it has the difference of a norm, `{}` ({} more), of `network.all_layers` or `train_norm`, which `aitk convert` does not convert: \
         use the file as it is, or train without these keys",
        path.display(),
        first.trim_end_matches(".diff").trim_end_matches(".w_norm"),
        norms.count()
    )))
}

/// The family of a model, by its files.
fn arch_of(model: &Path) -> Result<ArchName> {
    let identity = model_files::identify(&Inventory::open(model));
    let arch = match &identity {
        ModelFileKind::Model { family, .. } => family.arch,
        _ => None,
    };
    arch.ok_or_else(|| match &identity {
        ModelFileKind::Model { family, evidence, .. } => EngineError::Unsupported(format!(
            "{} is {family} ({evidence}), which this release does not run",
            model.display()
        )),
        other => match model_files::check_supported(&model.display().to_string(), ArchName::Sd1, other) {
            Err(refusal) => EngineError::Unsupported(refusal.to_string()),
            Ok(()) => EngineError::bad_input(format!("{} is not a model", model.display())),
        },
    })
}

/// The format of the floats of a file: the one that all have, or float32.
fn stored_dtype(index: &Index) -> DType {
    // An alpha is one number, in any format.
    let matrices = index.tensors().filter(|(_, shape)| shape.iter().product::<usize>() > 1);
    let mut formats = matrices.map(|(name, _)| index.float_dtype(name));
    match formats.next().flatten() {
        Some(first) if formats.all(|format| format == Some(first)) => first,
        _ => DType::F32,
    }
}

/// The new file so far.
struct Converter {
    conversion: Conversion,
    dtype: DType,
    /// The model's weights: their shapes alone.
    weights: BTreeMap<LayerKey, Weight>,
    tensors: BTreeMap<String, Tensor>,
    layers: usize,
    /// The number of layers that got another rank or type.
    resized: usize,
    lost_biases: usize,
}

impl Converter {
    /// Adds the layers of a part. An error is a sentence.
    fn add_part(&mut self, part: &PartLayers, arch: ArchName, found: &FileLayers) -> std::result::Result<(), String> {
        let rows: BTreeMap<&str, usize> = part.layers.iter().map(|(path, rows)| (path.as_str(), *rows)).collect();
        for named in part.named(self.conversion.dialect, arch) {
            let keys = named.paths.iter().map(|path| (part.id, path.clone()));
            let layers: Vec<Option<Arc<dyn FileLayer>>> = keys.clone().map(|key| found.get(&key).cloned()).collect();
            if layers.iter().all(Option::is_none) {
                continue;
            }
            let failed = |error: candle_core::Error| format!("layer `{}`: {error}", named.stem);
            let mut resized = Vec::with_capacity(layers.len());
            for (key, layer) in keys.zip(layers) {
                resized.push(layer.map(|layer| self.resize(&key, layer)).transpose()?);
            }
            let stem = named.stem.as_str();
            if let ([Some(layer)], false) = (resized.as_slice(), named.halves_swapped) {
                let key = named.paths.first().map(|path| (part.id, path.clone()));
                let weight = key.and_then(|key| self.weights.get(&key));
                let magnitude = MagnitudeShape {
                    of_inputs: weight.is_some_and(|weight| dora::has_magnitude_of_inputs(&**layer, weight.dims())),
                    axes: weight.map_or(2, |weight| weight.dims().len()),
                };
                self.add_layer(part, stem, &**layer, magnitude)?;
                continue;
            }
            let sizes = named
                .paths
                .iter()
                .map(|path| rows.get(path.as_str()).copied().unwrap_or(0));
            let parts: Vec<_> = resized.into_iter().zip(sizes).collect();
            let joined = join_layers(&parts, named.halves_swapped).map_err(failed)?;
            let joined = joined.ok_or_else(|| self.cannot_join(&named, &parts))?;
            let magnitude = MagnitudeShape {
                of_inputs: false,
                axes: 2,
            };
            self.add_layer(part, stem, &*joined, magnitude)?;
        }
        Ok(())
    }

    /// Why the layers of a joined layer cannot be joined.
    fn cannot_join(&self, named: &NamedLayer, parts: &[LayerAndRows]) -> String {
        let found = parts
            .iter()
            .zip(&named.paths)
            .filter_map(|((layer, _), path)| Some((layer.as_ref()?, path)));
        let other = found.into_iter().find(|(layer, _)| layer.kind() != "LoRA");
        let (kind, path) = other.map_or(("LoRA", named.stem.as_str()), |(layer, path)| (layer.kind(), path));
        let dense = other.is_some_and(|(layer, _)| has_dense_change(&**layer));
        format!(
            "layer `{path}` has a {kind}, which cannot be joined to `{}` of the original release, as {} names it: choose another dialect{}",
            named.stem,
            self.conversion.dialect.name(),
            if dense {
                ", or make LoRAs of it with `--rank`"
            } else {
                ""
            }
        )
    }

    /// The layer if it fits the model, or a LoRA of the highest rank that approximates it best.
    fn resize(&mut self, key: &LayerKey, layer: Arc<dyn FileLayer>) -> std::result::Result<Arc<dyn FileLayer>, String> {
        let failed = |error: candle_core::Error| format!("layer `{}`: {error}", key.1);
        let Some(weight) = self.weights.get(key) else {
            return Err(format!("layer `{}` is not in the model", key.1));
        };
        if layer.kind() == WHOLE_LAYER {
            return Err(format!(
                "layer `{}` was trained itself (`full_train_in_out`), for which other programs have no name",
                key.1
            ));
        }
        let site = Site {
            name: key.1.clone(),
            names: AdapterNames::Peft,
            weight,
            handle: &AdapterHandle::new(1.0),
        };
        let adapter = layer
            .adapter(site)
            .map_err(|reason| format!("layer `{}`: {reason}", key.1))?;
        let Some(rank) = self.conversion.rank else {
            return Ok(layer);
        };
        let lora = layer.as_any().downcast_ref::<LoraTensors>();
        if lora.is_some_and(|lora| lora.rank() <= rank && lora.mid.is_none()) {
            return Ok(layer);
        }
        if !has_dense_change(&*layer) {
            return Err(format!(
                "layer `{}` has a {}, whose change depends on the weights of the model: it cannot be converted to a LoRA",
                key.1,
                layer.kind()
            ));
        }
        let tensors = layer.tensors()?;
        self.lost_biases += usize::from(tensors.iter().any(|(suffix, _)| *suffix == "diff_b"));
        let dims = weight.dims();
        let change = adapter
            .change(weight)
            .and_then(|change| change.flatten_from(1))
            .map_err(failed)?;
        let factors = Svd::largest(&change, rank).and_then(|svd| svd.factors(rank));
        let (up, down) = factors.map_err(|error| format!("layer `{}`: {error}", key.1))?;
        self.resized += 1;
        let found = down.dims()[0];
        let ones = vec![1; dims.len() - 2];
        let up = up.reshape([&[dims[0], found], &ones[..]].concat()).map_err(failed)?;
        let down = down.reshape([&[found], &dims[1..]].concat()).map_err(failed)?;
        Ok(Arc::new(LoraTensors {
            down,
            up,
            mid: None,
            alpha: Some(found as f64),
            scalar: 1.0,
        }))
    }

    /// Adds the tensors of a layer. `shape`: that of its magnitude, if it has one.
    fn add_layer(
        &mut self,
        part: &PartLayers,
        stem: &str,
        layer: &dyn FileLayer,
        shape: MagnitudeShape,
    ) -> std::result::Result<(), String> {
        let dialect = self.conversion.dialect;
        let failed = |error: candle_core::Error| format!("layer `{stem}`: {error}");
        let peft = part.has_peft_names(dialect);
        let is_read = layer.lora().is_some() || dialect != Dialect::Diffusers;
        if !is_read {
            let (kind, hint) = match layer.kind() {
                "DoRA" => ("DoRA whose change is no LoRA", ""),
                kind if has_dense_change(layer) => (kind, ": make a LoRA of it with `--rank`"),
                kind => (kind, ""),
            };
            return Err(format!(
                "layer `{stem}` has a {kind}, which diffusers cannot load{hint}"
            ));
        }
        let mut tensors = Vec::new();
        for (suffix, tensor) in layer.tensors().map_err(|reason| format!("layer `{stem}`: {reason}"))? {
            tensors.push((suffix.to_owned(), tensor));
        }
        if let Some(lora) = layer.lora() {
            let scale = scale(lora);
            if peft && lora.mid.is_some() {
                return Err(format!(
                    "layer `{stem}` has a LoCon with a third matrix (`lora_mid`), which {} has no name for: make a LoRA of it with `--rank`",
                    dialect.name()
                ));
            }
            // ComfyUI reads a third matrix beside these names of sd-scripts only.
            let has_new_names = peft || (dialect == Dialect::ComfyUi && lora.mid.is_none());
            let names = if has_new_names {
                AdapterNames::Peft
            } else {
                AdapterNames::Kohya
            };
            let [down, up] = names.matrices();
            let factor = if peft { scale } else { lora.scalar };
            let scaled = match factor == 1.0 {
                true => lora.up.clone(),
                false => (&lora.up * factor).map_err(failed)?,
            };
            tensors.push((down.to_owned(), lora.down.clone()));
            tensors.push((up.to_owned(), scaled));
            if let Some(mid) = &lora.mid {
                tensors.push(("lora_mid.weight".to_owned(), mid.clone()));
            }
            if !peft {
                let alpha = lora.alpha.unwrap_or(lora.rank() as f64);
                tensors.push((
                    "alpha".to_owned(),
                    Tensor::new(alpha as f32, &Device::Cpu).map_err(failed)?,
                ));
            }
        }
        for (suffix, tensor) in tensors {
            let (suffix, tensor) = match suffix.as_str() {
                "lora_magnitude_vector" | "dora_scale" => {
                    // peft has no name for a magnitude beside other tensors than those of a LoRA: they keep LyCORIS' name, as trainings write
                    // them, and its formula.
                    let peft = peft && layer.lora().is_some();
                    if peft && shape.of_inputs {
                        return Err(format!(
                            "layer `{stem}` has a DoRA with a magnitude for each input, which {} has no name for",
                            dialect.name()
                        ));
                    }
                    match shape.of_inputs {
                        true => ("dora_scale".to_owned(), tensor),
                        false => magnitude(peft, layer, shape.axes, tensor).map_err(failed)?,
                    }
                }
                _ => (suffix, tensor),
            };
            // An alpha that the number format would round stays in float32.
            let saved = tensor.to_dtype(self.dtype).map_err(failed)?;
            let is_number = tensor.elem_count() == 1;
            let exact = || -> candle_core::Result<bool> {
                let [a, b] = [saved.to_dtype(DType::F32)?, tensor.to_dtype(DType::F32)?];
                Ok(a.flatten_all()?.to_vec1::<f32>()? == b.flatten_all()?.to_vec1::<f32>()?)
            };
            let saved = match is_number && !exact().map_err(failed)? {
                true => tensor.clone(),
                false => saved,
            };
            let name = format!("{stem}.{suffix}");
            if !is_finite(&saved).map_err(failed)? {
                return Err(match is_finite(&tensor).map_err(failed)? {
                    true => format!(
                        "`{name}` has numbers that {} cannot hold: choose another `--dtype`",
                        self.dtype.as_str()
                    ),
                    false => format!("layer `{stem}` has numbers that are not finite: the file is damaged"),
                });
            }
            self.tensors.insert(name, saved.contiguous().map_err(failed)?);
        }
        self.layers += 1;
        Ok(())
    }
}

/// A layer of the model, if the file has it, and its number of rows.
type LayerAndRows = (Option<Arc<dyn FileLayer>>, usize);

/// What the magnitude of a layer is of.
#[derive(Clone, Copy)]
struct MagnitudeShape {
    /// It has a number for each input of the layer, and not for each output.
    of_inputs: bool,
    /// The number of dimensions of the layer's weight.
    axes: usize,
}

/// The adapter of a layer that consists of these, or has the halves of the rows of one in the other order. `None`: they cannot be joined.
fn join_layers(parts: &[LayerAndRows], halves_swapped: bool) -> candle_core::Result<Option<Arc<dyn FileLayer>>> {
    let present: Vec<&dyn FileLayer> = parts.iter().filter_map(|(layer, _)| layer.as_deref()).collect();
    let is_lora = present.iter().all(|layer| layer.kind() == "LoRA");
    // A DoRA has the norm of each row, also of those without a change.
    let is_dora = present.len() == parts.len() && present.iter().all(|layer| layer.kind() == "DoRA");
    if !is_lora && !is_dora {
        return Ok(None);
    }
    let mut loras = Vec::with_capacity(parts.len());
    for (layer, rows) in parts {
        match layer.as_ref().map(|layer| layer.lora()) {
            Some(None) => return Ok(None),
            Some(Some(lora)) if lora.mid.is_some() => return Ok(None),
            found => loras.push((found.flatten().cloned(), *rows)),
        }
    }
    let Some(lora) = join(&loras)? else {
        return Ok(None);
    };
    let whole: Option<Arc<dyn FileLayer>> = match is_lora {
        true => Some(Arc::new(lora)),
        false => dora::joined(&present, lora)?,
    };
    match (whole, halves_swapped) {
        (Some(whole), true) => {
            let swapped = NamedLayers {
                part: "",
                layers: vec![(String::new(), whole.outputs())],
                halves_swapped,
            };
            Ok(whole.split(&swapped, &|_| None)?.pop())
        }
        (whole, _) => Ok(whole),
    }
}

/// Whether the change of a layer does not depend on the model's weights.
fn has_dense_change(layer: &dyn FileLayer) -> bool {
    !matches!(layer.kind(), "DoRA" | "OFT" | "BOFT")
}

/// A magnitude for each output, with the name and the shape that the dialect has for it. `axes`: the number of dimensions of the weight.
fn magnitude(peft: bool, layer: &dyn FileLayer, axes: usize, tensor: Tensor) -> candle_core::Result<(String, Tensor)> {
    let axes = layer.lora().map_or(axes, |lora| lora.down.rank());
    let flat = tensor.flatten_all()?;
    let count = flat.elem_count();
    if peft {
        // peft has the axis of the outputs of a convolution second; transformers reads the name with this ending alone.
        let tensor = match axes {
            2 => flat,
            _ => flat.reshape([&[1, count][..], &vec![1; axes - 2]].concat())?,
        };
        return Ok(("lora_magnitude_vector.weight".to_owned(), tensor));
    }
    let tensor = flat.reshape([&[count][..], &vec![1; axes - 1]].concat())?;
    Ok(("dora_scale".to_owned(), tensor))
}
