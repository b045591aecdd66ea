//! Follows a job: reads its event stream, reconnects and continues after a broken connection, and renders the events.

use crate::api::Api;
use crate::exit::Exit;
use crate::failure::Failure;
use crate::output::ProgressIndicator;
use crate::output::format::{parse_since, printable, size};
use crate::output::progress::JobProgress;
use crate::output::{Format, Ui};
use crate::reconnection::Reconnection;
use crate::views::{device, event_json, job_exit, timestamp};
use aitk_common::control_plane::{AttemptState, EventBody, JobEvent, JobState, JobView};
use aitk_common::id::JobId;
use aitk_common::step_metrics::step_line;
use futures::{Stream, StreamExt};
use std::collections::VecDeque;
use std::pin::{Pin, pin};
use std::time::{Duration, Instant};

/// How often the reason why a job waits is fetched.
const REASON_POLL_INTERVAL: Duration = Duration::from_secs(2);
/// The shortest time between two notices about a changed reason.
const REASON_MIN_INTERVAL: Duration = Duration::from_secs(60);

type EventStream = Pin<Box<dyn Stream<Item = Result<JobEvent, Failure>> + Send>>;

/// Reads the events that a job has so far. When the stream breaks off after some of them, it is continued once they are read: the
/// coordinator ends the stream of a program that reads nothing for a minute, as one whose output a pager shows.
pub struct PastEvents<'a> {
    api: &'a Api,
    job: &'a JobId,
    /// The cursor of the last event, and that after which the stream was opened.
    cursor: u64,
    opened_at: u64,
    stream: EventStream,
}

impl<'a> PastEvents<'a> {
    /// Reads from the first event on.
    ///
    /// # Errors
    /// When the coordinator refuses the call or is unreachable.
    pub async fn open(api: &'a Api, job: &'a JobId) -> Result<Self, Failure> {
        let stream: EventStream = Box::pin(api.events(job, 0, false).await?);
        Ok(Self {
            api,
            job,
            cursor: 0,
            opened_at: 0,
            stream,
        })
    }

    /// Returns the next event; `None` after the last one.
    ///
    /// # Errors
    /// When the coordinator is unreachable, or the stream breaks off before its first event.
    pub async fn next(&mut self) -> Result<Option<JobEvent>, Failure> {
        loop {
            match self.stream.next().await.transpose() {
                Ok(event) => {
                    let cursor = event.as_ref().map_or(0, |event| event.cursor);
                    self.cursor = self.cursor.max(cursor);
                    return Ok(event);
                }
                Err(failure) if failure.exit == Exit::Unreachable && self.cursor > self.opened_at => {
                    self.stream = Box::pin(self.api.events(self.job, self.cursor, false).await?);
                    self.opened_at = self.cursor;
                }
                Err(failure) => return Err(failure),
            }
        }
    }

    /// Returns the cursor of the last event.
    #[must_use]
    pub fn cursor(&self) -> u64 {
        self.cursor
    }
}

/// Reads the events of one job until it ends, and reconnects when the connection breaks.
pub struct JobFollower<'a> {
    api: &'a Api,
    ui: &'a Ui,
    job: JobView,
    cursor: u64,
    stream: Option<EventStream>,
    reconnection: Reconnection,
    /// The warning about a stream that ended before the job was printed.
    has_warned_of_ended_stream: bool,
}

impl<'a> JobFollower<'a> {
    /// Follows this job from the event after `cursor`; 0 is the beginning.
    #[must_use]
    pub fn new(api: &'a Api, ui: &'a Ui, job: JobView, cursor: u64) -> Self {
        Self {
            api,
            ui,
            job,
            cursor,
            stream: None,
            reconnection: Reconnection::default(),
            has_warned_of_ended_stream: false,
        }
    }

    /// Returns the job as the coordinator last reported it.
    #[must_use]
    pub fn job(&self) -> &JobView {
        &self.job
    }

