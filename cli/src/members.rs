//! Arrays as one follows them: how many members stand where, and the members' logs side by side.

use crate::api::Api;
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::follow::{Follow, LogFilter, LogsTo, PATIENCE, detached};
use crate::journal::Journal;
use crate::output::format::printable;
use crate::output::progress::JobProgress;
use crate::output::{Format, Ui, Wait};
use crate::views::{event_json, job_detail, job_exit, job_json};
use aitk_common::control::{EventBody, JobEvent, JobState, JobView};
use aitk_common::id::JobId;
use futures::{Stream, StreamExt, stream};
use std::collections::BTreeMap;
use std::pin::pin;
use std::time::Duration;

/// How often an array is looked at, and one of many members.
const LOOK: Duration = Duration::from_secs(1);
const LOOK_AT_MANY: Duration = Duration::from_secs(5);
const MANY: u32 = 100;
/// Running members that are shown with how far they are.
const LIVE_MOST: usize = 8;
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

/// What a member does now: `[3] 120/400  loss 0.1234  2.31 it/s  ETA 2m  box cuda:0, training`.
fn line_of(member: &JobView) -> String {
    let mut progress = JobProgress {
        loss: member.loss,
        ..JobProgress::default()
    };
    let mut text = format!("[{}]", number(member));
    if let Some(now) = &member.progress {
        progress.steps(now.done, now.total, now.seconds_per_step);
        text.push_str(&format!(" {}/{}  {}", now.done, now.total, progress.numbers()));
    }
    printable(&format!("{}  {}", text.trim_end(), job_detail(member)))
}

/// What is known of the members of an array that is watched.
#[derive(Default)]
struct Seen {
    status: BTreeMap<JobId, &'static str>,
    done: BTreeMap<JobId, u64>,
}

impl Seen {
    /// Lines about those whose state has changed. The first look is no change.
    fn changes(&mut self, members: &[JobView]) -> Vec<String> {
        let first = self.status.is_empty();
        let mut lines = Vec::new();
        for member in members {
            let status = member.status();
            if self.status.insert(member.id.clone(), status) != Some(status) && !first {
                let detail = job_detail(member);
                let detail = if detail.is_empty() {
                    detail
                } else {
                    format!(": {detail}")
                };
                lines.push(printable(&format!("[{}] {status}{detail}", number(member))));
            }
        }
        lines
    }

    /// Those that have gone on or changed, for a program.
    fn moved<'a>(&mut self, members: &'a [JobView]) -> Vec<&'a JobView> {
        let moved = |member: &&JobView| {
            let (status, done) = (member.status(), member.progress.map_or(0, |progress| progress.done));
            let same_status = self.status.insert(member.id.clone(), status) == Some(status);
            self.done.insert(member.id.clone(), done) != Some(done) || !same_status
        };
        members.iter().filter(moved).collect()
    }
}

/// Shows how the members of an array stand and how far those are that run, until all have ended. Ctrl-C detaches.
///
/// # Errors
/// When the coordinator refuses, or was not reachable for five minutes.
pub async fn watch_array(api: &Api, ui: &Ui, mut array: JobView, format: Format, to: LogsTo) -> CommandResult {
    let mut seen = Seen::default();
    let mut said = None;
    let mut live = (format != Format::Json).then(|| ui.live());
    let mut away = Duration::ZERO;
    // One for all turns: each new one hears of later signals only.
    let mut interrupted = pin!(tokio::signal::ctrl_c());
    loop {
        let looked = match api.members(&array.id).await {
            Ok(members) => api.get(array.id.as_str()).await.map(|array| (array, members)),
            Err(failure) => Err(failure),
        };
        match looked {
            Ok((now, members)) => {
                (array, away) = (now, Duration::ZERO);
                show_members(ui, &array, &members, &mut seen, &mut said, live.as_mut(), to)?;
            }
            Err(failure) if failure.exit == Exit::Unreachable && away < PATIENCE => {
                if away.is_zero() {
                    ui.warn(&format!("{failure}; trying again, the jobs go on"));
                }
                away += LOOK;
            }
            Err(failure) => return Err(failure),
        }
        if array.state.is_ended() {
            return Ok(job_exit(&array));
        }
        let size = array.array.as_ref().map_or(0, |array| array.size);
        let pause = if size > MANY { LOOK_AT_MANY } else { LOOK };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = &mut interrupted => {
                drop(live);
                detached(ui, &array);
                return Ok(Exit::Interrupted);
            }
        }
    }
}

