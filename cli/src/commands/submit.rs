//! `submit`: check here, send what is missing, hand over.

use super::{Context, env};
use crate::api::Api;
use crate::args::SubmitArgs;
use crate::config;
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::follow::{LogsTo, Renderer, follow_to_end};
use crate::output::format::{printable, size};
use crate::output::{Format, Ui};
use crate::paths::expand;
use crate::upload::{Staged, Upload, stage};
use aitk_common::control::{Submission, Submitted};
use aitk_common::id::UserName;
use aitk_common::job::{Input, InputKind, LoadedJob};
use aitk_common::plan::anatomy::Anatomy;
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{BufRead, IsTerminal};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Above this a person is asked first.
const LARGE: u64 = 10 << 30;
/// How often a submission is sent again when the connection breaks; the key makes that safe.
const TRIES: u32 = 5;

pub(super) async fn submit(context: &Context, args: SubmitArgs) -> CommandResult {
    let ui = context.ui(args.no_progress);
    let mut loaded = config::read(&ui, &args.config, args.name.as_deref(), &context.directory)?;
    if let Some(priority) = args.priority {
        loaded.spec.cluster.priority = i64::from(priority);
    }
    let inputs = local_inputs(&ui, context, &loaded)?;
    let owner = owner(args.user.as_deref())?;
    let anatomy = anatomy(&loaded, &context.directory);
    let api = context.api().await?;

    let staged = stage(&ui, &inputs).await?;
    let upload = Upload::plan(&api, &ui, staged).await?;
    if upload.missing_bytes() > LARGE && !args.yes {
        ask(&ui, upload.missing_bytes())?;
    }
    let sent = tokio::select! {
        sent = Box::pin(upload.send(&api, &ui)) => sent?,
        _ = tokio::signal::ctrl_c() => {
            ui.notice("stopped; nothing was submitted, and what was sent is not sent again next time");
            return Ok(Exit::Interrupted);
        }
    };
    if !args.json {
        say_sent(&ui, &sent);
    }

    let job_json = serde_json::to_string(&loaded.spec)
        .map_err(|error| Failure::failed(format!("{}: cannot be sent: {error}", args.config.display())))?;
    let submission = Submission {
        config_text: loaded.text,
        config_format: loaded.format.name().to_owned(),
        job_json,
        inputs: sent
            .iter()
            .map(|staged| (staged.config_path.clone(), staged.snapshot))
            .collect(),
        local: false,
        idempotency_key: Some(args.idempotency_key.unwrap_or_else(|| uuid::Uuid::new_v4().to_string())),
        owner,
        anatomy,
    };
    let submitted = hand_over(&api, &ui, submission).await?;
    if submitted.existed {
        ui.notice("this key was submitted before; here is that job");
    }
    if args.json {
        let sent: Vec<_> = sent.iter().map(staged_json).collect();
        let line = json!({ "id": submitted.job, "name": submitted.name, "existed": submitted.existed, "inputs": sent });
        if args.follow {
            ui.json_line(&line)?
        } else {
            ui.json(&line)?
        }
    } else {
        ui.data(submitted.job.as_str())?;
    }
    if !args.follow {
        if ui.has_bars() {
            ui.hint(&format!("follow it with: aitk watch {}", submitted.job));
        }
        return Ok(Exit::Ok);
    }
    let job = api.get(submitted.job.as_str()).await?;
    let format = if args.json { Format::Json } else { Format::Human };
    // Standard output holds the id, for `id=$(aitk submit -f …)`.
    let mut renderer = Renderer::new(&ui, &job, format, LogsTo::Stderr);
    follow_to_end(&api, &ui, job, 0, &mut renderer).await
}

/// Whose job it is: as the flag says, else the environment, else the coordinator's default.
fn owner(flag: Option<&str>) -> Result<Option<UserName>, Failure> {
    let (text, from) = match (flag, env("AITK_USER")) {
        (Some(name), _) => (name.to_owned(), "--user"),
        (None, Some(name)) if !name.is_empty() => (name, "AITK_USER"),
        (None, _) => return Ok(None),
    };
    let name = UserName::parse(&text).map_err(|_| {
        Failure::usage(format!(
            "{from}: '{}' is no name: expected 1 to 64 letters, digits, '-' or '_'",
            printable(&text)
        ))
    })?;
    Ok(Some(name))
}

