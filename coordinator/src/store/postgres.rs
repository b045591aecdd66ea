//! PostgreSQL: a server that may be restarted, and that several coordinators may know.
//!
//! Only one of them writes. It holds an advisory lock, so that a second one is told at its start; and it has an epoch
//! that every transaction compares with the table `writer`, so that one which lost the lock without noticing (its
//! connection broke, its machine slept) changes nothing any more.

use super::link::Link;
use super::{SqlStore, StoreError};
use sqlx::migrate::Migrator;
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions, PgSslMode};
use sqlx::{Connection, PgConnection};
use std::str::FromStr;
use std::time::Duration;
use tokio::sync::Mutex;
use url::Url;

/// One writes, the others read events in pages.
const CONNECTIONS: u32 = 8;
/// How long a call waits for a connection. Short, so that the retries of a commit are retries.
const PATIENCE: Duration = Duration::from_secs(10);
/// The number of our lock: "aitk" in ASCII, and 1.
const LOCK: i64 = 0x6169_746b_0001;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The address of a PostgreSQL database. Never shows its password.
#[derive(Clone, PartialEq, Eq)]
pub struct DatabaseUrl {
    url: Url,
}

impl std::fmt::Debug for DatabaseUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DatabaseUrl({self})")
    }
}

impl std::fmt::Display for DatabaseUrl {
    /// Host and name only: a password may also stand in the query.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (host, path) = (self.url.host_str().unwrap_or_default(), self.url.path());
        match self.url.port() {
            Some(port) => write!(f, "postgres://{host}:{port}{path}"),
            None => write!(f, "postgres://{host}{path}"),
        }
    }
}

impl FromStr for DatabaseUrl {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        let bad = |problem: String| StoreError::Address { problem };
        let url = Url::parse(text).map_err(|error| bad(error.to_string()))?;
        if !matches!(url.scheme(), "postgres" | "postgresql") {
            return Err(bad(format!("its scheme is {:?}", url.scheme())));
        }
        // The same parser as for the connection: what it refuses is refused here, before anything starts.
        PgConnectOptions::from_str(text).map_err(|_| bad("PostgreSQL does not understand it".to_owned()))?;
        Ok(Self { url })
    }
}

impl DatabaseUrl {
    fn options(&self) -> Result<PgConnectOptions, StoreError> {
        let options = PgConnectOptions::from_str(self.url.as_str()).map_err(|_| StoreError::Address {
            problem: "PostgreSQL does not understand it".to_owned(),
        })?;
        // What is acknowledged must survive a power cut, whatever the server's default.
        Ok(options
            .application_name("aitk-coordinator")
            .options([("synchronous_commit", "on")]))
    }
}

/// The right to write, as long as nobody took it.
pub(super) struct Writer {
    options: PgConnectOptions,
    /// Our number in the table `writer`.
    pub(super) epoch: u64,
    /// The connection that holds the lock; none after it broke.
    holder: Mutex<Option<PgConnection>>,
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer")
            .field("epoch", &self.epoch)
            .finish_non_exhaustive()
    }
}

impl Writer {
    /// Takes the lock, then changes the tables if they need it, and takes a fresh epoch. Without the lock nothing changes:
    /// whoever has it may be of another version.
    async fn take(options: &PgConnectOptions, pool: &PgPool) -> Result<Option<Self>, BoxError> {
        let mut connection = PgConnection::connect_with(options).await?;
        if !try_lock(&mut connection).await? {
            return Ok(None);
        }
        MIGRATIONS.run(pool).await?;
        let epoch: i64 = sqlx::query_scalar("UPDATE writer SET epoch = epoch + 1 WHERE id = 1 RETURNING epoch")
            .fetch_one(pool)
            .await?;
        Ok(Some(Self {
            options: options.clone(),
            epoch: u64::try_from(epoch).unwrap_or(0),
            holder: Mutex::new(Some(connection)),
        }))
    }

