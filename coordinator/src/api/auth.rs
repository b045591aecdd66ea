//! Authentication and authorization of every call, and the check of the protocol version.
//!
//! One table lists the right that each call needs. A call that is not in it is refused, so that a new call cannot be
//! left open by mistake.

use super::concurrent_call_limit::{CallLimiter, LimitedResponse};
use super::status::busy_status;
use crate::access::{Access, AuthenticationError, Identity};
use crate::connection_limiter::ConnectionLimiter;
use aitk_common::control_plane::PROTOCOL_VERSION;
use aitk_common::security::ca::WorkerCertificate;
use aitk_common::security::role::{Right, Role};
use aitk_common::security::token::Token;
use aitk_proto::{FORWARDED_HEADER, PROOF_HEADER, PROTOCOL_HEADER};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::task::{Context, Poll};
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::NamedService;
use tonic::transport::server::{TcpConnectInfo, TlsConnectInfo};
use tonic::{Request, Status};

/// The only call that a join token may make.
const JOIN: &str = "Workers/Join";

/// Returns the right that a call needs; `None` for unknown calls.
fn right_of(path: &str) -> Option<Right> {
    Some(match path.strip_prefix("/aitk.v1.")? {
        "Workers/Session" | "Workers/Renew" => Right::Work,
        JOIN => Right::Join,
        "Jobs/Info" => Right::ReadInfo,
        "Jobs/Submit" | "Jobs/SubmitArray" => Right::Submit,
        "Jobs/Get" | "Jobs/List" | "Jobs/Explain" | "Jobs/Events" | "Jobs/Artifacts" => Right::SeeJobs,
        "Jobs/Stop" | "Jobs/Resume" | "Jobs/Pause" | "Jobs/SetPriority" | "Jobs/Remove" | "Jobs/Submission" => {
            Right::ChangeJobs
        }
        "Jobs/Save" | "Jobs/Sample" => Right::ChangeJobs,
        "Jobs/ListWorkers" | "Jobs/Fit" => Right::SeeWorkers,
        "Jobs/DrainWorker" | "Jobs/ForgetWorker" => Right::ChangeWorkers,
        "Blobs/Has" | "Blobs/Put" => Right::Upload,
        "Blobs/Get" => Right::Download,
        "Admin/CollectGarbage" | "Admin/CreateToken" | "Admin/ListTokens" | "Admin/RevokeToken" | "Admin/ReadAudit" => {
            Right::Administer
        }
        "Admin/CreateJoinToken" | "Admin/ListCertificates" | "Admin/RevokeWorker" => Right::Administer,
        _ => return None,
    })
}

/// Authenticates calls before they reach a service.
#[derive(Clone)]
pub(crate) struct Authenticator {
    access: Access,
    forwarding_secret: Option<Token>,
    /// Workers on other machines must show a certificate.
    certificates_only: bool,
    limiter: ConnectionLimiter,
    calls: CallLimiter,
}

impl std::fmt::Debug for Authenticator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authenticator").finish_non_exhaustive()
    }
}

impl Authenticator {
    /// `forwarding_secret` is the secret that another coordinator sends with a forwarded call.
    pub(crate) fn new(
        access: Access,
        forwarding_secret: Option<Token>,
        certificates_only: bool,
        limiter: ConnectionLimiter,
    ) -> Self {
        Self {
            access,
            forwarding_secret,
            certificates_only,
            limiter,
            calls: CallLimiter::new(),
        }
    }

    /// Returns the origin of a call. The address that another coordinator forwards is used only with the secret of this one;
    /// otherwise clients could choose the address for which their failed guesses are counted.
    fn origin<B>(&self, request: &http::Request<B>) -> Origin {
        let passed_on = self.forwarding_secret.as_ref().is_some_and(|forwarding_secret| {
            let shown = request
                .headers()
                .get(PROOF_HEADER)
                .and_then(|value| value.to_str().ok());
            shown.is_some_and(|shown| forwarding_secret.is(shown))
        });
        if passed_on {
            let from = request
                .headers()
                .get(FORWARDED_HEADER)
                .and_then(|value| value.to_str().ok());
            return Origin {
                from: from.and_then(|text| text.parse().ok()),
                same_machine: false,
            };
        }
        let from = peer_address(request);
        Origin {
            from,
            same_machine: from.is_some_and(|from| from.ip().to_canonical().is_loopback()),
        }
    }

