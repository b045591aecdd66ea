//! Following a job: its event stream, taken up where it stopped after a broken connection, and how events are shown.

use crate::api::Api;
use crate::exit::Exit;
use crate::failure::Failure;
use crate::output::format::{parse_since, printable, size};
use crate::output::progress::JobProgress;
use crate::output::ui::Wait;
use crate::output::{Format, Ui};
use crate::views::{device, event_json, job_exit, moment};
use aitk_common::control::{AttemptState, EventBody, JobEvent, JobState, JobView};
use aitk_common::step_metrics::step_line;
use futures::{Stream, StreamExt};
use std::collections::VecDeque;
use std::pin::{Pin, pin};
use std::time::{Duration, Instant};

/// First pause before the connection is tried again; it doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// A coordinator that is away longer than this is not just being restarted.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// How often it is looked why a job waits, and how often a change of that is told.
const LOOK_AT_WAITING: Duration = Duration::from_secs(2);
const TELL_WAITING: Duration = Duration::from_secs(60);

type EventStream = Pin<Box<dyn Stream<Item = Result<JobEvent, Failure>> + Send>>;

/// The events of one job until it ends, across broken connections.
pub struct Follow<'a> {
    api: &'a Api,
    ui: &'a Ui,
    job: JobView,
    cursor: u64,
    stream: Option<EventStream>,
    pause: Duration,
    waited: Duration,
}

impl<'a> Follow<'a> {
    /// Follows this job from after `cursor`; 0 is its beginning.
    #[must_use]
    pub fn new(api: &'a Api, ui: &'a Ui, job: JobView, cursor: u64) -> Self {
        Self {
            api,
            ui,
            job,
            cursor,
            stream: None,
            pause: FIRST_PAUSE,
            waited: Duration::ZERO,
        }
    }

    /// The job as it was last seen.
    #[must_use]
    pub fn job(&self) -> &JobView {
        &self.job
    }

    /// The next event; `None` when the job has ended and everything was said.
    ///
    /// # Errors
    /// When the coordinator refuses, or was not reachable for five minutes.
    pub async fn next(&mut self) -> Result<Option<JobEvent>, Failure> {
        loop {
            match self.try_next().await {
                Ok(Some(event)) => {
                    // Progress is told beside the log and takes no number of its own.
                    let numbered = !matches!(event.body, EventBody::Progress(_));
                    if event.cursor < self.cursor + u64::from(numbered) {
                        continue;
                    }
                    if numbered {
                        self.cursor = event.cursor;
                    }
                    (self.pause, self.waited) = (FIRST_PAUSE, Duration::ZERO);
                    return Ok(Some(event));
                }
                // The stream ended: because the job did, or because the coordinator goes.
                Ok(None) => {
                    self.stream = None;
                    match self.api.get(self.job.id.as_str()).await {
                        Ok(job) => {
                            self.job = job;
                            if self.job.state.is_ended() {
                                return Ok(None);
                            }
                        }
                        Err(failure) if failure.exit == Exit::Unreachable => {}
                        Err(failure) => return Err(failure),
                    }
                    self.rest(None).await?;
                }
                Err(failure) if failure.exit == Exit::Unreachable => {
                    self.stream = None;
                    self.rest(Some(failure)).await?;
                }
                Err(failure) => return Err(failure),
            }
        }
    }

    async fn try_next(&mut self) -> Result<Option<JobEvent>, Failure> {
        let stream = match &mut self.stream {
            Some(stream) => stream,
            slot => {
                let opened = self.api.events(&self.job.id, self.cursor, true).await?;
                if self.waited > Duration::ZERO {
                    tracing::debug!(cursor = self.cursor, "connected again");
                }
                slot.insert(Box::pin(opened))
            }
        };
        stream.next().await.transpose()
    }

    async fn rest(&mut self, because: Option<Failure>) -> Result<(), Failure> {
        if self.waited >= PATIENCE {
            let failure =
                because.unwrap_or_else(|| Failure::new(Exit::Unreachable, "the coordinator ends every stream"));
            return Err(failure.hint(format!("the job goes on; come back with: aitk watch {}", self.job.id)));
        }
        if let Some(failure) = because
            && self.waited == Duration::ZERO
        {
            self.ui
                .warn(&format!("{failure}; trying again, the job itself goes on"));
        }
        tokio::time::sleep(self.pause).await;
        self.waited += self.pause;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        Ok(())
    }
}

/// Where log lines go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogsTo {
    /// Standard output: they are what was asked for.
    Stdout,
    /// Standard error: standard output holds something else.
    Stderr,
}

/// Shows events as they come.
pub struct Renderer<'a> {
    ui: &'a Ui,
    job: String,
    format: Format,
    logs_to: LogsTo,
    progress: JobProgress,
    wait: Option<Wait<'a>>,
    /// What the last attempt that failed said.
    said: String,
    /// Why the job waits, as it was told last, and when.
    waits: Option<(String, Instant)>,
    /// Runs in place: there is one attempt, and what it says is what the job says.
    local: bool,
}