    /// Returns the next event; `None` when the job has ended and all events were read.
    ///
    /// # Errors
    /// When the coordinator refuses the call, or was unreachable for five minutes.
    pub async fn next(&mut self) -> Result<Option<JobEvent>, Failure> {
        loop {
            match self.try_next().await {
                Ok(Some(event)) => {
                    // Progress events are not stored, so they have the cursor of the event before them.
                    let numbered = !matches!(event.body, EventBody::Progress(_));
                    if event.cursor < self.cursor + u64::from(numbered) {
                        continue;
                    }
                    if numbered {
                        self.cursor = event.cursor;
                    }
                    self.reconnection.event_received();
                    return Ok(Some(event));
                }
                // The stream ended because the job ended, because the coordinator shuts down, or because a proxy closed it.
                Ok(None) => {
                    self.close_stream();
                    match self.api.get(self.job.id.as_str()).await {
                        Ok(job) => {
                            self.job = job;
                            if self.job.state.is_ended() {
                                return Ok(None);
                            }
                            self.reconnection.call_answered();
                            let ended =
                                "the event stream was closed before the job ended, by the coordinator or a proxy";
                            // Once: a proxy may close every stream.
                            let warns = !std::mem::replace(&mut self.has_warned_of_ended_stream, true);
                            self.wait_before_retry(Failure::new(Exit::Unreachable, ended), warns)
                                .await?;
                            // If the coordinator is unreachable next, that is another outage, with its own warning.
                            self.reconnection.call_answered();
                        }
                        Err(failure) => self.wait_until_reachable(failure).await?,
                    }
                }
                Err(failure) => {
                    self.close_stream();
                    self.wait_until_reachable(failure).await?;
                }
            }
        }
    }

    async fn try_next(&mut self) -> Result<Option<JobEvent>, Failure> {
        let stream = match &mut self.stream {
            Some(stream) => stream,
            slot => {
                let opened = self.api.events(&self.job.id, self.cursor, true).await?;
                self.reconnection.stream_opened(Instant::now());
                if self.reconnection.is_disconnected() {
                    tracing::debug!(cursor = self.cursor, "connected again");
                }
                slot.insert(Box::pin(opened))
            }
        };
        stream.next().await.transpose()
    }

    fn close_stream(&mut self) {
        self.stream = None;
        self.reconnection.stream_closed(Instant::now());
    }

    /// Waits before the next attempt if the coordinator is unreachable; returns other failures.
    async fn wait_until_reachable(&mut self, failure: Failure) -> Result<(), Failure> {
        if failure.exit != Exit::Unreachable {
            return Err(failure);
        }
        let warns = !self.reconnection.is_disconnected();
        self.wait_before_retry(failure, warns).await
    }

    /// Waits before the next attempt. `cause`: why there is no event stream. `warns`: whether it is printed.
    async fn wait_before_retry(&mut self, cause: Failure, warns: bool) -> Result<(), Failure> {
        let Some(delay) = self.reconnection.next_delay(Instant::now()) else {
            return Err(cause.hint(format!(
                "the job continues; to follow it again: aitk watch {}",
                self.job.id
            )));
        };
        if warns {
            self.ui
                .warn(&format!("{cause}; reconnecting; the job itself continues"));
        }
        tokio::time::sleep(delay).await;
        Ok(())
    }
}

/// Where log lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogTarget {
    /// Standard output, because the log is the result of the command.
    Stdout,
    /// Standard error, because standard output has another result.
    Stderr,
}

/// Renders the events of a job as they arrive.
pub struct Renderer<'a> {
    ui: &'a Ui,
    job: String,
    format: Format,
    log_target: LogTarget,
    progress: JobProgress,
    indicator: Option<ProgressIndicator<'a>>,
    /// The message of the last failed attempt.
    last_failure: String,
    /// The reason for waiting that was shown last, and when.
    shown_reason: Option<(String, Instant)>,
    /// The job is of `aitk run`: it has one attempt, and job and attempt report the same errors.
    local: bool,
}

impl<'a> Renderer<'a> {
    /// Creates a renderer for this job. With JSON it prints every event as a line on standard output.
    #[must_use]
    pub fn new(ui: &'a Ui, job: &JobView, format: Format, log_target: LogTarget) -> Self {
        let indicator = (format == Format::Human && !job.state.is_ended()).then(|| ui.job_progress());
        let mut progress = JobProgress::default();
        job.status().clone_into(&mut progress.phase);
        Self {
            ui,
            job: job.id.to_string(),
            format,
            log_target,
            progress,
            indicator,
            last_failure: String::new(),
            shown_reason: None,
            local: job.local,
        }
    }

