//! Which of several coordinators on one PostgreSQL database leads, and for how long.
//!
//! Two things keep them apart. The **lease** says when somebody may take over: the leader renews it all the time, by the
//! database's clock, and when it has run out the first to ask gets it. The **epoch** keeps what is written safe: every
//! transaction compares it (see [`super::sql`]), so a leader that slept through its lease changes nothing when it wakes.
//! A coordinator that wants no others beside it holds an advisory lock as well, so that a second one is told at its start.

use super::database_url::{ADVISORY_LOCK, BoxError, MIGRATIONS};
use aitk_common::hash::ContentHash;
use aitk_common::security::token::Token;
use sqlx::postgres::{PgConnectOptions, PgPool};
use sqlx::{Connection, PgConnection};
use std::time::{Duration, Instant};
use tokio::sync::Mutex;

/// How long a leader is valid_until in that does not renew. Takeover takes this, a look, and the loading of the queue: with
/// 100,000 jobs about a second, so that all of it stays below ten.
pub(crate) const LEASE: Duration = Duration::from_secs(5);
/// How often it is renewed, and looked at.
pub(crate) const RENEW: Duration = Duration::from_secs(1);
/// How long one renewal may take.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// What a session of ours is for that the server has lost sight of: a leader whose machine vanished must not keep
/// the row of its epoch locked. Keep-alives find out about the machine, the other limit about a process that stands still.
const KEEPALIVE_OPTIONS: [(&str, &str); 4] = [
    ("tcp_keepalives_idle", "3"),
    ("tcp_keepalives_interval", "1"),
    ("tcp_keepalives_count", "3"),
    ("idle_in_transaction_session_timeout", "5000"),
];

/// What a coordinator tells the others when it leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// Where the others reach it; none: it wants no others.
    pub(crate) address: Option<String>,
    /// SHA-256 of the token in its data folder.
    pub(crate) token: ContentHash,
    /// Its object storage.
    pub(crate) storage: String,
}

/// Who leads, as the database says.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Leader {
    /// Its number; a later leader has a higher one.
    pub(crate) epoch: u64,
    /// Where it is reached; none: it wants no others.
    pub(crate) address: Option<String>,
    /// What to show with a call that is passed on to it.
    pub(crate) proof: String,
    /// SHA-256 of its token, in hexadecimal digits.
    pub(crate) token: String,
    /// Its object storage.
    pub(crate) storage: String,
}

impl std::fmt::Debug for Leader {
    /// Without the proof.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Leader")
            .field("epoch", &self.epoch)
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

/// The connection that renews, and whether it holds the lock.
pub(super) struct LeaseConnection {
    pub(super) connection: PgConnection,
    pub(super) locked: bool,
}

/// The right to write, as long as nobody took it.
pub(super) struct Writer {
    options: PgConnectOptions,
    /// Our number in the table `writer`.
    pub(super) epoch: u64,
    /// What others show with a call that they pass on to us.
    pub(super) proof: Token,
    /// None after it broke.
    holder: Mutex<Option<LeaseConnection>>,
    /// Until when we may believe that we lead: from before the last renewal that succeeded.
    valid_until: Mutex<Instant>,
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer")
            .field("epoch", &self.epoch)
            .finish_non_exhaustive()
    }
}

impl Writer {
    /// Alone: takes the lock, then changes the tables if they need it, and takes a fresh epoch. Without the lock nothing
    /// changes: whoever has it may be of another version.
    pub(super) async fn acquire_exclusive(
        options: &PgConnectOptions,
        pool: &PgPool,
        candidate: &Candidate,
    ) -> Result<Option<Self>, BoxError> {
        let mut connection = PgConnection::connect_with(options).await?;
        if !try_lock(&mut connection).await? {
            return Ok(None);
        }
        MIGRATIONS.run(pool).await?;
        let free = "address IS NULL OR until < clock_timestamp()";
        let holder = LeaseConnection {
            connection,
            locked: true,
        };
        Self::acquire(options, pool, candidate, holder, free).await
    }

    /// A fresh epoch and the lease, if it is free.
    pub(super) async fn acquire(
        options: &PgConnectOptions,
        pool: &PgPool,
        candidate: &Candidate,
        holder: LeaseConnection,
        free: &'static str,
    ) -> Result<Option<Self>, BoxError> {
        let began = Instant::now();
        let proof = Token::generate();
        let mut transaction = pool.begin().await?;
        // Of two that come at once the second waits here, and then sees that it is taken.
        let look = sqlx::AssertSqlSafe(format!("SELECT id FROM lease WHERE id = 1 AND ({free}) FOR UPDATE"));
        let vacant: Option<i64> = sqlx::query_scalar(look).fetch_optional(&mut *transaction).await?;
        if vacant.is_none() {
            return Ok(None);
        }
        // Waits for transactions of the last leader that are under way, which the server ends if they stand still.
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
        .bind(proof.secret())
        .bind(candidate.token.to_hex())
        .bind(&candidate.storage)
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(Some(Self {
            options: options.clone(),
            epoch: u64::try_from(epoch).unwrap_or(0),
            proof,
            holder: Mutex::new(Some(holder)),
            valid_until: Mutex::new(began + LEASE),
        }))
    }

    /// Renews the lease, and takes the lock where it is free: it goes with its connection when the server is restarted.
    /// Whether we still lead; an error says that the database did not answer.
    pub(super) async fn renew(&self) -> Result<bool, sqlx::Error> {
        let began = Instant::now();
        // A server that went away without a word does not answer for as long as TCP waits.
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
        // Out of its place meanwhile: one that is given up halfway is of no use.
        if let Some(mut holder) = slot.take()
            && let Ok(ours) = self.renew_on(&mut holder).await
        {
            *slot = Some(holder);
            return Ok(ours);
        }
        // The server was restarted, and the lock is free with the connection: take both again at once.
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

    /// Until when nobody else can have taken over, by this machine's clock.
    pub(super) async fn valid_until(&self) -> Instant {
        *self.valid_until.lock().await
    }

    /// Gives lease and lock back, so that another one need not wait.
    pub(super) async fn close(&self) {
        let Some(mut holder) = self.holder.lock().await.take() else {
            return;
        };
        let leave = async {
            let _ = sqlx::query("UPDATE lease SET until = '-infinity' WHERE id = 1 AND epoch = $1")
                .bind(i64::try_from(self.epoch).unwrap_or(i64::MAX))
                .execute(&mut holder.connection)
                .await;
            // Closing gives the lock back; so does an end without it, a little later.
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

/// The options of connections that write.
pub(super) fn with_keepalive(options: PgConnectOptions) -> PgConnectOptions {
    options.options(KEEPALIVE_OPTIONS)
}
