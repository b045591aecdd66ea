//! The kernels on a CPU, an element at a time: what tests run where CUDA would start a kernel, so that a machine without a GPU tests the
//! dtypes, sizes and memory of everything around them. The formulas are those of the `.cu` files; the order of sums is not.

use super::arguments::{Arg, Launch};
use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Storage, Tensor};
use half::{bf16, f16};
use std::cell::RefCell;
use std::ops::Deref;

/// A kernel, which gets its number of blocks and its arguments.
type Kernel = fn(&Launch, &Args<'_>) -> Result<()>;

/// Runs a kernel with its arguments.
///
/// # Errors
/// When an argument is not the one that the kernel declares.
pub(super) fn run(launch: &Launch, args: &[Arg<'_>]) -> Result<()> {
    let args = Args(args);
    let kernels: [(&str, Kernel); 17] = [
        ("activate_backward_", |_, args| activate_backward(args)),
        ("activate_", |_, args| activate(args)),
        ("adam_8bit", adam_8bit),
        ("adam_f32", |_, args| adam_f32(args)),
        ("add_bias_", |_, args| add_bias(args)),
        ("gate_backward_", |_, args| gate_backward(args)),
        ("gate_", |_, args| gate(args)),
        ("gated_residual_", |_, args| gated_residual(args)),
        ("im2col_", |_, args| im2col(args)),
        ("modulate_", |_, args| modulate(args)),
        ("norm_backward_", norm_backward),
        ("norm_", norm),
        ("rotate_", |_, args| rotate(args)),
        ("softmax_backward_", softmax_backward),
        ("softmax_", softmax),
        ("sum_of_squares_", sum_of_squares),
        ("swap_axes_", |_, args| swap_axes(args)),
    ];
    match kernels.iter().find(|(name, _)| launch.kernel.starts_with(name)) {
        Some((_, kernel)) => kernel(launch, &args),
        None => candle_core::bail!("no kernel {} in {:?}", launch.kernel, launch.module),
    }
}

/// The arguments of a kernel, by position.
struct Args<'a>(&'a [Arg<'a>]);

impl<'a> Args<'a> {
    fn tensor(&self, at: usize) -> Result<&'a Tensor> {
        match self.0.get(at) {
            Some(Arg::Tensor(tensor)) => Ok(tensor),
            other => candle_core::bail!("argument {at} is {other:?}, not a tensor"),
        }
    }

    /// A tensor that is read, and may be absent.
    fn optional(&self, at: usize) -> Result<Option<Input<'a>>> {
        match self.0.get(at) {
            Some(Arg::Absent) => Ok(None),
            _ => self.input(at).map(Some),
        }
    }

    /// A tensor that is read.
    fn input(&self, at: usize) -> Result<Input<'a>> {
        let (storage, layout) = self.tensor(at)?.storage_and_layout();
        Ok(Input {
            storage: Box::new(storage),
            start: layout.start_offset(),
        })
    }

    /// Lets `write` write to a tensor.
    fn output(&self, at: usize, write: impl FnMut(&mut Output<'_>) -> Result<()>) -> Result<()> {
        self.tensor(at)?.inplace_op1(&Write(RefCell::new(write)))
    }

    fn int(&self, at: usize) -> Result<usize> {
        match self.0.get(at) {
            Some(Arg::I32(number) | Arg::I64(number)) => Ok(*number),
            other => candle_core::bail!("argument {at} is {other:?}, not an integer"),
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "kernels compute in f32")]
    fn float(&self, at: usize) -> Result<f32> {
        match self.0.get(at) {
            Some(Arg::F32(number)) => Ok(*number as f32),
            other => candle_core::bail!("argument {at} is {other:?}, not a number"),
        }
    }
}

struct Input<'a> {
    storage: Box<dyn Deref<Target = Storage> + 'a>,
    start: usize,
}

impl Input<'_> {
    fn get(&self, at: usize) -> f32 {
        let at = self.start + at;
        match &**self.storage {
            Storage::Cpu(CpuStorage::F32(values)) => values[at],
            Storage::Cpu(CpuStorage::F16(values)) => values[at].to_f32(),
            Storage::Cpu(CpuStorage::BF16(values)) => values[at].to_f32(),
            _ => f32::NAN,
        }
    }
}