    /// Takes the lock again after the server was restarted. The epoch still says who may write, so a failure here is
    /// no harm: it is tried again with the next commit that fails.
    pub(super) async fn keep(&self) {
        // A server that went away without a word does not answer for as long as TCP waits.
        let _ = tokio::time::timeout(PATIENCE, self.take_again()).await;
    }

    async fn take_again(&self) {
        let mut holder = self.holder.lock().await;
        // Out of its place meanwhile: one that is given up halfway is of no use.
        if let Some(mut connection) = holder.take()
            && connection.ping().await.is_ok()
        {
            *holder = Some(connection);
            return;
        }
        if let Ok(mut connection) = PgConnection::connect_with(&self.options).await
            && matches!(try_lock(&mut connection).await, Ok(true))
        {
            *holder = Some(connection);
        }
    }

    pub(super) async fn close(&self) {
        if let Some(connection) = self.holder.lock().await.take() {
            // Closing gives the lock back; so does an end without it, a little later.
            let _ = connection.close().await;
        }
    }
}

async fn try_lock(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("SELECT pg_try_advisory_lock($1)")
        .bind(LOCK)
        .fetch_one(connection)
        .await
}

static MIGRATIONS: Migrator = sqlx::migrate!("./migrations/postgres");

impl SqlStore {
    /// Opens the database beside the coordinator that works on it, to read.
    ///
    /// # Errors
    /// [`StoreError::Open`], [`StoreError::Schema`]
    pub async fn postgres_to_read(url: &DatabaseUrl) -> Result<Self, StoreError> {
        let options = url.options()?.options([("default_transaction_read_only", "on")]);
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .acquire_timeout(PATIENCE)
            .connect_with(options)
            .await
            .map_err(|e| StoreError::Open {
                database: url.to_string(),
                source: Box::new(e),
            })?;
        let store = Self::new(url.to_string(), Link::Postgres(pool), None);
        store.check_schema(&MIGRATIONS).await?;
        Ok(store)
    }

    /// Opens the database, brings it to this version's schema, and becomes the one who writes.
    ///
    /// # Errors
    /// [`StoreError::Open`], [`StoreError::InUse`]
    pub async fn postgres(url: &DatabaseUrl) -> Result<Self, StoreError> {
        let database = url.to_string();
        let failed = |source: BoxError| StoreError::Open {
            database: url.to_string(),
            source,
        };
        let options = url.options()?;
        let far = options.get_socket().is_none() && !matches!(options.get_host(), "localhost" | "127.0.0.1" | "::1");
        if far
            && matches!(
                options.get_ssl_mode(),
                PgSslMode::Disable | PgSslMode::Allow | PgSslMode::Prefer
            )
        {
            tracing::warn!(%database, "the database is on another machine and may be spoken to in clear; add ?sslmode=verify-full to its address");
        }
        let pool = PgPoolOptions::new()
            .max_connections(CONNECTIONS)
            .acquire_timeout(PATIENCE)
            .connect_with(options.clone())
            .await
            .map_err(|e| failed(Box::new(e)))?;
        let Some(writer) = Writer::take(&options, &pool).await.map_err(failed)? else {
            return Err(StoreError::InUse { database });
        };
        Ok(Self::new(database, Link::Postgres(pool), Some(writer)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_never_shown() {
        for text in [
            "postgres://me:geheim@db.lab:5433/aitk?sslmode=require",
            "postgresql://db.lab:5433/aitk?user=me&password=geheim",
        ] {
            let url: DatabaseUrl = text.parse().unwrap();
            assert_eq!(url.to_string(), "postgres://db.lab:5433/aitk");
            assert!(!format!("{url:?}").contains("geheim"));
        }
        for bad in ["", "geheim", "mysql://me:geheim@h/d", "postgres://me:geheim@h:99999/d"] {
            let error = bad.parse::<DatabaseUrl>().unwrap_err().to_string();
            assert!(
                error.contains("postgres://USER@HOST") && !error.contains("geheim"),
                "{error}"
            );
        }
    }
}
