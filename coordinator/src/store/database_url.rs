//! Address of a PostgreSQL database and its connection options.

use super::error::StoreError;
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use std::str::FromStr;
use std::time::Duration;
use url::Url;

/// Connections of the pool: one writes, the others read events in pages.
pub(super) const CONNECTIONS: u32 = 8;

/// How long a call waits for a connection. Short, so that retries of a commit are real retries.
pub(super) const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(10);

/// Key of our advisory lock: "aitk" in ASCII, and 1.
pub(super) const ADVISORY_LOCK: i64 = 0x6169_746b_0001;

pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;

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
    /// Host and database name only: the query may contain a password too.
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
        if !url.has_authority() {
            return Err(bad(format!("there is no `//` after `{}:`", url.scheme())));
        }
        // Such a character ends the host: the rest of the password would count as the database or as an option, which messages show.
        let is_split = url.path().contains('@') || url.query_pairs().any(|(key, _)| key.contains('@'));
        if is_split || url.fragment().is_some() {
            return Err(bad(
                "write a `/`, `?` or `#` of the user's name or password as %2F, %3F or %23".to_owned(),
            ));
        }
        // The same parser as for the connection, so that bad addresses are refused before anything starts.
        PgConnectOptions::from_str(text).map_err(|_| bad("it is not a valid PostgreSQL address".to_owned()))?;
        Ok(Self { url })
    }
}

impl DatabaseUrl {
    pub(super) fn options(&self) -> Result<PgConnectOptions, StoreError> {
        let options = PgConnectOptions::from_str(self.url.as_str()).map_err(|_| StoreError::Address {
            problem: "it is not a valid PostgreSQL address".to_owned(),
        })?;
        // Acknowledged changes must survive a power failure, whatever the server's default is.
        Ok(options
            .application_name("aitk-coordinator")
            .options([("synchronous_commit", "on")]))
    }

    /// Logs a warning when passwords and prompts may be sent unencrypted.
    pub(super) fn warn_if_unencrypted(&self) -> Result<(), StoreError> {
        let options = self.options()?;
        let far = options.get_socket().is_none() && !matches!(options.get_host(), "localhost" | "127.0.0.1" | "::1");
        let perhaps = matches!(
            options.get_ssl_mode(),
            PgSslMode::Disable | PgSslMode::Allow | PgSslMode::Prefer
        );
        if far && perhaps {
            tracing::warn!(database = %self, "the database is on another machine and the connection may be unencrypted; add ?sslmode=verify-full to its address");
        }
        Ok(())
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
            "postgres://me:12%23%2Fgeheim@db.lab:5433/aitk",
        ] {
            let url: DatabaseUrl = text.parse().unwrap();
            assert_eq!(url.to_string(), "postgres://db.lab:5433/aitk");
            assert!(!format!("{url:?}").contains("geheim"));
        }
        for bad in [
            "",
            "geheim",
            "mysql://me:geheim@h/d",
            "postgres://me:geheim@h:99999/d",
            "postgres:me:geheim@h/d",
            "postgres:/me:geheim@h/d",
            "postgres://me:12/geheim@h/d",
            "postgres://me:12?geheim@h/d",
            "postgres://me:12#geheim@h/d",
        ] {
            let error = bad.parse::<DatabaseUrl>().unwrap_err().to_string();
            assert!(
                error.contains("postgres://USER@HOST") && !error.contains("geheim"),
                "{error}"
            );
        }
    }
}
