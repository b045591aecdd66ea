//! SQLite: one file, write-ahead log, synced at every commit.

use super::connection::Database;
use super::error::StoreError;
use super::migrations;
use super::sql::SqlStore;
use futures::future::BoxFuture;
use sqlx::Connection;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use std::path::Path;
use std::time::Duration;

/// Connections that read: event streams read in pages of a few milliseconds.
const READERS: u32 = 4;

fn options(path: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .busy_timeout(Duration::from_secs(10))
}

/// Creates an empty file that only its owner can read, unless there is one: configs of jobs may contain secrets, and the data folder
/// may have been made by somebody with other permissions. SQLite gives the files beside it the same mode, and reports
/// what is wrong if this fails.
fn create_private(path: &Path) {
    let mut options = std::fs::File::options();
    options.create(true).append(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.mode(0o600);
    }
    let _ = options.open(path);
}

impl SqlStore {
    /// Opens the file, creates it if necessary, and migrates it to this version's schema.
    ///
    /// # Errors
    /// [`StoreError::Open`]
    pub fn sqlite(path: &Path) -> BoxFuture<'_, Result<Self, StoreError>> {
        // Boxed: compiled once, in this crate.
        Box::pin(Self::open_sqlite(path))
    }

    async fn open_sqlite(path: &Path) -> Result<Self, StoreError> {
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| StoreError::Open {
            database: path.display().to_string(),
            source,
        };
        create_private(path);
        let options = options(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full);
        let writer = SqlitePoolOptions::new()
            .max_connections(1)
            // On a full disk, a rollback can fail as well. Writes inside a transaction that stays open are committed
            // to it and not to the file: such a connection is closed, which rolls it back.
            .before_acquire(|connection, _| Box::pin(async move { Ok(!connection.is_in_transaction()) }))
            .connect_with(options.clone())
            .await
            .map_err(|e| failed(Box::new(e)))?;
        migrations::SQLITE.run(&writer).await.map_err(|e| failed(Box::new(e)))?;
        let readers = SqlitePoolOptions::new()
            .max_connections(READERS)
            .connect_with(options.read_only(true).create_if_missing(false))
            .await
            .map_err(|e| failed(Box::new(e)))?;
        Ok(Self::new(
            path.display().to_string(),
            Database::Sqlite { writer, readers },
            None,
        ))
    }

    /// Opens the file read-only, beside a running coordinator.
    ///
    /// # Errors
    /// [`StoreError::Open`], [`StoreError::Schema`]
    pub fn sqlite_read_only(path: &Path) -> BoxFuture<'_, Result<Self, StoreError>> {
        // Boxed: compiled once, in this crate.
        Box::pin(Self::open_sqlite_read_only(path))
    }

    async fn open_sqlite_read_only(path: &Path) -> Result<Self, StoreError> {
        let pool = SqlitePoolOptions::new()
            .max_connections(1)
            .connect_with(options(path).read_only(true))
            .await
            .map_err(|e| StoreError::Open {
                database: path.display().to_string(),
                source: Box::new(e),
            })?;
        let database = Database::Sqlite {
            writer: pool.clone(),
            readers: pool,
        };
        let store = Self::new(path.display().to_string(), database, None);
        store.check_schema(&migrations::SQLITE).await?;
        Ok(store)
    }
}
