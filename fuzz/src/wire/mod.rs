//! Each service's messages: from any bytes, and from messages that are mostly as they should be. Each ends in an error
//! that names its field, or in a value that is the same after it was sent on.

mod build;

use super::unstructured::Unstructured;
use aitk_common::control::{Artifact, Forecast, JobEvent, JobView, ServerInfo, Submission, Submitted};
use aitk_common::control::{ToCoordinator, ToWorker, WorkerView};
use aitk_common::hash::ContentHash;
use aitk_common::id::{AttemptId, JobId, TaskId, UserName, WorkerId};
use aitk_common::security::role::Role;
use aitk_proto::v1;
use build::Make;
use prost::Message;
use std::fmt::{Debug, Display};

/// The longest error: it travels in a header, of which there is not much room.
const LONGEST_ERROR: usize = 2048;

/// How the bytes become a message.
#[derive(Clone, Copy)]
enum Form {
    /// They are one, or not.
    Raw,
    /// They decide its fields.
    Built,
    /// The same, and then one byte of it is changed or the end is missing.
    Damaged,
}

/// The first byte chooses the message, the second how the others become it.
pub fn run(data: &[u8]) {
    let mut input = Unstructured::new(data);
    let kind = input.below(MESSAGES.len() + 1);
    let form = match input.byte() % 8 {
        0 => Form::Raw,
        1 => Form::Damaged,
        _ => Form::Built,
    };
    if kind == MESSAGES.len() {
        let drawn = String::make(&mut input);
        let given = String::from_utf8_lossy(input.rest());
        return texts(if drawn.is_empty() { &given } else { &drawn });
    }
    dispatch(kind, form, &mut input);
}

/// `A => B`: the wire's A and the domain's B become each other. After the `;`: what the services use as it comes.
macro_rules! messages {
    ($($wire:ident => $domain:ty,)*; $($plain:ident)*) => {
        /// Every message that is tried, by its name.
        pub const MESSAGES: &[&str] = &[$(stringify!($wire),)* $(stringify!($plain)),*];

        fn dispatch(kind: usize, form: Form, input: &mut Unstructured<'_>) {
            match MESSAGES[kind] {
                $(stringify!($wire) => there_and_back::<v1::$wire, $domain>(&encoded::<v1::$wire>(form, input)),)*
                $(stringify!($plain) => plain::<v1::$plain>(&encoded::<v1::$plain>(form, input)),)*
                other => unreachable!("{other}"),
            }
        }
    };
}

messages! {
    WorkerMessage => ToCoordinator,
    CoordinatorMessage => ToWorker,
    SubmitRequest => Submission,
    SubmitReply => Submitted,
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
    ListCertificatesReply RevokeWorkerRequest RevokeWorkerReply
}

fn encoded<Wire: Message + Make>(form: Form, input: &mut Unstructured<'_>) -> Vec<u8> {
    if let Form::Raw = form {
        return input.rest().to_vec();
    }
    let (place, byte) = match form {
        Form::Damaged => (usize::from(input.byte()), input.byte()),
        _ => (0, 0),
    };
    let mut bytes = Wire::make(input).encode_to_vec();
    if let Form::Damaged = form {
        match bytes.get_mut(place) {
            Some(there) => *there = byte,
            None => bytes.truncate(bytes.len() / 2),
        }
    }
    bytes
}

fn there_and_back<Wire, Domain>(bytes: &[u8])
where
    Wire: Message + Default + From<Domain>,
    Domain: TryFrom<Wire, Error: Display> + Debug,
{
    let Ok(wire) = Wire::decode(bytes) else { return };
    match Domain::try_from(wire) {
        Err(error) => said(&error),
        Ok(value) => {
            // By their texts: a NaN is not equal to itself.
            let text = format!("{value:?}");
            let sent = Wire::from(value).encode_to_vec();
            let received = Wire::decode(&*sent).expect("what was sent is a message");
            match Domain::try_from(received) {
                Err(error) => panic!("what was taken cannot be sent on: {error}\n{text}"),
                Ok(again) => assert_eq!(format!("{again:?}"), text),
            }
        }
    }
}

fn said(error: &dyn Display) {
    let text = error.to_string();
    assert!(!text.is_empty(), "an error without a word");
    assert!(
        text.len() <= LONGEST_ERROR,
        "an error of {} bytes: {text:.200}",
        text.len()
    );
}

fn plain<Wire: Message + Default + Debug + PartialEq>(bytes: &[u8]) {
    let Ok(wire) = Wire::decode(bytes) else { return };
    let again = Wire::decode(&*wire.encode_to_vec()).expect("what was sent is a message");
    // A NaN is not equal to itself, its text is; a map has no order. No message has both.
    assert!(
        again == wire || format!("{again:?}") == format!("{wire:?}"),
        "{again:?}\n{wire:?}"
    );
}

/// Names and ids, as the services that have no domain type read them.
fn texts(text: &str) {
    same(text, JobId::parse(text));
    same(text, TaskId::parse(text));
    same(text, AttemptId::parse(text));
    same(text, WorkerId::parse(text));
    same(text, UserName::parse(text));
    // Capitals are taken, small letters given.
    same(&text.to_ascii_lowercase(), ContentHash::parse(text));
    same(text, text.parse::<Role>().map(Role::name));
}

fn same<T: Display, E: Display>(text: &str, parsed: Result<T, E>) {
    match parsed {
        Ok(value) => assert_eq!(value.to_string(), text),
        Err(error) => assert!(!error.to_string().is_empty(), "an error without a word"),
    }
}
