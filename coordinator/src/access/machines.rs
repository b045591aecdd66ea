//! Owners of worker ids: the token of one machine cannot act for another machine's worker.

use super::Access;
use super::error::AccessError;
use super::identity::Identity;
use crate::store::{AdminRecord, WORKER_OWNER};
use aitk_common::id::{UserName, WorkerId};
use aitk_common::security::role::Role;
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard};

/// Maximum number of workers per owner: more than a lab whose machines share a token has, and a bound for a machine
/// that registers with a new id each time.
const MAX_WORKERS: usize = 1000;

/// Held by a worker's registration until the scheduler has it: no worker is removed meanwhile.
#[derive(Debug)]
pub(crate) struct RegistrationGuard {
    _guard: OwnedRwLockReadGuard<()>,
}

/// Held while workers are removed: none registers meanwhile.
#[derive(Debug)]
pub(crate) struct RemovalGuard {
    _guard: OwnedRwLockWriteGuard<()>,
}

impl Access {
    /// Waits until no worker is between its claim and its registration, and keeps others from registering.
    pub(crate) async fn lock_registrations(&self) -> RemovalGuard {
        RemovalGuard {
            _guard: self.inner.registrations.clone().write_owned().await,
        }
    }

    /// Removes the owner of a worker that the scheduler has removed, and the store with it: it no longer counts toward the owner's limit.
    pub(crate) async fn remove_owner(&self, _: RemovalGuard, worker: &WorkerId) {
        self.inner.machines.lock().await.remove(worker);
    }

    /// Returns the owner of a worker id, once a caller with a worker's token has registered it.
    pub(crate) async fn owner_of(&self, worker: &WorkerId) -> Option<UserName> {
        self.inner.machines.lock().await.get(worker).cloned()
    }

    /// Returns the worker ids of this owner.
    pub(crate) async fn workers_of(&self, name: &UserName) -> Vec<WorkerId> {
        let machines = self.inner.machines.lock().await;
        let theirs = machines.iter().filter(|(_, owner)| *owner == name);
        theirs.map(|(worker, _)| worker.clone()).collect()
    }

    /// Ensures that this caller may register as this worker. The first caller with a worker's token becomes the owner;
    /// other tokens of the same name are accepted, tokens of another name are not.
    ///
    /// # Errors
    /// [`AccessError::NotYours`], [`AccessError::TooManyWorkers`]; when the store fails.
    pub(crate) async fn claim_worker(
        &self,
        who: &Identity,
        worker: &WorkerId,
    ) -> Result<RegistrationGuard, AccessError> {
        let registration = RegistrationGuard {
            _guard: self.inner.registrations.clone().read_owned().await,
        };
        if who.role != Role::Worker {
            return Ok(registration);
        }
        let now = self.inner.clock.wall_time();
        let mut line = who.audit_line(now, "worker.join", worker.as_str());
        // Held while the store writes: of two concurrent first registrations only one succeeds.
        let mut machines = self.inner.machines.lock().await;
        match machines.get(worker) {
            Some(owner) if *owner == who.name => return Ok(registration),
            Some(owner) => {
                (line.done, line.detail) = (false, format!("it is {owner}'s"));
                self.record_audit(line);
                return Err(AccessError::NotYours(worker.to_string()));
            }
            // An operator may remove a worker whose certificate is still valid.
            None if self.inner.enrolments.is_of_other(worker, &who.name) => {
                (line.done, line.detail) = (false, "a certificate of another name has it".to_owned());
                self.record_audit(line);
                return Err(AccessError::NotYours(worker.to_string()));
            }
            None => {}
        }
        if machines.values().filter(|owner| **owner == who.name).count() >= MAX_WORKERS {
            (line.done, line.detail) = (false, format!("{} has {MAX_WORKERS} workers already", who.name));
            self.record_audit(line);
            return Err(AccessError::TooManyWorkers {
                name: who.name.clone(),
                max: MAX_WORKERS,
            });
        }
        let document = AdminRecord {
            kind: WORKER_OWNER,
            id: worker.to_string(),
            record: serde_json::to_string(&who.name).map_err(AccessError::Record)?,
        };
        self.inner.store.administer(&[document], &[line]).await?;
        machines.insert(worker.clone(), who.name.clone());
        Ok(registration)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::store::{SqlStore, Store};
    use aitk_common::security::token::Token;
    use aitk_scheduler::Record;
    use std::sync::Arc;

    #[tokio::test]
    async fn the_number_of_workers_per_owner_is_limited() {
        let folder = tempfile::tempdir().unwrap();
        let store = SqlStore::sqlite(&folder.path().join("db")).await.unwrap();
        let store: Arc<dyn Store> = Arc::new(store);
        let (access, _writing) = Access::open(store.clone(), Token::generate(), Clock::new(), folder.path())
            .await
            .unwrap();
        let who = |name: &str| Identity {
            name: UserName::new(name),
            role: Role::Worker,
            by: "t1".into(),
            from: None,
            certificate: None,
        };
        let worker = |number: usize| WorkerId::new(format!("w{number}"));
        for number in 0..MAX_WORKERS {
            access.claim_worker(&who("box"), &worker(number)).await.unwrap();
        }
        let refused = access
            .claim_worker(&who("box"), &worker(MAX_WORKERS))
            .await
            .unwrap_err();
        assert!(
            matches!(refused, AccessError::TooManyWorkers { .. }) && refused.to_string().contains("--data-dir"),
            "{refused}"
        );
        assert_eq!(store.admin_records(WORKER_OWNER).await.unwrap().len(), MAX_WORKERS);
        // Its existing workers still work, and other owners are not affected.
        access.claim_worker(&who("box"), &worker(0)).await.unwrap();
        access.claim_worker(&who("other"), &worker(MAX_WORKERS)).await.unwrap();
        // A worker that is removed no longer counts, also after a restart, and its id is free.
        let guard = access.lock_registrations().await;
        store.commit(&[Record::WorkerRemoved(worker(0))], &[]).await.unwrap();
        access.remove_owner(guard, &worker(0)).await;
        let fresh = worker(MAX_WORKERS + 1);
        access.claim_worker(&who("box"), &fresh).await.unwrap();
        access.claim_worker(&who("box"), &worker(0)).await.unwrap_err();
        access.claim_worker(&who("other"), &worker(0)).await.unwrap();
        let (restarted, _writing) = Access::open(store, Token::generate(), Clock::new(), folder.path())
            .await
            .unwrap();
        for (owned, name) in [(worker(0), "other"), (fresh, "box"), (worker(1), "box")] {
            assert_eq!(restarted.owner_of(&owned).await, Some(UserName::new(name)));
        }
    }

    #[tokio::test]
    async fn no_worker_is_removed_while_one_registers() {
        let folder = tempfile::tempdir().unwrap();
        let store: Arc<dyn Store> = Arc::new(SqlStore::sqlite(&folder.path().join("db")).await.unwrap());
        let (access, _writing) = Access::open(store, Token::generate(), Clock::new(), folder.path())
            .await
            .unwrap();
        let who = Identity {
            name: UserName::new("box"),
            role: Role::Worker,
            by: "t1".into(),
            from: None,
            certificate: None,
        };
        let registration = access.claim_worker(&who, &WorkerId::new("w0")).await.unwrap();
        let mut removal = std::pin::pin!(access.lock_registrations());
        assert!(futures::poll!(&mut removal).is_pending());
        drop(registration);
        removal.await;
    }
}
