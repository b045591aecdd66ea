//! `artifacts ls` and `artifacts get`.

use crate::args::{ArtifactsGetArgs, ArtifactsLsArgs};
use crate::context::Context;
use crate::download::{ExistingFile, check_existing, fetch, matches_pattern, target_path};
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::output::Format;
use crate::output::format::{plural, size};
use crate::views::artifacts_table;
use aitk_common::control_plane::{Artifact, JobView};
use aitk_common::hash::ContentHash;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};

pub(super) async fn ls(context: &Context, args: ArtifactsLsArgs) -> CommandResult {
    let ui = context.ui(true);
    let api = context.api().await?;
    let job = api.resolve(&args.job).await?;
    let all = api.artifacts(&job.id).await?;
    let none = all.is_empty();
    let artifacts: Vec<Artifact> = all
        .into_iter()
        .filter(|artifact| is_wanted(artifact, &args.names, &args.kinds))
        .collect();
    match Format::from_flags(args.json, args.quiet) {
        Format::Json => ui.json(&json!({ "job": job.id, "artifacts": artifacts }))?,
        Format::Quiet => {
            ui.data_lines(
                artifacts
                    .iter()
                    .map(|artifact| crate::output::format::printable(&artifact.name)),
            )?;
        }
        Format::Human => {
            ui.table(&artifacts_table(&artifacts))?;
            if none {
                ui.notice(&format!("no files yet; the job is {}", job.state));
            } else if artifacts.is_empty() {
                ui.notice("no file matches; without names and --kind all files are listed");
            }
        }
    }
    Ok(Exit::Ok)
}

/// A file to download.
struct Item {
    name: String,
    hash: ContentHash,
    bytes: u64,
    path: PathBuf,
    status: &'static str,
}

pub(super) async fn get(context: &Context, args: ArtifactsGetArgs) -> CommandResult {
    let ui = context.ui(args.no_progress);
    let api = context.api().await?;
    let job = api.resolve(&args.job).await?;
    let artifacts = api.artifacts(&job.id).await?;
    let folder = args.output.clone().unwrap_or_else(|| default_folder(&job, &artifacts));
    let selected = choose(artifacts, &args.names, &args.kinds)?;
    let mut items = Vec::new();
    for artifact in selected {
        let Some(hash) = artifact.hash else {
            let place = artifact
                .local_path
                .as_deref()
                .unwrap_or("in the folder that its config names");
            return Err(Failure::new(
                Exit::Conflict,
                format!("{} was written in place: {place}", artifact.name),
            )
            .hint("files of `aitk run` jobs are on this machine already"));
        };
        // Check every name before writing anything.
        let path = target_path(&folder, &artifact.name)?;
        items.push(Item {
            name: artifact.name,
            hash,
            bytes: artifact.bytes,
            path,
            status: "fetched",
        });
    }

    let total = items.iter().map(|item| item.bytes).sum();
    let mut indicator = ui.byte_progress("downloading", total);
    let mut done = 0_u64;
    let stopped = || {
        ui.notice("stopped; the same command continues with the missing files");
        Ok(Exit::Interrupted)
    };
    // One future for the whole loop: a new one would miss signals that arrived before it was created.
    let mut interrupted = pin!(tokio::signal::ctrl_c());
    for item in &mut items {
        indicator.set_message(item.name.rsplit('/').next().unwrap_or(&item.name));
        let (path, hash, bytes) = (item.path.clone(), item.hash, item.bytes);
        let check = tokio::task::spawn_blocking(move || check_existing(&path, hash, bytes));
        let Some(checked) = run_until_interrupted(interrupted.as_mut(), check).await else {
            drop(indicator);
            return stopped();
        };
        match checked.map_err(|error| Failure::failed(error.to_string()))?? {
            ExistingFile::Identical => {
                item.status = "present";
                done += item.bytes;
                indicator.set(done, total);
                continue;
            }
            ExistingFile::Different if !args.force => {
                return Err(Failure::new(
                    Exit::Conflict,
                    format!("{} exists already, with other content", item.path.display()),
                )
                .hint("--force replaces it; -o writes into another folder"));
            }
            ExistingFile::Different => item.status = "replaced",
            ExistingFile::Missing => {}
        }
        let progress = |more: i64| {
            done = done.saturating_add_signed(more);
            indicator.set(done, total);
        };
        let download = Box::pin(fetch(&api, item.hash, item.bytes, &item.path, progress));
        let Some(fetched) = run_until_interrupted(interrupted.as_mut(), download).await else {
            drop(indicator);
            return stopped();
        };
        fetched?;
    }
    drop(indicator);

    if args.json {
        let files: Vec<_> = items
            .iter()
            .map(|item| json!({ "name": item.name, "path": item.path, "bytes": item.bytes, "hash": item.hash, "status": item.status }))
            .collect();
        ui.json(&json!({ "job": job.id, "files": files }))?;
    } else {
        ui.data_lines(items.iter().map(|item| item.path.display().to_string()))?;
        let present = items.iter().filter(|item| item.status == "present").count();
        let fetched = items.len() - present;
        let skipped = if present > 0 {
            format!(", {present} existed already")
        } else {
            String::new()
        };
        let fetched = plural(fetched as u64, "file");
        ui.notice(&format!("{fetched} downloaded{skipped} ({})", size(total)));
    }
    Ok(Exit::Ok)
}

