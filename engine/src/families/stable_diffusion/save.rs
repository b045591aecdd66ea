//! Saves a complete model, as a single file in the LDM layout or as a diffusers folder.
//!
//! Trained tensors are passed in; all others are read from the source of the model, one at a time, so that at most one
//! of them is in memory.

use super::ldm::{LdmNames, SavedTensor};
use super::source::{Component, SdSource, prefixed_name};
use super::variant::{ComponentSpec, TextEncoderSpec, TextLayout};
use crate::error::{EngineError, Result};
use crate::families::model::{ModelWriter, SaveOptions};
use crate::families::saved::{
    check_save_dtype, config_in_dtype, parse_config, pretty_json, write_metadata, write_text_file,
};
use crate::models::clip::ClipTokenizer;
use crate::models::config;
use crate::weights::SafetensorsLayout;
use aitk_common::fsutil::{self, regular};
use aitk_common::job::arch::ArchName;
use aitk_common::job::limits::MAX_TEXT_FILE_BYTES;
use candle_core::{Device, Tensor};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Metadata of a single file: what the model predicts (`v`, `epsilon`), as Stability's ModelSpec has it.
pub(super) const PREDICTION_TYPE: &str = "modelspec.prediction_type";
/// Metadata of a single file: its noise schedule ends without any signal, as sd-scripts writes it.
pub(super) const ZERO_SNR: &str = "ss_zero_terminal_snr";

/// A complete model that can be saved.
#[derive(Debug)]
pub struct FullModel<'a> {
    source: &'a SdSource,
    /// The trained tensors, by component and the names of the source.
    trained: BTreeMap<(&'static str, String), &'a Tensor>,
    options: SaveOptions,
}

impl SdSource {
    /// Checks that the model can be saved as a single file. Call this before training.
    ///
    /// # Errors
    /// When the LDM layout has no names for its tensors.
    pub fn check_single_file(&self) -> Result<()> {
        self.ldm_names().map(drop)
    }

    fn ldm_names(&self) -> Result<LdmNames> {
        let index = |folder| self.component(folder).map(|component| &component.index);
        let names = index("unet")
            .zip(index("vae"))
            .and_then(|(unet, vae)| LdmNames::new(unet, vae));
        names.ok_or_else(|| {
            EngineError::Unsupported(format!(
                "{}: the U-Net's blocks have different numbers of layers, for which single files have no names, so the model \
                 cannot be saved as one file: set `save.save_format: diffusers`",
                self.path().display()
            ))
        })
    }
}

impl<'a> FullModel<'a> {
    /// `trained` has tensors of the U-Net (`unet.` and diffusers' name) and of text encoders (`text_encoder.` and
    /// transformers' name, with or without `text_model.`), on any device. All other tensors are those of `source`.
    ///
    /// # Errors
    /// When the model has no tensor with a trained tensor's name and shape, or the dtype is not f32, f16 or bf16.
    pub fn new(source: &'a SdSource, trained: &'a BTreeMap<String, Tensor>, options: SaveOptions) -> Result<Self> {
        check_save_dtype(options.dtype)?;
        let mut by_component = BTreeMap::new();
        for (name, tensor) in trained {
            let unknown = || EngineError::Internal(format!("`{name}` was trained, but the model has no such tensor"));
            let (folder, inner) = name.split_once('.').ok_or_else(unknown)?;
            let component = source
                .component(folder)
                .filter(|component| component.spec != ComponentSpec::VAE);
            let component = component.ok_or_else(unknown)?;
            let inner = match source.variant.is_text_encoder(folder) {
                true => prefixed_name(inner),
                false => inner.to_owned(),
            };
            let shape = component.index.shape(&inner).ok_or_else(unknown)?;
            if shape != tensor.dims() {
                return Err(EngineError::Internal(format!(
                    "`{name}` was trained with shape {:?}, but the model has {shape:?}",
                    tensor.dims()
                )));
            }
            if by_component.insert((component.spec.folder, inner), tensor).is_some() {
                return Err(EngineError::Internal(format!("`{name}` was trained under two names")));
            }
        }
        Ok(Self {
            source,
            trained: by_component,
            options,
        })
    }

