//! Saves a complete model, as a single file in the LDM layout or as a diffusers folder.
//!
//! Trained tensors are passed in; all others are read from the source of the model, one at a time, so that at most one
//! of them is in memory.

use super::ldm::LdmNames;
use super::metadata_yaml;
use super::source::{ComponentKind, SdSource, prefixed_name, pretty_json};
use crate::error::{EngineError, Result};
use crate::models::clip::ClipTokenizer;
use crate::models::config;
use crate::weights::SafetensorsLayout;
use aitk_common::fsutil::{self, regular};
use aitk_common::job::limits::MAX_TEXT_FILE_BYTES;
use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The file with the metadata of a folder, named as in ai-toolkit.
pub const META_FILE: &str = "aitk_meta.yaml";

/// Features of the text encoder of Stable Diffusion 2.x.
const SD2_TEXT_FEATURES: usize = 1024;

/// A complete model that can be saved.
#[derive(Debug)]
pub struct FullModel<'a> {
    source: &'a SdSource,
    /// The trained tensors, by the names of the source.
    trained: BTreeMap<(ComponentKind, String), &'a Tensor>,
    dtype: DType,
    metadata: BTreeMap<String, String>,
    v_prediction: bool,
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
        let index = |component_kind| &self.component(component_kind).index;
        let unsupported = |reason: &str| {
            EngineError::Unsupported(format!(
                "{}: {reason}, so the model cannot be saved as one file: set `save.save_format: diffusers`",
                self.path().display()
            ))
        };
        let norm = index(ComponentKind::TextEncoder).shape("text_model.final_layer_norm.weight");
        if norm == Some(&[SD2_TEXT_FEATURES]) {
            return Err(unsupported(
                "Stable Diffusion 2.x has other names for its text encoder in a single file, which aitk does not write",
            ));
        }
        LdmNames::new(index(ComponentKind::Unet), index(ComponentKind::Vae)).ok_or_else(|| {
            unsupported("the U-Net's blocks have different numbers of layers, for which single files have no names")
        })
    }
}

