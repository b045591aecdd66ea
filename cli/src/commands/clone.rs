//! `clone`: submit a copy of a job, with its inputs as they are stored.

use super::submit::{
    follow_submitted, get_submitted, local_inputs, print_uploads, resolve_owner, send_inputs, submit_with_retries,
};
use crate::api::Api;
use crate::args::CloneArgs;
use crate::config::{self, refuse_special_files};
use crate::context::Context;
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::members::is_array;
use crate::notify::Notify;
use crate::output::format::{printable, printable_lines};
use crate::output::{Format, Ui};
use crate::preflight;
use crate::submission_data::{job_json, longest_prompt, parameter_counts, prompts_in};
use crate::trace::SubmitSpan;
use aitk_common::control_plane::{JobView, Submission};
use aitk_common::hash::ContentHash;
use aitk_common::id::JobId;
use aitk_common::job::change::Change;
use aitk_common::job::{Format as ConfigFormat, Input, JobSpec, LoadedJob};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

pub(super) async fn clone(context: &Context, args: CloneArgs) -> CommandResult {
    let ui = context.ui(args.no_progress);
    let notify = Notify::if_followed(args.follow, &args.notify, &context.paths)?;
    let changes = flag_changes(&args)?;
    let owner = resolve_owner(args.user.as_deref())?;
    let api = context.api().await?;
    let job = api.resolve(&args.job).await?;
    check_is_single_job(&job)?;
    let stored = api.submission(&job.id).await?;
    if stored.local {
        return Err(Failure::new(
            Exit::Conflict,
            format!(
                "{} was run by `aitk run` on its own machine: its inputs were never stored",
                job.id
            ),
        )
        .hint("`aitk submit CONFIG` submits its config"));
    }

    let (original, mut loaded) = apply_changes(&ui, &job, &stored, &changes)?;
    if let Some(priority) = args.priority {
        loaded.spec.cluster.priority = i64::from(priority);
    }
    let new = new_inputs(&original, &loaded.spec, &stored.inputs);
    refuse_special_files(&loaded.spec, &new, &context.directory)?;
    let local = local_inputs(&ui, context, &loaded.spec, new.clone())?;
    let is_new = |input: &Input| new.iter().any(|new| new.config_path == input.config_path);
    let commits = preflight::check_selected_models(&ui, &loaded.spec, &context.directory, is_new).await?;
    pin_revisions(&mut loaded.spec, &commits, &local, &stored.inputs);
    let prompts_here = |file: &str| prompts_in(file, &context.directory).filter(|_| local.contains_key(file));
    let generated = images_in_parts(&api, &job).await?;
    let images = count_images(&original, &loaded.spec, generated, prompts_here);
    if loaded.spec.cluster.split.is_some() && images.is_none() {
        loaded.spec.cluster.split = None;
        ui.notice("the copy is not split into parts, because the number of prompts in its file is not known here");
    }
    let json = job_json(&loaded, Path::new(&format!("the copy of {}", job.id)))?;

    let trace = SubmitSpan::start();
    let api = api.with_trace(trace.context());
    let Some(sent) = send_inputs(&api, &ui, &trace, &local, args.yes).await? else {
        return Ok(Exit::Interrupted);
    };
    if !args.json {
        print_uploads(&ui, &sent);
    }
    let used: BTreeSet<String> = loaded
        .spec
        .inputs()
        .into_iter()
        .map(|input| input.config_path)
        .collect();
    let mut inputs = stored.inputs.clone();
    inputs.retain(|path, _| used.contains(path));
    inputs.extend(sent.iter().map(|staged| (staged.config_path.clone(), staged.snapshot)));
    let submission = Submission {
        images,
        parameter_counts: parameter_counts(&loaded, &context.directory),
        // Counted where the original was submitted; its data sets are not here.
        image_batches: Vec::new(),
        longest_prompt: longest_prompt(&loaded.spec, &context.directory),
        config_text: stored.config_text,
        config_format: stored.config_format,
        job_json: json,
        inputs,
        local: false,
        idempotency_key: Some(uuid::Uuid::new_v4().to_string()),
        owner,
    };
    let submitted = submit_with_retries(&api, &ui, |api| {
        let submission = submission.clone();
        async move { api.submit(submission).await }
    });
    let submitted = submitted
        .await
        .map_err(|failure| explain_missing_input(failure, &job))?;
    trace.submitted(&submitted.job);
    let copy = get_submitted(&api, &submitted).await?;
    if args.json {
        let line = json!({ "id": submitted.job, "name": submitted.name, "copy_of": job.id });
        if args.follow {
            ui.json_line(&line)?
        } else {
            ui.json(&line)?
        }
    } else {
        ui.data(submitted.job.as_str())?;
        ui.notice(&printable(&format!(
            "{} is a copy of {}; it starts from the beginning",
            submitted.name, job.id
        )));
    }
    let format = if args.json { Format::Json } else { Format::Human };
    follow_submitted(&api, &ui, copy, format, args.follow.then_some(&notify)).await
}

