//! `workers`, `worker drain`, `worker undrain`.

use super::Context;
use crate::args::{DrainArgs, ForgetArgs, UndrainArgs, WorkersArgs};
use crate::exit::Exit;
use crate::failure::CommandResult;
use crate::output::format::printable;
use crate::output::{Format, Ui};
use crate::views::{confinement_line, worker_json, workers_table};
use aitk_common::control::WorkerView;
use serde_json::{Value, json};

pub(super) async fn workers(context: &Context, args: WorkersArgs) -> CommandResult {
    let ui = context.ui(true);
    let workers = context.api().await?.workers().await?;
    match Format::from_flags(args.json, args.quiet) {
        Format::Json => ui.json(&json!({ "workers": workers.iter().map(worker_json).collect::<Vec<Value>>() }))?,
        Format::Quiet => ui.data_lines(workers.iter().map(|worker| worker.id.as_str()))?,
        Format::Human => {
            ui.table(&workers_table(&workers, jiff::Timestamp::now()))?;
            for line in workers.iter().filter_map(confinement_line) {
                ui.data(&printable(&line))?;
            }
            if workers.is_empty() {
                ui.notice("no workers; start one on each machine: aitk-worker --server URL --token-file FILE");
            }
        }
    }
    Ok(Exit::Ok)
}

pub(super) async fn drain(context: &Context, args: DrainArgs) -> CommandResult {
    let ui = context.ui(true);
    let worker = context.api().await?.drain_worker(&args.worker, true, args.now).await?;
    let running: usize = worker.devices.iter().map(|slot| slot.jobs.len()).sum();
    let rest = match (running, args.now) {
        (0, _) => "nothing runs there".to_owned(),
        (running, true) => format!("{running} running there save and go on elsewhere"),
        (running, false) => format!("{running} running there run to their end; --now moves them"),
    };
    changed(&ui, &worker, args.json, &format!("takes no more work; {rest}"))
}

pub(super) async fn undrain(context: &Context, args: UndrainArgs) -> CommandResult {
    let ui = context.ui(true);
    let worker = context.api().await?.drain_worker(&args.worker, false, false).await?;
    changed(&ui, &worker, args.json, "takes work again")
}

pub(super) async fn forget(context: &Context, args: ForgetArgs) -> CommandResult {
    let ui = context.ui(true);
    let worker = context.api().await?.forget_worker(&args.worker).await?;
    changed(&ui, &worker, args.json, "is forgotten")
}

fn changed(ui: &Ui, worker: &WorkerView, json: bool, says: &str) -> CommandResult {
    if json {
        ui.json(&worker_json(worker))?;
    } else {
        ui.data(worker.id.as_str())?;
        ui.notice(&printable(&format!("{} {says}", worker.name)));
    }
    Ok(Exit::Ok)
}
