//! The tokens of users and workers.

use super::Access;
use super::error::AccessError;
use super::identity::{DATA_FOLDER_TOKEN_ID, Identity};
use super::records::TokenRecord;
use crate::store::AuditLine;
use aitk_common::hash::ContentHash;
use aitk_common::id::UserName;
use aitk_common::security::role::Role;
use aitk_common::security::token::Token;
use std::sync::PoisonError;
use std::time::Duration;

/// How often an open stream checks whether its caller's token is still valid. A timer does not advance while the
/// machine is suspended, so it is never set to the whole lifetime of a token.
const CHECK_INTERVAL: Duration = Duration::from_secs(30);

impl Access {
    /// Waits until this caller's token or certificate is revoked or expires.
    pub(crate) async fn wait_until_invalid(&self, who: &Identity) {
        let mut revoked = self.inner.revoked.subscribe();
        loop {
            let end = if let Some(until) = who.certificate {
                match self.certificate_expiry(who, until) {
                    None => return,
                    end => end,
                }
            } else {
                let tokens = self.inner.tokens.read().unwrap_or_else(PoisonError::into_inner);
                let record = tokens.values().find(|record| record.id == who.by);
                match record {
                    // The token in the data folder cannot be revoked while the coordinator runs.
                    None if who.by == DATA_FOLDER_TOKEN_ID => None,
                    None => return,
                    Some(record) if !record.is_valid(self.inner.clock.wall_time()) => return,
                    Some(record) => record.expires,
                }
            };
            let left = end.map_or(CHECK_INTERVAL, |end| end.since(self.inner.clock.wall_time()));
            tokio::select! {
                _ = tokio::time::sleep(left.clamp(Duration::from_millis(10), CHECK_INTERVAL)) => {}
                changed = revoked.changed() => if changed.is_err() { return std::future::pending().await },
            }
        }
    }

    /// Creates a token. Its secret exists only in this return value.
    pub(crate) async fn create(
        &self,
        by: &Identity,
        name: UserName,
        role: Role,
        life: Option<Duration>,
    ) -> Result<(Token, TokenRecord), AccessError> {
        let now = self.inner.clock.wall_time();
        let secret = Token::generate();
        let record = TokenRecord {
            id: format!("t{}", &uuid::Uuid::new_v4().simple().to_string()[..10]),
            name,
            role,
            sha256: ContentHash::of(secret.secret().as_bytes()),
            created: now,
            created_by: by.name.to_string(),
            expires: life.map(|life| now.after(life)),
            revoked: None,
        };
        let mut line = by.audit_line(now, "token.create", &record.id);
        line.detail = format!("{} for {}", record.role, record.name);
        self.inner.store.administer(&[record.to_record()?], &[line]).await?;
        let mut tokens = self.inner.tokens.write().unwrap_or_else(PoisonError::into_inner);
        tokens.insert(record.sha256, record.clone());
        Ok((secret, record))
    }

    /// Returns all tokens, newest last.
    pub(crate) fn tokens(&self) -> Vec<TokenRecord> {
        let tokens = self.inner.tokens.read().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = tokens.values().cloned().collect();
        all.sort_by(|a, b| (a.created, &a.id).cmp(&(b.created, &b.id)));
        all
    }

    /// Revokes a token. Calls with it are refused from now on, and its open streams are closed.
    pub(crate) async fn revoke(&self, by: &Identity, id: &str) -> Result<TokenRecord, AccessError> {
        let found = self.tokens().into_iter().find(|record| record.id == id);
        let mut record = found.ok_or_else(|| AccessError::NoToken(AuditLine::quote(id)))?;
        let now = self.inner.clock.wall_time();
        record.revoked = Some(record.revoked.unwrap_or(now));
        let mut line = by.audit_line(now, "token.revoke", id);
        line.detail = format!("{} of {}", record.role, record.name);
        self.inner.store.administer(&[record.to_record()?], &[line]).await?;
        {
            let mut tokens = self.inner.tokens.write().unwrap_or_else(PoisonError::into_inner);
            tokens.insert(record.sha256, record.clone());
        }
        self.inner.revoked.send_modify(|count| *count += 1);
        Ok(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::store::{SqlStore, Store};
    use std::sync::Arc;

    #[tokio::test]
    async fn a_token_expires_on_time_although_the_machine_was_suspended() {
        let hour = Duration::from_secs(3600);
        let clock = Clock::after_sleep(hour);
        let folder = tempfile::tempdir().unwrap();
        let store = SqlStore::sqlite(&folder.path().join("db")).await.unwrap();
        let store: Arc<dyn Store> = Arc::new(store);
        let (access, _writing) = Access::open(store, Token::generate(), clock, folder.path())
            .await
            .unwrap();
        let admin = Identity {
            name: UserName::new("ada"),
            role: Role::Admin,
            by: DATA_FOLDER_TOKEN_ID.to_owned(),
            from: None,
            certificate: None,
        };
        let (secret, record) = access
            .create(&admin, UserName::new("bob"), Role::Submitter, Some(hour / 2))
            .await
            .unwrap();
        let mut old = record.clone();
        old.expires = Some(clock.now().after(hour / 2));
        let replace = |record: &TokenRecord| {
            let mut tokens = access.inner.tokens.write().unwrap();
            tokens.insert(record.sha256, record.clone());
        };
        let bob = access.authenticate(secret.secret(), None).unwrap();
        // Created before the suspend; half of its lifetime passed since.
        replace(&old);
        assert!(access.authenticate(secret.secret(), None).is_err());
        // An open stream is closed too, without a long timer.
        access.wait_until_invalid(&bob).await;
    }
}
