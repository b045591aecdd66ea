//! Stored records of tokens and machines.

use super::error::AccessError;
use crate::store::AdminRecord;
use aitk_common::control_plane::UnixMillis;
use aitk_common::hash::ContentHash;
use aitk_common::id::{UserName, WorkerId};
use aitk_common::security::role::Role;
use serde::{Deserialize, Serialize};

/// Kind of a token's document.
pub(super) const TOKEN: &str = "token";

/// A user's token, without its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TokenRecord {
    pub(crate) id: String,
    /// Its owner.
    pub(crate) name: UserName,
    pub(crate) role: Role,
    /// SHA-256 of the secret.
    pub(crate) sha256: ContentHash,
    pub(crate) created: UnixMillis,
    /// Name of the caller that created it.
    pub(crate) created_by: String,
    pub(crate) expires: Option<UnixMillis>,
    pub(crate) revoked: Option<UnixMillis>,
}

impl TokenRecord {
    pub(super) fn is_valid(&self, now: UnixMillis) -> bool {
        self.revoked.is_none() && self.expires.is_none_or(|end| now < end)
    }

    pub(super) fn to_record(&self) -> Result<AdminRecord, AccessError> {
        Ok(AdminRecord {
            kind: TOKEN,
            id: self.id.clone(),
            record: serde_json::to_string(self).map_err(AccessError::Record)?,
        })
    }
}

/// Reads a worker's owner from its document.
pub(super) fn read_worker_owner(document: &AdminRecord) -> Result<(WorkerId, UserName), AccessError> {
    let owner = serde_json::from_str(&document.record).map_err(AccessError::Record)?;
    Ok((WorkerId::new(document.id.as_str()), owner))
}
