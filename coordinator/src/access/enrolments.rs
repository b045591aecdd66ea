//! Join tokens and enrolments of workers.
//!
//! A join token lets one machine join once. It is exchanged for an *enrolment*: a name, a worker id, and the right to
//! a certificate and its renewals. A certificate carries the id of its enrolment and is valid only while the enrolment
//! is. After `worker revoke` no certificate of the enrolment is accepted, whatever its expiry date, and a renewal only
//! stores the newest date.

use super::error::AccessError;
use crate::pki::wall_clock;
use crate::store::{AdminRecord, Store};
use aitk_common::control_plane::UnixMillis;
use aitk_common::hash::ContentHash;
use aitk_common::id::{UserName, WorkerId};
use aitk_common::security::ca::CaError;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

/// Kinds of [`AdminRecord`]s.
pub(super) const ENROLMENT: &str = "enrolment";
pub(super) const JOIN: &str = "join_token";
/// Name of a machine in the audit log before it has a name.
pub(super) const UNNAMED: &str = "joining";

/// A worker that joined.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Enrolment {
    pub(crate) id: String,
    pub(crate) name: UserName,
    /// The worker id with which it registers.
    pub(crate) worker: WorkerId,
    pub(crate) joined: UnixMillis,
    /// Id of the join token.
    pub(crate) by: String,
    /// When the newest certificate was issued.
    pub(crate) issued: UnixMillis,
    /// Serial number of the newest certificate.
    pub(crate) serial: String,
    /// When the newest certificate expires.
    pub(crate) expires: UnixMillis,
    pub(crate) revoked: Option<UnixMillis>,
}

/// A join token, without its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct JoinToken {
    pub(crate) id: String,
    /// The worker's name, if the token specifies one.
    pub(crate) name: Option<UserName>,
    pub(crate) sha256: ContentHash,
    pub(crate) created: UnixMillis,
    pub(crate) created_by: String,
    pub(crate) expires: UnixMillis,
    pub(crate) used: Option<UnixMillis>,
    pub(crate) revoked: Option<UnixMillis>,
    /// The answer that it was exchanged for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) answer: Option<JoinAnswer>,
}

/// The answer to a join request. Kept because it may be lost on its way; the machine then asks again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct JoinAnswer {
    /// SHA-256 of the public key in the request.
    pub(crate) key: ContentHash,
    /// The certificate, PEM. No secret.
    pub(crate) certificate: String,
    /// Id of the enrolment.
    pub(crate) enrolment: String,
}

impl JoinToken {
    /// Returns why the token cannot be used any more, or `None`.
    pub(super) fn unusable_reason(&self, now: UnixMillis) -> Option<&'static str> {
        if self.used.is_some() {
            Some("the join token was used already; each can be used once, by one machine")
        } else if self.revoked.is_some() {
            Some("the join token was revoked")
        } else if now >= self.expires {
            Some("the join token has expired")
        } else {
            None
        }
    }

    /// Checks that a machine may use the token: for the first time, or again before it expires because the answer was
    /// lost.
    pub(super) fn check_usable(&self, now: UnixMillis) -> Result<(), &'static str> {
        match self.unusable_reason(now) {
            Some(_) if self.answer.is_some() && self.revoked.is_none() && now < self.expires => Ok(()),
            Some(why) => Err(why),
            None => Ok(()),
        }
    }
}

/// An enrolled worker: its enrolment and its certificate as PEM.
pub(crate) struct IssuedCertificate {
    pub(crate) enrolment: Enrolment,
    pub(crate) pem: String,
}