impl<'a> FullModel<'a> {
    /// `trained` has tensors of the U-Net (`unet.` and diffusers' name) and of the text encoder (`text_encoder.` and
    /// transformers' name, with or without `text_model.`), on any device. All other tensors are those of `source`. All
    /// are saved as `dtype`: f32, f16 or bf16.
    ///
    /// # Errors
    /// When the model has no tensor with a trained tensor's name and shape, or `dtype` is not one of these.
    pub fn new(
        source: &'a SdSource,
        trained: &'a BTreeMap<String, Tensor>,
        dtype: DType,
        metadata: BTreeMap<String, String>,
    ) -> Result<Self> {
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(EngineError::Unsupported(format!(
                "a model is saved as float32, float16 or bfloat16, not as {dtype:?}"
            )));
        }
        let mut by_component = BTreeMap::new();
        for (name, tensor) in trained {
            let unknown = || EngineError::Internal(format!("`{name}` was trained, but the model has no such tensor"));
            let (component_kind, inner) = match name.split_once('.').ok_or_else(unknown)? {
                ("unet", inner) => (ComponentKind::Unet, inner.to_owned()),
                ("text_encoder", inner) => (ComponentKind::TextEncoder, prefixed_name(inner)),
                _ => return Err(unknown()),
            };
            let shape = source
                .component(component_kind)
                .index
                .shape(&inner)
                .ok_or_else(unknown)?;
            if shape != tensor.dims() {
                return Err(EngineError::Internal(format!(
                    "`{name}` was trained with shape {:?}, but the model has {shape:?}",
                    tensor.dims()
                )));
            }
            if by_component.insert((component_kind, inner), tensor).is_some() {
                return Err(EngineError::Internal(format!("`{name}` was trained under two names")));
            }
        }
        Ok(Self {
            source,
            trained: by_component,
            dtype,
            metadata,
            v_prediction: false,
        })
    }

    /// If `on`, the scheduler's config in a folder gets the prediction type `v_prediction`, whatever that of the source
    /// is.
    #[must_use]
    pub fn v_prediction(self, on: bool) -> Self {
        Self {
            v_prediction: on,
            ..self
        }
    }

    /// Writes a safetensors file in the LDM layout, with the metadata.
    ///
    /// # Errors
    /// The error of `out`; or an [`EngineError`] as [`io::Error::other`] when the LDM layout does not support the model
    /// ([`SdSource::check_single_file`]) or its files cannot be read. [`EngineError::io`] unwraps it.
    pub fn write_file(&self, out: &mut dyn Write) -> io::Result<()> {
        let (layout, entries) = self.single_file_layout().map_err(io::Error::other)?;
        layout.write(out, |name| {
            let entry = entries.get(name);
            let (component_kind, inner, shape) =
                entry.ok_or_else(|| EngineError::Internal(format!("`{name}` is not in the layout of the file")))?;
            Ok(self.tensor(*component_kind, inner)?.reshape(shape.as_slice())?)
        })
    }

    /// The layout of the file, and the tensor of each of its names.
    fn single_file_layout(&self) -> Result<(SafetensorsLayout, BTreeMap<String, FileEntry<'a>>)> {
        let names = self.source.ldm_names()?;
        let mut layout = SafetensorsLayout::new(self.metadata.clone());
        let mut entries = BTreeMap::new();
        for component_kind in ComponentKind::ALL {
            for (inner, shape) in self.source.component(component_kind).index.tensors() {
                let ldm = match component_kind {
                    ComponentKind::TextEncoder => Some((names.text_encoder(inner), shape.to_vec())),
                    ComponentKind::Unet => names.unet(inner).map(|name| (name, shape.to_vec())),
                    ComponentKind::Vae => names.vae(inner, shape),
                };
                let (name, shape) = ldm.ok_or_else(|| {
                    EngineError::Internal(format!(
                        "`{}.{inner}` has no name in a single file",
                        component_kind.folder()
                    ))
                })?;
                if !layout.add(name.clone(), self.dtype, shape.clone()) {
                    return Err(EngineError::Internal(format!("two tensors would be called `{name}`")));
                }
                entries.insert(name, (component_kind, inner, shape));
            }
        }
        Ok((layout, entries))
    }

    /// Writes a diffusers folder, into a folder that is empty or does not exist. This is not atomic: write to a
    /// temporary folder and rename it. Every file is synced.
    ///
    /// # Errors
    /// When a file cannot be written, or a file of the source cannot be read.
    pub fn write_folder(&self, folder: &Path) -> Result<()> {
        let subfolder = |name: &str| -> Result<PathBuf> {
            let inner = folder.join(name);
            fsutil::create_dir_all(&inner)?;
            Ok(inner)
        };
        for component_kind in ComponentKind::ALL {
            let component = self.source.component(component_kind);
            let inner = subfolder(component_kind.folder())?;
            write_text_file(&inner.join("config.json"), &self.config(&component.config)?)?;
            // transformers refuses files without this key.
            let mut layout = SafetensorsLayout::new(BTreeMap::from([("format".to_owned(), "pt".to_owned())]));
            for (name, shape) in component.index.tensors() {
                layout.add(name, self.dtype, shape);
            }
            fsutil::write_atomic(&inner.join(component_kind.file()), |out| {
                layout.write(out, |name| self.tensor(component_kind, name))
            })?;
        }
        self.write_tokenizer(&subfolder("tokenizer")?)?;
        write_text_file(
            &subfolder("scheduler")?.join("scheduler_config.json"),
            &self.scheduler()?,
        )?;
        write_text_file(&folder.join(META_FILE), &metadata_yaml::to_yaml(&self.metadata))?;
        // The index comes last: a folder without it is incomplete.
        write_text_file(
            &folder.join("model_index.json"),
            &pretty_json(&self.source.model_index()),
        )
    }

    /// The tensor to save: the trained one, else that of the source.
    fn tensor(&self, component_kind: ComponentKind, name: &str) -> Result<Tensor> {
        match self.trained.get(&(component_kind, name.to_owned())) {
            // Converted on the CPU, so that the bytes do not depend on the device.
            Some(trained) => Ok(trained.detach().to_device(&Device::Cpu)?.to_dtype(self.dtype)?),
            None => self
                .source
                .component(component_kind)
                .index
                .read(name, self.dtype, &Device::Cpu),
        }
    }

    /// The `config.json` for weights in `dtype` that are not quantised. Unchanged if the source's is already right.
    fn config(&self, text: &str) -> Result<String> {
        let mut value = self.parse_config(text)?;
        let mut changed = false;
        if let Some(keys) = value.as_object_mut() {
            changed |= keys.shift_remove("quantization_config").is_some();
            let dtype = match self.dtype {
                DType::F16 => "float16",
                DType::BF16 => "bfloat16",
                _ => "float32",
            };
            for key in ["dtype", "torch_dtype"] {
                if let Some(value) = keys.get_mut(key).filter(|value| *value != dtype) {
                    *value = dtype.into();
                    changed = true;
                }
            }
        }
        Ok(if changed { pretty_json(&value) } else { text.to_owned() })
    }

    fn scheduler(&self) -> Result<String> {
        let text = self.source.scheduler();
        let mut value = self.parse_config(text)?;
        let key = "prediction_type";
        let Some(keys) = value.as_object_mut().filter(|_| self.v_prediction) else {
            return Ok(text.to_owned());
        };
        keys.insert(key.into(), "v_prediction".into());
        Ok(pretty_json(&value))
    }

    fn parse_config(&self, text: &str) -> Result<Value> {
        config::parse_json(text).map_err(|e| {
            EngineError::model_config(
                self.source.path(),
                format!("a config of this model is not valid JSON: {e}"),
            )
        })
    }

    /// Writes the tokenizer of the source, or OpenAI's if the source has none.
    fn write_tokenizer(&self, folder: &Path) -> Result<()> {
        let Some(from) = self.source.tokenizer() else {
            for (name, text) in ClipTokenizer::openai_files() {
                write_text_file(&folder.join(name), &text)?;
            }
            return Ok(());
        };
        let entries = std::fs::read_dir(from).map_err(|e| EngineError::io(from, e))?;
        for entry in entries {
            let path = entry.map_err(|e| EngineError::io(from, e))?.path();
            let small = matches!(path.extension().and_then(|e| e.to_str()), Some("json" | "txt"));
            let Some(name) = path.file_name().filter(|_| small && path.is_file()) else {
                continue;
            };
            let bytes = regular::read(&path, MAX_TEXT_FILE_BYTES).map_err(|e| EngineError::io(&path, e))?;
            fsutil::write_atomic(&folder.join(name), |out| out.write_all(&bytes))?;
        }
        Ok(())
    }
}

/// A tensor of a single file: its component, its name in the source, and its shape in the file.
type FileEntry<'a> = (ComponentKind, &'a str, Vec<usize>);

fn write_text_file(path: &Path, text: &str) -> Result<()> {
    Ok(fsutil::write_atomic(path, |out| out.write_all(text.as_bytes()))?)
}
