//! Linear layers and convolutions with their adapters, as the `tensors.rs` and `low_rank.rs` of `kernels/src/nn/linear` and
//! `kernels/src/nn/conv2d`. Adapters are float32 whatever the compute dtype.

use super::super::layers::{Adapter, Layer, Product, Unpacking};
use super::super::meter::MetaTensor;
use super::super::tape::Walk;
use super::convolution::ConvSizes;

/// A layer that is applied to an input.
#[derive(Clone)]
struct AppliedLayer {
    layer: Layer,
    x_dims: [f64; 4],
    product: Product,
    is_linear: bool,
}

impl AppliedLayer {
    fn inputs(&self) -> f64 {
        self.x_dims.iter().product()
    }

    fn outputs(&self) -> f64 {
        self.product.output.iter().product()
    }

    fn sizes(&self, outputs: f64) -> ConvSizes {
        ConvSizes {
            input: self.x_dims,
            outputs,
            kernel: self.layer.kernel,
            stride: self.layer.stride,
            size: [self.product.output[2], self.product.output[3]],
        }
    }

    /// The convolution of one pixel after the low-rank one.
    fn up(&self, rank: f64) -> ConvSizes {
        let [batch, outputs, height, width] = self.product.output;
        ConvSizes {
            input: [batch, rank, height, width],
            outputs,
            kernel: 1.0,
            stride: 1.0,
            size: [height, width],
        }
    }
}

impl Walk {
    pub(in crate::plan::walk) fn layer_of_tensors(
        &self,
        layer: &Layer,
        x: &MetaTensor,
        product: Product,
        is_linear: bool,
    ) -> MetaTensor {
        let applied = AppliedLayer {
            layer: layer.clone(),
            x_dims: x.dims,
            product,
            is_linear,
        };
        let recording = self.is_recording();
        let tracked = recording && (x.tracked || layer.is_trained || layer.adapter.is_some());
        let y = self.base_of_tensors(&applied);
        let Some(adapter) = layer.adapter else {
            let y = MetaTensor { tracked, ..y };
            if tracked {
                self.record_applied(applied, None, x, &y);
            }
            return y;
        };
        if adapter.dropout && recording {
            return self.dropout_of_tensors(applied, adapter, x, y);
        }
        let rank = adapter.rank;
        let hidden = self.hidden(&applied, rank);
        let change = self.change(&applied, rank);
        let narrow = self.backend.is_half().then(|| self.numbers(applied.outputs()));
        let sum = self.tensor(applied.product.output, tracked);
        drop((y, hidden, change, narrow));
        if tracked {
            self.record_applied(applied, Some(rank), x, &sum);
        }
        sum
    }

    /// The result without the adapter.
    fn base_of_tensors(&self, a: &AppliedLayer) -> MetaTensor {
        let weight = self.dense_of_tensors(&a.layer);
        let y = match a.is_linear {
            true => self.product_of(a.inputs(), a.layer.elements(), a.outputs()),
            false => self.convolution(&a.sizes(a.layer.outputs), false),
        };
        let y = match a.layer.bias {
            // A kernel adds it in place.
            true if !self.backend.has_cuda_kernels() => {
                let sum = self.numbers(a.outputs());
                drop(y);
                sum
            }
            _ => y,
        };
        drop(weight);
        self.view(&y, a.product.output, true)
    }

    /// The weight in the compute dtype, if it is dequantised or read for each use.
    fn dense_of_tensors(&self, layer: &Layer) -> Option<MetaTensor> {
        if layer.unpacking == Unpacking::None {
            return None;
        }
        let elements = layer.elements();
        let unpacked = (layer.unpacking_bytes > 0.0).then(|| {
            let codes = self.floats(elements * layer.unpacking_bytes / 4.0);
            let wide = self.floats(elements);
            drop(codes);
            wide
        });
        let dense = match unpacked {
            Some(wide) if !self.backend.is_half() => wide,
            wide => {
                let dense = self.numbers(elements);
                drop(wide);
                dense
            }
        };
        Some(dense)
    }

    /// The product of the widened input with the adapter's first matrix.
    fn hidden(&self, a: &AppliedLayer, rank: f64) -> MetaTensor {
        let wide = self.widened(a.inputs());
        let hidden = match a.is_linear {
            true => self.floats(a.product.rows * rank),
            false => self.convolution(&a.sizes(rank), true),
        };
        drop(wide);
        hidden
    }

    /// The adapter's result in float32, scaled.
    fn change(&self, a: &AppliedLayer, rank: f64) -> MetaTensor {
        let product = match a.is_linear {
            true => self.floats(a.outputs()),
            false => self.convolution(&a.up(rank), true),
        };
        let scaled = self.floats(a.outputs());
        drop(product);
        scaled
    }

