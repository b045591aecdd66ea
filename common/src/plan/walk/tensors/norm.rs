//! Norms, as `kernels/src/nn/norm/tensors.rs`: in float32 whatever the dtype of the input.
//!
//! The walk allocates a tensor without data, and drops it where the engine drops its tensor: `drop(self.floats(n))` is a temporary.

use super::super::meter::MetaTensor;
use super::super::norm::Norm;
use super::super::tape::Walk;

/// Whether SiLU is applied to the result of a norm, as part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::plan::walk) enum NormActivation {
    None,
    Silu,
}

impl Walk {
    pub(in crate::plan::walk) fn norm_of_tensors(
        &self,
        x: &MetaTensor,
        norm: Norm,
        activation: NormActivation,
    ) -> MetaTensor {
        let tracked = self.is_recording() && (x.tracked || norm.trained_elements > 0.0);
        let y = match self.backend.has_cuda_kernels() {
            true => self.tensor(x.dims, tracked),
            false => MetaTensor {
                tracked,
                ..self.composed_norm(x, norm, activation)
            },
        };
        if tracked {
            let saved = x.clone();
            self.record_step(&y, move |walk, gradient| {
                let mut gradients = vec![];
                // There is no kernel for the gradients of weight and bias.
                if walk.backend.has_cuda_kernels() && norm.trained_elements == 0.0 {
                    gradients.push((saved.id, walk.tensor(saved.dims, false)));
                } else if let Some(dx) = walk.norm_input_gradient(&saved, norm, activation) {
                    gradients.push((saved.id, walk.narrowed(dx, saved.dims, false)));
                }
                if norm.trained_elements > 0.0 {
                    gradients.push((norm.trained_id(), walk.floats(norm.trained_elements)));
                }
                drop((saved, gradient));
                gradients
            });
        }
        y
    }

    fn composed_norm(&self, x: &MetaTensor, norm: Norm, activation: NormActivation) -> MetaTensor {
        let n = x.elements();
        let normalised = self.normalised(n, norm);
        let affine = self.affine(n, norm);
        let activated = (activation == NormActivation::Silu).then(|| self.floats(n));
        let y = self.narrowed(activated.unwrap_or_else(|| affine.clone()), x.dims, false);
        drop((normalised, affine));
        y
    }

    /// The rows, normalised.
    fn normalised(&self, n: f64, norm: Norm) -> MetaTensor {
        let wide = self.widened(n);
        let centred = norm.centres.then(|| self.floats(n));
        drop(self.floats(n));
        let normalised = self.floats(n);
        drop((wide, centred));
        normalised
    }

    /// The normalised rows times the weight, plus the bias.
    fn affine(&self, n: f64, norm: Norm) -> MetaTensor {
        let product = self.floats(n);
        if !norm.centres {
            return product;
        }
        let sum = self.floats(n);
        drop(product);
        sum
    }

    /// The gradient of the input, in float32; `None` if x is not tracked.
    fn norm_input_gradient(&self, x: &MetaTensor, norm: Norm, activation: NormActivation) -> Option<MetaTensor> {
        let n = x.elements();
        let normalised = self.normalised(n, norm);
        let mut dy = self.widened(n);
        if activation == NormActivation::Silu {
            let affine = self.affine(n, norm);
            let derivative = self.silu_derivative(n);
            let product = self.floats(n);
            drop((derivative, affine));
            dy = Some(product);
        }
        if norm.trained_elements > 0.0 {
            drop(self.floats(n));
        }
        if !x.tracked {
            return None;
        }
        let g = self.floats(n);
        drop(self.floats(n));
        let centred = norm.centres.then(|| self.floats(n));
        let shifted = self.floats(n);
        let difference = self.floats(n);
        drop((centred, shifted));
        let dx = self.floats(n);
        drop((difference, g, dy, normalised));
        Some(dx)
    }
}
