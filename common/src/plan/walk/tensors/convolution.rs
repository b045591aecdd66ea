//! Convolutions and their gradients, as `engine/src/nn/conv2d/tensors.rs`.

use super::super::meter::Shaped;
use super::super::tape::{Form, Walk};

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
}

/// What candle's convolution allocates, in elements.
struct Convolution {
    input: f64,
    weights: f64,
    /// Numbers that are multiplied for each result.
    fan_in: f64,
    /// Results of each output channel, in all images.
    rows: f64,
    /// The same in one image.
    pixels: f64,
    outputs: f64,
    is_pointwise: bool,
}

impl Walk {
    /// candle's convolution, in the compute dtype or in float32.
    fn convolved(&self, c: &Convolution, is_wide: bool) -> Shaped {
        let numbers = |n: f64| if is_wide { self.floats(n) } else { self.numbers(n) };
        let results = c.rows * c.outputs;
        if self.backend.form != Form::Portable {
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
                self.floats(c.input * c.pixels / c.rows),
                self.floats(c.outputs * c.pixels),
            ],
            false => {
                let tile = c.pixels.min(TILE_PIXELS);
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

    pub(in crate::plan::walk) fn convolution(&self, s: &ConvSizes, is_wide: bool) -> Shaped {
        let c = Convolution {
            input: s.inputs(),
            weights: s.weights(),
            fan_in: s.fan_in(),
            rows: s.rows(),
            pixels: s.size[0] * s.size[1],
            outputs: s.outputs,
            is_pointwise: s.kernel == 1.0,
        };
        self.convolved(&c, is_wide)
    }

    /// The gradient of the input: the convolution of that of the result with the turned weight.
    pub(in crate::plan::walk) fn convolution_input_gradient(&self, s: &ConvSizes, is_wide: bool) -> Shaped {
        let numbers = |n: f64| if is_wide { self.floats(n) } else { self.numbers(n) };
        let transposed = numbers(s.weights());
        let turned = (s.kernel > 1.0).then(|| numbers(s.weights()));
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
            pixels: height * width,
            outputs: inputs,
            is_pointwise: s.kernel == 1.0,
        };
        let dx = self.convolved(&c, is_wide);
        drop((spread, transposed, turned));
        dx
    }

    /// The gradient of the weight, in float32: the convolution of the input with the gradient of the result. Batch and
    /// channels change places.
    pub(in crate::plan::walk) fn convolution_weight_gradient(&self, s: &ConvSizes) -> Shaped {
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
            pixels: taps,
            outputs: s.outputs,
            is_pointwise: false,
        };
        let product = self.convolved(&c, true);
        let dw = self.floats(s.weights());
        drop((product, x, gradient));
        dw
    }
}