/// Returns the changes from the flags.
fn flag_changes(args: &CloneArgs) -> Result<Vec<Change>, Failure> {
    let mut changes = config::parse_changes(&args.set)?;
    if let Some(name) = &args.name {
        changes.push(config::name_change(name));
    }
    Ok(changes)
}

/// Refuses an array, unless it is a job that was split into parts: any of its parts stands for the whole job.
fn check_is_single_job(job: &JobView) -> Result<(), Failure> {
    let Some(array) = job.array.as_ref().filter(|array| is_array(job) && !array.split) else {
        return Ok(());
    };
    Err(Failure::new(
        Exit::Conflict,
        format!(
            "{} is an array of {} jobs; only a single job can be copied",
            job.id, array.size
        ),
    )
    .hint(format!("`aitk clone {}-0` copies its first member", job.id))
    .hint("`aitk submit CONFIG --sweep …` submits such an array"))
}

/// Returns the stored job and the changed copy.
fn apply_changes(
    ui: &Ui,
    job: &JobView,
    stored: &Submission,
    changes: &[Change],
) -> Result<(JobSpec, LoadedJob), Failure> {
    let cannot_copy = |error: &dyn std::fmt::Display| {
        let problem = printable_lines(&error.to_string());
        Failure::failed(format!("{} cannot be copied: {problem}", job.id))
    };
    let original: JobSpec = serde_json::from_str(&stored.job_json).map_err(|error| {
        cannot_copy(&error)
            .hint("it was submitted with another version of aitk; `aitk submit CONFIG` submits its config")
    })?;
    let format = ConfigFormat::from_name(&stored.config_format).unwrap_or(ConfigFormat::Yaml);
    let (spec, warnings) = original.with_changes(changes).map_err(|error| cannot_copy(&error))?;
    let support = spec.unsupported();
    if !support.errors.is_empty() {
        let lines: Vec<String> = support.errors.iter().map(ToString::to_string).collect();
        return Err(cannot_copy(&lines.join("\n")));
    }
    for warning in &warnings {
        ui.warn(&printable(&warning.to_string()));
    }
    let loaded = LoadedJob {
        spec,
        text: stored.config_text.clone(),
        format,
        path: None,
        warnings: Vec::new(),
    };
    Ok((original, loaded))
}

/// Returns the inputs of the copy that the job does not have. Only these are looked up on this machine: a folder here
/// may have the same name as a repository of the job.
fn new_inputs(original: &JobSpec, copy: &JobSpec, stored: &BTreeMap<String, ContentHash>) -> Vec<Input> {
    let old_paths: BTreeSet<String> = original.inputs().into_iter().map(|input| input.config_path).collect();
    let mut inputs = copy.inputs();
    inputs.retain(|input| !old_paths.contains(&input.config_path) && !stored.contains_key(&input.config_path));
    inputs
}

/// Pins the commits of repositories: those of the job keep their commit, new ones get the current one.
fn pin_revisions(
    spec: &mut JobSpec,
    commits: &BTreeMap<String, String>,
    local: &BTreeMap<String, PathBuf>,
    stored: &BTreeMap<String, ContentHash>,
) {
    let repositories = spec.repositories(|path| local.contains_key(path) || stored.contains_key(path));
    let named: Vec<String> = repositories.map(|input| input.config_path).collect();
    spec.revisions.retain(|repository, _| named.contains(repository));
    for repository in named {
        if let Some(commit) = commits.get(&repository) {
            spec.revisions.entry(repository).or_insert_with(|| commit.clone());
        }
    }
}

