//! Accumulation, clipping, optimizer and EMA: what turns losses into weights.

use crate::autograd::{Tape, record};
use crate::error::{EngineError, Result};
use crate::optim::{
    Ema, Grads, OptimError, Optimizer, Param, Schedule, clip_factor, clip_grad_norm, norm_of, scaled_by, sum_of_squares,
};
use candle_core::{DType, Tensor};
use std::collections::{BTreeMap, HashMap};

/// What a [`Trainer`] is made of.
pub struct TrainerOptions {
    /// What trains, in a fixed order.
    pub params: Vec<Param>,
    /// The update rule.
    pub optimizer: Box<dyn Optimizer>,
    /// The learning rate of each step.
    pub schedule: Schedule,
    /// Clip gradients to this norm. `None`: do not.
    pub max_grad_norm: Option<f64>,
    /// Moving average.
    pub ema: Option<Ema>,
    /// Update each parameter as soon as its gradient is there, where that gives the same: gradients of few exist at a time.
    pub fused_backward: bool,
}

/// What one step did.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// Mean loss of the step's micro-batches.
    pub loss: f64,
    /// The learning rate: the schedule's, or what the optimizer made of it by itself.
    pub lr: f64,
    /// Gradient norm before clipping, when the weights were updated.
    pub grad_norm: Option<f64>,
    /// Something that the user should know: a loss or gradient that is no number.
    pub warning: Option<String>,
}

/// Named tensors by role.
pub type State = BTreeMap<&'static str, BTreeMap<String, Tensor>>;

/// The state of training between two steps.
pub struct Trainer {
    options: TrainerOptions,
    /// Gradients that wait for an update (legacy accumulation, where each micro-batch counts as a step).
    pending: Option<Grads>,
    /// Squares of the gradients that were applied already, by parameter.
    applied: Option<Vec<f64>>,
    losses: Vec<f64>,
    non_finite: u64,
}

impl Trainer {
    /// A trainer at its beginning.
    #[must_use]
    pub fn new(options: TrainerOptions) -> Self {
        Self {
            options,
            pending: None,
            applied: None,
            losses: Vec::new(),
            non_finite: 0,
        }
    }

