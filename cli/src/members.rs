//! Follows the members of an array: their states and progress, and their logs.

use crate::api::Api;
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::follow::{JobFollower, LogFilter, LogTarget, PastEvents, print_detached};
use crate::log_formatter::LogFormatter;
use crate::output::format::printable;
use crate::output::progress::JobProgress;
use crate::output::{Format, ProgressIndicator, Ui};
use crate::reconnection::may_reconnect;
use crate::views::{event_json, job_detail, job_exit, job_json};
use aitk_common::control_plane::{EventBody, JobEvent, JobState, JobView};
use aitk_common::id::JobId;
use futures::{Stream, StreamExt, stream};
use std::collections::BTreeMap;
use std::pin::pin;
use std::time::{Duration, Instant};

/// How often an array is polled.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How often an array of more than [`LARGE_ARRAY`] members is polled.
const POLL_INTERVAL_LARGE: Duration = Duration::from_secs(5);
const LARGE_ARRAY: u32 = 100;
/// The largest number of running members whose progress is shown.
const MAX_LIVE_LINES: usize = 8;
/// The largest number of members whose logs are followed at the same time. Most clusters run fewer at once; the next
/// members are followed when these have ended.
const MAX_FOLLOWED: usize = 64;

/// Whether this is an array, not a job or a member.
#[must_use]
pub fn is_array(job: &JobView) -> bool {
    job.array.as_ref().is_some_and(|array| array.index.is_none())
}

/// Returns the index of a member as text for messages (`3`), or its id if it has none.
fn member_label(member: &JobView) -> String {
    let index = member.array.as_ref().and_then(|array| array.index);
    index.map_or_else(|| member.id.to_string(), |index| index.to_string())
}

/// Returns a line with a member's progress: `[3] 120/400  loss 0.1234  2.31 it/s  ETA 2m  box cuda:0, training`.
fn progress_line(member: &JobView) -> String {
    let mut progress = JobProgress {
        loss: member.loss,
        ..JobProgress::default()
    };
    let mut text = format!("[{}]", member_label(member));
    if let Some(current) = &member.progress {
        progress.steps(current.done, current.total, current.seconds_per_step);
        text.push_str(&format!(" {}/{}  {}", current.done, current.total, progress.numbers()));
    }
    printable(&format!("{}  {}", text.trim_end(), job_detail(member)))
}

/// The last known states and steps of an array's members. [`Self::changes`] and [`Self::updated`] both record the states, so only one of
/// them is called for an object.
#[derive(Default)]
struct MemberStates {
    status: BTreeMap<JobId, &'static str>,
    done: BTreeMap<JobId, u64>,
}

impl MemberStates {
    /// Returns a line for each member whose state has changed since the last call; none at the first call.
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
                lines.push(printable(&format!("[{}] {status}{detail}", member_label(member))));
            }
        }
        lines
    }

    /// Returns the members whose state or number of steps has changed since the last call.
    fn updated<'a>(&mut self, members: &'a [JobView]) -> Vec<&'a JobView> {
        let changed = |member: &&JobView| {
            let (status, done) = (member.status(), member.progress.map_or(0, |progress| progress.done));
            let same_status = self.status.insert(member.id.clone(), status) == Some(status);
            self.done.insert(member.id.clone(), done) != Some(done) || !same_status
        };
        members.iter().filter(changed).collect()
    }
}

/// Shows the states of an array's members and the progress of the running ones, until all have ended. Ctrl-C detaches.
///
/// # Errors
/// When the coordinator refuses the call, or was unreachable for five minutes.
pub async fn watch_array(api: &Api, ui: &Ui, mut array: JobView, format: Format, to: LogTarget) -> CommandResult {
    let mut states = MemberStates::default();
    let mut last_summary = None;
    let mut live = (format != Format::Json).then(|| ui.live_lines());
    let mut unreachable_since: Option<Instant> = None;
    // One future for the whole loop: a new one would miss signals that arrived before it was created.
    let mut interrupted = pin!(tokio::signal::ctrl_c());
    loop {
        // The members after the array: when it has ended, the last states of all of them are shown.
        let fetch = async {
            let current = api.get(array.id.as_str()).await?;
            let members = api.members(&array.id).await?;
            Ok::<_, Failure>((current, members))
        };
        // Ctrl-C does not wait for a coordinator that does not answer.
        let result = tokio::select! {
            result = fetch => result,
            _ = &mut interrupted => {
                drop(live);
                print_detached(ui, &array);
                return Ok(Exit::Interrupted);
            }
        };
        match result {
            Ok((current, members)) => {
                (array, unreachable_since) = (current, None);
                show_members(ui, &array, &members, &mut states, &mut last_summary, live.as_mut(), to)?;
            }
            Err(failure) if failure.exit == Exit::Unreachable && may_reconnect(unreachable_since) => {
                if unreachable_since.is_none() {
                    ui.warn(&format!("{failure}; reconnecting; the jobs continue"));
                }
                unreachable_since.get_or_insert_with(Instant::now);
            }
            Err(failure) => return Err(failure),
        }
        if array.state.is_ended() {
            return Ok(job_exit(&array));
        }
        let size = array.array.as_ref().map_or(0, |array| array.size);
        let pause = if size > LARGE_ARRAY {
            POLL_INTERVAL_LARGE
        } else {
            POLL_INTERVAL
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = &mut interrupted => {
                drop(live);
                print_detached(ui, &array);
                return Ok(Exit::Interrupted);
            }
        }
    }
}

