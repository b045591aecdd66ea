//! Activations, as `kernels/src/nn/activation`: in float32 whatever the dtype of the input.

use super::super::meter::MetaTensor;
use super::super::tape::Walk;

/// An activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::plan::walk) enum Activation {
    Silu,
    /// GELU with the approximation by tanh.
    GeluTanh,
    /// CLIP's. The exact GELU of other encoders needs no more.
    QuickGelu,
    /// The first half of the features times the GELU of the second.
    Geglu,
}

impl Activation {
    /// The part of the input's features that the result has.
    pub(in crate::plan::walk) fn outputs(self) -> f64 {
        if self == Self::Geglu { 0.5 } else { 1.0 }
    }
}

impl Walk {
    pub(in crate::plan::walk) fn activation_of_tensors(&self, x: &MetaTensor, activation: Activation) -> MetaTensor {
        let mut dims = x.dims;
        dims[2] *= activation.outputs();
        let tracked = self.is_recording() && x.tracked;
        let n = x.elements() * activation.outputs();
        let y = match activation {
            _ if self.backend.has_cuda_kernels() => self.tensor(dims, tracked),
            Activation::Silu | Activation::GeluTanh => {
                let wide = self.widened(n);
                let y = self.floats(n);
                drop(wide);
                self.narrowed(y, dims, tracked)
            }
            Activation::QuickGelu => {
                let wide = self.widened(n);
                let parts = [self.floats(n), self.floats(n)];
                let y = self.floats(n);
                drop(parts);
                let y = self.narrowed(y, dims, tracked);
                drop(wide);
                y
            }
            Activation::Geglu => {
                let halves = [self.widened(n), self.widened(n)];
                let value = self.floats(n);
                let product = self.floats(n);
                drop((halves, value));
                self.narrowed(product, dims, tracked)
            }
        };
        if tracked {
            let saved = x.clone();
            self.record_step(&y, move |walk, gradient| {
                let dx = match walk.backend.has_cuda_kernels() {
                    true => walk.tensor(saved.dims, false),
                    false => walk.narrowed(walk.activation_gradient(n, activation), saved.dims, false),
                };
                let gradients = vec![(saved.id, dx)];
                drop((saved, gradient));
                gradients
            });
        }
        y
    }

    /// The gradient of an input, in float32. `n`: the elements of the result.
    fn activation_gradient(&self, n: f64, activation: Activation) -> MetaTensor {
        if activation != Activation::Geglu {
            let wide = self.widened(n);
            // The inner function and its slope.
            let inner = (activation == Activation::GeluTanh).then(|| [self.floats(n), self.floats(n)]);
            let derivative = self.silu_derivative(n);
            drop((wide, inner));
            let dy = self.widened(n);
            let dx = self.floats(n);
            drop((derivative, dy));
            return dx;
        }
        let halves = [self.widened(n), self.widened(n)];
        let dy = self.widened(n);
        let value = self.floats(n);
        let d_hidden = self.floats(n);
        drop(value);
        let product = self.floats(n);
        drop(dy);
        let derivative = self.gelu_derivative(n);
        let d_gate = self.floats(n);
        drop((product, derivative));
        let dx = self.floats(2.0 * n);
        drop((d_hidden, d_gate, halves));
        dx
    }

    /// `s + s (1 - s) x` with the logistic function s.
    pub(super) fn silu_derivative(&self, n: f64) -> MetaTensor {
        let negated = self.floats(n);
        let exponential = self.floats(n);
        let sum = self.floats(n);
        drop(exponential);
        let s = self.floats(n);
        drop((negated, sum));
        let rest = self.floats(n);
        let first = self.floats(n);
        drop(rest);
        let second = self.floats(n);
        drop(first);
        let derivative = self.floats(n);
        drop((second, s));
        derivative
    }

    /// `Phi(x) + x phi(x)`.
    fn gelu_derivative(&self, n: f64) -> MetaTensor {
        let square = self.floats(n);
        let scaled = self.floats(n);
        drop(square);
        let exponential = self.floats(n);
        let density = self.floats(n);
        drop((scaled, exponential));
        let argument = self.floats(n);
        let erf = self.floats(n);
        let sum = self.floats(n);
        drop(erf);
        let normal = self.floats(n);
        drop((sum, argument));
        let product = self.floats(n);
        drop(density);
        let derivative = self.floats(n);
        drop((normal, product));
        derivative
    }
}
