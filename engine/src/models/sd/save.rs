//! Writes a whole model, as one file in the layout of the first release, or as a diffusers folder.
//!
//! What was trained is given, and the rest is read from where the model came from, tensor by tensor: at no time is more than
//! one of them in memory.

use super::ldm::OldNames;
use super::meta;
use super::source::{Part, SdSource, pretty, text_name};
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

/// What the metadata of a folder lies in, as ai-toolkit calls it.
pub const META_FILE: &str = "aitk_meta.yaml";

/// Features of the text encoder of Stable Diffusion 2.x.
const WIDTH_OF_SD2: usize = 1024;

/// A whole model to be written.
#[derive(Debug)]
pub struct FullModel<'a> {
    source: &'a SdSource,
    /// By the names that the source has.
    trained: BTreeMap<(Part, String), &'a Tensor>,
    dtype: DType,
    metadata: BTreeMap<String, String>,
    v_prediction: bool,
}

impl SdSource {
    /// Whether the model can be written as one file; better asked before it is trained.
    ///
    /// # Errors
    /// When the layout of the first release has no names for it.
    pub fn fits_one_file(&self) -> Result<()> {
        self.old_names().map(drop)
    }

    fn old_names(&self) -> Result<OldNames> {
        let index = |part| &self.component(part).index;
        let no_file = |what: &str| {
            EngineError::Unsupported(format!(
                "{}: {what}, so the model cannot be saved as one file: set `save.save_format: diffusers`",
                self.path().display()
            ))
        };
        let norm = index(Part::TextEncoder).shape("text_model.final_layer_norm.weight");
        if norm == Some(&[WIDTH_OF_SD2]) {
            return Err(no_file(
                "Stable Diffusion 2.x has other names for its text encoder in a single file, which aitk does not write",
            ));
        }
        OldNames::of(index(Part::Unet), index(Part::Vae)).ok_or_else(|| {
            no_file("the U-Net's blocks have different numbers of layers, for which single files have no names")
        })
    }
}