    /// Renders one event.
    ///
    /// # Errors
    /// When standard output cannot be written.
    pub fn event(&mut self, event: &JobEvent) -> Result<(), Failure> {
        if self.format == Format::Json {
            return self.ui.json_line(&event_json(&self.job, event));
        }
        match &event.body {
            EventBody::Log { .. } => {
                if let Some(line) = log_line(&event.body) {
                    match self.log_target {
                        LogTarget::Stdout => self.ui.text(&line)?,
                        LogTarget::Stderr => self.ui.notice(&line),
                    }
                }
            }
            EventBody::Phase { name } => {
                self.progress.phase(name);
                self.update_progress(false);
            }
            EventBody::Progress(progress) => {
                self.progress
                    .steps(progress.done, progress.total, progress.seconds_per_step);
                self.update_progress(progress.total > 0 && progress.done == progress.total);
            }
            EventBody::Metrics { step, values } => {
                self.progress.metrics(values);
                let total = Some(self.progress.total).filter(|total| *total > 0);
                if let Some(line) = step_line(*step, total, values) {
                    match &mut self.indicator {
                        Some(indicator) => indicator.step_line(&line),
                        None => self.ui.write_to_log_file(&line),
                    }
                }
            }
            EventBody::State { state, paused, .. } => {
                if *paused || matches!(state, JobState::Queued | JobState::Stopping) {
                    self.progress.state(state.status(*paused), *state == JobState::Running);
                    self.update_progress(false);
                }
                self.print_notice(&event.body);
            }
            body => self.print_notice(body),
        }
        Ok(())
    }

    /// Updates the state of the job from a past event, without printing anything.
    pub fn apply_past_event(&mut self, event: &JobEvent) {
        match &event.body {
            EventBody::Phase { name } => self.progress.phase(name),
            EventBody::Progress(p) => self.progress.steps(p.done, p.total, p.seconds_per_step),
            EventBody::Metrics { values, .. } => self.progress.metrics(values),
            EventBody::State { state, paused, .. } if *paused || *state != JobState::Running => {
                self.progress.state(state.status(*paused), *state == JobState::Running);
            }
            _ => {}
        }
    }

    /// Shows the current progress, after calls of [`Self::apply_past_event`].
    pub fn show_current_state(&mut self) {
        self.update_progress(false);
    }

    /// Records that the job's reason for waiting was shown.
    pub fn mark_reason_shown(&mut self, job: &JobView) {
        self.shown_reason = Some((job.reason.clone(), Instant::now()));
    }

    /// Whether the job is queued and the output is for people.
    fn is_waiting(&self) -> bool {
        self.indicator.is_some() && self.progress.phase == JobState::Queued.name()
    }

    /// Prints why a job waits if the reason has changed, at most once per [`REASON_MIN_INTERVAL`].
    fn show_waiting_reason(&mut self, job: &JobView) {
        let is_shown = self
            .shown_reason
            .as_ref()
            .is_some_and(|(reason, _)| *reason == job.reason);
        let is_too_soon = self
            .shown_reason
            .as_ref()
            .is_some_and(|(_, when)| when.elapsed() < REASON_MIN_INTERVAL);
        if job.state != JobState::Queued || job.reason.is_empty() || is_shown || is_too_soon {
            return;
        }
        self.ui.notice(&printable(&format!("waits: {}", job.reason)));
        self.mark_reason_shown(job);
    }

    /// Removes the progress bar.
    pub fn finish(&mut self) {
        self.indicator = None;
    }

    fn update_progress(&mut self, last: bool) {
        if let Some(indicator) = &mut self.indicator {
            indicator.show_job(&self.progress, last);
        }
    }

    fn print_notice(&mut self, body: &EventBody) {
        if let EventBody::State {
            state: JobState::Failed,
            reason,
            ..
        } = body
            && self.local
        {
            self.ui.failure(&Failure::failed(printable(reason)));
            return;
        }
        if self.local
            && matches!(
                body,
                EventBody::Attempt {
                    state: AttemptState::Failed,
                    ..
                }
            )
        {
            return;
        }
        if let Some((warn, line)) = notice_without_repetition(&mut self.last_failure, body) {
            let line = printable(&line);
            if matches!(body, EventBody::State { .. }) && warn {
                self.ui.failure(&Failure::failed(line));
            } else if warn {
                self.ui.warn(&line)
            } else {
                self.ui.notice(&line)
            }
        }
    }
}

