//! The metrics of a training's steps: of a run folder on this machine, or of a job.

use crate::context::Context;
use crate::exit::Exit;
use crate::failure::Failure;
use crate::members::is_array;
use crate::output::format::printable;
use crate::run_folder;
use aitk_common::control_plane::EventBody;
use aitk_common::id::{AttemptId, JobId};
use aitk_common::step_metrics::StepMetrics;
use futures::StreamExt;

/// A training and its steps so far, in their order.
pub struct StepHistory {
    /// The name of the job, or of the run folder.
    pub name: String,
    /// The id of the job; none of a run folder.
    pub job: Option<JobId>,
    /// All steps of a run folder; of a job those that its last training reported.
    pub steps: Vec<StepMetrics>,
    /// How many trainings the job began, one after another; 1 of a run folder.
    pub trainings: usize,
}

/// The steps that a job reported, in the order of its events.
#[derive(Debug, Default)]
struct ReportedSteps {
    /// Those of the last training.
    steps: Vec<StepMetrics>,
    trainings: usize,
    attempt: Option<AttemptId>,
    /// The number of all steps of the last training (the metric `steps`), once a step reported it.
    total: Option<f64>,
}

impl ReportedSteps {
    /// Adds a step. One attempt counts upwards, so a smaller number is of the next training of the job, which starts from 1 again. Another
    /// total is of the next training too, whose first reported step may be a larger one. Another attempt resumes from a checkpoint and
    /// repeats steps, whose old values are dropped.
    fn add(&mut self, attempt: Option<AttemptId>, step: StepMetrics) {
        let is_same_attempt = attempt == self.attempt && self.trainings > 0;
        if is_about_memory(&step)
            && let Some(last) = self.steps.last_mut()
        {
            // It is of the whole attempt, and its number is that of what the attempt counted last: also images and latents.
            if is_same_attempt {
                last.values.extend(step.values);
            }
            return;
        }
        self.attempt = attempt;
        let falls = self.steps.last().is_some_and(|last| step.step < last.step);
        // The memory that a training predicts is reported as that of step 0, at any time.
        if is_same_attempt && falls && step.step == 0 {
            return;
        }
        let total = step.values.get("steps").copied().filter(|total| total.is_finite());
        let is_other_total = total.is_some() && self.total.is_some() && total != self.total;
        self.total = total.or(self.total);
        if self.trainings == 0 || (is_same_attempt && falls) || is_other_total {
            self.trainings += 1;
            self.steps.clear();
        }
        while self.steps.last().is_some_and(|last| last.step >= step.step) {
            self.steps.pop();
        }
        self.steps.push(step);
    }
}

/// Whether these are the peaks and predictions of memory alone, which an attempt reports at its end.
fn is_about_memory(step: &StepMetrics) -> bool {
    !step.values.is_empty() && step.values.keys().all(|name| name.starts_with("memory/"))
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
            job: None,
            steps,
            trainings: 1,
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
        let mut reported = ReportedSteps::default();
        let mut events = Box::pin(api.events(&job.id, 0, false).await?);
        while let Some(event) = events.next().await.transpose()? {
            let EventBody::Metrics { step, values } = event.body else {
                continue;
            };
            let milliseconds = i64::try_from(event.time.0).unwrap_or(i64::MAX);
            let time = jiff::Timestamp::from_millisecond(milliseconds).map(|time| time.to_string());
            let step = StepMetrics {
                step,
                values: values
                    .into_iter()
                    .map(|(name, value)| (metric_name(name), value))
                    .collect(),
                time: time.unwrap_or_default(),
                ..StepMetrics::default()
            };
            reported.add(event.attempt, step);
        }
        Ok(Self {
            name: job.name,
            job: Some(job.id),
            steps: reported.steps,
            trainings: reported.trainings,
        })
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The steps of the last training, and how many there were, after these attempts reported these steps.
    fn reported(attempts: &[(&str, &[u64])]) -> (Vec<u64>, usize) {
        let mut reported = ReportedSteps::default();
        for (attempt, steps) in attempts {
            for step in *steps {
                let step = StepMetrics {
                    step: *step,
                    ..StepMetrics::default()
                };
                reported.add(Some(AttemptId::new(*attempt)), step);
            }
        }
        let steps = reported.steps.iter().map(|one| one.step).collect();
        (steps, reported.trainings)
    }

    #[test]
    fn an_attempt_that_resumes_repeats_steps_and_a_second_training_counts_anew() {
        assert_eq!(reported(&[]), (vec![], 0));
        assert_eq!(reported(&[("a", &[0, 1, 2, 2, 3])]), (vec![0, 1, 2, 3], 1));
        assert_eq!(
            reported(&[("a", &[10, 20, 30]), ("b", &[20, 30, 40])]),
            (vec![10, 20, 30, 40], 1)
        );
        assert_eq!(reported(&[("a", &[10, 20]), ("b", &[10])]), (vec![10], 1));
        // Two trainings in one attempt; the second one resumes.
        assert_eq!(
            reported(&[("a", &[10, 20, 30, 10, 20]), ("b", &[20, 30])]),
            (vec![10, 20, 30], 2)
        );
        // A prediction of memory in the middle of a training.
        assert_eq!(reported(&[("a", &[0, 10, 20, 0, 30])]), (vec![0, 10, 20, 30], 1));
    }

    #[test]
    fn the_memory_of_an_attempt_removes_no_steps() {
        let mut reported = ReportedSteps::default();
        let mut add = |attempt: &str, step: u64, name: &str| {
            let values = std::iter::once((name.to_owned(), 1.0)).collect();
            let step = StepMetrics {
                step,
                values,
                ..StepMetrics::default()
            };
            reported.add(Some(AttemptId::new(attempt)), step);
        };
        // The second attempt ends while it makes samples, the third one while it caches latents.
        for (attempt, step, name) in [
            ("a", 10, "loss"),
            ("a", 20, "loss"),
            ("a", 20, "memory/peak_gib"),
            ("b", 30, "loss"),
            ("b", 2, "memory/peak_gib"),
            ("c", 12, "memory/peak_gib"),
        ] {
            add(attempt, step, name);
        }
        let steps: Vec<(u64, usize)> = reported.steps.iter().map(|one| (one.step, one.values.len())).collect();
        assert_eq!((steps, reported.trainings), (vec![(10, 1), (20, 2), (30, 2)], 1));
        assert!(reported.steps.iter().all(|one| one.loss().is_some()));
        // A job that trains nothing has no other metrics.
        let mut reported = ReportedSteps::default();
        let values = std::iter::once(("memory/peak_gib".to_owned(), 1.0)).collect();
        let step = StepMetrics {
            step: 4,
            values,
            ..StepMetrics::default()
        };
        reported.add(Some(AttemptId::new("a")), step);
        assert_eq!(reported.steps.len(), 1);
    }

    /// The first step that the second training reports is above the last step of the first training.
    #[test]
    fn a_step_of_another_total_is_of_another_training() {
        let mut reported = ReportedSteps::default();
        for (step, total) in [
            (0, None),
            (50, Some(50.0)),
            (0, None),
            (100, Some(500.0)),
            (0, None),
            (200, Some(500.0)),
        ] {
            let step = StepMetrics {
                step,
                values: total.map(|total| ("steps".to_owned(), total)).into_iter().collect(),
                ..StepMetrics::default()
            };
            reported.add(Some(AttemptId::new("a")), step);
        }
        let steps: Vec<u64> = reported.steps.iter().map(|one| one.step).collect();
        assert_eq!((steps, reported.trainings), (vec![100, 200], 2));
    }
}
