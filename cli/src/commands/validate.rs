//! `validate`: checks a config before it is sent or run.

use super::forecast::submission;
use crate::args::ValidateArgs;
use crate::config::{self, ReadOptions, read_with_warnings};
use crate::context::Context;
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::output::Ui;
use crate::preflight::Report;
use aitk_common::control_plane::Forecast;
use aitk_common::job::LoadedJob;
use aitk_common::plan::image_batches::ImageBatch;
use serde_json::json;
use std::path::Path;

pub(super) async fn validate(context: &Context, args: ValidateArgs) -> CommandResult {
    let ui = context.ui(true);
    let changes = config::parse_changes(&args.set)?;
    let options = ReadOptions {
        name: args.name.as_deref(),
        changes: &changes,
        script: args.script,
        ..ReadOptions::default()
    };
    let (loaded, warnings) = match read_with_warnings(&args.config, &context.directory, options) {
        Ok(read) => read,
        Err(failure) if args.json => {
            ui.json(&json!({ "ok": false, "problems": failure.message.lines().collect::<Vec<_>>() }))?;
            return Ok(failure.exit);
        }
        Err(failure) => return Err(failure),
    };
    show(context, &ui, &args.config, &loaded, warnings, args.json).await
}

/// Shows the report of a config. The exit code is 1 when a problem would make the job fail.
pub(super) async fn show(
    context: &Context,
    ui: &Ui,
    config: &Path,
    loaded: &LoadedJob,
    warnings: Vec<String>,
    json: bool,
) -> CommandResult {
    let mut report = Report::new(loaded, warnings, &context.directory).await;
    // A job with problems runs nowhere, so the coordinator is not asked.
    if report.problems().is_empty() {
        match forecast(context, config, loaded, report.image_batches()).await {
            Ok(Ok(forecast)) => report.forecast = Some(forecast),
            // The coordinator would refuse the submission with the same message.
            Ok(Err(refusal)) => report.coordinator_refusal = Some(first_line(&refusal)),
            Err(failure) => {
                let why = first_line(&failure);
                report.unchecked.push(format!("where it could run: {why}"));
            }
        }
    }
    let problems = report.problems();
    if json {
        let mut document = json!({ "ok": problems.is_empty(), "problems": problems });
        if let (Some(fields), Ok(serde_json::Value::Object(more))) =
            (document.as_object_mut(), serde_json::to_value(&report))
        {
            fields.extend(more);
        }
        ui.json(&document)?;
    } else {
        ui.data_lines(report.text(&config.display().to_string(), ui.width()))?;
    }
    Ok(if problems.is_empty() { Exit::Ok } else { Exit::Failed })
}

/// Where the job could run. The inner error: the coordinator would refuse it.
async fn forecast(
    context: &Context,
    config: &Path,
    loaded: &LoadedJob,
    batches: Vec<ImageBatch>,
) -> Result<Result<Forecast, Failure>, Failure> {
    let api = context.api().await?;
    api.fit(submission(loaded, config, &context.directory, batches)?).await
}

fn first_line(failure: &Failure) -> String {
    failure.message.lines().next().unwrap_or_default().to_owned()
}
