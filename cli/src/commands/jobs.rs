//! `ps`, `wait`, `stop`, `rm`, `resume`, `pause`, `save`, `sample`, `priority`.

use crate::api::Api;
use crate::args::{PauseArgs, PriorityArgs, PsArgs, ResumeArgs, RmArgs, SampleArgs, SaveArgs, StopArgs, WaitArgs};
use crate::context::Context;
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::members::is_array;
use crate::notify::Notify;
use crate::output::format::plural;
use crate::output::{Format, Ui};
use crate::reconnection::may_reconnect;
use crate::views::{job_exit, job_json, jobs_table};
use aitk_common::control_plane::{JobState, JobView};
use aitk_common::id::JobId;
use aitk_common::requested_outputs::RequestedOutputs;
use aitk_proto::v1;
use futures::future::join_all;
use serde_json::{Value, json};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Number of jobs that `ps` shows people by default.
const DEFAULT_ROWS: usize = 100;
/// How often `ps --watch` lists again, and the longest interval at which `wait` polls.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

pub(super) async fn ps(context: &Context, args: PsArgs) -> CommandResult {
    let ui = context.ui(true);
    let api = context.api().await?;
    let format = Format::from_flags(args.json, args.quiet);
    let job = match &args.job {
        None => None,
        Some(text) => Some(api.resolve(text).await?),
    };
    let array = job.as_ref().filter(|job| is_array(job)).map(|job| job.id.clone());
    let request = list_request(&args, array);
    // A script gets all jobs, people get as many as they can read.
    let limit = match (args.limit, format) {
        (Some(limit), _) => limit as usize,
        (None, Format::Human) if !args.all => DEFAULT_ROWS,
        (None, _) => usize::MAX,
    };
    // One future for the whole loop: a new one would miss signals that arrived before it was created.
    let mut interrupted = pin!(tokio::signal::ctrl_c());
    loop {
        let list = async {
            match &job {
                Some(job) if !is_array(job) => api.get(job.id.as_str()).await.map(|job| {
                    let total = u64::from(matches_filters(&job, &args));
                    let listed: Vec<JobView> = Some(job).filter(|_| total > 0).into_iter().collect();
                    (listed, total)
                }),
                _ => api.list_jobs(request.clone(), limit).await,
            }
        };
        let listed = tokio::select! {
            listed = list => listed,
            _ = &mut interrupted => return Ok(Exit::Interrupted),
        };
        let jobs = match listed {
            // The coordinator may be back at the next poll.
            Err(failure) if args.watch && failure.exit == Exit::Unreachable => {
                ui.failure(&failure);
                None
            }
            other => Some(other?),
        };
        if let Some((jobs, total)) = &jobs {
            if args.watch && format == Format::Human {
                ui.clear_screen()?;
            }
            show_jobs(&ui, jobs, format, args.watch)?;
            if jobs.is_empty() && format == Format::Human && !args.watch {
                ui.notice(match is_filtered(&args) {
                    true => "no job matches; `aitk ps --all` shows all jobs",
                    false => "no jobs; `aitk submit CONFIG` adds one",
                });
            }
            let more = total.saturating_sub(jobs.len() as u64);
            if more > 0 && jobs.len() >= limit && format == Format::Human {
                ui.notice(&format!(
                    "… and {} more (`aitk ps --all` shows all; filter with --state, --user or --name)",
                    thousands(more)
                ));
            }
        }
        if !args.watch {
            return Ok(Exit::Ok);
        }
        tokio::select! {
            () = tokio::time::sleep(POLL_INTERVAL) => {}
            _ = &mut interrupted => return Ok(Exit::Interrupted),
        }
    }
}

fn is_filtered(args: &PsArgs) -> bool {
    !args.states.is_empty() || args.user.is_some() || args.name.is_some()
}

/// Whether a job that is named by itself matches the filters, as the coordinator matches those of a list. A member also matches by the
/// name of its array, which is not known here.
fn matches_filters(job: &JobView, args: &PsArgs) -> bool {
    (args.states.is_empty() || args.states.contains(&job.state))
        && args.user.as_ref().is_none_or(|user| job.owner.as_str() == user)
        && args
            .name
            .as_ref()
            .is_none_or(|part| job.array.is_some() || job.name.contains(part))
}

