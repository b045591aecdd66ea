//! Tables of a backup: how each is read in pages and how a row is written.

use super::connection::{Row, Value};
use serde::{Deserialize, Serialize};

/// A table: how a page is read after a key, and how a row is written. The key is the first `key` columns.
pub(super) struct Table {
    pub(super) name: &'static str,
    key: usize,
    /// Number of key columns that are not written: the database generates new values.
    generated: usize,
    /// Number of last columns that backups of older versions lack; they are restored as NULL.
    added_columns: usize,
    /// Rows per page: few where rows are large.
    pub(super) page: u64,
    /// The key before the first row.
    pub(super) before: &'static [Value],
    pub(super) read: &'static str,
    pub(super) write: &'static str,
}

const NO_TEXT: Value = Value::Text(None);

/// In the order in which they are restored.
pub(super) const TABLES: &[Table] = &[
    Table {
        name: "jobs",
        key: 1,
        generated: 0,
        added_columns: 1,
        page: 50,
        before: &[NO_TEXT],
        read: "SELECT id, record, config_text, config_format, job_json, inputs, shared FROM jobs \
               WHERE id > COALESCE($1, '') ORDER BY id LIMIT $2",
        write: "INSERT INTO jobs (id, record, config_text, config_format, job_json, inputs, shared) \
                VALUES ($1, $2, $3, $4, $5, $6, $7)",
    },
    Table {
        name: "payloads",
        key: 2,
        generated: 0,
        added_columns: 0,
        page: 50,
        before: &[NO_TEXT, Value::Int(Some(-1))],
        read: "SELECT id, piece, body FROM payloads \
               WHERE (id, piece) > (COALESCE($1, ''), $2) ORDER BY id, piece LIMIT $3",
        write: "INSERT INTO payloads (id, piece, body) VALUES ($1, $2, $3)",
    },
    Table {
        name: "workers",
        key: 1,
        generated: 0,
        added_columns: 0,
        page: 500,
        before: &[NO_TEXT],
        read: "SELECT id, record FROM workers WHERE id > COALESCE($1, '') ORDER BY id LIMIT $2",
        write: "INSERT INTO workers (id, record) VALUES ($1, $2)",
    },
    Table {
        name: "events",
        key: 2,
        generated: 0,
        added_columns: 0,
        page: 500,
        before: &[NO_TEXT, Value::Int(Some(0))],
        read: "SELECT job, cursor, attempt, seq, trim, event FROM events \
               WHERE (job, cursor) > (COALESCE($1, ''), $2) ORDER BY job, cursor LIMIT $3",
        write: "INSERT INTO events (job, cursor, attempt, seq, trim, event) VALUES ($1, $2, $3, $4, $5, $6)",
    },
    Table {
        name: "artifacts",
        key: 2,
        generated: 0,
        added_columns: 0,
        page: 500,
        before: &[NO_TEXT, NO_TEXT],
        read: "SELECT job, identity, name, artifact, hash FROM artifacts \
               WHERE (job, identity) > (COALESCE($1, ''), COALESCE($2, '')) ORDER BY job, identity LIMIT $3",
        write: "INSERT INTO artifacts (job, identity, name, artifact, hash) VALUES ($1, $2, $3, $4, $5)",
    },
    Table {
        name: "checkpoints",
        key: 2,
        generated: 0,
        added_columns: 0,
        page: 500,
        before: &[NO_TEXT, Value::Int(Some(0))],
        read: "SELECT job, cursor, manifest FROM checkpoints \
               WHERE (job, cursor) > (COALESCE($1, ''), $2) ORDER BY job, cursor LIMIT $3",
        write: "INSERT INTO checkpoints (job, cursor, manifest) VALUES ($1, $2, $3)",
    },
    Table {
        name: "documents",
        key: 2,
        generated: 0,
        added_columns: 0,
        page: 500,
        before: &[NO_TEXT, NO_TEXT],
        read: "SELECT kind, id, record FROM documents \
               WHERE (kind, id) > (COALESCE($1, ''), COALESCE($2, '')) ORDER BY kind, id LIMIT $3",
        write: "INSERT INTO documents (kind, id, record) VALUES ($1, $2, $3)",
    },
    Table {
        name: "uploads",
        key: 2,
        generated: 0,
        added_columns: 1,
        page: 500,
        before: &[NO_TEXT, NO_TEXT],
        read: "SELECT who, hash, bytes FROM uploads \
               WHERE (who, hash) > (COALESCE($1, ''), COALESCE($2, '')) ORDER BY who, hash LIMIT $3",
        write: "INSERT INTO uploads (who, hash, bytes) VALUES ($1, $2, $3)",
    },
    // Generated in the same order, so that the log continues.
    Table {
        name: "audit",
        key: 1,
        generated: 1,
        added_columns: 0,
        page: 500,
        before: &[Value::Int(Some(0))],
        read: "SELECT seq, id, record FROM audit WHERE seq > $1 ORDER BY seq LIMIT $2",
        write: "INSERT INTO audit (id, record) VALUES ($1, $2)",
    },
];

/// A value of a row in a backup.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Cell {
    Int(i64),
    Text(String),
    Null(()),
}

impl Table {
    /// Returns the key of a row.
    pub(super) fn key(&self, row: &Row) -> Vec<Value> {
        row.values().iter().take(self.key).cloned().collect()
    }

    /// Returns the cells of a row for a backup.
    pub(super) fn cells(&self, row: &Row) -> Vec<Cell> {
        row.values().iter().skip(self.generated).map(cell).collect()
    }

    /// Converts cells to the values of a row; `None` if they do not fit the table. The statement defines their number,
    /// and a NULL has the type of its column.
    pub(super) fn values(&self, cells: Vec<Cell>) -> Option<Vec<Value>> {
        let expected = self.write.matches('$').count();
        let mut cells = cells;
        // Last columns that an older version did not have.
        let known_since = expected.saturating_sub(self.added_columns);
        while (known_since..expected).contains(&cells.len()) {
            cells.push(Cell::Null(()));
        }
        if cells.len() != expected {
            return None;
        }
        let values = cells.into_iter().enumerate().map(|(column, cell)| match cell {
            Cell::Int(number) => Value::Int(Some(number)),
            Cell::Text(text) => Value::Text(Some(text)),
            // The only nullable numbers: an event's `seq` and the size of an upload.
            Cell::Null(()) if matches!((self.name, column), ("events", 3) | ("uploads", 2)) => Value::Int(None),
            Cell::Null(()) => Value::Text(None),
        });
        Some(values.collect())
    }
}

fn cell(value: &Value) -> Cell {
    match value {
        Value::Int(Some(number)) => Cell::Int(*number),
        Value::Text(Some(text)) => Cell::Text(text.clone()),
        Value::Int(None) | Value::Text(None) => Cell::Null(()),
    }
}
