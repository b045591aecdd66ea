//! Who may call: the token, and the protocol version.

use aitk_common::control::PROTOCOL_VERSION;
use aitk_common::security::token::Token;
use aitk_proto::PROTOCOL_HEADER;
use std::sync::Arc;
use tonic::service::Interceptor;
use tonic::{Request, Status};

/// Stands before every service.
#[derive(Clone, Debug)]
pub(crate) struct Gate {
    token: Arc<Token>,
}

impl Gate {
    pub(crate) fn new(token: Token) -> Self {
        Self { token: Arc::new(token) }
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
        if !self.token.is(given) {
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
