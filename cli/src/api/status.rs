//! What a coordinator's answers mean: failures with exit codes and hints.

use crate::exit::Exit;
use crate::failure::Failure;
use crate::output::format::{printable, printable_lines};
use aitk_proto::{RETRY_HEADER, RETRY_LATER, is_storage_refused};
use tonic::{Code, Status};

/// Why a call failed.
pub(super) struct CallFailure {
    pub(super) failure: Failure,
    /// The code of the coordinator's answer; `None`: it did not answer.
    pub(super) code: Option<Code>,
    /// The coordinator's own message.
    pub(super) answer: String,
    /// A try before the last one may have been carried out.
    pub(super) repeated: bool,
}

/// What a failed call says about the submission that it asked about.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SubmissionFailure {
    /// The coordinator would refuse the submission.
    Refused(Failure),
    /// Nothing: the call itself failed.
    CallFailed(Failure),
}

impl SubmissionFailure {
    pub(super) fn of(problem: CallFailure) -> Self {
        match problem.code {
            Some(Code::InvalidArgument) => Self::Refused(Failure::failed(printable(&problem.answer))),
            // The coordinator's answer to a submission that conflicts with what is stored (`Refusal::Conflict`).
            Some(Code::Aborted) => Self::Refused(problem.failure),
            _ => Self::CallFailed(problem.failure),
        }
    }
}

/// The result of a call that deletes. A retry gets `NotFound` if an earlier try deleted it, so `known` is the result.
pub(super) fn deleted_before<T>(problem: CallFailure, known: Option<T>) -> Result<T, Failure> {
    match (problem.code, known) {
        (Some(Code::NotFound), Some(known)) if problem.repeated => Ok(known),
        _ => Err(problem.failure),
    }
}

/// Returns a hint for a failed TLS handshake, by the name of the TLS library's error.
pub(super) fn tls_hint(problem: &str) -> Option<&'static str> {
    let hints = [
        (
            "InvalidContentType",
            "it may serve without TLS: write http:// before its address",
        ),
        (
            "UnknownIssuer",
            "no authority that this machine trusts signed its certificate: use the whole token from `aitk-coordinator token create`, which names the authority, or give --ca-file FILE (the certificate itself, if it is self-signed)",
        ),
        (
            "CaUsedAsEndEntity",
            "its certificate is a CA certificate; create one for a server: openssl req -x509 … -addext basicConstraints=critical,CA:FALSE",
        ),
        (
            "NotValidForName",
            "its certificate is for another name: use a name of the certificate, or add this one to it as a subjectAltName",
        ),
    ];
    let found = hints.iter().find(|(word, _)| problem.contains(word));
    found.map(|(_, hint)| *hint)
}

/// Converts a gRPC status to a failure. Its message may be of any server, so control characters are removed.
#[must_use]
pub fn status_failure(server: &str, status: &Status) -> Failure {
    let message = printable_lines(status.message());
    if is_storage_refused(status) {
        return Failure::new(Exit::Internal, format!("{server} cannot use its storage: {message}"))
            .hint("the person who runs the coordinator has to mend that; nothing is wrong with the job or the token");
    }
    if is_busy(status) {
        return Failure::new(Exit::Unreachable, format!("{server} is busy: {message}"))
            .hint("nothing was done; run the command again in a while");
    }
    match status.code() {
        Code::NotFound => Failure::not_found(message),
        Code::Unauthenticated | Code::PermissionDenied => Failure::new(Exit::Unauthorised, message)
            .hint("`aitk doctor` shows which token is used and where it comes from"),
        Code::Unavailable | Code::DeadlineExceeded if is_transport(status) => Failure::new(
            Exit::Unreachable,
            format!("the connection to {server} is broken: {message}"),
        )
        .hint("check that the coordinator is running; `aitk doctor` tests the connection"),
        // The coordinator's own answer: its database does not answer, it shuts down, or no coordinator leads.
        Code::Unavailable | Code::DeadlineExceeded => {
            Failure::new(Exit::Unreachable, format!("{server} cannot serve this now: {message}"))
                .hint("try again in a moment; if it fails again, the coordinator's log says why")
        }
        // tonic reports a connection that breaks during a stream as one of these codes.
        Code::Unknown | Code::Cancelled if is_transport(status) => Failure::new(
            Exit::Unreachable,
            format!("the connection to {server} broke off: {message}"),
        ),
        Code::FailedPrecondition | Code::AlreadyExists | Code::Aborted => Failure::new(Exit::Conflict, message),
        Code::Unimplemented => Failure::new(
            Exit::Conflict,
            format!("{server} does not support this call; it is another version of aitk"),
        )
        .hint("`aitk doctor` shows both versions"),
        // A server with TLS gives this error to a client that connects without TLS.
        _ if message.contains("h2 protocol error") && !server.starts_with("https:") => Failure::new(
            Exit::Unreachable,
            format!("{server} does not answer like a coordinator: {message}"),
        )
        .hint("it may require TLS: write https:// before its address"),
        // A standby coordinator reports this when the leader dies during a forwarded call. A status sent by the server
        // has no source.
        Code::Internal if is_transport(status) => Failure::new(
            Exit::Unreachable,
            format!("the connection to {server} broke off: {message}"),
        ),
        _ => Failure::failed(format!("{server} answered: {message}")),
    }
}

/// Whether the call came at a bad moment, as with too many calls at once: the coordinator did nothing, and the same call may succeed soon.
#[must_use]
pub fn is_busy(status: &Status) -> bool {
    status.code() == Code::ResourceExhausted
        && status
            .metadata()
            .get(RETRY_HEADER)
            .is_some_and(|value| value == RETRY_LATER)
}

