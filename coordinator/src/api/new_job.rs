//! Creates scheduler jobs from submissions.

use crate::access::Identity;
use crate::submit::ParsedSubmission;
use aitk_common::control_plane::Submission;
use aitk_common::id::JobId;
use aitk_scheduler::{NewJob, Payload};
use std::sync::Arc;

/// Creates the scheduler's job from a parsed submission.
pub(super) fn new_job(
    who: &Identity,
    id: JobId,
    seed: u64,
    parsed: ParsedSubmission,
    submission: &Submission,
    payload: Payload,
) -> NewJob {
    NewJob {
        id,
        seed,
        name: parsed.title.name,
        kind: parsed.title.kind,
        requirements: parsed.requirements,
        after: parsed.after,
        sees_all: who.role.sees_all(),
        not_before: parsed.not_before,
        trace: parsed.trace,
        local: submission.local,
        idempotency_key: submission.idempotency_key.as_ref().map(|key| who.idempotency_key(key)),
        user_limits_apply: !who.role.changes_all(),
        config_bytes: 0,
        payload: Arc::new(payload),
    }
}
