//! Size limits of jobs: every message that is later made of a job must fit into the message limit.

use aitk_common::control_plane::Submission;
use aitk_common::hash::ContentHash;
use aitk_proto::MAX_MESSAGE_BYTES;
use std::collections::BTreeMap;

/// Reserve in an assignment for data that is not known at submission: its ids, its device, and the indices of existing
/// images, which are truncated to fit.
const HEADROOM: usize = 4 << 20;
/// Maximum bytes of a job's config, its parsed form and the list of its inputs, as sent to a worker.
pub(crate) const MAX_JOB_BYTES: usize = MAX_MESSAGE_BYTES - HEADROOM;
/// Bytes of an entry of the list of inputs besides its path: the hash as text and the framing.
const ENTRY: usize = 64 + 16;
/// A submission up to this size is parsed on the async thread and stored in the job's row.
pub(crate) const SMALL: usize = 64 << 10;

/// Returns the bytes that the jobs of one submission share.
pub(crate) fn of_shared(submission: &Submission) -> usize {
    submission.config_text.len() + submission.config_format.len() + of_inputs(&submission.inputs)
}

fn of_inputs(inputs: &BTreeMap<String, ContentHash>) -> usize {
    inputs.keys().map(|path| path.len() + ENTRY).sum()
}

/// Checks that a job with this many shared bytes and bytes of its own is not too large.
///
/// # Errors
/// A message for the user.
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
