//! A layer whose change is a tensor in the shape of its weight, as `engine/src/adapters/difference.rs` and `engine/src/adapters/loha`:
//! the layer, the product of the input with the change in the compute dtype, and their sum.

use super::layers::{Adapter, AdapterForm, Layer};
use super::meter::Shaped;
use super::tape::Walk;
use super::tensors::ConvSizes;

/// Which of a layer's trained tensors is the difference of the bias.
const BIAS: u64 = 3;

/// A change that is applied to an input.
#[derive(Clone, Copy)]
struct Applied {
    x_dims: [f64; 4],
    output: [f64; 4],
    /// Elements of the weight.
    weights: f64,
    kernel: f64,
    stride: f64,
    is_linear: bool,
}

impl Applied {
    fn inputs(&self) -> f64 {
        self.x_dims.iter().product()
    }

    fn outputs(&self) -> f64 {
        self.output.iter().product()
    }

    fn conv(&self) -> ConvSizes {
        ConvSizes {
            input: self.x_dims,
            outputs: self.output[1],
            kernel: self.kernel,
            stride: self.stride,
            size: [self.output[2], self.output[3]],
        }
    }
}

/// What the backward pass needs besides the input.
#[expect(dead_code, reason = "only its drop matters")]
struct Kept {
    change: Option<Shaped>,
    narrow: Option<Shaped>,
}

impl Walk {
    pub(super) fn layer_with_dense(&self, layer: &Layer, adapter: Adapter, x: &Shaped, is_linear: bool) -> Shaped {
        let base = Layer {
            adapter: None,
            ..layer.clone()
        };
        let y = self.layer(&base, x, is_linear);
        let product = Self::sizes_of(layer, x, is_linear);
        let applied = Applied {
            x_dims: x.dims,
            output: product.output,
            weights: layer.elements(),
            kernel: layer.kernel,
            stride: layer.stride,
            is_linear,
        };
        let recording = self.is_recording();
        let is_hadamard = adapter.form == AdapterForm::Hadamard;
        let change = is_hadamard.then(|| self.hadamard(&applied));
        self.meter.multiply(product.rows * layer.elements());
        // In half precision, the change in the compute dtype.
        let narrow = self.backend.is_half().then(|| self.numbers(applied.weights));
        let product = match is_linear || self.backend.is_cpu() {
            true => self.product_of(applied.inputs(), applied.weights, applied.outputs()),
            false => self.convolution(&applied.conv(), false),
        };
        let has_bias = layer.bias && !is_hadamard;
        let added = match has_bias && !self.backend.is_cpu() && !self.backend.has_cuda_kernels() {
            true => {
                let with_bias = self.numbers(applied.outputs());
                drop(product);
                with_bias
            }
            false => product,
        };
        let sum = self.tensor(applied.output, recording);
        drop(added);
        if recording {
            let rank = is_hadamard.then_some(adapter.rank);
            let bias = has_bias.then_some(layer.outputs);
            self.record_dense(applied, layer, (x, &y, &sum), (rank, bias), Kept { change, narrow });
        }
        sum
    }

    /// The change of a LoHa: two products, and their product before and after it is scaled.
    fn hadamard(&self, a: &Applied) -> Shaped {
        let products = [0; 2].map(|_| self.floats(a.weights));
        let product = self.floats(a.weights);
        drop(products);
        let scaled = self.floats(a.weights);
        drop(product);
        scaled
    }

    fn record_dense(
        &self,
        a: Applied,
        layer: &Layer,
        (x, y, sum): (&Shaped, &Shaped, &Shaped),
        (rank, bias): (Option<f64>, Option<f64>),
        kept: Kept,
    ) {
        let (saved, y_id, y_tracked) = (x.clone(), y.id, y.tracked);
        let (trained, bias_id) = ([0, 1].map(|which| layer.trained_id(which)), layer.trained_id(BIAS));
        let (outputs, columns) = (layer.outputs, layer.fan_in());
        self.record_step(sum, move |walk, gradient| {
            let rows = a.outputs() / a.output[if a.is_linear { 2 } else { 1 }];
            walk.meter.multiply(2.0 * rows * a.weights);
            let is_cpu = walk.backend.is_cpu();
            let d_weight = match a.is_linear || is_cpu {
                true => walk.product_of(a.outputs(), a.inputs(), a.weights),
                false => walk.convolution_weight_gradient(&a.conv(), false),
            };
            let mut gradients = Vec::new();
            if saved.tracked {
                let dx = match a.is_linear || is_cpu {
                    true => walk.product_of(a.outputs(), a.weights, a.inputs()),
                    false => walk.convolution_input_gradient(&a.conv(), false),
                };
                gradients.push((saved.id, walk.view(&dx, saved.dims, true)));
            }
            drop(saved);
            if let Some(outputs) = bias {
                gradients.push((bias_id, walk.floats(outputs)));
            }
            // The gradient in float32.
            let d_weight = match walk.backend.is_half() {
                true => walk.floats(a.weights),
                false => d_weight,
            };
            match rank {
                None => gradients.push((trained[0], d_weight)),
                Some(rank) => {
                    // The scaled gradient, and for each factor the other product and its product with that.
                    let others = [0; 3].map(|_| walk.floats(a.weights));
                    drop(others);
                    gradients.push((trained[0], walk.floats(2.0 * rank * outputs)));
                    gradients.push((trained[1], walk.floats(2.0 * rank * columns)));
                    drop(d_weight);
                }
            }
            if y_tracked {
                gradients.push((y_id, gradient));
            }
            drop(kept);
            gradients
        });
    }
}
