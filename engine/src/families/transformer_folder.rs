//! Saves a fine-tuned transformer as a diffusers folder, as ai-toolkit does: `transformer/` and the metadata. The other parts do not
//! change; `FluxPipeline.from_pretrained(base, transformer=…)` combines both.

use super::model::{ModelWriter, SaveOptions};
use super::part::TRANSFORMER;
use super::saved::{check_save_dtype, config_in_dtype, pretty_json, write_metadata, write_text_file};
use crate::error::{EngineError, Result};
use crate::weights::{Index, SafetensorsLayout, Weights};
use aitk_common::fsutil;
use candle_core::{DType, Device, Tensor};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The largest file, in bytes, as in diffusers. Only a larger tensor has a larger file.
const MAX_FILE_BYTES: usize = 10_000_000_000;

/// Where a transformer was loaded from.
#[derive(Clone, Debug)]
pub(super) struct TransformerSource {
    /// The name of the family, for errors.
    family: &'static str,
    path: PathBuf,
    index: Index,
    config: String,
}

impl TransformerSource {
    /// `weights`: those that the transformer was built from.
    pub(super) fn new(family: &'static str, path: &Path, weights: &Weights, config: String) -> Result<Self> {
        let index = weights.requested_tensors();
        let index = index
            .ok_or_else(|| EngineError::Internal("a model that was not loaded from files cannot be saved".into()))?;
        Ok(Self {
            family,
            path: path.to_path_buf(),
            index,
            config,
        })
    }

    /// The error of saving as one file.
    pub(super) fn no_single_file(&self) -> EngineError {
        EngineError::Unsupported(format!(
            "{}: a fine-tuned {} is saved as a diffusers folder, not as one file yet: set `save.save_format: diffusers`",
            self.path.display(),
            self.family
        ))
    }
}

/// Reads tensors of a transformer (`transformer.` and diffusers' name) from the folder of a saved one
/// ([`Model::read_saved`](super::Model::read_saved)).
///
/// # Errors
/// As there.
pub(super) fn read_saved(
    path: &Path,
    like: &[(String, Tensor)],
    found: &mut dyn FnMut(usize, Tensor) -> Result<()>,
) -> Result<()> {
    let index = Index::open(path.join(TRANSFORMER))?;
    let mut names = Vec::with_capacity(like.len());
    for (name, tensor) in like {
        let inner = name.strip_prefix(TRANSFORMER).and_then(|rest| rest.strip_prefix('.'));
        let inner = inner.ok_or_else(|| {
            EngineError::Internal(format!("the trained tensor `{name}` is not one of the transformer"))
        })?;
        index.check_shape(inner, tensor.shape())?;
        names.push(inner);
    }
    for (at, (name, (_, tensor))) in names.into_iter().zip(like).enumerate() {
        found(at, index.read(name, tensor.dtype(), tensor.device())?)?;
    }
    Ok(())
}

/// A transformer that can be saved.
pub(super) struct TransformerWriter<'a> {
    source: &'a TransformerSource,
    /// By the names in the folder.
    trained: BTreeMap<&'a str, &'a Tensor>,
    options: SaveOptions,
    max_file_bytes: usize,
}

impl<'a> TransformerWriter<'a> {
    /// `trained` has tensors of the transformer (`transformer.` and diffusers' name). All others are those of `source`.
    ///
    /// # Errors
    /// When the model has no tensor with a trained tensor's name and shape, or the dtype cannot be saved.
    pub(super) fn new(
        source: &'a TransformerSource,
        trained: &'a BTreeMap<String, Tensor>,
        options: SaveOptions,
    ) -> Result<Self> {
        check_save_dtype(options.dtype)?;
        let mut by_name = BTreeMap::new();
        for (name, tensor) in trained {
            let inner = name
                .strip_prefix(TRANSFORMER)
                .and_then(|rest| rest.strip_prefix('.'))
                .filter(|inner| source.index.shape(inner) == Some(tensor.dims()));
            let inner = inner.ok_or_else(|| {
                EngineError::Internal(format!(
                    "`{name}` was trained with shape {:?}, but the model has no such tensor",
                    tensor.dims()
                ))
            })?;
            by_name.insert(inner, tensor);
        }
        Ok(Self {
            source,
            trained: by_name,
            options,
            max_file_bytes: MAX_FILE_BYTES,
        })
    }

    #[cfg(test)]
    pub(super) fn with_max_file_bytes(self, max_file_bytes: usize) -> Self {
        Self { max_file_bytes, ..self }
    }

    /// The tensor to save: the trained one, else that of the source.
    fn tensor(&self, name: &str) -> Result<Tensor> {
        let dtype = self.options.dtype;
        match self.trained.get(name) {
            // Converted on the CPU, so that the bytes do not depend on the device.
            Some(trained) => Ok(trained.detach().to_device(&Device::Cpu)?.to_dtype(dtype)?),
            None => self.source.index.read(name, dtype, &Device::Cpu),
        }
    }

    /// The names of the tensors of each file.
    fn files(&self) -> Vec<Vec<(&str, &[usize])>> {
        let mut files: Vec<Vec<(&str, &[usize])>> = vec![Vec::new()];
        let mut bytes = 0;
        for (name, shape) in self.source.index.tensors() {
            let of_tensor = tensor_bytes(shape, self.options.dtype);
            if bytes + of_tensor > self.max_file_bytes && bytes > 0 {
                files.push(Vec::new());
                bytes = 0;
            }
            bytes += of_tensor;
            if let Some(file) = files.last_mut() {
                file.push((name, shape));
            }
        }
        files
    }
}

fn tensor_bytes(shape: &[usize], dtype: DType) -> usize {
    shape.iter().product::<usize>() * dtype.size_in_bytes()
}

impl ModelWriter for TransformerWriter<'_> {
    fn write_file(&self, _: &mut dyn Write) -> io::Result<()> {
        Err(io::Error::other(self.source.no_single_file()))
    }

    fn write_folder(&self, folder: &Path) -> Result<()> {
        let inner = folder.join(TRANSFORMER);
        fsutil::create_dir_all(&inner)?;
        let files = self.files();
        let count = files.len();
        let mut total = 0;
        let mut file_by_tensor = Map::new();
        for (number, tensors) in files.iter().enumerate() {
            let file = match count {
                1 => "diffusion_pytorch_model.safetensors".to_owned(),
                _ => format!("diffusion_pytorch_model-{:05}-of-{count:05}.safetensors", number + 1),
            };
            let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
            let mut layout = SafetensorsLayout::new(metadata);
            for (name, shape) in tensors {
                layout.add(*name, self.options.dtype, *shape);
                total += tensor_bytes(shape, self.options.dtype);
                file_by_tensor.insert((*name).to_owned(), Value::String(file.clone()));
            }
            fsutil::write_atomic(&inner.join(&file), |out| layout.write(out, |name| self.tensor(name)))?;
        }
        if count > 1 {
            let index = json!({"metadata": {"total_size": total}, "weight_map": file_by_tensor});
            let name = "diffusion_pytorch_model.safetensors.index.json";
            write_text_file(&inner.join(name), &pretty_json(&index))?;
        }
        write_metadata(folder, &self.options.metadata)?;
        // The config comes last: a folder without it is incomplete.
        let config = config_in_dtype(&self.source.config, self.options.dtype, &self.source.path)?;
        write_text_file(&inner.join("config.json"), &config)
    }
}
