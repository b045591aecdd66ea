//! The tape of a forward pass and its backward pass, as `kernels/src/autograd`.

use super::meter::{MetaTensor, Meter};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

/// Takes the gradients of a step's outputs and returns those of its inputs, by tensor id.
type Backward = Box<dyn FnOnce(&Walk, Vec<Option<MetaTensor>>) -> Vec<(u64, MetaTensor)>>;

struct Step {
    outputs: Vec<u64>,
    backward: Backward,
}

/// What is recorded of a forward pass.
enum Recording {
    /// All steps.
    Tape(Vec<Step>),
    /// Nothing: the forward pass runs again in the backward pass.
    Again,
}

/// The form in which the engine runs operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::plan) enum Form {
    /// The engine's kernels for CPUs.
    Cpu,
    /// The engine's kernels for CUDA, and candle's operations where there is none.
    Cuda,
    /// candle's operations on Metal.
    Metal,
    /// candle's operations on a CPU: the engine's portable mode.
    Portable,
    /// The same with emulated kernels for CUDA.
    EmulatedKernels,
}

/// The kind of device that a walk is for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::plan) struct Backend {
    /// Bytes per number of the compute dtype.
    pub(in crate::plan) width: f64,
    pub(in crate::plan) form: Form,
}

impl Backend {
    /// A CPU computes in float32.
    pub(in crate::plan) const CPU: Self = Self {
        width: 4.0,
        form: Form::Cpu,
    };

    /// Whether the operations are the engine's kernels for CPUs.
    pub(in crate::plan) fn is_cpu(self) -> bool {
        self.form == Form::Cpu
    }

    /// Whether operations are the engine's kernels for CUDA.
    pub(super) fn has_cuda_kernels(self) -> bool {
        matches!(self.form, Form::Cuda | Form::EmulatedKernels)
    }
}

/// One walk over the steps of a job's phase.
pub(in crate::plan) struct Walk {
    pub(super) meter: Rc<Meter>,
    pub(super) backend: Backend,
    recordings: RefCell<Vec<Recording>>,
}

impl Walk {
    pub(in crate::plan) fn new(backend: Backend) -> Self {
        Self {
            meter: Rc::default(),
            backend,
            recordings: RefCell::default(),
        }
    }

    /// The peak so far, in bytes.
    pub(in crate::plan) fn peak(&self) -> f64 {
        self.meter.peak()
    }

    /// The FLOPs of all products so far, counted on a CPU only. Element-wise operations are not counted.
    pub(in crate::plan) fn flops(&self) -> f64 {
        self.meter.flops()
    }

    /// A new tensor in the compute dtype.
    pub(in crate::plan) fn tensor(&self, dims: [f64; 4], tracked: bool) -> MetaTensor {
        let bytes = dims.iter().product::<f64>() * self.backend.width;
        MetaTensor {
            dims,
            id: self.meter.id(),
            tracked,
            contiguous: true,
            buffer: Some(Rc::new(self.meter.buffer(bytes))),
        }
    }

    /// A new flat tensor of this many numbers in float32.
    pub(super) fn floats(&self, elements: f64) -> MetaTensor {
        MetaTensor {
            dims: [elements, 1.0, 1.0, 1.0],
            id: self.meter.id(),
            tracked: false,
            contiguous: true,
            buffer: Some(Rc::new(self.meter.buffer(4.0 * elements))),
        }
    }

    /// The same elements as another tensor.
    pub(super) fn view(&self, of: &MetaTensor, dims: [f64; 4], contiguous: bool) -> MetaTensor {
        MetaTensor {
            dims,
            id: self.meter.id(),
            contiguous,
            ..of.clone()
        }
    }

    /// The first `batch` items of a tensor.
    pub(in crate::plan) fn view_of(&self, x: &MetaTensor, batch: f64) -> MetaTensor {
        let mut dims = x.dims;
        dims[0] = batch;
        self.view(x, dims, true)
    }

    /// a and b [batch, tokens, features, 1], one after the other along the features.
    pub(in crate::plan) fn cat_features(&self, a: &MetaTensor, b: &MetaTensor) -> MetaTensor {
        let mut dims = a.dims;
        dims[2] += b.dims[2];
        let y = self.tensor(dims, self.is_recording() && (a.tracked || b.tracked));
        if y.tracked {
            let parts = [(a.id, a.dims, a.tracked), (b.id, b.dims, b.tracked)];
            self.record_step(&y, move |walk, gradient| {
                let parts = parts.into_iter().filter(|(.., tracked)| *tracked);
                parts
                    .map(|(id, dims, _)| (id, walk.view(&gradient, dims, false)))
                    .collect()
            });
        }
        y
    }

