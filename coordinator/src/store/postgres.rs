//! PostgreSQL: a server that may restart, and that several coordinators may use. See [`super::leader_lease`] for which of
//! them writes.

use super::connection::Database;
use super::database_url::{ACQUIRE_TIMEOUT, BoxError, CONNECTIONS, DatabaseUrl};
use super::error::StoreError;
use super::leader_lease::{Candidate, LeaderLease, with_keepalive};
use super::migrations;
use super::sql::SqlStore;
use aitk_common::hash::ContentHash;
use futures::future::BoxFuture;
use sqlx::postgres::PgPoolOptions;

impl SqlStore {
    /// Opens the database read-only, beside a running coordinator.
    ///
    /// # Errors
    /// [`StoreError::Open`], [`StoreError::Schema`]
    pub fn postgres_read_only(url: &DatabaseUrl) -> BoxFuture<'_, Result<Self, StoreError>> {
        // Boxed: compiled once, in this crate.
        Box::pin(Self::open_postgres_read_only(url))
    }

    async fn open_postgres_read_only(url: &DatabaseUrl) -> Result<Self, StoreError> {
        let options = url.options()?.options([("default_transaction_read_only", "on")]);
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .acquire_timeout(ACQUIRE_TIMEOUT)
            .connect_with(options)
            .await
            .map_err(|e| StoreError::Open {
                database: url.to_string(),
                source: Box::new(e),
            })?;
        let store = Self::new(url.to_string(), Database::Postgres(pool), None);
        store.check_schema(&migrations::POSTGRES).await?;
        Ok(store)
    }

    /// Opens the database, migrates it to this version's schema, and becomes its only writer, without a cluster.
    ///
    /// # Errors
    /// [`StoreError::Open`], [`StoreError::InUse`]
    pub fn postgres(url: &DatabaseUrl) -> BoxFuture<'_, Result<Self, StoreError>> {
        // Boxed: compiled once, in this crate.
        Box::pin(Self::open_postgres(url))
    }

    async fn open_postgres(url: &DatabaseUrl) -> Result<Self, StoreError> {
        let database = url.to_string();
        let failed = |source: BoxError| StoreError::Open {
            database: url.to_string(),
            source,
        };
        url.warn_if_unencrypted()?;
        let options = with_keepalive(url.options()?);
        let pool = PgPoolOptions::new()
            .max_connections(CONNECTIONS)
            .acquire_timeout(ACQUIRE_TIMEOUT)
            .connect_with(options.clone())
            .await
            .map_err(|e| failed(Box::new(e)))?;
        let alone = Candidate {
            address: None,
            token: ContentHash::of(b""),
            storage: String::new(),
        };
        let Some(lease) = LeaderLease::acquire_exclusive(&options, &pool, &alone)
            .await
            .map_err(failed)?
        else {
            return Err(StoreError::InUse { database });
        };
        Ok(Self::new(database, Database::Postgres(pool), Some(lease)))
    }
}
