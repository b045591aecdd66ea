//! Weights that stay in their files.
//!
//! A layer reads such a weight when it runs, forwards and again backwards, and lets it go: of a model there is one layer
//! in memory at a time. The system's page cache keeps the file near for as long as nobody else wants that memory, so
//! that where memory is plentiful this costs a copy, and where it is not, the speed of the disk; the next layers are
//! fetched from there while one computes.

use super::ahead::Order;
use super::file::TensorFile;
use crate::error::Result;
use candle_core::{DType, Device, Tensor};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// A weight in its file.
pub struct Streamed {
    file: Arc<TensorFile>,
    stored_name: String,
    shape: Vec<usize>,
    dtype: DType,
    device: Device,
    /// Among the layers that run one after another, and its number there.
    order: OnceLock<(Arc<Order>, usize)>,
}

impl std::fmt::Debug for Streamed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Streamed({} {:?})", self.stored_name, self.shape)
    }
}

impl Streamed {
    pub(super) fn new(
        file: Arc<TensorFile>,
        stored_name: String,
        shape: Vec<usize>,
        dtype: DType,
        device: &Device,
    ) -> Self {
        Self {
            file,
            stored_name,
            shape,
            dtype,
            device: device.clone(),
            order: OnceLock::new(),
        }
    }

    /// The shape of the weight.
    #[must_use]
    pub fn dims(&self) -> &[usize] {
        &self.shape
    }

    /// What it is read as.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where it is read to.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The weight, which should not outlive its use.
    ///
    /// # Errors
    /// When the file can no longer be read, or the device has no memory for it.
    pub fn read(&self) -> candle_core::Result<Tensor> {
        if let Some((order, at)) = self.order.get() {
            order.reading(*at);
        }
        let read = self.file.read(&self.stored_name, &self.shape, self.dtype, &self.device);
        read.map_err(candle_core::Error::wrap)
    }

    /// Has it fetched from the disk, without waiting for that.
    pub(super) fn soon(&self) {
        self.file.soon(&self.stored_name);
    }

    /// These rows of a table, in this order: [rows, width].
    ///
    /// # Errors
    /// As [`Self::read`], or when there is no such row.
    pub fn rows(&self, rows: &[u32]) -> Result<Tensor> {
        let width = self.shape.get(1).copied().unwrap_or(1);
        self.file.rows(&self.stored_name, rows, width, self.dtype, &self.device)
    }
}

/// Decides which weights stay in their files: a share of all bytes, spread evenly.
#[derive(Debug)]
pub(super) struct Share {
    share: f64,
    /// Numbers that should have been left so far, less those that were.
    owed: Mutex<f64>,
    order: Arc<Order>,
}

impl Share {
    pub(super) fn new(share: f64) -> Self {
        Self {
            share: share.clamp(0.0, 1.0),
            owed: Mutex::new(0.0),
            order: Arc::default(),
        }
    }

    /// Takes the next of the weights that are read one after another.
    pub(super) fn in_order(&self, weight: &Arc<Streamed>) {
        let at = self.order.add(weight);
        // A weight is made once, and belongs to one order.
        let _ = weight.order.set((Arc::clone(&self.order), at));
    }

    /// Whether the next weight, of so many numbers, stays.
    pub(super) fn takes(&self, numbers: usize) -> bool {
        let numbers = numbers as f64;
        let mut owed = self.owed.lock().unwrap_or_else(PoisonError::into_inner);
        *owed += numbers * self.share;
        let taken = 2.0 * *owed >= numbers;
        if taken {
            *owed -= numbers;
        }
        taken
    }
}
