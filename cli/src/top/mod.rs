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
use state::{Key, Seen, State};
use std::io::IsTerminal;
use std::time::Duration;
use tokio::sync::mpsc;

/// However often the user wants to look, the coordinator has other work too.
const SHORTEST: Duration = Duration::from_millis(200);

/// Gives the terminal back, however the screen ends.
struct Screen(DefaultTerminal);

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// Shows the screen until the user leaves it.
///
/// # Errors
/// Without a terminal; when the coordinator cannot be reached at the beginning; when the terminal fails.
pub async fn run(context: &Context, args: &TopArgs) -> CommandResult {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        return Err(Failure::usage("aitk top needs a terminal")
            .hint("`aitk ps --watch` and `aitk workers` print the same anywhere"));
    }
    let api = context.api().await?;
    // A first look before the screen changes: what is wrong is then said as by any other command.
    let mut state = State::new(api.server(), context.ui(true).color());
    state.see(look(&api, None).await?);

    let failed = |error: std::io::Error| Failure::failed(format!("the terminal cannot be used: {error}"));
    let mut screen = Screen(ratatui::try_init().map_err(failed)?);
    let (pressed, mut keys) = mpsc::channel(16);
    keys::read(pressed);
    let (asked, wishes) = mpsc::channel(1);
    let (shown, mut looks) = mpsc::channel(1);
    let looking = tokio::spawn(keep_looking(api, args.interval.max(SHORTEST), wishes, shown));
    let _ = asked.try_send(state.chosen_id());
    loop {
        screen
            .0
            .draw(|frame| screen::draw(frame, &state, jiff::Timestamp::now()))
            .map_err(failed)?;
        tokio::select! {
            key = keys.recv() => match key {
                Some(Key::Leave) | None => break,
                Some(key) => {
                    state.press(key);
                    // The panel below follows at once; a look that is under way already does as well.
                    let _ = asked.try_send(state.chosen_id());
                }
            },
            seen = looks.recv() => match seen {
                Some(Ok(seen)) => {
                    state.see(seen);
                    let _ = asked.try_send(state.chosen_id());
                }
                Some(Err(failure)) => state.lost(&failure.message),
                None => break,
            },
        }
    }
    looking.abort();
    Ok(Exit::Ok)
}

/// Looks again whenever the interval is over or the choice changed.
async fn keep_looking(
    api: Api,
    interval: Duration,
    mut wishes: mpsc::Receiver<Option<JobId>>,
    shown: mpsc::Sender<Result<Seen, Failure>>,
) {
    let mut chosen = None;
    loop {
        let before = chosen.clone();
        let due = tokio::time::sleep(interval);
        tokio::pin!(due);
        loop {
            tokio::select! {
                () = &mut due => break,
                wish = wishes.recv() => match wish {
                    Some(wish) => {
                        chosen = wish;
                        if chosen != before {
                            break;
                        }
                    }
                    None => return,
                },
            }
        }
        if shown.send(look(&api, chosen.as_ref()).await).await.is_err() {
            return;
        }
    }
}

/// Jobs that are asked for: more than any screen has lines.
const ROWS: usize = 500;

/// Everything that the screen shows, and why the chosen job waits.
async fn look(api: &Api, chosen: Option<&JobId>) -> Result<Seen, Failure> {
    let (jobs, workers) = tokio::try_join!(api.list_jobs(v1::ListJobsRequest::default(), ROWS), api.workers())?;
    let jobs = jobs.0;
    let waits = |id: &JobId| jobs.iter().any(|job| job.id == *id && state::waits(job));
    let forecast = match chosen {
        // A job that was removed or began meanwhile is nothing to complain about.
        Some(id) if waits(id) => api.explain(id).await.ok().map(|forecast| (id.clone(), forecast)),
        _ => None,
    };
    Ok(Seen {
        jobs,
        workers,
        forecast,
    })
}