    /// The metadata of a single file, which has no config, about what the model predicts. Empty for a Stable Diffusion 1.x that
    /// predicts the noise, which every program assumes.
    fn prediction_metadata(&self) -> Result<BTreeMap<String, String>> {
        let scheduler: Value = config::parse_json(&self.scheduler()?).unwrap_or_default();
        let is_velocity = scheduler["prediction_type"] == "v_prediction";
        let mut metadata = BTreeMap::new();
        if is_velocity || self.source.variant.family.arch() != ArchName::Sd1 {
            let prediction = if is_velocity { "v" } else { "epsilon" };
            metadata.insert(PREDICTION_TYPE.to_owned(), prediction.to_owned());
        }
        if scheduler["rescale_betas_zero_snr"] == true {
            metadata.insert(ZERO_SNR.to_owned(), "True".to_owned());
        }
        Ok(metadata)
    }

    /// The layout of the single file, and what each of its tensors is made from.
    fn single_file_layout(&self) -> Result<(SafetensorsLayout, BTreeMap<String, FileEntry<'a>>)> {
        let names = self.source.ldm_names()?;
        let mut metadata = self.options.metadata.clone();
        metadata.extend(self.prediction_metadata()?);
        let mut layout = SafetensorsLayout::new(metadata);
        let mut entries = BTreeMap::new();
        for component in self.source.components() {
            let folder = component.spec.folder;
            let text = self
                .source
                .variant
                .text_encoders
                .iter()
                .find(|spec| spec.folder == folder);
            for (inner, shape) in component.index.tensors() {
                let whole = || SavedTensor::Whole(inner.to_owned());
                let entry = match (text, folder) {
                    (Some(spec), _) if names.is_saved_with_queries(spec, inner) => continue,
                    (Some(spec), _) => {
                        let (name, from) = names.text_encoder(spec, inner).unzip();
                        let shape = from.as_ref().map(|from| saved_shape(from, shape));
                        name.zip(shape).zip(from)
                    }
                    (None, "unet") => names.unet(inner).map(|name| ((name, shape.to_vec()), whole())),
                    (None, _) => names.vae(inner, shape).map(|named| (named, whole())),
                };
                let ((name, shape), from) = entry
                    .ok_or_else(|| EngineError::Internal(format!("`{folder}.{inner}` has no name in a single file")))?;
                if !layout.add(name.clone(), self.options.dtype, shape.clone()) {
                    return Err(EngineError::Internal(format!("two tensors would be called `{name}`")));
                }
                entries.insert(name, FileEntry { component, from, shape });
            }
        }
        Ok((layout, entries))
    }

    fn file_tensor(&self, entry: &FileEntry<'_>) -> Result<Tensor> {
        let tensor = match &entry.from {
            SavedTensor::Whole(name) => self.tensor(entry.component, name)?,
            SavedTensor::Transposed(name) => self.tensor(entry.component, name)?.t()?.contiguous()?,
            SavedTensor::Concatenated(names) => {
                let parts = names.iter().map(|name| self.tensor(entry.component, name));
                Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0)?
            }
        };
        Ok(tensor.reshape(entry.shape.as_slice())?)
    }

    /// The tensor to save: the trained one, else that of the source.
    fn tensor(&self, component: &Component, name: &str) -> Result<Tensor> {
        let dtype = self.options.dtype;
        match self.trained.get(&(component.spec.folder, name.to_owned())) {
            // Converted on the CPU, so that the bytes do not depend on the device.
            Some(trained) => Ok(trained.detach().to_device(&Device::Cpu)?.to_dtype(dtype)?),
            None => component.index.read(name, dtype, &Device::Cpu),
        }
    }

    fn scheduler(&self) -> Result<String> {
        let text = self.source.scheduler();
        let mut value = parse_config(text, self.source.path())?;
        let key = "prediction_type";
        let Some(keys) = value.as_object_mut().filter(|_| self.options.v_prediction) else {
            return Ok(text.to_owned());
        };
        keys.insert(key.into(), "v_prediction".into());
        Ok(pretty_json(&value))
    }

    /// Writes the tokenizer of a text encoder: that of the source, or OpenAI's if the source has none.
    fn write_tokenizer(&self, spec: &TextEncoderSpec, from: Option<&Path>, folder: &Path) -> Result<()> {
        let Some(from) = from else {
            let pad = match spec.layout {
                TextLayout::HuggingFace(_) => None,
                TextLayout::OpenClip(_) => Some("!"),
            };
            for (name, text) in ClipTokenizer::openai_files(pad) {
                write_text_file(&folder.join(name), &text)?;
            }
            return Ok(());
        };
        let entries = std::fs::read_dir(from).map_err(|e| EngineError::io(from, e))?;
        for entry in entries {
            let path = entry.map_err(|e| EngineError::io(from, e))?.path();
            let is_small = matches!(path.extension().and_then(|e| e.to_str()), Some("json" | "txt"));
            let Some(name) = path.file_name().filter(|_| is_small && path.is_file()) else {
                continue;
            };
            let bytes = regular::read(&path, MAX_TEXT_FILE_BYTES).map_err(|e| EngineError::io(&path, e))?;
            fsutil::write_atomic(&folder.join(name), |out| out.write_all(&bytes))?;
        }
        Ok(())
    }
}

