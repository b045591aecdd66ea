//! Checks that each entry of `train.lr_factors` is for some trained tensor.

use crate::adapters::{AdapterConfig, AdapterFile, AdapterNetwork, AdapterType};
use crate::error::{EngineError, Result};
use crate::families::Part;
use crate::rng::generator_for;
use aitk_common::job::lr_factor::LrFactor;

/// Names in the message about an entry.
const SHOWN_NAMES: usize = 3;

/// Checks that each entry is for some tensor. `names`: those of all trained tensors.
///
/// # Errors
/// When one is for none. The error names its key and some of the names.
pub(super) fn check_lr_factors(factors: &[LrFactor], names: &[impl AsRef<str>]) -> Result<()> {
    let is_used = |factor: &LrFactor| names.iter().any(|name| factor.is_for(name.as_ref()));
    let unused = factors.iter().enumerate().find(|(_, factor)| !is_used(factor));
    let Some((index, factor)) = unused else {
        return Ok(());
    };
    let shown: Vec<&str> = names
        .iter()
        .step_by((names.len() / SHOWN_NAMES).max(1))
        .map(AsRef::as_ref)
        .take(SHOWN_NAMES)
        .collect();
    Err(EngineError::bad_input(format!(
        "train.lr_factors[{index}].contains: no trained tensor has `{}` in its name; some of the names are {}. Of a config of sd-scripts \
         it is a block that the model does not have: remove its weight",
        factor.contains,
        shown.join(", ")
    )))
}

/// As [`check_lr_factors`], for a network that is not attached: the weights of the parts can be those of [`crate::families::load_without_weights`].
///
/// # Errors
/// As [`check_lr_factors`] and [`AdapterNetwork::visit_tensor_names`].
pub(super) fn check_lr_factors_of_network(
    factors: &[LrFactor],
    adapter: &dyn AdapterType,
    config: &AdapterConfig,
    ranks_file: Option<&AdapterFile>,
    parts: &mut [Part<'_>],
) -> Result<()> {
    let mut unused: Vec<&LrFactor> = factors.iter().collect();
    if unused.is_empty() {
        return Ok(());
    }
    let mut names: Vec<String> = Vec::new();
    // The numbers of the adapters do not matter.
    let mut generator = generator_for(0, "network", 0, 0);
    AdapterNetwork::visit_tensor_names(adapter, config, ranks_file, parts, &mut generator, &mut |name| {
        unused.retain(|factor| !factor.is_for(name));
        names.push(name.to_owned());
        !unused.is_empty()
    })?;
    match unused.is_empty() {
        true => Ok(()),
        false => check_lr_factors(factors, &names),
    }
}