/// Builds the request to the coordinator.
fn list_request(args: &PsArgs, array: Option<JobId>) -> v1::ListJobsRequest {
    v1::ListJobsRequest {
        // A filter also applies to jobs that have ended.
        all: args.all || is_filtered(args),
        members: args.members,
        array_id: array.map(|id| id.to_string()).unwrap_or_default(),
        owner: args.user.clone().unwrap_or_default(),
        name_part: args.name.clone().unwrap_or_default(),
        states: args
            .states
            .iter()
            .map(|state| v1::JobState::from(*state).into())
            .collect(),
        ..Default::default()
    }
}

/// Formats a number with separators: `50,870`.
fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn show_jobs(ui: &Ui, jobs: &[JobView], format: Format, stream: bool) -> Result<(), Failure> {
    match format {
        Format::Json => {
            let value = json!({ "jobs": jobs.iter().map(job_json).collect::<Vec<Value>>() });
            if stream { ui.json_line(&value) } else { ui.json(&value) }
        }
        Format::Quiet => ui.data_lines(jobs.iter().map(|job| job.id.as_str())),
        Format::Human => {
            // A script gets full ids, people get short ones.
            ui.table(&jobs_table(jobs, jiff::Timestamp::now(), ui.width().is_none()))
        }
    }
}

/// Finds all jobs that are named, in order and without duplicates.
async fn resolve_all(api: &Api, names: &[String]) -> Result<Vec<JobView>, Failure> {
    let mut jobs: Vec<JobView> = Vec::new();
    for name in names {
        let job = api.resolve(name).await?;
        if jobs.iter().all(|known| known.id != job.id) {
            jobs.push(job);
        }
    }
    Ok(jobs)
}

pub(super) async fn wait(context: &Context, args: WaitArgs) -> CommandResult {
    let ui = context.ui(false);
    let notify = Notify::new(&args.notify, &context.paths)?;
    let api = context.api().await?;
    let jobs = resolve_all(&api, &args.jobs).await?;
    let waited = {
        let _spinner = ui.has_bars().then(|| ui.spinner(&waiting_for(&jobs)));
        let limit = args.timeout.unwrap_or(Duration::from_secs(u64::from(u32::MAX)));
        let (count, active) = (jobs.len(), AtomicUsize::new(jobs.len()));
        let all = join_all(jobs.into_iter().map(|mut job| {
            let (api, ui, notify, active) = (&api, &ui, &notify, &active);
            async move {
                // The time limit is not for the notification: it comes after the end of the job.
                match tokio::time::timeout(limit, wait_until_ended(api, ui, &mut job)).await {
                    Ok(Ok(())) => {}
                    Ok(Err(failure)) => return Err(failure),
                    Err(_) => return Ok(job),
                }
                active.fetch_sub(1, Ordering::Relaxed);
                notify.job_ended(ui, &job).await;
                Ok(job)
            }
        }));
        tokio::select! {
            waited = all => waited,
            _ = tokio::signal::ctrl_c() => {
                ui.notice(&interrupted_notice(count, active.load(Ordering::Relaxed)));
                return Ok(Exit::Interrupted);
            }
        }
    };
    let exit = wait_exit(&waited);
    let count = waited.len();
    let (jobs, failures): (Vec<_>, Vec<_>) = waited.into_iter().partition(Result::is_ok);
    let mut jobs: Vec<JobView> = jobs.into_iter().flatten().collect();
    let active = jobs.iter().filter(|job| !job.state.is_ended()).count();
    let format = Format::from_flags(args.json, args.quiet);
    if format == Format::Quiet {
        // An id says no more than that its job has ended.
        jobs.retain(|job| job.state.is_ended());
    }
    if !jobs.is_empty() {
        print_states(&ui, &jobs, format)?;
    }
    for failure in failures.into_iter().filter_map(Result::err) {
        ui.failure(&failure);
    }
    if active > 0 {
        let text = match count {
            1 => "the time of --timeout has passed, and the job has not ended".to_owned(),
            _ => format!("the time of --timeout has passed, and {active} of {count} jobs have not ended"),
        };
        return Err(Failure::new(Exit::TimedOut, text).hint("they continue; `aitk ps` shows their states"));
    }
    Ok(exit)
}