/// What the job's first model consists of, when it lies here.
pub(super) fn anatomy(loaded: &LoadedJob, directory: &Path) -> Option<Anatomy> {
    let inputs = loaded.spec.inputs();
    let model = inputs.iter().find(|input| input.kind == InputKind::Model)?;
    Anatomy::read(&expand(&model.config_path, directory, &env))
}

fn staged_json(staged: &Staged) -> serde_json::Value {
    json!({
        "path": staged.config_path,
        "snapshot": staged.snapshot,
        "files": staged.files,
        "bytes": staged.bytes,
        "sent_bytes": staged.sent_bytes,
    })
}

fn say_sent(ui: &Ui, sent: &[Staged]) {
    for staged in sent {
        let what = format!("{}: {} files, {}", staged.config_path, staged.files, size(staged.bytes));
        let how = match staged.sent_bytes {
            0 => "already there, nothing sent".to_owned(),
            sent if sent == staged.bytes => "sent".to_owned(),
            sent => format!("{} sent, the rest was already there", size(sent)),
        };
        ui.notice(&printable(&format!("{what}; {how}")));
    }
}

/// What the config names and this machine has. What it does not have is an error with its place.
fn local_inputs(ui: &Ui, context: &Context, loaded: &LoadedJob) -> Result<BTreeMap<String, PathBuf>, Failure> {
    let mut found = BTreeMap::new();
    let (mut missing, mut missing_model) = (Vec::new(), false);
    for Input { config_path, key, kind } in loaded.spec.inputs() {
        let path = expand(&config_path, &context.directory, &env);
        if config_path.is_empty() {
            continue;
        }
        let model = matches!(kind, InputKind::Model | InputKind::Vae);
        if model && !path.exists() && is_repository(&config_path) {
            ui.notice(&printable(&format!(
                "{config_path} is not here: the worker fetches it from Hugging Face"
            )));
            continue;
        }
        if path.exists() {
            found.insert(config_path, path);
        } else {
            let message = format!("no file or folder '{config_path}' here");
            missing.push(loaded.spec.finding(key, message).to_string());
            missing_model |= model;
        }
    }
    if missing.is_empty() {
        return Ok(found);
    }
    missing.dedup();
    let lines: Vec<String> = missing.iter().map(|line| printable(line)).collect();
    let failure =
        Failure::not_found(lines.join("\n")).hint("paths are taken from the folder in which the command runs");
    Err(if missing_model {
        failure.hint("a model may also be the name of a Hugging Face repository, ORG/NAME")
    } else {
        failure
    })
}

/// Whether this is `ORG/NAME`, which the worker fetches from Hugging Face.
fn is_repository(text: &str) -> bool {
    let part = |part: &str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        !part.is_empty() && !part.starts_with('.') && part.chars().all(plain)
    };
    let file = [".safetensors", ".ckpt", ".json", ".txt"]
        .iter()
        .any(|ending| text.ends_with(ending));
    !file && text.split_once('/').is_some_and(|(org, name)| part(org) && part(name))
}

fn ask(ui: &Ui, bytes: u64) -> Result<(), Failure> {
    let question = format!("{} have to be sent", size(bytes));
    if !std::io::stdin().is_terminal() {
        return Err(Failure::usage(format!("{question}, and nobody is there to agree")).hint("-y agrees beforehand"));
    }
    ui.notice(&format!("{question}; go on? [y/N]"));
    let mut answer = String::new();
    let read = std::io::stdin().lock().read_line(&mut answer);
    match read {
        Ok(_) if matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes") => Ok(()),
        _ => Err(Failure::failed("not submitted")),
    }
}

async fn hand_over(api: &Api, ui: &Ui, submission: Submission) -> Result<Submitted, Failure> {
    let mut pause = Duration::from_millis(500);
    for _ in 1..TRIES {
        match api.submit(submission.clone()).await {
            Err(failure) if failure.exit == Exit::Unreachable => {
                ui.warn(&format!("{failure}; trying again"));
                tokio::time::sleep(pause).await;
                pause *= 2;
            }
            other => return other,
        }
    }
    api.submit(submission).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_org_and_name_is_a_repository() {
        assert!(is_repository("stable-diffusion-v1-5/stable-diffusion-v1-5"));
        for path in [
            "models",
            "./a",
            "../a",
            "/a/b",
            "a/b/c",
            "a/",
            "~/a",
            "a b/c",
            "a/b.safetensors",
            "",
        ] {
            assert!(!is_repository(path), "{path}");
        }
    }
}
