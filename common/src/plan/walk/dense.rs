//! A layer whose change is a tensor in the shape of its weight, as `engine/src/adapters/difference.rs`: the layer, the product of the input
//! with the change in the compute dtype, and their sum. The change of `engine/src/adapters/loha` is added to the weight, so that there is
//! one product; so is that of a weight with magnitudes (`dora_wd`).

use super::layers::{Adapter, AdapterForm, Layer, Unpacking};
use super::meter::MetaTensor;
use super::tape::Walk;
use super::tensors::ConvSizes;

/// Which of a layer's trained tensors is the difference of the bias.
const BIAS: u64 = 3;
/// Which are the magnitudes, if its weight is decomposed: the weight itself is frozen then.
const MAGNITUDES: u64 = 2;

/// The factors of a change: which of the layer's trained tensors each is, and its elements.
fn factors(layer: &Layer, adapter: Adapter) -> Vec<(u64, f64)> {
    let rank = adapter.rank;
    match adapter.form {
        AdapterForm::Hadamard => vec![(0, 2.0 * rank * layer.outputs), (1, 2.0 * rank * layer.fan_in())],
        AdapterForm::Kron(kron) => {
            let (first, width) = (kron.of_first(), kron.d * layer.kernel * layer.kernel);
            match kron.rank {
                None => vec![(0, first), (1, kron.b * width)],
                Some(rank) => vec![(0, first), (1, kron.b * rank), (3, rank * width)],
            }
        }
        _ => vec![(0, rank * layer.fan_in()), (1, rank * layer.outputs)],
    }
}

/// A change that is applied to an input.
#[derive(Clone, Copy)]
struct AppliedChange {
    x_dims: [f64; 4],
    output: [f64; 4],
    /// Elements of the weight.
    weights: f64,
    kernel: f64,
    stride: f64,
    is_linear: bool,
}

impl AppliedChange {
    fn new(layer: &Layer, x: &MetaTensor, is_linear: bool) -> Self {
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
    pub(super) fn layer_with_difference(&self, layer: &Layer, x: &MetaTensor, is_linear: bool) -> MetaTensor {
        let base = Layer {
            adapter: None,
            ..layer.clone()
        };
        let y = self.layer(&base, x, is_linear);
        let applied = AppliedChange::new(layer, x, is_linear);
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
    pub(super) fn layer_with_hadamard(
        &self,
        layer: &Layer,
        adapter: Adapter,
        x: &MetaTensor,
        is_linear: bool,
    ) -> MetaTensor {
        let applied = AppliedChange::new(layer, x, is_linear);
        let recording = self.is_recording();
        let factors = [layer.outputs, layer.fan_in()].map(|side| 2.0 * adapter.rank * side);
        // The factors of both products in one tensor: copies, which the backward pass reads.
        let stacked = factors.map(|elements| self.floats(elements));
        // The engine unpacks the weight before it makes the change.
        let unpacked = (layer.unpacking != Unpacking::None).then(|| self.numbers(applied.weights));
        let sum = self.with_change(&applied, adapter.form, false);
        drop(unpacked);
        let weight = self.narrowed(sum, [applied.weights, 1.0, 1.0, 1.0], false);
        let product = self.dense_product(layer, &applied);
        let y = MetaTensor {
            tracked: recording,
            ..self.view(&product, applied.output, true)
        };
        drop(product);
        if recording {
            let saved = x.clone();
            let trained = [0, 1].map(|which| layer.trained_id(which));
            self.record_step(&y, move |walk, gradient| {
                let (d_weight, mut gradients) = walk.dense_gradients(&applied, saved);
                drop((weight, gradient));
                let wide = walk.widened(applied.weights);
                // For each factor the other product, and its product with the gradient.
                let others = [0; 2].map(|_| walk.floats(applied.weights));
                drop((others, stacked));
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

    /// A layer whose weight, with a change, is normalised and multiplied with magnitudes.
    pub(super) fn layer_with_decomposition(
        &self,
        layer: &Layer,
        adapter: Adapter,
        x: &MetaTensor,
        is_linear: bool,
    ) -> MetaTensor {
        let (applied, form) = (AppliedChange::new(layer, x, is_linear), adapter.form);
        let recording = self.is_recording();
        // The second matrix of a LoKr.
        let built = match form {
            AdapterForm::Kron(kron) if kron.rank.is_some() => {
                Some(self.floats(kron.b * kron.d * layer.kernel * layer.kernel))
            }
            _ => None,
        };
        let is_unpacked = layer.unpacking != Unpacking::None;
        let sum = self.with_change(&applied, form, is_unpacked);
        drop(self.floats(applied.weights));
        let scaled = self.floats(applied.weights);
        drop(sum);
        let weight = self.narrowed(scaled, [applied.weights, 1.0, 1.0, 1.0], false);
        let product = self.dense_product(layer, &applied);
        let y = MetaTensor {
            tracked: recording,
            ..self.view(&product, applied.output, true)
        };
        drop(product);
        if recording {
            let saved = x.clone();
            let mut trained = factors(layer, adapter);
            trained.push((MAGNITUDES, adapter.magnitudes));
            let trained: Vec<(u64, f64)> = trained
                .into_iter()
                .map(|(which, elements)| (layer.trained_id(which), elements))
                .collect();
            self.record_step(&y, move |walk, gradient| {
                let (d_weight, mut gradients) = walk.dense_gradients(&applied, saved);
                drop((weight, gradient));
                let sum = walk.with_change(&applied, form, is_unpacked);
                let wide = walk.widened(applied.weights);
                drop(walk.floats(applied.weights));
                let of_ratios = walk.floats(applied.weights);
                drop(wide);
                let of_norms = walk.floats(applied.weights);
                let of_sum = walk.floats(applied.weights);
                drop((of_ratios, of_norms, sum));
                // For each factor of a LoHa the other product, and its product with the gradient; of a LoKr the gradient in another order.
                let others = match form {
                    AdapterForm::Hadamard => 2,
                    AdapterForm::Kron(_) => 1,
                    _ => 0,
                };
                let others: Vec<MetaTensor> = (0..others).map(|_| walk.floats(applied.weights)).collect();
                drop(others);
                gradients.extend(trained.into_iter().map(|(id, elements)| (id, walk.floats(elements))));
                drop((of_sum, d_weight, built));
                gradients
            });
        }
        y
    }

    /// The sum of a weight and of a change that two factors make, in float32.
    fn with_change(&self, a: &AppliedChange, form: AdapterForm, is_unpacked: bool) -> MetaTensor {
        let products = (form == AdapterForm::Hadamard).then(|| [0; 2].map(|_| self.floats(a.weights)));
        let change = self.floats(a.weights);
        drop(products);
        let unpacked = is_unpacked.then(|| self.numbers(a.weights));
        let base = self.widened(a.weights);
        let sum = self.floats(a.weights);
        drop((change, unpacked, base));
        sum
    }

    /// The product of an input with a tensor in the shape of the weight, and with the bias.
    fn dense_product(&self, layer: &Layer, a: &AppliedChange) -> MetaTensor {
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
    fn dense_gradients(&self, a: &AppliedChange, x: MetaTensor) -> (MetaTensor, Vec<(u64, MetaTensor)>) {
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