impl<'a> Renderer<'a> {
    /// Shows events of this job. With JSON every event is a line on standard output.
    #[must_use]
    pub fn new(ui: &'a Ui, job: &JobView, format: Format, logs_to: LogsTo) -> Self {
        let wait = (format == Format::Human && !job.state.is_ended()).then(|| ui.job());
        let mut progress = JobProgress::default();
        job.status().clone_into(&mut progress.phase);
        Self {
            ui,
            job: job.id.to_string(),
            format,
            logs_to,
            progress,
            wait,
            said: String::new(),
            waits: None,
            local: job.local,
        }
    }

    /// Shows one event.
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
                    match self.logs_to {
                        LogsTo::Stdout => self.ui.text(&line)?,
                        LogsTo::Stderr => self.ui.notice(&line),
                    }
                }
            }
            EventBody::Phase { name } => {
                self.progress.phase(name);
                self.show(false);
            }
            EventBody::Progress(progress) => {
                self.progress
                    .steps(progress.done, progress.total, progress.seconds_per_step);
                self.show(progress.total > 0 && progress.done == progress.total);
            }
            EventBody::Metrics { step, values } => {
                self.progress.metrics(values);
                let total = Some(self.progress.total).filter(|total| *total > 0);
                if let Some(line) = step_line(*step, total, values) {
                    match &mut self.wait {
                        Some(wait) => wait.step_line(&line),
                        None => self.ui.copy(&line),
                    }
                }
            }
            EventBody::State { state, paused, .. } => {
                if *paused || matches!(state, JobState::Queued | JobState::Stopping) {
                    self.progress.state(state.status(*paused), *state == JobState::Running);
                    self.show(false);
                }
                self.say(&event.body);
            }
            body => self.say(body),
        }
        Ok(())
    }

    /// Takes note of an event of the past: where the job stands, without saying how it came there.
    pub fn catch_up(&mut self, event: &JobEvent) {
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

    /// Shows where the job stands after [`Self::catch_up`].
    pub fn caught_up(&mut self) {
        self.show(false);
    }

    /// Takes note that it was said why the job waits.
    pub fn told_why(&mut self, job: &JobView) {
        self.waits = Some((job.reason.clone(), Instant::now()));
    }

    /// Whether a person should see why the job waits.
    fn is_waiting(&self) -> bool {
        self.wait.is_some() && self.progress.phase == JobState::Queued.name()
    }

    /// Says why a job waits, when that is another reason than before.
    fn waits_for(&mut self, job: &JobView) {
        let told = self.waits.as_ref().is_some_and(|(reason, _)| *reason == job.reason);
        let lately = self
            .waits
            .as_ref()
            .is_some_and(|(_, when)| when.elapsed() < TELL_WAITING);
        if job.state != JobState::Queued || job.reason.is_empty() || told || lately {
            return;
        }
        self.ui.notice(&printable(&format!("waits: {}", job.reason)));
        self.told_why(job);
    }

    /// Takes the bar away.
    pub fn finish(&mut self) {
        self.wait = None;
    }

    fn show(&mut self, last: bool) {
        if let Some(wait) = &mut self.wait {
            wait.show_job(&self.progress, last);
        }
    }

    fn say(&mut self, body: &EventBody) {
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
        if let Some((warn, line)) = next_notice(&mut self.said, body) {
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

/// What is said about an event beside the log, and whether it is a warning.
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
            // "job paused: paused" says it twice.
            let status = state.status(*paused);
            let reason = if reason == status { "" } else { reason };
            (*state == JobState::Failed, with(format!("job {status}"), reason))
        }
        EventBody::Attempt {
            state,
            worker_name,
            device: place,
            message,
        } => {
            let place = format!("{worker_name} {}", device(*place));
            match state {
                AttemptState::Assigned => return None,
                AttemptState::Running => (false, with(format!("runs on {place}"), message)),
                AttemptState::Completed | AttemptState::Stopped => return None,
                AttemptState::Failed => (true, with(format!("attempt on {place} failed"), message)),
                AttemptState::Lost => (true, with(format!("attempt on {place} lost"), message)),
            }
        }
        EventBody::Artifact(artifact) => {
            let place = artifact.local_path.as_ref().unwrap_or(&artifact.name);
            (false, format!("saved {place} ({})", size(artifact.bytes)))
        }
        EventBody::Checkpoint { step, .. } => (false, format!("checkpoint at step {step}")),
        EventBody::ArtifactRemoved { .. }
        | EventBody::Phase { .. }
        | EventBody::Progress(_)
        | EventBody::Metrics { .. }
        | EventBody::Log { .. } => return None,
    })
}

