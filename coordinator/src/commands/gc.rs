//! `gc`: collects garbage in the object storage now.

use super::console::print_line;
use super::remote::{RemoteArgs, call_error};
use aitk_proto::v1::CollectGarbageRequest;
use clap::Args;

/// Arguments of `gc`.
#[derive(Debug, Args)]
pub(crate) struct GcArgs {
    /// Only count what would be removed.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    remote: RemoteArgs,
}

pub(super) async fn gc(args: GcArgs) -> anyhow::Result<()> {
    let mut clients = args.remote.connect().await?;
    let request = CollectGarbageRequest { dry_run: args.dry_run };
    let done = clients
        .admin
        .collect_garbage(request)
        .await
        .map_err(|status| call_error(&status))?
        .into_inner();
    let gib = done.removed_bytes as f64 / f64::from(1 << 30);
    let verb = if args.dry_run { "would be removed" } else { "removed" };
    print_line(&format!(
        "{} of {} blobs {verb} ({gib:.2} GiB); {} are needed, {} are too new to be removed",
        done.removed,
        done.blobs,
        done.needed,
        done.blobs.saturating_sub(done.needed).saturating_sub(done.removed),
    ))?;
    if done.jobs_forgotten > 0 {
        print_line(&format!(
            "{} ended jobs were removed from the database",
            done.jobs_forgotten
        ))?;
    }
    Ok(())
}
