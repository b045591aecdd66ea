//! Arrays as one follows them: how many members stand where, and the members' logs side by side.

use crate::api::Api;
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::follow::{Follow, LogFilter, LogsTo, PATIENCE, detached};
use crate::journal::Journal;
use crate::output::format::printable;
use crate::output::{Format, Ui};
use crate::views::{event_json, job_exit, job_json};
use aitk_common::control::{EventBody, JobEvent, JobView};
use aitk_common::id::JobId;
use futures::{Stream, StreamExt, stream};
use std::collections::BTreeMap;
use std::time::Duration;

/// How often an array is looked at.
const LOOK: Duration = Duration::from_secs(1);
/// Members whose logs are followed at the same time: more than run beside each other in most pools, and few enough
/// streams. The next ones follow when these have ended.
const FOLLOWED: usize = 64;

/// Whether this is an array and no job.
#[must_use]
pub fn is_array(job: &JobView) -> bool {
    job.array.as_ref().is_some_and(|array| array.index.is_none())
}

/// `3`, for messages about a member.
fn number(member: &JobView) -> String {
    let index = member.array.as_ref().and_then(|array| array.index);
    index.map_or_else(|| member.id.to_string(), |index| index.to_string())
}

/// Says how the members of an array stand whenever that changes, until all have ended. Ctrl-C detaches.
///
/// # Errors
/// When the coordinator refuses, or was not reachable for five minutes.
pub async fn watch_array(api: &Api, ui: &Ui, mut array: JobView, format: Format, to: LogsTo) -> CommandResult {
    let mut said = String::new();
    let mut away = Duration::ZERO;
    loop {
        let counts = array
            .array
            .as_ref()
            .map(|array| array.counts.words())
            .unwrap_or_default();
        let told = match format {
            Format::Json => counts.clone(),
            _ => format!("{}: {}", array.name, array.reason),
        };
        if told != said {
            match (format, to) {
                (Format::Json, _) => ui.json_line(&job_json(&array))?,
                (_, LogsTo::Stdout) => ui.data(&printable(&told))?,
                (_, LogsTo::Stderr) => ui.notice(&printable(&told)),
            }
            said = told;
        }
        if array.state.is_ended() {
            return Ok(job_exit(&array));
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            _ = tokio::signal::ctrl_c() => {
                detached(ui, &array);
                return Ok(Exit::Interrupted);
            }
        }
        match api.get(array.id.as_str()).await {
            Ok(seen) => (array, away) = (seen, Duration::ZERO),
            Err(failure) if failure.exit == Exit::Unreachable && away < PATIENCE => {
                if away.is_zero() {
                    ui.warn(&format!("{failure}; trying again, the jobs go on"));
                }
                away += LOOK;
            }
            Err(failure) => return Err(failure),
        }
    }
}

/// What is shown of the members' logs.
pub struct Lines<'a> {
    /// The terminal.
    pub ui: &'a Ui,
    /// JSON lines of what the jobs themselves wrote.
    pub json: bool,
    /// Only lines since then.
    pub since: Option<String>,
    /// Only the last of each member.
    pub tail: Option<usize>,
    /// Until all have ended.
    pub follow: bool,
}

impl Lines<'_> {
    fn journal(&self) -> Journal {
        // Not folded: every line has the number of its member before it.
        Journal::new(
            None,
            self.ui.color(),
            jiff::tz::TimeZone::system(),
            jiff::Timestamp::now(),
        )
    }

    fn wants(&self, journal: &mut Journal, event: &JobEvent) -> bool {
        match &event.body {
            EventBody::Log { .. } => true,
            _ => !self.json && journal.wants(event),
        }
    }

    fn show(&self, member: &JobView, journal: &mut Journal, event: &JobEvent) -> Result<(), Failure> {
        if self.json {
            return self.ui.json_line(&event_json(member.id.as_str(), event));
        }
        let number = number(member);
        self.ui.data_lines(
            journal
                .lines(event)
                .into_iter()
                .map(|line| format!("[{number}] {line}")),
        )
    }
}

/// The logs of all members, one after another; then, to be followed, as they come.
///
/// # Errors
/// When the coordinator refuses, was not reachable for five minutes, or the output cannot be written.
pub async fn logs(api: &Api, array: &JobView, lines: &Lines<'_>) -> CommandResult {
    let members = api.members(&array.id).await?;
    let mut journals: BTreeMap<JobId, Journal> = BTreeMap::new();
    let mut cursors: BTreeMap<JobId, u64> = BTreeMap::new();
    for member in &members {
        let mut filter = LogFilter::new(lines.since.as_deref(), lines.tail)?;
        let journal = journals.entry(member.id.clone()).or_insert_with(|| lines.journal());
        let cursor = cursors.entry(member.id.clone()).or_default();
        let mut there = Box::pin(api.events(&member.id, 0, false).await?);
        while let Some(event) = there.next().await.transpose()? {
            *cursor = event.cursor.max(*cursor);
            if lines.wants(journal, &event)
                && let Some(event) = filter.take(event)
            {
                lines.show(member, journal, &event)?;
            }
        }
        for event in filter.drain().collect::<Vec<_>>() {
            lines.show(member, journal, &event)?;
        }
    }
    if !lines.follow {
        return Ok(Exit::Ok);
    }
    let open = members.iter().filter(|member| !member.state.is_ended());
    let events = stream::iter(open.map(|member| {
        let cursor = cursors.get(&member.id).copied().unwrap_or(0);
        Box::pin(events(Follow::new(api, lines.ui, member.clone(), cursor), member))
    }));
    let mut events = Box::pin(events.flatten_unordered(FOLLOWED));
    loop {
        let next = tokio::select! {
            next = events.next() => next,
            _ = tokio::signal::ctrl_c() => {
                detached(lines.ui, array);
                return Ok(Exit::Interrupted);
            }
        };
        let Some(next) = next else { break };
        let (member, event) = next?;
        if let Some(journal) = journals.get_mut(&member.id)
            && lines.wants(journal, &event)
        {
            lines.show(member, journal, &event)?;
        }
    }
    Ok(job_exit(&api.get(array.id.as_str()).await?))
}

/// The events of one member until it ends.
fn events<'a>(
    follow: Follow<'a>,
    member: &'a JobView,
) -> impl Stream<Item = Result<(&'a JobView, JobEvent), Failure>> + 'a {
    stream::unfold(Some(follow), move |follow| async move {
        let mut follow = follow?;
        match follow.next().await {
            Ok(Some(event)) => Some((Ok((member, event)), Some(follow))),
            Ok(None) => None,
            Err(failure) => Some((Err(failure), None)),
        }
    })
}
