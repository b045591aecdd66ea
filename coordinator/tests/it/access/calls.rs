//! Every call of the protocol, with every role that may not make it. The calls are read from the .proto file, so new ones are
//! tested, too.

use super::{LONG_LEASE, create_token};
use crate::support::{TestCoordinator, within};
use aitk_proto::PROTOCOL_HEADER;
use bytes::Buf;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

const PROTOCOL: &str = include_str!("../../../../proto/proto/aitk/v1/aitk.proto");
const VIEWER: &str =
    "Jobs/Info Jobs/Get Jobs/List Jobs/Explain Jobs/Fit Jobs/Events Jobs/Artifacts Jobs/ListWorkers Blobs/Get";
const SUBMITTER: &str = "Jobs/Submit Jobs/SubmitArray Jobs/Submission Jobs/Stop Jobs/Resume Jobs/Pause Jobs/Save Jobs/Sample Jobs/SetPriority Jobs/Remove Blobs/Has Blobs/Put";
const OPERATOR: &str = "Jobs/DrainWorker Jobs/ForgetWorker";
const WORKER: &str = "Workers/Session Workers/Renew Jobs/Info Blobs/Has Blobs/Put Blobs/Get";

/// All calls of the protocol, such as `Jobs/Get`.
fn all_calls() -> Vec<String> {
    let (mut service, mut calls) = ("", Vec::new());
    for line in PROTOCOL.lines() {
        let mut words = line.split_whitespace();
        match (words.next(), words.next()) {
            (Some("service"), Some(name)) => service = name,
            (Some("rpc"), Some(rest)) => calls.push(format!("{service}/{}", rest.split('(').next().unwrap())),
            _ => {}
        }
    }
    assert!(calls.len() >= 23, "{calls:?}");
    calls
}

/// A codec that encodes empty messages, which are valid for every message type.
#[derive(Default)]
struct Empty;

impl Codec for Empty {
    type Encode = ();
    type Decode = ();
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Empty {
    type Item = ();
    type Error = Status;

    fn encode(&mut self, (): (), _: &mut EncodeBuf<'_>) -> Result<(), Status> {
        Ok(())
    }
}

impl Decoder for Empty {
    type Item = ();
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<()>, Status> {
        from.advance(from.remaining());
        Ok(Some(()))
    }
}

/// Makes a call with an empty message. Returns its status code.
async fn call_status(channel: &Channel, call: &str, authorization: Option<&str>) -> Code {
    let mut client = tonic::client::Grpc::new(channel.clone());
    within(client.ready()).await.unwrap();
    let mut request = Request::new(tokio_stream::once(()));
    let headers = request.metadata_mut();
    headers.insert(PROTOCOL_HEADER, "1".parse().unwrap());
    if let Some(text) = authorization {
        headers.insert("authorization", text.parse().unwrap());
    }
    let path: PathAndQuery = format!("/aitk.v1.{call}").parse().unwrap();
    let ended = within(async {
        let mut answers = client.streaming(request, path, Empty).await?.into_inner();
        while answers.message().await?.is_some() {}
        Ok::<_, Status>(())
    });
    ended.await.map_or_else(|status| status.code(), |()| Code::Ok)
}

async fn channel(coordinator: &TestCoordinator) -> Channel {
    Endpoint::from_shared(coordinator.running.url())
        .unwrap()
        .connect()
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_call_needs_authentication() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let channel = channel(&coordinator).await;
    let basic = format!("Basic {}", coordinator.running.token);
    for call in all_calls() {
        for authorization in [
            None,
            Some("Bearer"),
            Some(basic.as_str()),
            Some(coordinator.running.token.as_str()),
        ] {
            let code = call_status(&channel, &call, authorization).await;
            assert_eq!(code, Code::Unauthenticated, "{call} {authorization:?}");
        }
    }
    // Wrong tokens last: after some of them the client is blocked.
    for call in all_calls() {
        let code = call_status(&channel, &call, Some("Bearer not-the-right-one-but-long")).await;
        assert!(
            matches!(code, Code::Unauthenticated | Code::ResourceExhausted),
            "{call}: {code}"
        );
    }
    within(coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workers_certificate_permits_the_same_calls_as_a_workers_token() {
    let server = crate::pki::PkiServer::start().await;
    let joined = server.join_worker("box").await;
    let channel = joined.channel(&server).await;
    let allowed: Vec<&str> = WORKER.split(' ').collect();
    for call in all_calls() {
        let code = call_status(&channel, &call, None).await;
        let refused = matches!(
            code,
            Code::PermissionDenied | Code::Unauthenticated | Code::Unimplemented
        );
        if allowed.contains(&call.as_str()) {
            assert!(!refused, "{call}: {code}");
        } else {
            assert_eq!(code, Code::PermissionDenied, "{call}");
        }
    }
    crate::pki::wait_for_audit_line(&server, "a refusal", |line| {
        line.action == "refused" && line.who == "box"
    })
    .await;
    // The coordinator checks only the token of a call that has both.
    let wrong = call_status(&channel, "Jobs/Info", Some("Bearer not-the-right-one-but-long")).await;
    assert_eq!(wrong, Code::Unauthenticated);
    // A join token permits only `Workers/Join`. Only some calls, because wrong tokens are rate limited.
    let (text, _) = server.join_token("other").await;
    let bearer = format!("Bearer {}", aitk_common::security::join::split(&text).0);
    assert_eq!(
        call_status(&channel, "Workers/Join", Some(&bearer)).await,
        Code::InvalidArgument
    );
    for call in all_calls().into_iter().filter(|call| call != "Workers/Join").take(15) {
        assert_eq!(
            call_status(&channel, &call, Some(&bearer)).await,
            Code::Unauthenticated,
            "{call}"
        );
    }
    within(server.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_role_may_make_its_calls_and_no_others() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let channel = channel(&coordinator).await;
    for (role, allowed) in [
        ("viewer", VIEWER.to_owned()),
        ("submitter", format!("{VIEWER} {SUBMITTER}")),
        ("operator", format!("{VIEWER} {SUBMITTER} {OPERATOR}")),
        ("worker", WORKER.to_owned()),
    ] {
        let allowed: Vec<&str> = allowed.split(' ').collect();
        let (secret, _) = create_token(&coordinator.clients, "somebody", role, None).await;
        let authorization = format!("Bearer {secret}");
        for call in all_calls() {
            let code = call_status(&channel, &call, Some(&authorization)).await;
            let refused = matches!(
                code,
                Code::PermissionDenied | Code::Unauthenticated | Code::Unimplemented
            );
            if allowed.contains(&call.as_str()) {
                assert!(!refused, "{role} {call}: {code}");
            } else {
                assert_eq!(code, Code::PermissionDenied, "{role} {call}");
            }
        }
    }
    // The tables above name no call that the protocol does not have.
    let calls = all_calls();
    for name in [VIEWER, SUBMITTER, OPERATOR, WORKER].join(" ").split(' ') {
        assert!(calls.iter().any(|call| call == name), "{name}");
    }
    within(coordinator.running.shutdown()).await;
}
