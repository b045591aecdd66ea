//! From a submission to what the scheduler is told of it.

use crate::access::Identity;
use crate::submit::Asked;
use aitk_common::control::Submission;
use aitk_common::id::JobId;
use aitk_scheduler::{NewJob, Payload};
use std::sync::Arc;

/// What the core is told of a submission.
pub(super) fn new_job(
    who: &Identity,
    id: JobId,
    seed: u64,
    asked: Asked,
    submission: &Submission,
    payload: Payload,
) -> NewJob {
    NewJob {
        id,
        seed,
        name: asked.named.name,
        kind: asked.named.kind,
        requirements: asked.wants,
        after: asked.after,
        sees_all: who.role.sees_all(),
        not_before: asked.not_before,
        trace: asked.trace,
        local: submission.local,
        idempotency_key: submission.idempotency_key.as_ref().map(|key| who.key(key)),
        capped: !who.role.changes_all(),
        config_bytes: 0,
        payload: Arc::new(payload),
    }
}
