//! A standby coordinator's access to the leader lease.

use super::connection::Database;
use super::database_url::{ACQUIRE_TIMEOUT, BoxError, CONNECTIONS, DatabaseUrl};
use super::error::StoreError;
use super::leader_lease::{ANSWER_TIMEOUT, Candidate, Leader, LeaderLease, LeaseConnection, try_lock, with_keepalive};
use super::migrations;
use super::sql::SqlStore;
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};
use sqlx::{Connection, PgConnection};

/// A standby coordinator that leads as soon as no other does.
#[derive(Debug)]
pub(crate) struct StandbyCoordinator {
    url: DatabaseUrl,
    options: PgConnectOptions,
    /// Reads the lease; a leader gets a pool of its own.
    pool: PgPool,
}

impl StandbyCoordinator {
    /// Prepares the connection; connects at the first query.
    pub(crate) fn new(url: &DatabaseUrl) -> Result<Self, StoreError> {
        url.warn_if_unencrypted()?;
        let options = with_keepalive(url.options()?);
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .acquire_timeout(ANSWER_TIMEOUT)
            .connect_lazy_with(options.clone());
        Ok(Self {
            url: url.clone(),
            options,
            pool,
        })
    }

    fn store_error(&self, source: impl Into<BoxError>) -> StoreError {
        StoreError::Open {
            database: self.url.to_string(),
            source: source.into(),
        }
    }

    /// Returns the current leader; `None` if there is none, so that [`Self::try_lead`] may succeed.
    ///
    /// # Errors
    /// [`StoreError::Open`] when the database does not answer, [`StoreError::Schema`] when it is a newer version's.
    pub(crate) async fn leader(&self) -> Result<Option<Leader>, StoreError> {
        let query = async {
            // The tables may not exist yet, or be those of an older version.
            let known: bool = sqlx::query_scalar("SELECT to_regclass('lease') IS NOT NULL")
                .fetch_one(&self.pool)
                .await?;
            if !known {
                return Ok(None);
            }
            let row: Option<(i64, Option<String>, String, String, String)> = sqlx::query_as(
                "SELECT epoch, address, proof, token, storage FROM lease WHERE id = 1 AND until >= clock_timestamp()",
            )
            .fetch_optional(&self.pool)
            .await?;
            Ok(row.map(|(epoch, address, forwarding_secret, token, storage)| Leader {
                epoch: u64::try_from(epoch).unwrap_or(0),
                address,
                forwarding_secret,
                token,
                storage,
            }))
        };
        let late = || sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, "no answer in time"));
        let found = tokio::time::timeout(ANSWER_TIMEOUT, query).await;
        found.unwrap_or_else(|_| Err(late())).map_err(|e| self.store_error(e))
    }

    /// Becomes the leader, if there is none.
    ///
    /// # Errors
    /// As [`Self::leader`].
    pub(crate) async fn try_lead(&self, candidate: &Candidate) -> Result<Option<SqlStore>, StoreError> {
        let pool = PgPoolOptions::new()
            .max_connections(CONNECTIONS)
            .acquire_timeout(ACQUIRE_TIMEOUT)
            .connect_with(self.options.clone())
            .await
            .map_err(|e| self.store_error(e))?;
        let mut connection = PgConnection::connect_with(&self.options)
            .await
            .map_err(|e| self.store_error(e))?;
        let locked = try_lock(&mut connection).await.map_err(|e| self.store_error(e))?;
        let store = SqlStore::new(self.url.to_string(), Database::Postgres(pool.clone()), None);
        if locked {
            migrations::POSTGRES.run(&pool).await.map_err(|e| self.store_error(e))?;
        } else if store.check_schema(&migrations::POSTGRES).await.is_err() {
            // The holder of the lock uses these tables.
            return Ok(None);
        }
        let holder = LeaseConnection { connection, locked };
        let lease = LeaderLease::acquire(&self.options, &pool, candidate, holder, "until < clock_timestamp()")
            .await
            .map_err(|e| self.store_error(e))?;
        let database = self.url.to_string();
        Ok(lease.map(|lease| SqlStore::new(database, Database::Postgres(pool), Some(lease))))
    }
}
