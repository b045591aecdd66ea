//! Stored uploads: who uploaded which blob, and its size.

use super::error::StoreError;
use super::sql::SqlStore;
use super::types::Upload;
use aitk_common::hash::ContentHash;

/// Hashes per page.
const PAGE_SIZE: u64 = 10_000;

impl SqlStore {
    pub(super) async fn write_uploads(&self, uploads: &[Upload]) -> Result<(), StoreError> {
        let mut transaction = self.begin_write().await?;
        for Upload { who, hash, bytes } in uploads {
            transaction
                .run(
                    "INSERT INTO uploads (who, hash, bytes) VALUES ($1, $2, $3) \
                 ON CONFLICT (who, hash) DO UPDATE SET bytes = excluded.bytes",
                    &[who.as_str().into(), hash.to_hex().into(), (*bytes).into()],
                )
                .await
                .map_err(|e| self.store_error(e))?;
        }
        transaction.commit().await.map_err(|e| self.store_error(e))
    }

    pub(super) async fn read_uploads(&self, who: &str) -> Result<Vec<(ContentHash, u64)>, StoreError> {
        let mut transaction = self.begin_read().await?;
        let (mut all, mut after) = (Vec::new(), String::new());
        loop {
            let rows = transaction
                .rows(
                    "SELECT hash, bytes FROM uploads WHERE who = $1 AND hash > $2 ORDER BY hash LIMIT $3",
                    &[who.into(), after.as_str().into(), PAGE_SIZE.into()],
                )
                .await
                .map_err(|e| self.store_error(e))?;
            for row in &rows {
                all.push((self.hash(who, row.text(0))?, row.number(1)));
            }
            match rows.last() {
                Some(last) if rows.len() as u64 == PAGE_SIZE => last.text(0).clone_into(&mut after),
                _ => return Ok(all),
            }
        }
    }

    pub(super) async fn read_senders(&self, hash: ContentHash) -> Result<Vec<String>, StoreError> {
        let mut transaction = self.begin_read().await?;
        let rows = transaction
            .rows("SELECT who FROM uploads WHERE hash = $1", &[hash.to_hex().into()])
            .await
            .map_err(|e| self.store_error(e))?;
        Ok(rows.iter().map(|row| row.text(0).to_owned()).collect())
    }

    /// Returns hashes without a size, recorded by an older version.
    pub(super) async fn read_unmeasured(&self) -> Result<Vec<ContentHash>, StoreError> {
        let mut transaction = self.begin_read().await?;
        let rows = transaction
            .rows("SELECT DISTINCT hash FROM uploads WHERE bytes IS NULL", &[])
            .await
            .map_err(|e| self.store_error(e))?;
        rows.iter().map(|row| self.hash("uploads", row.text(0))).collect()
    }

    pub(super) async fn write_sizes(&self, sizes: &[(ContentHash, u64)]) -> Result<(), StoreError> {
        let mut transaction = self.begin_write().await?;
        for (hash, bytes) in sizes {
            transaction
                .run(
                    "UPDATE uploads SET bytes = $2 WHERE hash = $1 AND bytes IS NULL",
                    &[hash.to_hex().into(), (*bytes).into()],
                )
                .await
                .map_err(|e| self.store_error(e))?;
        }
        transaction.commit().await.map_err(|e| self.store_error(e))
    }

    pub(super) async fn drop_uploads(&self, hash: ContentHash) -> Result<(), StoreError> {
        let mut transaction = self.begin_write().await?;
        transaction
            .run("DELETE FROM uploads WHERE hash = $1", &[hash.to_hex().into()])
            .await
            .map_err(|e| self.store_error(e))?;
        transaction.commit().await.map_err(|e| self.store_error(e))
    }
}
