//! `clone`: submit a copy of a job, with its inputs as they are stored.

use super::submit::{follow_submitted, hand_over, local_inputs, owner, say_sent, send_inputs};
use crate::api::Api;
use crate::args::CloneArgs;
use crate::config::{self, refuse_special_files};
use crate::context::Context;
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::job_file::{anatomy, job_json, prompts_in};
use crate::members::is_array;
use crate::notify::Notify;
use crate::output::format::printable;
use crate::output::{Format, Ui};
use crate::preflight;
use crate::trace::Submitting;
use aitk_common::control::{JobView, Submission};
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
    let changes = changes(&args)?;
    let owner = owner(args.user.as_deref())?;
    let api = context.api().await?;
    let job = api.resolve(&args.job).await?;
    refuse_what_is_no_single_job(&job)?;
    let stored = api.submission(&job.id).await?;
    if stored.local {
        return Err(Failure::new(
            Exit::Conflict,
            format!("{} ran in place: its inputs were never stored", job.id),
        )
        .hint("`aitk submit CONFIG` submits its config"));
    }

    let (before, mut loaded) = changed(&ui, &job, &stored, &changes)?;
    if let Some(priority) = args.priority {
        loaded.spec.cluster.priority = i64::from(priority);
    }
    let new = new_inputs(&before, &loaded.spec, &stored.inputs);
    refuse_special_files(&loaded.spec, &new, &context.directory)?;
    let here = local_inputs(&ui, context, &loaded.spec, new.clone())?;
    let is_new = |input: &Input| new.iter().any(|new| new.config_path == input.config_path);
    let commits = preflight::check_some(&ui, &loaded.spec, &context.directory, is_new).await?;
    pin(&mut loaded.spec, &commits, &here, &stored.inputs);
    let prompts_here = |file: &str| prompts_in(file, &context.directory).filter(|_| here.contains_key(file));
    let drawn = drawn_in_parts(&api, &job).await?;
    let images = count_images(&before, &loaded.spec, drawn, prompts_here);
    if loaded.spec.cluster.split.is_some() && images.is_none() {
        loaded.spec.cluster.split = None;
        ui.notice("the copy is not cut into parts: how many prompts its file holds is not known here");
    }
    let json = job_json(&loaded, Path::new(&format!("the copy of {}", job.id)))?;

    let trace = Submitting::begin();
    let api = api.part_of(trace.context());
    let Some(sent) = send_inputs(&api, &ui, &trace, &here, args.yes).await? else {
        return Ok(Exit::Interrupted);
    };
    if !args.json {
        say_sent(&ui, &sent);
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
        anatomy: anatomy(&loaded, &context.directory),
        config_text: stored.config_text,
        config_format: stored.config_format,
        job_json: json,
        inputs,
        local: false,
        idempotency_key: Some(uuid::Uuid::new_v4().to_string()),
        owner,
    };
    let submitted = hand_over(&api, &ui, |api| {
        let submission = submission.clone();
        async move { api.submit(submission).await }
    });
    let submitted = submitted.await.map_err(|failure| gone(failure, &job))?;
    trace.submitted(&submitted.job);
    let copy = api.get(submitted.job.as_str()).await?;
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

/// What the flags change.
fn changes(args: &CloneArgs) -> Result<Vec<Change>, Failure> {
    let mut changes = config::changes(&args.set)?;
    if let Some(name) = &args.name {
        changes.push(Change {
            key: "config.name".to_owned(),
            value: format!("'{name}'"),
        });
    }
    Ok(changes)
}

/// A part of a job that was cut into parts stands for the whole job; the members of other arrays are jobs.
fn refuse_what_is_no_single_job(job: &JobView) -> Result<(), Failure> {
    let Some(array) = job.array.as_ref().filter(|array| is_array(job) && !array.split) else {
        return Ok(());
    };
    Err(Failure::new(
        Exit::Conflict,
        format!(
            "{} is an array of {} jobs: one job at a time is copied",
            job.id, array.size
        ),
    )
    .hint(format!("`aitk clone {}-0` copies its first member", job.id))
    .hint("`aitk submit CONFIG --sweep …` submits such an array"))
}

