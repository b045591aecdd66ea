//! Imports universal training configs of StarCoder trainers, as `training_config_metal_cuda_universal.yaml` is one: sections `model`,
//! `quantization`, `optimization`, `training`, `device_backend`, `output`. They become a job with an `lm_trainer` process.
//!
//! The values keep their positions, so messages are about the user's lines. Source of all facts: git-starcoder 98283517.

mod build;
mod keys;
mod names;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use super::error::Finding;
use super::node::Node;
use build::{config_of, read_settings};
use keys::Keys;

/// Whether a document is a universal training config.
pub(super) fn is_universal(root: &Node) -> bool {
    let has = |key: &str| root.get(key).is_some_and(|node| node.entries().is_some());
    let is_job = root.get("job").is_some() || root.get("config").is_some();
    !is_job && (has("device_backend") || (has("model") && (has("optimization") || has("training"))))
}

/// The config of a job that a universal training config becomes, and what is ignored or differs.
///
/// # Errors
/// Every key that is not known, or whose value has no counterpart.
pub(super) fn convert(root: &Node, file: Option<&str>) -> Result<(Node, Vec<Finding>), Vec<Finding>> {
    let mut keys = Keys::read(root, file);
    let settings = read_settings(&mut keys, root.mark);
    keys.note_without_effect();
    match keys.errors.is_empty() {
        true => Ok((config_of(settings, root.mark), keys.notes)),
        false => Err(keys.errors),
    }
}
