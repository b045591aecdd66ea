//! Who sent which blob.

use super::{SqlStore, StoreError};
use aitk_common::hash::ContentHash;

/// Hashes that are read at once.
const PAGE: u64 = 10_000;

impl SqlStore {
    pub(super) async fn write_uploads(&self, uploads: &[(String, ContentHash)]) -> Result<(), StoreError> {
        let mut work = self.begin().await?;
        for (who, hash) in uploads {
            work.run(
                "INSERT INTO uploads (who, hash) VALUES ($1, $2) ON CONFLICT (who, hash) DO NOTHING",
                &[who.as_str().into(), hash.to_hex().into()],
            )
            .await
            .map_err(|e| self.failed(e))?;
        }
        work.commit().await.map_err(|e| self.failed(e))
    }

    pub(super) async fn read_uploads(&self, who: &str) -> Result<Vec<ContentHash>, StoreError> {
        let mut work = self.reading().await?;
        let (mut all, mut after) = (Vec::new(), String::new());
        loop {
            let rows = work
                .rows(
                    "SELECT hash FROM uploads WHERE who = $1 AND hash > $2 ORDER BY hash LIMIT $3",
                    &[who.into(), after.as_str().into(), PAGE.into()],
                )
                .await
                .map_err(|e| self.failed(e))?;
            for row in &rows {
                all.push(self.hash(who, row.text(0))?);
            }
            match rows.last() {
                Some(last) if rows.len() as u64 == PAGE => last.text(0).clone_into(&mut after),
                _ => return Ok(all),
            }
        }
    }

    pub(super) async fn drop_uploads(&self, hash: ContentHash) -> Result<(), StoreError> {
        let mut work = self.begin().await?;
        work.run("DELETE FROM uploads WHERE hash = $1", &[hash.to_hex().into()])
            .await
            .map_err(|e| self.failed(e))?;
        work.commit().await.map_err(|e| self.failed(e))
    }
}
