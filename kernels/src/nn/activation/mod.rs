//! Activation functions and their derivatives: SiLU, GELU (without and with the tanh approximation), quick GELU; gated: GEGLU, SwiGLU.

mod tensors;

use super::cpu::{self, Function, Simd, map_parallel, map_serial};
use super::tensors::widen;
use crate::autograd::{Input, Operation, apply};
use crate::cuda_kernels;
use candle_core::{D, Device, Shape, Tensor};
use rayon::prelude::*;

/// An activation function, as named in a model's config.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x * sigmoid(x); `silu`, `swish`.
    Silu,
    /// x * Phi(x), without the tanh approximation; `gelu`, `gelu_python`.
    Gelu,
    /// GELU with the tanh approximation; `gelu_new`, `gelu_fast`, `gelu_pytorch_tanh`.
    GeluTanh,
    /// x * sigmoid(1.702 x), as in CLIP; `quick_gelu`.
    QuickGelu,
}

impl Activation {
    /// The activation with this name in diffusers or transformers.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "silu" | "swish" => Some(Self::Silu),
            "gelu" | "gelu_python" => Some(Self::Gelu),
            "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => Some(Self::GeluTanh),
            "quick_gelu" => Some(Self::QuickGelu),
            _ => None,
        }
    }

    /// Applies the function to each element. Any shape.
    ///
    /// # Errors
    /// When an operation fails.
    pub fn forward(self, x: &Tensor) -> candle_core::Result<Tensor> {
        apply([x], Elementwise(self))
    }

    /// Its number in the kernels for GPUs (`cuda_kernels/common.cuh`).
    fn kernel_code(self) -> usize {
        match self {
            Self::Silu => 1,
            Self::Gelu => 2,
            Self::GeluTanh => 3,
            Self::QuickGelu => 4,
        }
    }

    #[inline(always)]
    pub(super) fn value<S: Simd>(self, x: S::V) -> S::V {
        match self {
            Self::Silu => S::mul(x, sigmoid::<S>(x)),
            Self::Gelu => S::mul(x, normal::<S>(x)),
            Self::GeluTanh => S::mul(x, sigmoid::<S>(tanh_inner::<S>(x))),
            Self::QuickGelu => S::mul(x, sigmoid::<S>(S::mul(x, S::splat(1.702)))),
        }
    }

    #[inline(always)]
    pub(super) fn derivative<S: Simd>(self, x: S::V) -> S::V {
        // Of x * s(u(x)) with the logistic function s: s + x * s * (1 - s) * u'.
        let logistic = |s: S::V, slope: S::V| {
            let inner = S::mul(S::mul(x, S::sub(S::splat(1.0), s)), slope);
            S::mul_add(s, inner, s)
        };
        match self {
            Self::Silu => logistic(sigmoid::<S>(x), S::splat(1.0)),
            Self::Gelu => {
                let density = S::exp(S::mul(S::mul(x, x), S::splat(-0.5)));
                S::mul_add(x, S::mul(density, S::splat(0.398_942_3)), normal::<S>(x))
            }
            Self::GeluTanh => {
                let square = S::mul(x, x);
                let slope = S::mul_add(
                    square,
                    S::splat(6.0 * TANH_SCALE * TANH_CUBE),
                    S::splat(2.0 * TANH_SCALE),
                );
                logistic(sigmoid::<S>(tanh_inner::<S>(x)), slope)
            }
            Self::QuickGelu => logistic(sigmoid::<S>(S::mul(x, S::splat(1.702))), S::splat(1.702)),
        }
    }
}

const TANH_SCALE: f32 = 0.797_884_6;
const TANH_CUBE: f32 = 0.044_715;

#[inline(always)]
fn sigmoid<S: Simd>(x: S::V) -> S::V {
    let one = S::splat(1.0);
    S::div(one, S::add(one, S::exp(S::sub(S::splat(0.0), x))))
}

/// Twice the argument of tanh in GELU: (1 + tanh u) / 2 is the logistic function of 2 u.
#[inline(always)]
fn tanh_inner<S: Simd>(x: S::V) -> S::V {
    let factor = S::mul_add(S::mul(x, x), S::splat(TANH_CUBE), S::splat(1.0));
    S::mul(S::mul(x, S::splat(2.0 * TANH_SCALE)), factor)
}

