//! Which worker is whose: one machine's token does not speak for another machine.

use super::Access;
use super::error::AccessError;
use super::identity::Identity;
use super::records::MACHINE;
use crate::store::Document;
use aitk_common::id::{UserName, WorkerId};
use aitk_common::security::role::Role;

/// Workers of one name: a lab whose machines share a token has fewer, and a machine that makes up an id each time it
/// comes fills no table without end.
const WORKERS_MOST: usize = 1000;

impl Access {
    /// Whose a worker is, once one with a worker's token has registered as it.
    pub(crate) async fn owner_of(&self, worker: &WorkerId) -> Option<UserName> {
        self.inner.machines.lock().await.get(worker).cloned()
    }

    /// The workers of this name.
    pub(crate) async fn workers_of(&self, name: &UserName) -> Vec<WorkerId> {
        let machines = self.inner.machines.lock().await;
        let theirs = machines.iter().filter(|(_, owner)| *owner == name);
        theirs.map(|(worker, _)| worker.clone()).collect()
    }

    /// Makes sure that this caller may register as this worker. The first one with a worker's token who does has it from
    /// then on; another token of the same name will do, one of another name will not.
    ///
    /// # Errors
    /// [`AccessError::NotYours`], [`AccessError::TooManyWorkers`]; when the store fails.
    pub(crate) async fn claim(&self, who: &Identity, worker: &WorkerId) -> Result<(), AccessError> {
        if who.role != Role::Worker {
            return Ok(());
        }
        let now = self.inner.clock.date();
        let mut line = who.line(now, "worker.join", worker.as_str());
        // Held while the store writes: of two who come first at once only one is.
        let mut machines = self.inner.machines.lock().await;
        match machines.get(worker) {
            Some(owner) if *owner == who.name => return Ok(()),
            Some(owner) => {
                (line.done, line.detail) = (false, format!("it is {owner}'s"));
                self.note(line);
                return Err(AccessError::NotYours(worker.to_string()));
            }
            None => {}
        }
        if machines.values().filter(|owner| **owner == who.name).count() >= WORKERS_MOST {
            (line.done, line.detail) = (false, format!("{} has {WORKERS_MOST} workers already", who.name));
            self.note(line);
            return Err(AccessError::TooManyWorkers {
                name: who.name.clone(),
                most: WORKERS_MOST,
            });
        }
        let document = Document {
            kind: MACHINE,
            id: worker.to_string(),
            record: serde_json::to_string(&who.name).map_err(AccessError::Record)?,
        };
        self.inner.store.administer(&[document], &[line]).await?;
        machines.insert(worker.clone(), who.name.clone());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::store::{SqlStore, Store};
    use aitk_common::security::token::Token;
    use std::sync::Arc;

    #[tokio::test]
    async fn a_machine_that_makes_up_ids_comes_to_an_end() {
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
        for number in 0..WORKERS_MOST {
            access.claim(&who("box"), &worker(number)).await.unwrap();
        }
        let refused = access.claim(&who("box"), &worker(WORKERS_MOST)).await.unwrap_err();
        assert!(
            matches!(refused, AccessError::TooManyWorkers { .. }) && refused.to_string().contains("--data-dir"),
            "{refused}"
        );
        assert_eq!(store.documents(MACHINE).await.unwrap().len(), WORKERS_MOST);
        // Those that it has it keeps, and others are not in its way.
        access.claim(&who("box"), &worker(0)).await.unwrap();
        access.claim(&who("other"), &worker(WORKERS_MOST)).await.unwrap();
    }
}
