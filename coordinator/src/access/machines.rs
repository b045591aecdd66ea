//! Which worker is whose: one machine's token does not speak for another machine.

use super::{Access, AccessError, Identity};
use crate::store::Document;
use aitk_common::id::{UserName, WorkerId};
use aitk_common::security::role::Role;

/// Kind of the document that says whose a worker is: its id is the worker's, its record a name in quotes.
pub(super) const MACHINE: &str = "machine";

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
    /// [`AccessError::NotYours`]; when the store fails.
    pub(crate) async fn claim(&self, who: &Identity, worker: &WorkerId) -> Result<(), AccessError> {
        if who.role != Role::Worker {
            return Ok(());
        }
        let now = self.inner.clock.now();
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

/// Whose a worker is, from its document.
pub(super) fn read(document: &Document) -> Result<(WorkerId, UserName), AccessError> {
    let owner = serde_json::from_str(&document.record).map_err(AccessError::Record)?;
    Ok((WorkerId::new(document.id.as_str()), owner))
}
