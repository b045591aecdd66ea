//! `backup` and `restore`.

use super::console::{default_data_dir, print_line};
use aitk_coordinator::DatabaseUrl;
use clap::Args;
use std::path::PathBuf;

/// Store and file of a backup.
#[derive(Debug, Args)]
pub(crate) struct CopyArgs {
    /// The backup file.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Data folder of the coordinator.
    #[arg(long, env = "AITK_COORDINATOR_DATA_DIR", value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Its PostgreSQL database, if it has one.
    #[arg(long, env = "AITK_DATABASE", value_name = "URL", hide_env_values = true)]
    database: Option<String>,
}

impl CopyArgs {
    fn data_dir(&self) -> anyhow::Result<PathBuf> {
        self.data_dir.clone().map_or_else(default_data_dir, Ok)
    }

    /// Parsed here instead of by clap, whose error message would repeat the password.
    fn database(&self) -> anyhow::Result<Option<DatabaseUrl>> {
        Ok(self.database.as_deref().map(str::parse).transpose()?)
    }
}

pub(super) async fn backup(args: CopyArgs) -> anyhow::Result<()> {
    let counts = aitk_coordinator::backup(&args.data_dir()?, args.database()?.as_ref(), &args.file).await?;
    print_line(&format!(
        "{}: {} jobs, {} rows; blobs are not part of it",
        args.file.display(),
        counts.jobs,
        counts.rows
    ))
}

pub(super) async fn restore(args: CopyArgs) -> anyhow::Result<()> {
    let counts = aitk_coordinator::restore(&args.data_dir()?, args.database()?.as_ref(), &args.file).await?;
    print_line(&format!("{} jobs, {} rows restored", counts.jobs, counts.rows))?;
    print_line("jobs that were running wait for a worker again and resume from their last checkpoint in the backup")
}