    /// Wraps a service so that its calls are authenticated.
    pub(super) fn wrap<S>(&self, service: S) -> AuthenticatedService<S> {
        AuthenticatedService {
            authenticator: self.clone(),
            service,
        }
    }

    fn authorize<B>(&self, request: &http::Request<B>, origin: &Origin) -> Result<Identity, Status> {
        let header = |name: &str| request.headers().get(name).and_then(|value| value.to_str().ok());
        let (token, from) = (header("authorization"), origin.from);
        let token = token.and_then(|text| text.strip_prefix("Bearer "));
        let joins = request.uri().path().strip_prefix("/aitk.v1.") == Some(JOIN);
        let joining = token
            .filter(|_| joins)
            .and_then(|token| self.access.authenticate_join_token(token, from));
        let is_joining = joining.is_some();
        let who = match (joining, token, client_certificate(request)) {
            (Some(joining), _, _) => joining,
            (None, Some(token), _) => self.access.authenticate(token, from),
            (None, None, Some(shown)) => self.access.authenticate_certificate(&shown, from),
            (None, None, None) => {
                return Err(Status::unauthenticated(
                    "no token was given; set AITK_TOKEN, or AITK_TOKEN_FILE to a copy of the coordinator's token file",
                ));
            }
        };
        let who = who.map_err(denied_status)?;
        // The peer of this connection; for a forwarded call, the other coordinator.
        if let Some(peer) = peer_address(request) {
            self.limiter.mark_authenticated(peer);
        }
        let protocol = header(PROTOCOL_HEADER);
        if protocol.and_then(|text| text.parse().ok()) != Some(PROTOCOL_VERSION) {
            return Err(protocol_mismatch(protocol.unwrap_or("none")));
        }
        let Some(right) = right_of(request.uri().path()) else {
            return Err(Status::unimplemented("this coordinator does not know that call"));
        };
        if is_joining {
            return Ok(who);
        }
        if self.certificates_only && !origin.same_machine && needs_certificate(&who, right) {
            self.access.audit_missing_certificate(&who);
            return Err(Status::permission_denied(
                "this coordinator lets workers on other machines in with a certificate only, not with a token: make a join token \
                 with `aitk-coordinator worker join-token`, then run `aitk-worker join` here (or start the coordinator with \
                 --allow-worker-tokens)",
            ));
        }
        if !self.access.allows(&who, right) {
            return Err(Status::permission_denied(format!(
                "your token's role is {}, which may not {right}; ask an administrator for another one",
                who.role
            )));
        }
        Ok(who)
    }
}

/// Origin of a call.
#[derive(Clone, Copy, Debug)]
struct Origin {
    from: Option<SocketAddr>,
    /// It came directly over loopback.
    same_machine: bool,
}

/// Whether this call was made on the coordinator's own machine.
pub(super) fn same_machine<T>(request: &Request<T>) -> bool {
    let origin = request.extensions().get::<Origin>();
    origin.is_some_and(|origin| origin.same_machine)
}

/// Whether the caller is a worker that shows a token instead of a certificate.
fn needs_certificate(who: &Identity, right: Right) -> bool {
    let is_worker = who.role == Role::Worker || (right == Right::Work && who.role.may(right));
    is_worker && who.certificate.is_none()
}

fn denied_status(denied: AuthenticationError) -> Status {
    match denied {
        AuthenticationError::InvalidToken => Status::unauthenticated(
            "the token is not this coordinator's, or has expired or been revoked; compare AITK_TOKEN or AITK_TOKEN_FILE \
             with what the administrator gave you (`aitk-coordinator token ls` shows what is valid)",
        ),
        AuthenticationError::TooManyFailures => busy_status(
            "too many wrong tokens came from your address; wait a minute, then try again with the right one".to_owned(),
        ),
        AuthenticationError::Certificate(problem) => Status::unauthenticated(format!(
            "this worker's certificate {problem}; join again with a new join token: `aitk-coordinator worker join-token` there, \
             `aitk-worker join` here"
        )),
        AuthenticationError::Join(problem) => Status::unauthenticated(format!(
            "{problem}; ask for another one: aitk-coordinator worker join-token"
        )),
    }
}

