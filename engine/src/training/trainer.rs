//! The trainer: gradient accumulation, clipping, optimizer step and EMA.

use super::learned_snr::{LearnedSnr, SharedLearnedSnr};
use super::loss_scale::LossScale;
use super::swapped_parameters::SwappedParameters;
use crate::autograd::{Tape, record};
use crate::error::{EngineError, Result};
use crate::optim::{
    Ema, Grads, OptimError, Optimizer, Param, Schedule, SquareSums, clip_factor, clip_grad_norm, global_norm,
    scale_gradient, sum_of_squares, with_stochastic_rounding,
};
use candle_core::{DType, Tensor, TensorId};
use std::collections::{BTreeMap, HashMap};

/// The parts of a [`Trainer`].
pub struct TrainerOptions {
    /// The trained parameters, in a fixed order.
    pub params: Vec<Param>,
    /// The update rule.
    pub optimizer: Box<dyn Optimizer>,
    /// The learning rate of each step.
    pub schedule: Schedule,
    /// The global norm to which gradients are clipped. `None`: no clipping.
    pub max_grad_norm: Option<f64>,
    /// The exponential moving average of the weights.
    pub ema: Option<Ema>,
    /// Update each parameter as soon as its gradient is complete, if that gives the same result. Then only a few
    /// gradients are in memory at a time.
    pub fused_backward: bool,
}

/// The result of one step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// The mean loss of the step's micro-batches.
    pub loss: f64,
    /// The part of it that is preservation loss, if there is any.
    pub preservation: Option<f64>,
    /// The learning rate of the schedule, or the one that an adaptive optimizer computed from it.
    pub lr: f64,
    /// The gradient norm before clipping; `None` if the weights were not updated.
    pub grad_norm: Option<f64>,
    /// A warning for the user about a loss or gradients that are not finite.
    pub warning: Option<String>,
}

/// Named tensors by role: `weights`, `optimizer`, `ema`, `gradients`.
pub type TrainerState = BTreeMap<&'static str, BTreeMap<String, Tensor>>;

/// Turns losses into updates of the parameters, and holds the state between two steps.
pub struct Trainer {
    options: TrainerOptions,
    /// Gradients that a later step applies (legacy accumulation, where each micro-batch counts as a step).
    accumulated: Option<Grads>,
    /// The sum of squares of each gradient that [`Trainer::fused_step`] applied, by parameter.
    applied_squares: Option<Vec<f64>>,
    losses: Vec<f64>,
    /// The preservation losses that are part of them.
    preservation_losses: Vec<f64>,
    non_finite_losses: u64,
    loss_scale: Option<LossScale>,
    /// Which parameters each step trains. `None`: all.
    swapped: Option<SwappedParameters>,
    /// Whether each parameter is trained in this step. `None`: all are.
    trained: Option<Vec<bool>>,
    /// The learned weights of the loss, which a checkpoint stores with the optimizer's state.
    learned_snr: Option<SharedLearnedSnr>,
    /// The seed of stochastic rounding. `None`: weights are float32, or rounded to the nearest number.
    rounding_seed: Option<u64>,
}

/// The name of the loss scale among the tensors of the optimizer.
const LOSS_SCALE: &str = "loss_scale";
/// The name of the learned weights of the loss among them.
const LEARNED_SNR: &str = "learnable_snr_gos";

impl Trainer {
    /// Creates a trainer without gradients.
    #[must_use]
    pub fn new(options: TrainerOptions) -> Self {
        Self {
            options,
            accumulated: None,
            applied_squares: None,
            losses: Vec::new(),
            preservation_losses: Vec::new(),
            non_finite_losses: 0,
            loss_scale: None,
            swapped: None,
            trained: None,
            learned_snr: None,
            rounding_seed: None,
        }
    }

    /// Scales the loss for a model that computes in f16, whose gradients may be too small or too large for f16, as
    /// `torch.amp.GradScaler` does. A step whose gradients overflow does not update the weights and has no warning, as
    /// long as a smaller factor may help.
    #[must_use]
    pub fn with_loss_scaling(mut self) -> Self {
        self.loss_scale = Some(LossScale::default());
        self
    }

    /// Trains a changing share of the parameters: [`Trainer::begin_step`] chooses them.
    #[must_use]
    pub fn with_swapped_parameters(mut self, swapped: SwappedParameters) -> Self {
        self.swapped = Some(swapped);
        self
    }