fn show_members(
    ui: &Ui,
    array: &JobView,
    members: &[JobView],
    states: &mut MemberStates,
    last_summary: &mut Option<String>,
    live: Option<&mut ProgressIndicator<'_>>,
    to: LogTarget,
) -> Result<(), Failure> {
    let counts = array.array.as_ref().map(|array| array.counts.summary());
    let Some(live) = live else {
        if *last_summary != counts {
            ui.json_line(&job_json(array))?;
            *last_summary = counts;
        }
        return states
            .updated(members)
            .into_iter()
            .try_for_each(|member| ui.json_line(&job_json(member)));
    };
    let summary = printable(&format!("{}: {}", array.name, array.reason));
    let mut lines = states.changes(members);
    // On a terminal the summary is part of the live lines.
    if last_summary.as_ref() != Some(&summary) && (!ui.has_bars() || array.state.is_ended()) {
        lines.push(summary.clone());
    }
    *last_summary = Some(summary.clone());
    for line in lines {
        match to {
            LogTarget::Stdout => ui.text(&line)?,
            LogTarget::Stderr => ui.notice(&line),
        }
    }
    let runs = |member: &&JobView| matches!(member.state, JobState::Running | JobState::Stopping);
    let running: Vec<&JobView> = members.iter().filter(runs).collect();
    let mut current: Vec<String> = running
        .iter()
        .take(MAX_LIVE_LINES)
        .map(|member| progress_line(member))
        .collect();
    if running.len() > MAX_LIVE_LINES {
        current.push(format!("… {} more running", running.len() - MAX_LIVE_LINES));
    }
    if ui.has_bars() {
        current.insert(0, summary);
    }
    if !current.is_empty() {
        live.show_lines(&current);
    }
    Ok(())
}

/// Options for showing the members' logs.
pub struct LogOptions<'a> {
    /// The terminal.
    pub ui: &'a Ui,
    /// Print JSON lines, only of what the jobs themselves logged.
    pub json: bool,
    /// Only lines since this time.
    pub since: Option<String>,
    /// Only the last lines of each member.
    pub tail: Option<usize>,
    /// Follow until all members have ended.
    pub follow: bool,
}

impl LogOptions<'_> {
    fn log_formatter(&self) -> LogFormatter {
        // No folding, because each line gets its member's index as a prefix.
        LogFormatter::new(
            None,
            self.ui.color(),
            jiff::tz::TimeZone::system(),
            jiff::Timestamp::now(),
        )
    }

    fn accepts(&self, log_formatter: &mut LogFormatter, event: &JobEvent) -> bool {
        match &event.body {
            EventBody::Log { .. } => true,
            _ => !self.json && log_formatter.accepts(event),
        }
    }

    /// Shows the events of a member until now, except those that `filter` still holds. Sets `cursor` to that of the last one.
    async fn show_past(
        &self,
        api: &Api,
        member: &JobView,
        log_formatter: &mut LogFormatter,
        cursor: &mut u64,
        filter: &mut LogFilter,
    ) -> Result<(), Failure> {
        let mut past_events = PastEvents::open(api, &member.id).await?;
        while let Some(event) = past_events.next().await? {
            *cursor = past_events.cursor();
            if self.accepts(log_formatter, &event)
                && let Some(event) = filter.take(event)
            {
                self.show(member, log_formatter, &event)?;
            }
        }
        Ok(())
    }

    fn show(&self, member: &JobView, log_formatter: &mut LogFormatter, event: &JobEvent) -> Result<(), Failure> {
        if self.json {
            return self.ui.json_line(&event_json(member.id.as_str(), event));
        }
        let label = member_label(member);
        self.ui.data_lines(
            log_formatter
                .lines(event)
                .into_iter()
                .map(|line| format!("[{label}] {line}")),
        )
    }
}

