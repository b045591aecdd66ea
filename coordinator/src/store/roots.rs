//! Reads the blobs that the stored jobs need.

use super::connection::{Row, SqlTransaction};
use super::error::StoreError;
use super::sql::SqlStore;
use super::types::JobRoots;
use aitk_common::hash::ContentHash;
use aitk_scheduler::Job;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Jobs read at a time. Few, because rows of older versions hold up to 16 MiB of inputs each.
const PAGE_SIZE: u64 = 100;

impl SqlStore {
    pub(super) async fn read_roots(&self, transaction: &mut SqlTransaction) -> Result<Vec<JobRoots>, StoreError> {
        let artifacts = self
            .query(transaction, "SELECT job, hash FROM artifacts WHERE hash IS NOT NULL")
            .await?;
        // The two newest of each job: the last may be on its way to a worker while the next is committed.
        let checkpoints = self
            .query(
                transaction,
                "SELECT job, manifest FROM \
                 (SELECT job, manifest, ROW_NUMBER() OVER (PARTITION BY job ORDER BY cursor DESC) AS age FROM checkpoints) AS newest \
                 WHERE age <= 2",
            )
            .await?;
        let (mut artifacts, mut checkpoints) = (self.by_job(&artifacts)?, self.by_job(&checkpoints)?);
        let (mut all, mut after) = (Vec::new(), String::new());
        // Shared inputs are read and counted once.
        let mut shared: HashSet<(String, bool)> = HashSet::new();
        // In pages, because records are much larger than the needed part.
        loop {
            let jobs = transaction
                .rows(
                    "SELECT id, record, inputs, shared FROM jobs WHERE id > $1 ORDER BY id LIMIT $2",
                    &[after.as_str().into(), PAGE_SIZE.into()],
                )
                .await
                .map_err(|e| self.store_error(e))?;
            for row in &jobs {
                let id = row.text(0);
                let job: Job = self.parse("job", id, row.text(1))?;
                let ended = job.state.is_ended();
                let key = row.optional_text(3);
                let inputs = match key {
                    Some(key) if !shared.insert((key.to_owned(), ended)) => BTreeMap::new(),
                    key => self.inputs_of(transaction, id, row.text(2), key).await?,
                };
                let mut manifests = checkpoints.remove(id).filter(|_| !ended).unwrap_or_default();
                // The checkpoint of the next attempt is kept whatever the log contains.
                manifests.extend(job.checkpoint.as_ref().map(|checkpoint| checkpoint.manifest));
                all.push(JobRoots {
                    ended,
                    snapshots: inputs.into_values().collect(),
                    checkpoints: manifests,
                    artifacts: artifacts.remove(id).unwrap_or_default(),
                });
            }
            match jobs.last() {
                Some(last) if jobs.len() as u64 == PAGE_SIZE => last.text(0).clone_into(&mut after),
                _ => return Ok(all),
            }
        }
    }

    async fn query(&self, transaction: &mut SqlTransaction, statement: &'static str) -> Result<Vec<Row>, StoreError> {
        transaction.rows(statement, &[]).await.map_err(|e| self.store_error(e))
    }

    fn by_job(&self, rows: &[Row]) -> Result<HashMap<String, Vec<ContentHash>>, StoreError> {
        let mut found: HashMap<String, Vec<ContentHash>> = HashMap::new();
        for row in rows {
            let hash = self.hash(row.text(0), row.text(1))?;
            found.entry(row.text(0).to_owned()).or_default().push(hash);
        }
        Ok(found)
    }
}
