//! The softmax of attention scores.

use super::arguments::{Arg, Launch, Module};
use super::launch::{are_usable, dtype_name, elements_at_once, launch, output};
use candle_core::{D, DType, Result, Tensor};

/// How a kernel is started for scores and probabilities of these dtypes, if there is one.
fn row_launch(name: &str, scores: &Tensor, dtype: DType, others: &[&Tensor]) -> Result<Option<Launch>> {
    let keys = scores.dim(D::Minus1)?;
    let (Some(from), Some(to)) = (dtype_name(scores.dtype()), dtype_name(dtype)) else {
        return Ok(None);
    };
    if !are_usable(&[scores]) || !are_usable(others) || (from != to && from != "f32") {
        return Ok(None);
    }
    let tensors: Vec<_> = others.iter().chain([&scores]).copied().collect();
    let at_once = elements_at_once(scores.dtype(), &[keys], &tensors);
    let kernel = format!("{name}_{from}_{to}_{at_once}");
    let rows = scores.elem_count() / keys;
    Ok(Some(Launch::rows(Module::Softmax, kernel, rows, keys, at_once)))
}

/// Softmax over the last dimension of scores [.., keys], in `dtype`. A row of only minus infinity becomes zeros.
///
/// # Errors
/// When the device fails.
pub(crate) fn softmax(scores: &Tensor, dtype: DType) -> Result<Option<Tensor>> {
    let Some(start) = row_launch("softmax", scores, dtype, &[])? else {
        return Ok(None);
    };
    let y = output(scores.shape(), dtype, scores.device())?;
    let keys = scores.dim(D::Minus1)?;
    launch(&start, &[Arg::Tensor(scores), Arg::Tensor(&y), Arg::I32(keys)])?;
    Ok(Some(y))
}

/// The softmax p of scores [.., keys], in the dtype of `dp`, and the gradient of the scores from the gradient `dp` of p:
/// p * (dp - sum(p * dp)), in the dtype of the scores.
///
/// # Errors
/// When the device fails.
pub(crate) fn softmax_backward(scores: &Tensor, dp: &Tensor) -> Result<Option<[Tensor; 2]>> {
    let Some(start) = row_launch("softmax_backward", scores, dp.dtype(), &[dp])? else {
        return Ok(None);
    };
    let p = output(scores.shape(), dp.dtype(), scores.device())?;
    let ds = output(scores.shape(), scores.dtype(), scores.device())?;
    let keys = scores.dim(D::Minus1)?;
    let args = [Arg::Tensor(scores), Arg::Tensor(dp), Arg::Tensor(&p), Arg::Tensor(&ds)];
    launch(&start, &[&args[..], &[Arg::I32(keys)]].concat())?;
    Ok(Some([p, ds]))
}