    /// Records the backward pass of a layer, fused with an adapter of this rank.
    fn record_applied(&self, a: AppliedLayer, rank: Option<f64>, x: &MetaTensor, y: &MetaTensor) {
        let saved = (a.layer.is_trained || rank.is_some()).then(|| x.clone());
        let (x_id, x_dims, needs_dx) = (x.id, x.dims, x.tracked);
        self.record_step(y, move |walk, gradient| {
            let mut gradients = Vec::new();
            let d_hidden = rank.map(|rank| {
                let dy = walk.widened(a.outputs());
                let product = match a.is_linear {
                    true => walk.floats(a.product.rows * rank),
                    false => walk.convolution_input_gradient(&a.up(rank), true),
                };
                let d_hidden = walk.floats(a.product.rows * rank);
                drop(product);
                let wide = walk.widened(a.inputs());
                let hidden = match a.is_linear {
                    true => walk.floats(a.product.rows * rank),
                    false => walk.convolution(&a.sizes(rank), true),
                };
                let (up, down) = match a.is_linear {
                    true => (
                        walk.floats(a.layer.outputs * rank),
                        walk.floats(rank * a.layer.fan_in()),
                    ),
                    false => (
                        walk.convolution_weight_gradient(&a.up(rank), true),
                        walk.convolution_weight_gradient(&a.sizes(rank), true),
                    ),
                };
                drop((wide, hidden, dy));
                gradients.push((a.layer.trained_id(0), down));
                gradients.push((a.layer.trained_id(1), up));
                d_hidden
            });
            if needs_dx {
                let dx = walk.input_gradient(&a);
                let dx = match rank {
                    None => walk.view(&dx, x_dims, true),
                    Some(rank) => {
                        let change = match a.is_linear {
                            true => walk.floats(a.inputs()),
                            false => walk.convolution_input_gradient(&a.sizes(rank), true),
                        };
                        let narrow = walk.backend.is_half().then(|| walk.numbers(a.inputs()));
                        let sum = walk.tensor(x_dims, false);
                        drop((dx, change, narrow));
                        sum
                    }
                };
                gradients.push((x_id, dx));
            }
            drop(d_hidden);
            if a.layer.is_trained {
                let dw = match a.is_linear {
                    true => walk.product_of(a.outputs(), a.inputs(), a.layer.elements()),
                    false => walk.convolution_weight_gradient(&a.sizes(a.layer.outputs), false),
                };
                gradients.push((a.layer.trained_id(2), dw));
            }
            drop((saved, gradient));
            gradients
        });
    }

    /// The gradient of the input, without the adapter's part.
    fn input_gradient(&self, a: &AppliedLayer) -> MetaTensor {
        let weight = self.dense_of_tensors(&a.layer);
        let dx = match a.is_linear {
            true => self.product_of(a.outputs(), a.layer.elements(), a.inputs()),
            false => self.convolution_input_gradient(&a.sizes(a.layer.outputs), false),
        };
        drop(weight);
        dx
    }

    /// The adapter as operations of its own, with dropout: its parts stay in candle's graph.
    fn dropout_of_tensors(&self, a: AppliedLayer, adapter: Adapter, x: &MetaTensor, y: MetaTensor) -> MetaTensor {
        let rank = adapter.rank;
        let y = MetaTensor {
            tracked: x.tracked,
            ..y
        };
        if x.tracked {
            let base = AppliedLayer {
                layer: Layer {
                    adapter: None,
                    ..a.layer.clone()
                },
                ..a.clone()
            };
            self.record_applied(base, None, x, &y);
        }
        let wide = self.widened(a.inputs());
        let hidden = match a.is_linear {
            true => self.floats(a.product.rows * rank),
            false => self.composed_convolution(&a.sizes(rank), true),
        };
        // The mask, and the product with it.
        let masked = [self.floats(a.product.rows * rank), self.floats(a.product.rows * rank)];
        let product = match a.is_linear {
            true => self.floats(a.outputs()),
            false => self.composed_convolution(&a.up(rank), true),
        };
        let scaled = self.floats(a.outputs());
        let narrow = self.backend.is_half().then(|| self.numbers(a.outputs()));
        let sum = self.tensor(a.product.output, true);
        let (saved, y_id, y_tracked) = (x.clone(), y.id, y.tracked);
        self.record_step(&sum, move |walk, gradient| {
            // candle's backward pass makes zeros, a sum and the result.
            let dy = [0; 3].map(|_| walk.floats(a.outputs()));
            let d_hidden = [0; 3].map(|_| walk.floats(a.product.rows * rank));
            let mut gradients = vec![
                (a.layer.trained_id(0), walk.floats(rank * a.layer.fan_in())),
                (a.layer.trained_id(1), walk.floats(a.layer.outputs * rank)),
            ];
            if saved.tracked {
                let dx = match a.is_linear {
                    true => walk.floats(a.inputs()),
                    false => walk.convolution_input_gradient(&a.sizes(rank), true),
                };
                gradients.push((saved.id, walk.narrowed(dx, saved.dims, false)));
            }
            if y_tracked {
                gradients.push((y_id, gradient));
            }
            drop((saved, wide, hidden, masked, product, scaled, narrow, dy, d_hidden));
            gradients
        });
        sum
    }
}
