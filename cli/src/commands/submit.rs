//! `submit`: checks a config, uploads missing inputs, and submits the job.

use super::logs::notify_ended;
use super::validate;
use crate::api::Api;
use crate::args::SubmitArgs;
use crate::config::{self, ReadOptions, read_with_warnings, refuse_special_files};
use crate::context::{Context, env};
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::follow::{LogTarget, Renderer, follow_to_end};
use crate::members::{is_array, watch_array};
use crate::notify::Notify;
use crate::output::format::{printable, shell_word, size};
use crate::output::{Format, Ui};
use crate::paths::expand;
use crate::preflight::{self, Checked, CompleteControls};
use crate::submission_data::{images, job_json, longest_prompt, parameter_counts};
use crate::sweep::{self, Sweep};
use crate::trace::SubmitSpan;
use crate::upload::{StagedInput, Upload, hash_inputs};
use aitk_common::control_plane::{JobView, NewMember, Submission, SubmissionReceipt};
use aitk_common::id::UserName;
use aitk_common::job::change::Change;
use aitk_common::job::{Input, InputKind, JobSpec, LoadedJob};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::io::{BufRead, IsTerminal};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Uploads above this size have to be confirmed.
const LARGE_UPLOAD: u64 = 10 << 30;
/// How often a submission is attempted when the connection breaks. The idempotency key makes repetitions safe.
const MAX_ATTEMPTS: u32 = 5;