    /// Begins step number `step`, before its micro-batches.
    pub fn begin_step(&mut self, step: u64) {
        self.trained = self.swapped.as_ref().map(|swapped| swapped.trained_in(step));
    }

    /// The index of each parameter that is trained in this step, by the id of its tensor.
    fn trained_by_id(&self) -> HashMap<TensorId, usize> {
        let params = self.options.params.iter().enumerate();
        let is_trained = |index: usize| {
            let trained = self.trained.as_ref();
            trained.is_none_or(|trained| trained.get(index).copied().unwrap_or(false))
        };
        params
            .filter(|(index, _)| is_trained(*index))
            .map(|(index, param)| (param.var.id(), index))
            .collect()
    }

    /// The gradients of the parameters that are trained in this step. Those of others are freed as soon as they are complete.
    fn trained_gradients(&self, loss: &Tensor, tape: Tape) -> Result<Grads> {
        let index_by_id = self.trained_by_id();
        let mut grads: Grads = vec![None; self.options.params.len()];
        tape.backward_each_from((loss, self.loss_gradient(loss)?), |id, gradient| {
            if let Some(grad) = index_by_id.get(&id).and_then(|index| grads.get_mut(*index)) {
                *grad = Some(match self.loss_scale {
                    Some(scale) => scale.unscale(&gradient.detach())?,
                    None => gradient.detach(),
                });
            }
            Ok::<_, EngineError>(())
        })?;
        Ok(grads)
    }

    /// Saves and restores these learned weights of the loss with its own state.
    #[must_use]
    pub fn with_learned_snr(mut self, learned: SharedLearnedSnr) -> Self {
        self.learned_snr = Some(learned);
        self
    }

    /// Rounds updated weights in bfloat16 stochastically, by the run's seed and the step.
    #[must_use]
    pub fn with_stochastic_rounding(mut self, seed: u64) -> Self {
        self.rounding_seed = Some(seed);
        self
    }

    /// The gradient of the loss with which the backward pass starts.
    fn loss_gradient(&self, loss: &Tensor) -> candle_core::Result<Tensor> {
        match self.loss_scale {
            Some(scale) => scale.scale(loss),
            None => loss.ones_like(),
        }
    }

    /// Whether a step of one micro-batch uses [`Trainer::fused_step`].
    #[must_use]
    pub fn uses_fused_backward(&self) -> bool {
        self.options.fused_backward && self.accumulated.is_none() && self.options.optimizer.separable()
    }

    /// The trained parameters.
    #[must_use]
    pub fn params(&self) -> &[Param] {
        &self.options.params
    }

    /// The moving average, if there is one.
    pub fn ema(&mut self) -> Option<&mut Ema> {
        self.options.ema.as_mut()
    }

    /// Runs the forward and the backward pass of a micro-batch and adds its gradients to the accumulated ones.
    /// Gradients are summed, as in ai-toolkit. A loss that is not finite adds no gradients; it is reported
    /// unchanged.
    ///
    /// # Errors
    /// When the forward or the backward pass fails.
    pub fn accumulate(&mut self, loss: impl FnOnce() -> Result<Tensor>) -> Result<()> {
        let Some((loss, tape)) = self.forward(loss)? else {
            return Ok(());
        };
        let grads = match self.trained {
            Some(_) => self.trained_gradients(&loss, tape)?,
            None => {
                let gradient = self.loss_gradient(&loss)?;
                let mut store = tape.backward_from([(loss, gradient)])?;
                let params = self.options.params.iter();
                // Each is freed when it was unscaled.
                let grads = params.map(|p| store.take(p.var.as_tensor()).map(|gradient| gradient.detach()));
                match self.loss_scale {
                    None => grads.collect(),
                    Some(scale) => grads
                        .map(|grad| grad.map(|grad| scale.unscale(&grad)).transpose())
                        .collect::<candle_core::Result<_>>()?,
                }
            }
        };
        match &mut self.accumulated {
            None => self.accumulated = Some(grads),
            Some(sums) => {
                for (sum, grad) in sums.iter_mut().zip(grads) {
                    *sum = match (sum.take(), grad) {
                        (Some(a), Some(b)) => {
                            // A sum in bfloat16 would lose small gradients.
                            Some((a.to_dtype(DType::F32)? + b.to_dtype(DType::F32)?)?)
                        }
                        (a, b) => a.or(b),
                    };
                }
            }
        }
        Ok(())
    }

