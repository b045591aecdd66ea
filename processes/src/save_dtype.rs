//! The number format of saved weights.

use crate::error::{EngineError, Result};
use aitk_common::job::dtype::DType as SaveDType;
use candle_core::DType;

/// The number format that the config names at `key`.
///
/// # Errors
/// When it cannot be saved.
pub(super) fn save_dtype(configured: SaveDType, key: &str) -> Result<DType> {
    match configured {
        SaveDType::F32 => Ok(DType::F32),
        SaveDType::F16 => Ok(DType::F16),
        SaveDType::BF16 => Ok(DType::BF16),
        SaveDType::F8 => Err(EngineError::Unsupported(format!(
            "{key}: float8 is not supported yet; use float16"
        ))),
    }
}