/// The distribution function of the normal distribution, with a relative error of 1e-6 even far below zero. Uses the
/// Chebyshev fit of Press and others, "Numerical Recipes" (`erfcc`), for its complement.
#[inline(always)]
fn normal<S: Simd>(x: S::V) -> S::V {
    const FIT: [f32; 9] = [
        -0.822_152_2,
        1.488_515_9,
        -1.135_204,
        0.278_868_07,
        -0.186_288_06,
        0.096_784_18,
        0.374_091_96,
        1.000_023_7,
        -1.265_512_2,
    ];
    let (zero, one) = (S::splat(0.0), S::splat(1.0));
    let z = S::mul(S::max(x, S::sub(zero, x)), S::splat(std::f32::consts::FRAC_1_SQRT_2));
    let t = S::div(one, S::mul_add(z, S::splat(0.5), one));
    let mut p = S::splat(0.170_872_77);
    for c in FIT {
        p = S::mul_add(p, t, S::splat(c));
    }
    let exponent = S::sub(p, S::mul(z, z));
    let tail = S::mul(S::mul(t, S::splat(0.5)), S::exp(exponent));
    S::where_negative(x, tail, S::sub(one, tail))
}

/// x * sigmoid(x).
///
/// # Errors
/// When an operation fails.
pub fn silu(x: &Tensor) -> candle_core::Result<Tensor> {
    Activation::Silu.forward(x)
}

/// x * Phi(x), without the tanh approximation.
///
/// # Errors
/// When an operation fails.
pub fn gelu(x: &Tensor) -> candle_core::Result<Tensor> {
    Activation::Gelu.forward(x)
}

/// x * sigmoid(1.702 x).
///
/// # Errors
/// When an operation fails.
pub fn quick_gelu(x: &Tensor) -> candle_core::Result<Tensor> {
    Activation::QuickGelu.forward(x)
}

/// x [.., 2 d] = (hidden, gate) -> hidden * gelu(gate) [.., d] (N. Shazeer, arXiv:2002.05202).
///
/// # Errors
/// When the last dimension is odd, or an operation fails.
pub fn geglu(x: &Tensor) -> candle_core::Result<Tensor> {
    gated(x, Activation::Gelu)
}

/// x [.., 2 d] = (hidden, gate) -> hidden * silu(gate) [.., d], the halves as in diffusers' `SwiGLU`.
///
/// # Errors
/// When the last dimension is odd, or an operation fails.
pub fn swiglu(x: &Tensor) -> candle_core::Result<Tensor> {
    gated(x, Activation::Silu)
}

fn gated(x: &Tensor, activation: Activation) -> candle_core::Result<Tensor> {
    let width = x.dim(D::Minus1)?;
    if width % 2 != 0 {
        candle_core::bail!("a gated activation needs an even last dimension, found {:?}", x.dims());
    }
    apply([x], Gated(activation))
}

/// The two halves of x [.., 2 d] along the last axis, in f32.
fn halves(x: &Tensor) -> candle_core::Result<[Tensor; 2]> {
    let half = x.dim(D::Minus1)? / 2;
    Ok([
        widen(&x.narrow(D::Minus1, 0, half)?)?,
        widen(&x.narrow(D::Minus1, half, half)?)?,
    ])
}

/// An activation: as a function of x, and its gradient as a function of x and dy.
#[derive(Clone, Copy)]
struct Elementwise(Activation);

impl Function<1> for Elementwise {
    #[inline(always)]
    fn eval<S: Simd>(self, [x]: [S::V; 1]) -> S::V {
        self.0.value::<S>(x)
    }
}

impl Function<2> for Elementwise {
    #[inline(always)]
    fn eval<S: Simd>(self, [x, dy]: [S::V; 2]) -> S::V {
        S::mul(dy, self.0.derivative::<S>(x))
    }
}

impl Operation<1> for Elementwise {
    const NAME: &'static str = "activation";

    fn saved_inputs(&self, _: [bool; 1]) -> [bool; 1] {
        [true]
    }

    fn forward(&self, [x]: [&[f32]; 1], [shape]: [&Shape; 1]) -> candle_core::Result<(Vec<f32>, Shape)> {
        let mut y = vec![0f32; x.len()];
        map_parallel(*self, [x], &mut y);
        Ok((y, shape.clone()))
    }

