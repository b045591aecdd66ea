//! The wire protocol of aitk: the generated code of `proto/aitk/v1/aitk.proto`, the only conversions between wire and
//! domain types, and the client that worker and command line share.
//!
//! Domain types live in `aitk_common::control`. `wire.try_into()` fails with a [`ConvertError`] that names the
//! field; `domain.into()` never fails. Wire types stop at this crate's callers: a service body is convert, call, convert.

pub mod client;
mod convert;
mod pin;
#[cfg(feature = "client-blobs")]
pub mod remote_blobs;
mod switch;
pub mod trace;

pub use convert::ConvertError;
pub use prost::Message;

/// Generated from `proto/aitk/v1/aitk.proto`.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod v1 {
    tonic::include_proto!("aitk.v1");
}

/// Metadata entry with the protocol version.
pub const PROTOCOL_HEADER: &str = "aitk-protocol";

/// Set by a coordinator that passes a call on to the one that leads: the address it came from.
pub const FORWARDED_HEADER: &str = "aitk-forwarded-for";
/// With [`FORWARDED_HEADER`]: that it is a coordinator that says so.
pub const PROOF_HEADER: &str = "aitk-forwarded-proof";
/// In the answer of a coordinator that leads not: try another one. Its value is the address of the leader, or `none`.
pub const LEADER_HEADER: &str = "aitk-leader";

/// In the answer of a coordinator that has no room for a blob: `full`. It is worth another try later.
pub const STORAGE_HEADER: &str = "aitk-storage";

/// The largest message either side takes, in bytes: a config of 4 MiB with its parsed form, and some room.
pub const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// Bytes that a message takes on the wire.
#[must_use]
pub fn encoded_len(message: &impl prost::Message) -> usize {
    message.encoded_len()
}

/// The largest piece of a blob in one message, in bytes.
pub const BLOB_CHUNK_BYTES: usize = 1 << 20;
