//! The messages of all services, from any bytes and from mostly valid messages. Each conversion ends in an error that names the
//! field, or in a value that stays the same when it is sent and received again.

mod build;

use super::unstructured::Unstructured;
use aitk_common::control_plane::{Artifact, Forecast, JobEvent, JobView, ServerInfo, Submission, SubmissionReceipt};
use aitk_common::control_plane::{ToCoordinator, ToWorker, WorkerView};
use aitk_common::hash::ContentHash;
use aitk_common::id::{AttemptId, JobId, TaskId, UserName, WorkerId};
use aitk_common::security::role::Role;
use aitk_proto::v1;
use build::Make;
use prost::Message;
use std::fmt::{Debug, Display};

/// The longest error message, because errors are sent in a header of limited size.
const MAX_ERROR_BYTES: usize = 2048;

/// How the bytes are turned into a message.
#[derive(Clone, Copy)]
enum Form {
    /// They are the encoded message.
    Raw,
    /// They determine its fields.
    Built,
    /// They determine its fields; then one byte of the encoded message is changed, or its second half is removed.
    Damaged,
}

/// The first byte selects the message, the second how the others are turned into it.
pub fn run(data: &[u8]) {
    let mut input = Unstructured::new(data);
    let kind = input.below(MESSAGES.len() + 1);
    let form = match input.byte() % 8 {
        0 => Form::Raw,
        1 => Form::Damaged,
        _ => Form::Built,
    };
    if kind == MESSAGES.len() {
        let built = String::make(&mut input);
        let raw = String::from_utf8_lossy(input.rest());
        return parse_names(if built.is_empty() { &raw } else { &built });
    }
    dispatch(kind, form, &mut input);
}

/// `A => B`: the wire type A is converted to the domain type B and back. After the `;`: wire types that the services use without
/// conversion.
macro_rules! messages {
    ($($wire:ident => $domain:ty,)*; $($plain:ident)*) => {
        /// The names of all tested messages.
        pub const MESSAGES: &[&str] = &[$(stringify!($wire),)* $(stringify!($plain)),*];

        fn dispatch(kind: usize, form: Form, input: &mut Unstructured<'_>) {
            match MESSAGES[kind] {
                $(stringify!($wire) => round_trip::<v1::$wire, $domain>(&encode::<v1::$wire>(form, input)),)*
                $(stringify!($plain) => round_trip_wire::<v1::$plain>(&encode::<v1::$plain>(form, input)),)*
                other => unreachable!("{other}"),
            }
        }
    };
}

messages! {
    WorkerMessage => ToCoordinator,
    CoordinatorMessage => ToWorker,
    SubmitRequest => Submission,
    SubmitReply => SubmissionReceipt,
    InfoReply => ServerInfo,
    Job => JobView,
    JobEvent => JobEvent,
    Worker => WorkerView,
    Artifact => Artifact,
    ForecastReply => Forecast,
    ;
    InfoRequest GetJobRequest ListJobsRequest ListJobsReply StopJobRequest ResumeJobRequest PauseJobRequest
    SetPriorityRequest ExplainRequest EventsRequest ArtifactsRequest ArtifactsReply ListWorkersRequest ListWorkersReply
    DrainWorkerRequest RemoveJobRequest ForgetWorkerRequest CreateTokenRequest CreateTokenReply ListTokensRequest ListTokensReply RevokeTokenRequest TokenInfo
    ReadAuditRequest ReadAuditReply CollectGarbageRequest CollectGarbageReply
    HasRequest HasReply PutBlobRequest PutBlobReply GetBlobRequest GetBlobReply SubmitArrayRequest
    JoinRequest JoinReply RenewRequest RenewReply CreateJoinTokenRequest CreateJoinTokenReply ListCertificatesRequest
    ListCertificatesReply RevokeWorkerRequest RevokeWorkerReply SaveJobRequest SampleJobRequest
}

fn encode<Wire: Message + Make>(form: Form, input: &mut Unstructured<'_>) -> Vec<u8> {
    if let Form::Raw = form {
        return input.rest().to_vec();
    }
    let (offset, byte) = match form {
        Form::Damaged => (usize::from(input.byte()), input.byte()),
        _ => (0, 0),
    };
    let mut bytes = Wire::make(input).encode_to_vec();
    if let Form::Damaged = form {
        match bytes.get_mut(offset) {
            Some(target) => *target = byte,
            None => bytes.truncate(bytes.len() / 2),
        }
    }
    bytes
}

fn round_trip<Wire, Domain>(bytes: &[u8])
where
    Wire: Message + Default + From<Domain>,
    Domain: TryFrom<Wire, Error: Display> + Debug,
{
    let Ok(wire) = Wire::decode(bytes) else { return };
    match Domain::try_from(wire) {
        Err(error) => check_error(&error),
        Ok(value) => {
            // Their debug texts are compared, because NaN is not equal to itself.
            let text = format!("{value:?}");
            let sent = Wire::from(value).encode_to_vec();
            let received = Wire::decode(&*sent).expect("an encoded message can be decoded");
            match Domain::try_from(received) {
                Err(error) => panic!("an accepted value is refused after a round trip: {error}\n{text}"),
                Ok(again) => assert_eq!(format!("{again:?}"), text),
            }
        }
    }
}

fn check_error(error: &dyn Display) {
    let text = error.to_string();
    assert!(!text.is_empty(), "an empty error message");
    assert!(
        text.len() <= MAX_ERROR_BYTES,
        "an error of {} bytes: {text:.200}",
        text.len()
    );
}

fn round_trip_wire<Wire: Message + Default + Debug + PartialEq>(bytes: &[u8]) {
    let Ok(wire) = Wire::decode(bytes) else { return };
    let again = Wire::decode(&*wire.encode_to_vec()).expect("an encoded message can be decoded");
    // NaN is not equal to itself, but its debug text is; the debug text of a map has no fixed order. No message has both.
    assert!(
        again == wire || format!("{again:?}") == format!("{wire:?}"),
        "{again:?}\n{wire:?}"
    );
}

/// Parses names and ids, as services without a domain type do.
fn parse_names(text: &str) {
    assert_unchanged(text, JobId::parse(text));
    assert_unchanged(text, TaskId::parse(text));
    assert_unchanged(text, AttemptId::parse(text));
    assert_unchanged(text, WorkerId::parse(text));
    assert_unchanged(text, UserName::parse(text));
    // Upper case is accepted and becomes lower case.
    assert_unchanged(&text.to_ascii_lowercase(), ContentHash::parse(text));
    assert_unchanged(text, text.parse::<Role>().map(Role::name));
}

fn assert_unchanged<T: Display, E: Display>(text: &str, parsed: Result<T, E>) {
    match parsed {
        Ok(value) => assert_eq!(value.to_string(), text),
        Err(error) => assert!(!error.to_string().is_empty(), "an empty error message"),
    }
}
