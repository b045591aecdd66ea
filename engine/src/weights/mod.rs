//! Where a model's tensors come from: files, or fresh random numbers; and how they are written into files.
//!
//! A model asks by name and shape; whatever does not fit is an error that names the file, the tensor, and what was
//! expected. Models never see files, dtypes on disk, or other people's names.

mod bytes;
mod file;
mod folder;
mod gguf;
mod init;
mod quantized;
mod safetensors;
mod streamed;
#[cfg(test)]
mod tests;
mod write;

pub use init::Init;
pub use streamed::Streamed;
pub use write::{Layout, write_tensors};

use crate::error::{EngineError, Result};
use crate::nn::Weight;
use crate::nn::quant::Quantized;
use aitk_common::job::QType;
use bytes::Number;
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Shape, Tensor, Var};
use file::{Kind, TensorFile};
use quantized::StoredQuantization;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The tensors of one or several safetensors or GGUF files, by name. Nothing is read yet.
#[derive(Clone)]
pub struct Index {
    path: PathBuf,
    files: Vec<Arc<TensorFile>>,
    entries: BTreeMap<String, Entry>,
}

#[derive(Clone)]
struct Entry {
    place: Place,
    kind: Kind,
    shape: Vec<usize>,
    quantization: Option<StoredQuantization>,
}

/// Which tensor of which file.
#[derive(Clone, Debug)]
struct Place {
    file: usize,
    name: String,
}

impl std::fmt::Debug for Index {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Index({}, {} tensors)", self.path.display(), self.entries.len())
    }
}

