//! Inputs of an attempt: brought to this machine, cache first.

pub(crate) mod cache;

use crate::context::Context;
use crate::storage::failure;
use aitk_common::attempt::Outcome;
use aitk_common::control::Assignment;
use aitk_common::storage::checkpoints;
use cache::Lease;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What an attempt starts from.
#[derive(Debug, Default)]
pub(crate) struct Staged {
    /// Inputs as the config names them -> where they lie.
    pub(crate) inputs: BTreeMap<String, PathBuf>,
    /// The checkpoint to go on from.
    pub(crate) resume: Option<PathBuf>,
    /// Keep the inputs in the cache for as long as this lives.
    pub(crate) _leases: Vec<Lease>,
}

/// Brings everything that the assignment names. `folder` is the attempt's own.
pub(crate) async fn inputs(context: &Context, assignment: &Assignment, folder: &Path) -> Result<Staged, Outcome> {
    let mut staged = Staged::default();
    if assignment.local {
        return Ok(staged);
    }
    for (config_path, id) in &assignment.inputs {
        let fetched = context
            .cache
            .materialise(&context.storage, context.storage_patience, *id)
            .await;
        let (path, lease) =
            fetched.map_err(|error| failure(&format!("could not fetch the input {config_path:?}"), &error))?;
        staged.inputs.insert(config_path.clone(), path);
        staged._leases.push(lease);
    }
    if let Some(manifest) = assignment.resume {
        let target = folder.join("resume");
        let target = &target;
        let fetched = context
            .storage
            .retry(context.storage_patience, |store| {
                Box::pin(async move { checkpoints::fetch(store.as_ref(), manifest, target, &mut |_| {}).await })
            })
            .await;
        let checkpoint = fetched.map_err(|error| failure("could not fetch the checkpoint to go on from", &error))?;
        staged.resume = Some(checkpoint.folder().to_owned());
    }
    Ok(staged)
}
