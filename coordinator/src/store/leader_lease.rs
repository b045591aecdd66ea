//! The leader lease: which of several coordinators on one PostgreSQL database may write.
//!
//! Two mechanisms separate them. The **lease** decides when another coordinator may take over: the leader renews it
//! periodically, by the database's clock, and after it has expired the first coordinator that asks gets it. The **epoch** protects
//! the data: every transaction compares it (see [`super::sql`]), so a leader that was suspended past its lease cannot
//! write when it wakes up. A coordinator without a cluster holds an advisory lock as well, so that a second one is
//! refused at its start.

use super::database_url::{ADVISORY_LOCK, BoxError};
use super::migrations;
use aitk_common::hash::ContentHash;
use aitk_common::security::token::Token;
use sqlx::postgres::{PgConnectOptions, PgPool};
use sqlx::{Connection, PgConnection};
use std::time::{Duration, Instant};
use tokio::sync::Mutex;

/// Lifetime of the lease. A failover takes this time, one poll, and loading the queue: about a second with 100,000
/// jobs, so below ten seconds in total.
pub(crate) const LEASE: Duration = Duration::from_secs(5);
/// Interval of renewals, and of polls by standby coordinators.
pub(crate) const RENEW_INTERVAL: Duration = Duration::from_secs(1);
/// Timeout of one renewal.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// Session options that end a lost session early: a leader whose machine vanished must not keep the row of its epoch
/// locked. Keep-alives detect a lost machine, the transaction timeout a suspended process.
const KEEPALIVE_OPTIONS: [(&str, &str); 4] = [
    ("tcp_keepalives_idle", "3"),
    ("tcp_keepalives_interval", "1"),
    ("tcp_keepalives_count", "3"),
    ("idle_in_transaction_session_timeout", "5000"),
];

/// What a coordinator publishes when it leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// Address for the others; `None`: no cluster.
    pub(crate) address: Option<String>,
    /// SHA-256 of the token in its data folder.
    pub(crate) token: ContentHash,
    /// Its storage URL.
    pub(crate) storage: String,
}

/// The current leader, as stored in the database.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Leader {
    /// Its epoch; later leaders have higher ones.
    pub(crate) epoch: u64,
    /// Its address; `None`: it is not part of a cluster.
    pub(crate) address: Option<String>,
    /// Secret to send with calls that are forwarded to it: the column `proof`.
    pub(crate) forwarding_secret: String,
    /// SHA-256 of its token, hexadecimal.
    pub(crate) token: String,
    /// Its storage URL.
    pub(crate) storage: String,
}

impl std::fmt::Debug for Leader {
    /// Leaves out the secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Leader")
            .field("epoch", &self.epoch)
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

/// The connection that renews the lease, and whether it holds the advisory lock.
pub(super) struct LeaseConnection {
    pub(super) connection: PgConnection,
    pub(super) locked: bool,
}

/// The right to write, until another coordinator takes over.
pub(super) struct LeaderLease {
    options: PgConnectOptions,
    /// Our epoch in the table `writer`.
    pub(super) epoch: u64,
    /// Secret that others send with calls that they forward to us.
    pub(super) forwarding_secret: Token,
    /// `None` after the connection broke.
    holder: Mutex<Option<LeaseConnection>>,
    /// Until when the lease is certainly ours: from the time before the last successful renewal.
    valid_until: Mutex<Instant>,
}

impl std::fmt::Debug for LeaderLease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LeaderLease")
            .field("epoch", &self.epoch)
            .finish_non_exhaustive()
    }
}

impl LeaderLease {
    /// Without a cluster: takes the advisory lock, then migrates the tables if necessary, and takes a new epoch.
    /// Without the lock nothing is changed, because its holder may be of another version.
    pub(super) async fn acquire_exclusive(
        options: &PgConnectOptions,
        pool: &PgPool,
        candidate: &Candidate,
    ) -> Result<Option<Self>, BoxError> {
        let mut connection = PgConnection::connect_with(options).await?;
        if !try_lock(&mut connection).await? {
            return Ok(None);
        }
        migrations::POSTGRES.run(pool).await?;
        let is_free = "address IS NULL OR until < clock_timestamp()";
        let holder = LeaseConnection {
            connection,
            locked: true,
        };
        Self::acquire(options, pool, candidate, holder, is_free).await
    }