pub(super) async fn submit(context: &Context, args: SubmitArgs) -> CommandResult {
    let ui = context.ui(args.no_progress);
    let notify = Notify::if_followed(args.follow, &args.notify, &context.paths)?;
    let mut seen_warnings = BTreeSet::new();
    let mut jobs = read_all(&ui, context, &args, &mut seen_warnings)?;
    let Some(first) = jobs.first().cloned() else {
        return Err(Failure::failed("there is nothing to submit"));
    };
    let asks_for_push = jobs.iter().any(|job| {
        job.loaded
            .spec
            .process
            .iter()
            .filter_map(|process| process.trainer())
            .any(|process| process.save.push_to_hub)
    });
    if asks_for_push {
        ui.warn(
            "save.push_to_hub: a job of `aitk submit` is not uploaded to Hugging Face by itself, because workers have no token that may write: \
             when it is done, `aitk artifacts get JOB -o FOLDER`, then `aitk push` of the run folder in it",
        );
    }
    if args.dry_run {
        let path = args.config.as_path();
        let warnings = seen_warnings.into_iter().collect();
        return validate::show(context, &ui, path, &first.loaded, warnings, args.json).await;
    }
    // Before the check, which opens the inputs: special files are refused.
    let mut inputs = inputs_of_all(&ui, context, &jobs)?;
    let checks = check_all(&ui, context, &mut jobs).await?;
    if checks.has_fewer_inputs {
        inputs = inputs_of_all(&ui, context, &jobs)?;
    }
    let Checked {
        commits, image_batches, ..
    } = checks.checked;
    for job in &mut jobs {
        // Pin the current commits, so that every attempt uses the same model.
        let repositories: Vec<Input> = job.loaded.spec.repositories(|path| inputs.contains_key(path)).collect();
        let pinned = repositories
            .into_iter()
            .filter_map(|input| commits.get_key_value(&input.config_path));
        job.loaded.spec.revisions = pinned.map(|(repo, commit)| (repo.clone(), commit.clone())).collect();
    }
    // Serialise before uploading, because this may fail.
    let json: Vec<String> = jobs
        .iter()
        .map(|job| job_json(&job.loaded, &args.config))
        .collect::<Result<_, _>>()?;
    let owner = resolve_owner(args.user.as_deref())?;
    let trace = SubmitSpan::start();
    let api = context.api().await?.with_trace(trace.context());

    let Some(sent) = send_inputs(&api, &ui, &trace, &inputs, args.yes).await? else {
        return Ok(Exit::Interrupted);
    };
    if !args.json {
        print_uploads(&ui, &sent);
    }

    // The submission has these values only if they are the same for all members.
    let (all_counts, counts): (Vec<_>, Vec<_>) = jobs
        .iter()
        .map(|job| {
            let spec = &job.loaded.spec;
            (
                parameter_counts(&job.loaded, &context.directory),
                images(spec, &context.directory),
            )
        })
        .unzip();
    let specs = jobs.iter().map(|job| &job.loaded.spec);
    let prompts = specs.filter_map(|spec| longest_prompt(spec, &context.directory));
    let key = args.idempotency_key.unwrap_or_else(|| uuid::Uuid::new_v4().to_string());
    let submission = Submission {
        config_text: first.loaded.text.clone(),
        config_format: first.loaded.format.name().to_owned(),
        job_json: json.first().cloned().unwrap_or_default(),
        inputs: sent
            .iter()
            .map(|staged| (staged.config_path.clone(), staged.snapshot))
            .collect(),
        local: false,
        idempotency_key: Some(key.clone()),
        owner,
        parameter_counts: shared_value(&all_counts),
        images: shared_value(&counts),
        longest_prompt: prompts.max(),
        image_batches,
    };
    let submitted = if jobs.len() == 1 {
        submit_with_retries(&api, &ui, |api| {
            let submission = submission.clone();
            async move { api.submit(submission).await }
        })
        .await
    } else {
        let members: Vec<NewMember> = jobs
            .iter()
            .zip(json)
            .map(|(job, job_json)| NewMember {
                job_json,
                seed_group: job.seed_group,
            })
            .collect();
        let name = array_name(&jobs);
        let at_most = args.at_most.map_or(0, NonZeroU32::get);
        submit_with_retries(&api, &ui, |api| {
            let (shared, name, members) = (submission.clone(), name.clone(), members.clone());
            async move { api.submit_array(shared, name, members, at_most).await }
        })
        .await
    };
    let submitted = submitted.map_err(|failure| with_key_hint(failure, &key))?;
    trace.submitted(&submitted.job);
    if submitted.existed {
        ui.notice("a job was submitted with this key before; its id is printed");
    }
    let job = get_submitted(&api, &submitted).await?;
    if args.json {
        let sent: Vec<_> = sent.iter().map(staged_json).collect();
        let mut line =
            json!({ "id": submitted.job, "name": submitted.name, "existed": submitted.existed, "inputs": sent });
        if !commits.is_empty() {
            line["revisions"] = json!(commits);
        }
        if let Some(array) = &job.array {
            line["array"] = json!({ "size": array.size, "at_most": array.at_most, "split": array.split });
        }
        if args.follow {
            ui.json_line(&line)?
        } else {
            ui.json(&line)?
        }
    } else {
        ui.data(submitted.job.as_str())?;
        if let Some(array) = &job.array {
            let what = if array.split { "parts" } else { "jobs" };
            ui.notice(&format!(
                "an array of {} {what}; `aitk ps {}` lists them",
                array.size, submitted.job
            ));
        }
    }
    let format = if args.json { Format::Json } else { Format::Human };
    let notify = args.follow.then_some(&notify);
    follow_submitted(&api, &ui, job, format, notify).await
}

/// Uploads the inputs that the store does not have. `skip_confirmation`: do not ask before a large upload. Returns `None`
/// after Ctrl-C.
pub(super) async fn send_inputs(
    api: &Api,
    ui: &Ui,
    trace: &SubmitSpan,
    inputs: &BTreeMap<String, PathBuf>,
    skip_confirmation: bool,
) -> Result<Option<Vec<StagedInput>>, Failure> {
    let staged = hash_inputs(ui, inputs).await?;
    let upload = Upload::plan(api, ui, staged).await?;
    if upload.missing_bytes() > LARGE_UPLOAD && !skip_confirmation {
        confirm_upload(ui, upload.missing_bytes())?;
    }
    let (start, bytes) = (SystemTime::now(), upload.missing_bytes());
    let sent = tokio::select! {
        sent = Box::pin(upload.send(api, ui)) => sent?,
        _ = tokio::signal::ctrl_c() => {
            ui.notice("stopped; nothing was submitted; uploaded files are not sent again next time");
            return Ok(None);
        }
    };
    trace.record_upload(start, bytes);
    Ok(Some(sent))
}

