//! Common interface to both databases: statements with `$1`, values that are texts or numbers.

use sqlx::postgres::{PgArguments, PgConnection, PgPool, PgRow};
use sqlx::sqlite::{SqliteArguments, SqliteConnection, SqlitePool, SqliteRow};
use sqlx::{Arguments, Postgres, Row as _, Sqlite, Transaction, TypeInfo, ValueRef};

/// A statement in the syntax of each database.
#[derive(Clone, Copy, Debug)]
pub(super) struct Statement {
    /// With `?`: SQLite looks up each named parameter, such as `$1`, in a list of all names.
    pub(super) sqlite: &'static str,
    /// With `$1`.
    pub(super) postgres: &'static str,
}

/// A parameter or a column value. `None` is NULL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Value {
    Text(Option<String>),
    Int(Option<i64>),
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(Some(text.to_owned()))
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(Some(text))
    }
}

impl From<Option<&str>> for Value {
    fn from(text: Option<&str>) -> Self {
        Self::Text(text.map(str::to_owned))
    }
}

/// Numbers beyond `i64` are clamped to its maximum.
impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Int(Some(i64::try_from(number).unwrap_or(i64::MAX)))
    }
}

impl From<Option<u64>> for Value {
    fn from(number: Option<u64>) -> Self {
        number.map_or(Self::Int(None), Into::into)
    }
}

impl From<bool> for Value {
    fn from(yes: bool) -> Self {
        u64::from(yes).into()
    }
}

/// One result row.
#[derive(Clone, Debug)]
pub(super) struct Row(Vec<Value>);

impl Row {
    /// Returns a text column; empty if it is not a text.
    pub(super) fn text(&self, column: usize) -> &str {
        self.optional_text(column).unwrap_or_default()
    }

    /// Returns a text column that may be NULL.
    pub(super) fn optional_text(&self, column: usize) -> Option<&str> {
        match self.0.get(column) {
            Some(Value::Text(text)) => text.as_deref(),
            _ => None,
        }
    }

    /// Returns a number column; 0 if it is not a number.
    pub(super) fn number(&self, column: usize) -> u64 {
        match self.0.get(column) {
            Some(Value::Int(number)) => number.and_then(|number| u64::try_from(number).ok()).unwrap_or(0),
            _ => 0,
        }
    }

    /// Returns all columns.
    pub(super) fn values(&self) -> &[Value] {
        &self.0
    }
}

/// Connection pools of a database.
#[derive(Debug)]
pub(super) enum Database {
    /// One connection writes, a few others read.
    Sqlite { writer: SqlitePool, readers: SqlitePool },
    /// Every connection reads and writes.
    Postgres(PgPool),
}