/// What Ctrl-C leaves behind. `active`: how many of the jobs have not ended.
fn interrupted_notice(jobs: usize, active: usize) -> String {
    match active {
        0 => "all jobs have ended; a notification may not have been sent".to_owned(),
        active if active == jobs => "no longer waiting; the jobs continue".to_owned(),
        active => format!(
            "no longer waiting; {} of {jobs} jobs have ended, the others continue",
            jobs.saturating_sub(active)
        ),
    }
}

/// The exit code of the first job that did not complete, or could not be waited for.
fn wait_exit(ended: &[Result<JobView, Failure>]) -> Exit {
    let mut exits = ended.iter().map(|ended| match ended {
        Ok(job) => job_exit(job),
        Err(failure) => failure.exit,
    });
    exits.find(|exit| *exit != Exit::Ok).unwrap_or(Exit::Ok)
}

/// Prints the state of each job. Those that have not ended are there when the time of `--timeout` has passed.
fn print_states(ui: &Ui, jobs: &[JobView], format: Format) -> Result<(), Failure> {
    match format {
        Format::Json => ui.json(&json!({ "jobs": jobs.iter().map(job_json).collect::<Vec<Value>>() })),
        Format::Quiet => ui.data_lines(jobs.iter().map(|job| job.id.as_str())),
        Format::Human => {
            for job in jobs {
                let reason = if job.state == JobState::Failed {
                    format!(": {}", job.reason)
                } else {
                    String::new()
                };
                ui.text(&crate::output::format::printable(&format!(
                    "{} {} {}{reason}",
                    job.id, job.name, job.state
                )))?;
            }
            Ok(())
        }
    }
}

fn waiting_for(jobs: &[JobView]) -> String {
    match jobs {
        [job] => format!("waiting for {}", crate::output::format::printable(&job.name)),
        jobs => format!("waiting for {} jobs", jobs.len()),
    }
}

/// Polls until the job has ended. `job` is what the coordinator said last. Retries while the coordinator is unreachable, for up to five minutes.
async fn wait_until_ended(api: &Api, ui: &Ui, job: &mut JobView) -> Result<(), Failure> {
    let mut pause = Duration::from_millis(200);
    let mut unreachable_since: Option<Instant> = None;
    while !job.state.is_ended() {
        tokio::time::sleep(pause).await;
        match api.get(job.id.as_str()).await {
            Ok(current) => (*job, unreachable_since) = (current, None),
            Err(failure) if failure.exit == Exit::Unreachable && may_reconnect(unreachable_since) => {
                if unreachable_since.is_none() {
                    ui.warn(&format!("{failure}; retrying"));
                }
                unreachable_since.get_or_insert_with(Instant::now);
            }
            Err(failure) => return Err(failure),
        }
        pause = (pause * 2).min(POLL_INTERVAL);
    }
    Ok(())
}

/// Sends a request for each job. A job that refuses it does not keep the others from getting theirs. When the connection is lost, no
/// further one is sent.
async fn for_each(jobs: Vec<JobView>, request: impl AsyncFn(&JobView) -> Result<JobView, Failure>) -> Results {
    let mut results = Results::default();
    let mut jobs = jobs.into_iter();
    while let Some(job) = jobs.next() {
        match request(&job).await {
            Ok(job) => results.changed.push(job),
            Err(failure) if failure.exit == Exit::Unreachable => {
                results.failures.push(match jobs.len() {
                    0 => failure,
                    rest => failure.hint(format!("{} after it got no request", plural(rest as u64, "job"))),
                });
                break;
            }
            Err(failure) => results.failures.push(failure),
        }
    }
    results
}

/// The results of requests for several jobs.
#[derive(Default)]
struct Results {
    changed: Vec<JobView>,
    failures: Vec<Failure>,
}

