//! The loss and the gradients of a step, and the loss on held-out documents.

use super::super::step_recorder::StepMeasurements;
use super::run::Run;
use super::step_metrics::StepMetrics;
use crate::data::tokens::TokenBatch;
use crate::error::Result;
use crate::models::causal_lm::{AttentionMask, CausalLm};
use crate::nn::token_loss;
use candle_core::{DType, Tensor};
use std::time::Instant;

/// `factor` times the sum of the losses of a batch's predicted tokens.
fn loss_of(model: &CausalLm, batch: &TokenBatch, packing: bool, factor: f64) -> Result<Tensor> {
    let device = model.device();
    // With the padding a text would be longer than it is.
    let mask = match packing || model.config().depends_on_length() {
        true => AttentionMask::Documents(batch.document_numbers(device)?),
        // The padding comes after the documents, and nothing is predicted from it.
        false => AttentionMask::Causal,
    };
    let hidden = model.hidden(&batch.ids(device)?, &mask)?;
    let weight = model.output_weight()?;
    Ok(token_loss(
        &hidden,
        &weight,
        (&batch.positions, &batch.targets),
        factor,
    )?)
}

impl Run<'_> {
    /// Computes a step and updates the weights. The loss is the mean over the predicted tokens of all batches of the step, as in transformers
    /// 5 (`num_items_in_batch`).
    pub(super) fn step(&mut self, step: u64) -> Result<StepMetrics> {
        let started = Instant::now();
        let batches = self.data.batches(step)?;
        let reading = started.elapsed();
        let predicted: usize = batches.iter().map(|batch| batch.targets.len()).sum();
        let tokens: usize = batches.iter().map(|batch| batch.tokens).sum();
        let factor = 1.0 / predicted.max(1) as f64;
        self.trainer.begin_step(step);
        let (model, target, packing) = (&self.model, &self.target, self.process.packing);
        for (micro, batch) in batches.iter().enumerate() {
            let seed = format!("{}/dropout/{step}/{micro}", self.seed);
            let loss = || target.in_training(&seed, || loss_of(model, batch, packing, factor));
            match batches.len() == 1 && self.trainer.uses_fused_backward() {
                true => self.trainer.fused_step(step, loss)?,
                false => self.trainer.accumulate(loss)?,
            }
        }
        let mut report = self.trainer.finish_step(step, true)?;
        // The trainer reports the mean of the batches, each of which has its part of the sum.
        report.loss *= batches.len() as f64;
        let seconds = started.elapsed().as_secs_f64();
        let measured = StepMeasurements {
            data_share: Some(reading.as_secs_f64() / seconds).filter(|share| share.is_finite()),
            perplexity: Some(report.loss.exp()).filter(|perplexity| perplexity.is_finite()),
            tokens_per_second: Some(tokens as f64 / seconds).filter(|rate| rate.is_finite()),
            ..StepMeasurements::default()
        };
        Ok(StepMetrics { report, measured })
    }

    /// Whether the loss on held-out documents is measured after a step.
    pub(super) fn is_validation_due(&self, done: u64) -> bool {
        let validation = self.process.validation.as_ref();
        validation.is_some_and(|validation| validation.is_due(done, self.steps))
    }

    /// The mean loss over the predicted tokens of held-out documents, which may not be finite. `go_on` is called before each batch; `None`
    /// if it returned `false`.
    pub(super) fn validation_loss(&self, go_on: &mut dyn FnMut() -> bool) -> Result<Option<f64>> {
        let model = self.eval_model.as_ref().unwrap_or(&self.model);
        let (mut sum, mut predicted) = (0f64, 0usize);
        for rows in self.data.held_out_row_groups(self.fit.batch_size()) {
            if !go_on() {
                return Ok(None);
            }
            let batch = self.data.held_out_batch(&rows)?;
            let factor = 1.0 / batch.targets.len().max(1) as f64;
            let loss = self
                .target
                .in_inference(|| loss_of(model, &batch, self.process.packing, factor))?;
            let mean = f64::from(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?);
            sum += mean * batch.targets.len() as f64;
            predicted += batch.targets.len();
        }
        Ok(Some(sum / predicted.max(1) as f64))
    }
}
