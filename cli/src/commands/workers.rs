//! `workers`, `worker drain`, `worker undrain`, `worker forget`.

use crate::args::{DrainArgs, ForgetArgs, UndrainArgs, WorkerState, WorkersArgs};
use crate::context::Context;
use crate::download::matches_pattern;
use crate::exit::Exit;
use crate::failure::CommandResult;
use crate::output::format::printable;
use crate::output::{Format, Ui};
use crate::views::{confinement_line, device_states, worker_json, workers_table};
use aitk_common::control_plane::WorkerView;
use serde_json::{Value, json};

pub(super) async fn workers(context: &Context, args: WorkersArgs) -> CommandResult {
    let ui = context.ui(true);
    let all = context.api().await?.workers().await?;
    let none = all.is_empty();
    let workers: Vec<WorkerView> = all
        .into_iter()
        .filter_map(|worker| filter_worker(worker, &args))
        .collect();
    match Format::from_flags(args.json, args.quiet) {
        Format::Json => ui.json(&json!({ "workers": workers.iter().map(worker_json).collect::<Vec<Value>>() }))?,
        Format::Quiet => ui.data_lines(workers.iter().map(|worker| worker.id.as_str()))?,
        Format::Human => {
            ui.table(&workers_table(&workers, jiff::Timestamp::now()))?;
            for line in workers.iter().filter_map(confinement_line) {
                ui.text(&printable(&line))?;
            }
            if none {
                ui.notice("no workers; start one on each machine: aitk-worker --server URL --token-file FILE");
            } else if workers.is_empty() {
                ui.notice("no worker matches; `aitk workers` lists all workers");
            }
        }
    }
    Ok(Exit::Ok)
}

/// Returns the worker with the devices that match the filters; `None` if there are none.
fn filter_worker(mut worker: WorkerView, args: &WorkersArgs) -> Option<WorkerView> {
    let named = |pattern: &String| {
        matches_pattern(&worker.name, pattern)
            || worker.id.as_str().starts_with(pattern.as_str()) && !pattern.is_empty()
    };
    let labelled = |pattern: &String| match pattern.split_once('=') {
        Some((name, value)) => worker.labels.get(name).is_some_and(|has| has == value),
        None => worker.labels.contains_key(pattern),
    };
    if !(args.names.is_empty() || args.names.iter().any(named)) || !args.labels.iter().all(labelled) {
        return None;
    }
    if args.states.is_empty() {
        return Some(worker);
    }
    let pattern = |states: Vec<WorkerState>| states.iter().any(|state| args.states.contains(state));
    if worker.devices.is_empty() {
        return pattern(device_states(&worker, None)).then_some(worker);
    }
    let mut devices = std::mem::take(&mut worker.devices);
    devices.retain(|slot| pattern(device_states(&worker, Some(slot))));
    worker.devices = devices;
    (!worker.devices.is_empty()).then_some(worker)
}

pub(super) async fn drain(context: &Context, args: DrainArgs) -> CommandResult {
    let ui = context.ui(true);
    let worker = context.api().await?.drain_worker(&args.worker, true, args.now).await?;
    let running: usize = worker.devices.iter().map(|slot| slot.jobs.len()).sum();
    let rest = match (running, args.now) {
        (0, _) => "no job is running there".to_owned(),
        (running, true) => format!("{running} running there will save and move to other workers"),
        (running, false) => format!("{running} running there will run to their end; --now moves them to other workers"),
    };
    print_worker(
        &ui,
        &worker,
        args.json,
        &format!("is drained and gets no new work; {rest}"),
    )
}

pub(super) async fn undrain(context: &Context, args: UndrainArgs) -> CommandResult {
    let ui = context.ui(true);
    let worker = context.api().await?.drain_worker(&args.worker, false, false).await?;
    print_worker(&ui, &worker, args.json, "gets work again")
}

pub(super) async fn forget(context: &Context, args: ForgetArgs) -> CommandResult {
    let ui = context.ui(true);
    let api = context.api().await?;
    let mut workers = api.workers().await?.into_iter();
    let known = workers.find(|worker| worker.id.as_str() == args.worker || worker.name == args.worker);
    let worker = api.forget_worker(&args.worker, known).await?;
    print_worker(&ui, &worker, args.json, "is removed from the list")
}

fn print_worker(ui: &Ui, worker: &WorkerView, json: bool, says: &str) -> CommandResult {
    if json {
        ui.json(&worker_json(worker))?;
    } else {
        ui.data(worker.id.as_str())?;
        ui.notice(&printable(&format!("{} {says}", worker.name)));
    }
    Ok(Exit::Ok)
}
