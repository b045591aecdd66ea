//! A layer with a LoKr, as `kernels/src/nn/kron.rs`: the layer, the Kronecker product as an operation of its own, and their sum.

use super::layers::{KronSizes, Layer};
use super::meter::MetaTensor;
use super::tape::Walk;
use super::tensors::ConvSizes;

/// A LoKr that is applied to an input.
#[derive(Clone, Copy)]
struct AppliedLokr {
    kron: KronSizes,
    x_dims: [f64; 4],
    /// The dimensions of the output of the layer.
    output: [f64; 4],
    /// Tokens, or pixels of the result.
    rows: f64,
    kernel: f64,
    stride: f64,
    is_linear: bool,
    drops: bool,
}

impl AppliedLokr {
    /// Elements of what the second matrix computes.
    fn groups(&self) -> f64 {
        self.rows * self.kron.c * self.kron.b
    }

    fn inputs(&self) -> f64 {
        self.x_dims.iter().product()
    }

    fn outputs(&self) -> f64 {
        self.output.iter().product()
    }

    /// Elements of the second matrix.
    fn second(&self) -> f64 {
        self.kron.b * self.kron.d * self.kernel * self.kernel
    }

    /// Products that the first matrix mixes: rows of a linear layer, or images.
    fn items(&self) -> f64 {
        if self.is_linear { self.rows } else { self.x_dims[0] }
    }

    /// The convolution with the second matrix: each group is an image.
    fn conv(&self) -> ConvSizes {
        let [images, _, height, width] = self.x_dims;
        ConvSizes {
            input: [images * self.kron.c, self.kron.d, height, width],
            outputs: self.kron.b,
            kernel: self.kernel,
            stride: self.stride,
            size: [self.output[2], self.output[3]],
        }
    }

    /// Multiplications of a forward pass.
    fn multiplications(&self) -> f64 {
        self.rows * self.kron.c * (self.second() + self.kron.a * self.kron.b)
    }
}

impl Walk {
    /// `drops`: some outputs of the change are set to zero.
    pub(super) fn layer_with_kron(
        &self,
        layer: &Layer,
        kron: KronSizes,
        drops: bool,
        x: &MetaTensor,
        is_linear: bool,
    ) -> MetaTensor {
        let base = Layer {
            adapter: None,
            ..layer.clone()
        };
        let y = self.layer(&base, x, is_linear);
        let product = Self::sizes_of(layer, x, is_linear);
        let applied = AppliedLokr {
            kron,
            x_dims: x.dims,
            output: product.output,
            rows: product.rows,
            kernel: layer.kernel,
            stride: layer.stride,
            is_linear,
            drops,
        };
        let built = [
            kron.rank.map(|_| self.floats(applied.second())),
            kron.first_rank.map(|_| self.floats(kron.a * kron.c)),
        ];
        let whole = self.kron_forward(&applied);
        let change = match drops {
            true => {
                let masked = self.tensor(product.output, false);
                drop(whole);
                masked
            }
            false => whole,
        };
        let sum = self.tensor(product.output, self.is_recording());
        drop(change);
        if self.is_recording() {
            self.record_kron(applied, layer, (x, &y, &sum), built);
        }
        sum
    }

    /// What the second matrix computes.
    fn kron_groups(&self, a: &AppliedLokr) -> MetaTensor {
        match a.is_linear || self.backend.is_cpu() {
            true => self.floats(a.groups()),
            false => self.convolution(&a.conv(), true),
        }
    }

    fn kron_forward(&self, a: &AppliedLokr) -> MetaTensor {
        self.meter.multiply(a.multiplications());
        let is_cpu = self.backend.is_cpu();
        let wide = (!is_cpu).then(|| self.widened(a.inputs()));
        let groups = self.kron_groups(a);
        drop(wide);
        // candle scales the product in a tensor of its own.
        let product = (!is_cpu).then(|| self.floats(a.outputs()));
        let scaled = self.floats(a.outputs());
        drop((groups, product));
        self.narrowed(scaled, a.output, false)
    }

    fn record_kron(
        &self,
        a: AppliedLokr,
        layer: &Layer,
        (x, y, sum): (&MetaTensor, &MetaTensor, &MetaTensor),
        built: [Option<MetaTensor>; 2],
    ) {
        let (saved, y_id, y_tracked) = (x.clone(), y.id, y.tracked);
        let trained = [0, 1, 3].map(|which| layer.trained_id(which));
        self.record_step(sum, move |walk, gradient| {
            // Both matrices and the input get a gradient; what the second matrix computes is computed again.
            walk.meter.multiply(3.0 * a.multiplications());
            let is_cpu = walk.backend.is_cpu();
            let masked = a.drops.then(|| walk.tensor(a.output, false));
            let dy = (!is_cpu).then(|| walk.widened(a.outputs()));
            let wide = (!is_cpu).then(|| walk.widened(a.inputs()));
            let groups = walk.kron_groups(&a);
            // The first matrix has a gradient for each item, which are summed.
            let each = (!is_cpu).then(|| walk.floats(a.items() * a.kron.a * a.kron.c));
            let first = walk.floats(a.kron.a * a.kron.c);
            drop((groups, each));
            let product = (!is_cpu).then(|| walk.floats(a.groups()));
            let d_groups = walk.floats(a.groups());
            drop((product, dy));
            let d_second = match a.is_linear || is_cpu {
                true => walk.floats(a.second()),
                false => walk.convolution_weight_gradient(&a.conv(), true),
            };
            drop(wide);
            let mut gradients = vec![(trained[0], first)];
            if saved.tracked {
                let dx = match a.is_linear || is_cpu {
                    true => walk.floats(a.inputs()),
                    false => walk.convolution_input_gradient(&a.conv(), true),
                };
                gradients.push((saved.id, walk.narrowed(dx, saved.dims, false)));
            }
            drop(d_groups);
            if a.kron.first_rank.is_some() {
                // Those of both factors take its place.
                gradients[0].1 = walk.floats(a.kron.of_first());
            }
            match a.kron.rank {
                None => gradients.push((trained[1], d_second)),
                Some(rank) => {
                    gradients.push((trained[1], walk.floats(a.kron.b * rank)));
                    gradients.push((trained[2], walk.floats(rank * a.second() / a.kron.b)));
                    drop(d_second);
                }
            }
            if y_tracked {
                gradients.push((y_id, gradient));
            }
            drop((saved, built, masked));
            gradients
        });
    }
}
