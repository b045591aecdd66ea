//! `logs` and `watch`.

use crate::api::Api;
use crate::args::{LogsArgs, WatchArgs};
use crate::context::Context;
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::follow::{JobFollower, LogFilter, LogTarget, PastEvents, Renderer, follow_to_end, print_detached};
use crate::log_formatter::LogFormatter;
use crate::members::{self, LogOptions, is_array, watch_array};
use crate::notify::Notify;
use crate::output::format::{parse_since, printable};
use crate::output::{Format, Ui};
use crate::run_folder::{self, run_folder};
use crate::views::{event_json, job_exit};
use aitk_common::control_plane::{EventBody, JobEvent, JobState, JobView};
use futures::StreamExt;
use std::path::Path;
use std::pin::pin;

/// The warning after Ctrl-C while a notification is sent.
pub(super) const NOTIFICATION_STOPPED: &str = "stopped; the notification may not have been sent";
/// Number of past log lines that `watch` shows.
const PAST_LINES: usize = 10;

pub(super) async fn logs(context: &Context, args: LogsArgs) -> CommandResult {
    let ui = context.ui(true);
    let mut filter = LogFilter::new(args.since.as_deref(), args.tail)?;
    if let Some(folder) = run_folder(&args.job, &context.directory)? {
        return folder_log(&ui, &folder, &args);
    }
    let api = context.api().await?;
    let job = api.resolve(&args.job).await?;
    if is_array(&job) {
        let options = LogOptions {
            ui: &ui,
            json: args.json,
            since: args.since,
            tail: args.tail,
            follow: args.follow,
        };
        return members::logs(&api, &job, &options).await;
    }
    let mut log_formatter = LogFormatter::new(
        ui.width(),
        ui.color(),
        jiff::tz::TimeZone::system(),
        jiff::Timestamp::now(),
    );
    log_formatter.set_total(job.progress.as_ref().map(|progress| progress.total));
    // With --json only the lines that the job itself logged; `aitk watch --json` has every event.
    let is_shown = |log_formatter: &mut LogFormatter, event: &JobEvent| match &event.body {
        EventBody::Log { .. } => true,
        _ => !args.json && log_formatter.accepts(event),
    };
    let show = |log_formatter: &mut LogFormatter, event: &JobEvent| -> Result<(), Failure> {
        if args.json {
            return ui.json_line(&event_json(job.id.as_str(), event));
        }
        ui.data_lines(log_formatter.lines(event))
    };

    let mut past_events = PastEvents::open(&api, &job.id).await?;
    while let Some(event) = past_events.next().await? {
        if is_shown(&mut log_formatter, &event)
            && let Some(event) = filter.take(event)
        {
            show(&mut log_formatter, &event)?;
        }
    }
    for event in filter.drain().collect::<Vec<_>>() {
        show(&mut log_formatter, &event)?;
    }
    if !args.follow {
        return Ok(Exit::Ok);
    }

    let mut follower = JobFollower::new(&api, &ui, job.clone(), past_events.cursor());
    // One future for the whole loop: a new one would miss signals that arrived before it was created.
    let mut interrupted = pin!(tokio::signal::ctrl_c());
    loop {
        let next = tokio::select! {
            next = follower.next() => next?,
            _ = &mut interrupted => {
                print_detached(&ui, &job);
                return Ok(Exit::Interrupted);
            }
        };
        let Some(event) = next else { break };
        if is_shown(&mut log_formatter, &event) {
            show(&mut log_formatter, &event)?;
        }
    }
    Ok(job_exit(follower.job()))
}

/// Shows the log of a run folder. Each line begins with its time.
fn folder_log(ui: &Ui, folder: &Path, args: &LogsArgs) -> CommandResult {
    if args.follow || args.json {
        return Err(Failure::usage("--follow and --json are for jobs, not for run folders"));
    }
    let since = args
        .since
        .as_deref()
        .map(|text| parse_since(text, jiff::Timestamp::now()));
    let since = since.transpose().map_err(Failure::usage)?;
    let recent = |line: &String| {
        let time = line
            .split(' ')
            .next()
            .and_then(|time| time.parse::<jiff::Timestamp>().ok());
        since.is_none_or(|since| time.is_some_and(|time| time >= since))
    };
    let lines: Vec<String> = run_folder::log(folder)?.into_iter().filter(recent).collect();
    let from = args.tail.map_or(0, |tail| lines.len().saturating_sub(tail));
    ui.data_lines(lines.iter().skip(from).map(|line| printable(line)))?;
    Ok(Exit::Ok)
}

pub(super) async fn watch(context: &Context, args: WatchArgs) -> CommandResult {
    let ui = context.ui(args.no_progress);
    let notify = Notify::new(&args.notify, &context.paths)?;
    let api = context.api().await?;
    let job = api.resolve(&args.job).await?;
    let format = if args.json { Format::Json } else { Format::Human };
    if is_array(&job) {
        let exit = watch_array(&api, &ui, job.clone(), format, LogTarget::Stdout).await?;
        return notify_ended(&api, &ui, &notify, &job, exit).await;
    }
    let mut renderer = Renderer::new(&ui, &job, format, LogTarget::Stdout);
    let mut cursor = 0;
    if format == Format::Human {
        // The current progress and the last log lines; `aitk logs` shows the rest.
        let mut last = LogFilter::new(None, Some(PAST_LINES))?;
        let mut past_events = api.events(&job.id, 0, false).await?;
        while let Some(event) = past_events.next().await.transpose()? {
            cursor = cursor.max(event.cursor);
            renderer.apply_past_event(&event);
            if matches!(event.body, EventBody::Log { .. }) {
                last.take(event);
            }
        }
        for event in last.drain().collect::<Vec<_>>() {
            renderer.event(&event)?;
        }
        if job.state == JobState::Queued || job.state.is_ended() {
            ui.notice(&printable(&format!("{} is {}: {}", job.name, job.status(), job.reason)));
            renderer.mark_reason_shown(&job);
        } else {
            renderer.show_current_state();
        }
    }
    let exit = follow_to_end(&api, &ui, job.clone(), cursor, &mut renderer).await?;
    notify_ended(&api, &ui, &notify, &job, exit).await
}

/// Sends the notifications after a job was followed to its end. An error does not change the exit code.
pub(super) async fn notify_ended(api: &Api, ui: &Ui, notify: &Notify, job: &JobView, exit: Exit) -> CommandResult {
    if notify.is_set() && exit != Exit::Interrupted {
        let notification = async {
            match api.get(job.id.as_str()).await {
                Ok(job) => notify.job_ended(ui, &job).await,
                Err(failure) => ui.warn(&printable(&format!("the notification was not sent: {failure}"))),
            }
        };
        // A signal does not end the program any more, because it was listened for while the job was followed.
        tokio::select! {
            () = notification => {}
            _ = tokio::signal::ctrl_c() => ui.warn(NOTIFICATION_STOPPED),
        }
    }
    Ok(exit)
}
