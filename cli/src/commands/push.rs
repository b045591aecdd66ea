//! `push`: uploads a run folder to Hugging Face.

use crate::args::PushArgs;
use crate::context::{Context, env};
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::hub_push::{Push, hub};
use crate::output::format::{printable, size};
use crate::output::{Column, Table, Ui};
use crate::paths::expand;
use serde_json::json;

pub(super) async fn push(context: &Context, args: PushArgs) -> CommandResult {
    let ui = context.ui(args.no_progress || args.json);
    let folder = expand(&args.folder, &context.directory, &env);
    if !folder.is_dir() {
        return Err(Failure::not_found(format!("{}: no such folder", folder.display()))
            .hint("name the run folder of a training; `aitk artifacts get JOB` downloads that of a job"));
    }
    let push = Push {
        folder,
        repo: args.repo.clone(),
        private: args.private,
    };
    let plan = push.plan(&ui, &context.directory)?;
    if args.dry_run {
        return show(&ui, &plan.files(), args.json);
    }
    // Before anything is read or sent.
    hub(&context.directory)?;
    let pushed = plan.upload(&ui, &context.directory, &args.message).await?;
    if args.json {
        ui.json(&json!({"repo": args.repo, "url": pushed.page, "files": plan.files().len(), "sent_bytes": pushed.sent_bytes}))?;
    } else {
        ui.data(&pushed.page)?;
    }
    Ok(Exit::Ok)
}

fn show(ui: &Ui, files: &[(&str, u64)], as_json: bool) -> CommandResult {
    if as_json {
        let listed: Vec<_> = files
            .iter()
            .map(|(name, bytes)| json!({"name": name, "bytes": bytes}))
            .collect();
        ui.json(&json!({ "files": listed }))?;
        return Ok(Exit::Ok);
    }
    let mut table = Table::new(&[Column::text("FILE", 20), Column::number("SIZE")]);
    for (name, bytes) in files {
        table.row([printable(name), size(*bytes)]);
    }
    ui.table(&table)?;
    ui.notice("nothing was uploaded");
    Ok(Exit::Ok)
}
