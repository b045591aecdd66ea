//! `lm_trainer`: trains a code model, its LoRA or all of its weights (docs/code-models.md).
//!
//! The run folder and its metrics are shared with the trainer of images (`run_folder`, `step_recorder`, `save_files`). Saves are folders: a LoRA as
//! peft has it, a whole model as transformers has it.

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod auto_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod bad_input_tests;
mod checkpoint;
mod completions;
mod data;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod embedding_tests;
mod fit;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod gguf_tests;
mod memory_meter;
pub(super) mod model_folder;
mod prepare;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod reference_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod resume_tests;
mod run;
mod saving;
mod step;
mod step_metrics;
mod target;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod test_runs;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use super::context::Context;
use super::non_finite::{MAX_NON_FINITE_STEPS, NON_FINITE_STEPS_BEFORE_SAVING_STOPS};
use super::rate::Progress;
use crate::error::{EngineError, Result};
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::job::lm_trainer::LmTrainerProcess;
use checkpoint::NON_FINITE_CAUSES;
pub(super) use prepare::check;
use run::Run;
use std::collections::BTreeMap;
use std::time::Instant;

/// Runs one process to its end, to a stop, or to a failure.
pub(super) fn run(process: &LmTrainerProcess, cx: &mut Context<'_>) -> Result<Outcome> {
    match Run::prepare(process, cx) {
        Ok(mut run) => run.train(cx),
        Err(EngineError::Stopped) => Ok(Outcome::stopped()),
        Err(error) => Err(error),
    }
}

