//! Signs certificates of workers.

use crate::clock::Clock;
use aitk_common::control_plane::UnixMillis;
use aitk_common::hash::ContentHash;
use aitk_common::id::UserName;
use aitk_common::security::ca::{Ca, CaError, CheckedRequest, WorkerCertificate};
use std::time::Duration;

/// The certificate authority, as a signer of workers' certificates.
#[derive(Debug)]
pub(crate) struct Signer {
    pub(super) ca: Ca,
    pub(super) worker_life: Duration,
}

impl Signer {
    /// Returns the SHA-256 of the authority's certificate, which tokens contain.
    pub(crate) fn hash(&self) -> ContentHash {
        self.ca.hash()
    }

    /// Signs a worker's certificate that is valid from now on; returns its PEM.
    pub(crate) fn worker(
        &self,
        request: &CheckedRequest,
        name: &UserName,
        enrolment: &str,
    ) -> Result<(String, WorkerCertificate), CaError> {
        self.ca
            .issue_worker(request, name, enrolment, wall_clock(), self.worker_life)
    }

    /// Returns the time after which a worker renews: half of the lifetime, so that an outage of the other half does no
    /// harm.
    pub(crate) fn renew_after(&self) -> Duration {
        self.worker_life / 2
    }
}

/// Returns the system's wall-clock time, which TLS uses as well. [`Clock::now`] of a running coordinator does not
/// advance while the machine is suspended.
pub(crate) fn wall_clock() -> UnixMillis {
    Clock::new().now()
}
