//! `plot`: shows the loss curve in the terminal or writes it as an image.

use crate::args::PlotArgs;
use crate::chart::{Style, chart};
use crate::context::Context;
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::output::Ui;
use crate::output::format::{number, plural, printable};
use crate::step_history::StepHistory;
use aitk_common::fsutil;
use aitk_common::job::naming;
use aitk_common::plot::Curve;
use aitk_common::tensorboard::{self, EVENT_FILE};
use serde_json::json;
use std::io::Write;
use std::path::Path;

pub(super) async fn plot(context: &Context, args: PlotArgs) -> CommandResult {
    let ui = context.ui(true);
    if let Some(path) = &args.output
        && !path
            .extension()
            .is_some_and(|ending| ending.eq_ignore_ascii_case("png"))
    {
        return Err(Failure::usage(format!(
            "{}: the image is a PNG; give a name that ends in .png",
            path.display()
        )));
    }
    let history = StepHistory::read(context, &args.job).await?;
    if history.trainings > 1 {
        ui.warn(&format!(
            "{} had {} trainings: this is the last one; the others are in the metrics of their run folders",
            printable(&args.job),
            history.trainings
        ));
    }
    if let Some(folder) = &args.tensorboard {
        return write_event_file(&ui, &history, folder, &args.job);
    }
    let metric = match args.metric.as_deref() {
        // The names in a job's events.
        Some("learning_rate") => "lr",
        Some("loss/loss") => "loss",
        Some(name) => name,
        None => "loss",
    };
    let shown = args.metric.as_deref().unwrap_or("loss");
    let curve = Curve {
        title: history.name,
        metric: shown.to_owned(),
        points: (history.steps.iter())
            .filter_map(|one| Some((one.step, *one.values.get(metric)?)))
            .collect(),
    };
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
        return Err(no_losses(&args.job));
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
        "{}: {} to step {last}, now {} on average",
        curve.title,
        match (&args.metric, curve.points.len()) {
            (Some(name), count) => format!("{} of {name}", plural(count as u64, "value")),
            (None, 1) => "1 loss".to_owned(),
            (None, count) => format!("{count} losses"),
        },
        number(average)
    )))?;
    match chart(&curve, style) {
        Some(lines) => ui.data_lines(lines)?,
        None => ui.warn("none of the values is a finite number"),
    }
    Ok(Exit::Ok)
}

/// Writes the metrics into a folder in `folder`, for TensorBoard.
fn write_event_file(ui: &Ui, history: &StepHistory, folder: &Path, job: &str) -> CommandResult {
    if history.steps.is_empty() {
        return Err(no_losses(job));
    }
    naming::check_name(&history.name).map_err(|why| Failure::failed(format!("{}: {why}", printable(&history.name))))?;
    let run = folder.join(event_folder(history));
    let path = run.join(EVENT_FILE);
    let write = || -> std::io::Result<()> {
        std::fs::create_dir_all(&run)?;
        fsutil::write_atomic(&path, |out| {
            tensorboard::write_start(out)?;
            tensorboard::write_steps(out, &history.steps)
        })
        .map_err(std::io::Error::other)
    };
    write().map_err(|error| Failure::file("write", &path, &error))?;
    ui.notice(&format!(
        "wrote {} steps to {}: show them with `tensorboard --logdir {}`",
        history.steps.len(),
        path.display(),
        folder.display()
    ));
    Ok(Exit::Ok)
}

/// The name of the folder for the metrics: that of the run folder, or `NAME-ID` of a job, because several jobs may have one name.
fn event_folder(history: &StepHistory) -> String {
    match &history.job {
        Some(id) => format!("{}-{id}", history.name),
        None => history.name.clone(),
    }
}

fn no_losses(job: &str) -> Failure {
    Failure::not_found(format!("{} has no losses yet", printable(job)))
        .hint("a training has its first loss after its first step; a job reports one every `logging.log_every` steps")
}

#[cfg(test)]
mod tests {
    use super::*;
    use aitk_common::id::JobId;
    use aitk_common::step_metrics::StepMetrics;

    #[test]
    fn two_jobs_of_one_name_get_two_folders_for_tensorboard() {
        let dir = tempfile::tempdir().unwrap();
        for job in [Some("j1"), Some("j2"), None] {
            let history = StepHistory {
                name: "cat".to_owned(),
                job: job.map(JobId::new),
                steps: vec![StepMetrics::default()],
                trainings: 1,
            };
            write_event_file(&Ui::silent(), &history, dir.path(), "cat").unwrap();
        }
        for run in ["cat-j1", "cat-j2", "cat"] {
            assert!(dir.path().join(run).join(EVENT_FILE).is_file(), "{run}");
        }
    }
}
