//! Loads a model's tensors from files, or initialises them randomly, and writes them to files.
//!
//! A model requests tensors by name and shape. A mismatch is an error with the file, the tensor and the expected shape.
//! Models do not see files, dtypes on disk, or the names that other formats use.

mod bytes;
mod entry;
mod file;
mod folder;
mod gguf;
mod gguf_write;
mod header;
mod index;
mod init;
mod quantized;
mod read;
mod read_ahead;
mod safetensors;
mod select;
mod stored_bytes;
mod streamed;
#[cfg(test)]
mod tests;
mod weight;
mod write;

pub use entry::{RowOrder, View};
pub use gguf_write::type_name as gguf_type_name;
pub use gguf_write::{GgufLayout, GgufValue};
pub use index::Index;
pub use init::Init;
pub use read::read_tensors;
pub use select::{QuantizationConfig, TrainableFilter};
pub use stored_bytes::StoredBytes;
pub use streamed::StreamedWeight;
pub use weight::Weight;
pub use write::{SafetensorsLayout, write_tensors};

use crate::device::portable::is_portable;
use crate::error::{EngineError, Result};
use crate::quant::Quantized;
use candle_core::{DType, Device, Shape, Tensor, Var};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

enum Source {
    Files(Index),
    Random {
        seed: u64,
        /// The distribution of a tensor by its name. `None`: the one that its layer asks for.
        init_of: Option<InitOf>,
    },
    /// Tensors that another [`Weights`] has handed out.
    HandedOut {
        path: PathBuf,
        weights: BTreeMap<String, Weight>,
    },
}

/// The distribution of a tensor, by its name.
type InitOf = Arc<dyn Fn(&str) -> Init + Send + Sync>;

struct Inner {
    source: Source,
    dtype: DType,
    device: Device,
    trainable_filter: TrainableFilter,
    vars: Mutex<BTreeMap<String, Var>>,
    /// The weights that were handed out, detached; only recorded if some are trainable.
    handed_out: Mutex<BTreeMap<String, Weight>>,
    /// The names that were requested.
    requested: Mutex<BTreeSet<String>>,
}

/// A path in the tree of a model's tensors, like candle's `VarBuilder`.
#[derive(Clone)]
pub struct Weights {
    inner: Arc<Inner>,
    prefix: String,
    quantization: Option<Arc<QuantizationConfig>>,
    streaming: Option<Arc<streamed::StreamingShare>>,
    keeps_stored_tables: bool,
}

impl std::fmt::Debug for Weights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Weights({} at `{}`)", self.path().display(), self.prefix)
    }
}

impl Weights {
    fn from_source(source: Source, dtype: DType, device: &Device, trainable_filter: TrainableFilter) -> Self {
        let inner = Inner {
            source,
            dtype,
            device: device.clone(),
            trainable_filter,
            vars: Mutex::default(),
            handed_out: Mutex::default(),
            requested: Mutex::default(),
        };
        Self {
            inner: Arc::new(inner),
            prefix: String::new(),
            quantization: None,
            streaming: None,
            keeps_stored_tables: false,
        }
    }

    /// The same tensors, with the weights of layers quantised when they are read.
    #[must_use]
    pub fn quantize_on_load(self, quantization: Option<QuantizationConfig>) -> Self {
        Self {
            quantization: quantization.map(Arc::new),
            ..self
        }
    }

    /// The same tensors, with a share (0 to 1) of the elements of layers' weights streamed: they stay in their files and are read
    /// at each use. The streamed weights are spread evenly over the layers, in the order of the requests.
    #[must_use]
    pub fn streamed(self, share: f64) -> Self {
        Self {
            streaming: (share > 0.0).then(|| Arc::new(streamed::StreamingShare::new(share))),
            ..self
        }
    }

    /// The same tensors, with tables of embeddings kept in the form in which they are stored, where [`Self::stored_table`] can.
    #[must_use]
    pub fn keeping_stored_tables(self, keeps_stored_tables: bool) -> Self {
        Self {
            keeps_stored_tables,
            ..self
        }
    }

    /// The table `weight` [count, width] at this path in the form in which it is stored: 16-bit floats or blocks of GGUF on the CPU, whose
    /// rows are read singly. `None` for other forms, on other devices, and without [`Self::keeping_stored_tables`].
    ///
    /// # Errors
    /// When it is missing or has another shape.
    pub fn stored_table(&self, shape: &Shape) -> Result<Option<Arc<Quantized>>> {
        if !self.keeps_stored_tables || !self.inner.device.is_cpu() || is_portable() {
            return Ok(None);
        }
        let table = match self.read_stored(shape, Index::read_quantized)? {
            Some(table) => Some(table),
            None => self.read_stored(shape, Index::read_half)?,
        };
        let has_rows = |table: &Arc<Quantized>| table.with_rows(|rows| rows.is_some());
        Ok(match table {
            Some(table) if has_rows(&table)? => Some(table),
            _ => None,
        })
    }