/// Returns a job that was just submitted.
///
/// # Errors
/// As [`Api::get`], and after Ctrl-C. The failure names the id, because the job exists: submitted again, there would be two.
pub(super) async fn get_submitted(api: &Api, submitted: &SubmissionReceipt) -> Result<JobView, Failure> {
    // A signal does not end the program any more, because it was listened for during the upload.
    let got = tokio::select! {
        got = Box::pin(api.get(submitted.job.as_str())) => got,
        _ = tokio::signal::ctrl_c() => Err(Failure::new(Exit::Interrupted, "interrupted")),
    };
    got.map_err(|failure| {
        failure.hint(format!(
            "the job was submitted before that: `aitk watch {}` follows it",
            submitted.job
        ))
    })
}

/// Follows the submitted job to its end and sends the notifications; without `notify` prints how to follow it.
pub(super) async fn follow_submitted(
    api: &Api,
    ui: &Ui,
    job: JobView,
    format: Format,
    notify: Option<&Notify>,
) -> CommandResult {
    let Some(notify) = notify else {
        if ui.has_bars() {
            ui.hint(&format!("to follow it: aitk watch {}", job.id));
        }
        return Ok(Exit::Ok);
    };
    if is_array(&job) {
        let exit = watch_array(api, ui, job.clone(), format, LogTarget::Stderr).await?;
        return notify_ended(api, ui, notify, &job, exit).await;
    }
    // Standard output has only the id, for `id=$(aitk submit -f …)`.
    let mut renderer = Renderer::new(ui, &job, format, LogTarget::Stderr);
    let exit = follow_to_end(api, ui, job.clone(), 0, &mut renderer).await?;
    notify_ended(api, ui, notify, &job, exit).await
}

/// One job to submit.
#[derive(Clone)]
struct Job {
    loaded: LoadedJob,
    seed_group: u32,
    suffix: String,
}

/// Reads the job of the config, or the members of the array that the flags define.
fn read_all(
    ui: &Ui,
    context: &Context,
    args: &SubmitArgs,
    seen_warnings: &mut BTreeSet<String>,
) -> Result<Vec<Job>, Failure> {
    let sweeps: Vec<Sweep> = args
        .sweep
        .iter()
        .map(|text| Sweep::parse(text))
        .collect::<Result<_, _>>()?;
    if sweeps.is_empty() && args.array.is_none() {
        if args.at_most.is_some() {
            return Err(Failure::usage(
                "--at-most is for an array: give --sweep or --array as well",
            ));
        }
        let loaded = read_one(ui, context, args, ReadOptions::default(), seen_warnings)?;
        let (seed_group, suffix) = (0, String::new());
        return Ok(vec![Job {
            loaded,
            seed_group,
            suffix,
        }]);
    }
    let mut members = sweep::members(&sweeps, args.array.map_or(1, |n| n.get() as usize))?;
    let count = members.len();
    let mut jobs: Vec<Job> = Vec::with_capacity(count);
    for use_numbers in [false, true] {
        jobs.clear();
        for member in &mut members {
            if use_numbers {
                member.suffix = sweep::numbered_suffix(member.index, count);
            }
            let options = ReadOptions {
                changes: &member.changes,
                suffix: &member.suffix,
                index: Some(member.index),
                ..ReadOptions::default()
            };
            let (seed_group, suffix) = (member.seed_group, member.suffix.clone());
            let loaded = read_one(ui, context, args, options, seen_warnings)?;
            if !use_numbers && jobs.iter().any(|job| job.loaded.spec.name == loaded.spec.name) {
                // Two members have the same name, so all get numbers instead.
                break;
            }
            jobs.push(Job {
                loaded,
                seed_group,
                suffix,
            });
        }
        if jobs.len() == count {
            break;
        }
    }
    Ok(jobs)
}

/// Reads the config for one job. A warning that was printed before is not repeated.
fn read_one(
    ui: &Ui,
    context: &Context,
    args: &SubmitArgs,
    options: ReadOptions<'_>,
    seen_warnings: &mut BTreeSet<String>,
) -> Result<LoadedJob, Failure> {
    let mut changes = config::parse_changes(&args.set)?;
    changes.extend_from_slice(options.changes);
    let options = ReadOptions {
        name: args.name.as_deref(),
        script: args.script,
        ..options
    };
    let (mut loaded, warnings) = read_named(&args.config, &context.directory, options, changes)?;
    for warning in warnings {
        if !seen_warnings.contains(&warning) {
            // A dry run has the warnings in its report.
            if !args.dry_run {
                ui.warn(&warning);
            }
            seen_warnings.insert(warning);
        }
    }
    if let Some(priority) = args.priority {
        loaded.spec.cluster.priority = i64::from(priority);
    }
    Ok(loaded)
}

