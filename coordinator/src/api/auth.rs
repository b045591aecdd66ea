//! Who may call: the token, and the protocol version.

use aitk_common::control::PROTOCOL_VERSION;
use aitk_proto::PROTOCOL_HEADER;
use std::sync::Arc;
use subtle::ConstantTimeEq;
use tonic::service::Interceptor;
use tonic::{Request, Status};

/// Stands before every service.
#[derive(Clone)]
pub(crate) struct Gate {
    token: Arc<str>,
}

impl Gate {
    pub(crate) fn new(token: &str) -> Self {
        Self { token: token.into() }
    }
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Gate(..)")
    }
}

impl Interceptor for Gate {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        let metadata = request.metadata();
        let given = metadata.get("authorization").and_then(|value| value.to_str().ok());
        let Some(given) = given.and_then(|text| text.strip_prefix("Bearer ")) else {
            return Err(Status::unauthenticated(
                "no token was given; set AITK_TOKEN, or AITK_TOKEN_FILE to a copy of the coordinator's token file",
            ));
        };
        if !bool::from(given.as_bytes().ct_eq(self.token.as_bytes())) {
            return Err(Status::unauthenticated(
                "the token is not this coordinator's; compare AITK_TOKEN or AITK_TOKEN_FILE with the coordinator's token file",
            ));
        }
        let protocol = metadata.get(PROTOCOL_HEADER).and_then(|value| value.to_str().ok());
        if protocol.and_then(|text| text.parse().ok()) != Some(PROTOCOL_VERSION) {
            return Err(protocol_mismatch(protocol.unwrap_or("none")));
        }
        Ok(request)
    }
}

/// The other side speaks another version.
pub(super) fn protocol_mismatch(theirs: &str) -> Status {
    let theirs: String = theirs.chars().take(20).collect();
    Status::failed_precondition(format!(
        "protocol version {theirs} was spoken, this coordinator (aitk {}) speaks {PROTOCOL_VERSION}; \
         install the same version of aitk on both sides",
        env!("CARGO_PKG_VERSION"),
    ))
}
