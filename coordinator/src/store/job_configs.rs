//! Configs outside their jobs' rows: the shared part of an array is stored once, and large texts are written in small
//! transactions, so that other writers do not wait long.

use super::connection::SqlTransaction;
use super::error::StoreError;
use super::job_text::{JobText, SharedJobText};
use super::sql::SqlStore;
use aitk_common::hash::ContentHash;
use aitk_scheduler::Payload;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Maximum bytes of one row.
const MAX_PIECE_BYTES: usize = 256 << 10;
/// Bytes of one transaction: a few milliseconds of writing.
const TRANSACTION_BYTES: usize = 1 << 20;

/// Splits a text into pieces of at most [`MAX_PIECE_BYTES`] bytes at character boundaries.
fn split_text(text: &str) -> Vec<&str> {
    let (mut pieces, mut rest) = (Vec::new(), text);
    while rest.len() > MAX_PIECE_BYTES {
        let end = (1..=MAX_PIECE_BYTES)
            .rev()
            .find(|end| rest.is_char_boundary(*end))
            .unwrap_or(rest.len());
        let (piece, after) = rest.split_at(end);
        pieces.push(piece);
        rest = after;
    }
    pieces.push(rest);
    pieces
}

impl SqlStore {
    pub(super) async fn write_texts(&self, texts: &[JobText]) -> Result<(), StoreError> {
        let mut rows: Vec<(&str, u64, &str)> = Vec::new();
        for body in texts {
            for (number, piece) in (0..).zip(split_text(&body.text)) {
                rows.push((&body.id, number, piece));
            }
        }
        let (mut transaction, mut bytes) = (None, 0);
        for (id, number, piece) in rows {
            let mut writing = match transaction.take() {
                Some(writing) => writing,
                None => self.begin_write().await?,
            };
            writing
                .run(
                    "INSERT INTO payloads (id, piece, body) VALUES ($1, $2, $3) \
                     ON CONFLICT (id, piece) DO UPDATE SET body = excluded.body",
                    &[id.into(), number.into(), piece.into()],
                )
                .await
                .map_err(|e| self.store_error(e))?;
            bytes += piece.len();
            if bytes < TRANSACTION_BYTES {
                transaction = Some(writing);
                continue;
            }
            bytes = 0;
            writing.commit().await.map_err(|e| self.store_error(e))?;
        }
        match transaction {
            Some(transaction) => transaction.commit().await.map_err(|e| self.store_error(e)),
            None => Ok(()),
        }
    }

    pub(super) async fn drop_texts(&self, ids: &[String]) -> Result<(), StoreError> {
        let mut transaction = self.begin_write().await?;
        for id in ids {
            transaction
                .run("DELETE FROM payloads WHERE id = $1", &[id.as_str().into()])
                .await
                .map_err(|e| self.store_error(e))?;
        }
        transaction.commit().await.map_err(|e| self.store_error(e))
    }

    /// Removes texts of jobs that were never accepted. Call it at the start, when nothing writes any. Returns the
    /// number of removed rows.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn remove_orphaned_texts(&self) -> Result<u64, StoreError> {
        let mut transaction = self.begin_write().await?;
        let removed = transaction
            .run(
                "DELETE FROM payloads WHERE NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.id = payloads.id) \
                 AND NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.shared = payloads.id)",
                &[],
            )
            .await
            .map_err(|e| self.store_error(e))?;
        transaction.commit().await.map_err(|e| self.store_error(e))?;
        Ok(removed)
    }

    /// Returns the text under an id; empty if there is none.
    pub(super) async fn read_text(&self, transaction: &mut SqlTransaction, id: &str) -> Result<String, StoreError> {
        let rows = transaction
            .rows("SELECT body FROM payloads WHERE id = $1 ORDER BY piece", &[id.into()])
            .await
            .map_err(|e| self.store_error(e))?;
        Ok(rows.iter().map(|row| row.text(0)).collect())
    }

    /// Returns the inputs of a job whose row has these columns.
    pub(super) async fn inputs_of(
        &self,
        transaction: &mut SqlTransaction,
        job: &str,
        inputs: &str,
        shared: Option<&str>,
    ) -> Result<BTreeMap<String, ContentHash>, StoreError> {
        match shared {
            None => self.parse("job's inputs", job, inputs),
            Some(key) => {
                let text = self.read_text(transaction, key).await?;
                let body: SharedJobText<'_> = self.parse("job's config", key, &text)?;
                Ok(body.inputs.into_owned())
            }
        }
    }

    pub(super) async fn read_payload(&self, job: &str) -> Result<Option<Payload>, StoreError> {
        let mut transaction = self.begin_read().await?;
        let rows = transaction
            .rows(
                "SELECT config_text, config_format, job_json, inputs, shared FROM jobs WHERE id = $1",
                &[job.into()],
            )
            .await
            .map_err(|e| self.store_error(e))?;
        let Some(row) = rows.first() else { return Ok(None) };
        let Some(key) = row.optional_text(4) else {
            return Ok(Some(Payload {
                config_text: row.text(0).into(),
                config_format: row.text(1).into(),
                job_json: row.text(2).into(),
                inputs: Arc::new(self.parse("job's inputs", job, row.text(3))?),
                shared: None,
            }));
        };
        let text = self.read_text(&mut transaction, key).await?;
        let body: SharedJobText<'_> = self.parse("job's config", job, &text)?;
        Ok(Some(Payload {
            config_text: body.config_text.as_ref().into(),
            config_format: body.config_format.as_ref().into(),
            job_json: self.read_text(&mut transaction, job).await?.into(),
            inputs: Arc::new(body.inputs.into_owned()),
            shared: Some(key.into()),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_split_at_character_boundaries_without_loss() {
        for text in [
            "",
            "a",
            &"ü".repeat(MAX_PIECE_BYTES),
            &format!("x{}", "😀".repeat(MAX_PIECE_BYTES / 2)),
        ] {
            let pieces = split_text(text);
            assert!(pieces.iter().all(|piece| piece.len() <= MAX_PIECE_BYTES));
            assert_eq!(pieces.concat(), text);
        }
    }
}