/// Reads a config with these changes. `options.name` replaces `[name]`, and the whole name where the config's name has no `[name]`.
fn read_named(
    config: &Path,
    directory: &Path,
    options: ReadOptions<'_>,
    mut changes: Vec<Change>,
) -> Result<(LoadedJob, Vec<String>), Failure> {
    let read = |name: Option<&str>, changes: &[Change]| {
        let options = ReadOptions {
            name,
            changes,
            ..options
        };
        read_with_warnings(config, directory, options)
    };
    let (loaded, warnings) = read(options.name, &changes)?;
    let Some(name) = options.name else {
        return Ok((loaded, warnings));
    };
    if loaded.spec.name == format!("{name}{}", options.suffix) {
        return Ok((loaded, warnings));
    }
    // A name with `[name]` depends on the flag; without the flag it may also be invalid.
    match read(None, &changes) {
        Ok((without_flag, _)) if without_flag.spec.name == loaded.spec.name => {
            changes.push(config::name_change(name));
            read(options.name, &changes)
        }
        _ => Ok((loaded, warnings)),
    }
}

/// What was found about all jobs.
#[derive(Default)]
struct Checks {
    checked: Checked,
    /// Whether the check left inputs out that the jobs do not need.
    has_fewer_inputs: bool,
}

/// Checks all jobs before anything is sent, prints what was found, and leaves out of them what they do not need. Returns the commits of models
/// at the hub, and the batches of a single job: those of an array's members may differ, so that they are planned with their resolutions.
async fn check_all(ui: &Ui, context: &Context, jobs: &mut [Job]) -> Result<Checks, Failure> {
    let mut all = Checks::default();
    let mut seen: Vec<(Vec<Input>, CompleteControls)> = Vec::new();
    let is_single = jobs.len() == 1;
    for job in jobs {
        // Most members have the same inputs.
        let inputs = job.loaded.spec.inputs();
        let complete = match seen.iter().find(|(other, _)| *other == inputs) {
            Some((_, complete)) => complete.clone(),
            None => {
                let checked = preflight::check_before_start(ui, &job.loaded, &context.directory, false).await?;
                all.checked.commits.extend(checked.commits);
                if is_single {
                    all.checked.image_batches = checked.image_batches;
                }
                seen.push((inputs, checked.complete_controls.clone()));
                checked.complete_controls
            }
        };
        all.has_fewer_inputs |= complete.leave_out_generators(&mut job.loaded.spec);
    }
    Ok(all)
}

fn inputs_of_all(ui: &Ui, context: &Context, jobs: &[Job]) -> Result<BTreeMap<String, PathBuf>, Failure> {
    let mut seen: Vec<Vec<Input>> = Vec::new();
    let mut all = BTreeMap::new();
    for job in jobs {
        // Most members have the same inputs.
        let inputs = job.loaded.spec.inputs();
        if !seen.contains(&inputs) {
            refuse_special_files(&job.loaded.spec, &inputs, &context.directory)?;
            all.extend(local_inputs(ui, context, &job.loaded.spec, inputs.clone())?);
            seen.push(inputs);
        }
    }
    Ok(all)
}

/// Returns the value if all are equal.
fn shared_value<T: Clone + PartialEq>(all: &[Option<T>]) -> Option<T> {
    let first = all.first()?;
    all.iter().all(|one| one == first).then(|| first.clone()).flatten()
}

