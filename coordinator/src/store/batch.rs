//! Bulk statements: one statement for many rows.
//!
//! A statement costs a round trip to the database's thread or server, which is more than writing a row. So the rows of
//! a transaction are grouped by statement and written 32, 16, 8 … at a time; few distinct statements, so each stays
//! prepared. The order of tables does not matter, because there are no foreign keys.

use super::connection::{SqlTransaction, Statement, Value};
use std::sync::LazyLock;

/// Rows per statement: powers of two, so that any number needs few statements. The widest row times the largest size
/// stays far below SQLite's limit of 32,766 values.
const SIZES: [usize; 6] = [32, 16, 8, 4, 2, 1];

/// One statement for each of [`SIZES`].
type Statements = [Statement; SIZES.len()];

/// A statement for rows of one kind, in all sizes.
pub(super) struct BulkStatement {
    statements: LazyLock<Statements>,
}

impl BulkStatement {
    pub(super) const fn new(statements: fn() -> Statements) -> Self {
        Self {
            statements: LazyLock::new(statements),
        }
    }

    /// Runs the statement for all rows, in order. No key may occur twice.
    pub(super) async fn run(&self, transaction: &mut SqlTransaction, rows: Vec<Vec<Value>>) -> Result<(), sqlx::Error> {
        let mut left = rows.len();
        let mut rows = rows.into_iter();
        for (size, statement) in SIZES.into_iter().zip(self.statements.iter()) {
            while left >= size {
                let values: Vec<Value> = rows.by_ref().take(size).flatten().collect();
                transaction.run_bulk(*statement, values).await?;
                left -= size;
            }
        }
        Ok(())
    }
}

/// Builds the statement `head (…), (…) tail` for each size. Leaked, because the few dozen statements live as long as
/// the program.
pub(super) fn statements(head: &str, columns: usize, tail: &str) -> Statements {
    let text = |size: usize, placeholder: fn(usize) -> String| {
        let row = |row: usize| {
            let placeholders: Vec<String> = (1..=columns)
                .map(|column| placeholder(row * columns + column))
                .collect();
            format!("({})", placeholders.join(", "))
        };
        let rows: Vec<String> = (0..size).map(row).collect();
        let text = format!("{head} {} {tail}", rows.join(", "));
        &*Box::leak(text.into_boxed_str())
    };
    SIZES.map(|size| Statement {
        sqlite: text(size, |_| "?".into()),
        postgres: text(size, |placeholder| format!("${placeholder}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_statement_has_a_placeholder_for_every_value() {
        let all = statements("INSERT INTO t (a, b) VALUES", 2, "ON CONFLICT DO NOTHING");
        assert_eq!(
            all[5].postgres,
            "INSERT INTO t (a, b) VALUES ($1, $2) ON CONFLICT DO NOTHING"
        );
        assert_eq!(
            all[4].postgres,
            "INSERT INTO t (a, b) VALUES ($1, $2), ($3, $4) ON CONFLICT DO NOTHING"
        );
        assert_eq!(
            all[4].sqlite,
            "INSERT INTO t (a, b) VALUES (?, ?), (?, ?) ON CONFLICT DO NOTHING"
        );
        assert!(all[0].postgres.contains("($63, $64)") && !all[0].postgres.contains("$65"));
        assert_eq!(all[0].sqlite.matches('?').count(), 64);
    }
}
