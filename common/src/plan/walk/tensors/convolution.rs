//! Convolutions and their gradients, as `kernels/src/nn/conv2d/tensors.rs`.

use super::super::meter::MetaTensor;
use super::super::tape::Walk;

/// Output pixels of a tile of candle's convolution on a CPU.
const TILE_PIXELS: f64 = 512.0;

/// The sizes of a convolution.
#[derive(Clone, Copy)]
pub(in crate::plan::walk) struct ConvSizes {
    /// [batch, channels, height, width].
    pub(in crate::plan::walk) input: [f64; 4],
    pub(in crate::plan::walk) outputs: f64,
    pub(in crate::plan::walk) kernel: f64,
    pub(in crate::plan::walk) stride: f64,
    /// Height and width of the result.
    pub(in crate::plan::walk) size: [f64; 2],
}

impl ConvSizes {
    fn fan_in(&self) -> f64 {
        self.input[1] * self.kernel * self.kernel
    }

    /// Pixels of the results.
    pub(super) fn rows(&self) -> f64 {
        self.input[0] * self.size[0] * self.size[1]
    }

    fn weights(&self) -> f64 {
        self.outputs * self.fan_in()
    }

    fn inputs(&self) -> f64 {
        self.input.iter().product()
    }

    fn convolution(&self) -> Convolution {
        Convolution {
            input: self.inputs(),
            weights: self.weights(),
            fan_in: self.fan_in(),
            rows: self.rows(),
            size: self.size,
            outputs: self.outputs,
            is_pointwise: self.kernel == 1.0,
        }
    }
}

/// The most bytes of the matrix of inputs (`COLUMN_BYTES` in `kernels/src/cuda_kernels/convolution.rs`).
const COLUMN_BYTES: f64 = 67_108_864.0;

/// What a convolution allocates, in elements.
struct Convolution {
    input: f64,
    weights: f64,
    /// Numbers that are multiplied for each result.
    fan_in: f64,
    /// Results of each output channel, in all images.
    rows: f64,
    /// Height and width of the results in one image.
    size: [f64; 2],
    outputs: f64,
    is_pointwise: bool,
}

impl Convolution {
    /// Results of each output channel in one image.
    fn pixels(&self) -> f64 {
        self.size[0] * self.size[1]
    }

    /// The rows of results that are computed together, and the number of parts.
    fn parts(&self, width: f64) -> (f64, f64) {
        let height = self.size[0].max(1.0);
        let rows = match self.is_pointwise {
            true => height,
            false => (COLUMN_BYTES / (self.fan_in * self.size[1] * width).max(1.0))
                .floor()
                .clamp(1.0, height),
        };
        (rows, (height / rows).ceil())
    }
}

impl Walk {
    /// A convolution by a kernel for the matrix of inputs of some rows of an image, and a product for each.
    fn convolved_in_parts(&self, c: &Convolution, is_wide: bool) -> MetaTensor {
        let numbers = |n: f64| if is_wide { self.floats(n) } else { self.numbers(n) };
        let (rows, parts) = c.parts(if is_wide { 4.0 } else { self.backend.width });
        let is_one = parts <= 1.0 && c.rows <= c.pixels();
        let whole = (!is_one).then(|| numbers(c.rows * c.outputs));
        let columns = (!c.is_pointwise).then(|| numbers(c.fan_in * c.size[1] * rows));
        let part = numbers(c.outputs * c.size[1] * rows);
        drop(columns);
        whole.unwrap_or(part)
    }

    /// candle's convolution, in the compute dtype or in float32.
    fn convolved(&self, c: &Convolution, is_wide: bool) -> MetaTensor {
        let numbers = |n: f64| if is_wide { self.floats(n) } else { self.numbers(n) };
        let results = c.rows * c.outputs;
        if !self.backend.is_portable() {
            // On CUDA (without cuDNN) and Metal: a row of inputs for each result, the product, and the product in the order of
            // the result.
            let columns = numbers(c.rows * c.fan_in);
            let product = numbers(results);
            let y = numbers(results);
            drop((columns, product));
            return y;
        }
        let converts = !is_wide && self.backend.widens_products();
        let wide = converts.then(|| [self.floats(c.input), self.floats(c.weights)]);
        let y = self.floats(results);
        let scratch = match c.is_pointwise {
            true => vec![
                self.floats(c.input * c.pixels() / c.rows),
                self.floats(c.outputs * c.pixels()),
            ],
            false => {
                let tile = c.pixels().min(TILE_PIXELS);
                vec![
                    self.floats(c.input),
                    self.floats(c.weights),
                    self.floats(c.fan_in * tile),
                    self.floats(c.outputs * tile),
                ]
            }
        };
        drop(scratch);
        let y = match converts {
            true => numbers(results),
            false => y,
        };
        drop(wide);
        y
    }

    /// A convolution: by kernels where there are any.
    pub(in crate::plan::walk) fn convolution(&self, s: &ConvSizes, is_wide: bool) -> MetaTensor {
        self.convolved_best(&s.convolution(), is_wide)
    }

    /// A convolution whose inputs candle does not track (`convolve` in `kernels/src/nn/tensors.rs`).
    fn convolved_best(&self, c: &Convolution, is_wide: bool) -> MetaTensor {
        match self.backend.has_cuda_kernels() {
            true => self.convolved_in_parts(c, is_wide),
            false => self.convolved_in_rows(c, is_wide),
        }
    }