/// Why a worker gets no certificate.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EnrolError {
    #[error("{0}; ask for another one: aitk-coordinator worker join-token")]
    Token(&'static str),
    #[error(
        "worker {0} has a valid certificate already; join under another name (--name), or revoke that one first: \
         aitk-coordinator worker revoke {0}"
    )]
    NameTaken(UserName),
    #[error("{0:?} cannot be the name of a worker: expected 1 to 64 letters, digits, '-' or '_'; give one with --name")]
    BadName(String),
    #[error("this call is for workers with a certificate; to renew a token, create a new one")]
    NoCertificate,
    #[error(transparent)]
    Certificate(#[from] CaError),
    #[error(transparent)]
    Access(#[from] AccessError),
}

/// All enrolments and join tokens.
#[derive(Debug, Default)]
pub(super) struct Enrolments {
    enrolments: RwLock<HashMap<String, Enrolment>>,
    pub(super) joins: RwLock<HashMap<ContentHash, JoinToken>>,
    /// Held during a change: of two concurrent requests with one join token, only one succeeds.
    pub(super) write_lock: tokio::sync::Mutex<()>,
}

pub(super) async fn read<T: DeserializeOwned>(store: &dyn Store, kind: &'static str) -> Result<Vec<T>, AccessError> {
    let admin_records = store.admin_records(kind).await?;
    let parse = |document: &AdminRecord| serde_json::from_str(&document.record).map_err(AccessError::Record);
    admin_records.iter().map(parse).collect()
}

pub(super) fn document(kind: &'static str, id: &str, record: &impl Serialize) -> Result<AdminRecord, AccessError> {
    Ok(AdminRecord {
        kind,
        id: id.to_owned(),
        record: serde_json::to_string(record).map_err(AccessError::Record)?,
    })
}

pub(super) fn new_id(letter: char) -> String {
    format!("{letter}{}", &uuid::Uuid::new_v4().simple().to_string()[..10])
}

/// Turns a host name into a worker name: characters that are not allowed become dashes.
pub(super) fn worker_name_from_host(host: &str) -> String {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    host.chars().map(|c| if fits(c) { c } else { '-' }).take(64).collect()
}

impl Enrolments {
    pub(super) async fn load(store: &dyn Store) -> Result<Self, AccessError> {
        let enrolments = read::<Enrolment>(store, ENROLMENT).await?;
        let joins = read::<JoinToken>(store, JOIN).await?;
        Ok(Self {
            enrolments: RwLock::new(enrolments.into_iter().map(|e| (e.id.clone(), e)).collect()),
            joins: RwLock::new(joins.into_iter().map(|join| (join.sha256, join)).collect()),
            write_lock: tokio::sync::Mutex::default(),
        })
    }

    pub(super) fn get(&self, id: &str) -> Option<Enrolment> {
        let all = self.enrolments.read().unwrap_or_else(PoisonError::into_inner);
        all.get(id).cloned()
    }

    pub(super) fn put(&self, enrolment: Enrolment) {
        let mut all = self.enrolments.write().unwrap_or_else(PoisonError::into_inner);
        all.insert(enrolment.id.clone(), enrolment);
    }

    pub(super) fn join(&self, fits: impl Fn(&JoinToken) -> bool) -> Option<JoinToken> {
        let joins = self.joins.read().unwrap_or_else(PoisonError::into_inner);
        joins.values().find(|join| fits(join)).cloned()
    }

    pub(super) fn put_join(&self, join: JoinToken) {
        let mut joins = self.joins.write().unwrap_or_else(PoisonError::into_inner);
        joins.insert(join.sha256, join);
    }

    /// Whether a valid certificate names this worker id and another name.
    pub(super) fn is_of_other(&self, worker: &WorkerId, name: &UserName) -> bool {
        let all = self.enrolments.read().unwrap_or_else(PoisonError::into_inner);
        let (mut all, now) = (all.values(), wall_clock());
        all.any(|other| {
            other.worker == *worker && other.name != *name && other.revoked.is_none() && now < other.expires
        })
    }

    pub(super) fn all(&self) -> Vec<Enrolment> {
        let all = self.enrolments.read().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = all.values().cloned().collect();
        all.sort_by(|a, b| (a.joined, &a.id).cmp(&(b.joined, &b.id)));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_name_becomes_a_valid_worker_name() {
        assert_eq!(worker_name_from_host("gpu-1.lab.example"), "gpu-1-lab-example");
        assert_eq!(worker_name_from_host("Käthe's Box"), "K-the-s-Box");
        assert!(worker_name_from_host(&"x".repeat(300)).len() == 64 && worker_name_from_host("").is_empty());
    }
}
