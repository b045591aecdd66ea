//! A layer whose change is a tensor in the shape of its weight, as `engine/src/adapters/difference.rs`: the layer, the product of the input
//! with the change in the compute dtype, and their sum. The change of `engine/src/adapters/loha` is added to the weight, so that there is
//! one product.

use super::layers::{Adapter, Layer, Unpacking};
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
    fn new(layer: &Layer, x: &Shaped, is_linear: bool) -> Self {
        Self {
            x_dims: x.dims,
            output: Walk::sizes_of(layer, x, is_linear).output,
            weights: layer.elements(),
            kernel: layer.kernel,
            stride: layer.stride,
            is_linear,
        }
    }

    /// How often the tensor is read: tokens, or pixels of the result.
    fn rows(&self) -> f64 {
        self.outputs() / self.output[if self.is_linear { 2 } else { 1 }]
    }

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

impl Walk {
    pub(super) fn layer_with_difference(&self, layer: &Layer, x: &Shaped, is_linear: bool) -> Shaped {
        let base = Layer {
            adapter: None,
            ..layer.clone()
        };
        let y = self.layer(&base, x, is_linear);
        let applied = Applied::new(layer, x, is_linear);
        let recording = self.is_recording();
        // In half precision, the change in the compute dtype.
        let narrow = self.backend.is_half().then(|| self.numbers(applied.weights));
        let added = self.dense_product(layer, &applied);
        let sum = self.tensor(applied.output, recording);
        drop(added);
        if recording {
            let (y_id, y_tracked) = (y.id, y.tracked);
            let (trained, bias) = (layer.trained_id(0), layer.bias.then(|| layer.trained_id(BIAS)));
            let (saved, outputs) = (x.clone(), layer.outputs);
            self.record_step(&sum, move |walk, gradient| {
                let (d_weight, mut gradients) = walk.dense_gradients(&applied, saved);
                gradients.extend(bias.map(|id| (id, walk.floats(outputs))));
                // The gradient in float32.
                let wide = walk.widened(applied.weights);
                gradients.push((trained, wide.unwrap_or(d_weight)));
                if y_tracked {
                    gradients.push((y_id, gradient));
                }
                drop(narrow);
                gradients
            });
        }
        sum
    }

    /// A layer whose weight a LoHa changes.
    pub(super) fn layer_with_hadamard(&self, layer: &Layer, adapter: Adapter, x: &Shaped, is_linear: bool) -> Shaped {
        let applied = Applied::new(layer, x, is_linear);
        let recording = self.is_recording();
        let unpacked = (layer.unpacking != Unpacking::None).then(|| self.numbers(applied.weights));
        let weight = self.with_hadamard(&applied);
        drop(unpacked);
        let product = self.dense_product(layer, &applied);
        let y = Shaped {
            tracked: recording,
            ..self.view(&product, applied.output, true)
        };
        drop(product);
        if recording {
            let saved = x.clone();
            let trained = [0, 1].map(|which| layer.trained_id(which));
            let factors = [layer.outputs, layer.fan_in()].map(|side| 2.0 * adapter.rank * side);
            self.record_step(&y, move |walk, gradient| {
                let (d_weight, mut gradients) = walk.dense_gradients(&applied, saved);
                drop((weight, gradient));
                let wide = walk.widened(applied.weights);
                // For each factor the other product, and its product with the gradient.
                let others = [0; 2].map(|_| walk.floats(applied.weights));
                drop(others);
                gradients.extend(
                    trained
                        .into_iter()
                        .zip(factors)
                        .map(|(id, elements)| (id, walk.floats(elements))),
                );
                drop((wide, d_weight));
                gradients
            });
        }
        y
    }

    /// The sum of a weight and of the change of a LoHa: two products, their product, and the sum in float32 and in the compute dtype.
    fn with_hadamard(&self, a: &Applied) -> Shaped {
        let products = [0; 2].map(|_| self.floats(a.weights));
        let product = self.floats(a.weights);
        drop(products);
        let base = self.widened(a.weights);
        let sum = self.floats(a.weights);
        drop(base);
        let sum = match self.backend.is_half() {
            true => {
                let narrow = self.numbers(a.weights);
                drop(sum);
                narrow
            }
            false => sum,
        };
        drop(product);
        sum
    }

    /// The product of an input with a tensor in the shape of the weight, and with the bias.
    fn dense_product(&self, layer: &Layer, a: &Applied) -> Shaped {
        self.meter.multiply(a.rows() * a.weights);
        let (is_linear, backend) = (a.is_linear, &self.backend);
        let product = match is_linear || backend.is_cpu() {
            true => self.product_of(a.inputs(), a.weights, a.outputs()),
            false => self.convolution(&a.conv(), false),
        };
        match layer.bias && !backend.is_cpu() && !backend.has_cuda_kernels() {
            true => {
                let with_bias = self.numbers(a.outputs());
                drop(product);
                with_bias
            }
            false => product,
        }
    }

    /// The gradient of the tensor that the input was multiplied with, in the compute dtype, and that of the input.
    fn dense_gradients(&self, a: &Applied, x: Shaped) -> (Shaped, Vec<(u64, Shaped)>) {
        self.meter.multiply(2.0 * a.rows() * a.weights);
        let is_product = a.is_linear || self.backend.is_cpu();
        let d_weight = match is_product {
            true => self.product_of(a.outputs(), a.inputs(), a.weights),
            false => self.convolution_weight_gradient(&a.conv(), false),
        };
        let mut gradients = Vec::new();
        if x.tracked {
            let dx = match is_product {
                true => self.product_of(a.outputs(), a.weights, a.inputs()),
                false => self.convolution_input_gradient(&a.conv(), false),
            };
            gradients.push((x.id, self.view(&dx, x.dims, true)));
        }
        (d_weight, gradients)
    }
}
