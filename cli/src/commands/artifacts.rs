//! `artifacts ls` and `artifacts get`.

use crate::args::{ArtifactsGetArgs, ArtifactsLsArgs};
use crate::context::Context;
use crate::download::{Present, fetch, is_chosen, present, target};
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::output::Format;
use crate::output::format::size;
use crate::views::artifacts_table;
use aitk_common::control::{Artifact, JobView};
use aitk_common::hash::ContentHash;
use serde_json::json;
use std::path::{Path, PathBuf};

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
                ui.notice(&format!("nothing yet; the job is {}", job.state));
            } else if artifacts.is_empty() {
                ui.notice("nothing is like that; without names and --kind all of it is listed");
            }
        }
    }
    Ok(Exit::Ok)
}

/// One file to be fetched.
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
    let made = api.artifacts(&job.id).await?;
    let folder = args.output.clone().unwrap_or_else(|| usual_folder(&job, &made));
    let chosen = choose(made, &args.names, &args.kinds)?;
    let mut items = Vec::new();
    for artifact in chosen {
        let Some(hash) = artifact.hash else {
            let place = artifact.local_path.as_deref().unwrap_or("where its config says");
            return Err(Failure::new(
                Exit::Conflict,
                format!("{} was written in place: {place}", artifact.name),
            )
            .hint("jobs of `aitk run` leave their files there; nothing has to be fetched"));
        };
        // Every name is checked before anything is written.
        let path = target(&folder, &artifact.name)?;
        items.push(Item {
            name: artifact.name,
            hash,
            bytes: artifact.bytes,
            path,
            status: "fetched",
        });
    }

    let total = items.iter().map(|item| item.bytes).sum();
    let mut wait = ui.bytes("fetching", total);
    let mut done = 0_u64;
    for item in &mut items {
        wait.say(item.name.rsplit('/').next().unwrap_or(&item.name));
        match present(&item.path, item.hash, item.bytes)? {
            Present::Same => {
                item.status = "present";
                done += item.bytes;
                wait.set(done, total);
                continue;
            }
            Present::Other if !args.force => {
                return Err(Failure::new(
                    Exit::Conflict,
                    format!("{} is there already, with another content", item.path.display()),
                )
                .hint("--force replaces it; or choose another folder with -o"));
            }
            Present::Other => item.status = "replaced",
            Present::No => {}
        }
        let progress = |more: i64| {
            done = done.saturating_add_signed(more);
            wait.set(done, total);
        };
        tokio::select! {
            fetched = Box::pin(fetch(&api, item.hash, item.bytes, &item.path, progress)) => fetched?,
            _ = tokio::signal::ctrl_c() => {
                drop(wait);
                ui.notice("stopped; the same command goes on with what is missing");
                return Ok(Exit::Interrupted);
            }
        }
    }
    drop(wait);

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
        let kept = if present > 0 {
            format!(", {present} were there already")
        } else {
            String::new()
        };
        ui.notice(&format!("{fetched} files fetched{kept} ({})", size(total)));
    }
    Ok(Exit::Ok)
}

/// Where files go that are not told where: into a folder here with the job's name. Where all of them lie in such a folder
/// already, as those of a training do, they are not put into another one.
fn usual_folder(job: &JobView, made: &[Artifact]) -> PathBuf {
    let folder = folder_of_job(job);
    let inside = |artifact: &Artifact| Path::new(&artifact.name).starts_with(&folder) && artifact.name.contains('/');
    if !made.is_empty() && made.iter().all(inside) {
        PathBuf::new()
    } else {
        folder
    }
}

/// A folder here with the job's name; its id where the name is none of a folder.
fn folder_of_job(job: &JobView) -> PathBuf {
    let name = Path::new(&job.name);
    let plain = name.components().count() == 1 && name.file_name() == Some(name.as_os_str());
    if plain && !job.name.contains(['\\', ':']) && !job.name.chars().any(char::is_control) {
        name.to_owned()
    } else {
        PathBuf::from(job.id.as_str())
    }
}

/// Those that are asked for; all without names.
fn choose(artifacts: Vec<Artifact>, names: &[String], kinds: &[String]) -> Result<Vec<Artifact>, Failure> {
    for wanted in names {
        if !artifacts.iter().any(|artifact| is_chosen(&artifact.name, wanted)) {
            return Err(
                Failure::not_found(format!("the job made nothing that is called '{wanted}'"))
                    .hint("`aitk artifacts ls JOB` lists what there is"),
            );
        }
    }
    if artifacts.is_empty() {
        return Err(Failure::not_found("the job has made nothing yet"));
    }
    let chosen: Vec<Artifact> = artifacts
        .into_iter()
        .filter(|artifact| is_wanted(artifact, names, kinds))
        .collect();
    if chosen.is_empty() {
        return Err(
            Failure::not_found(format!("the job made nothing of the kind {}", kinds.join(" or ")))
                .hint("`aitk artifacts ls JOB` lists what there is"),
        );
    }
    Ok(chosen)
}

/// Whether it has one of the names and is of one of the kinds. None of them: any.
fn is_wanted(artifact: &Artifact, names: &[String], kinds: &[String]) -> bool {
    (names.is_empty() || names.iter().any(|wanted| is_chosen(&artifact.name, wanted)))
        && (kinds.is_empty() || kinds.contains(&artifact.kind))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::tests::job;
    use aitk_common::control::JobState;

    #[test]
    fn files_go_into_a_folder_with_the_jobs_name_here_and_nowhere_else() {
        let folder = |name: &str| folder_of_job(&job("j1", name, JobState::Completed, 0));
        assert_eq!(folder("my lora"), Path::new("my lora"));
        for name in ["", ".", "..", "/etc", "a/b", "../a", "a\\b", "c:", "a\n"] {
            assert_eq!(folder(name), Path::new("j1"), "{name}");
        }
        let usual = |names: &[&str]| {
            let made: Vec<Artifact> = names
                .iter()
                .map(|name| Artifact {
                    name: (*name).to_owned(),
                    kind: "lora".to_owned(),
                    hash: None,
                    bytes: 1,
                    step: None,
                    index: None,
                    local_path: None,
                })
                .collect();
            usual_folder(&job("j1", "cat", JobState::Completed, 0), &made)
        };
        assert_eq!(usual(&["cat/cat.safetensors", "cat/samples/1.png"]), Path::new(""));
        for others in [&[][..], &["cat"], &["cat/a", "b"], &["cats/a"], &["cat/a", "../b"]] {
            assert_eq!(usual(others), Path::new("cat"), "{others:?}");
        }
    }
}
