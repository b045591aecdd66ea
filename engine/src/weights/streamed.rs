//! Weights that stay in their files.
//!
//! A layer reads such a weight when it runs, forwards and again backwards, and lets it go: of a model there is one layer
//! in memory at a time. The system's page cache keeps the file near for as long as nobody else wants that memory, so
//! that where memory is plentiful this costs a copy, and where it is not, the speed of the disk.

use super::file::TensorFile;
use crate::error::Result;
use candle_core::{DType, Device, Tensor};
use std::sync::{Arc, Mutex, PoisonError};

/// A weight in its file.
pub struct Streamed {
    file: Arc<TensorFile>,
    stored_name: String,
    shape: Vec<usize>,
    dtype: DType,
    device: Device,
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
        let read = self.file.read(&self.stored_name, &self.shape, self.dtype, &self.device);
        read.map_err(candle_core::Error::wrap)
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
}

impl Share {
    pub(super) fn new(share: f64) -> Self {
        Self {
            share: share.clamp(0.0, 1.0),
            owed: Mutex::new(0.0),
        }
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