/// Returns the name of the array: the common part of its members' names.
fn array_name(jobs: &[Job]) -> String {
    let Some(first) = jobs.first() else {
        return String::new();
    };
    let name = &first.loaded.spec.name;
    let base = name.strip_suffix(&first.suffix).filter(|_| !first.suffix.is_empty());
    if let Some(base) = base.filter(|base| !base.is_empty()) {
        return base.to_owned();
    }
    let mut length = name.len();
    for job in jobs {
        let same = name.char_indices().zip(job.loaded.spec.name.chars());
        let same = same.take_while(|((_, a), b)| a == b).last();
        length = length.min(same.map_or(0, |((at, c), _)| at + c.len_utf8()));
    }
    let shared = name.get(..length).unwrap_or_default();
    let shared = shared.trim_end_matches(|c: char| !c.is_alphanumeric());
    if shared.is_empty() {
        name.clone()
    } else {
        shared.to_owned()
    }
}

/// Returns the owner from the flag, else from the environment; `None`: the coordinator's default.
pub(super) fn resolve_owner(flag: Option<&str>) -> Result<Option<UserName>, Failure> {
    let (text, from) = match (flag, env("AITK_USER")) {
        (Some(name), _) => (name.to_owned(), "--user"),
        (None, Some(name)) if !name.is_empty() => (name, "AITK_USER"),
        (None, _) => return Ok(None),
    };
    let name = UserName::parse(&text).map_err(|_| {
        Failure::usage(format!(
            "{from}: '{}' is not a valid name: expected 1 to 64 letters, digits, '-' or '_'",
            printable(&text)
        ))
    })?;
    Ok(Some(name))
}

pub(super) fn staged_json(staged: &StagedInput) -> serde_json::Value {
    json!({
        "path": staged.config_path,
        "snapshot": staged.snapshot,
        "files": staged.files,
        "bytes": staged.bytes,
        "sent_bytes": staged.sent_bytes,
    })
}

pub(super) fn print_uploads(ui: &Ui, sent: &[StagedInput]) {
    for staged in sent {
        let what = format!("{}: {} files, {}", staged.config_path, staged.files, size(staged.bytes));
        let how = match staged.sent_bytes {
            0 => "stored already, nothing sent".to_owned(),
            sent if sent == staged.bytes => "sent".to_owned(),
            sent => format!("{} sent, the rest was stored already", size(sent)),
        };
        ui.notice(&printable(&format!("{what}; {how}")));
    }
}

/// Returns the inputs of a config that are on this machine. A missing one that cannot be a repository is an error with
/// its position in the config.
pub(super) fn local_inputs(
    ui: &Ui,
    context: &Context,
    spec: &JobSpec,
    inputs: Vec<Input>,
) -> Result<BTreeMap<String, PathBuf>, Failure> {
    let mut found = BTreeMap::new();
    let (mut missing, mut missing_model) = (Vec::new(), false);
    for input in inputs {
        let may_be_repository = input.may_be_repository();
        let Input { config_path, key, kind } = input;
        let path = expand(&config_path, &context.directory, &env);
        if config_path.is_empty() {
            continue;
        }
        let model = matches!(kind, InputKind::Model | InputKind::LanguageModel | InputKind::Vae);
        if may_be_repository && !path.exists() {
            ui.notice(&printable(&format!(
                "{config_path} is not on this machine: the worker downloads it from Hugging Face"
            )));
            continue;
        }
        if path.exists() {
            found.insert(config_path, path);
        } else {
            let message = format!("no file or folder '{config_path}' here");
            missing.push(spec.finding(key, message).to_string());
            missing_model |= model;
        }
    }
    if missing.is_empty() {
        return Ok(found);
    }
    missing.dedup();
    let lines: Vec<String> = missing.iter().map(|line| printable(line)).collect();
    let failure = Failure::not_found(lines.join("\n")).hint("paths are relative to the current folder");
    Err(if missing_model {
        failure.hint("a model may also be the name of a Hugging Face repository, ORG/NAME")
    } else {
        failure
    })
}

fn confirm_upload(ui: &Ui, bytes: u64) -> Result<(), Failure> {
    let question = format!("{} have to be uploaded", size(bytes));
    if !std::io::stdin().is_terminal() {
        return Err(
            Failure::usage(format!("{question}, and there is no terminal to confirm it"))
                .hint("give -y to upload without asking"),
        );
    }
    ui.notice(&format!("{question}; continue? [y/N]"));
    let mut answer = String::new();
    let read = std::io::stdin().lock().read_line(&mut answer);
    match read {
        Ok(_) if matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes") => Ok(()),
        _ => Err(Failure::failed("not submitted")),
    }
}

