//! Group norm, layer norm and RMS norm.

use super::arguments::{Arg, Launch, Module};
use super::launch::{are_usable, dtype_name, elements_at_once, launch, output};
use candle_core::{DType, Result, Tensor};

/// A norm over rows of `length` elements, as `nn::norm` describes it.
pub(crate) struct Norm {
    pub(crate) length: usize,
    pub(crate) channels: usize,
    pub(crate) spatial: usize,
    pub(crate) eps: f64,
    pub(crate) subtract_mean: bool,
    /// Whether the result goes through SiLU.
    pub(crate) with_silu: bool,
}

impl Norm {
    /// How the kernel is started, if there is one for these tensors; `same` have the dtype and shape of x.
    fn launch(&self, name: &str, x: &Tensor, [weight, bias]: [&Tensor; 2], same: &[&Tensor]) -> Option<Launch> {
        let is_same = |other: &&Tensor| other.dtype() == x.dtype() && other.elem_count() == x.elem_count();
        let has_dtypes = weight.dtype() == bias.dtype()
            && (weight.dtype() == x.dtype() || weight.dtype() == DType::F32)
            && same.iter().all(is_same);
        let is_whole = self.spatial > 0
            && self.length.is_multiple_of(self.spatial)
            && (self.channels * self.spatial).is_multiple_of(self.length);
        if !has_dtypes || !is_whole || !are_usable(&[x, weight, bias]) || !are_usable(same) {
            return None;
        }
        let (of_x, of_weight) = (dtype_name(x.dtype())?, dtype_name(weight.dtype())?);
        let tensors: Vec<_> = same.iter().chain([&x]).copied().collect();
        let at_once = elements_at_once(x.dtype(), &[self.length], &tensors);
        let kernel = format!("{name}_{of_x}_{of_weight}_{at_once}");
        let rows = x.elem_count() / self.length;
        Some(Launch::rows(Module::Norm, kernel, rows, self.length, at_once))
    }

    fn args(&self) -> [Arg<'static>; 6] {
        [
            Arg::I32(self.length),
            Arg::I32(self.channels * self.spatial / self.length),
            Arg::I32(self.spatial),
            Arg::F32(self.eps),
            Arg::I32(usize::from(self.subtract_mean)),
            Arg::I32(usize::from(self.with_silu)),
        ]
    }
}

/// The norm of x, times `weight` [channels], plus `bias` [channels] if the mean is subtracted.
///
/// # Errors
/// When the device fails.
pub(crate) fn norm(norm: &Norm, x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Option<Tensor>> {
    let Some(start) = norm.launch("norm", x, [weight, bias], &[]) else {
        return Ok(None);
    };
    let y = output(x.shape(), x.dtype(), x.device())?;
    let args = [x, weight, bias, &y].map(Arg::Tensor);
    launch(&start, &[&args[..], &norm.args()].concat())?;
    Ok(Some(y))
}

/// The gradient of x from that of the result.
///
/// # Errors
/// When the device fails.
pub(crate) fn norm_backward(
    norm: &Norm,
    x: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    dy: &Tensor,
) -> Result<Option<Tensor>> {
    let Some(start) = norm.launch("norm_backward", x, [weight, bias], &[dy]) else {
        return Ok(None);
    };
    let dx = output(x.shape(), x.dtype(), x.device())?;
    let args = [x, weight, bias, dy, &dx].map(Arg::Tensor);
    launch(&start, &[&args[..], &norm.args()].concat())?;
    Ok(Some(dx))
}
