//! Texts of jobs that are stored outside their jobs' rows.

use aitk_common::hash::ContentHash;
use aitk_scheduler::Payload;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A text that is stored in pieces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobText {
    /// Id of a job, or the key of a shared text.
    pub id: String,
    /// The text.
    pub text: Arc<str>,
}

impl JobText {
    /// Returns the shared part of `payload` under its key; `None` when it is stored in the job's row.
    #[must_use]
    pub fn shared(payload: &Payload) -> Option<Self> {
        let key = payload.shared.as_ref()?;
        let body = SharedJobText {
            config_text: payload.config_text.as_ref().into(),
            config_format: payload.config_format.as_ref().into(),
            inputs: std::borrow::Cow::Borrowed(&payload.inputs),
        };
        // Serialising texts and hashes does not fail.
        let text = serde_json::to_string(&body).ok()?;
        Some(Self {
            id: key.to_string(),
            text: text.into(),
        })
    }
}

/// The shared part of several jobs' payloads, as stored.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SharedJobText<'a> {
    pub(super) config_text: std::borrow::Cow<'a, str>,
    pub(super) config_format: std::borrow::Cow<'a, str>,
    pub(super) inputs: std::borrow::Cow<'a, BTreeMap<String, ContentHash>>,
}
