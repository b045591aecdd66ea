//! Operations on tokens, as `modulate`, `rotary` and candle's `narrow`, `cat` and `*` in the engine's transformers.

use super::meter::MetaTensor;
use super::tape::{Form, Walk};

/// The cosines and sines of a rotary embedding, which the backward pass needs, too: on the CPU and on the device.
#[derive(Clone)]
pub(super) struct Rotary(#[expect(dead_code, reason = "only its drop matters")] [Option<MetaTensor>; 2]);

impl Walk {
    /// x (1 + scale) + shift: x [batch, tokens, features], the others [batch, 1, features].
    pub(super) fn modulate(&self, x: &MetaTensor, scale: &MetaTensor, shift: &MetaTensor) -> MetaTensor {
        let (x, scale) = (self.contiguous(x.clone()), self.contiguous(scale.clone()));
        let tracked = self.is_recording() && [&x, &scale, shift].iter().any(|input| input.tracked);
        let product = self.is_composed().then(|| self.tensor(x.dims, false));
        let y = self.tensor(x.dims, tracked);
        drop(product);
        if tracked {
            let saved = (scale.tracked.then(|| x.clone()), x.tracked.then(|| scale.clone()));
            let inputs = [&x, &scale, shift].map(|input| (input.id, input.dims, input.tracked));
            self.record_step(&y, move |walk, gradient| {
                let mut gradients = Vec::new();
                for (index, (id, dims, tracked)) in inputs.into_iter().enumerate() {
                    if tracked {
                        gradients.push((id, walk.token_gradient(index > 0, index == 1, &gradient, dims)));
                    }
                }
                drop((saved, gradient));
                gradients
            });
        }
        y
    }

    /// x + gate y: x and y [batch, tokens, features], gate [batch, 1, features].
    pub(super) fn gated_residual(&self, x: &MetaTensor, gate: &MetaTensor, y: &MetaTensor) -> MetaTensor {
        let (gate, y) = (self.contiguous(gate.clone()), self.contiguous(y.clone()));
        let tracked = self.is_recording() && [x, &gate, &y].iter().any(|input| input.tracked);
        let product = self.is_composed().then(|| self.tensor(x.dims, false));
        let sum = self.tensor(x.dims, tracked);
        drop(product);
        if tracked {
            let saved = (gate.tracked.then(|| y.clone()), y.tracked.then(|| gate.clone()));
            let x_id = x.tracked.then_some(x.id);
            let inputs = [&gate, &y].map(|input| (input.id, input.dims, input.tracked));
            self.record_step(&sum, move |walk, gradient| {
                let mut gradients = Vec::new();
                for (index, (id, dims, tracked)) in inputs.into_iter().enumerate() {
                    if tracked {
                        gradients.push((id, walk.token_gradient(index == 0, index == 0, &gradient, dims)));
                    }
                }
                drop(saved);
                gradients.extend(x_id.map(|id| (id, gradient)));
                gradients
            });
        }
        sum
    }

    /// Whether an operation for which there are kernels is composed of candle's operations.
    fn is_composed(&self) -> bool {
        !self.backend.is_cpu() && !self.backend.has_cuda_kernels()
    }

    /// A gradient of these dimensions, which is a sum over tokens (of products) or as large as that of the result.
    fn token_gradient(&self, is_sum: bool, of_products: bool, gradient: &MetaTensor, dims: [f64; 4]) -> MetaTensor {
        if self.backend.is_cpu() || !is_sum {
            return self.tensor(dims, false);
        }
        let n = gradient.elements();
        let half = self.backend.width < 4.0;
        let wide = (half || of_products).then(|| {
            let operands = (half && of_products).then(|| [self.floats(n), self.floats(n)]);
            let wide = self.floats(n);
            drop(operands);
            wide
        });
        let sum = self.floats(dims.iter().product());
        drop(wide);
        match half {
            true => self.tensor(dims, false),
            false => self.view(&sum, dims, true),
        }
    }

    /// A part of an axis, which is copied where its elements are not adjacent.
    pub(super) fn narrow(&self, x: &MetaTensor, axis: usize, length: f64) -> MetaTensor {
        if length >= x.dims[axis] {
            return x.clone();
        }
        let mut dims = x.dims;
        dims[axis] = length;
        let is_adjacent = dims[..axis].iter().product::<f64>() <= 1.0;
        let tracked = self.is_recording() && x.tracked;
        let y = match is_adjacent {
            true => MetaTensor {
                tracked,
                ..self.view(x, dims, true)
            },
            false => self.tensor(dims, tracked),
        };
        if tracked {
            let (whole, result) = (x.clone(), y.clone());
            self.record_step(&y, move |walk, gradient| {
                let seed = walk.seed(&result);
                // candle's backward pass: the gradient between zeros is added to zeros.
                let copied = (!is_adjacent).then(|| {
                    let zeros = walk.tensor(dims, false);
                    let sum = walk.tensor(dims, false);
                    drop(zeros);
                    sum
                });
                let mut rest = whole.dims;
                rest[axis] -= length;
                let padding = walk.tensor(rest, false);
                let padded = walk.tensor(whole.dims, false);
                drop(padding);
                let zeros = walk.tensor(whole.dims, false);
                let sum = walk.tensor(whole.dims, false);
                drop((zeros, padded, copied, seed, gradient, result));
                vec![(whole.id, sum)]
            });
        }
        y
    }

    /// The vectors [batch, 1, features] of x [batch, 1, count * features].
    pub(super) fn chunks<const N: usize>(&self, x: &MetaTensor) -> [MetaTensor; N] {
        let width = x.dims[2] / N as f64;
        std::array::from_fn(|_| self.narrow(x, 2, width))
    }

    /// The first token of each item, [batch, 1, features].
    pub(in crate::plan) fn first_token(&self, x: &MetaTensor) -> MetaTensor {
        self.narrow(x, 1, 1.0)
    }

    /// x [batch, tokens, ..] with zeros up to this many features.
    pub(in crate::plan) fn with_features(&self, x: &MetaTensor, features: f64) -> MetaTensor {
        let mut dims = x.dims;
        dims[2] = features;
        self.rearranged(x, dims)
    }

    /// a and b [batch, tokens, features], one after the other along the tokens.
    pub(in crate::plan) fn cat_tokens(&self, a: &MetaTensor, b: &MetaTensor) -> MetaTensor {
        self.cat(a, b)
    }

    /// a and b [batch, tokens, features], one after the other along the features, with candle's operation.
    pub(super) fn joined_features(&self, a: &MetaTensor, b: &MetaTensor) -> MetaTensor {
        let mut dims = a.dims;
        dims[2] += b.dims[2];
        let y = self.tensor(dims, self.is_recording() && (a.tracked || b.tracked));
        self.record_in_candle(&y, [a, b], false);
        y
    }

    /// a * b, with candle's operation.
    pub(super) fn product(&self, a: &MetaTensor, b: &MetaTensor) -> MetaTensor {
        let y = self.tensor(a.dims, self.is_recording() && (a.tracked || b.tracked));
        self.record_in_candle(&y, [a, b], true);
        y
    }

    /// a + b, with candle's operation.
    pub(super) fn sum_in_candle(&self, a: &MetaTensor, b: &MetaTensor) -> MetaTensor {
        let y = self.tensor(a.dims, self.is_recording() && (a.tracked || b.tracked));
        self.record_in_candle(&y, [a, b], false);
        y
    }

    /// The same elements in another shape, with candle's operation, which records it.
    pub(super) fn reshaped_in_candle(&self, x: &MetaTensor) -> MetaTensor {
        let y = self.view(x, x.dims, true);
        let y = MetaTensor {
            tracked: self.is_recording() && x.tracked,
            ..y
        };
        if y.tracked {
            let held = (x.clone(), y.clone());
            self.record_step(&y, move |walk, gradient| {
                let seed = walk.seed(&held.1);
                let zeros = walk.tensor(held.0.dims, false);
                let sum = walk.tensor(held.0.dims, false);
                drop((zeros, seed, gradient));
                vec![(held.0.id, sum)]
            });
        }
        y
    }

    /// Records an operation of candle: its inputs and its result stay in candle's graph until the backward pass, which adds each
    /// gradient to zeros.
    fn record_in_candle(&self, y: &MetaTensor, inputs: [&MetaTensor; 2], has_products: bool) {
        if !y.tracked {
            return;
        }
        let held = (inputs.map(Clone::clone), y.clone());
        self.record_step(y, move |walk, gradient| {
            let seed = walk.seed(&held.1);
            let (mut gradients, mut products) = (Vec::new(), Vec::new());
            for input in held.0.iter().filter(|input| input.tracked) {
                products.extend(has_products.then(|| walk.tensor(input.dims, false)));
                let zeros = walk.tensor(input.dims, false);
                let sum = walk.tensor(input.dims, false);
                drop(zeros);
                gradients.push((input.id, sum));
            }
            drop((held, seed, gradient, products));
            gradients
        });
    }

    /// The gradient with which candle's backward pass starts: that of the tape, added to zeros.
    fn seed(&self, result: &MetaTensor) -> MetaTensor {
        let zeros = self.tensor(result.dims, false);
        let seed = self.tensor(result.dims, false);
        drop(zeros);
        seed
    }

    /// The rotary embedding for this many positions and features of a head.
    pub(super) fn rotary(&self, positions: f64, head_width: f64) -> Rotary {
        let numbers = positions * head_width;
        // On the CPU they are lists that grow by doubling.
        let is_gpu = matches!(self.backend.form, Form::Cuda | Form::Metal);
        let lists = (!is_gpu).then(|| self.floats(2f64.powf(numbers.max(1.0).log2().ceil())));
        Rotary([lists, (!self.backend.is_cpu()).then(|| self.floats(numbers))])
    }

    /// Every head of x rotated.
    pub(super) fn rotate(&self, x: &MetaTensor, rotary: &Rotary) -> MetaTensor {
        let x = self.contiguous(x.clone());
        let tracked = self.is_recording() && x.tracked;
        let y = match self.is_composed() {
            true => self.rotate_tensors(&x, tracked),
            false => self.tensor(x.dims, tracked),
        };
        if tracked {
            let (id, dims, rotary) = (x.id, x.dims, rotary.clone());
            self.record_step(&y, move |walk, gradient| {
                let dx = match walk.is_composed() {
                    true => walk.rotate_tensors(&gradient, false),
                    false => walk.tensor(dims, false),
                };
                drop((gradient, rotary));
                vec![(id, walk.view(&dx, dims, true))]
            });
        }
        y
    }

    fn rotate_tensors(&self, x: &MetaTensor, tracked: bool) -> MetaTensor {
        let n = x.elements();
        let half = self.backend.width < 4.0;
        let wide = half.then(|| self.floats(n));
        let rotated = [0; 2].map(|_| {
            let products = [self.floats(n / 2.0), self.floats(n / 2.0)];
            let sum = self.floats(n / 2.0);
            drop(products);
            sum
        });
        let joined = self.floats(n);
        let y = match half {
            true => self.tensor(x.dims, tracked),
            false => self.view(&joined, x.dims, true),
        };
        drop((wide, rotated, joined));
        MetaTensor { tracked, ..y }
    }
}
