//! Errors of the store.

/// Why a store operation failed. `database` is its address without a password.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The database cannot be opened or migrated to this version's schema.
    #[error("cannot open the database {database}")]
    Open {
        /// The database.
        database: String,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The database address is invalid.
    #[error("the database address cannot be used: {problem}; expected postgres://USER@HOST/NAME")]
    Address {
        /// The problem, without the address: it may contain a password.
        problem: String,
    },
    /// The tables are those of another version.
    #[error(
        "the database {database} is at schema {found}, this version of aitk reads schema {expected}; use the same version as the coordinator"
    )]
    Schema {
        /// The database.
        database: String,
        /// Schema version of the database.
        found: i64,
        /// Schema version of this program.
        expected: i64,
    },
    /// Another coordinator uses the database.
    #[error(
        "another coordinator uses the database {database}; stop it first, or give this one its own with --database"
    )]
    InUse {
        /// The database.
        database: String,
    },
    /// Another coordinator took over the database: this one may not write any more.
    #[error(
        "another coordinator has taken over the database {database}; this one no longer leads, because only one coordinator may write"
    )]
    Superseded {
        /// The database.
        database: String,
    },
    /// The lease expired while the database did not answer: another coordinator may lead by now.
    #[error("the database did not answer for so long that another coordinator may lead by now")]
    LeaseLost,
    /// A statement failed.
    #[error("the database {database} failed")]
    Failed {
        /// The database.
        database: String,
        /// The cause.
        #[source]
        source: sqlx::Error,
    },
    /// A row cannot be parsed by this version.
    #[error(
        "the database {database} holds a {what} ({id}) that cannot be read; it may have been written by a newer version"
    )]
    Unreadable {
        /// The database.
        database: String,
        /// Kind of row.
        what: &'static str,
        /// Id of the row.
        id: String,
        /// The cause.
        #[source]
        source: serde_json::Error,
    },
}

impl StoreError {
    /// Whether the disk is full.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let Self::Failed { source, .. } = self else {
            return false;
        };
        // SQLITE_FULL; SQLITE_IOERR_SHMSIZE, when the index of the write-ahead log cannot grow; PostgreSQL's
        // `disk_full`.
        let code = source.as_database_error().and_then(|error| error.code());
        matches!(code.as_deref(), Some("13" | "4874" | "53100"))
    }

    /// Whether a retry may succeed.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Failed { .. })
    }
}
