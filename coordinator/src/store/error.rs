//! Why the store could not do what it was asked to.

/// Why the store could not. `database` is its address without a password.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The database cannot be opened or brought to this version's schema.
    #[error("cannot open the database {database}")]
    Open {
        /// Which.
        database: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The address of a database is none.
    #[error("the database address cannot be used: {problem}; expected postgres://USER@HOST/NAME")]
    Address {
        /// What is wrong, without the address: it may hold a password.
        problem: String,
    },
    /// Its tables are those of another version.
    #[error(
        "the database {database} is at schema {found}, this version of aitk reads schema {expected}; use the version that the coordinator runs"
    )]
    Schema {
        /// Which.
        database: String,
        /// Its schema.
        found: i64,
        /// Ours.
        expected: i64,
    },
    /// A coordinator works on it already.
    #[error(
        "another coordinator works on the database {database}; stop it first, or give this one its own with --database"
    )]
    InUse {
        /// Which.
        database: String,
    },
    /// Another coordinator took the database over: this one may not write any more.
    #[error(
        "another coordinator has taken over the database {database}; this one leads no more, so that no two of them write"
    )]
    Superseded {
        /// Which.
        database: String,
    },
    /// The lease ran out while the database did not answer: another one may lead by now.
    #[error("the database did not answer for so long that another coordinator may lead by now")]
    LeaseLost,
    /// A statement failed.
    #[error("the database {database} failed")]
    Failed {
        /// Which.
        database: String,
        /// Why.
        #[source]
        source: sqlx::Error,
    },
    /// A row that this version cannot read.
    #[error("the database {database} holds a {what} ({id}) that cannot be read; was it written by a newer version?")]
    Unreadable {
        /// Which.
        database: String,
        /// Kind of row.
        what: &'static str,
        /// Which row.
        id: String,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
}

impl StoreError {
    /// Whether there is no room for what was to be written.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let Self::Failed { source, .. } = self else {
            return false;
        };
        // SQLITE_FULL; SQLITE_IOERR_SHMSIZE, when the index of its log does not grow; PostgreSQL's `disk_full`.
        let code = source.as_database_error().and_then(|error| error.code());
        matches!(code.as_deref(), Some("13" | "4874" | "53100"))
    }

    /// Whether the same call may succeed in a moment.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Failed { .. })
    }
}