/// Shows the logs of all members, one after another; with `follow` then new lines as they arrive.
///
/// # Errors
/// When the coordinator refuses a call or was unreachable for five minutes, or the output cannot be written.
pub async fn logs(api: &Api, array: &JobView, options: &LogOptions<'_>) -> CommandResult {
    let members = api.members(&array.id).await?;
    let mut formatters: BTreeMap<JobId, LogFormatter> = BTreeMap::new();
    let mut cursors: BTreeMap<JobId, u64> = BTreeMap::new();
    for member in &members {
        let mut filter = LogFilter::new(options.since.as_deref(), options.tail)?;
        let log_formatter = formatters
            .entry(member.id.clone())
            .or_insert_with(|| options.log_formatter());
        let cursor = cursors.entry(member.id.clone()).or_default();
        match options.show_past(api, member, log_formatter, cursor, &mut filter).await {
            Err(failure) if is_removed(&failure) => {}
            shown => shown?,
        }
        for event in filter.drain().collect::<Vec<_>>() {
            options.show(member, log_formatter, &event)?;
        }
    }
    if !options.follow {
        return Ok(Exit::Ok);
    }
    let open = members.iter().filter(|member| !member.state.is_ended());
    let events = stream::iter(open.map(|member| {
        let cursor = cursors.get(&member.id).copied().unwrap_or(0);
        Box::pin(events(
            JobFollower::new(api, options.ui, member.clone(), cursor),
            member,
        ))
    }));
    let mut events = Box::pin(events.flatten_unordered(MAX_FOLLOWED));
    // One future for the whole loop: a new one would miss signals that arrived before it was created.
    let mut interrupted = pin!(tokio::signal::ctrl_c());
    loop {
        let next = tokio::select! {
            next = events.next() => next,
            _ = &mut interrupted => {
                print_detached(options.ui, array);
                return Ok(Exit::Interrupted);
            }
        };
        let Some(next) = next else { break };
        let (member, event) = next?;
        if let Some(log_formatter) = formatters.get_mut(&member.id)
            && options.accepts(log_formatter, &event)
        {
            options.show(member, log_formatter, &event)?;
        }
    }
    Ok(job_exit(&api.get(array.id.as_str()).await?))
}

/// Whether a member was removed since the members were listed. That ends its log; those of the other members go on.
fn is_removed(failure: &Failure) -> bool {
    failure.exit == Exit::NotFound
}

/// Returns the events of one member until it ends or is removed.
fn events<'a>(
    follower: JobFollower<'a>,
    member: &'a JobView,
) -> impl Stream<Item = Result<(&'a JobView, JobEvent), Failure>> + 'a {
    stream::unfold(Some(follower), move |follower| async move {
        let mut follower = follower?;
        match follower.next().await {
            Ok(Some(event)) => Some((Ok((member, event)), Some(follower))),
            Ok(None) => None,
            Err(failure) if is_removed(&failure) => None,
            Err(failure) => Some((Err(failure), None)),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::tests::job;
    use aitk_common::control_plane::{ArrayCounts, ArrayView, Progress};

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
    fn changed_states_of_members_are_reported_once() {
        let mut states = MemberStates::default();
        let mut members = [member(0, JobState::Running), member(1, JobState::Queued)];
        assert!(states.changes(&members).is_empty(), "the first poll");
        members[0].progress = Some(Progress {
            done: 120,
            total: 400,
            seconds_per_step: Some(0.5),
        });
        members[0].loss = Some(0.25);
        members[0].phase = Some("training".to_owned());
        let line = progress_line(&members[0]);
        assert!(
            line.starts_with("[0] 120/400  loss 0.2500") && line.contains("ETA 2m 20s"),
            "{line}"
        );
        assert!(line.ends_with("training"), "{line}");
        members[1].state = JobState::Failed;
        members[1].reason = "no disk".to_owned();
        assert_eq!(states.changes(&members), ["[1] failed: no disk"]);
        assert!(states.changes(&members).is_empty());
    }

    #[test]
    fn members_with_new_steps_are_reported() {
        let mut states = MemberStates::default();
        let mut members = [member(0, JobState::Running), member(1, JobState::Queued)];
        assert_eq!(states.updated(&members).len(), 2);
        assert_eq!(states.updated(&members).len(), 0);
        members[0].progress = Some(Progress {
            done: 1,
            total: 4,
            seconds_per_step: None,
        });
        let updated = states.updated(&members);
        assert_eq!((updated.len(), updated[0].id.as_str()), (1, "a-0"));
    }
}
