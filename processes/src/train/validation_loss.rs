//! Measures the loss on the images of `train.validation_config`.

use super::super::context::Context;
use super::super::rate::Progress;
use super::super::step_recorder::VALIDATION_METRIC;
use super::run::Run;
use super::step::ItemInputs;
use super::validation::{Image, Validation};
use crate::adapters::AdapterPass;
use crate::error::{EngineError, Result};
use crate::training::NoiseDraw;
use aitk_common::attempt::ChildEvent;
use candle_core::{DType, Tensor};

impl Run<'_> {
    /// The mean squared error after `done` steps over all images and noise levels, with the current weights and an adapter at full
    /// strength. One image at one noise level at a time, so that it needs no more memory than a sample. `None`: the run should stop.
    ///
    /// # Errors
    /// When a prompt was not encoded, or the model fails.
    pub(super) fn validation_loss(
        &mut self,
        validation: &Validation,
        done: u64,
        cx: &mut Context<'_>,
    ) -> Result<Option<f64>> {
        // Its events come faster than those of steps, from which the worker learns how long a step takes.
        cx.phase("validating");
        let (steps, mut progress) = (self.process.train.steps, Progress::new());
        let mut losses = Vec::new();
        for image in &validation.images {
            if self.stop.is_set() {
                cx.phase("training");
                return Ok(None);
            }
            progress.keep_alive(cx, done.min(steps), steps);
            losses.push(match self.target.handle().cloned() {
                Some(handle) => handle.in_pass(AdapterPass::inference(1.0), || {
                    self.image_loss(image, &validation.levels)
                })?,
                None => self.image_loss(image, &validation.levels)?,
            });
        }
        cx.phase("training");
        Ok(Some(losses.iter().sum::<f64>() / losses.len() as f64))
    }

    /// Measures it after the step at which an earlier attempt was told to stop before it had done so.
    ///
    /// # Errors
    /// As [`Self::validation_loss`].
    pub(super) fn measure_missed_validation(&mut self, cx: &mut Context<'_>) -> Result<()> {
        let Some(fixed) = self.validation.clone().filter(|_| self.validation_is_pending) else {
            self.validation_is_pending = false;
            return Ok(());
        };
        let Some(loss) = self.validation_loss(&fixed, self.start_step, cx)? else {
            return Ok(());
        };
        self.validation_is_pending = false;
        if let Some(line) = self.metrics.add_validation(self.start_step, loss) {
            let named = |(from, to): (&str, &str)| Some((to.to_owned(), *line.values.get(from)?));
            let names = [
                ("lr", "learning_rate"),
                ("loss", "loss/loss"),
                (VALIDATION_METRIC, VALIDATION_METRIC),
            ];
            let values = names
                .into_iter()
                .filter_map(named)
                .filter(|(_, value)| value.is_finite());
            cx.events.emit(ChildEvent::Metrics {
                step: self.start_step,
                values: values.collect(),
            });
        }
        Ok(())
    }

    fn image_loss(&mut self, image: &Image, levels: &[f64]) -> Result<f64> {
        let conditioning = self.encode_frozen(std::slice::from_ref(&image.prompt))?;
        let detached = self.model.detach();
        let model = &**detached.as_ref().unwrap_or(&self.model);
        let inputs = ItemInputs {
            sizes: vec![image.size],
            control: None,
            scales: vec![self.process.train.cfg_scale],
        };
        let conditioning = model.with_decorator(conditioning, false)?.detached();
        let conditioning = inputs.add_to(self.process, model, conditioning)?;
        let device = &self.compute.device;
        let on_device = |tensors: &[Tensor]| {
            let moved = tensors.iter().map(|tensor| Ok(tensor.to_device(device)?));
            moved.collect::<Result<Vec<_>>>()
        };
        let (latents, noise) = (on_device(&image.latents)?, on_device(&image.noise)?);
        let mut losses = Vec::new();
        for level in levels {
            let noise_draw = NoiseDraw {
                timesteps: vec![self.objective.timestep_at(*level)],
                noise: noise.clone(),
                input_noise: Vec::new(),
                has_stepped: false,
            };
            let times = self.timesteps_of(&noise_draw)?;
            let noisy = self.objective.noisy(&latents, &noise_draw)?;
            let target = self.objective.target(&latents, &noise_draw)?;
            let predicted = model.predict(&noisy, &times, &conditioning)?;
            losses.push(mean_squared_error(&predicted, &target)?);
        }
        Ok(losses.iter().sum::<f64>() / losses.len() as f64)
    }
}

fn mean_squared_error(predicted: &[Tensor], target: &[Tensor]) -> Result<f64> {
    let (mut sum, mut count) = (0.0, 0);
    for (predicted, target) in predicted.iter().zip(target) {
        let difference = (predicted.detach().to_dtype(DType::F32)? - target.to_dtype(DType::F32)?)?;
        sum += f64::from(difference.sqr()?.sum_all()?.to_scalar::<f32>()?);
        count += difference.elem_count();
    }
    match count {
        0 => Err(EngineError::Internal("a model that predicts nothing".into())),
        count => Ok(sum / count as f64),
    }
}
