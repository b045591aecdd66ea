//! `workers`.

use super::Context;
use crate::args::WorkersArgs;
use crate::exit::Exit;
use crate::failure::CommandResult;
use crate::output::Format;
use crate::views::{worker_json, workers_table};
use serde_json::{Value, json};

pub(super) async fn workers(context: &Context, args: WorkersArgs) -> CommandResult {
    let ui = context.ui(true);
    let workers = context.api().await?.workers().await?;
    match Format::from_flags(args.json, args.quiet) {
        Format::Json => ui.json(&json!({ "workers": workers.iter().map(worker_json).collect::<Vec<Value>>() }))?,
        Format::Quiet => ui.data_lines(workers.iter().map(|worker| worker.id.as_str()))?,
        Format::Human => {
            ui.table(&workers_table(&workers, jiff::Timestamp::now()))?;
            if workers.is_empty() {
                ui.notice("no workers; start one on each machine: aitk-worker --server URL --token-file FILE");
            }
        }
    }
    Ok(Exit::Ok)
}