    /// candle's convolution, some rows of the result at a time.
    fn convolved_in_rows(&self, c: &Convolution, is_wide: bool) -> MetaTensor {
        let numbers = |n: f64| if is_wide { self.floats(n) } else { self.numbers(n) };
        let width = if is_wide { 4.0 } else { self.backend.width };
        let (height, batch) = (c.size[0], c.rows / c.pixels().max(1.0));
        let rows = (COLUMN_BYTES / (batch * c.size[1] * c.fan_in * width).max(1.0))
            .floor()
            .max(1.0);
        if self.backend.is_portable() || rows >= height {
            return self.convolved(c, is_wide);
        }
        let padded = numbers(c.input);
        let parts = (height / rows).ceil();
        let share = rows / height;
        // All parts but the last, and the last one: those before are kept.
        let before = numbers(c.rows * c.outputs * (parts - 1.0) * share);
        let copied = numbers(c.input * share);
        let last = self.convolved(
            &Convolution {
                input: c.input * share,
                rows: c.rows * share,
                size: [rows, c.size[1]],
                ..*c
            },
            is_wide,
        );
        drop(copied);
        let y = numbers(c.rows * c.outputs);
        drop((padded, before, last));
        y
    }

    /// A convolution that candle tracks for gradients: its own.
    pub(in crate::plan::walk) fn composed_convolution(&self, s: &ConvSizes, is_wide: bool) -> MetaTensor {
        self.convolved(&s.convolution(), is_wide)
    }

    /// The gradient of the input: the convolution of that of the result with the turned weight.
    pub(in crate::plan::walk) fn convolution_input_gradient(&self, s: &ConvSizes, is_wide: bool) -> MetaTensor {
        let numbers = |n: f64| if is_wide { self.floats(n) } else { self.numbers(n) };
        let transposed = numbers(s.weights());
        // A kernel reads it in reverse order.
        let has_kernels = self.backend.has_cuda_kernels();
        let turned = (s.kernel > 1.0 && !has_kernels).then(|| numbers(s.weights()));
        let transposed = turned.is_none().then_some(transposed);
        let [batch, inputs, height, width] = s.input;
        let dy = s.rows() * s.outputs;
        let mut input = dy;
        let mut spread = None;
        if s.stride > 1.0 {
            let rows = numbers(s.stride * dy);
            let both = numbers(s.stride * s.stride * dy);
            let pixels = numbers(s.stride * s.stride * dy);
            drop((rows, both));
            let planes = batch * s.outputs;
            let padded_rows = numbers(planes * (height + s.kernel - 1.0) * width);
            input = planes * (height + s.kernel - 1.0) * (width + s.kernel - 1.0);
            let padded = numbers(input);
            drop(padded_rows);
            spread = Some((pixels, padded));
        }
        let c = Convolution {
            input,
            weights: s.weights(),
            fan_in: s.outputs * s.kernel * s.kernel,
            rows: batch * height * width,
            size: [height, width],
            outputs: inputs,
            is_pointwise: s.kernel == 1.0,
        };
        let dx = self.convolved_best(&c, is_wide);
        drop((spread, transposed, turned));
        dx
    }

    /// The gradient of the weight, in float32: the convolution of the input with the gradient of the result. Batch and
    /// channels change places.
    pub(in crate::plan::walk) fn convolution_weight_gradient(&self, s: &ConvSizes, is_wide: bool) -> MetaTensor {
        if self.backend.has_cuda_kernels() {
            return self.weight_gradient_in_parts(s, is_wide);
        }
        let swapped = |batch: f64, channels: f64, n: f64| (batch > 1.0 && channels > 1.0).then(|| self.floats(n));
        let dy = s.rows() * s.outputs;
        let [batch, inputs, ..] = s.input;
        let x = swapped(batch, inputs, s.inputs());
        let gradient = swapped(batch, s.outputs, dy);
        let taps = s.kernel * s.kernel;
        let c = Convolution {
            input: s.inputs(),
            weights: dy,
            fan_in: s.rows(),
            rows: inputs * taps,
            size: [s.kernel, s.kernel],
            outputs: s.outputs,
            is_pointwise: false,
        };
        let product = self.convolved_in_rows(&c, true);
        let dw = self.floats(s.weights());
        drop((product, x, gradient));
        dw
    }

    /// The gradient of the weight, in float32: the sum over the parts of all images.
    fn weight_gradient_in_parts(&self, s: &ConvSizes, is_wide: bool) -> MetaTensor {
        let numbers = |n: f64| if is_wide { self.floats(n) } else { self.numbers(n) };
        let c = s.convolution();
        let (rows, parts) = c.parts(if is_wide { 4.0 } else { self.backend.width });
        let mut sum: Option<MetaTensor> = None;
        // The first part, and one that is added to it.
        for _ in 0..(if parts * s.input[0] > 1.0 { 2 } else { 1 }) {
            let gradient = (parts > 1.0).then(|| numbers(s.outputs * s.size[1] * rows));
            let columns = (!c.is_pointwise).then(|| numbers(c.fan_in * s.size[1] * rows));
            let product = numbers(s.weights());
            let part = match is_wide || !self.backend.is_half() {
                true => product,
                false => {
                    let part = self.floats(s.weights());
                    drop(product);
                    part
                }
            };
            let total = sum.take().map(|sum| {
                let total = self.floats(s.weights());
                drop(sum);
                total
            });
            sum = Some(total.unwrap_or_else(|| part.clone()));
            drop((part, gradient, columns));
        }
        sum.unwrap_or_else(|| self.floats(s.weights()))
    }
}