impl ModelWriter for FullModel<'_> {
    fn write_file(&self, out: &mut dyn Write) -> io::Result<()> {
        let (layout, entries) = self.single_file_layout().map_err(io::Error::other)?;
        layout.write(out, |name| {
            let entry = entries.get(name);
            let entry =
                entry.ok_or_else(|| EngineError::Internal(format!("`{name}` is not in the layout of the file")))?;
            self.file_tensor(entry)
        })
    }

    fn write_folder(&self, folder: &Path) -> Result<()> {
        let subfolder = |name: &str| -> Result<PathBuf> {
            let inner = folder.join(name);
            fsutil::create_dir_all(&inner)?;
            Ok(inner)
        };
        for component in self.source.components() {
            let inner = subfolder(component.spec.folder)?;
            let config = config_in_dtype(&component.config, self.options.dtype, self.source.path())?;
            write_text_file(&inner.join("config.json"), &config)?;
            // transformers refuses files without this key.
            let mut layout = SafetensorsLayout::new(BTreeMap::from([("format".to_owned(), "pt".to_owned())]));
            for (name, shape) in component.index.tensors() {
                layout.add(name, self.options.dtype, shape);
            }
            fsutil::write_atomic(&inner.join(component.spec.file), |out| {
                layout.write(out, |name| self.tensor(component, name))
            })?;
        }
        let tokenizers = self.source.variant.text_encoders.iter().zip(self.source.tokenizers());
        for (spec, from) in tokenizers {
            self.write_tokenizer(spec, from.as_deref(), &subfolder(spec.tokenizer)?)?;
        }
        write_text_file(
            &subfolder("scheduler")?.join("scheduler_config.json"),
            &self.scheduler()?,
        )?;
        write_metadata(folder, &self.options.metadata)?;
        // The index comes last: a folder without it is incomplete.
        write_text_file(
            &folder.join("model_index.json"),
            &pretty_json(&self.source.model_index()),
        )
    }
}

/// A tensor of a single file.
struct FileEntry<'a> {
    component: &'a Component,
    /// What it is made from, by the names of the component.
    from: SavedTensor,
    /// Its shape in the file.
    shape: Vec<usize>,
}

/// The shape in a single file of a text encoder's tensor. `shape`: that of the tensor that it is named after.
pub(super) fn saved_shape(from: &SavedTensor, shape: &[usize]) -> Vec<usize> {
    let mut shape = shape.to_vec();
    match from {
        SavedTensor::Whole(_) => {}
        SavedTensor::Transposed(_) => shape.reverse(),
        SavedTensor::Concatenated(names) => {
            if let Some(rows) = shape.first_mut() {
                *rows *= names.len();
            }
        }
    }
    shape
}
