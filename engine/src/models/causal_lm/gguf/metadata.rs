//! The metadata of a GGUF file by their keys.

use crate::error::{EngineError, Result};
use aitk_common::fsutil::regular;
use aitk_common::gguf::{MetadataValue, read_metadata};
use std::collections::BTreeMap;
use std::path::Path;

/// The metadata of a file.
#[derive(Clone, Debug, Default)]
pub(super) struct Metadata(BTreeMap<String, MetadataValue>);

impl Metadata {
    /// Reads the metadata of a file.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let (file, length) = regular::open(path).map_err(|error| EngineError::io(path, error))?;
        let values = read_metadata(&file, length).map_err(|error| match error.kind() {
            std::io::ErrorKind::InvalidData => EngineError::WeightsFile {
                path: path.to_path_buf(),
                reason: error.to_string(),
            },
            _ => EngineError::io(path, error),
        })?;
        Ok(Self(values))
    }

    pub(super) fn text(&self, key: &str) -> Option<&str> {
        match self.0.get(key)? {
            MetadataValue::Text(text) => Some(text),
            _ => None,
        }
    }

    /// A number from 0.
    pub(super) fn number(&self, key: &str) -> Option<usize> {
        match self.0.get(key)? {
            MetadataValue::Whole(number) => usize::try_from(*number).ok(),
            _ => None,
        }
    }

    pub(super) fn float(&self, key: &str) -> Option<f64> {
        match self.0.get(key)? {
            MetadataValue::Float(number) => Some(*number),
            _ => None,
        }
    }

    pub(super) fn flag(&self, key: &str) -> Option<bool> {
        match self.0.get(key)? {
            MetadataValue::Flag(flag) => Some(*flag),
            _ => None,
        }
    }

    pub(super) fn texts(&self, key: &str) -> Option<&[String]> {
        match self.0.get(key)? {
            MetadataValue::Texts(texts) => Some(texts),
            _ => None,
        }
    }

    pub(super) fn wholes(&self, key: &str) -> Option<&[i64]> {
        match self.0.get(key)? {
            MetadataValue::Wholes(numbers) => Some(numbers),
            _ => None,
        }
    }

    pub(super) fn floats(&self, key: &str) -> Option<&[f32]> {
        match self.0.get(key)? {
            MetadataValue::Floats(numbers) => Some(numbers),
            _ => None,
        }
    }
}
