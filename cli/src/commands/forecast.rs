//! `explain` and `fit`: on which devices a job could run, and why not on others.

use crate::args::{ExplainArgs, FitArgs};
use crate::config::{self, ReadOptions};
use crate::context::Context;
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::output::Ui;
use crate::output::format::printable;
use crate::preflight::check_before_fit;
use crate::submission_data::{images, job_json, longest_prompt, parameter_counts};
use aitk_common::control_plane::{Forecast, Submission};
use aitk_common::job::LoadedJob;
use aitk_common::plan::image_batches::ImageBatch;
use std::collections::BTreeMap;
use std::path::Path;

pub(super) async fn explain(context: &Context, args: ExplainArgs) -> CommandResult {
    let ui = context.ui(true);
    let api = context.api().await?;
    let job = api.resolve(&args.job).await?;
    let forecast = api.explain(&job.id).await?;
    show(&ui, &forecast, args.json)?;
    Ok(Exit::Ok)
}

pub(super) async fn fit(context: &Context, args: FitArgs) -> CommandResult {
    let ui = context.ui(true);
    let changes = config::parse_changes(&args.set)?;
    let options = ReadOptions {
        name: args.name.as_deref(),
        changes: &changes,
        script: args.script,
        ..ReadOptions::default()
    };
    let loaded = config::read(&ui, &args.config, &context.directory, options)?;
    let batches = check_before_fit(&ui, &loaded, &context.directory).await?;
    let submission = submission(&loaded, &args.config, &context.directory, batches)?;
    let forecast = context.api().await?.fit(submission).await??;
    show(&ui, &forecast, args.json)?;
    Ok(if forecast.fits_somewhere() {
        Exit::Ok
    } else {
        Exit::NothingFits
    })
}

/// Builds the submission of a config for a forecast. The coordinator does not store it.
pub(super) fn submission(
    loaded: &LoadedJob,
    config: &Path,
    directory: &Path,
    image_batches: Vec<ImageBatch>,
) -> Result<Submission, Failure> {
    Ok(Submission {
        image_batches,
        parameter_counts: parameter_counts(loaded, directory),
        images: images(&loaded.spec, directory),
        longest_prompt: longest_prompt(&loaded.spec, directory),
        job_json: job_json(loaded, config)?,
        config_text: loaded.text.clone(),
        config_format: loaded.format.name().to_owned(),
        inputs: BTreeMap::new(),
        local: false,
        idempotency_key: None,
        owner: None,
    })
}

fn show(ui: &Ui, forecast: &Forecast, json: bool) -> Result<(), Failure> {
    if json {
        return ui.json(&serde_json::to_value(forecast).unwrap_or_default());
    }
    ui.text(&printable(&forecast.summary))?;
    for device in &forecast.devices {
        let mark = match (device.fits, device.can_start_now) {
            (_, true) => "+",
            (true, false) => "~",
            (false, false) => "-",
        };
        ui.text(&printable(&format!("{mark} {}", device.description)))?;
    }
    Ok(())
}
