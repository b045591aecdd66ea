//! The certificate authority at work.

use crate::clock::Clock;
use aitk_common::control::UnixMillis;
use aitk_common::hash::ContentHash;
use aitk_common::id::UserName;
use aitk_common::security::ca::{Ca, CaError, CheckedRequest, WorkerCertificate};
use std::time::Duration;

/// The authority at work.
#[derive(Debug)]
pub(crate) struct Signer {
    pub(super) ca: Ca,
    pub(super) worker_life: Duration,
}

impl Signer {
    /// What tokens name the authority by.
    pub(crate) fn hash(&self) -> ContentHash {
        self.ca.hash()
    }

    /// A worker's certificate, from now on.
    pub(crate) fn worker(
        &self,
        request: &CheckedRequest,
        name: &UserName,
        enrolment: &str,
    ) -> Result<(String, WorkerCertificate), CaError> {
        self.ca
            .issue_worker(request, name, enrolment, wall_clock(), self.worker_life)
    }

    /// When a worker should ask for the next one: after half of its life, so that an outage of the other half does no harm.
    pub(crate) fn renew_after(&self) -> Duration {
        self.worker_life / 2
    }
}

/// What the clock on the wall says. Not the coordinator's own one: that stands still while the machine sleeps, and TLS asks
/// the wall.
pub(crate) fn wall_clock() -> UnixMillis {
    Clock::new().now()
}