/// Elements that a kernel writes.
enum Output<'a> {
    F32(&'a mut [f32]),
    F16(&'a mut [f16]),
    BF16(&'a mut [bf16]),
    U8(&'a mut [u8]),
}

impl Output<'_> {
    fn get(&self, at: usize) -> f32 {
        match self {
            Self::F32(values) => values[at],
            Self::F16(values) => values[at].to_f32(),
            Self::BF16(values) => values[at].to_f32(),
            Self::U8(values) => f32::from(values[at]),
        }
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "codes are whole numbers below 256"
    )]
    fn set(&mut self, at: usize, value: f32) {
        match self {
            Self::F32(values) => values[at] = value,
            Self::F16(values) => values[at] = f16::from_f32(value),
            Self::BF16(values) => values[at] = bf16::from_f32(value),
            Self::U8(values) => values[at] = value as u8,
        }
    }
}

/// Writes to a tensor in place.
struct Write<F>(RefCell<F>);

impl<F: FnMut(&mut Output<'_>) -> Result<()>> InplaceOp1 for Write<F> {
    fn name(&self) -> &'static str {
        "emulated-kernel"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let start = layout.start_offset();
        let mut output = match storage {
            CpuStorage::F32(values) => Output::F32(&mut values[start..]),
            CpuStorage::F16(values) => Output::F16(&mut values[start..]),
            CpuStorage::BF16(values) => Output::BF16(&mut values[start..]),
            CpuStorage::U8(values) => Output::U8(&mut values[start..]),
            _ => candle_core::bail!("a kernel writes to a tensor of another dtype"),
        };
        (self.0.borrow_mut())(&mut output)
    }
}

