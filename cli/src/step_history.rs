//! The metrics of a training's steps: of a run folder on this machine, or of a job.

use crate::context::Context;
use crate::exit::Exit;
use crate::failure::Failure;
use crate::members::is_array;
use crate::output::format::printable;
use crate::run_folder;
use aitk_common::control_plane::EventBody;
use aitk_common::step_metrics::StepMetrics;
use futures::StreamExt;

/// A training and its steps so far, in their order.
pub struct StepHistory {
    /// The name of the job, or of the run folder.
    pub name: String,
    /// All steps of a run folder; of a job those that it reported.
    pub steps: Vec<StepMetrics>,
}

impl StepHistory {
    /// Reads the metrics of a job, or of a run folder.
    ///
    /// # Errors
    /// When there is neither, the folder has no metrics, or the job is an array.
    pub async fn read(context: &Context, job_or_folder: &str) -> Result<Self, Failure> {
        let Some(folder) = run_folder::run_folder(job_or_folder, &context.directory)? else {
            return Self::of_job(context, job_or_folder).await;
        };
        let steps = run_folder::metrics(&folder)?;
        let folder = folder.canonicalize().unwrap_or(folder);
        Ok(Self {
            name: folder.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            steps,
        })
    }

    async fn of_job(context: &Context, name: &str) -> Result<Self, Failure> {
        let api = context.api().await.map_err(|failure| match failure.exit {
            Exit::Usage => failure.hint(format!(
                "a training on this machine is named by its run folder; there is none at {}",
                printable(name)
            )),
            _ => failure,
        })?;
        let job = api.resolve(name).await?;
        if is_array(&job) {
            return Err(
                Failure::usage(format!("{} is an array; give one of its members", printable(name)))
                    .hint(format!("`aitk ps {}` lists them", job.id)),
            );
        }
        let mut steps: Vec<StepMetrics> = Vec::new();
        let mut events = Box::pin(api.events(&job.id, 0, false).await?);
        while let Some(event) = events.next().await.transpose()? {
            let EventBody::Metrics { step, values } = event.body else {
                continue;
            };
            // An attempt that resumed from a checkpoint repeats steps; drop the old values.
            while steps.last().is_some_and(|last| last.step >= step) {
                steps.pop();
            }
            let milliseconds = i64::try_from(event.time.0).unwrap_or(i64::MAX);
            let time = jiff::Timestamp::from_millisecond(milliseconds).map(|time| time.to_string());
            steps.push(StepMetrics {
                step,
                values: values
                    .into_iter()
                    .map(|(name, value)| (metric_name(name), value))
                    .collect(),
                time: time.unwrap_or_default(),
                ..StepMetrics::default()
            });
        }
        Ok(Self { name: job.name, steps })
    }
}

/// The name in `metrics.jsonl` of a metric that a job reported.
fn metric_name(reported: String) -> String {
    match reported.as_str() {
        "loss/loss" => "loss".to_owned(),
        "learning_rate" => "lr".to_owned(),
        _ => reported,
    }
}