    fn backward(&self, [x]: [&Input; 1], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 1]> {
        let mut dx = vec![0f32; x.shape().elem_count()];
        x.with(|x| cpu::with_slice(gradient, |dy| map_parallel(*self, [x, dy], &mut dx)))??;
        Ok([Some(Tensor::from_vec(dx, x.shape(), &Device::Cpu)?)])
    }

    fn forward_tensors(&self, [x]: [&Tensor; 1]) -> candle_core::Result<Tensor> {
        match cuda_kernels::activate(self.0.kernel_code(), x)? {
            Some(y) => Ok(y),
            None => self.0.value_tensors(&widen(x)?)?.to_dtype(x.dtype()),
        }
    }

    fn backward_tensors(&self, [x]: [&Input; 1], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 1]> {
        if let Some(dx) = cuda_kernels::activate_backward(self.0.kernel_code(), x.tensor()?, gradient)? {
            return Ok([Some(dx)]);
        }
        let derivative = self.0.derivative_tensors(&widen(x.tensor()?)?)?;
        Ok([Some((widen(gradient)? * derivative)?)])
    }
}

/// hidden * activation(gate) and its gradients.
#[derive(Clone, Copy)]
struct Gated(Activation);

impl Function<2> for Gated {
    #[inline(always)]
    fn eval<S: Simd>(self, [hidden, gate]: [S::V; 2]) -> S::V {
        S::mul(hidden, self.0.value::<S>(gate))
    }
}

impl Function<3> for Gated {
    #[inline(always)]
    fn eval<S: Simd>(self, [hidden, gate, dy]: [S::V; 3]) -> S::V {
        S::mul(S::mul(dy, hidden), self.0.derivative::<S>(gate))
    }
}

impl Operation<1> for Gated {
    const NAME: &'static str = "gated-activation";

    fn saved_inputs(&self, _: [bool; 1]) -> [bool; 1] {
        [true]
    }

    fn forward(&self, [x]: [&[f32]; 1], [shape]: [&Shape; 1]) -> candle_core::Result<(Vec<f32>, Shape)> {
        let mut dims = shape.dims().to_vec();
        let half = dims.last().copied().unwrap_or(0) / 2;
        if let Some(last) = dims.last_mut() {
            *last = half;
        }
        let mut y = vec![0f32; x.len() / 2];
        if half > 0 {
            y.par_chunks_mut(half).zip(x.par_chunks(2 * half)).for_each(|(y, x)| {
                let (hidden, gate) = x.split_at(half);
                map_serial(*self, [hidden, gate], y);
            });
        }
        Ok((y, dims.into()))
    }

    fn backward(&self, [x]: [&Input; 1], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 1]> {
        let half = gradient.dim(D::Minus1)?;
        let mut dx = vec![0f32; x.shape().elem_count()];
        if half > 0 {
            x.with(|x| {
                cpu::with_slice(gradient, |dy| {
                    let inputs = x.par_chunks(2 * half).zip(dy.par_chunks(half));
                    dx.par_chunks_mut(2 * half).zip(inputs).for_each(|(dx, (x, dy))| {
                        let (hidden, gate) = x.split_at(half);
                        let (d_hidden, d_gate) = dx.split_at_mut(half);
                        map_serial(*self, [dy, gate], d_hidden);
                        map_serial(*self, [hidden, gate, dy], d_gate);
                    });
                })
            })??;
        }
        Ok([Some(Tensor::from_vec(dx, x.shape(), &Device::Cpu)?)])
    }

    fn forward_tensors(&self, [x]: [&Tensor; 1]) -> candle_core::Result<Tensor> {
        if let Some(y) = cuda_kernels::gate(self.0.kernel_code(), x)? {
            return Ok(y);
        }
        let [hidden, gate] = halves(x)?;
        (hidden * self.0.value_tensors(&gate)?)?.to_dtype(x.dtype())
    }

    fn backward_tensors(&self, [x]: [&Input; 1], gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 1]> {
        if let Some(dx) = cuda_kernels::gate_backward(self.0.kernel_code(), x.tensor()?, gradient)? {
            return Ok([Some(dx)]);
        }
        let ([hidden, gate], dy) = (halves(x.tensor()?)?, widen(gradient)?);
        let d_hidden = (&dy * self.0.value_tensors(&gate)?)?;
        let d_gate = ((dy * hidden)? * self.0.derivative_tensors(&gate)?)?;
        Ok([Some(Tensor::cat(&[d_hidden, d_gate], D::Minus1)?)])
    }
}