/// As [`notice_line`], but a job that fails for the reason which its attempt just gave does not say it again. `said`
/// is what the last attempt that failed said; the job's reason may have a few words before it.
pub fn next_notice(said: &mut String, body: &EventBody) -> Option<(bool, String)> {
    match body {
        EventBody::Attempt {
            state: AttemptState::Failed | AttemptState::Lost,
            message,
            ..
        } => message.clone_into(said),
        EventBody::State {
            state: JobState::Failed,
            reason,
            ..
        } if !said.is_empty() && reason.ends_with(said.as_str()) => return Some((true, "job failed".to_owned())),
        _ => {}
    }
    notice_line(body)
}

/// A log line as it is shown, if the event is one.
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
/// As [`Follow::next`], or when standard output cannot be written.
pub async fn follow_to_end(
    api: &Api,
    ui: &Ui,
    job: JobView,
    cursor: u64,
    renderer: &mut Renderer<'_>,
) -> Result<Exit, Failure> {
    let (id, mut known) = (job.id.clone(), job.clone());
    let mut follow = Follow::new(api, ui, job, cursor);
    // One for all of it: a new one would not hear of what came before it.
    let mut interrupted = pin!(tokio::signal::ctrl_c());
    // Why it waits is no event: it changes with everybody else's jobs.
    let look = || async {
        tokio::time::sleep(LOOK_AT_WAITING).await;
        api.get(id.as_str()).await
    };
    loop {
        let next = {
            let mut next = Box::pin(follow.next());
            // Not answered at once by a coordinator that is away: events and Ctrl-C do not wait for it.
            let mut looked = Box::pin(look());
            loop {
                tokio::select! {
                    next = &mut next => break Some(next?),
                    job = &mut looked, if renderer.is_waiting() => {
                        looked.set(look());
                        if let Ok(job) = job {
                            renderer.waits_for(&job);
                            known = job;
                        }
                    }
                    _ = &mut interrupted => break None,
                }
            }
        };
        let Some(next) = next else {
            renderer.finish();
            detached(ui, &known);
            return Ok(Exit::Interrupted);
        };
        match next {
            Some(event) => renderer.event(&event)?,
            None => break,
        }
    }
    renderer.finish();
    Ok(job_exit(follow.job()))
}

/// Says that the job goes on, how to come back and how to stop it.
pub fn detached(ui: &Ui, job: &JobView) {
    ui.notice("");
    ui.notice(&format!("detached: job {} ({}) goes on", job.id, printable(&job.name)));
    ui.notice(&format!("  come back:  aitk watch {}", job.id));
    ui.notice(&format!("  stop it:    aitk stop {}", job.id));
}

/// Which of a job's lines `aitk logs` shows.
pub struct LogFilter {
    since: Option<jiff::Timestamp>,
    tail: Option<usize>,
    kept: VecDeque<JobEvent>,
}

impl LogFilter {
    /// `since` as written on the command line, `tail` a number of lines.
    ///
    /// # Errors
    /// When `since` is no moment.
    pub fn new(since: Option<&str>, tail: Option<usize>) -> Result<Self, Failure> {
        let since = since
            .map(|text| parse_since(text, jiff::Timestamp::now()))
            .transpose()
            .map_err(Failure::usage)?;
        Ok(Self {
            since,
            tail,
            kept: VecDeque::new(),
        })
    }

    /// Whether a line is recent enough.
    #[must_use]
    pub fn is_recent(&self, event: &JobEvent) -> bool {
        self.since.is_none_or(|since| moment(event.time) >= since)
    }

    /// Takes an event of what is there already, of those that have a line. Returns it if it is to be shown at once.
    pub fn take(&mut self, event: JobEvent) -> Option<JobEvent> {
        if !self.is_recent(&event) {
            return None;
        }
        let Some(tail) = self.tail else { return Some(event) };
        self.kept.push_back(event);
        if self.kept.len() > tail {
            self.kept.pop_front();
        }
        None
    }

    /// The last lines, at the end of what is there.
    pub fn drain(&mut self) -> impl Iterator<Item = JobEvent> + '_ {
        self.kept.drain(..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aitk_common::capability::{DeviceKind, DeviceRef};
    use aitk_common::control::UnixMillis;

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
            message: "no sign of life for 30 s".to_owned(),
        };
        let (warn, line) = notice_line(&attempt).unwrap();
        assert!(warn);
        assert_eq!(line, "attempt on box cuda:1 lost: no sign of life for 30 s");
        let failed = EventBody::State {
            state: JobState::Failed,
            reason: "out of memory".to_owned(),
            paused: false,
        };
        assert_eq!(
            notice_line(&failed).unwrap(),
            (true, "job failed: out of memory".to_owned())
        );
        // The same reason is not told twice.
        let mut said = "out of memory".to_owned();
        assert_eq!(next_notice(&mut said, &failed).unwrap().1, "job failed");
        next_notice(&mut said, &attempt);
        assert_eq!(next_notice(&mut said, &failed).unwrap().1, "job failed: out of memory");
    }
}
