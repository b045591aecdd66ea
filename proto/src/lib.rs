//! The wire protocol of aitk: code generated from `proto/aitk/v1/aitk.proto`, conversions between wire and domain types, and the
//! client of workers and the command line.
//!
//! Domain types are in `aitk_common::control_plane`. `wire.try_into()` fails with a [`ConvertError`] that names the field;
//! `domain.into()` cannot fail. Callers convert wire types at once and do not pass them on.

pub mod client;
mod convert;
mod failover;
mod pin;
#[cfg(feature = "client-blobs")]
pub mod remote_blobs;
pub mod trace;

pub use convert::ConvertError;
pub use prost::Message;

/// Generated from `proto/aitk/v1/aitk.proto`.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod v1 {
    tonic::include_proto!("aitk.v1");
}

/// The metadata key of the protocol version.
pub const PROTOCOL_HEADER: &str = "aitk-protocol";

/// Set by a coordinator that forwards a call to the leader: the client's address.
pub const FORWARDED_HEADER: &str = "aitk-forwarded-for";
/// Set with [`FORWARDED_HEADER`]: proof that a coordinator forwarded the call.
pub const PROOF_HEADER: &str = "aitk-forwarded-proof";
/// In the response of a standby coordinator: the client should use another one. The value is the leader's address, or `none`.
pub const LEADER_HEADER: &str = "aitk-leader";

/// In the response of a coordinator that cannot use its storage, whatever is stored: [`STORAGE_FULL`] or [`STORAGE_REFUSED`]. The client may
/// retry later.
pub const STORAGE_HEADER: &str = "aitk-storage";
/// There is no room.
pub const STORAGE_FULL: &str = "full";
/// The storage refuses the coordinator, or the coordinator's disk fails, until somebody mends that.
pub const STORAGE_REFUSED: &str = "refused";
/// In the response to a call that failed: whether the same call may succeed, where its code does not say so. [`RETRY_LATER`] or [`RETRY_NEVER`].
pub const RETRY_HEADER: &str = "aitk-retry";
/// The call came at a bad moment, as with too many calls at once. The same call may succeed soon.
pub const RETRY_LATER: &str = "later";
/// The same call will fail again, because the coordinator's storage refuses the request for good.
pub const RETRY_NEVER: &str = "never";

/// The size limit of a message in bytes: a config of 4 MiB with its parsed form, and a reserve.
pub const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// The name of the uploads of this process (`BlobHeader.upload`): an upload that broke is continued by the process that began it.
#[must_use]
pub fn upload_name() -> &'static str {
    use std::sync::OnceLock;
    use std::time::{SystemTime, UNIX_EPOCH};
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| {
        // Other users' uploads are kept apart by the coordinator. A second process of this user has another id or began at another time.
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        format!("{:x}-{:x}", std::process::id(), time.as_nanos())
    })
}

/// Whether a coordinator that refused a `Put` with an offset cannot continue that upload, which is then sent from its beginning. A coordinator of
/// an older version, which has become the leader meanwhile, takes the rest for the whole blob.
#[must_use]
pub fn is_unusable_offset(status: &tonic::Status) -> bool {
    matches!(
        status.code(),
        tonic::Code::OutOfRange | tonic::Code::InvalidArgument | tonic::Code::DataLoss
    )
}

/// Whether a call failed because there is no room on the coordinator's disk or in its storage.
#[must_use]
pub fn is_storage_full(status: &tonic::Status) -> bool {
    status.code() == tonic::Code::ResourceExhausted && status.metadata().contains_key(STORAGE_HEADER)
}

/// Whether a call failed because the coordinator cannot use its storage or its disk until somebody mends that ([`STORAGE_REFUSED`]).
#[must_use]
pub fn is_storage_refused(status: &tonic::Status) -> bool {
    status
        .metadata()
        .get(STORAGE_HEADER)
        .is_some_and(|value| value == STORAGE_REFUSED)
}

/// The encoded size of a message in bytes.
#[must_use]
pub fn encoded_len(message: &impl prost::Message) -> usize {
    message.encoded_len()
}

/// The size of a blob chunk in one message, in bytes. Both sides end a transfer when no whole message arrives for a minute, and on a slow
/// line several transfers share its rate.
pub const BLOB_CHUNK_BYTES: usize = 256 << 10;