impl Index {
    /// Opens a `.safetensors` or `.gguf` file, or a folder with one file, shards and their index, or a variant (`fp16`).
    ///
    /// # Errors
    /// When there are no weights, or a file is a pickle, cut off, or something else than safetensors or GGUF.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (mut files, mut entries) = (Vec::new(), BTreeMap::new());
        for name in folder::find(path)? {
            let file = TensorFile::open(&name)?;
            for (name, place) in file.tensors() {
                let entry = Entry {
                    place: Place {
                        file: files.len(),
                        name: name.clone(),
                    },
                    kind: place.kind.clone(),
                    shape: place.shape.clone(),
                    quantization: None,
                };
                entries.insert(name.clone(), entry);
            }
            files.push(Arc::new(file));
        }
        quantized::recognise(&files, &mut entries)?;
        let path = match files.as_slice() {
            [only] => only.path().to_path_buf(),
            _ => path.to_path_buf(),
        };
        Ok(Self { path, files, entries })
    }

    /// The file, or the folder of the shards.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Every tensor's name and shape, by name.
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

    /// In which kinds of few bits weights are stored, by name: `q4_k`, `float8`, `nf4`. Empty where none is quantised.
    #[must_use]
    pub fn quantised(&self) -> BTreeSet<&'static str> {
        let entries = self.entries.values();
        entries
            .filter_map(|entry| Some(entry.quantization.as_ref()?.name()))
            .collect()
    }

    /// The same tensors under other names. `rename` gets a name and a shape, and answers with the new name and shape
    /// (of as many elements), or `None` to leave the tensor out.
    #[must_use]
    pub fn renamed(&self, rename: impl Fn(&str, &[usize]) -> Option<(String, Vec<usize>)>) -> Self {
        let entries = self.entries.iter().filter_map(|(name, entry)| {
            let (name, shape) = rename(name, &entry.shape)?;
            let same = shape.iter().product::<usize>() == entry.shape.iter().product::<usize>();
            let shape = if same { shape } else { entry.shape.clone() };
            Some((name, Entry { shape, ..entry.clone() }))
        });
        Self {
            path: self.path.clone(),
            files: self.files.clone(),
            entries: entries.collect(),
        }
    }

    /// Reads a tensor as `dtype`; what is quantised is unpacked.
    ///
    /// # Errors
    /// When there is none of this name, or its file cannot be read.
    pub fn read(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let entry = self.entries.get(name).ok_or_else(|| self.missing(name))?;
        if self.files.is_empty() {
            // Names and shapes only.
            return Ok(Tensor::zeros(1, dtype, device)?.broadcast_as(entry.shape.as_slice())?);
        }
        if entry
            .quantization
            .as_ref()
            .is_some_and(|quantization| !quantization.stands_alone())
            && let Some(packed) = self.packed(name, dtype, device)?
        {
            return Ok(packed.dequantize()?);
        }
        self.files[entry.place.file].read(&entry.place.name, &entry.shape, dtype, device)
    }

    /// A weight that is quantised in its file, as it is.
    fn packed(&self, name: &str, dtype: DType, device: &Device) -> Result<Option<Arc<Quantized>>> {
        let entry = self.entries.get(name).ok_or_else(|| self.missing(name))?;
        match &entry.quantization {
            Some(quantization) if entry.shape.iter().all(|side| *side > 0) => {
                quantization.packed(&self.files, entry, dtype, device).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// A weight of a GGUF file that has 16 bits, as it is, where it is computed with more of them.
    fn halves(&self, name: &str, dtype: DType, device: &Device) -> Result<Option<Arc<Quantized>>> {
        let entry = self.entries.get(name).ok_or_else(|| self.missing(name))?;
        let (block, kind) = match entry.kind {
            Kind::Halves(Number::F16) => (GgmlDType::F16, "f16"),
            Kind::Halves(Number::Bf16) => (GgmlDType::BF16, "bf16"),
            _ => return Ok(None),
        };
        if !device.is_cpu() || dtype.size_in_bytes() <= 2 || entry.shape.contains(&0) {
            return Ok(None);
        }
        let quantization = StoredQuantization::Blocks(block, kind);
        quantization.packed(&self.files, entry, dtype, device).map(Some)
    }

    /// A tensor that stays in its file; none where several tensors make it up.
    fn stream(&self, name: &str, dtype: DType, device: &Device) -> Result<Option<Arc<Streamed>>> {
        let entry = self.entries.get(name).ok_or_else(|| self.missing(name))?;
        if self.files.is_empty() {
            return Ok(None);
        }
        if entry
            .quantization
            .as_ref()
            .is_some_and(|quantization| !quantization.stands_alone())
        {
            return Ok(None);
        }
        let file = Arc::clone(&self.files[entry.place.file]);
        let shape = entry.shape.clone();
        Ok(Some(Arc::new(Streamed::new(
            file,
            entry.place.name.clone(),
            shape,
            dtype,
            device,
        ))))
    }

    /// That there is a tensor of this name and shape.
    pub(crate) fn check(&self, name: &str, shape: &Shape) -> Result<()> {
        let found = self.shape(name).ok_or_else(|| self.missing(name))?;
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

    /// The names and shapes alone: every tensor is one zero in memory. What is built of it fits, or says what does not, and nothing
    /// was read.
    pub(crate) fn layout(&self) -> Self {
        let shapes = self.tensors().map(|(name, shape)| (name.to_owned(), shape.to_vec()));
        Self {
            path: self.path.clone(),
            ..Self::of_shapes(shapes)
        }
    }

    /// Names and shapes of no file at all, as [`Self::layout`].
    pub(crate) fn of_shapes(shapes: impl Iterator<Item = (String, Vec<usize>)>) -> Self {
        let entry = |name: &String, shape| Entry {
            place: Place {
                file: 0,
                name: name.clone(),
            },
            kind: Kind::Bytes,
            shape,
            quantization: None,
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

    fn missing(&self, name: &str) -> EngineError {
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

enum Source {
    Files(Index),
    Fresh {
        seed: u64,
    },
    /// What others gave out before.
    Given {
        path: PathBuf,
        weights: BTreeMap<String, Weight>,
    },
}

struct Inner {
    source: Source,
    dtype: DType,
    device: Device,
    trained: Trained,
    vars: Mutex<BTreeMap<String, Var>>,
    /// What was given out, without a graph, where some of it is trained.
    given: Mutex<BTreeMap<String, Weight>>,
    /// Names that were asked for.
    asked: Mutex<BTreeSet<String>>,
}

/// Which tensors are given out as variables, by their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Trained {
    /// None.
    #[default]
    Nothing,
    /// Those whose name contains one of the first (where there are none, all), but none of the second.
    Names {
        /// `model.only_if_contains`.
        only_if_contains: Vec<String>,
        /// `model.ignore_if_contains`. Wins over the other.
        ignore_if_contains: Vec<String>,
    },
}

impl Trained {
    /// Every tensor.
    #[must_use]
    pub fn everything() -> Self {
        Self::Names {
            only_if_contains: Vec::new(),
            ignore_if_contains: Vec::new(),
        }
    }

    /// Whether this tensor is.
    #[must_use]
    pub fn takes(&self, name: &str) -> bool {
        let among = |parts: &[String]| parts.iter().any(|part| name.contains(part.as_str()));
        match self {
            Self::Nothing => false,
            Self::Names {
                only_if_contains: only,
                ignore_if_contains: ignored,
            } => (only.is_empty() || among(only)) && !among(ignored),
        }
    }
}

/// A place in the tree of a model's tensors.
#[derive(Clone)]
pub struct Weights {
    inner: Arc<Inner>,
    prefix: String,
    packing: Option<Arc<QuantizationConfig>>,
    streaming: Option<Arc<streamed::Share>>,
}

/// Which layers are quantised as they are read, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuantizationConfig {
    /// How.
    pub qtype: QType,
    /// Names of layers that stay as they are, with `*` for anything.
    pub exclude: Vec<String>,
}

impl QuantizationConfig {
    fn takes(&self, layer: &str) -> bool {
        !self.exclude.iter().any(|pattern| matches(pattern, layer))
    }
}

/// Whether a name fits a pattern in which `*` stands for anything.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((before, after)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let Some(rest) = name.strip_prefix(before) else {
        return false;
    };
    let mut tails = rest.char_indices().map(|(at, _)| &rest[at..]).chain([""]);
    tails.any(|tail| matches(after, tail))
}

impl std::fmt::Debug for Weights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Weights({} at `{}`)", self.path().display(), self.prefix)
    }
}

impl Weights {
    fn with(source: Source, dtype: DType, device: &Device, trained: Trained) -> Self {
        let inner = Inner {
            source,
            dtype,
            device: device.clone(),
            trained,
            vars: Mutex::default(),
            given: Mutex::default(),
            asked: Mutex::default(),
        };
        Self {
            inner: Arc::new(inner),
            prefix: String::new(),
            packing: None,
            streaming: None,
        }
    }

    /// The same tensors, and the weights of layers quantised as they are read.
    #[must_use]
    pub fn packed(self, packing: Option<QuantizationConfig>) -> Self {
        Self {
            packing: packing.map(Arc::new),
            ..self
        }
    }

    /// The same tensors, of which the weights of layers, this share of their bytes (0 to 1), stay in their files and are
    /// read whenever they are used. Which ones is spread evenly, in the order in which they are asked for.
    #[must_use]
    pub fn streamed(self, share: f64) -> Self {
        Self {
            streaming: (share > 0.0).then(|| Arc::new(streamed::Share::new(share))),
            ..self
        }
    }

    /// Tensors of a file or folder (see [`Index::open`]), given out as `dtype` on `device`.
    ///
    /// # Errors
    /// As [`Index::open`].
    pub fn open(path: impl AsRef<Path>, dtype: DType, device: &Device) -> Result<Self> {
        Ok(Self::from_index(Index::open(path)?, dtype, device))
    }

    /// Tensors of an index, given out as `dtype` on `device`.
    #[must_use]
    pub fn from_index(index: Index, dtype: DType, device: &Device) -> Self {
        Self::with(Source::Files(index), dtype, device, Trained::Nothing)
    }

    /// Fresh, trainable f32 tensors. Each depends on `seed` and its own name only.
    #[must_use]
    pub fn init(seed: u64, device: &Device) -> Self {
        Self::with(Source::Fresh { seed }, DType::F32, device, Trained::everything())
    }

    /// The same tensors, given out as trainable variables from here on.
    #[must_use]
    pub fn trainable(&self) -> Self {
        self.training(Trained::everything())
    }

    /// The same tensors, of which these are given out as trainable variables from here on.
    #[must_use]
    pub fn training(&self, trained: Trained) -> Self {
        Self {
            prefix: self.prefix.clone(),
            packing: self.packing.clone(),
            streaming: self.streaming.clone(),
            ..Self::with(self.source(), self.inner.dtype, &self.inner.device, trained)
        }
    }

    /// The same tensors, given out as plain tensors that get no gradient from here on.
    #[must_use]
    pub fn frozen(&self) -> Self {
        self.training(Trained::Nothing)
    }

    fn source(&self) -> Source {
        match &self.inner.source {
            Source::Files(index) => Source::Files(index.clone()),
            Source::Fresh { seed } => Source::Fresh { seed: *seed },
            Source::Given { path, weights } => Source::Given {
                path: path.clone(),
                weights: weights.clone(),
            },
        }
    }

    /// One level down: `weights.pp("down_blocks").pp(0)`.
    #[must_use]
    pub fn pp(&self, name: impl std::fmt::Display) -> Self {
        let prefix = if self.prefix.is_empty() {
            name.to_string()
        } else {
            format!("{}.{name}", self.prefix)
        };
        Self {
            inner: Arc::clone(&self.inner),
            prefix,
            packing: self.packing.clone(),
            streaming: self.streaming.clone(),
        }
    }

    /// The tensor `weight` of the layer at this place: as it is in its file if it is quantised there, else quantised or
    /// left in its file if it is to be.
    ///
    /// # Errors
    /// When it is missing or has another shape.
    pub fn layer(&self, shape: impl Into<Shape>, init: Init) -> Result<Weight> {
        let weight = self.layer_as_asked(shape.into(), init)?;
        self.keep(&self.full_name("weight"), &weight);
        Ok(weight)
    }

    fn layer_as_asked(&self, shape: Shape, init: Init) -> Result<Weight> {
        if let Source::Given { weights, .. } = &self.inner.source
            && let Some(weight) = weights.get(&self.full_name("weight"))
        {
            return Ok(weight.clone());
        }
        if let Some(packed) = self.as_stored(&shape, Index::packed)? {
            return Ok(Weight::Quantized(packed));
        }
        let packing = self.packing.as_ref().filter(|packing| packing.takes(&self.prefix));
        if packing.is_none()
            && let Some(streamed) = self.stream(&shape, "weight")?
        {
            return Ok(Weight::Streamed(streamed));
        }
        if packing.is_none()
            && let Some(packed) = self.as_stored(&shape, Index::halves)?
        {
            return Ok(Weight::Quantized(packed));
        }
        let tensor = self.get_with(shape, "weight", init)?;
        if let Some(packing) = packing.filter(|_| !tensor.track_op())
            && let Some(packed) = Quantized::quantize(&tensor, packing.qtype)?
        {
            return Ok(Weight::Quantized(packed));
        }
        Ok(Weight::Plain(tensor))
    }

    /// The layer's weight in the bits that its file has, if `read` finds it to be of that kind and nobody trains it.
    fn as_stored(
        &self,
        shape: &Shape,
        read: impl Fn(&Index, &str, DType, &Device) -> Result<Option<Arc<Quantized>>>,
    ) -> Result<Option<Arc<Quantized>>> {
        let full = self.full_name("weight");
        let (Source::Files(index), false) = (&self.inner.source, self.inner.trained.takes(&full)) else {
            return Ok(None);
        };
        self.note(&full);
        index.check(&full, shape)?;
        read(index, &full, self.inner.dtype, &self.inner.device)
    }

    /// The tensor `name` at this place, if it is one that stays in its file.
    ///
    /// # Errors
    /// When it is missing or has another shape.
    pub fn stream(&self, shape: &Shape, name: &str) -> Result<Option<Arc<Streamed>>> {
        let full = self.full_name(name);
        let trained = self.inner.trained.takes(&full);
        let (Some(share), Source::Files(index), false) = (&self.streaming, &self.inner.source, trained) else {
            return Ok(None);
        };
        if !share.takes(shape.elem_count()) {
            return Ok(None);
        }
        self.note(&full);
        index.check(&full, shape)?;
        index.stream(&full, self.inner.dtype, &self.inner.device)
    }

    /// The tensor `name` at this place.
    ///
    /// # Errors
    /// When it is missing or has another shape.
    pub fn get(&self, shape: impl Into<Shape>, name: &str) -> Result<Tensor> {
        self.get_with(shape, name, Init::Uniform(0.02))
    }

    /// The tensor `name` at this place; `init` says what a fresh one is drawn from.
    ///
    /// # Errors
    /// When it is missing or has another shape.
    pub fn get_with(&self, shape: impl Into<Shape>, name: &str, init: Init) -> Result<Tensor> {
        let shape = shape.into();
        let full = self.full_name(name);
        self.note(&full);
        if let Some(var) = self.lock().get(&full) {
            return Ok(var.as_tensor().clone());
        }
        let tensor = match &self.inner.source {
            Source::Files(index) => {
                index.check(&full, &shape)?;
                index.read(&full, self.inner.dtype, &self.inner.device)?
            }
            Source::Fresh { seed } => init::draw(*seed, &full, shape.dims(), init, &self.inner.device)?,
            Source::Given { weights, .. } => match weights.get(&full) {
                Some(Weight::Plain(tensor)) => tensor.clone(),
                _ => return Err(EngineError::Internal(format!("`{full}` was not given out before"))),
            },
        };
        let tensor = if self.inner.trained.takes(&full) {
            let var = Var::from_tensor(&tensor)?;
            let tensor = var.as_tensor().clone();
            self.lock().insert(full.clone(), var);
            tensor
        } else {
            tensor
        };
        self.keep(&full, &Weight::Plain(tensor.clone()));
        Ok(tensor)
    }

    /// Keeps what is given out, for [`Weights::again`].
    fn keep(&self, name: &str, weight: &Weight) {
        if self.inner.trained == Trained::Nothing {
            return;
        }
        let weight = match weight {
            Weight::Plain(tensor) => Weight::Plain(tensor.detach()),
            other => other.clone(),
        };
        let mut given = self.inner.given.lock().unwrap_or_else(PoisonError::into_inner);
        given.insert(name.to_owned(), weight);
    }

    /// What was given out so far, where some of it is trained, to be given out again: the same memory, so that it changes as
    /// training goes on, but no variables, so that nothing is kept for a backward pass.
    #[must_use]
    pub fn again(&self) -> Self {
        let given = self.inner.given.lock().unwrap_or_else(PoisonError::into_inner);
        let source = Source::Given {
            path: self.path().to_path_buf(),
            weights: given.clone(),
        };
        Self {
            prefix: self.prefix.clone(),
            ..Self::with(source, self.inner.dtype, &self.inner.device, Trained::Nothing)
        }
    }

    /// Whether the tensor `name` exists at this place; always, for fresh ones.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        match &self.inner.source {
            Source::Files(index) => index.contains(&self.full_name(name)),
            Source::Fresh { .. } => true,
            Source::Given { weights, .. } => weights.contains_key(&self.full_name(name)),
        }
    }

    /// Every variable given out so far, by full name, sorted.
    #[must_use]
    pub fn vars(&self) -> Vec<(String, Var)> {
        self.lock()
            .iter()
            .map(|(name, var)| (name.clone(), var.clone()))
            .collect()
    }

    /// The file or folder behind this; for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        match &self.inner.source {
            Source::Files(index) => &index.path,
            Source::Fresh { .. } => Path::new("(fresh weights)"),
            Source::Given { path, .. } => path,
        }
    }

    /// The dtype in which tensors are given out.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.inner.dtype
    }

    /// Where tensors are given out.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// The tensors of its files that were asked for so far: those that a model is made of. None for fresh ones.
    #[must_use]
    pub fn asked_for(&self) -> Option<Index> {
        let Source::Files(index) = &self.inner.source else {
            return None;
        };
        let asked = self.inner.asked.lock().unwrap_or_else(PoisonError::into_inner);
        Some(index.renamed(|name, shape| asked.contains(name).then(|| (name.to_owned(), shape.to_vec()))))
    }

    /// An error about the config that these weights belong to.
    pub(crate) fn config_error(&self, message: String) -> EngineError {
        let place = if self.prefix.is_empty() {
            String::new()
        } else {
            format!("{}: ", self.prefix)
        };
        EngineError::model_config(self.path(), format!("{place}{message}"))
    }

    fn note(&self, name: &str) {
        let mut asked = self.inner.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.insert(name.to_owned());
    }

    fn full_name(&self, name: &str) -> String {
        if self.prefix.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.prefix)
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Var>> {
        self.inner.vars.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
