//! Steps of Adam, and sums of squares.

use super::arguments::{Arg, Launch, Module};
use super::launch::{are_usable, dtype_name, launch, output};
use candle_core::{DType, Result, Shape, Tensor};

/// The factors of a step of Adam, equal for all elements of a parameter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdamFactors {
    /// Scale of the parameter for decoupled decay: 1 - lr * weight_decay.
    pub(crate) param_scale: f64,
    /// Weight decay that is added to the gradient (L2).
    pub(crate) l2_decay: f64,
    pub(crate) beta2: f64,
    /// 1 - beta1 and 1 - beta2.
    pub(crate) one_minus_betas: (f64, f64),
    /// 1 / sqrt(1 - beta2^t). torch divides instead; a division per element would dominate the time of an 8-bit step.
    pub(crate) bias_correction: f64,
    pub(crate) eps: f64,
    /// -lr / (1 - beta1^t).
    pub(crate) step_size: f64,
}

impl AdamFactors {
    fn args(&self) -> [Arg<'static>; 8] {
        [
            self.param_scale,
            self.l2_decay,
            self.beta2,
            self.one_minus_betas.0,
            self.one_minus_betas.1,
            self.bias_correction,
            self.eps,
            self.step_size,
        ]
        .map(Arg::F32)
    }
}

/// Elements of a block of 8-bit state.
const BLOCK: usize = 256;

/// The two moments of a parameter in 8 bits: codes like the parameter, and one scale for each block.
pub(crate) struct Moments8<'a> {
    pub(crate) codes: [&'a Tensor; 2],
    pub(crate) absmax: [&'a Tensor; 2],
    /// Values and bounds of the map of the first moment, then of the second: [1024], f32.
    pub(crate) tables: &'a Tensor,
}

/// Updates a parameter and its moments, all in f32, in place, and says whether it did.
///
/// # Errors
/// When the device fails.
pub(crate) fn adam_f32(p: &Tensor, grad: &Tensor, moments: [&Tensor; 2], factors: &AdamFactors) -> Result<bool> {
    let tensors = [p, grad, moments[0], moments[1]];
    if !are_f32(&tensors) {
        return Ok(false);
    }
    let count = p.elem_count();
    let start = Launch::elements(Module::Optimizer, "adam_f32".to_owned(), count, 1);
    let args = tensors.map(Arg::Tensor);
    launch(&start, &[&args[..], &[Arg::I64(count)], &factors.args()].concat())?;
    Ok(true)
}

/// As [`adam_f32`], with moments in 8 bits.
///
/// # Errors
/// When the device fails.
pub(crate) fn adam_8bit(p: &Tensor, grad: &Tensor, moments: &Moments8<'_>, factors: &AdamFactors) -> Result<bool> {
    let [m, v] = moments.codes;
    let [m_absmax, v_absmax] = moments.absmax;
    let are_codes = [m, v]
        .iter()
        .all(|codes| codes.dtype() == DType::U8 && codes.is_contiguous());
    if !are_codes || !are_f32(&[p, grad]) || !are_usable(&[m_absmax, v_absmax, moments.tables]) {
        return Ok(false);
    }
    let count = p.elem_count();
    let start = Launch {
        module: Module::Optimizer,
        kernel: "adam_8bit".to_owned(),
        blocks: count.div_ceil(BLOCK),
        threads: BLOCK,
    };
    let args = [p, grad, m, m_absmax, v, v_absmax, moments.tables].map(Arg::Tensor);
    launch(&start, &[&args[..], &[Arg::I64(count)], &factors.args()].concat())?;
    Ok(true)
}

/// Whether these are usable and have as many numbers in f32 as the first.
fn are_f32(tensors: &[&Tensor]) -> bool {
    let count = tensors.first().map_or(0, |tensor| tensor.elem_count());
    let is_alike = |tensor: &&Tensor| tensor.dtype() == DType::F32 && tensor.elem_count() == count;
    tensors.iter().all(is_alike) && are_usable(tensors)
}

/// The parts of the sum of the squares of x, [parts], f32.
///
/// # Errors
/// When the device fails.
pub(crate) fn sum_of_squares(x: &Tensor) -> Result<Option<Tensor>> {
    const THREADS: usize = 1024;
    /// Elements of a thread before there is another part.
    const AT_LEAST: usize = 16;
    const MOST_PARTS: usize = 64;
    let Some(dtype) = dtype_name(x.dtype()).filter(|_| are_usable(&[x])) else {
        return Ok(None);
    };
    let count = x.elem_count();
    let start = Launch {
        module: Module::Optimizer,
        kernel: format!("sum_of_squares_{dtype}"),
        blocks: count.div_ceil(THREADS * AT_LEAST).min(MOST_PARTS),
        threads: THREADS,
    };
    let sums = output(&Shape::from(start.blocks), DType::F32, x.device())?;
    launch(&start, &[Arg::Tensor(x), Arg::Tensor(&sums), Arg::I64(count)])?;
    Ok(Some(sums))
}