/// Prints the jobs that were changed, then the errors of the others. The last of them is the result of the command.
fn print_results(ui: &Ui, results: &Results, json: bool, describe: impl Fn(&JobView) -> String) -> CommandResult {
    let Some((last, failures)) = results.failures.split_last() else {
        return print_jobs(ui, &results.changed, json, describe);
    };
    if !results.changed.is_empty() {
        print_jobs(ui, &results.changed, json, describe)?;
    }
    for failure in failures {
        ui.failure(failure);
    }
    Err(last.clone())
}

pub(super) async fn stop(context: &Context, args: StopArgs) -> CommandResult {
    let ui = context.ui(true);
    let api = context.api().await?;
    let jobs = resolve_all(&api, &args.jobs).await?;
    let stopped = for_each(jobs, async |job| api.stop(&job.id, args.now).await).await;
    print_results(&ui, &stopped, args.json, |job| match job.state {
        JobState::Stopping if args.now => "stops without saving".to_owned(),
        JobState::Stopping => "saves and stops; `aitk wait` waits for it".to_owned(),
        state => format!("is {state}"),
    })
}

pub(super) async fn rm(context: &Context, args: RmArgs) -> CommandResult {
    let ui = context.ui(true);
    let api = context.api().await?;
    let jobs = resolve_all(&api, &args.jobs).await?;
    let removed = for_each(jobs, async |job| api.remove(job).await).await;
    print_results(&ui, &removed, args.json, |_| "is deleted".to_owned())
}

pub(super) async fn resume(context: &Context, args: ResumeArgs) -> CommandResult {
    let ui = context.ui(true);
    let api = context.api().await?;
    let jobs = resolve_all(&api, &args.jobs).await?;
    let resumed = for_each(jobs, async |job| api.resume(&job.id).await).await;
    print_results(&ui, &resumed, args.json, |job| match job.checkpoint_step {
        _ if is_array(job) => format!("is {}: {}", job.state, job.reason),
        Some(step) => format!("is {}, resumes from step {step}", job.state),
        None => format!(
            "is {}, starts from the beginning because it has no checkpoint",
            job.state
        ),
    })
}

pub(super) async fn pause(context: &Context, args: PauseArgs) -> CommandResult {
    let ui = context.ui(true);
    let api = context.api().await?;
    let jobs = resolve_all(&api, &args.jobs).await?;
    let paused = for_each(jobs, async |job| api.pause(&job.id).await).await;
    print_results(&ui, &paused, args.json, |job| match job.state {
        JobState::Running => "saves, then waits until it is resumed".to_owned(),
        _ => "waits until it is resumed".to_owned(),
    })
}

pub(super) async fn save(context: &Context, args: SaveArgs) -> CommandResult {
    request_outputs(context, &args.jobs, args.json, RequestedOutputs::SAVE).await
}

pub(super) async fn sample(context: &Context, args: SampleArgs) -> CommandResult {
    request_outputs(context, &args.jobs, args.json, RequestedOutputs::SAMPLES).await
}

/// Asks running trainings for outputs.
async fn request_outputs(context: &Context, jobs: &[String], json: bool, outputs: RequestedOutputs) -> CommandResult {
    let ui = context.ui(true);
    let api = context.api().await?;
    let jobs = resolve_all(&api, jobs).await?;
    let asked = for_each(jobs, async |job| {
        // Of the other kinds the coordinator knows which have a training.
        if has_no_training(&job.kind) {
            return Err(no_training(job, outputs));
        }
        api.request_outputs(&job.id, outputs).await
    });
    print_results(&ui, &asked.await, json, |job| match is_array(job) {
        true => format!("was asked to {outputs}: the members that run do so after their current steps"),
        false => format!("was asked to {outputs}: it does so after its current step; `aitk logs` says when"),
    })
}

fn no_training(job: &JobView, outputs: RequestedOutputs) -> Failure {
    Failure::new(
        Exit::Conflict,
        format!(
            "job {} cannot {outputs} on request: it is a job of the kind `{}`, and only trainings save and sample on request",
            job.id, job.kind
        ),
    )
    .hint(format!("`aitk artifacts ls {}` lists the files that it has made", job.id))
}

