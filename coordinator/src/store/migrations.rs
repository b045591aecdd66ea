//! The migrations of both databases, which are inside the program: the files of `coordinator/migrations/`, named
//! `0001_what_it_does.sql`.
//!
//! They are read here and not by `sqlx::migrate!`: its macro crate compiles both database drivers and SQLite a second time,
//! for the compiler. Versions, descriptions and checksums in `_sqlx_migrations` are the same.

use include_dir::{Dir, File, include_dir};
use sqlx::SqlSafeStr;
use sqlx::migrate::{Migration, MigrationType, Migrator};
use std::sync::LazyLock;

static POSTGRES_FILES: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/migrations/postgres");
static SQLITE_FILES: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/migrations/sqlite");

pub(super) static POSTGRES: LazyLock<Migrator> = LazyLock::new(|| migrator(&POSTGRES_FILES));
pub(super) static SQLITE: LazyLock<Migrator> = LazyLock::new(|| migrator(&SQLITE_FILES));

fn migrator(folder: &'static Dir<'_>) -> Migrator {
    Migrator::with_migrations(folder.files().filter_map(migration).collect())
}

/// The migration in one file; `None` if the file is not named as one, which a test excludes.
fn migration(file: &'static File<'_>) -> Option<Migration> {
    let (version, description) = file.path().file_stem()?.to_str()?.split_once('_')?;
    let description = description.replace('_', " ");
    let sql = file.contents_utf8()?.into_sql_str();
    Some(Migration::new(
        version.parse().ok()?,
        description.into(),
        MigrationType::Simple,
        sql,
        false,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_a_migration_and_versions_have_no_gaps() {
        for (folder, migrator) in [(&POSTGRES_FILES, &POSTGRES), (&SQLITE_FILES, &SQLITE)] {
            let versions: Vec<i64> = migrator.iter().map(|migration| migration.version).collect();
            let files = folder.entries().len();
            assert_eq!(versions, (1..=files as i64).collect::<Vec<_>>());
        }
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The rows that `sqlx::migrate!` wrote: a database that has other checksums is refused.
    #[test]
    fn databases_of_earlier_versions_have_the_same_checksums() {
        let first = SQLITE.iter().next().unwrap();
        assert_eq!(first.description, "jobs");
        assert_eq!(
            hex(&first.checksum),
            "e82f8182fb642de7cf5bd468bdeeb77606584d2708e3bc85d510ceadb96ab0ce7fdd853819310c67c890bdde2c9cc586"
        );
        let last = POSTGRES.iter().last().unwrap();
        assert_eq!(last.description, "upload bytes");
        assert_eq!(
            hex(&last.checksum),
            "123604a35d9995ff16c84d98dc9cbe99a1b21d3409d0f3a7990acdb46c7faddf90914c12612951cb960e85af22b90123"
        );
    }
}
