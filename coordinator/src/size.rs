//! How large a job may be: every message that is made of it later must be one that its reader takes.

use aitk_common::control::Submission;
use aitk_common::hash::ContentHash;
use aitk_proto::MAX_MESSAGE_BYTES;
use std::collections::BTreeMap;

/// Room in an assignment for what is not known yet when a job comes in: its ids, its device, and the numbers of the images
/// that earlier attempts made, which are cut to what fits.
const HEADROOM: usize = 4 << 20;
/// Bytes of a job's config, its parsed form and the list of its inputs, as they travel to a worker.
pub(crate) const MAX_JOB_BYTES: usize = MAX_MESSAGE_BYTES - HEADROOM;
/// A hash as text, and what the message puts around an entry of the list.
const ENTRY: usize = 64 + 16;
/// A submission up to this size is looked at where it arrives, and stored in the row of its job.
pub(crate) const SMALL: usize = 64 << 10;

/// Bytes of what the jobs of one submission share.
pub(crate) fn of_shared(submission: &Submission) -> usize {
    submission.config_text.len() + submission.config_format.len() + of_inputs(&submission.inputs)
}

fn of_inputs(inputs: &BTreeMap<String, ContentHash>) -> usize {
    inputs.keys().map(|path| path.len() + ENTRY).sum()
}

/// Whether a job fits that has so many bytes of its own besides what it shares.
///
/// # Errors
/// In words.
pub(crate) fn check_job_size(shared: usize, own: usize) -> Result<(), String> {
    let bytes = shared.saturating_add(own);
    if bytes <= MAX_JOB_BYTES {
        return Ok(());
    }
    Err(format!(
        "the config, the job and the list of its inputs have {bytes} bytes together; at most {MAX_JOB_BYTES}, so that they fit into \
         one message to a worker: give fewer inputs (a folder is one), shorter paths, or a shorter config"
    ))
}