    /// The tensors of a file or folder (see [`Index::open`]), as `dtype` on `device`.
    ///
    /// # Errors
    /// As [`Index::open`].
    pub fn open(path: impl AsRef<Path>, dtype: DType, device: &Device) -> Result<Self> {
        Ok(Self::from_index(Index::open(path)?, dtype, device))
    }

    /// The tensors of an index, as `dtype` on `device`.
    #[must_use]
    pub fn from_index(index: Index, dtype: DType, device: &Device) -> Self {
        Self::from_source(Source::Files(index), dtype, device, TrainableFilter::Nothing)
    }

    /// Random, trainable f32 tensors. Each depends only on `seed` and its name.
    #[must_use]
    pub fn init(seed: u64, device: &Device) -> Self {
        Self::from_source(
            Source::Random { seed, init_of: None },
            DType::F32,
            device,
            TrainableFilter::everything(),
        )
    }

    /// Random, trainable tensors as `dtype`, whose distribution follows from their names.
    pub fn init_by_name(
        seed: u64,
        dtype: DType,
        device: &Device,
        init_of: impl Fn(&str) -> Init + Send + Sync + 'static,
    ) -> Self {
        let init_of: Option<InitOf> = Some(Arc::new(init_of));
        Self::from_source(
            Source::Random { seed, init_of },
            dtype,
            device,
            TrainableFilter::everything(),
        )
    }

    /// The same tensors in another dtype.
    #[must_use]
    pub fn in_dtype(&self, dtype: DType) -> Self {
        Self {
            prefix: self.prefix.clone(),
            quantization: self.quantization.clone(),
            streaming: self.streaming.clone(),
            keeps_stored_tables: self.keeps_stored_tables,
            ..Self::from_source(
                self.source(),
                dtype,
                &self.inner.device,
                self.inner.trainable_filter.clone(),
            )
        }
    }

    /// The same tensors, handed out as trainable variables.
    #[must_use]
    pub fn trainable(&self) -> Self {
        self.training(TrainableFilter::everything())
    }

    /// The same tensors; those that the filter selects are handed out as trainable variables.
    #[must_use]
    pub fn training(&self, trainable_filter: TrainableFilter) -> Self {
        Self {
            prefix: self.prefix.clone(),
            quantization: self.quantization.clone(),
            streaming: self.streaming.clone(),
            keeps_stored_tables: self.keeps_stored_tables,
            ..Self::from_source(self.source(), self.inner.dtype, &self.inner.device, trainable_filter)
        }
    }

    /// The same tensors, handed out as plain tensors without gradients.
    #[must_use]
    pub fn frozen(&self) -> Self {
        self.training(TrainableFilter::Nothing)
    }

    fn source(&self) -> Source {
        match &self.inner.source {
            Source::Files(index) => Source::Files(index.clone()),
            Source::Random { seed, init_of } => Source::Random {
                seed: *seed,
                init_of: init_of.clone(),
            },
            Source::HandedOut { path, weights } => Source::HandedOut {
                path: path.clone(),
                weights: weights.clone(),
            },
        }
    }