/// Submits, and tries again while the coordinator is unreachable.
///
/// # Errors
/// When the coordinator refuses the submission or stays unreachable, and after Ctrl-C.
pub(super) async fn submit_with_retries<F>(
    api: &Api,
    ui: &Ui,
    submit: impl Fn(Api) -> F,
) -> Result<SubmissionReceipt, Failure>
where
    F: Future<Output = Result<SubmissionReceipt, Failure>>,
{
    // A signal does not end the program any more, because it was listened for during the upload.
    let submitted = tokio::select! {
        submitted = Box::pin(try_to_submit(api, ui, submit)) => submitted,
        _ = tokio::signal::ctrl_c() => Err(Failure::new(Exit::Interrupted, "interrupted")),
    };
    submitted.map_err(|failure| match is_outcome_unknown(&failure) {
        true => failure.hint("the coordinator may have got the job: `aitk ps` lists it if it was submitted"),
        false => failure,
    })
}

/// Whether the job may have been submitted although the call failed: no answer arrived.
fn is_outcome_unknown(failure: &Failure) -> bool {
    matches!(failure.exit, Exit::Unreachable | Exit::Interrupted)
}

/// Says how to submit again after a failure that may have left a job behind: with another key there would be two jobs.
fn with_key_hint(failure: Failure, key: &str) -> Failure {
    match is_outcome_unknown(&failure) {
        true => failure.hint(format!(
            "to submit it again without getting a second job, add this to the same command: --idempotency-key {}",
            shell_word(key)
        )),
        false => failure,
    }
}

async fn try_to_submit<F>(api: &Api, ui: &Ui, submit: impl Fn(Api) -> F) -> Result<SubmissionReceipt, Failure>
where
    F: Future<Output = Result<SubmissionReceipt, Failure>>,
{
    let mut pause = Duration::from_millis(500);
    for _ in 1..MAX_ATTEMPTS {
        match submit(api.clone()).await {
            Err(failure) if failure.exit == Exit::Unreachable => {
                ui.warn(&format!("{failure}; retrying"));
                tokio::time::sleep(pause).await;
                pause *= 2;
            }
            other => return other,
        }
    }
    submit(api.clone()).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_answer_names_the_key_of_the_submission() {
        for (exit, named) in [
            (Exit::Unreachable, true),
            (Exit::Interrupted, true),
            (Exit::Conflict, false),
            (Exit::Failed, false),
        ] {
            let failure = with_key_hint(Failure::new(exit, "lost"), "a b");
            let text = failure.render(false);
            assert_eq!(text.contains("--idempotency-key 'a b'"), named, "{exit:?}: {text}");
        }
    }

    #[test]
    fn the_flag_replaces_the_placeholder_or_the_whole_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("job.yaml");
        let name_of = |in_config: &str, name: Option<&str>, suffix: &str| {
            let text = include_str!("../../../config/demo/train.yaml");
            std::fs::write(&path, text.replace("name: zorb", &format!("name: {in_config}"))).unwrap();
            let options = ReadOptions {
                name,
                suffix,
                ..ReadOptions::default()
            };
            let (loaded, _) = read_named(&path, folder.path(), options, Vec::new()).unwrap();
            loaded.spec.name
        };
        for (in_config, name, suffix, expected) in [
            ("my_lora", None, "", "my_lora"),
            ("my_lora", Some("other"), "", "other"),
            ("my_lora", Some("my_lora"), "", "my_lora"),
            // The config's name contains that of the flag.
            ("my_lora", Some("lora"), "", "lora"),
            ("style_v12", Some("v1"), "", "v1"),
            ("my_lora", Some("lora"), "_a", "lora_a"),
            ("'[name]_v2'", Some("cat"), "", "cat_v2"),
            ("'[name]_v2'", Some("cat"), "_a", "cat_a_v2_a"),
            ("my_lora", Some("ada's lora"), "", "ada's lora"),
        ] {
            assert_eq!(
                name_of(in_config, name, suffix),
                expected,
                "{in_config} {name:?} {suffix}"
            );
        }
    }
}