    /// Whether a step of one micro-batch is [`Trainer::apply`].
    #[must_use]
    pub fn fused_backward(&self) -> bool {
        self.options.fused_backward && self.pending.is_none() && self.options.optimizer.separable()
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

    /// Runs the forward pass of a micro-batch, and adds the gradients of its loss. Gradients are summed, as ai-toolkit does
    /// (quirk 6). A loss that is not finite adds nothing; it is reported as it is.
    ///
    /// # Errors
    /// When the forward or the backward pass fails.
    pub fn add(&mut self, loss: impl FnOnce() -> Result<Tensor>) -> Result<()> {
        let Some((loss, tape)) = self.forward(loss)? else {
            return Ok(());
        };
        let store = tape.backward(&loss)?;
        let grads = self
            .options
            .params
            .iter()
            .map(|p| store.get(p.var.as_tensor()).map(Tensor::detach));
        match &mut self.pending {
            None => self.pending = Some(grads.collect()),
            Some(sums) => {
                for (sum, grad) in sums.iter_mut().zip(grads) {
                    *sum = match (sum.take(), grad) {
                        (Some(a), Some(b)) => Some((a + b)?),
                        (a, b) => a.or(b),
                    };
                }
            }
        }
        Ok(())
    }

    /// The whole of step number `step` but its end: as [`Trainer::add`] once, with every parameter updated as soon as its
    /// gradient is there, which is then let go. What comes out is the same bit for bit. The norm that gradients are
    /// clipped by is that of all of them: where they are clipped, `loss` is gone through twice, first for the norm. Where
    /// they are not, and some are not finite, only those parameters stay as they are.
    ///
    /// # Errors
    /// When a pass or the arithmetic fails.
    pub fn apply(&mut self, step: u64, loss: impl Fn() -> Result<Tensor>) -> Result<()> {
        let lr = self.options.schedule.at(step);
        let Some((mut value, mut tape)) = self.forward(&loss)? else {
            return Ok(());
        };
        let (params, optimizer) = (&self.options.params, &mut self.options.optimizer);
        let places: HashMap<_, _> = params.iter().enumerate().map(|(at, p)| (p.var.id(), at)).collect();
        let mut squares = vec![0.0; params.len()];
        let clipped = self.options.max_grad_norm.filter(|_| optimizer.wants_clipping());
        let mut factor = 1.0;
        if let Some(max) = clipped {
            tape.backward_each(&value, |id, gradient| {
                if let Some(at) = places.get(&id) {
                    squares[*at] = sum_of_squares(&gradient)?;
                }
                Ok::<_, EngineError>(())
            })?;
            let norm = norm_of(&squares);
            if !norm.is_finite() {
                self.applied = Some(squares);
                return Ok(());
            }
            factor = clip_factor(norm, max);
            (value, tape) = record(&loss)?;
        }
        let mut one: Grads = vec![None; params.len()];
        tape.backward_each(&value, |id, gradient| {
            let Some(at) = places.get(&id) else {
                return Ok(());
            };
            if clipped.is_none() {
                squares[*at] = sum_of_squares(&gradient)?;
                if !squares[*at].is_finite() {
                    return Ok(());
                }
            }
            one[*at] = Some(scaled_by(gradient, factor)?);
            optimizer.step(&one, lr).map_err(optim_error)?;
            one[*at] = None;
            Ok::<_, EngineError>(())
        })?;
        self.applied = Some(squares);
        Ok(())
    }

    /// The loss of a micro-batch and the way back, unless it is not finite.
    fn forward(&mut self, loss: impl FnOnce() -> Result<Tensor>) -> Result<Option<(Tensor, Tape)>> {
        let (loss, tape) = record(loss)?;
        let value = f64::from(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?);
        if !value.is_finite() {
            self.non_finite += 1;
            self.losses.push(value);
            return Ok(None);
        }
        self.losses.push(value);
        Ok(Some((loss, tape)))
    }

    /// Ends step number `step`. With `update`, the gradients so far are clipped and applied; without, they wait for a
    /// later step.
    ///
    /// # Errors
    /// When the arithmetic fails.
    pub fn finish_step(&mut self, step: u64, update: bool) -> Result<StepReport> {
        let lr = self.options.schedule.at(step);
        let count = self.losses.len().max(1) as f64;
        let mut report = StepReport {
            loss: self.losses.iter().sum::<f64>() / count,
            lr,
            grad_norm: None,
            warning: None,
        };
        self.losses.clear();
        if self.non_finite > 0 {
            report.warning = Some(format!(
                "step {}: the loss of {} micro-batch(es) was not a finite number; nothing is learned of them",
                step + 1,
                self.non_finite
            ));
            self.non_finite = 0;
        }
        report.lr = self.options.optimizer.shown_lr(lr).map_err(optim_error)?;
        if !update {
            return Ok(report);
        }
        let optimizer = &mut self.options.optimizer;
        let norm = match (self.applied.take(), self.pending.take()) {
            (Some(squares), _) => norm_of(&squares),
            (None, Some(mut grads)) => {
                let max = self.options.max_grad_norm.filter(|_| optimizer.wants_clipping());
                let norm = clip_grad_norm(&mut grads, max.unwrap_or(f64::INFINITY)).map_err(optim_error)?;
                if norm.is_finite() {
                    optimizer.step(&grads, lr).map_err(optim_error)?;
                }
                norm
            }
            (None, None) => return Ok(report),
        };
        if !norm.is_finite() {
            report.warning = Some(format!(
                "step {}: the gradients are not finite numbers; the weights stay as they are",
                step + 1
            ));
            return Ok(report);
        }
        report.grad_norm = Some(norm);
        report.lr = optimizer.shown_lr(lr).map_err(optim_error)?;
        if let Some(ema) = &mut self.options.ema {
            ema.update().map_err(optim_error)?;
        }
        Ok(report)
    }

    /// Whether all trained weights are finite numbers.
    ///
    /// # Errors
    /// When the arithmetic fails.
    pub fn is_finite(&self) -> Result<bool> {
        for param in &self.options.params {
            // Zero times infinity, and times no number, is no number.
            let sum = param.var.as_tensor().affine(0.0, 0.0)?.sum_all()?;
            if !sum.to_dtype(DType::F32)?.to_scalar::<f32>()?.is_finite() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// What a checkpoint holds, by role: `weights`, `optimizer`, and where they exist `ema` and `gradients`. The second value is the number of EMA updates.
    ///
    /// # Errors
    /// When the device fails.
    pub fn state(&self) -> Result<(State, u64)> {
        let mut out = BTreeMap::new();
        let weights = self
            .options
            .params
            .iter()
            .map(|p| (p.name.clone(), p.var.as_detached_tensor()))
            .collect();
        out.insert("weights", weights);
        out.insert("optimizer", self.options.optimizer.state().map_err(optim_error)?);
        let mut updates = 0;
        if let Some(ema) = &self.options.ema {
            let (shadow, n) = ema.state();
            updates = n;
            out.insert("ema", shadow);
        }
        if let Some(pending) = &self.pending {
            let names = self.options.params.iter().map(|p| p.name.clone());
            let grads = names.zip(pending).filter_map(|(n, g)| Some((n, g.clone()?))).collect();
            out.insert("gradients", grads);
        }
        Ok((out, updates))
    }

    /// Sets the parameters from the weights of [`Trainer::state`], bit for bit, or none of them.
    ///
    /// # Errors
    /// When a tensor is missing, is one too many, or has another shape.
    pub fn restore_weights(&self, tensors: &BTreeMap<String, Tensor>) -> Result<()> {
        let params = &self.options.params;
        if tensors.len() != params.len() {
            return Err(EngineError::bad_input(format!(
                "it has {} trained tensors, this job {}",
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
        for (p, t) in params.iter().zip(found) {
            p.var
                .set(&t.to_device(p.var.device())?.to_dtype(DType::F32)?.contiguous()?)?;
        }
        Ok(())
    }

    /// Takes back the rest of what [`Trainer::state`] gave: all but the weights.
    ///
    /// # Errors
    /// When something is missing or has another shape.
    pub fn restore(&mut self, mut state: BTreeMap<String, BTreeMap<String, Tensor>>, ema_updates: u64) -> Result<()> {
        let optimizer = state.remove("optimizer").unwrap_or_default();
        self.options.optimizer.load_state(&optimizer).map_err(optim_error)?;
        // A state from before EMA was turned on: the average begins with the weights as they are.
        if let Some(ema) = &mut self.options.ema
            && let Some(shadow) = state.remove("ema")
        {
            ema.load_state(&shadow, ema_updates).map_err(optim_error)?;
        }
        self.pending = match state.remove("gradients") {
            None => None,
            Some(mut grads) => Some(
                self.options
                    .params
                    .iter()
                    .map(|p| grads.remove(&p.name).map(|g| g.to_device(p.var.device())).transpose())
                    .collect::<candle_core::Result<_>>()?,
            ),
        };
        Ok(())
    }
}

/// An optimizer's error as the engine's.
pub(crate) fn optim_error(error: OptimError) -> EngineError {
    match error {
        OptimError::Tensor(e) => EngineError::Tensor(e),
        other => EngineError::bad_input(other.to_string()),
    }
}