impl Run<'_> {
    fn train(&mut self, cx: &mut Context<'_>) -> Result<Outcome> {
        let steps = self.steps;
        if self.start_step >= steps && self.folder.final_save().exists() {
            let message = format!(
                "the run is already at step {} of {steps}: nothing is left to do",
                self.start_step
            );
            cx.log("info", message);
            self.emit_save(cx, &self.folder.final_save(), steps.max(self.start_step));
            return Ok(Outcome::Completed);
        }
        match self.start_step {
            0 => _ = self.complete_prompts(cx, 0)?,
            step if step < steps => self.finish_last_checkpoint(cx)?,
            _ => {}
        }
        if self.validation_is_pending {
            self.measure_missed_validation(cx)?;
        }
        cx.phase("training");
        let mut progress = Progress::new();
        self.metrics.begin(self.start_step);
        let attempt_start = self.start_step;
        for step in self.start_step..steps {
            if cx.stop.is_set() {
                return self.stop_at(cx, step);
            }
            let done = step + 1;
            let mut metrics = self.step(step)?;
            if done == 1 {
                self.correct_fit(cx);
            }
            self.non_finite_steps = match metrics.report.warning.clone() {
                Some(warning) => {
                    cx.log("warn", warning);
                    self.non_finite_steps + 1
                }
                None => 0,
            };
            self.check_finite(done, attempt_start)?;
            if self.is_validation_due(done) {
                let start = Instant::now();
                let loss = self.measure_validation(cx, done)?;
                metrics.measured.validation = loss;
                metrics.measured.validation_perplexity = loss.map(f64::exp);
                progress.exclude(start.elapsed());
            }
            if let Some(warning) = self.metrics.step(done, &metrics.report, metrics.measured) {
                cx.log("warn", warning);
            }
            let is_logged = done.is_multiple_of(self.process.logging.every()) || done == steps;
            if is_logged || metrics.measured.validation.is_some() {
                let values = metrics.values(steps, self.metrics.seconds_per_step(done));
                cx.events.emit(ChildEvent::Metrics { step: done, values });
            }
            progress.step(cx, done, steps);
            if done < steps {
                let started = Instant::now();
                if self.save_or_sample(cx, done)? {
                    // It has phases of its own.
                    progress.exclude(started.elapsed());
                    cx.phase("training");
                    progress.report(cx, done, steps);
                }
            }
        }
        self.finish(cx)
    }

    /// Corrects what was left to the machine, after the first step of the run and before its first checkpoint, so that every run that resumes has what
    /// was decided here.
    fn correct_fit(&mut self, cx: &mut Context<'_>) {
        let size = self.data.largest_batch(0);
        if self.fit.correct(size, cx) {
            self.apply_fit();
        }
    }

    /// Measures the loss on held-out documents after `done` steps and logs it. `None`: it is not finite, or the run was told to stop before it
    /// was measured.
    fn measure_validation(&mut self, cx: &mut Context<'_>, done: u64) -> Result<Option<f64>> {
        // Its events come faster than those of steps, from which the worker learns how long a step takes.
        cx.phase("validating");
        let (steps, mut progress) = (self.steps, Progress::new());
        let loss = self.validation_loss(&mut || {
            progress.keep_alive(cx, done.min(steps), steps);
            !cx.stop.is_set()
        })?;
        self.validation_is_pending = loss.is_none();
        let loss = loss.filter(|loss| loss.is_finite());
        if let Some(loss) = loss {
            cx.log(
                "info",
                format!("step {done}: held-out loss {loss:.4}, perplexity {:.3}", loss.exp()),
            );
        }
        cx.phase("training");
        Ok(loss)
    }

    /// Measures it after the step at which an earlier attempt was told to stop before it had done so.
    fn measure_missed_validation(&mut self, cx: &mut Context<'_>) -> Result<()> {
        let step = self.start_step;
        let Some(loss) = self.measure_validation(cx, step)? else {
            return Ok(());
        };
        if let Some(line) = self.metrics.add_validation(step, loss) {
            let renamed = |name: &str| match name {
                "loss" => "loss/loss".to_owned(),
                "lr" => "learning_rate".to_owned(),
                other => other.to_owned(),
            };
            let named = line.values.iter().map(|(name, value)| (renamed(name), *value));
            let mut values: BTreeMap<String, f64> = named.collect();
            values.insert("val/perplexity".to_owned(), loss.exp());
            values.retain(|_, value| value.is_finite());
            cx.events.emit(ChildEvent::Metrics { step, values });
        }
        Ok(())
    }

    /// Makes what is due or asked for after a step. Returns whether there was anything.
    fn save_or_sample(&mut self, cx: &mut Context<'_>, done: u64) -> Result<bool> {
        let requested = cx.requests.take();
        let save = self.process.save.is_due(done) || requested.save;
        if requested.save {
            cx.log("info", format!("saving at step {done}, as requested"));
        }
        if save && self.non_finite_steps >= NON_FINITE_STEPS_BEFORE_SAVING_STOPS {
            cx.log("warn", self.not_saved_message(done));
        } else if save {
            self.save(cx, done)?;
        }
        let has_prompts = !self.process.sample.prompts.is_empty();
        if requested.samples && !has_prompts {
            let message =
                "samples were requested, but the section `sample` of the config has no prompts: nothing is completed";
            cx.log("warn", message);
        }
        let sample = self.process.sample.is_due(done, self.steps) || (requested.samples && has_prompts);
        if sample {
            let _complete = self.complete_prompts(cx, done)?;
        }
        Ok(save || sample)
    }

    /// Fails a run that learns nothing.
    fn check_finite(&self, done: u64, attempt_start: u64) -> Result<()> {
        let non_finite = self.non_finite_steps;
        let at_end = done == self.steps
            && (non_finite >= self.steps - attempt_start.min(self.steps)
                || non_finite >= NON_FINITE_STEPS_BEFORE_SAVING_STOPS);
        if non_finite > 0 && (non_finite >= MAX_NON_FINITE_STEPS || at_end) {
            return Err(EngineError::bad_input(format!(
                "{non_finite} steps in a row, up to step {done}, had a loss or gradients that are not finite numbers, so the model learned nothing from them. \
                 {NON_FINITE_CAUSES}. Earlier saves are kept"
            )));
        }
        Ok(())
    }

    /// Ends a run that was told to stop: writes a checkpoint, from which it resumes.
    fn stop_at(&mut self, cx: &mut Context<'_>, step: u64) -> Result<Outcome> {
        if self.non_finite_steps >= NON_FINITE_STEPS_BEFORE_SAVING_STOPS {
            cx.log("warn", self.not_saved_message(step));
        } else if step > self.start_step && self.last_checkpoint != Some(step) {
            cx.phase("saving");
            self.checkpoint(cx, step)?;
        }
        cx.log("info", format!("stopped after step {step}"));
        Ok(Outcome::stopped())
    }

    fn not_saved_message(&self, step: u64) -> String {
        format!(
            "step {step} is not saved: {} steps in a row had a loss or gradients that are not finite numbers",
            self.non_finite_steps
        )
    }

    /// Writes the last checkpoint, the last completions and the final save, in this order: the final save marks the run as complete.
    fn finish(&mut self, cx: &mut Context<'_>) -> Result<Outcome> {
        let steps = self.steps;
        // A run whose `steps` were lowered has gone further.
        let reached = steps.max(self.start_step);
        if self.last_checkpoint != Some(reached) {
            cx.phase("saving");
            self.checkpoint(cx, reached)?;
        }
        if self.validation_is_pending || !self.complete_prompts(cx, reached)? {
            return Ok(Outcome::stopped());
        }
        cx.events.emit(ChildEvent::Progress {
            done: steps,
            total: steps,
            seconds_per_step: None,
        });
        cx.phase("saving");
        self.write_loss_plot(cx, reached);
        self.write_save(cx, &self.folder.final_save(), reached)?;
        // Requests that came after the last step: the final save and the completions have just been made.
        let _served = cx.requests.take();
        Ok(Outcome::Completed)
    }
}
