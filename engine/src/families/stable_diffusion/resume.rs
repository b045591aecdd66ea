//! Resumes training from a saved model.

use super::sd_config::SdConfig;
use super::source::prefixed_name;
use super::{SdModel, ldm};
use crate::error::{EngineError, Result};
use crate::families::check::check_family;
use crate::weights::Index;
use candle_core::Tensor;
use std::path::Path;

impl SdModel {
    /// Reads tensors from a saved model: a diffusers folder, or a single file
    /// ([`Model::read_saved`](crate::families::Model::read_saved)).
    ///
    /// # Errors
    /// As there.
    pub(super) fn read_saved_tensors(
        &self,
        path: &Path,
        like: &[(String, Tensor)],
        found: &mut dyn FnMut(usize, Tensor) -> Result<()>,
    ) -> Result<()> {
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
        let mut sources = Vec::with_capacity(like.len());
        for (name, tensor) in like {
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
            index.check_shape(&inner, tensor.shape())?;
            sources.push((index, inner));
        }
        for (at, ((index, name), (_, tensor))) in sources.into_iter().zip(like).enumerate() {
            found(at, index.read(&name, tensor.dtype(), tensor.device())?)?;
        }
        Ok(())
    }
}
