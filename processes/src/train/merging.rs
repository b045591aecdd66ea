//! Merges the network into the model at saves (`train.merge_network_on_save`).
//!
//! A save that the config or the user asks for merges before its checkpoint is written, which then has the merged layers and a network
//! that starts anew. The save of an interrupted attempt and the final save merge after their checkpoints: the attempt ends there, and one
//! that resumes goes on as if it had not been interrupted.

use super::super::context::Context;
use super::run::Run;
use super::target::TrainedParameters;
use crate::error::{EngineError, Result};
use candle_core::{Device, Tensor};
use std::collections::BTreeMap;
use std::path::Path;

/// The role of the file of a checkpoint with the merged layers.
pub(super) const MERGED_ROLE: &str = "merged";

impl Run<'_> {
    /// Merges the network into the model and starts it anew, if the config says so.
    pub(super) fn merge_network(&mut self, cx: &mut Context<'_>, step: u64) -> Result<()> {
        let (true, TrainedParameters::Adapter(network)) = (self.process.merges_network(), &self.target) else {
            return Ok(());
        };
        // The checkpoint that follows refuses such numbers, which must not reach the model.
        if !self.trainer.weights_are_finite()? {
            return Ok(());
        }
        let strength = self.process.train.merge_network_on_save_strength;
        let merged = network.merge(&mut self.model.parts(), strength)?;
        if merged > 0 {
            self.has_merged = true;
            cx.log(
                "info",
                format!("step {step}: the network was merged into {merged} layers of the model at strength {strength}, and starts anew"),
            );
        }
        Ok(())
    }

    /// Whether [`Self::merge_network`] would change nothing.
    pub(super) fn has_nothing_to_merge(&self) -> Result<bool> {
        match (self.process.merges_network(), &self.target) {
            (true, TrainedParameters::Adapter(network)) => network.changes_nothing(),
            _ => Ok(true),
        }
    }

    /// The weights and biases into which the network is merged, as they are now. `None`: it is not merged.
    pub(super) fn merged_tensors(&mut self) -> Result<Option<BTreeMap<String, Tensor>>> {
        match (self.process.merges_network(), &self.target) {
            (true, TrainedParameters::Adapter(network)) => Ok(Some(network.base_tensors(&mut self.model.parts())?)),
            _ => Ok(None),
        }
    }

    /// Restores the merged layers of a checkpoint. `None`: it has none.
    pub(super) fn restore_merged(&mut self, tensors: Option<&BTreeMap<String, Tensor>>) -> Result<()> {
        let Some(tensors) = tensors else { return Ok(()) };
        let (true, TrainedParameters::Adapter(network)) = (self.process.merges_network(), &self.target) else {
            return Err(EngineError::bad_input(
                "its network was merged into the model at each save: set `train.merge_network_on_save: true` as it was",
            ));
        };
        network.set_base_tensors(&mut self.model.parts(), tensors)?;
        self.has_merged = true;
        Ok(())
    }

    /// Takes the layers of a saved model into which the network was merged.
    pub(super) fn load_merged_save(&mut self, path: &Path) -> Result<()> {
        let like: Vec<(String, Tensor)> = self.merged_tensors()?.unwrap_or_default().into_iter().collect();
        let mut found = BTreeMap::new();
        self.model.read_saved(path, &like, &mut |index, tensor| {
            found.insert(like[index].0.clone(), tensor.to_device(&Device::Cpu)?);
            Ok(())
        })?;
        drop(like);
        self.restore_merged(Some(&found))
    }
}