    /// Takes a new epoch and the lease, if it is free.
    pub(super) async fn acquire(
        options: &PgConnectOptions,
        pool: &PgPool,
        candidate: &Candidate,
        holder: LeaseConnection,
        is_free: &'static str,
    ) -> Result<Option<Self>, BoxError> {
        let began = Instant::now();
        let forwarding_secret = Token::generate();
        let mut transaction = pool.begin().await?;
        // Of two concurrent candidates the second waits here, and then sees that the lease is taken.
        let query = sqlx::AssertSqlSafe(format!("SELECT id FROM lease WHERE id = 1 AND ({is_free}) FOR UPDATE"));
        let vacant: Option<i64> = sqlx::query_scalar(query).fetch_optional(&mut *transaction).await?;
        if vacant.is_none() {
            return Ok(None);
        }
        // Waits for running transactions of the last leader, which the server ends if they are idle.
        let epoch: i64 = sqlx::query_scalar("UPDATE writer SET epoch = epoch + 1 WHERE id = 1 RETURNING epoch")
            .fetch_one(&mut *transaction)
            .await?;
        sqlx::query(
            "UPDATE lease SET epoch = $1, until = clock_timestamp() + make_interval(secs => $2), address = $3, \
             proof = $4, token = $5, storage = $6 WHERE id = 1",
        )
        .bind(epoch)
        .bind(LEASE.as_secs_f64())
        .bind(candidate.address.as_deref())
        .bind(forwarding_secret.secret())
        .bind(candidate.token.to_hex())
        .bind(&candidate.storage)
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(Some(Self {
            options: options.clone(),
            epoch: u64::try_from(epoch).unwrap_or(0),
            forwarding_secret,
            holder: Mutex::new(Some(holder)),
            valid_until: Mutex::new(began + LEASE),
        }))
    }

    /// Renews the lease, and takes the lock if it is free: it is lost with the connection when the server restarts.
    /// Returns whether we still lead; an error means that the database did not answer.
    pub(super) async fn renew(&self) -> Result<bool, sqlx::Error> {
        let began = Instant::now();
        // A lost server would block for as long as TCP retries.
        let late = std::io::Error::new(std::io::ErrorKind::TimedOut, "no answer in time");
        let ours = tokio::time::timeout(ANSWER_TIMEOUT, self.try_renew())
            .await
            .unwrap_or(Err(sqlx::Error::Io(late)))?;
        if ours {
            *self.valid_until.lock().await = began + LEASE;
        }
        Ok(ours)
    }

    async fn try_renew(&self) -> Result<bool, sqlx::Error> {
        let mut slot = self.holder.lock().await;
        // Taken out meanwhile: a connection that is dropped in the middle of a query is not reused.
        if let Some(mut holder) = slot.take()
            && let Ok(ours) = self.renew_on(&mut holder).await
        {
            *slot = Some(holder);
            return Ok(ours);
        }
        // The server was restarted, which released the lock: reconnect and take both again.
        let mut holder = LeaseConnection {
            connection: PgConnection::connect_with(&self.options).await?,
            locked: false,
        };
        let ours = self.renew_on(&mut holder).await?;
        *slot = Some(holder);
        Ok(ours)
    }

    async fn renew_on(&self, holder: &mut LeaseConnection) -> Result<bool, sqlx::Error> {
        let renewed = sqlx::query(
            "UPDATE lease SET until = clock_timestamp() + make_interval(secs => $1) WHERE id = 1 AND epoch = $2",
        )
        .bind(LEASE.as_secs_f64())
        .bind(i64::try_from(self.epoch).unwrap_or(i64::MAX))
        .execute(&mut holder.connection)
        .await?
        .rows_affected();
        if renewed == 1 && !holder.locked {
            holder.locked = try_lock(&mut holder.connection).await?;
        }
        Ok(renewed == 1)
    }

    /// Until when no other coordinator can have taken over, by this machine's clock.
    pub(super) async fn valid_until(&self) -> Instant {
        *self.valid_until.lock().await
    }

    /// Releases lease and lock, so that another coordinator need not wait.
    pub(super) async fn close(&self) {
        let Some(mut holder) = self.holder.lock().await.take() else {
            return;
        };
        let leave = async {
            let _ = sqlx::query("UPDATE lease SET until = '-infinity' WHERE id = 1 AND epoch = $1")
                .bind(i64::try_from(self.epoch).unwrap_or(i64::MAX))
                .execute(&mut holder.connection)
                .await;
            // Closing the connection releases the lock too, but the server does that a little later, when a coordinator
            // that starts right away may already have asked for the lock.
            let _ = sqlx::query("SELECT pg_advisory_unlock($1)")
                .bind(ADVISORY_LOCK)
                .execute(&mut holder.connection)
                .await;
            let _ = holder.connection.close().await;
        };
        let _ = tokio::time::timeout(ANSWER_TIMEOUT, leave).await;
    }
}

pub(super) async fn try_lock(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("SELECT pg_try_advisory_lock($1)")
        .bind(ADVISORY_LOCK)
        .fetch_one(connection)
        .await
}

/// Connection options of sessions that write.
pub(super) fn with_keepalive(options: PgConnectOptions) -> PgConnectOptions {
    options.options(KEEPALIVE_OPTIONS)
}