/// A transaction. Dropping it rolls it back.
pub(super) enum SqlTransaction {
    Sqlite(Transaction<'static, Sqlite>),
    Postgres(Transaction<'static, Postgres>),
}

impl Database {
    /// Begins a transaction that writes.
    pub(super) async fn write(&self) -> Result<SqlTransaction, sqlx::Error> {
        Ok(match self {
            Self::Sqlite { writer, .. } => SqlTransaction::Sqlite(writer.begin().await?),
            Self::Postgres(pool) => SqlTransaction::Postgres(pool.begin().await?),
        })
    }

    /// Begins a read-only transaction with a consistent snapshot.
    pub(super) async fn read(&self) -> Result<SqlTransaction, sqlx::Error> {
        Ok(match self {
            Self::Sqlite { readers, .. } => SqlTransaction::Sqlite(readers.begin().await?),
            Self::Postgres(pool) => SqlTransaction::Postgres(
                pool.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                    .await?,
            ),
        })
    }

    /// Runs one query.
    pub(super) async fn rows(&self, statement: &'static str, values: &[Value]) -> Result<Vec<Row>, sqlx::Error> {
        match self {
            Self::Sqlite { readers, .. } => from_sqlite(&mut *readers.acquire().await?, statement, values).await,
            Self::Postgres(pool) => from_postgres(&mut *pool.acquire().await?, statement, values).await,
        }
    }

    pub(super) async fn close(&self) {
        match self {
            Self::Sqlite { writer, readers } => {
                readers.close().await;
                writer.close().await;
            }
            Self::Postgres(pool) => pool.close().await,
        }
    }
}

impl SqlTransaction {
    /// Runs a statement; returns the number of changed rows.
    pub(super) async fn run(&mut self, statement: &'static str, values: &[Value]) -> Result<u64, sqlx::Error> {
        Ok(match self {
            Self::Sqlite(transaction) => {
                let query = sqlx::query_with(statement, sqlite_arguments(values.iter().cloned())?);
                query.execute(&mut **transaction).await?.rows_affected()
            }
            Self::Postgres(transaction) => {
                let query = sqlx::query_with(statement, postgres_arguments(values)?);
                query.execute(&mut **transaction).await?.rows_affected()
            }
        })
    }

    /// Runs a bulk statement.
    pub(super) async fn run_bulk(&mut self, statement: Statement, values: Vec<Value>) -> Result<(), sqlx::Error> {
        match self {
            Self::Sqlite(transaction) => {
                let query = sqlx::query_with(statement.sqlite, sqlite_arguments(values)?);
                query.execute(&mut **transaction).await?;
            }
            Self::Postgres(transaction) => {
                let query = sqlx::query_with(statement.postgres, postgres_arguments(&values)?);
                query.execute(&mut **transaction).await?;
            }
        }
        Ok(())
    }

    /// Runs a query.
    pub(super) async fn rows(&mut self, statement: &'static str, values: &[Value]) -> Result<Vec<Row>, sqlx::Error> {
        match self {
            Self::Sqlite(transaction) => from_sqlite(&mut *transaction, statement, values).await,
            Self::Postgres(transaction) => from_postgres(&mut *transaction, statement, values).await,
        }
    }

    pub(super) async fn commit(self) -> Result<(), sqlx::Error> {
        match self {
            Self::Sqlite(transaction) => transaction.commit().await,
            Self::Postgres(transaction) => transaction.commit().await,
        }
    }
}

fn sqlite_arguments(values: impl IntoIterator<Item = Value>) -> Result<SqliteArguments, sqlx::Error> {
    let mut arguments = SqliteArguments::default();
    for value in values {
        match value {
            Value::Text(text) => arguments.add(text),
            Value::Int(number) => arguments.add(number),
        }
        .map_err(sqlx::Error::Encode)?;
    }
    Ok(arguments)
}

fn postgres_arguments(values: &[Value]) -> Result<PgArguments, sqlx::Error> {
    let mut arguments = PgArguments::default();
    for value in values {
        match value {
            Value::Text(text) => arguments.add(text),
            Value::Int(number) => arguments.add(number),
        }
        .map_err(sqlx::Error::Encode)?;
    }
    Ok(arguments)
}

async fn from_sqlite(
    connection: &mut SqliteConnection,
    statement: &'static str,
    values: &[Value],
) -> Result<Vec<Row>, sqlx::Error> {
    let query = sqlx::query_with(statement, sqlite_arguments(values.iter().cloned())?);
    let rows = query.fetch_all(connection).await?;
    let value = |row: &SqliteRow, column: usize| -> Result<Value, sqlx::Error> {
        // SQLite values have types of their own; NULL is read as a text that is `None`.
        if row.try_get_raw(column)?.type_info().name() == "INTEGER" {
            row.try_get(column).map(Value::Int)
        } else {
            row.try_get(column).map(Value::Text)
        }
    };
    let row = |row: SqliteRow| -> Result<Row, sqlx::Error> {
        let values: Result<_, _> = (0..row.len()).map(|column| value(&row, column)).collect();
        Ok(Row(values?))
    };
    rows.into_iter().map(row).collect()
}

async fn from_postgres(
    connection: &mut PgConnection,
    statement: &'static str,
    values: &[Value],
) -> Result<Vec<Row>, sqlx::Error> {
    let query = sqlx::query_with(statement, postgres_arguments(values)?);
    let rows = query.fetch_all(connection).await?;
    let value = |row: &PgRow, column: usize| -> Result<Value, sqlx::Error> {
        if row.try_get_raw(column)?.type_info().name() == "INT8" {
            row.try_get(column).map(Value::Int)
        } else {
            row.try_get(column).map(Value::Text)
        }
    };
    let row = |row: PgRow| -> Result<Row, sqlx::Error> {
        let values: Result<_, _> = (0..row.len()).map(|column| value(&row, column)).collect();
        Ok(Row(values?))
    };
    rows.into_iter().map(row).collect()
}
