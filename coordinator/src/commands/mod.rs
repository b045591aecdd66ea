//! The subcommands of the program.

mod audit;
mod backup;
mod console;
mod gc;
mod init;
mod remote;
pub(crate) mod serve;
mod token;
mod worker;

use clap::Subcommand;

/// All subcommands; without one, the program serves.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Create a certificate authority, for a coordinator that other machines use
    Init(init::InitArgs),
    /// Let machines join as workers, list and revoke their certificates
    #[command(subcommand)]
    Worker(worker::WorkerCommand),
    /// Create, list and revoke tokens of users and workers
    #[command(subcommand)]
    Token(token::TokenCommand),
    /// Show who did what
    Audit(audit::AuditArgs),
    /// Let a running coordinator delete blobs that no job needs from its object storage
    Gc(gc::GcArgs),
    /// Write jobs, logs and workers to a file; the coordinator may run meanwhile
    Backup(backup::CopyArgs),
    /// Restore such a file into an empty database; SQLite and PostgreSQL can be exchanged
    Restore(backup::CopyArgs),
}

impl Command {
    /// Runs the subcommand.
    pub(crate) async fn run(self) -> anyhow::Result<()> {
        match self {
            Self::Init(args) => init::run(&args),
            Self::Worker(command) => worker::worker(command).await,
            Self::Token(command) => token::token(command).await,
            Self::Audit(args) => audit::audit(args).await,
            Self::Gc(args) => gc::gc(args).await,
            Self::Backup(args) => Box::pin(backup::backup(args)).await,
            Self::Restore(args) => Box::pin(backup::restore(args)).await,
        }
    }
}
