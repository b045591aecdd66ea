//! Checks before a submission is accepted: that the caller may submit it and that its inputs exist.

use super::jobs::JobsApi;
use super::status::storage_status;
use crate::access::Identity;
use crate::blob_access::BlobReference;
use crate::garbage::{PinGuard, UnusableReference, pin_and_check};
use crate::store::AuditLine;
use aitk_common::control_plane::Submission;
use aitk_common::error_chain::error_chain;
use aitk_common::hash::ContentHash;
use aitk_common::id::UserName;
use aitk_common::security::role::Role;
use aitk_common::storage::StorageError;
use std::collections::BTreeSet;
use tonic::{Code, Status};

impl JobsApi {
    /// Returns the owner of a submitted job, and checks that the caller may submit it so.
    pub(super) fn check_owner(
        &self,
        who: &Identity,
        submission: &Submission,
        same_machine: bool,
    ) -> Result<UserName, Status> {
        let owner = submission.owner.clone().unwrap_or_else(|| who.owner());
        let refusal = if submission.local && who.role != Role::Admin {
            Status::permission_denied(
                "a job that runs in place reads and writes the server's own files, which takes an admin's token; use `aitk submit`",
            )
        } else if submission.local && !same_machine {
            Status::invalid_argument(
                "a job that runs in place can only be submitted on the coordinator's own machine; use `aitk submit`",
            )
        } else if owner != who.name && !who.role.changes_all() {
            Status::permission_denied(format!(
                "your token belongs to {}, and so do jobs submitted with it; only an operator may submit in another name (--user, AITK_USER)",
                who.name
            ))
        } else {
            return Ok(owner);
        };
        let mut line = who.audit_line(self.0.clock.wall_time(), "job.submit", "");
        (line.done, line.detail) = (false, refusal.message().to_owned());
        self.0.access.record_audit(line);
        Err(refusal)
    }

    /// Records an invalid job in the audit log: no regular client sends one.
    pub(super) fn audit_refused_job(&self, who: &Identity, refusal: Status) -> Status {
        if refusal.code() == Code::InvalidArgument {
            let mut line = who.audit_line(self.0.clock.wall_time(), "job.submit", "");
            (line.done, line.detail) = (false, AuditLine::quote(refusal.message()));
            self.0.access.record_audit(line);
        }
        refusal
    }

    /// Checks that every input is in storage. The returned guards keep the inputs until the job is stored.
    pub(super) async fn pin_inputs(&self, who: &Identity, submission: &Submission) -> Result<Vec<PinGuard>, Status> {
        let visible = self.0.blob_access.referable_blobs(who).await?;
        let mut all = Vec::new();
        let mut checked: BTreeSet<ContentHash> = BTreeSet::new();
        for (path, snapshot) in &submission.inputs {
            // A snapshot used under several paths is checked once.
            if !checked.insert(*snapshot) {
                continue;
            }
            let reference = BlobReference::Snapshot(*snapshot);
            let missing = match pin_and_check(&self.0.pins, self.0.blobs.as_ref(), reference, &visible).await {
                Ok(held) => {
                    all.extend(held);
                    continue;
                }
                // Blobs that others uploaded are reported as missing.
                Err(UnusableReference::NotVisible(hash)) => {
                    let mut line = who.audit_line(self.0.clock.wall_time(), "job.submit", &hash.to_hex());
                    (line.done, line.detail) = (false, "an input that this user has not sent".into());
                    self.0.access.record_audit(line);
                    StorageError::NotFound { hash }
                }
                Err(UnusableReference::Storage(error)) => error,
            };
            match missing {
                StorageError::NotFound { hash } if hash == *snapshot => {
                    return Err(Status::failed_precondition(format!(
                        "inputs: the snapshot {snapshot} of {path} is not in storage; upload it first (`aitk submit` does)"
                    )));
                }
                StorageError::NotFound { hash } => {
                    return Err(Status::failed_precondition(format!(
                        "inputs: {hash}, a file of the snapshot of {path}, is not in storage; submit again, which uploads what is missing"
                    )));
                }
                error @ (StorageError::Malformed { .. } | StorageError::Name(_) | StorageError::TooLarge { .. }) => {
                    return Err(Status::invalid_argument(format!(
                        "inputs: {snapshot}, given for {path}, is not a snapshot: {}",
                        error_chain(&error)
                    )));
                }
                error => return Err(storage_status(&error)),
            }
        }
        Ok(all)
    }
}
