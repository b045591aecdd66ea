//! Resumes training from a saved model.

use super::sd_config::SdConfig;
use super::source::prefixed_name;
use super::{SdModel, ldm};
use crate::error::{EngineError, Result};
use crate::families::check::check_family;
use crate::weights::Index;
use candle_core::DType;
use std::path::Path;

impl SdModel {
    /// Loads the trained tensors from a saved model: a diffusers folder, or a single file.
    ///
    /// # Errors
    /// When it cannot be read, or a tensor is missing or has another shape. Then no tensor is changed.
    pub(super) fn load_trained_tensors(&self, path: &Path) -> Result<()> {
        let folders: Vec<&str> = self.variant.components().iter().map(|spec| spec.folder).collect();
        let indexes = if path.is_dir() {
            let trained = folders.iter().filter(|folder| **folder != "vae");
            trained
                .map(|folder| Index::open(path.join(folder)))
                .collect::<Result<Vec<_>>>()?
        } else {
            check_family(path, self.variant.family.arch())?;
            ldm::split(&Index::open(path)?, &SdConfig::defaults(self.variant)?, self.variant)?
        };
        let indexes: Vec<Index> = indexes
            .into_iter()
            .zip(&folders)
            .map(|(index, folder)| match self.variant.is_text_encoder(folder) {
                true => index.renamed(|name, shape| Some((prefixed_name(name), shape.to_vec()))),
                false => index,
            })
            .collect();
        let mut sources = Vec::with_capacity(self.trained.len());
        for (name, var) in &self.trained {
            let unknown = || EngineError::Internal(format!("the trained tensor `{name}` belongs to no component"));
            let (folder, inner) = name.split_once('.').ok_or_else(unknown)?;
            let position = folders.iter().position(|known| *known == folder);
            let index = position
                .and_then(|position| indexes.get(position))
                .ok_or_else(unknown)?;
            let inner = match self.variant.is_text_encoder(folder) {
                true => prefixed_name(inner),
                false => inner.to_owned(),
            };
            index.check_shape(&inner, var.shape())?;
            sources.push((index, inner, var));
        }
        for (index, name, var) in sources {
            var.set(&index.read(&name, DType::F32, var.device())?.contiguous()?)?;
        }
        Ok(())
    }
}