impl<'a> FullModel<'a> {
    /// `trained` has tensors of the U-Net (`unet.<name in diffusers>`) and of the text encoder
    /// (`text_encoder.<name in transformers>`, with or without `text_model.`), on any device; all others are those of
    /// `source`. They are written as `dtype`: f32, f16 or bf16.
    ///
    /// # Errors
    /// When the model has no tensor of such a name and shape, or `dtype` is another.
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
        let mut by_part = BTreeMap::new();
        for (name, tensor) in trained {
            let unknown = || EngineError::Internal(format!("`{name}` was trained, but the model has no such tensor"));
            let (part, inner) = match name.split_once('.').ok_or_else(unknown)? {
                ("unet", inner) => (Part::Unet, inner.to_owned()),
                ("text_encoder", inner) => (Part::TextEncoder, text_name(inner)),
                _ => return Err(unknown()),
            };
            let shape = source.component(part).index.shape(&inner).ok_or_else(unknown)?;
            if shape != tensor.dims() {
                return Err(EngineError::Internal(format!(
                    "`{name}` was trained with shape {:?}, but the model has {shape:?}",
                    tensor.dims()
                )));
            }
            if by_part.insert((part, inner), tensor).is_some() {
                return Err(EngineError::Internal(format!("`{name}` was trained under two names")));
            }
        }
        Ok(Self {
            source,
            trained: by_part,
            dtype,
            metadata,
            v_prediction: false,
        })
    }

    /// For a model that was trained to predict the velocity whatever its scheduler's config said; a folder then says so.
    #[must_use]
    pub fn v_prediction(self, on: bool) -> Self {
        Self {
            v_prediction: on,
            ..self
        }
    }

    /// One safetensors file in the layout of the first release, which the programs of that time read too, with the metadata.
    ///
    /// # Errors
    /// What `out` says; an [`EngineError`] as [`io::Error::other`] when the model does not fit that layout
    /// ([`SdSource::fits_one_file`]) or its files cannot be read any more. [`EngineError::io`] gives it back.
    pub fn write_file(&self, out: &mut dyn Write) -> io::Result<()> {
        let (layout, places) = self.one_file().map_err(io::Error::other)?;
        layout.write(out, |name| {
            let place = places.get(name);
            let (part, inner, shape) = place.ok_or_else(|| EngineError::Internal(format!("`{name}` is gone")))?;
            Ok(self.tensor(*part, inner)?.reshape(shape.as_slice())?)
        })
    }

    /// The file's header, and which tensor each of its names is.
    fn one_file(&self) -> Result<(SafetensorsLayout, BTreeMap<String, OnePlace<'a>>)> {
        let names = self.source.old_names()?;
        let mut layout = SafetensorsLayout::new(self.metadata.clone());
        let mut places = BTreeMap::new();
        for part in Part::ALL {
            for (inner, shape) in self.source.component(part).index.tensors() {
                let old = match part {
                    Part::TextEncoder => Some((names.text_encoder(inner), shape.to_vec())),
                    Part::Unet => names.unet(inner).map(|name| (name, shape.to_vec())),
                    Part::Vae => names.vae(inner, shape),
                };
                let (name, shape) = old.ok_or_else(|| {
                    EngineError::Internal(format!("`{}.{inner}` has no name in a single file", part.folder()))
                })?;
                if !layout.add(name.clone(), self.dtype, shape.clone()) {
                    return Err(EngineError::Internal(format!("two tensors would be called `{name}`")));
                }
                places.insert(name, (part, inner, shape));
            }
        }
        Ok((layout, places))
    }

    /// A diffusers folder, into a folder that is empty or not there yet. A reader may see it unfinished: write it beside its
    /// place and rename it. Every file is synced.
    ///
    /// # Errors
    /// When a file cannot be written, or those that the model came from cannot be read any more.
    pub fn write_folder(&self, folder: &Path) -> Result<()> {
        let place = |name: &str| -> Result<PathBuf> {
            let inner = folder.join(name);
            fsutil::create_dir_all(&inner)?;
            Ok(inner)
        };
        for part in Part::ALL {
            let component = self.source.component(part);
            let inner = place(part.folder())?;
            text_file(&inner.join("config.json"), &self.config(&component.config)?)?;
            // transformers refuses files that do not say this.
            let mut layout = SafetensorsLayout::new(BTreeMap::from([("format".to_owned(), "pt".to_owned())]));
            for (name, shape) in component.index.tensors() {
                layout.add(name, self.dtype, shape);
            }
            fsutil::write_atomic(&inner.join(part.file()), |out| {
                layout.write(out, |name| self.tensor(part, name))
            })?;
        }
        self.write_tokenizer(&place("tokenizer")?)?;
        text_file(&place("scheduler")?.join("scheduler_config.json"), &self.scheduler()?)?;
        text_file(&folder.join(META_FILE), &meta::yaml(&self.metadata))?;
        // What makes it a model comes last.
        text_file(&folder.join("model_index.json"), &pretty(&self.source.model_index()))
    }

    /// A tensor as it is saved: what was trained, else what the model came with.
    fn tensor(&self, part: Part, name: &str) -> Result<Tensor> {
        match self.trained.get(&(part, name.to_owned())) {
            // Rounded on the CPU, so that the bytes do not depend on the device.
            Some(trained) => Ok(trained.detach().to_device(&Device::Cpu)?.to_dtype(self.dtype)?),
            None => self.source.component(part).index.read(name, self.dtype, &Device::Cpu),
        }
    }

    /// A `config.json` for weights that are saved as `dtype` and are not quantised; as it was where it says so already.
    fn config(&self, text: &str) -> Result<String> {
        let mut value = self.parsed(text)?;
        let mut changed = false;
        if let Some(keys) = value.as_object_mut() {
            changed |= keys.shift_remove("quantization_config").is_some();
            let dtype = match self.dtype {
                DType::F16 => "float16",
                DType::BF16 => "bfloat16",
                _ => "float32",
            };
            for key in ["dtype", "torch_dtype"] {
                if let Some(said) = keys.get_mut(key).filter(|said| *said != dtype) {
                    *said = dtype.into();
                    changed = true;
                }
            }
        }
        Ok(if changed { pretty(&value) } else { text.to_owned() })
    }

    fn scheduler(&self) -> Result<String> {
        let text = self.source.scheduler();
        let mut value = self.parsed(text)?;
        let key = "prediction_type";
        let Some(keys) = value.as_object_mut().filter(|_| self.v_prediction) else {
            return Ok(text.to_owned());
        };
        keys.insert(key.into(), "v_prediction".into());
        Ok(pretty(&value))
    }

    fn parsed(&self, text: &str) -> Result<Value> {
        config::parse_json(text).map_err(|e| {
            EngineError::model_config(self.source.path(), format!("a config of it is not valid JSON: {e}"))
        })
    }

    /// The base's own, or OpenAI's where it brought none.
    fn write_tokenizer(&self, folder: &Path) -> Result<()> {
        let Some(from) = self.source.tokenizer() else {
            for (name, text) in ClipTokenizer::openai_files() {
                text_file(&folder.join(name), &text)?;
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

/// The part, the name that its tensor has in the source, and the shape in the file.
type OnePlace<'a> = (Part, &'a str, Vec<usize>);

fn text_file(path: &Path, text: &str) -> Result<()> {
    Ok(fsutil::write_atomic(path, |out| out.write_all(text.as_bytes()))?)
}
