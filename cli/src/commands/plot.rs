//! `plot`: shows the loss curve in the terminal or writes it as an image.

use crate::args::PlotArgs;
use crate::chart::{Style, chart};
use crate::context::Context;
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::members::is_array;
use crate::output::format::{number, printable};
use crate::run_folder;
use aitk_common::control_plane::EventBody;
use aitk_common::fsutil;
use aitk_common::plot::Curve;
use futures::StreamExt;
use serde_json::json;
use std::collections::BTreeMap;
use std::io::Write;

pub(super) async fn plot(context: &Context, args: PlotArgs) -> CommandResult {
    let ui = context.ui(true);
    let names: Vec<&str> = match args.metric.as_deref() {
        // The learning rate has another name in a job's events.
        Some("lr") => vec!["lr", "learning_rate"],
        Some(name) => vec![name],
        None => vec!["loss", "loss/loss"],
    };
    let value = |values: &BTreeMap<String, f64>| names.iter().find_map(|name| values.get(*name)).copied();
    let curve = match run_folder::run_folder(&args.job, &context.directory)? {
        Some(folder) => {
            let metrics = run_folder::metrics(&folder)?;
            let name = folder.canonicalize().unwrap_or_else(|_| folder.clone());
            Curve {
                title: name.file_name().unwrap_or_default().to_string_lossy().into_owned(),
                points: metrics
                    .iter()
                    .filter_map(|one| Some((one.step, value(&one.values)?)))
                    .collect(),
            }
        }
        None => curve_of_job(context, &args.job, &value).await?,
    };
    let shown = args.metric.as_deref().unwrap_or("loss");
    if args.json {
        let points: Vec<_> = curve
            .points
            .iter()
            .map(|(step, value)| json!({ "step": step, shown: if value.is_finite() { json!(value) } else { json!(value.to_string()) } }))
            .collect();
        ui.json(&json!({ "name": curve.title, "points": points }))?;
        return Ok(Exit::Ok);
    }
    if curve.points.is_empty() && args.metric.is_some() {
        let message = format!("{} has no metric `{}`", printable(&args.job), printable(shown));
        return Err(Failure::not_found(message).hint("docs/run-folder.md#metricsjsonl lists the metrics of a training"));
    }
    if curve.points.is_empty() {
        return Err(
            Failure::not_found(format!("{} has no losses yet", printable(&args.job))).hint(
                "a training has its first loss after its first step; a job reports one every `logging.log_every` steps",
            ),
        );
    }
    if let Some(path) = &args.output {
        let png = curve
            .png()
            .ok_or_else(|| Failure::failed("the curve could not be rendered"))?;
        fsutil::write_atomic(path, |out| out.write_all(&png)).map_err(|error| Failure::failed(error.to_string()))?;
        ui.notice(&format!("wrote {}", path.display()));
        return Ok(Exit::Ok);
    }
    let style = Style {
        width: ui.width().unwrap_or(80),
        ascii: args.ascii,
        color: ui.color(),
    };
    let smoothed = curve.smoothed();
    let last = curve.points.last().map_or(0, |(step, _)| *step);
    let average = smoothed.last().map_or(f64::NAN, |(_, loss)| *loss);
    ui.data(&printable(&format!(
        "{}: {} {} to step {last}, now {} on average",
        curve.title,
        curve.points.len(),
        match &args.metric {
            Some(name) => format!("values of {name}"),
            None => "losses".to_owned(),
        },
        number(average)
    )))?;
    match chart(&curve, style) {
        Some(lines) => ui.data_lines(lines)?,
        None => ui.warn("none of the values is a finite number"),
    }
    Ok(Exit::Ok)
}

/// Reads one metric of those that a job reported.
async fn curve_of_job(
    context: &Context,
    name: &str,
    value: &dyn Fn(&BTreeMap<String, f64>) -> Option<f64>,
) -> Result<Curve, Failure> {
    let api = context.api().await?;
    let job = api.resolve(name).await?;
    if is_array(&job) {
        return Err(
            Failure::usage(format!("{} is an array; give one of its members", printable(name)))
                .hint(format!("`aitk ps {}` lists them", job.id)),
        );
    }
    let mut curve = Curve {
        title: job.name.clone(),
        points: Vec::new(),
    };
    let mut events = Box::pin(api.events(&job.id, 0, false).await?);
    while let Some(event) = events.next().await.transpose()? {
        if let EventBody::Metrics { step, values } = event.body
            && let Some(loss) = value(&values)
        {
            // An attempt that resumed from a checkpoint repeats steps; drop the old values.
            while curve.points.last().is_some_and(|(last, _)| *last >= step) {
                curve.points.pop();
            }
            curve.points.push((step, loss));
        }
    }
    Ok(curve)
}