/// A sum with less rounding than one in f32, as the sums of a block's threads have.
#[expect(clippy::cast_possible_truncation, reason = "kernels compute in f32")]
fn sum(values: impl Iterator<Item = f32>) -> f32 {
    values.map(f64::from).sum::<f64>() as f32
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

#[expect(clippy::cast_possible_truncation, reason = "kernels compute in f32")]
fn normal_cdf(x: f32) -> f32 {
    (0.5 * (1.0 + candle_core::cpu::erf::erf_f64(f64::from(x) / std::f64::consts::SQRT_2))) as f32
}

/// The slope of the logistic function in the approximations of GELU: QuickGELU's, and 2 sqrt(2 / pi) of that by tanh.
const QUICK_SLOPE: f32 = 1.702;
const TANH_SLOPE: f32 = 1.595_769;
const TANH_CUBE: f32 = 0.044_715;

/// An activation function by its `kernel_code`, and its derivative.
fn activation(code: usize, x: f32) -> [f32; 2] {
    let logistic = |u: f32, slope: f32| {
        let s = sigmoid(u);
        [x * s, s + s * (1.0 - s) * x * slope]
    };
    let square = x * x;
    match code {
        1 => logistic(x, 1.0),
        2 => {
            let phi = 0.398_942_3 * (-0.5 * square).exp();
            [x * normal_cdf(x), normal_cdf(x) + x * phi]
        }
        3 => logistic(
            TANH_SLOPE * x * (1.0 + TANH_CUBE * square),
            TANH_SLOPE + 3.0 * TANH_SLOPE * TANH_CUBE * square,
        ),
        4 => logistic(QUICK_SLOPE * x, QUICK_SLOPE),
        _ => [x, 1.0],
    }
}

fn activate(args: &Args<'_>) -> Result<()> {
    let (x, count, code) = (args.input(0)?, args.int(2)?, args.int(3)?);
    args.output(1, |y| {
        (0..count).for_each(|i| y.set(i, activation(code, x.get(i))[0]));
        Ok(())
    })
}

fn activate_backward(args: &Args<'_>) -> Result<()> {
    let (x, dy, count, code) = (args.input(0)?, args.input(1)?, args.int(3)?, args.int(4)?);
    args.output(2, |dx| {
        (0..count).for_each(|i| dx.set(i, dy.get(i) * activation(code, x.get(i))[1]));
        Ok(())
    })
}

fn gate(args: &Args<'_>) -> Result<()> {
    let (x, count, half, code) = (args.input(0)?, args.int(2)?, args.int(3)?, args.int(4)?);
    args.output(1, |y| {
        for i in 0..count {
            let at = i / half * half + i;
            y.set(i, x.get(at) * activation(code, x.get(at + half))[0]);
        }
        Ok(())
    })
}

fn gate_backward(args: &Args<'_>) -> Result<()> {
    let (x, dy) = (args.input(0)?, args.input(1)?);
    let (count, half, code) = (args.int(3)?, args.int(4)?, args.int(5)?);
    args.output(2, |dx| {
        for i in 0..count {
            let at = i / half * half + i;
            let [value, derivative] = activation(code, x.get(at + half));
            dx.set(at, dy.get(i) * value);
            dx.set(at + half, dy.get(i) * x.get(at) * derivative);
        }
        Ok(())
    })
}

/// The element of the vector of an image for element i.
fn in_vector(i: usize, rows: usize, features: usize) -> usize {
    i / features / rows * features + i % features
}

fn modulate(args: &Args<'_>) -> Result<()> {
    let (x, scale, shift) = (args.input(0)?, args.optional(1)?, args.optional(2)?);
    let (count, rows, features, offset) = (args.int(4)?, args.int(5)?, args.int(6)?, args.float(7)?);
    args.output(3, |y| {
        for i in 0..count {
            let at = in_vector(i, rows, features);
            let factor = scale.as_ref().map_or(1.0, |scale| offset + scale.get(at));
            y.set(i, x.get(i) * factor + shift.as_ref().map_or(0.0, |shift| shift.get(at)));
        }
        Ok(())
    })
}

fn gated_residual(args: &Args<'_>) -> Result<()> {
    let [x, gate, y] = [0, 1, 2].map(|at| args.input(at));
    let (x, gate, y) = (x?, gate?, y?);
    let (count, rows, features) = (args.int(4)?, args.int(5)?, args.int(6)?);
    args.output(3, |sum| {
        (0..count).for_each(|i| sum.set(i, x.get(i) + gate.get(in_vector(i, rows, features)) * y.get(i)));
        Ok(())
    })
}

fn add_bias(args: &Args<'_>) -> Result<()> {
    let (bias, count, channels, spatial) = (args.input(1)?, args.int(2)?, args.int(3)?, args.int(4)?);
    args.output(0, |x| {
        (0..count).for_each(|i| x.set(i, x.get(i) + bias.get(i / spatial % channels)));
        Ok(())
    })
}

fn swap_axes(args: &Args<'_>) -> Result<()> {
    let x = args.input(0)?;
    let (elements, all, start) = (args.int(2)?, args.int(3)?, args.int(4)?);
    let (count, b, width) = (args.int(5)?, args.int(6)?, args.int(7)?);
    args.output(1, |y| {
        for i in 0..elements {
            let (row, outer) = (i / width % count, i / width / count);
            let from = ((outer / b * all + start + row) * b + outer % b) * width + i % width;
            y.set(i, x.get(from));
        }
        Ok(())
    })
}

fn rotate(args: &Args<'_>) -> Result<()> {
    let (x, cos, sin) = (args.input(0)?, args.input(1)?, args.input(2)?);
    let (pairs, positions, heads, half) = (args.int(4)?, args.int(5)?, args.int(6)?, args.int(7)?);
    let (interleaved, sign) = (args.int(8)? != 0, args.float(9)?);
    args.output(3, |y| {
        for i in 0..pairs {
            let (pair, head) = (i % half, i / half);
            let table = head / heads % positions * half + pair;
            let first = head * 2 * half + if interleaved { 2 * pair } else { pair };
            let second = first + if interleaved { 1 } else { half };
            let (a, b, c, s) = (x.get(first), x.get(second), cos.get(table), sign * sin.get(table));
            y.set(first, a * c - b * s);
            y.set(second, b * c + a * s);
        }
        Ok(())
    })
}

fn im2col(args: &Args<'_>) -> Result<()> {
    let (x, count) = (args.input(0)?, args.int(2)?);
    let mut sizes = [0; 11];
    for (at, size) in sizes.iter_mut().enumerate() {
        *size = args.int(3 + at)?;
    }
    let [
        height,
        width,
        kernel_h,
        kernel_w,
        out_w,
        first_row,
        pixels,
        padding,
        stride,
        dilation,
        reversed,
    ] = sizes;
    let taps = kernel_h * kernel_w;
    args.output(1, |columns| {
        for i in 0..count {
            let (row, pixel) = (i / pixels, i % pixels);
            let (channel, tap) = (row / taps, row % taps);
            let tap = if reversed != 0 { taps - 1 - tap } else { tap };
            let h = (first_row + pixel / out_w) * stride + tap / kernel_w * dilation;
            let w = pixel % out_w * stride + tap % kernel_w * dilation;
            let is_inside = h >= padding && h < height + padding && w >= padding && w < width + padding;
            let value = match is_inside {
                true => x.get((channel * height + h - padding) * width + w - padding),
                false => 0.0,
            };
            columns.set(i, value);
        }
        Ok(())
    })
}

/// The sizes of a norm, from an argument on.
struct Norm {
    length: usize,
    groups: usize,
    spatial: usize,
    eps: f32,
    subtract_mean: bool,
    with_silu: bool,
}

impl Norm {
    fn of(args: &Args<'_>, from: usize) -> Result<Self> {
        Ok(Self {
            length: args.int(from)?,
            groups: args.int(from + 1)?,
            spatial: args.int(from + 2)?,
            eps: args.float(from + 3)?,
            subtract_mean: args.int(from + 4)? != 0,
            with_silu: args.int(from + 5)? != 0,
        })
    }

    /// The mean of a row, and 1 / sqrt(variance + eps).
    fn measure(&self, x: &Input<'_>, row: usize) -> [f32; 2] {
        let values = || (0..self.length).map(|i| x.get(row * self.length + i));
        let mean = match self.subtract_mean {
            true => self.mean(values()),
            false => 0.0,
        };
        let variance = self.mean(values().map(|x| (x - mean) * (x - mean)));
        [mean, 1.0 / (variance + self.eps).sqrt()]
    }

    fn mean(&self, values: impl Iterator<Item = f32>) -> f32 {
        sum(values) / self.length as f32
    }

    fn channel(&self, row: usize, i: usize) -> usize {
        row % self.groups * (self.length / self.spatial) + i / self.spatial
    }
}

fn norm(launch: &Launch, args: &Args<'_>) -> Result<()> {
    let (x, weight, bias, norm) = (args.input(0)?, args.input(1)?, args.input(2)?, Norm::of(args, 4)?);
    args.output(3, |y| {
        for row in 0..launch.blocks {
            let [mean, scale] = norm.measure(&x, row);
            for i in 0..norm.length {
                let (at, channel) = (row * norm.length + i, norm.channel(row, i));
                let mut value = (x.get(at) - mean) * scale * weight.get(channel);
                if norm.subtract_mean {
                    value += bias.get(channel);
                }
                y.set(at, if norm.with_silu { activation(1, value)[0] } else { value });
            }
        }
        Ok(())
    })
}

fn norm_backward(launch: &Launch, args: &Args<'_>) -> Result<()> {
    let (x, weight, bias, dy) = (args.input(0)?, args.input(1)?, args.input(2)?, args.input(3)?);
    let norm = Norm::of(args, 5)?;
    args.output(4, |dx| {
        for row in 0..launch.blocks {
            let [mean, scale] = norm.measure(&x, row);
            // The gradient of the normalised element, and that element.
            let gradient = |i: usize| {
                let (at, channel) = (row * norm.length + i, norm.channel(row, i));
                let (normalised, w) = ((x.get(at) - mean) * scale, weight.get(channel));
                let mut g = dy.get(at);
                if norm.with_silu {
                    let shift = if norm.subtract_mean { bias.get(channel) } else { 0.0 };
                    g *= activation(1, normalised * w + shift)[1];
                }
                [g * w, normalised]
            };
            let mean_g = match norm.subtract_mean {
                true => norm.mean((0..norm.length).map(|i| gradient(i)[0])),
                false => 0.0,
            };
            let mean_product = norm.mean((0..norm.length).map(|i| gradient(i)[0] * gradient(i)[1]));
            for i in 0..norm.length {
                let [g, normalised] = gradient(i);
                dx.set(row * norm.length + i, (g - mean_g - normalised * mean_product) * scale);
            }
        }
        Ok(())
    })
}

/// The probabilities of a row of scores, as a function.
fn probabilities(scores: &Input<'_>, row: usize, keys: usize) -> impl Fn(usize) -> f32 {
    let at = row * keys;
    let max = |a: f32, b: f32| if a > b || a.is_nan() { a } else { b };
    let max = (0..keys).map(|i| scores.get(at + i)).fold(f32::NEG_INFINITY, max);
    let sum = sum((0..keys).map(|i| (scores.get(at + i) - max).exp()));
    move |i| match max == f32::NEG_INFINITY {
        true => 0.0,
        false => (scores.get(at + i) - max).exp() / sum,
    }
}

fn softmax(launch: &Launch, args: &Args<'_>) -> Result<()> {
    let (scores, keys) = (args.input(0)?, args.int(2)?);
    args.output(1, |y| {
        for row in 0..launch.blocks {
            let p = probabilities(&scores, row, keys);
            (0..keys).for_each(|i| y.set(row * keys + i, p(i)));
        }
        Ok(())
    })
}

fn softmax_backward(launch: &Launch, args: &Args<'_>) -> Result<()> {
    let (scores, dp, keys) = (args.input(0)?, args.input(1)?, args.int(4)?);
    args.output(2, |y| {
        args.output(3, |ds| {
            for row in 0..launch.blocks {
                let (at, p) = (row * keys, probabilities(&scores, row, keys));
                let sum = sum((0..keys).map(|i| p(i) * dp.get(at + i)));
                for i in 0..keys {
                    y.set(at + i, p(i));
                    ds.set(at + i, p(i) * (dp.get(at + i) - sum));
                }
            }
            Ok(())
        })
    })
}

/// The factors of a step of Adam, from an argument on.
struct Factors([f32; 8]);

impl Factors {
    fn of(args: &Args<'_>, from: usize) -> Result<Self> {
        let mut factors = [0.0; 8];
        for (at, factor) in factors.iter_mut().enumerate() {
            *factor = args.float(from + at)?;
        }
        Ok(Self(factors))
    }

    /// Parameter and moments after a step.
    fn update(&self, [p, g, m, v]: [f32; 4]) -> [f32; 3] {
        let [
            param_scale,
            l2_decay,
            beta2,
            rest1,
            rest2,
            bias_correction,
            eps,
            step_size,
        ] = self.0;
        let g = g + p * l2_decay;
        let m = m + (g - m) * rest1;
        let v = v * beta2 + g * rest2 * g;
        let p = p * param_scale + m * step_size / (v.sqrt() * bias_correction + eps);
        [p, m, v]
    }
}

fn adam_f32(args: &Args<'_>) -> Result<()> {
    let (grad, count, factors) = (args.input(1)?, args.int(4)?, Factors::of(args, 5)?);
    args.output(0, |p| {
        args.output(2, |m| {
            args.output(3, |v| {
                for i in 0..count {
                    let [new_p, new_m, new_v] = factors.update([p.get(i), grad.get(i), m.get(i), v.get(i)]);
                    p.set(i, new_p);
                    m.set(i, new_m);
                    v.set(i, new_v);
                }
                Ok(())
            })
        })
    })
}

/// Elements of a block of 8-bit state.
const BLOCK: usize = 256;

/// The factor before the reciprocal of a scale that would be infinite.
const TINY_SCALE_FACTOR: f32 = 1.267_650_6e30;

/// Writes a block of a moment in 8 bits. `bounds`: where those of its map begin in the tables.
fn encode(
    values: &[f32],
    (codes, absmax): (&mut Output<'_>, &mut Output<'_>),
    tables: &Input<'_>,
    bounds: usize,
    block: usize,
) {
    let largest = values.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    absmax.set(block, largest);
    let factors = match largest {
        0.0 => [1.0, 1.0],
        tiny if tiny < f32::MIN_POSITIVE => [TINY_SCALE_FACTOR, 1.0 / (tiny * TINY_SCALE_FACTOR)],
        largest => [1.0, 1.0 / largest],
    };
    for (i, value) in values.iter().enumerate() {
        let x = value * factors[0] * factors[1];
        let below = (0..BLOCK - 1).filter(|at| tables.get(bounds + at) < x).count();
        codes.set(block * BLOCK + i, below as f32);
    }
}

fn adam_8bit(launch: &Launch, args: &Args<'_>) -> Result<()> {
    let (grad, tables, count, factors) = (args.input(1)?, args.input(6)?, args.int(7)?, Factors::of(args, 8)?);
    args.output(0, |p| {
        args.output(2, |m| {
            args.output(3, |m_absmax| {
                args.output(4, |v| {
                    args.output(5, |v_absmax| {
                        for block in 0..launch.blocks {
                            let (mut new_m, mut new_v) = ([0.0; BLOCK], [0.0; BLOCK]);
                            let length = BLOCK.min(count - block * BLOCK);
                            for (k, i) in (block * BLOCK..).take(length).enumerate() {
                                let value = |codes: &Output<'_>, absmax: &Output<'_>, table: usize| {
                                    let code = codes.get(i) as usize;
                                    tables.get(table + code) * absmax.get(block)
                                };
                                let before = [p.get(i), grad.get(i), value(m, m_absmax, 0), value(v, v_absmax, 512)];
                                let [after, m, v] = factors.update(before);
                                p.set(i, after);
                                (new_m[k], new_v[k]) = (m, v);
                            }
                            encode(&new_m[..length], (m, m_absmax), &tables, 256, block);
                            encode(&new_v[..length], (v, v_absmax), &tables, 768, block);
                        }
                        Ok(())
                    })
                })
            })
        })
    })
}

fn sum_of_squares(launch: &Launch, args: &Args<'_>) -> Result<()> {
    let (x, count) = (args.input(0)?, args.int(2)?);
    args.output(1, |sums| {
        for block in 0..launch.blocks {
            let squares = (block..count).step_by(launch.blocks).map(|i| x.get(i) * x.get(i));
            sums.set(block, sum(squares));
        }
        Ok(())
    })
}