    /// The tensor itself, or a copy if its elements are not adjacent.
    pub(super) fn contiguous(&self, x: MetaTensor) -> MetaTensor {
        match x.contiguous {
            true => x,
            false => self.tensor(x.dims, x.tracked),
        }
    }

    pub(super) fn is_recording(&self) -> bool {
        !self.recordings.borrow().is_empty()
    }

    /// Adds a step to the innermost recording.
    pub(super) fn record_step(
        &self,
        output: &MetaTensor,
        backward: impl FnOnce(&Self, MetaTensor) -> Vec<(u64, MetaTensor)> + 'static,
    ) {
        self.record_step_of(vec![output.id], move |walk, gradients| {
            match gradients.into_iter().flatten().next() {
                Some(gradient) => {
                    // The gradient itself stays in memory, too.
                    let gradients = backward(walk, walk.contiguous(gradient.clone()));
                    drop(gradient);
                    gradients
                }
                None => Vec::new(),
            }
        });
    }

    /// Adds a step with several outputs to the innermost recording.
    fn record_step_of(
        &self,
        outputs: Vec<u64>,
        backward: impl FnOnce(&Self, Vec<Option<MetaTensor>>) -> Vec<(u64, MetaTensor)> + 'static,
    ) {
        if let Some(Recording::Tape(steps)) = self.recordings.borrow_mut().last_mut() {
            steps.push(Step {
                outputs,
                backward: Box::new(backward),
            });
        }
    }

    /// Runs `forward` and records its steps.
    fn record<R>(&self, forward: impl FnOnce() -> R) -> (R, Vec<Step>) {
        self.recordings.borrow_mut().push(Recording::Tape(Vec::new()));
        let result = forward();
        match self.recordings.borrow_mut().pop() {
            Some(Recording::Tape(steps)) => (result, steps),
            _ => (result, Vec::new()),
        }
    }

    /// Runs `forward` and its backward pass. `drops_gradients`: the gradient of a trained tensor is dropped as soon as it
    /// is complete. Returns the gradients of the trained tensors otherwise.
    pub(in crate::plan) fn forward_backward(
        &self,
        drops_gradients: bool,
        forward: impl FnOnce() -> MetaTensor,
    ) -> HashMap<u64, MetaTensor> {
        let (loss, tape) = self.record(forward);
        let gradient = self.tensor(loss.dims, false);
        self.backward(tape, HashMap::from([(loss.id, gradient)]), drops_gradients)
    }

    fn backward(
        &self,
        mut tape: Vec<Step>,
        mut gradients: HashMap<u64, MetaTensor>,
        drops_gradients: bool,
    ) -> HashMap<u64, MetaTensor> {
        let outputs: HashSet<u64> = tape.iter().flat_map(|step| step.outputs.iter().copied()).collect();
        while let Some(step) = tape.pop() {
            let of_outputs: Vec<_> = step.outputs.iter().map(|id| gradients.remove(id)).collect();
            if of_outputs.iter().all(Option::is_none) {
                continue;
            }
            for (id, gradient) in (step.backward)(self, of_outputs) {
                match gradients.remove(&id) {
                    None => {
                        if !drops_gradients || outputs.contains(&id) || id >= TRAINED {
                            gradients.insert(id, gradient);
                        }
                    }
                    Some(before) => {
                        let sum = self.tensor(before.dims, false);
                        drop((before, gradient));
                        gradients.insert(id, sum);
                    }
                }
            }
            if drops_gradients {
                gradients.retain(|id, _| *id < TRAINED);
            }
        }
        gradients
    }

    /// Gradient checkpointing: runs `forward(inputs)` and keeps only the inputs; the backward pass runs it again.
    pub(super) fn checkpoint(
        &self,
        inputs: Vec<MetaTensor>,
        forward: impl Fn(&Self, &[MetaTensor]) -> Vec<MetaTensor> + 'static,
    ) -> Vec<MetaTensor> {
        if !self.is_recording() {
            return forward(self, &inputs);
        }
        self.recordings.borrow_mut().push(Recording::Again);
        let outputs = forward(self, &inputs);
        self.recordings.borrow_mut().pop();
        if outputs.iter().all(|output| !output.tracked) {
            return outputs;
        }
        let ids = outputs.iter().map(|output| output.id).collect();
        self.record_step_of(ids, move |walk, gradients| {
            let (recomputed, tape) = walk.record(|| forward(walk, &inputs));
            let seeds = recomputed.iter().zip(gradients);
            let seeds = seeds.filter_map(|(output, gradient)| Some((output.id, gradient?)));
            walk.backward(tape, seeds.collect(), false).into_iter().collect()
        });
        outputs
    }
}

/// Ids of trained tensors begin here.
pub(super) const TRAINED: u64 = 1 << 48;
