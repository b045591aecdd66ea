//! Functions of each element.

use super::arguments::{Arg, Launch, Module};
use super::launch::{are_usable, dtype_name, elements_at_once, launch, output};
use candle_core::{D, DType, Result, Shape, Tensor};

/// How a kernel is started for `count` elements of tensors of one dtype. Vectors of elements are within `lengths`.
fn element_launch(name: &str, tensors: &[&Tensor], count: usize, lengths: &[usize]) -> Option<Launch> {
    let dtype = tensors.first()?.dtype();
    if !are_usable(tensors) || tensors.iter().any(|tensor| tensor.dtype() != dtype) {
        return None;
    }
    let at_once = elements_at_once(dtype, lengths, tensors);
    let kernel = format!("{name}_{}_{at_once}", dtype_name(dtype)?);
    Some(Launch::elements(Module::Pointwise, kernel, count, at_once))
}

/// An activation of each element; `activation` is a number of `common.cuh`.
///
/// # Errors
/// When the device fails.
pub(crate) fn activate(activation: usize, x: &Tensor) -> Result<Option<Tensor>> {
    let count = x.elem_count();
    let Some(start) = element_launch("activate", &[x], count, &[count]) else {
        return Ok(None);
    };
    let y = output(x.shape(), x.dtype(), x.device())?;
    let args = [Arg::Tensor(x), Arg::Tensor(&y), Arg::I64(count), Arg::I32(activation)];
    launch(&start, &args)?;
    Ok(Some(y))
}

/// The gradient of x from that of [`activate`].
///
/// # Errors
/// When the device fails.
pub(crate) fn activate_backward(activation: usize, x: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
    let count = x.elem_count();
    let Some(start) = element_launch("activate_backward", &[x, dy], count, &[count]) else {
        return Ok(None);
    };
    let dx = output(x.shape(), x.dtype(), x.device())?;
    let args = [x, dy, &dx].map(Arg::Tensor);
    launch(&start, &[&args[..], &[Arg::I64(count), Arg::I32(activation)]].concat())?;
    Ok(Some(dx))
}

/// x [.., 2 d] = (hidden, gate) -> hidden * activation(gate) [.., d].
///
/// # Errors
/// When the device fails.
pub(crate) fn gate(activation: usize, x: &Tensor) -> Result<Option<Tensor>> {
    let (count, half) = (x.elem_count() / 2, x.dim(D::Minus1)? / 2);
    let Some(start) = element_launch("gate", &[x], count, &[half]) else {
        return Ok(None);
    };
    let mut shape = x.dims().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = half;
    }
    let y = output(&Shape::from(shape), x.dtype(), x.device())?;
    let args = [x, &y].map(Arg::Tensor);
    let numbers = [Arg::I64(count), Arg::I32(half), Arg::I32(activation)];
    launch(&start, &[&args[..], &numbers].concat())?;
    Ok(Some(y))
}

/// The gradient of x from that of [`gate`].
///
/// # Errors
/// When the device fails.
pub(crate) fn gate_backward(activation: usize, x: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
    let (count, half) = (x.elem_count() / 2, x.dim(D::Minus1)? / 2);
    let Some(start) = element_launch("gate_backward", &[x, dy], count, &[half]) else {
        return Ok(None);
    };
    let dx = output(x.shape(), x.dtype(), x.device())?;
    let args = [x, dy, &dx].map(Arg::Tensor);
    let numbers = [Arg::I64(count), Arg::I32(half), Arg::I32(activation)];
    launch(&start, &[&args[..], &numbers].concat())?;
    Ok(Some(dx))
}

/// x * (1 + scale) + shift, or without a shift: x [b, n, c], scale and shift [b, c].
///
/// # Errors
/// When the device fails.
pub(crate) fn modulate(x: &Tensor, scale: &Tensor, shift: Option<&Tensor>) -> Result<Option<Tensor>> {
    modulate_with(x, scale, shift, 1.0)
}

/// x * scale: x [b, n, c], scale [b, c].
///
/// # Errors
/// When the device fails.
pub(crate) fn scale(x: &Tensor, scale: &Tensor) -> Result<Option<Tensor>> {
    modulate_with(x, scale, None, 0.0)
}

fn modulate_with(x: &Tensor, scale: &Tensor, shift: Option<&Tensor>, offset: f64) -> Result<Option<Tensor>> {
    let (_, rows, features) = x.dims3()?;
    let tensors: Vec<_> = [Some(x), Some(scale), shift].into_iter().flatten().collect();
    let count = x.elem_count();
    let Some(start) = element_launch("modulate", &tensors, count, &[features]) else {
        return Ok(None);
    };
    let y = output(x.shape(), x.dtype(), x.device())?;
    let args = [Arg::Tensor(x), Arg::Tensor(scale), shift.into(), Arg::Tensor(&y)];
    let numbers = [Arg::I64(count), Arg::I32(rows), Arg::I32(features), Arg::F32(offset)];
    launch(&start, &[&args[..], &numbers].concat())?;
    Ok(Some(y))
}

