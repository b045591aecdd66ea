//! Stored records of administrators and the audit log.

use super::audit_line::AuditLine;
use super::error::StoreError;
use super::records::write_audit;
use super::sql::SqlStore;
use super::types::{AdminRecord, RemovedRefusals};
use aitk_common::control_plane::UnixMillis;

/// Audit lines examined in one transaction.
const REFUSALS_AT_ONCE: u32 = 500;

impl SqlStore {
    pub(super) async fn read_admin_records(&self, kind: &'static str) -> Result<Vec<AdminRecord>, StoreError> {
        let mut transaction = self.begin_read().await?;
        let rows = transaction
            .rows(
                "SELECT id, record FROM documents WHERE kind = $1 ORDER BY id",
                &[kind.into()],
            )
            .await
            .map_err(|e| self.store_error(e))?;
        let document = |row: &super::connection::Row| AdminRecord {
            kind,
            id: row.text(0).to_owned(),
            record: row.text(1).to_owned(),
        };
        Ok(rows.iter().map(document).collect())
    }

    pub(super) async fn write_admin_records(
        &self,
        admin_records: &[AdminRecord],
        lines: &[AuditLine],
    ) -> Result<(), StoreError> {
        let mut transaction = self.begin_write().await?;
        for AdminRecord { kind, id, record } in admin_records {
            transaction
                .run(
                    "INSERT INTO documents (kind, id, record) VALUES ($1, $2, $3) \
                 ON CONFLICT (kind, id) DO UPDATE SET record = excluded.record",
                    &[(*kind).into(), id.as_str().into(), record.as_str().into()],
                )
                .await
                .map_err(|e| self.store_error(e))?;
        }
        write_audit(&mut transaction, lines)
            .await
            .map_err(|e| self.store_error(e))?;
        transaction.commit().await.map_err(|e| self.store_error(e))
    }

    pub(super) async fn remove_refusals(&self, after: u64, before: UnixMillis) -> Result<RemovedRefusals, StoreError> {
        let page = self.read_audit(after, REFUSALS_AT_ONCE).await?;
        let whole = page.len() == REFUSALS_AT_ONCE as usize;
        let old: Vec<_> = page.into_iter().take_while(|(_, line)| line.time < before).collect();
        let last = old.last().map_or(after, |(number, _)| *number);
        let more = whole && old.len() == REFUSALS_AT_ONCE as usize;
        let refused: Vec<u64> = old
            .iter()
            .filter(|(_, line)| !line.done)
            .map(|(number, _)| *number)
            .collect();
        if !refused.is_empty() {
            let mut transaction = self.begin_write().await?;
            for number in &refused {
                transaction
                    .run("DELETE FROM audit WHERE seq = $1", &[(*number).into()])
                    .await
                    .map_err(|e| self.store_error(e))?;
            }
            transaction.commit().await.map_err(|e| self.store_error(e))?;
        }
        Ok(RemovedRefusals {
            after: last,
            lines: refused.len() as u64,
            more,
        })
    }

    pub(super) async fn read_audit(&self, after: u64, limit: u32) -> Result<Vec<(u64, AuditLine)>, StoreError> {
        let mut transaction = self.begin_read().await?;
        let rows = transaction
            .rows(
                "SELECT seq, record FROM audit WHERE seq > $1 ORDER BY seq LIMIT $2",
                &[after.into(), u64::from(limit).into()],
            )
            .await
            .map_err(|e| self.store_error(e))?;
        rows.iter()
            .map(|row| {
                let number = row.number(0);
                Ok((
                    number,
                    self.parse("line of the audit log", &number.to_string(), row.text(1))?,
                ))
            })
            .collect()
    }
}