/// Returns the notice for an event, and whether it is a warning; `None` for events without a notice.
#[must_use]
pub fn notice_line(body: &EventBody) -> Option<(bool, String)> {
    let with = |head: String, tail: &str| {
        if tail.is_empty() {
            head
        } else {
            format!("{head}: {tail}")
        }
    };
    Some(match body {
        EventBody::State { state, reason, paused } => {
            // Avoids "job paused: paused".
            let status = state.status(*paused);
            let reason = if reason == status { "" } else { reason };
            (*state == JobState::Failed, with(format!("job {status}"), reason))
        }
        EventBody::Attempt {
            state,
            worker_name,
            device: device_ref,
            message,
        } => {
            let place = format!("{worker_name} {}", device(*device_ref));
            match state {
                AttemptState::Assigned => return None,
                AttemptState::Running => (false, with(format!("running on {place}"), message)),
                AttemptState::Completed | AttemptState::Stopped => return None,
                AttemptState::Failed => (true, with(format!("attempt on {place} failed"), message)),
                AttemptState::Lost => (true, with(format!("attempt on {place} lost"), message)),
            }
        }
        EventBody::Artifact(artifact) => {
            let path = artifact.local_path.as_ref().unwrap_or(&artifact.name);
            (false, format!("saved {path} ({})", size(artifact.bytes)))
        }
        EventBody::Checkpoint { step, .. } => (false, format!("checkpoint at step {step}")),
        EventBody::ArtifactRemoved { .. }
        | EventBody::Phase { .. }
        | EventBody::Progress(_)
        | EventBody::Metrics { .. }
        | EventBody::Log { .. } => return None,
    })
}

/// As [`notice_line`], but without the reason of a failed job if its last failed attempt gave the same reason.
/// `last_failure` keeps that attempt's message; the job's reason may have a prefix before it.
pub fn notice_without_repetition(last_failure: &mut String, body: &EventBody) -> Option<(bool, String)> {
    match body {
        EventBody::Attempt {
            state: AttemptState::Failed | AttemptState::Lost,
            message,
            ..
        } => message.clone_into(last_failure),
        EventBody::State {
            state: JobState::Failed,
            reason,
            ..
        } if !last_failure.is_empty() && reason.ends_with(last_failure.as_str()) => {
            return Some((true, "job failed".to_owned()));
        }
        _ => {}
    }
    notice_line(body)
}

/// Formats a log line; `None` for other events.
#[must_use]
pub fn log_line(body: &EventBody) -> Option<String> {
    let EventBody::Log { level, message } = body else {
        return None;
    };
    let message: Vec<String> = message.trim_end().split('\n').map(printable).collect();
    let message = message.join("\n");
    Some(match level.as_str() {
        "warn" => format!("warning: {message}"),
        "error" => format!("error: {message}"),
        _ => message,
    })
}

/// Follows a job to its end and shows its events. Ctrl-C detaches.
///
/// # Errors
/// As [`JobFollower::next`], or when standard output cannot be written.
pub async fn follow_to_end(
    api: &Api,
    ui: &Ui,
    job: JobView,
    cursor: u64,
    renderer: &mut Renderer<'_>,
) -> Result<Exit, Failure> {
    let (id, mut latest) = (job.id.clone(), job.clone());
    let mut follower = JobFollower::new(api, ui, job, cursor);
    // One future for the whole loop: a new one would miss signals that arrived before it was created.
    let mut interrupted = pin!(tokio::signal::ctrl_c());
    // The reason for waiting is not an event, because it depends on other users' jobs.
    let look_up_job = || async {
        tokio::time::sleep(REASON_POLL_INTERVAL).await;
        api.get(id.as_str()).await
    };
    loop {
        let next = {
            let mut next = Box::pin(follower.next());
            // Polled beside the events and Ctrl-C, so that neither waits for a coordinator that does not answer.
            let mut job_lookup = Box::pin(look_up_job());
            loop {
                tokio::select! {
                    next = &mut next => break Some(next?),
                    job = &mut job_lookup, if renderer.is_waiting() => {
                        job_lookup.set(look_up_job());
                        if let Ok(job) = job {
                            renderer.show_waiting_reason(&job);
                            latest = job;
                        }
                    }
                    _ = &mut interrupted => break None,
                }
            }
        };
        let Some(next) = next else {
            renderer.finish();
            print_detached(ui, &latest);
            return Ok(Exit::Interrupted);
        };
        match next {
            Some(event) => renderer.event(&event)?,
            None => break,
        }
    }
    renderer.finish();
    Ok(job_exit(follower.job()))
}

/// Prints that the job continues, how to follow it again and how to stop it.
pub fn print_detached(ui: &Ui, job: &JobView) {
    ui.notice("");
    ui.notice(&format!(
        "detached: job {} ({}) continues",
        job.id,
        printable(&job.name)
    ));
    ui.notice(&format!("  follow it:  aitk watch {}", job.id));
    ui.notice(&format!("  stop it:    aitk stop {}", job.id));
}