    /// Adds a preservation loss to the micro-batch before: its gradients, and its value to the loss that is reported.
    ///
    /// # Errors
    /// As [`Trainer::accumulate`].
    pub fn accumulate_preservation(&mut self, loss: impl FnOnce() -> Result<Tensor>) -> Result<()> {
        let own = self.accumulate_pass(false, 1.0, loss)?;
        self.preservation_losses.extend(own);
        Ok(())
    }

    /// Runs one of several passes whose losses are the loss of one micro-batch, and adds its gradients. `reported`: the factor of its
    /// loss in the loss that is reported. Returns that part of it, or `None` without a pass if that of an earlier one is not finite.
    ///
    /// # Errors
    /// As [`Trainer::accumulate`].
    pub fn accumulate_pass(
        &mut self,
        is_first: bool,
        reported: f64,
        loss: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Option<f64>> {
        // A micro-batch whose loss is not finite adds no gradients.
        if !is_first && self.losses.last().is_some_and(|loss| !loss.is_finite()) {
            return Ok(None);
        }
        self.accumulate(loss)?;
        let own = self.losses.pop().map(|loss| loss * reported);
        if let Some(own) = own {
            match self.losses.last_mut().filter(|_| !is_first) {
                Some(total) => *total += own,
                None => self.losses.push(own),
            }
        }
        Ok(own)
    }

    /// Runs the passes of step number `step` and updates each parameter as soon as its gradient is complete, then frees
    /// the gradient (fused backward). The result is bit-identical to [`Trainer::accumulate`] with an update in
    /// [`Trainer::finish_step`], which must follow in both cases. Clipping needs the global norm: then `loss` runs
    /// twice, first for the norm. Without clipping, parameters whose gradient is not finite are not updated.
    ///
    /// # Errors
    /// When a pass or the arithmetic fails.
    pub fn fused_step(&mut self, step: u64, loss: impl Fn() -> Result<Tensor>) -> Result<()> {
        let lr = self.options.schedule.lr_at(step);
        let Some((mut value, mut tape)) = self.forward(&loss)? else {
            return Ok(());
        };
        let gradient = self.loss_gradient(&value)?;
        let loss_scale = self.loss_scale;
        let unscale = |gradient: Tensor| match loss_scale {
            Some(scale) => scale.unscale(&gradient),
            None => Ok(gradient),
        };
        let rounding_seed = self.rounding_seed;
        let index_by_id = self.trained_by_id();
        let (params, optimizer) = (&self.options.params, &mut self.options.optimizer);
        let mut squares = vec![0.0; params.len()];
        let clip_norm = self
            .options
            .max_grad_norm
            .filter(|_| optimizer.uses_gradient_clipping());
        let mut factor = 1.0;
        if let Some(max) = clip_norm {
            let (mut indices, mut sums) = (Vec::new(), SquareSums::default());
            tape.backward_each_from((&value, gradient.clone()), |id, gradient| {
                if let Some(index) = index_by_id.get(&id) {
                    indices.push(*index);
                    sums.add(&unscale(gradient)?)?;
                }
                Ok::<_, EngineError>(())
            })?;
            for (index, sum) in indices.into_iter().zip(sums.read()?) {
                squares[index] = sum;
            }
            let norm = global_norm(&squares);
            if !norm.is_finite() {
                self.applied_squares = Some(squares);
                return Ok(());
            }
            factor = clip_factor(norm, max);
            (value, tape) = record(&loss)?;
        }
        let mut single_grad: Grads = vec![None; params.len()];
        tape.backward_each_from((&value, gradient), |id, gradient| {
            let Some(index) = index_by_id.get(&id) else {
                return Ok(());
            };
            let gradient = unscale(gradient)?;
            if clip_norm.is_none() {
                squares[*index] = sum_of_squares(&gradient)?;
                if !squares[*index].is_finite() {
                    return Ok(());
                }
            }
            single_grad[*index] = Some(scale_gradient(gradient, factor)?);
            apply(
                &mut **optimizer,
                &single_grad,
                lr,
                rounding_seed.map(|seed| (seed, step)),
            )?;
            single_grad[*index] = None;
            Ok::<_, EngineError>(())
        })?;
        self.applied_squares = Some(squares);
        Ok(())
    }

    /// Runs the forward pass. Returns the loss and its tape, or `None` if the loss is not finite.
    fn forward(&mut self, loss: impl FnOnce() -> Result<Tensor>) -> Result<Option<(Tensor, Tape)>> {
        let (loss, tape) = record(loss)?;
        let value = f64::from(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?);
        if !value.is_finite() {
            self.non_finite_losses += 1;
            self.losses.push(value);
            return Ok(None);
        }
        self.losses.push(value);
        Ok(Some((loss, tape)))
    }

    /// Ends step number `step`. With `update`, the accumulated gradients are clipped and applied; otherwise a later
    /// step applies them.
    ///
    /// # Errors
    /// When the arithmetic fails.
    pub fn finish_step(&mut self, step: u64, update: bool) -> Result<StepReport> {
        let lr = self.options.schedule.lr_at(step);
        let count = self.losses.len().max(1) as f64;
        let mut report = StepReport {
            loss: self.losses.iter().sum::<f64>() / count,
            preservation: match self.preservation_losses.is_empty() {
                true => None,
                false => Some(self.preservation_losses.drain(..).sum::<f64>() / count),
            },
            lr,
            grad_norm: None,
            warning: None,
        };
        self.losses.clear();
        if self.non_finite_losses > 0 {
            report.warning = Some(format!(
                "step {}: the loss of {} micro-batch(es) was not a finite number; they do not change the weights",
                step + 1,
                self.non_finite_losses
            ));
            self.non_finite_losses = 0;
        }
        report.lr = self.options.optimizer.effective_lr(lr).map_err(optim_error)?;
        if !update {
            return Ok(report);
        }
        let optimizer = &mut self.options.optimizer;
        let norm = match (self.applied_squares.take(), self.accumulated.take()) {
            (Some(squares), _) => global_norm(&squares),
            (None, Some(mut grads)) => {
                let max = self
                    .options
                    .max_grad_norm
                    .filter(|_| optimizer.uses_gradient_clipping());
                let norm = clip_grad_norm(&mut grads, max.unwrap_or(f64::INFINITY)).map_err(optim_error)?;
                if norm.is_finite() {
                    let rounding = self.rounding_seed.map(|seed| (seed, step));
                    apply(&mut **optimizer, &grads, lr, rounding)?;
                }
                norm
            }
            (None, None) => return Ok(report),
        };
        let is_explained = match &mut self.loss_scale {
            Some(scale) => scale.update(norm.is_finite()),
            None => false,
        };
        if is_explained {
            return Ok(report);
        }
        if !norm.is_finite() {
            report.warning = Some(format!(
                "step {}: the gradients are not finite numbers; the weights are unchanged",
                step + 1
            ));
            return Ok(report);
        }
        report.grad_norm = Some(norm);
        report.lr = optimizer.effective_lr(lr).map_err(optim_error)?;
        if let Some(ema) = &mut self.options.ema {
            ema.update().map_err(optim_error)?;
        }
        Ok(report)
    }

    /// Whether all trained weights are finite numbers.
    ///
    /// # Errors
    /// When the arithmetic fails.
    pub fn weights_are_finite(&self) -> Result<bool> {
        for param in &self.options.params {
            // 0 * infinity and 0 * NaN are NaN.
            let sum = param.var.as_tensor().affine(0.0, 0.0)?.sum_all()?;
            if !sum.to_dtype(DType::F32)?.to_scalar::<f32>()?.is_finite() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns the tensors of a checkpoint by role (`weights`, `optimizer`, and if present `ema` and `gradients`), and
    /// the number of EMA updates.
    ///
    /// # Errors
    /// When the device fails.
    pub fn state(&self) -> Result<(TrainerState, u64)> {
        let mut out = BTreeMap::new();
        let weights = self
            .options
            .params
            .iter()
            .map(|p| (p.name.clone(), p.var.as_detached_tensor()))
            .collect();
        out.insert("weights", weights);
        let mut optimizer = self.options.optimizer.state().map_err(optim_error)?;
        if let Some(scale) = self.loss_scale {
            optimizer.insert(LOSS_SCALE.to_owned(), scale.state()?);
        }
        if let Some(learned) = &self.learned_snr {
            optimizer.insert(LEARNED_SNR.to_owned(), learned.get().state()?);
        }
        out.insert("optimizer", optimizer);
        let mut updates = 0;
        if let Some(ema) = &self.options.ema {
            let (shadow, n) = ema.state();
            updates = n;
            out.insert("ema", shadow);
        }
        if let Some(accumulated) = &self.accumulated {
            let names = self.options.params.iter().map(|p| p.name.clone());
            let grads = names
                .zip(accumulated)
                .filter_map(|(n, g)| Some((n, g.clone()?)))
                .collect();
            out.insert("gradients", grads);
        }
        Ok((out, updates))
    }

    /// Checks that the parameters can be set from these weights.
    ///
    /// # Errors
    /// As [`Trainer::restore_weights`].
    pub fn check_weights(&self, tensors: &BTreeMap<String, Tensor>) -> Result<()> {
        self.find_weights(tensors).map(drop)
    }

    /// Sets the parameters from the weights of [`Trainer::state`]. On an error no parameter changes.
    ///
    /// # Errors
    /// When a tensor is missing or unexpected, or has another shape.
    pub fn restore_weights(&self, tensors: &BTreeMap<String, Tensor>) -> Result<()> {
        let found = self.find_weights(tensors)?;
        for (p, t) in self.options.params.iter().zip(found) {
            p.var
                .set(&t.to_device(p.var.device())?.to_dtype(p.var.dtype())?.contiguous()?)?;
        }
        Ok(())
    }

    /// The weight of each parameter.
    fn find_weights<'a>(&self, tensors: &'a BTreeMap<String, Tensor>) -> Result<Vec<&'a Tensor>> {
        let params = &self.options.params;
        if tensors.len() != params.len() {
            return Err(EngineError::bad_input(format!(
                "the checkpoint has {} trained tensors, this job has {}",
                tensors.len(),
                params.len()
            )));
        }
        let mut found = Vec::with_capacity(params.len());
        for p in params {
            match tensors.get(&p.name) {
                Some(t) if t.shape() == p.var.shape() => found.push(t),
                Some(t) => {
                    return Err(EngineError::bad_input(format!(
                        "the checkpoint's `{}` has shape {:?}, this job needs {:?}",
                        p.name,
                        t.dims(),
                        p.var.dims()
                    )));
                }
                None => return Err(EngineError::bad_input(format!("the checkpoint has no `{}`", p.name))),
            }
        }
        Ok(found)
    }

    /// Restores everything that [`Trainer::state`] returned except the weights.
    ///
    /// # Errors
    /// When something is missing or has another shape.
    pub fn restore_state(
        &mut self,
        mut state: BTreeMap<String, BTreeMap<String, Tensor>>,
        ema_updates: u64,
    ) -> Result<()> {
        let mut optimizer = state.remove("optimizer").unwrap_or_default();
        // A state of another dtype has no scale, or one that is not used here.
        if let (Some(tensor), Some(scale)) = (optimizer.remove(LOSS_SCALE), &mut self.loss_scale) {
            *scale = LossScale::from_state(&tensor)?;
        }
        if let (Some(tensor), Some(learned)) = (optimizer.remove(LEARNED_SNR), &self.learned_snr) {
            learned.set(LearnedSnr::from_state(&tensor)?);
        }
        self.options.optimizer.load_state(&optimizer).map_err(optim_error)?;
        // A state without EMA, from before EMA was turned on: the average starts with the current weights.
        if let Some(ema) = &mut self.options.ema
            && let Some(shadow) = state.remove("ema")
        {
            ema.load_state(&shadow, ema_updates).map_err(optim_error)?;
        }
        self.accumulated = match state.remove("gradients") {
            None => None,
            Some(mut grads) => {
                let gradient = |p: &Param| match grads.remove(&p.name) {
                    None => Ok(None),
                    Some(gradient) if gradient.shape() == p.var.shape() => {
                        Ok(Some(gradient.to_device(p.var.device())?))
                    }
                    Some(gradient) => Err(EngineError::bad_input(format!(
                        "the checkpoint's gradient of `{}` has shape {:?}, this job needs {:?}",
                        p.name,
                        gradient.dims(),
                        p.var.dims()
                    ))),
                };
                Some(self.options.params.iter().map(gradient).collect::<Result<_>>()?)
            }
        };
        Ok(())
    }
}

/// One step of an optimizer. `rounding`: the seed and the step of stochastic rounding.
fn apply(optimizer: &mut dyn Optimizer, grads: &Grads, lr: f64, rounding: Option<(u64, u64)>) -> Result<()> {
    let result = match rounding {
        Some((seed, number)) => with_stochastic_rounding(seed, number, || optimizer.step(grads, lr)),
        None => optimizer.step(grads, lr),
    };
    result.map_err(optim_error)
}

/// Converts an optimizer's error to the engine's error type.
pub fn optim_error(error: OptimError) -> EngineError {
    match error {
        OptimError::Tensor(e) => EngineError::Tensor(e),
        other => EngineError::bad_input(other.to_string()),
    }
}