fn is_transport(status: &Status) -> bool {
    std::error::Error::source(status).is_some()
}

pub(super) fn invalid_message(error: aitk_proto::ConvertError) -> Failure {
    let problem = printable_lines(&error.to_string());
    Failure::failed(format!("the coordinator sent an invalid message: {problem}"))
        .hint("it may be another version of aitk; `aitk doctor` shows both")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn certificate_errors_have_hints() {
        for (problem, part) in [
            ("invalid peer certificate: UnknownIssuer", "--ca-file"),
            (
                "invalid peer certificate: Other(OtherError(CaUsedAsEndEntity))",
                "CA:FALSE",
            ),
            ("certificate not valid for name; NotValidForName", "subjectAltName"),
        ] {
            assert!(tls_hint(problem).unwrap().contains(part));
        }
        assert!(tls_hint("Connection refused").is_none());
        let refused = status_failure("http://h:1", &Status::internal("h2 protocol error: http2 error"));
        assert_eq!(refused.exit, Exit::Unreachable);
        assert!(refused.render(false).contains("https://"), "{}", refused.render(false));
    }

    fn problem(code: Option<Code>, repeated: bool) -> CallFailure {
        CallFailure {
            failure: Failure::not_found("the server answered"),
            code,
            answer: "cluster.split: there is one image".to_owned(),
            repeated,
        }
    }

    #[test]
    fn a_retried_delete_that_finds_nothing_succeeds() {
        assert_eq!(deleted_before(problem(Some(Code::NotFound), true), Some(7)), Ok(7));
        for (code, repeated, known) in [
            (Some(Code::NotFound), false, Some(7)),
            (Some(Code::NotFound), true, None),
            (Some(Code::Aborted), true, Some(7)),
            (None, true, Some(7)),
        ] {
            assert!(deleted_before(problem(code, repeated), known).is_err(), "{code:?}");
        }
    }

    #[test]
    fn a_refused_submission_is_distinguished_from_a_call_that_failed() {
        let of = |code| SubmissionFailure::of(problem(code, false));
        assert_eq!(
            of(Some(Code::InvalidArgument)),
            SubmissionFailure::Refused(Failure::failed("cluster.split: there is one image"))
        );
        let failure = || Failure::not_found("the server answered");
        assert_eq!(of(Some(Code::Aborted)), SubmissionFailure::Refused(failure()));
        for code in [Some(Code::Unavailable), Some(Code::FailedPrecondition), None] {
            assert_eq!(of(code), SubmissionFailure::CallFailed(failure()), "{code:?}");
        }
    }

    #[test]
    fn an_unavailable_coordinator_is_distinguished_from_a_broken_connection() {
        for mut status in [
            Status::unavailable("the database does not answer"),
            Status::deadline_exceeded("nothing was sent"),
        ] {
            let answered = status_failure("http://s", &status);
            assert_eq!(answered.exit, Exit::Unreachable);
            assert_eq!(
                answered.message,
                format!("http://s cannot serve this now: {}", status.message())
            );
            let shown = answered.render(false);
            assert!(
                shown.contains("the coordinator's log") && !shown.contains("is running"),
                "{shown}"
            );
            status.set_source(std::sync::Arc::new(std::io::Error::other("connection refused")));
            let broken = status_failure("http://s", &status);
            assert_eq!(broken.exit, Exit::Unreachable);
            assert_eq!(
                broken.message,
                format!("the connection to http://s is broken: {}", status.message())
            );
            let shown = broken.render(false);
            assert!(shown.contains("check that the coordinator is running"), "{shown}");
        }
    }

    #[test]
    fn statuses_become_the_documented_exit_codes() {
        for (status, exit) in [
            (Status::not_found("no job x"), Exit::NotFound),
            (Status::unauthenticated("wrong token"), Exit::Unauthorised),
            (Status::unavailable("refused"), Exit::Unreachable),
            (Status::failed_precondition("protocol 2"), Exit::Conflict),
            (Status::internal("x"), Exit::Failed),
        ] {
            assert_eq!(status_failure("http://s", &status).exit, exit);
        }
        let marked = |mut status: Status, header: &'static str, value: &'static str| {
            status.metadata_mut().insert(header, value.parse().unwrap());
            status_failure("http://s", &status)
        };
        let busy = marked(Status::resource_exhausted("512 calls"), RETRY_HEADER, RETRY_LATER);
        assert_eq!(busy.exit, Exit::Unreachable);
        assert_eq!(busy.message, "http://s is busy: 512 calls");
        let refused = Status::unavailable("object storage refused to store a blob");
        let refused = marked(refused, aitk_proto::STORAGE_HEADER, aitk_proto::STORAGE_REFUSED);
        assert_eq!(refused.exit, Exit::Internal);
        for code in 1..=16 {
            let status = Status::new(Code::from_i32(code), "two\nlines \x1b]52;c;x\x07");
            let shown = status_failure("http://s", &status).render(false);
            assert!(!shown.contains(['\x1b', '\x07']), "{code}: {shown:?}");
            assert!(
                shown.contains("two\nlines") || code == Code::Unimplemented as i32,
                "{shown:?}"
            );
        }
        // The error is of the connection, not of the coordinator, so the stream is reopened.
        let mut cut = Status::internal("h2 protocol error: error reading a body from connection");
        cut.set_source(std::sync::Arc::new(std::io::Error::other("reset")));
        assert_eq!(status_failure("https://s", &cut).exit, Exit::Unreachable);
    }
}