/// Selects the lines of a job that `aitk logs` shows.
pub struct LogFilter {
    since: Option<jiff::Timestamp>,
    tail: Option<usize>,
    last_lines: VecDeque<JobEvent>,
}

impl LogFilter {
    /// Creates a filter. `since` is the text of `--since`, `tail` the number of last lines to show.
    ///
    /// # Errors
    /// When `since` is not a time.
    pub fn new(since: Option<&str>, tail: Option<usize>) -> Result<Self, Failure> {
        let since = since
            .map(|text| parse_since(text, jiff::Timestamp::now()))
            .transpose()
            .map_err(Failure::usage)?;
        Ok(Self {
            since,
            tail,
            last_lines: VecDeque::new(),
        })
    }

    /// Whether a line is recent enough.
    #[must_use]
    pub fn is_recent(&self, event: &JobEvent) -> bool {
        self.since.is_none_or(|since| timestamp(event.time) >= since)
    }

    /// Adds an existing event that has a line. Returns it if it is to be shown at once; with `tail` none is, see
    /// [`Self::drain`].
    pub fn take(&mut self, event: JobEvent) -> Option<JobEvent> {
        if !self.is_recent(&event) {
            return None;
        }
        let Some(tail) = self.tail else { return Some(event) };
        self.last_lines.push_back(event);
        if self.last_lines.len() > tail {
            self.last_lines.pop_front();
        }
        None
    }

    /// Returns the last lines, after all existing events were added.
    pub fn drain(&mut self) -> impl Iterator<Item = JobEvent> + '_ {
        self.last_lines.drain(..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aitk_common::capability::{DeviceKind, DeviceRef};
    use aitk_common::control_plane::UnixMillis;

    fn log(cursor: u64, level: &str, message: &str) -> JobEvent {
        let body = EventBody::Log {
            level: level.to_owned(),
            message: message.to_owned(),
        };
        JobEvent {
            cursor,
            time: UnixMillis(cursor * 1000),
            attempt: None,
            body,
        }
    }

    #[test]
    fn tail_keeps_the_last_lines_and_since_the_recent_ones() {
        let mut filter = LogFilter::new(None, Some(2)).unwrap();
        for i in 1..=5 {
            assert_eq!(filter.take(log(i, "info", "x")), None);
        }
        assert_eq!(filter.drain().map(|event| event.cursor).collect::<Vec<_>>(), [4, 5]);
        let mut filter = LogFilter::new(Some("1970-01-01T00:00:03Z"), None).unwrap();
        let shown: Vec<u64> = (1..=5)
            .filter_map(|i| filter.take(log(i, "info", "x")))
            .map(|e| e.cursor)
            .collect();
        assert_eq!(shown, [3, 4, 5]);
        let mut none = LogFilter::new(None, Some(0)).unwrap();
        assert_eq!(none.take(log(1, "info", "x")), None);
        assert_eq!(none.drain().count(), 0);
        assert!(LogFilter::new(Some("last week"), None).is_err());
    }

    #[test]
    fn lines_say_what_happened() {
        assert_eq!(
            log_line(&log(1, "warn", "odd\x07\n").body).unwrap(),
            "warning: odd\u{fffd}"
        );
        assert_eq!(log_line(&log(1, "info", "a\nb").body).unwrap(), "a\nb");
        let attempt = EventBody::Attempt {
            state: AttemptState::Lost,
            worker_name: "box".to_owned(),
            device: DeviceRef {
                kind: DeviceKind::Cuda,
                index: 1,
            },
            message: "no heartbeat for 30 s".to_owned(),
        };
        let (warn, line) = notice_line(&attempt).unwrap();
        assert!(warn);
        assert_eq!(line, "attempt on box cuda:1 lost: no heartbeat for 30 s");
        let failed = EventBody::State {
            state: JobState::Failed,
            reason: "out of memory".to_owned(),
            paused: false,
        };
        assert_eq!(
            notice_line(&failed).unwrap(),
            (true, "job failed: out of memory".to_owned())
        );
        // The same reason is not printed twice.
        let mut last_failure = "out of memory".to_owned();
        assert_eq!(
            notice_without_repetition(&mut last_failure, &failed).unwrap().1,
            "job failed"
        );
        notice_without_repetition(&mut last_failure, &attempt);
        assert_eq!(
            notice_without_repetition(&mut last_failure, &failed).unwrap().1,
            "job failed: out of memory"
        );
    }
}
