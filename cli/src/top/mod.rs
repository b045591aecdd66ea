//! `aitk top`: machines and jobs, live, until q.

mod keys;
mod screen;
mod state;

use crate::api::Api;
use crate::args::TopArgs;
use crate::context::Context;
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use aitk_common::id::JobId;
use aitk_proto::v1;
use ratatui::DefaultTerminal;
use state::{Key, Snapshot, State};
use std::io::IsTerminal;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

/// The shortest polling interval, to limit the load on the coordinator.
const MIN_INTERVAL: Duration = Duration::from_millis(200);

/// Restores the terminal when dropped.
struct Screen(DefaultTerminal);

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// Shows the screen until the user leaves it.
///
/// # Errors
/// When there is no terminal, the coordinator is unreachable at the start, or the terminal fails.
pub async fn run(context: &Context, args: &TopArgs) -> CommandResult {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        return Err(Failure::usage("aitk top needs a terminal")
            .hint("`aitk ps --watch` and `aitk workers` print the same anywhere"));
    }
    let api = context.api().await?;
    // Fetch once before switching the screen, so that errors are printed as in other commands.
    let mut state = State::new(api.server(), context.ui(true).color());
    state.update(fetch_snapshot(&api, None).await?);

    let failed = |error: std::io::Error| Failure::failed(format!("the terminal cannot be used: {error}"));
    // SIGTERM would end the program with the terminal as it is.
    let mut terminate = signal(SignalKind::terminate())
        .map_err(|error| Failure::failed(format!("cannot listen for SIGTERM: {error}")))?;
    let mut screen = Screen(ratatui::try_init().map_err(failed)?);
    let (key_sender, mut keys) = mpsc::channel(16);
    keys::read(key_sender);
    let (selection_sender, selection) = mpsc::channel(1);
    let (snapshot_sender, mut snapshots) = mpsc::channel(1);
    let polling = tokio::spawn(poll_coordinator(
        api,
        args.interval.max(MIN_INTERVAL),
        selection,
        snapshot_sender,
    ));
    let _ = selection_sender.try_send(state.selected_id());
    let exit = loop {
        screen
            .0
            .draw(|frame| screen::render(frame, &state, jiff::Timestamp::now()))
            .map_err(failed)?;
        tokio::select! {
            key = keys.recv() => match key {
                Some(Key::Quit) | None => break Exit::Ok,
                Some(key) => {
                    state.handle_key(key);
                    // Refreshes the panel at once. If the channel is full, a request is pending already.
                    let _ = selection_sender.try_send(state.selected_id());
                }
            },
            snapshot = snapshots.recv() => match snapshot {
                Some(Ok(snapshot)) => {
                    state.update(snapshot);
                    let _ = selection_sender.try_send(state.selected_id());
                }
                Some(Err(failure)) => state.set_problem(&failure.message),
                None => break Exit::Ok,
            },
            _ = terminate.recv() => break Exit::Terminated,
        }
    };
    polling.abort();
    Ok(exit)
}

/// Fetches a snapshot whenever the interval has passed or the selection has changed.
async fn poll_coordinator(
    api: Api,
    interval: Duration,
    mut selection: mpsc::Receiver<Option<JobId>>,
    snapshot_sender: mpsc::Sender<Result<Snapshot, Failure>>,
) {
    let mut selected = None;
    loop {
        let before = selected.clone();
        let due = tokio::time::sleep(interval);
        tokio::pin!(due);
        loop {
            tokio::select! {
                () = &mut due => break,
                new = selection.recv() => match new {
                    Some(new) => {
                        selected = new;
                        if selected != before {
                            break;
                        }
                    }
                    None => return,
                },
            }
        }
        if snapshot_sender
            .send(fetch_snapshot(&api, selected.as_ref()).await)
            .await
            .is_err()
        {
            return;
        }
    }
}

/// The largest number of jobs that are fetched, more than a screen has lines.
const MAX_ROWS: usize = 500;

/// Fetches everything that the screen shows, and why the selected job waits.
async fn fetch_snapshot(api: &Api, selected: Option<&JobId>) -> Result<Snapshot, Failure> {
    let (jobs, workers) = tokio::try_join!(api.list_jobs(v1::ListJobsRequest::default(), MAX_ROWS), api.workers())?;
    let jobs = jobs.0;
    let is_waiting = |id: &JobId| jobs.iter().any(|job| job.id == *id && state::is_waiting(job));
    let forecast = match selected {
        // An error is ignored: the job may have been removed or started since.
        Some(id) if is_waiting(id) => api.explain(id).await.ok().map(|forecast| (id.clone(), forecast)),
        _ => None,
    };
    Ok(Snapshot {
        jobs,
        workers,
        forecast,
    })
}
