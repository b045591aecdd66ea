//! Operations composed of candle's, as the `tensors.rs` files of `kernels/src/nn`: what CUDA, Metal and portable mode run.
//!
//! Every local variable of the engine's functions that holds a tensor is one here, and is dropped at the same place.

mod activation;
mod attention;
mod convolution;
mod layer;
mod norm;

pub(super) use activation::Activation;
pub(super) use attention::AttentionOptions;
pub(super) use convolution::ConvSizes;
pub(super) use norm::NormActivation;

use super::meter::MetaTensor;
use super::tape::{Backend, Form, Walk};

impl Backend {
    /// Whether the compute dtype has 16 bits.
    pub(super) fn is_half(&self) -> bool {
        self.width < 4.0
    }

    /// Whether candle's operations run on a CPU.
    fn is_portable(&self) -> bool {
        matches!(self.form, Form::Portable | Form::EmulatedKernels)
    }

    /// Whether products of 16-bit matrices are computed in float32 with converted operands: candle on a CPU.
    fn widens_products(&self) -> bool {
        self.is_portable() && self.is_half()
    }
}

impl Walk {
    /// A flat tensor in the compute dtype.
    pub(super) fn numbers(&self, elements: f64) -> MetaTensor {
        self.tensor([elements, 1.0, 1.0, 1.0], false)
    }

    /// A copy in float32 of this many numbers of the compute dtype; `None` if they are in float32.
    pub(super) fn widened(&self, elements: f64) -> Option<MetaTensor> {
        self.backend.is_half().then(|| self.floats(elements))
    }

    /// A float32 tensor in the compute dtype with these dimensions: itself, or a copy.
    pub(super) fn narrowed(&self, wide: MetaTensor, dims: [f64; 4], tracked: bool) -> MetaTensor {
        let narrow = match self.backend.is_half() {
            true => self.tensor(dims, tracked),
            false => self.view(&wide, dims, true),
        };
        MetaTensor { tracked, ..narrow }
    }

    /// The product of matrices with `a` and `b` elements in the compute dtype: `result` elements.
    pub(super) fn product_of(&self, a: f64, b: f64, result: f64) -> MetaTensor {
        let wide = self
            .backend
            .widens_products()
            .then(|| [a, b, result].map(|n| self.floats(n)));
        let y = self.numbers(result);
        drop(wide);
        y
    }
}