/// Returns the output of `work`. `None`: it is dropped, because `interrupted` was complete before it.
async fn run_until_interrupted<T>(interrupted: Pin<&mut impl Future>, work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        _ = interrupted => None,
        output = work => Some(output),
    }
}

/// Returns the output folder when `-o` is not given: a folder with the job's name. If all names start with that folder
/// already, as those of a training do, it is the current folder.
fn default_folder(job: &JobView, artifacts: &[Artifact]) -> PathBuf {
    let folder = folder_of_job(job);
    let inside = |artifact: &Artifact| Path::new(&artifact.name).starts_with(&folder) && artifact.name.contains('/');
    if !artifacts.is_empty() && artifacts.iter().all(inside) {
        PathBuf::new()
    } else {
        folder
    }
}

/// Returns the job's name as a folder, or its id if the name is not valid for a folder.
fn folder_of_job(job: &JobView) -> PathBuf {
    let name = Path::new(&job.name);
    let plain = name.components().count() == 1 && name.file_name() == Some(name.as_os_str());
    if plain && !job.name.contains(['\\', ':']) && !job.name.chars().any(char::is_control) {
        name.to_owned()
    } else {
        PathBuf::from(job.id.as_str())
    }
}

/// Returns the artifacts that match the names and kinds; without any, all.
fn choose(artifacts: Vec<Artifact>, names: &[String], kinds: &[String]) -> Result<Vec<Artifact>, Failure> {
    for wanted in names {
        if !artifacts.iter().any(|artifact| matches_pattern(&artifact.name, wanted)) {
            return Err(
                Failure::not_found(format!("the job has no file that matches '{wanted}'"))
                    .hint("`aitk artifacts ls JOB` lists its files"),
            );
        }
    }
    if artifacts.is_empty() {
        return Err(Failure::not_found("the job has no files yet"));
    }
    let selected: Vec<Artifact> = artifacts
        .into_iter()
        .filter(|artifact| is_wanted(artifact, names, kinds))
        .collect();
    if selected.is_empty() {
        let kinds = kinds.join(" or ");
        let message = match names {
            [] => format!("the job has no file of kind {kinds}"),
            // Each name matches a file, as checked above.
            _ => format!("the files that match the names are not of kind {kinds}"),
        };
        return Err(Failure::not_found(message).hint("`aitk artifacts ls JOB` lists its files"));
    }
    Ok(selected)
}

/// Whether an artifact matches one of the names and one of the kinds. An empty list matches all.
fn is_wanted(artifact: &Artifact, names: &[String], kinds: &[String]) -> bool {
    (names.is_empty() || names.iter().any(|wanted| matches_pattern(&artifact.name, wanted)))
        && (kinds.is_empty() || kinds.contains(&artifact.kind))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::tests::job;
    use aitk_common::control_plane::JobState;

    fn artifact(name: &str, kind: &str) -> Artifact {
        Artifact {
            name: name.to_owned(),
            kind: kind.to_owned(),
            hash: None,
            bytes: 1,
            step: None,
            index: None,
            local_path: None,
        }
    }

    /// A signal that came between two files stops the next one, also if that has nothing to wait for.
    #[tokio::test]
    async fn an_interruption_between_two_files_is_noticed() {
        let (send, receive) = tokio::sync::oneshot::channel();
        let mut interrupted = pin!(receive);
        assert_eq!(run_until_interrupted(interrupted.as_mut(), async { 1 }).await, Some(1));
        send.send(()).unwrap();
        assert_eq!(run_until_interrupted(interrupted.as_mut(), async { 2 }).await, None);
    }

    #[test]
    fn the_message_says_whether_the_names_or_the_kinds_match_no_file() {
        let artifacts = || vec![artifact("a.png", "image"), artifact("a.safetensors", "lora")];
        let message = |names: &[&str], kinds: &[&str]| {
            let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
            choose(artifacts(), &owned(names), &owned(kinds)).unwrap_err().message
        };
        assert_eq!(message(&[], &["text"]), "the job has no file of kind text");
        assert_eq!(
            message(&["*.gif"], &["lora"]),
            "the job has no file that matches '*.gif'"
        );
        // There is a LoRA, and there are PNGs.
        assert_eq!(
            message(&["*.png"], &["lora"]),
            "the files that match the names are not of kind lora"
        );
    }

    #[test]
    fn the_default_folder_has_the_jobs_name_and_is_in_the_current_folder() {
        let folder = |name: &str| folder_of_job(&job("j1", name, JobState::Completed, 0));
        assert_eq!(folder("my lora"), Path::new("my lora"));
        for name in ["", ".", "..", "/etc", "a/b", "../a", "a\\b", "c:", "a\n"] {
            assert_eq!(folder(name), Path::new("j1"), "{name}");
        }
        let default = |names: &[&str]| {
            let artifacts: Vec<Artifact> = names.iter().map(|name| artifact(name, "lora")).collect();
            default_folder(&job("j1", "cat", JobState::Completed, 0), &artifacts)
        };
        assert_eq!(default(&["cat/cat.safetensors", "cat/samples/1.png"]), Path::new(""));
        for others in [&[][..], &["cat"], &["cat/a", "b"], &["cats/a"], &["cat/a", "../b"]] {
            assert_eq!(default(others), Path::new("cat"), "{others:?}");
        }
    }
}