/// Whether jobs of this kind never train.
fn has_no_training(kind: &str) -> bool {
    matches!(kind, "generate" | "extract" | "mod")
}

pub(super) async fn priority(context: &Context, args: PriorityArgs) -> CommandResult {
    let ui = context.ui(true);
    let api = context.api().await?;
    let job = api.resolve(&args.job).await?;
    let job = api.set_priority(&job.id, i64::from(args.priority)).await?;
    print_jobs(&ui, &[job], args.json, |job| {
        format!("has priority {}: {}", job.priority, job.reason)
    })
}

fn print_jobs(ui: &Ui, jobs: &[JobView], json: bool, describe: impl Fn(&JobView) -> String) -> CommandResult {
    if json {
        ui.json(&json!({ "jobs": jobs.iter().map(job_json).collect::<Vec<Value>>() }))?;
        return Ok(Exit::Ok);
    }
    for job in jobs {
        ui.data(job.id.as_str())?;
        ui.notice(&crate::output::format::printable(&format!(
            "{} {}",
            job.name,
            describe(job)
        )));
    }
    Ok(Exit::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::tests::job;

    #[tokio::test]
    async fn only_a_lost_connection_keeps_other_jobs_from_their_request() {
        let jobs = || ["a", "b", "c"].map(|id| job(id, id, JobState::Running, 0)).to_vec();
        for exit in [Exit::Conflict, Exit::Unauthorised, Exit::NotFound] {
            let results = for_each(jobs(), async |job| match job.id.as_str() {
                "b" => Err(Failure::new(exit, "b is not yours")),
                _ => Ok(job.clone()),
            });
            let results = results.await;
            let changed: Vec<&str> = results.changed.iter().map(|job| job.id.as_str()).collect();
            assert_eq!((changed, results.failures.len()), (vec!["a", "c"], 1), "{exit:?}");
        }
        let lost = for_each(jobs(), async |_| Err(Failure::new(Exit::Unreachable, "lost"))).await;
        assert_eq!((lost.changed.len(), lost.failures.len()), (0, 1));
        assert!(lost.failures[0].render(false).contains("2 jobs after it"));
    }

    #[test]
    fn filters_apply_to_a_job_that_is_named() {
        use clap::Parser;
        let shown = |flags: &[&str]| {
            let line = ["aitk", "ps", "a"].iter().chain(flags);
            let crate::args::Command::Ps(args) = crate::args::Cli::parse_from(line).command else {
                panic!("ps");
            };
            matches_filters(&job("a", "my_cat", JobState::Running, 0), &args)
        };
        assert!(shown(&[]) && shown(&["--state", "failed", "--state", "running"]) && shown(&["--name", "cat"]));
        assert!(!shown(&["--state", "failed"]) && !shown(&["--name", "dog"]) && !shown(&["--user", "somebody"]));
    }

    #[test]
    fn the_exit_code_of_wait_is_that_of_the_first_job_that_did_not_complete() {
        let ended = |state| Ok(job("a", "a", state, 0));
        let removed = || Err(Failure::not_found("no job b"));
        for (results, exit) in [
            (vec![ended(JobState::Completed)], Exit::Ok),
            (vec![ended(JobState::Completed), removed()], Exit::NotFound),
            (vec![ended(JobState::Failed), removed()], Exit::Failed),
            (vec![removed(), ended(JobState::Failed)], Exit::NotFound),
        ] {
            assert_eq!(wait_exit(&results), exit);
        }
    }

    #[test]
    fn ctrl_c_says_which_jobs_continue() {
        assert_eq!(interrupted_notice(2, 2), "no longer waiting; the jobs continue");
        let some = interrupted_notice(3, 1);
        assert_eq!(some, "no longer waiting; 2 of 3 jobs have ended, the others continue");
        assert!(interrupted_notice(2, 0).starts_with("all jobs have ended; "));
    }

    #[test]
    fn large_numbers_have_separators() {
        for (number, text) in [
            (0, "0"),
            (999, "999"),
            (1_000, "1,000"),
            (50_870, "50,870"),
            (1_234_567, "1,234,567"),
        ] {
            assert_eq!(thousands(number), text);
        }
    }
}
