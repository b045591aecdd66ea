//! `explain` and `fit`: where a job could run, and why not elsewhere.

use super::Context;
use super::submit::{anatomy, job_json, pictures};
use crate::args::{ExplainArgs, FitArgs};
use crate::config;
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::output::Ui;
use crate::output::format::printable;
use aitk_common::control::{Forecast, Submission};
use std::collections::BTreeMap;

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
    let changes = config::changes(&args.set)?;
    let loaded = config::read(&ui, &args.config, args.name.as_deref(), &changes, &context.directory)?;
    let job_json = job_json(&loaded, &args.config)?;
    let submission = Submission {
        anatomy: anatomy(&loaded, &context.directory),
        pictures: pictures(&loaded.spec, &context.directory),
        config_text: loaded.text,
        config_format: loaded.format.name().to_owned(),
        job_json,
        inputs: BTreeMap::new(),
        local: false,
        idempotency_key: None,
        owner: None,
    };
    let forecast = context.api().await?.fit(submission).await?;
    show(&ui, &forecast, args.json)?;
    Ok(if forecast.fits_somewhere() {
        Exit::Ok
    } else {
        Exit::NothingFits
    })
}

fn show(ui: &Ui, forecast: &Forecast, json: bool) -> Result<(), Failure> {
    if json {
        return ui.json(&serde_json::to_value(forecast).unwrap_or_default());
    }
    ui.data(&printable(&forecast.summary))?;
    for device in &forecast.devices {
        let mark = match (device.fits, device.ready) {
            (_, true) => "+",
            (true, false) => "~",
            (false, false) => "-",
        };
        ui.data(&printable(&format!("{mark} {}", device.words)))?;
    }
    Ok(())
}
