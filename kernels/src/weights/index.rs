//! The tensors of weights files, by name.

use super::bytes::FloatFormat;
use super::entry::{Entry, StoredQuantization, StoredView, TensorLocation, View};
use super::file::TensorFile;
use super::header::StorageType;
use super::stored_bytes::StoredBytes;
use super::streamed::{StoredElements, StreamedWeight};
use super::{folder, quantized};
use crate::device::portable::is_portable;
use crate::error::{EngineError, Result};
use crate::quant::Quantized;
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Shape, Tensor};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The tensors of one or several safetensors or GGUF files, by name. No tensor is read yet.
#[derive(Clone)]
pub struct Index {
    path: PathBuf,
    files: Vec<Arc<TensorFile>>,
    entries: BTreeMap<String, Entry>,
}

impl std::fmt::Debug for Index {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Index({}, {} tensors)", self.path.display(), self.entries.len())
    }
}

impl Index {
    /// Opens a `.safetensors` or `.gguf` file, or a folder with one file, shards and their index, or a variant
    /// (`fp16`).
    ///
    /// # Errors
    /// When there are no weights, or a file is a pickle, truncated, or neither safetensors nor GGUF.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (mut files, mut entries) = (Vec::new(), BTreeMap::new());
        for name in folder::weights_files_in(path)? {
            let file = TensorFile::open(&name)?;
            for (name, stored) in file.tensors() {
                let entry = Entry {
                    location: TensorLocation {
                        file: files.len(),
                        name: name.clone(),
                    },
                    storage: stored.storage.clone(),
                    shape: stored.shape.clone(),
                    quantization: None,
                    view: None,
                };
                entries.insert(name.clone(), entry);
            }
            files.push(Arc::new(file));
        }
        folder::check_listed(path, |name| entries.contains_key(name))?;
        quantized::detect_quantization(&files, &mut entries)?;
        let path = match files.as_slice() {
            [only] => only.path().to_path_buf(),
            _ => path.to_path_buf(),
        };
        Ok(Self { path, files, entries })
    }

    /// The path of the file, or of the folder with the shards.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The name and the shape of every tensor, sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.entries
            .iter()
            .map(|(name, entry)| (name.as_str(), entry.shape.as_slice()))
    }

    /// The free-form metadata in the header of the first file, sorted by key.
    #[must_use]
    pub fn metadata(&self) -> Vec<(String, String)> {
        self.files.first().map(|file| file.user_metadata()).unwrap_or_default()
    }

    /// Whether a tensor of this name exists.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// The shape of a tensor.
    #[must_use]
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.entries.get(name).map(|entry| entry.shape.as_slice())
    }

    /// The dtype of a tensor that is stored in floats of 16 bits or more.
    pub fn float_dtype(&self, name: &str) -> Option<DType> {
        match self.entries.get(name)?.storage {
            StorageType::Floats(FloatFormat::F32) => Some(DType::F32),
            StorageType::Floats(FloatFormat::F16) => Some(DType::F16),
            StorageType::Floats(FloatFormat::Bf16) => Some(DType::BF16),
            _ => None,
        }
    }

    /// The quantisation types of the stored weights: `q4_k`, `float8`, `nf4`. Empty if no weight is quantised.
    #[must_use]
    pub fn quantization_kinds(&self) -> BTreeSet<&'static str> {
        let entries = self.entries.values();
        entries
            .filter_map(|entry| Some(entry.quantization.as_ref()?.name()))
            .collect()
    }

    /// The same tensors under other names. `rename` maps a name and a shape to the new name and shape (with as many
    /// elements), or to `None` to remove the tensor.
    #[must_use]
    pub fn renamed(&self, rename: impl Fn(&str, &[usize]) -> Option<(String, Vec<usize>)>) -> Self {
        let entries = self.entries.iter().filter_map(|(name, entry)| {
            let (name, shape) = rename(name, &entry.shape)?;
            let same_size = shape.iter().product::<usize>() == entry.shape.iter().product::<usize>();
            let shape = if same_size { shape } else { entry.shape.clone() };
            Some((name, Entry { shape, ..entry.clone() }))
        });
        Self {
            path: self.path.clone(),
            files: self.files.clone(),
            entries: entries.collect(),
        }
    }

    /// The tensors that are views of tensors of this index. `views` gives the name and the view of each tensor that is
    /// made from a tensor of this name and shape. A view that the tensor does not have is left out.
    #[must_use]
    pub fn views(&self, views: impl Fn(&str, &[usize]) -> Vec<(String, View)>) -> Self {
        let mut entries = BTreeMap::new();
        for (name, entry) in self.entries.iter().filter(|(_, entry)| entry.view.is_none()) {
            for (new_name, view) in views(name, &entry.shape) {
                let Some(shape) = view.shape(&entry.shape) else {
                    continue;
                };
                let view = Some(StoredView {
                    stored_shape: entry.shape.clone(),
                    view,
                });
                entries.insert(
                    new_name,
                    Entry {
                        shape,
                        view,
                        ..entry.clone()
                    },
                );
            }
        }
        Self {
            path: self.path.clone(),
            files: self.files.clone(),
            entries,
        }
    }

    /// The tensors of both indexes, which are of the same files.
    #[must_use]
    pub fn merged(mut self, other: Self) -> Self {
        self.entries.extend(other.entries);
        self
    }

    /// Reads a tensor as `dtype`. A quantised weight is dequantised.
    ///
    /// # Errors
    /// When the name does not exist, or the file cannot be read.
    pub fn read(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let entry = self.entries.get(name).ok_or_else(|| self.missing_error(name))?;
        if self.files.is_empty() {
            // An index without files has only names and shapes.
            return Ok(Tensor::zeros((), dtype, device)?.broadcast_as(entry.shape.as_slice())?);
        }
        let is_self_contained = |quantization: &StoredQuantization| quantization.is_self_contained();
        if !entry.quantization.as_ref().is_none_or(is_self_contained)
            && let Some(quantized) = self.read_quantized_entry(entry, dtype, device)?
        {
            return Ok(quantized.dequantize()?);
        }
        let file = &self.files[entry.location.file];
        let is_plain = entry.quantization.as_ref().is_none_or(is_self_contained);
        if let Some(elements) = entry.elements().filter(|_| is_plain) {
            return file.read_elements(&entry.location.name, &elements, &entry.shape, dtype, device);
        }
        let Some(view) = &entry.view else {
            return file.read(&entry.location.name, &entry.shape, dtype, device);
        };
        let stored = Entry {
            shape: view.stored_shape.clone(),
            view: None,
            ..entry.clone()
        };
        let stored = match self.read_quantized_entry(&stored, dtype, device)? {
            Some(quantized) => quantized.dequantize()?,
            None => file.read(&stored.location.name, &stored.shape, dtype, device)?,
        };
        Ok(view.view.apply(&stored)?.reshape(entry.shape.as_slice())?)
    }

    /// Reads a tensor that has no floats, such as one of `BOOL`, as it is stored. `None`: it has floats, also as codes of quantised weights.
    ///
    /// # Errors
    /// When the name does not exist, the file cannot be read, or a GGUF file has a type that is not known.
    pub fn read_stored(&self, name: &str) -> Result<Option<StoredBytes>> {
        let entry = self.entries.get(name).ok_or_else(|| self.missing_error(name))?;
        match self.files.get(entry.location.file) {
            Some(file) if entry.quantization.is_none() => file.read_stored(&entry.location.name),
            _ => Ok(None),
        }
    }

    /// Reads a weight that is quantised in its file, without dequantising it. `None` if it is not quantised, or a view that
    /// cannot be made of whole blocks.
    pub(super) fn read_quantized(&self, name: &str, dtype: DType, device: &Device) -> Result<Option<Arc<Quantized>>> {
        let entry = self.entries.get(name).ok_or_else(|| self.missing_error(name))?;
        self.read_quantized_entry(entry, dtype, device)
    }

    fn read_quantized_entry(&self, entry: &Entry, dtype: DType, device: &Device) -> Result<Option<Arc<Quantized>>> {
        match &entry.quantization {
            Some(quantization) if !self.files.is_empty() && entry.shape.iter().all(|side| *side > 0) => {
                quantization.read_quantized(&self.files, entry, dtype, device)
            }
            _ => Ok(None),
        }
    }

    /// Reads a 16-bit weight without converting it (bf16 of every file, f16 of a GGUF file), if `device` is the CPU and
    /// `dtype` is wider than 16 bits. Otherwise `None`. Linear layers widen bf16 block by block, so that such a weight takes
    /// half of the memory; f16 of a safetensors file is widened once, since its products would widen all of it each time.
    pub(super) fn read_half(&self, name: &str, dtype: DType, device: &Device) -> Result<Option<Arc<Quantized>>> {
        let entry = self.entries.get(name).ok_or_else(|| self.missing_error(name))?;
        let (block, type_name) = match entry.storage {
            StorageType::GgufHalf(FloatFormat::F16) => (GgmlDType::F16, "f16"),
            StorageType::GgufHalf(FloatFormat::Bf16) | StorageType::Floats(FloatFormat::Bf16) => {
                (GgmlDType::BF16, "bf16")
            }
            _ => return Ok(None),
        };
        let read_as_it_is = device.is_cpu() && !is_portable() && dtype.size_in_bytes() > 2;
        if !read_as_it_is || entry.shape.contains(&0) || self.files.is_empty() {
            return Ok(None);
        }
        let quantization = StoredQuantization::GgmlBlocks(block, type_name);
        quantization.read_quantized(&self.files, entry, dtype, device)
    }

    /// A streamed weight for this tensor; `None` if the weight consists of several tensors, or is a transpose.
    pub(super) fn stream(&self, name: &str, dtype: DType, device: &Device) -> Result<Option<StreamedWeight>> {
        let entry = self.entries.get(name).ok_or_else(|| self.missing_error(name))?;
        let Some(elements) = entry.elements().filter(|_| !self.files.is_empty()) else {
            return Ok(None);
        };
        if entry
            .quantization
            .as_ref()
            .is_some_and(|quantization| !quantization.is_self_contained())
        {
            return Ok(None);
        }
        let file = Arc::clone(&self.files[entry.location.file]);
        let stored = StoredElements {
            name: entry.location.name.clone(),
            elements,
            is_part: entry.view.is_some(),
        };
        Ok(Some(StreamedWeight::new(
            file,
            stored,
            entry.shape.clone(),
            dtype,
            device,
        )))
    }

    /// Checks that each tensor is stored in a type that is read.
    ///
    /// # Errors
    /// When one is not: the error names it and its type.
    pub fn check_types(&self) -> Result<()> {
        let is_read = |entry: &Entry| match entry.storage {
            StorageType::Unsupported(_) => false,
            // Integers of 8 bits are codes: without scales they are of a format that is not known.
            StorageType::Bytes | StorageType::Int8 => entry.quantization.is_some(),
            _ => true,
        };
        let unread = self.entries.values().find(|entry| !is_read(entry));
        // An index without files has only names and shapes.
        match unread.and_then(|entry| Some((entry, self.files.get(entry.location.file)?))) {
            None => Ok(()),
            Some((entry, file)) => Err(file.type_error(&entry.location.name, &entry.storage)),
        }
    }

    /// Checks that no float8 matrix lacks its scale in a file whose float8 weights have scales: without it, it would be read as numbers that
    /// are too large or too small. Tables of embeddings have none (ComfyUI scales linear layers only).
    ///
    /// # Errors
    /// When one does. The error names it.
    pub fn check_scales(&self) -> Result<()> {
        let lacking = quantized::lacking_scale(&self.files, &self.entries);
        let Some((entry, evidence)) = lacking else {
            return Ok(());
        };
        let path = self.files[entry.location.file].path().to_path_buf();
        let name = &entry.location.name;
        let layer = name.strip_suffix(".weight").unwrap_or(name);
        Err(EngineError::WeightsFile {
            path,
            reason: format!(
                "the float8 tensor `{name}` has no scale, and the file's float8 weights are scaled (it has `{evidence}`): expected a tensor \
                 `{layer}.scale_weight` or `{layer}.weight_scale`; download the file again, or use a file without scales"
            ),
        })
    }

    /// Checks that a tensor of this name and shape exists.
    pub fn check_shape(&self, name: &str, shape: &Shape) -> Result<()> {
        let found = self.shape(name).ok_or_else(|| self.missing_error(name))?;
        if found != shape.dims() {
            return Err(EngineError::ShapeMismatch {
                path: self.path.clone(),
                name: name.to_owned(),
                expected: shape.dims().to_vec(),
                found: found.to_vec(),
            });
        }
        Ok(())
    }

    /// The same names and shapes without files: every tensor reads as a broadcast zero. A model can be built from it to
    /// check names and shapes without reading any data.
    pub fn shapes_only(&self) -> Self {
        let shapes = self.tensors().map(|(name, shape)| (name.to_owned(), shape.to_vec()));
        Self {
            path: self.path.clone(),
            ..Self::from_shapes(shapes)
        }
    }

    /// An index of names and shapes without files, as from [`Self::shapes_only`].
    pub fn from_shapes(shapes: impl Iterator<Item = (String, Vec<usize>)>) -> Self {
        let entry = |name: &String, shape| Entry {
            location: TensorLocation {
                file: 0,
                name: name.clone(),
            },
            storage: StorageType::Bytes,
            shape,
            quantization: None,
            view: None,
        };
        let entries = shapes
            .map(|(name, shape)| (name.clone(), entry(&name, shape)))
            .collect();
        Self {
            path: "(names only)".into(),
            files: Vec::new(),
            entries,
        }
    }

    /// The error for a tensor that the files lack, with the name among them that is most like it.
    #[must_use]
    pub fn missing_error(&self, name: &str) -> EngineError {
        let similarity = |other: &str| {
            let front = name.bytes().zip(other.bytes()).take_while(|(a, b)| a == b).count();
            let back = name
                .bytes()
                .rev()
                .zip(other.bytes().rev())
                .take_while(|(a, b)| a == b)
                .count();
            front + back
        };
        let nearest = self.entries.keys().max_by_key(|other| similarity(other));
        let nearest = nearest.filter(|other| 2 * similarity(other) >= name.len());
        EngineError::MissingTensor {
            path: self.path.clone(),
            name: name.to_owned(),
            nearest: nearest.cloned(),
        }
    }
}
