//! Weights that stay in their files (streamed weights).
//!
//! A layer reads a streamed weight in the forward pass and again in the backward pass, and frees it after each use, so
//! that only one layer's weight is in memory at a time. While the operating system has free memory, the file stays in
//! its page cache, and a read costs one copy; otherwise it costs a read from disk.

use super::file::TensorFile;
use super::read_ahead::{FileRange, ReadAhead};
use crate::error::Result;
use crate::quant::HalfFormat;
use candle_core::{DType, Device, Tensor};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// What a streamed weight consists of: elements of one tensor of its file.
pub(super) struct StoredElements {
    /// The tensor's name in the file.
    pub(super) name: String,
    /// The elements, one range after the other.
    pub(super) elements: Vec<Range<usize>>,
    /// Whether they are not the whole tensor in its order.
    pub(super) is_part: bool,
}

/// A weight that is read from its file at each use.
pub struct StreamedWeight {
    file: Arc<TensorFile>,
    stored: StoredElements,
    shape: Vec<usize>,
    dtype: DType,
    device: Device,
    /// The model's other streamed weights, and the place of this one among them.
    neighbours: Option<(Arc<ReadAhead>, usize)>,
}

impl std::fmt::Debug for StreamedWeight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "StreamedWeight({} {:?})", self.stored.name, self.shape)
    }
}

impl StreamedWeight {
    pub(super) fn new(
        file: Arc<TensorFile>,
        stored: StoredElements,
        shape: Vec<usize>,
        dtype: DType,
        device: &Device,
    ) -> Self {
        Self {
            file,
            stored,
            shape,
            dtype,
            device: device.clone(),
            neighbours: None,
        }
    }

    /// The same weight as the next one of a model: reading it reads those after it ahead.
    pub(super) fn among(self, read_ahead: &Arc<ReadAhead>) -> Self {
        let range = self.file.range(&self.stored.name, &self.stored.elements);
        let neighbours = range.map(|(start, length)| {
            let file = Arc::clone(&self.file);
            let index = read_ahead.add(FileRange { file, start, length });
            (Arc::clone(read_ahead), index)
        });
        Self { neighbours, ..self }
    }

    /// The shape of the weight.
    #[must_use]
    pub fn dims(&self) -> &[usize] {
        &self.shape
    }

    /// The dtype of [`StreamedWeight::read`].
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The device of [`StreamedWeight::read`].
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Reads the weight. Callers drop the tensor after its use.
    ///
    /// # Errors
    /// When the file cannot be read, or the device is out of memory.
    pub fn read(&self) -> candle_core::Result<Tensor> {
        self.read_neighbours_ahead();
        let stored = &self.stored;
        let read = self
            .file
            .read_elements(&stored.name, &stored.elements, &self.shape, self.dtype, &self.device);
        read.map_err(candle_core::Error::wrap)
    }

    /// The format and the bytes of a weight that its file has in 16-bit floats, for products that widen it themselves: half of the memory
    /// of [`Self::read`], and no pass that converts it. `None` for other weights.
    pub(super) fn read_halves(&self) -> candle_core::Result<Option<(HalfFormat, Vec<u8>)>> {
        let StoredElements { name, elements, .. } = &self.stored;
        let format = self.file.half_format(name).map_err(candle_core::Error::wrap)?;
        let Some(format) = format else {
            return Ok(None);
        };
        self.read_neighbours_ahead();
        let bytes = self.file.read_half_bytes(name, elements);
        Ok(Some((format, bytes.map_err(candle_core::Error::wrap)?)))
    }

    fn read_neighbours_ahead(&self) {
        if let Some((read_ahead, index)) = &self.neighbours {
            read_ahead.reading(*index);
        }
    }

    /// Reads rows of an embedding table in the given order: [rows, width].
    ///
    /// # Errors
    /// As [`Self::read`], or when a row does not exist.
    pub fn rows(&self, rows: &[u32]) -> Result<Tensor> {
        if self.stored.is_part {
            return Ok(self.read()?.index_select(&Tensor::new(rows, &self.device)?, 0)?);
        }
        let width = self.shape.get(1).copied().unwrap_or(1);
        self.file
            .read_rows(&self.stored.name, rows, width, self.dtype, &self.device)
    }
}

/// Decides which weights are streamed: a share of all elements, spread evenly over the layers.
#[derive(Debug)]
pub(super) struct StreamingShare {
    share: f64,
    /// The elements that should have been streamed so far, minus those that are.
    deficit: Mutex<f64>,
    read_ahead: Arc<ReadAhead>,
}

impl StreamingShare {
    pub(super) fn new(share: f64) -> Self {
        Self {
            share: share.clamp(0.0, 1.0),
            deficit: Mutex::new(0.0),
            read_ahead: Arc::default(),
        }
    }

    /// The weights that are streamed so far.
    pub(super) fn read_ahead(&self) -> &Arc<ReadAhead> {
        &self.read_ahead
    }

    /// Whether the next weight, which has this many elements, is streamed.
    pub(super) fn streams_next(&self, elements: usize) -> bool {
        let elements = elements as f64;
        let mut deficit = self.deficit.lock().unwrap_or_else(PoisonError::into_inner);
        *deficit += elements * self.share;
        let is_streamed = 2.0 * *deficit >= elements;
        if is_streamed {
            *deficit -= elements;
        }
        is_streamed
    }
}
