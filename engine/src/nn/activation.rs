//! Activations, each with its derivative: SiLU, GELU (exact and by tanh), quick GELU, GEGLU.

use super::cpu;
use candle_core::cpu::erf::erf_f32;
use candle_core::{CpuStorage, CustomOp1, D, Device, Layout, Shape, Tensor};
use rayon::prelude::*;

/// An activation by its name in a model's config.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x * sigmoid(x); `silu`, `swish`.
    Silu,
    /// x * Phi(x), exact; `gelu`.
    Gelu,
    /// GELU by tanh; `gelu_new`, `gelu_pytorch_tanh`.
    GeluTanh,
    /// x * sigmoid(1.702 x), as CLIP has it; `quick_gelu`.
    QuickGelu,
}

impl Activation {
    /// The activation with this name in diffusers or transformers.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "silu" | "swish" => Some(Self::Silu),
            "gelu" => Some(Self::Gelu),
            "gelu_new" | "gelu_pytorch_tanh" => Some(Self::GeluTanh),
            "quick_gelu" => Some(Self::QuickGelu),
            _ => None,
        }
    }

    /// Element by element; any shape.
    ///
    /// # Errors
    /// When the arithmetic fails.
    pub fn forward(self, x: &Tensor) -> candle_core::Result<Tensor> {
        if cpu::runs_here(x) {
            return x.contiguous()?.apply_op1(Elementwise(self));
        }
        match self {
            Self::Silu => x.silu(),
            Self::Gelu => x.gelu_erf(),
            Self::GeluTanh => x.gelu(),
            Self::QuickGelu => x * ((x * -1.702)?.exp()? + 1.0)?.recip()?,
        }
    }

    fn value(self, x: f32) -> f32 {
        match self {
            Self::Silu => x * sigmoid(x),
            Self::Gelu => 0.5 * x * (1.0 + erf_f32(x * std::f32::consts::FRAC_1_SQRT_2)),
            Self::GeluTanh => 0.5 * x * (1.0 + (TANH_SCALE * (x + TANH_CUBE * x * x * x)).tanh()),
            Self::QuickGelu => x * sigmoid(1.702 * x),
        }
    }

    fn derivative(self, x: f32) -> f32 {
        match self {
            Self::Silu => {
                let s = sigmoid(x);
                s * (1.0 + x * (1.0 - s))
            }
            Self::Gelu => {
                let density = (-0.5 * x * x).exp() * 0.398_942_3;
                0.5 * (1.0 + erf_f32(x * std::f32::consts::FRAC_1_SQRT_2)) + x * density
            }
            Self::GeluTanh => {
                let t = (TANH_SCALE * (x + TANH_CUBE * x * x * x)).tanh();
                let inner = TANH_SCALE * (1.0 + 3.0 * TANH_CUBE * x * x);
                0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
            }
            Self::QuickGelu => {
                let s = sigmoid(1.702 * x);
                s + 1.702 * x * s * (1.0 - s)
            }
        }
    }
}

const TANH_SCALE: f32 = 0.797_884_6;
const TANH_CUBE: f32 = 0.044_715;

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// x * sigmoid(x).
///
/// # Errors
/// When the arithmetic fails.
pub fn silu(x: &Tensor) -> candle_core::Result<Tensor> {
    Activation::Silu.forward(x)
}

/// x * Phi(x), exact.
///
/// # Errors
/// When the arithmetic fails.
pub fn gelu(x: &Tensor) -> candle_core::Result<Tensor> {
    Activation::Gelu.forward(x)
}

/// x * sigmoid(1.702 x).
///
/// # Errors
/// When the arithmetic fails.
pub fn quick_gelu(x: &Tensor) -> candle_core::Result<Tensor> {
    Activation::QuickGelu.forward(x)
}

/// x [.., 2 d] = (hidden, gate) -> hidden * gelu(gate) [.., d].
///
/// # Errors
/// When the last dimension is odd.
pub fn geglu(x: &Tensor) -> candle_core::Result<Tensor> {
    let width = x.dim(D::Minus1)?;
    if width % 2 != 0 {
        candle_core::bail!("geglu: the last dimension of {:?} is odd", x.dims());
    }
    if cpu::runs_here(x) {
        return x.contiguous()?.apply_op1(Geglu);
    }
    let hidden = x.narrow(D::Minus1, 0, width / 2)?;
    let gate = x.narrow(D::Minus1, width / 2, width / 2)?;
    hidden * gelu(&gate)?
}

/// Elements that one task of the thread pool takes.
const GRAIN: usize = 1 << 13;

struct Elementwise(Activation);

impl CustomOp1 for Elementwise {
    fn name(&self) -> &'static str {
        "activation"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let x = cpu::slice(storage, layout)?;
        let mut y = vec![0f32; x.len()];
        y.par_chunks_mut(GRAIN).zip(x.par_chunks(GRAIN)).for_each(|(y, x)| {
            y.iter_mut().zip(x).for_each(|(y, x)| *y = self.0.value(*x));
        });
        Ok((CpuStorage::F32(y), layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let grad = grad.contiguous()?;
        let mut dx = vec![0f32; x.elem_count()];
        cpu::with_slice(x, |x| {
            cpu::with_slice(&grad, |dy| {
                let inputs = x.par_chunks(GRAIN).zip(dy.par_chunks(GRAIN));
                dx.par_chunks_mut(GRAIN).zip(inputs).for_each(|(dx, (x, dy))| {
                    let inputs = x.iter().zip(dy);
                    dx.iter_mut()
                        .zip(inputs)
                        .for_each(|(dx, (x, dy))| *dx = dy * self.0.derivative(*x));
                });
            })
        })??;
        Ok(Some(Tensor::from_vec(dx, x.shape(), &Device::Cpu)?))
    }
}

struct Geglu;

impl CustomOp1 for Geglu {
    fn name(&self) -> &'static str {
        "geglu"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let x = cpu::slice(storage, layout)?;
        let mut dims = layout.dims().to_vec();
        let half = dims.last().copied().unwrap_or(0) / 2;
        if let Some(last) = dims.last_mut() {
            *last = half;
        }
        let mut y = vec![0f32; x.len() / 2];
        if half > 0 {
            y.par_chunks_mut(half).zip(x.par_chunks(2 * half)).for_each(|(y, x)| {
                let (hidden, gate) = x.split_at(half);
                for ((y, hidden), gate) in y.iter_mut().zip(hidden).zip(gate) {
                    *y = hidden * Activation::Gelu.value(*gate);
                }
            });
        }
        Ok((CpuStorage::F32(y), dims.into()))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let grad = grad.contiguous()?;
        let half = grad.dim(D::Minus1)?;
        let mut dx = vec![0f32; x.elem_count()];
        if half > 0 {
            cpu::with_slice(x, |x| {
                cpu::with_slice(&grad, |dy| {
                    let inputs = x.par_chunks(2 * half).zip(dy.par_chunks(half));
                    dx.par_chunks_mut(2 * half).zip(inputs).for_each(|(dx, (x, dy))| {
                        let (hidden, gate) = x.split_at(half);
                        let (d_hidden, d_gate) = dx.split_at_mut(half);
                        for i in 0..half {
                            d_hidden[i] = dy[i] * Activation::Gelu.value(gate[i]);
                            d_gate[i] = dy[i] * hidden[i] * Activation::Gelu.derivative(gate[i]);
                        }
                    });
                })
            })??;
        }
        Ok(Some(Tensor::from_vec(dx, x.shape(), &Device::Cpu)?))
    }
}