/// Returns the worker's certificate that TLS verified, if the client sent one.
fn client_certificate<B>(request: &http::Request<B>) -> Option<WorkerCertificate> {
    let shown = request
        .extensions()
        .get::<TlsConnectInfo<TcpConnectInfo>>()?
        .peer_certs()?;
    WorkerCertificate::read(shown.first()?).ok()
}

/// Returns the address of the client.
pub(crate) fn peer_address<B>(request: &http::Request<B>) -> Option<SocketAddr> {
    let extensions = request.extensions();
    let plain = extensions.get::<TcpConnectInfo>();
    let info = plain.or_else(|| {
        extensions
            .get::<TlsConnectInfo<TcpConnectInfo>>()
            .map(TlsConnectInfo::get_ref)
    });
    info.and_then(TcpConnectInfo::remote_addr)
}

/// Returns the caller, as set by [`AuthenticatedService`].
pub(super) fn caller<T>(request: &Request<T>) -> Result<Identity, Status> {
    let found = request.extensions().get::<Identity>().cloned();
    found.ok_or_else(|| Status::internal("the call was not authenticated; this is a bug of the coordinator"))
}

/// A service whose calls are authenticated.
#[derive(Clone, Debug)]
pub(super) struct AuthenticatedService<S> {
    authenticator: Authenticator,
    service: S,
}

impl<S: NamedService> NamedService for AuthenticatedService<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for AuthenticatedService<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        let origin = self.authenticator.origin(&request);
        match self.authenticator.authorize(&request, &origin) {
            Ok(who) => {
                request.extensions_mut().insert(origin);
                request.extensions_mut().insert(who.clone());
                let (calls, mut service) = (self.authenticator.calls.clone(), self.service.clone());
                Box::pin(async move {
                    let path = request.uri().path().to_owned();
                    let permit = match calls.admit(&who, &path).await {
                        Ok(permit) => permit,
                        Err(status) => return Ok(status.into_http()),
                    };
                    let (parts, body) = request.into_parts();
                    let (body, _permit) = calls.limit_body(&who, &path, body);
                    let answer = service.call(http::Request::from_parts(parts, body)).await?;
                    Ok(answer.map(|body| Body::new(LimitedResponse::new(body, permit))))
                })
            }
            Err(status) => Box::pin(async move { Ok(status.into_http()) }),
        }
    }
}

/// Status for a client with another protocol version.
pub(super) fn protocol_mismatch(theirs: &str) -> Status {
    let theirs: String = theirs.chars().take(20).collect();
    Status::failed_precondition(format!(
        "protocol version {theirs} was spoken, this coordinator (aitk {}) speaks {PROTOCOL_VERSION}; \
         install the same version of aitk on both sides",
        env!("CARGO_PKG_VERSION"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_with_a_token_needs_a_certificate_and_a_user_does_not() {
        use aitk_common::control_plane::UnixMillis;
        use aitk_common::id::UserName;
        let who = |role, certificate| Identity {
            name: UserName::new("x"),
            role,
            by: "t1".into(),
            from: None,
            certificate,
        };
        for right in [Right::Work, Right::Download, Right::Upload] {
            assert!(needs_certificate(&who(Role::Worker, None), right));
            assert!(!needs_certificate(&who(Role::Worker, Some(UnixMillis(9))), right));
        }
        assert!(needs_certificate(&who(Role::Admin, None), Right::Work));
        assert!(!needs_certificate(&who(Role::Admin, None), Right::Download));
        // A missing right is reported as such.
        assert!(!needs_certificate(&who(Role::Viewer, None), Right::Work));
    }

    #[test]
    fn every_call_of_the_protocol_needs_a_right() {
        let text = include_str!("../../../proto/proto/aitk/v1/aitk.proto");
        let (mut service, mut calls) = ("", 0);
        for line in text.lines() {
            let mut words = line.split_whitespace();
            match (words.next(), words.next()) {
                (Some("service"), Some(name)) => service = name,
                (Some("rpc"), Some(rest)) => {
                    let name = rest.split('(').next().unwrap();
                    assert!(
                        right_of(&format!("/aitk.v1.{service}/{name}")).is_some(),
                        "{service}/{name}"
                    );
                    calls += 1;
                }
                _ => {}
            }
        }
        assert!(calls >= 23, "{calls}");
        assert_eq!(right_of("/aitk.v1.Jobs/Nothing"), None);
        assert_eq!(right_of("/other.Jobs/Get"), None);
    }
}