/// Counts the images of the copy; `None` if unknown. A stored file of prompts cannot be read here, but its number of
/// prompts follows from `generated`, the number of images of a job that was split into parts.
fn count_images(
    original: &JobSpec,
    copy: &JobSpec,
    generated: Option<u64>,
    prompts_here: impl Fn(&str) -> Option<usize>,
) -> Option<u64> {
    let images_for = |spec: &JobSpec, prompts: usize| spec.image_count(|_| Some(prompts));
    let stored = || {
        // prompts = images / images per prompt. With random prompts the number of images does not depend on the number of prompts.
        let images_per_prompt =
            images_for(original, 1).filter(|one| *one > 0 && images_for(original, 2) != Some(*one))?;
        usize::try_from(generated? / images_per_prompt).ok()
    };
    if images_for(copy, 1) == images_for(copy, 2) {
        return images_for(copy, 1);
    }
    copy.image_count(|file| prompts_here(file).or_else(stored))
}

/// Returns the number of images of a job that was split into parts: the end of its last part.
async fn images_in_parts(api: &Api, job: &JobView) -> Result<Option<u64>, Failure> {
    let Some(array) = job.array.as_ref().filter(|array| array.split) else {
        return Ok(None);
    };
    let last = JobId::new(format!("{}-{}", array.id, array.size.saturating_sub(1)));
    let last: Option<JobSpec> = serde_json::from_str(&api.submission(&last).await?.job_json).ok();
    Ok(last.and_then(|last| last.part).map(|part| part.to))
}

/// Replaces the coordinator's error about a missing input with one that names the job and what to do.
fn explain_missing_input(failure: Failure, job: &JobView) -> Failure {
    if failure.exit != Exit::Conflict || !failure.message.starts_with("inputs: ") {
        return failure;
    }
    Failure::new(
        failure.exit,
        format!("an input of {} is not stored any more: {}", job.id, failure.message),
    )
    .hint("`aitk submit CONFIG` sends the inputs again")
}

#[cfg(test)]
mod tests {
    use super::*;
    use aitk_common::job::{LoadOptions, parse};

    fn spec(prompts: &str) -> JobSpec {
        let text = format!(
            "job: generate\nconfig:\n  name: a\n  process:\n    - type: to_folder\n      output_folder: out\n      \
             model: {{name_or_path: org/model, arch: sd1}}\n      generate: {{{prompts}}}\n"
        );
        parse(&text, ConfigFormat::Yaml, None, &LoadOptions::default())
            .unwrap()
            .spec
    }

    #[test]
    fn images_are_counted_without_reading_the_prompts() {
        let nowhere = |_: &str| None;
        let count = |original: &JobSpec, copy: &JobSpec, generated| count_images(original, copy, generated, nowhere);
        let list = spec("prompts: [a, b], num_repeats: 3");
        assert_eq!(count(&list, &list, None), Some(6));
        let (file, twice) = (
            spec("prompts: p.txt, num_repeats: 2"),
            spec("prompts: p.txt, num_repeats: 4"),
        );
        assert_eq!(count(&file, &file, None), None);
        assert_eq!(
            (count(&file, &file, Some(20)), count(&file, &twice, Some(20))),
            (Some(20), Some(40))
        );
        let random = spec("prompts: p.txt, random_prompts: true, max_images: 7");
        assert_eq!(
            (count(&random, &random, None), count(&random, &file, Some(7))),
            (Some(7), None)
        );
        let local = count_images(&file, &spec("prompts: new.txt"), Some(20), |file| {
            (file == "new.txt").then_some(5)
        });
        assert_eq!(local, Some(5));
    }

    #[test]
    fn only_new_inputs_are_looked_up_on_this_machine() {
        let (original, copy) = (spec("prompts: p.txt"), spec("prompts: q.txt"));
        let stored = BTreeMap::from([("p.txt".to_owned(), ContentHash::of(b"p"))]);
        assert_eq!(new_inputs(&original, &original, &stored), []);
        let new = new_inputs(&original, &copy, &stored);
        assert_eq!(
            new.iter().map(|input| input.config_path.as_str()).collect::<Vec<_>>(),
            ["q.txt"]
        );
    }
}
