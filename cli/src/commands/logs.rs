//! `logs` and `watch`.

use super::Context;
use crate::args::{LogsArgs, WatchArgs};
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::follow::{Follow, LogFilter, LogsTo, Renderer, detached, follow_to_end, log_line, notice_line};
use crate::output::format::printable;
use crate::output::{Format, Ui};
use crate::views::{event_json, job_exit};
use aitk_common::control::{EventBody, JobEvent, JobState};
use futures::StreamExt;

/// How many log lines of the past `watch` shows.
const SHOWN_BEFORE: usize = 10;

pub(super) async fn logs(context: &Context, args: LogsArgs) -> CommandResult {
    let ui = context.ui(true);
    let mut filter = LogFilter::new(args.since.as_deref(), args.tail)?;
    let api = context.api().await?;
    let job = api.resolve(&args.job).await?;
    let show = |ui: &Ui, event: &JobEvent| -> Result<(), Failure> {
        if args.json {
            return ui.json_line(&event_json(job.id.as_str(), event));
        }
        log_line(&event.body).map_or(Ok(()), |line| ui.data(&line))
    };

    let mut cursor = 0;
    let mut there = Box::pin(api.events(&job.id, 0, false).await?);
    while let Some(event) = there.next().await.transpose()? {
        cursor = cursor.max(event.cursor);
        if let Some(event) = filter.take(event) {
            show(&ui, &event)?;
        }
    }
    for event in filter.drain().collect::<Vec<_>>() {
        show(&ui, &event)?;
    }
    if !args.follow {
        return Ok(Exit::Ok);
    }

    let mut follow = Follow::new(&api, &ui, job.clone(), cursor);
    loop {
        let next = tokio::select! {
            next = follow.next() => next?,
            _ = tokio::signal::ctrl_c() => {
                detached(&ui, &job);
                return Ok(Exit::Interrupted);
            }
        };
        let Some(event) = next else { break };
        match &event.body {
            EventBody::Log { .. } => show(&ui, &event)?,
            EventBody::State { .. } | EventBody::Attempt { .. } if !args.json => {
                if let Some((_, line)) = notice_line(&event.body) {
                    ui.notice(&printable(&line));
                }
            }
            _ => {}
        }
    }
    Ok(job_exit(follow.job()))
}

pub(super) async fn watch(context: &Context, args: WatchArgs) -> CommandResult {
    let ui = context.ui(args.no_progress);
    let api = context.api().await?;
    let job = api.resolve(&args.job).await?;
    let format = if args.json { Format::Json } else { Format::Human };
    let mut renderer = Renderer::new(&ui, &job, format, LogsTo::Stdout);
    let mut cursor = 0;
    if format == Format::Human {
        // Where it stands and the last lines; the rest is for `aitk logs`.
        let mut last = LogFilter::new(None, Some(SHOWN_BEFORE))?;
        let mut there = api.events(&job.id, 0, false).await?;
        while let Some(event) = there.next().await.transpose()? {
            cursor = cursor.max(event.cursor);
            renderer.catch_up(&event);
            last.take(event);
        }
        for event in last.drain().collect::<Vec<_>>() {
            renderer.event(&event)?;
        }
        if job.state == JobState::Queued || job.state.is_ended() {
            ui.notice(&printable(&format!("{} is {}: {}", job.name, job.state, job.reason)));
        } else {
            renderer.caught_up();
        }
    }
    follow_to_end(&api, &ui, job, cursor, &mut renderer).await
}