fn show_members(
    ui: &Ui,
    array: &JobView,
    members: &[JobView],
    seen: &mut Seen,
    said: &mut Option<String>,
    live: Option<&mut Wait<'_>>,
    to: LogsTo,
) -> Result<(), Failure> {
    let counts = array.array.as_ref().map(|array| array.counts.summary());
    let Some(live) = live else {
        if *said != counts {
            ui.json_line(&job_json(array))?;
            *said = counts;
        }
        return seen
            .moved(members)
            .into_iter()
            .try_for_each(|member| ui.json_line(&job_json(member)));
    };
    let whole = printable(&format!("{}: {}", array.name, array.reason));
    let mut lines = seen.changes(members);
    // On a terminal it stands in the lines that change.
    if said.as_ref() != Some(&whole) && (!ui.has_bars() || array.state.is_ended()) {
        lines.push(whole.clone());
    }
    *said = Some(whole.clone());
    for line in lines {
        match to {
            LogsTo::Stdout => ui.text(&line)?,
            LogsTo::Stderr => ui.notice(&line),
        }
    }
    let runs = |member: &&JobView| matches!(member.state, JobState::Running | JobState::Stopping);
    let running: Vec<&JobView> = members.iter().filter(runs).collect();
    let mut now: Vec<String> = running.iter().take(LIVE_MOST).map(|member| line_of(member)).collect();
    if running.len() > LIVE_MOST {
        now.push(format!("… {} more run", running.len() - LIVE_MOST));
    }
    if ui.has_bars() {
        now.insert(0, whole);
    }
    if !now.is_empty() {
        live.show_lines(&now);
    }
    Ok(())
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
    // One for all turns: each new one hears of later signals only.
    let mut interrupted = pin!(tokio::signal::ctrl_c());
    loop {
        let next = tokio::select! {
            next = events.next() => next,
            _ = &mut interrupted => {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::tests::job;
    use aitk_common::control::{ArrayCounts, ArrayView, Progress};

    fn member(index: u32, state: JobState) -> JobView {
        let mut member = job(&format!("a-{index}"), "a", state, 0);
        member.array = Some(ArrayView {
            id: JobId::new("a"),
            index: Some(index),
            size: 2,
            at_most: None,
            split: false,
            counts: ArrayCounts::default(),
        });
        member
    }

    #[test]
    fn members_are_seen_while_they_move() {
        let mut seen = Seen::default();
        let mut members = [member(0, JobState::Running), member(1, JobState::Queued)];
        assert!(seen.changes(&members).is_empty(), "the first look");
        members[0].progress = Some(Progress {
            done: 120,
            total: 400,
            seconds_per_step: Some(0.5),
        });
        members[0].loss = Some(0.25);
        members[0].phase = Some("training".to_owned());
        let line = line_of(&members[0]);
        assert!(
            line.starts_with("[0] 120/400  loss 0.2500") && line.contains("ETA 2m 20s"),
            "{line}"
        );
        assert!(line.ends_with("training"), "{line}");
        members[1].state = JobState::Failed;
        members[1].reason = "no disk".to_owned();
        assert_eq!(seen.changes(&members), ["[1] failed: no disk"]);
        assert!(seen.changes(&members).is_empty());
    }

    #[test]
    fn a_program_gets_a_line_for_every_step() {
        let mut seen = Seen::default();
        let mut members = [member(0, JobState::Running), member(1, JobState::Queued)];
        assert_eq!(seen.moved(&members).len(), 2);
        assert_eq!(seen.moved(&members).len(), 0);
        members[0].progress = Some(Progress {
            done: 1,
            total: 4,
            seconds_per_step: None,
        });
        let moved = seen.moved(&members);
        assert_eq!((moved.len(), moved[0].id.as_str()), (1, "a-0"));
    }
}