    /// Appends a name to the path: `weights.pp("down_blocks").pp(0)`.
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
            quantization: self.quantization.clone(),
            streaming: self.streaming.clone(),
            keeps_stored_tables: self.keeps_stored_tables,
        }
    }

    /// The tensor `weight` of the layer at this path. It stays quantised if its file has it so; otherwise it is
    /// quantised or streamed if [`Weights::quantize_on_load`] or [`Weights::streamed`] selects it.
    ///
    /// # Errors
    /// When it is missing or has another shape.
    pub fn layer(&self, shape: impl Into<Shape>, init: Init) -> Result<Weight> {
        let weight = self.load_layer(shape.into(), init)?;
        self.record_handed_out(&self.full_name("weight"), &weight);
        Ok(weight)
    }

    fn load_layer(&self, shape: Shape, init: Init) -> Result<Weight> {
        if let Source::HandedOut { weights, .. } = &self.inner.source
            && let Some(weight) = weights.get(&self.full_name("weight"))
        {
            return Ok(weight.clone());
        }
        if let Some(quantized) = self.read_stored(&shape, |index, name, dtype, device| {
            // Read into host memory, where it may stay.
            let first = if self.offloads() { &Device::Cpu } else { device };
            index.read_quantized(name, dtype, first)
        })? {
            return Ok(Weight::Quantized(self.placed(quantized)?));
        }
        let quantization = self
            .quantization
            .as_ref()
            .filter(|quantization| quantization.applies_to(&self.prefix));
        if quantization.is_none()
            && let Some(streamed) = self.stream(&shape, "weight")?
        {
            return Ok(Weight::Streamed(streamed));
        }
        if quantization.is_none()
            && let Some(quantized) = self.read_stored(&shape, Index::read_half)?
        {
            return Ok(Weight::Quantized(quantized));
        }
        let tensor = self.get_with(shape, "weight", init)?;
        if let Some(quantization) = quantization.filter(|_| !tensor.track_op()) {
            let first = if self.offloads() {
                Device::Cpu
            } else {
                tensor.device().clone()
            };
            if let Some(quantized) =
                Quantized::quantize(&tensor.to_device(&first)?, quantization.qtype_of(&self.prefix))?
            {
                return Ok(Weight::Quantized(self.placed(quantized)?));
            }
        }
        Ok(Weight::Plain(tensor))
    }

    /// Whether a share of the quantised layers is kept in host memory and copied to the device at each use. On a CPU there is no other
    /// memory: there quantised layers are not streamed.
    fn offloads(&self) -> bool {
        self.streaming.is_some() && (!self.inner.device.is_cpu() || is_portable())
    }

    /// A quantised weight in host memory, in the memory in which it stays.
    fn placed(&self, quantized: Arc<Quantized>) -> Result<Arc<Quantized>> {
        let Some(share) = self.streaming.as_ref().filter(|_| self.offloads()) else {
            return Ok(quantized);
        };
        let count = quantized.dims().iter().product();
        match Arc::into_inner(quantized) {
            Some(quantized) if share.streams_next(count) => Ok(Arc::new(quantized.offloaded_from(&self.inner.device))),
            Some(quantized) => Ok(Arc::new(quantized.to_device(&self.inner.device)?)),
            None => Err(EngineError::Internal("a weight that was just read is shared".into())),
        }
    }

    /// Reads the layer's weight with `read` in the format of its file. `None` if it is trainable or `read` returns
    /// `None`.
    fn read_stored(
        &self,
        shape: &Shape,
        read: impl Fn(&Index, &str, DType, &Device) -> Result<Option<Arc<Quantized>>>,
    ) -> Result<Option<Arc<Quantized>>> {
        let full_name = self.full_name("weight");
        let (Source::Files(index), false) = (&self.inner.source, self.inner.trainable_filter.matches(&full_name))
        else {
            return Ok(None);
        };
        self.record_request(&full_name);
        index.check_shape(&full_name, shape)?;
        read(index, &full_name, self.inner.dtype, &self.inner.device)
    }

    /// The tensor `name` at this path as a streamed weight; `None` if it is not streamed.
    ///
    /// # Errors
    /// When it is missing or has another shape.
    pub fn stream(&self, shape: &Shape, name: &str) -> Result<Option<Arc<StreamedWeight>>> {
        let full_name = self.full_name(name);
        let is_trainable = self.inner.trainable_filter.matches(&full_name);
        let (Some(share), Source::Files(index), false) = (&self.streaming, &self.inner.source, is_trainable) else {
            return Ok(None);
        };
        if !share.streams_next(shape.elem_count()) {
            return Ok(None);
        }
        self.record_request(&full_name);
        index.check_shape(&full_name, shape)?;
        let streamed = index.stream(&full_name, self.inner.dtype, &self.inner.device)?;
        Ok(streamed.map(|streamed| Arc::new(streamed.among(share.read_ahead()))))
    }

    /// The tensor `name` at this path.
    ///
    /// # Errors
    /// When it is missing or has another shape.
    pub fn get(&self, shape: impl Into<Shape>, name: &str) -> Result<Tensor> {
        self.get_with(shape, name, Init::Uniform(0.02))
    }

    /// The tensor `name` at this path; `init` is the distribution of a random one.
    ///
    /// # Errors
    /// When it is missing or has another shape.
    pub fn get_with(&self, shape: impl Into<Shape>, name: &str, init: Init) -> Result<Tensor> {
        let (shape, full_name) = (shape.into(), self.full_name(name));
        self.record_request(&full_name);
        if let Some(var) = self.lock_vars().get(&full_name) {
            return Ok(var.as_tensor().clone());
        }
        let tensor = self.read(&shape, &full_name, init)?;
        let tensor = if self.inner.trainable_filter.matches(&full_name) {
            let var = Var::from_tensor(&tensor)?;
            let tensor = var.as_tensor().clone();
            self.lock_vars().insert(full_name.clone(), var);
            tensor
        } else {
            tensor
        };
        self.record_handed_out(&full_name, &Weight::Plain(tensor.clone()));
        Ok(tensor)
    }

    /// The tensor `name` at this path, which is not trained whatever the filter selects: a table that is in the model's files but is no
    /// parameter (a buffer in PyTorch).
    ///
    /// # Errors
    /// When it is missing or has another shape.
    pub fn get_frozen(&self, shape: impl Into<Shape>, name: &str) -> Result<Tensor> {
        let (shape, full_name) = (shape.into(), self.full_name(name));
        self.record_request(&full_name);
        let tensor = self.read(&shape, &full_name, Init::Uniform(0.02))?;
        self.record_handed_out(&full_name, &Weight::Plain(tensor.clone()));
        Ok(tensor)
    }

    /// Reads or draws a tensor.
    fn read(&self, shape: &Shape, full_name: &str, init: Init) -> Result<Tensor> {
        match &self.inner.source {
            Source::Files(index) => {
                index.check_shape(full_name, shape)?;
                index.read(full_name, self.inner.dtype, &self.inner.device)
            }
            Source::Random { seed, init_of } => {
                let init = init_of.as_ref().map_or(init, |init_of| init_of(full_name));
                Ok(
                    init::random_tensor(*seed, full_name, shape.dims(), init, &self.inner.device)?
                        .to_dtype(self.inner.dtype)?,
                )
            }
            Source::HandedOut { weights, .. } => match weights.get(full_name) {
                Some(Weight::Plain(tensor)) => Ok(tensor.clone()),
                _ => Err(EngineError::Internal(format!(
                    "`{full_name}` was not handed out before"
                ))),
            },
        }
    }

    /// Records a weight that is handed out, for [`Weights::detached`].
    fn record_handed_out(&self, name: &str, weight: &Weight) {
        if self.inner.trainable_filter == TrainableFilter::Nothing {
            return;
        }
        let weight = match weight {
            Weight::Plain(tensor) => Weight::Plain(tensor.detach()),
            other => other.clone(),
        };
        let mut handed_out = self.inner.handed_out.lock().unwrap_or_else(PoisonError::into_inner);
        handed_out.insert(name.to_owned(), weight);
    }

    /// The weights that were handed out so far, detached: they share the memory of the trainable variables, so that
    /// they follow the training, but have no gradients. Empty if nothing is trainable.
    #[must_use]
    pub fn detached(&self) -> Self {
        let handed_out = self.inner.handed_out.lock().unwrap_or_else(PoisonError::into_inner);
        let source = Source::HandedOut {
            path: self.path().to_path_buf(),
            weights: handed_out.clone(),
        };
        Self {
            prefix: self.prefix.clone(),
            ..Self::from_source(source, self.inner.dtype, &self.inner.device, TrainableFilter::Nothing)
        }
    }

    /// Whether the tensor `name` exists at this path. Always `true` for random tensors.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        match &self.inner.source {
            Source::Files(index) => index.contains(&self.full_name(name)),
            Source::Random { .. } => true,
            Source::HandedOut { weights, .. } => weights.contains_key(&self.full_name(name)),
        }
    }

    /// Every variable that was handed out so far, sorted by full name.
    #[must_use]
    pub fn vars(&self) -> Vec<(String, Var)> {
        self.lock_vars()
            .iter()
            .map(|(name, var)| (name.clone(), var.clone()))
            .collect()
    }

    /// The file or folder of the tensors, for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        match &self.inner.source {
            Source::Files(index) => index.path(),
            Source::Random { .. } => Path::new("(random weights)"),
            Source::HandedOut { path, .. } => path,
        }
    }

    /// The dtype of the tensors.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.inner.dtype
    }

    /// The device of the tensors.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// The index of the tensors that were requested so far, that is of those that the model uses. `None` for random
    /// tensors.
    #[must_use]
    pub fn requested_tensors(&self) -> Option<Index> {
        let Source::Files(index) = &self.inner.source else {
            return None;
        };
        let requested = self.inner.requested.lock().unwrap_or_else(PoisonError::into_inner);
        Some(index.renamed(|name, shape| requested.contains(name).then(|| (name.to_owned(), shape.to_vec()))))
    }

    /// An error about the config that these weights belong to.
    pub fn config_error(&self, message: String) -> EngineError {
        let prefix = if self.prefix.is_empty() {
            String::new()
        } else {
            format!("{}: ", self.prefix)
        };
        EngineError::model_config(self.path(), format!("{prefix}{message}"))
    }

    fn record_request(&self, name: &str) {
        let mut requested = self.inner.requested.lock().unwrap_or_else(PoisonError::into_inner);
        requested.insert(name.to_owned());
    }

    fn full_name(&self, name: &str) -> String {
        if self.prefix.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.prefix)
        }
    }

    fn lock_vars(&self) -> MutexGuard<'_, BTreeMap<String, Var>> {
        self.inner.vars.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