/// x + gate * y: x and y [b, n, c], gate [b, c].
///
/// # Errors
/// When the device fails.
pub(crate) fn gated_residual(x: &Tensor, gate: &Tensor, y: &Tensor) -> Result<Option<Tensor>> {
    let (_, rows, features) = x.dims3()?;
    let count = x.elem_count();
    let Some(start) = element_launch("gated_residual", &[x, gate, y], count, &[features]) else {
        return Ok(None);
    };
    let sum = output(x.shape(), x.dtype(), x.device())?;
    let args = [x, gate, y, &sum].map(Arg::Tensor);
    let numbers = [Arg::I64(count), Arg::I32(rows), Arg::I32(features)];
    launch(&start, &[&args[..], &numbers].concat())?;
    Ok(Some(sum))
}

/// Adds `bias` [channels] to x in place, and says whether it did. Element i belongs to channel `i / spatial % channels`. Nobody else
/// may hold x.
///
/// # Errors
/// When the device fails.
pub(crate) fn add_bias(x: &Tensor, bias: &Tensor, spatial: usize) -> Result<bool> {
    let (count, channels) = (x.elem_count(), bias.elem_count());
    let within = if spatial == 1 { channels } else { spatial };
    let Some(start) = element_launch("add_bias", &[x, bias], count, &[within]) else {
        return Ok(false);
    };
    let args = [Arg::Tensor(x), Arg::Tensor(bias)];
    let numbers = [Arg::I64(count), Arg::I32(channels), Arg::I32(spatial)];
    launch(&start, &[&args[..], &numbers].concat())?;
    Ok(true)
}

/// Exchanges two axes of some rows: rows `start..start + count` of x [a, n, b, width] -> [a, b, count, width].
///
/// # Errors
/// When the device fails.
pub(crate) fn swap_axes(x: &Tensor, start: usize, count: usize) -> Result<Option<Tensor>> {
    let (a, all, b, width) = x.dims4()?;
    let elements = a * count * b * width;
    if elements == 0 || start + count > all {
        return Ok(None);
    }
    let Some(begin) = element_launch("swap_axes", &[x], elements, &[width]) else {
        return Ok(None);
    };
    let y = output(&Shape::from((a, b, count, width)), x.dtype(), x.device())?;
    let numbers = [elements].map(Arg::I64).into_iter();
    let numbers = numbers.chain([all, start, count, b, width].map(Arg::I32));
    let args: Vec<_> = [x, &y].map(Arg::Tensor).into_iter().chain(numbers).collect();
    launch(&begin, &args)?;
    Ok(Some(y))
}

/// A rotation of pairs of features.
pub(crate) struct Rotation<'a> {
    /// [.., positions, .., half], f32.
    pub(crate) cos: &'a Tensor,
    /// As `cos`.
    pub(crate) sin: &'a Tensor,
    pub(crate) half: usize,
    /// Whether pairs are features 0 and 1, 2 and 3, …; else i and i + half.
    pub(crate) interleaved: bool,
    /// 1, or -1 to rotate back.
    pub(crate) sign: f64,
}

/// Rotates every head of x [b, positions, heads * 2 half].
///
/// # Errors
/// When the device fails.
pub(crate) fn rotate(rotation: &Rotation<'_>, x: &Tensor) -> Result<Option<Tensor>> {
    let (_, positions, features) = x.dims3()?;
    let tables = [rotation.cos, rotation.sin];
    let Some(dtype) = dtype_name(x.dtype()) else {
        return Ok(None);
    };
    if !are_usable(&[x]) || !are_usable(&tables) || tables.iter().any(|table| table.dtype() != DType::F32) {
        return Ok(None);
    }
    let pairs = x.elem_count() / 2;
    let start = Launch::elements(Module::Pointwise, format!("rotate_{dtype}_1"), pairs, 1);
    let y = output(x.shape(), x.dtype(), x.device())?;
    let args = [x, rotation.cos, rotation.sin, &y].map(Arg::Tensor);
    let numbers = [
        Arg::I64(pairs),
        Arg::I32(positions),
        Arg::I32(features / (2 * rotation.half)),
        Arg::I32(rotation.half),
        Arg::I32(usize::from(rotation.interleaved)),
        Arg::F32(rotation.sign),
    ];
    launch(&start, &[&args[..], &numbers].concat())?;
    Ok(Some(y))
}