/// The job as it was stored, and the copy.
fn changed(ui: &Ui, job: &JobView, stored: &Submission, changes: &[Change]) -> Result<(JobSpec, LoadedJob), Failure> {
    let unfit = |error: &dyn std::fmt::Display| {
        let lines: Vec<String> = error.to_string().lines().map(printable).collect();
        Failure::failed(format!("{} cannot be copied: {}", job.id, lines.join("\n")))
    };
    let before: JobSpec = serde_json::from_str(&stored.job_json).map_err(|error| {
        unfit(&error).hint("another version of aitk took it in; `aitk submit CONFIG` submits its config")
    })?;
    let format = ConfigFormat::from_name(&stored.config_format).unwrap_or(ConfigFormat::Yaml);
    let (spec, warnings) = before.with_changes(changes).map_err(|error| unfit(&error))?;
    let support = spec.unsupported();
    if !support.errors.is_empty() {
        let lines: Vec<String> = support.errors.iter().map(ToString::to_string).collect();
        return Err(unfit(&lines.join("\n")));
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
    Ok((before, loaded))
}

/// What the copy reads and the job did not. Only that may be looked for on this machine: what the job read from a repository
/// is not the folder of the same name that happens to lie here.
fn new_inputs(before: &JobSpec, copy: &JobSpec, stored: &BTreeMap<String, ContentHash>) -> Vec<Input> {
    let known: BTreeSet<String> = before.inputs().into_iter().map(|input| input.config_path).collect();
    let mut inputs = copy.inputs();
    inputs.retain(|input| !known.contains(&input.config_path) && !stored.contains_key(&input.config_path));
    inputs
}

/// Every attempt works with the models as they were for the job, and with new ones as they are now.
fn pin(
    spec: &mut JobSpec,
    commits: &BTreeMap<String, String>,
    here: &BTreeMap<String, PathBuf>,
    stored: &BTreeMap<String, ContentHash>,
) {
    let repositories = spec.repositories(|path| here.contains_key(path) || stored.contains_key(path));
    let named: Vec<String> = repositories.map(|input| input.config_path).collect();
    spec.revisions.retain(|repository, _| named.contains(repository));
    for repository in named {
        if let Some(commit) = commits.get(&repository) {
            spec.revisions.entry(repository).or_insert_with(|| commit.clone());
        }
    }
}

/// How many images the copy draws. A file of prompts that is stored cannot be read here; what the parts say that the job was
/// cut into tells how many there are. None: not known.
fn count_images(
    before: &JobSpec,
    copy: &JobSpec,
    drawn: Option<u64>,
    prompts_here: impl Fn(&str) -> Option<usize>,
) -> Option<u64> {
    let drawn_from = |spec: &JobSpec, prompts: usize| spec.image_count(|_| Some(prompts));
    let stored = || {
        // Where prompts are drawn at random, their number says nothing.
        let of_one = drawn_from(before, 1).filter(|one| *one > 0 && drawn_from(before, 2) != Some(*one))?;
        usize::try_from(drawn? / of_one).ok()
    };
    if drawn_from(copy, 1) == drawn_from(copy, 2) {
        return drawn_from(copy, 1);
    }
    copy.image_count(|file| prompts_here(file).or_else(stored))
}

/// How many images a job drew that was cut into parts: the last part ends with the last of them.
async fn drawn_in_parts(api: &Api, job: &JobView) -> Result<Option<u64>, Failure> {
    let Some(array) = job.array.as_ref().filter(|array| array.split) else {
        return Ok(None);
    };
    let last = JobId::new(format!("{}-{}", array.id, array.size.saturating_sub(1)));
    let last: Option<JobSpec> = serde_json::from_str(&api.submission(&last).await?.job_json).ok();
    Ok(last.and_then(|last| last.part).map(|part| part.to))
}

/// A refusal because of an input, in the words of this command.
fn gone(failure: Failure, job: &JobView) -> Failure {
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
    fn images_are_counted_also_where_their_prompts_cannot_be_read() {
        let nowhere = |_: &str| None;
        let count = |before: &JobSpec, copy: &JobSpec, drawn| count_images(before, copy, drawn, nowhere);
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
        let here = count_images(&file, &spec("prompts: new.txt"), Some(20), |file| {
            (file == "new.txt").then_some(5)
        });
        assert_eq!(here, Some(5));
    }

    #[test]
    fn only_what_the_job_did_not_read_is_looked_for_here() {
        let (before, copy) = (spec("prompts: p.txt"), spec("prompts: q.txt"));
        let stored = BTreeMap::from([("p.txt".to_owned(), ContentHash::of(b"p"))]);
        assert_eq!(new_inputs(&before, &before, &stored), []);
        let new = new_inputs(&before, &copy, &stored);
        assert_eq!(
            new.iter().map(|input| input.config_path.as_str()).collect::<Vec<_>>(),
            ["q.txt"]
        );
    }
}
