//! The extraction of one layer.

use super::models::LayerPair;
use super::ranks::RankRule;
use crate::adapters::ModelLayer;
use crate::error::{EngineError, Result};
use crate::svd::Svd;
use crate::weights::Weight;
use aitk_common::job::extract::ExtractProcess;
use aitk_common::job::process::ProcessType;
use candle_core::{DType, Device, Tensor};
use std::path::Path;

/// A layer counts as unchanged if no number differs by more than this and [`RELATIVE`] of the base model's number, as in ai-toolkit
/// (`torch.allclose`).
const ABSOLUTE: f32 = 1e-8;
const RELATIVE: f32 = 1e-5;

/// How a layer is extracted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LayerSettings {
    rule: RankRule,
    /// Whether the kernel is larger than 1x1.
    is_large_conv: bool,
    /// Whether it gets a third factor, `mid`, which has the kernel.
    has_mid: bool,
    /// Whether it is kept whole where the rank is half of the outputs or more.
    may_be_whole: bool,
}

impl LayerSettings {
    /// The settings of a layer; `None`: it is left out.
    pub(super) fn of(process: &ExtractProcess, layer: &ModelLayer) -> Option<Self> {
        let is_large_conv = layer.weight.dims().iter().skip(2).any(|side| *side > 1);
        if is_large_conv && !process.has_large_convs() {
            return None;
        }
        let is_locon = process.kind == ProcessType::ExtractLocon;
        Some(Self {
            rule: RankRule::of(process),
            is_large_conv,
            // peft's names have neither a third factor nor whole differences.
            has_mid: is_locon && is_large_conv && !process.disable_cp && layer.has_alpha(),
            may_be_whole: layer.has_alpha(),
        })
    }
}

/// What becomes of the difference of a layer.
#[derive(Debug)]
pub(super) enum Extracted {
    /// It is kept as it is.
    Whole,
    /// It is approximated by factors.
    Factors(Factors),
}

/// The factors of a layer, in the shapes of LoRA files.
#[derive(Debug)]
pub(super) struct Factors {
    /// [rank, in], or [rank, in, kh, kw]; [rank, in, 1, 1] with `mid`.
    pub(super) down: Tensor,
    /// [rank, rank, kh, kw].
    pub(super) mid: Option<Tensor>,
    /// [out, rank], or [out, rank, 1, 1].
    pub(super) up: Tensor,
}

impl Factors {
    pub(super) fn rank(&self) -> usize {
        self.down.dims()[0]
    }

    /// The product of the factors, [out, in·kh·kw].
    fn product(&self) -> Result<Tensor> {
        let up = self.up.flatten_from(1)?;
        let down = self.down.flatten_from(1)?;
        let Some(mid) = &self.mid else {
            return Ok(up.matmul(&down)?);
        };
        let (rank, inner, height, width) = mid.dims4()?;
        let inputs = down.dim(1)?;
        let mid = mid.permute((1, 0, 2, 3))?.reshape((inner, rank * height * width))?;
        let down = down.t()?.matmul(&mid)?.reshape((inputs, rank, height * width))?;
        let down = down.transpose(0, 1)?.reshape((rank, inputs * height * width))?;
        Ok(up.matmul(&down)?)
    }

    /// The square of the Frobenius norm of what of `delta` is not in the factors.
    pub(super) fn residual(&self, delta: &Tensor) -> Result<f64> {
        square(&(delta.flatten_from(1)? - self.product()?)?)
    }
}

/// The square of the Frobenius norm.
pub(super) fn square(tensor: &Tensor) -> Result<f64> {
    let numbers = tensor.flatten_all()?.to_vec1::<f32>()?;
    Ok(numbers.iter().map(|number| f64::from(*number).powi(2)).sum())
}

/// The difference of a layer of the fine-tune and of the base model, float32. `None`: they are the same.
///
/// # Errors
/// When a weight cannot be read, or has a number that is not finite.
pub(super) fn difference(pair: &LayerPair, [base, tuned]: [&Path; 2]) -> Result<Option<Tensor>> {
    let numbers = |weight: &Weight, path: &Path| -> Result<Vec<f32>> {
        let numbers = weight.dense()?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        match numbers.iter().all(|number| number.is_finite()) {
            true => Ok(numbers),
            false => Err(EngineError::WeightsFile {
                path: path.to_path_buf(),
                reason: format!(
                    "the weight of layer `{}` has numbers that are not finite: the model is damaged",
                    pair.base.path
                ),
            }),
        }
    };
    let base = numbers(&pair.base.weight, base)?;
    let mut delta = numbers(&pair.tuned, tuned)?;
    let mut is_changed = false;
    for (tuned, base) in delta.iter_mut().zip(&base) {
        *tuned -= base;
        is_changed |= tuned.abs() > ABSOLUTE + RELATIVE * base.abs();
    }
    let dims = pair.base.weight.dims();
    Ok(match is_changed {
        true => Some(Tensor::from_vec(delta, dims, &Device::Cpu)?),
        false => None,
    })
}

/// Approximates the difference of a layer, [out, in] or [out, in, kh, kw].
///
/// # Errors
/// When its numbers are not finite.
pub(super) fn extract(delta: &Tensor, settings: LayerSettings) -> Result<Extracted> {
    let LayerSettings {
        rule, is_large_conv, ..
    } = settings;
    let [outputs, inputs, kernel @ ..] = delta.dims() else {
        return Err(EngineError::Internal("a weight has two dimensions at least".into()));
    };
    let (outputs, inputs) = (*outputs, *inputs);
    let sides = [outputs, inputs];
    let is_whole = |rank: usize| settings.may_be_whole && 2 * rank >= outputs;
    let matrix = delta.flatten_from(1)?;
    let (svd, rank) = match rule.fixed(is_large_conv, sides) {
        Some(rank) if is_whole(rank) => return Ok(Extracted::Whole),
        Some(rank) => (Svd::largest(&matrix, rank)?, rank),
        None => {
            let svd = Svd::new(&matrix)?;
            let rank = rule.rank(is_large_conv, svd.values(), sides);
            (svd, rank)
        }
    };
    if is_whole(rank) {
        return Ok(Extracted::Whole);
    }
    let (up, down) = svd.factors(rank)?;
    let ones = vec![1; kernel.len()];
    let up = up.reshape([&[outputs, rank][..], &ones].concat())?;
    let factors = match (settings.has_mid, kernel) {
        (true, [height, width]) => {
            let (down, mid) = without_kernel(&down, [inputs, *height, *width])?;
            Factors {
                down,
                mid: Some(mid),
                up,
            }
        }
        _ => Factors {
            down: down.reshape([&[rank, inputs][..], kernel].concat())?,
            mid: None,
            up,
        },
    };
    Ok(Extracted::Factors(factors))
}

/// Splits the lower factor of a convolution, [rank, in·kh·kw], into one without a kernel, [rank, in, 1, 1], and one between as many
/// channels, [rank, rank, kh, kw].
fn without_kernel(down: &Tensor, [inputs, height, width]: [usize; 3]) -> Result<(Tensor, Tensor)> {
    let rank = down.dim(0)?;
    let by_input = down.reshape((rank, inputs, height * width))?.transpose(0, 1)?;
    let by_input = by_input.contiguous()?.reshape((inputs, rank * height * width))?;
    let (inner, mid) = Svd::largest(&by_input, rank)?.factors(rank)?;
    let count = mid.dim(0)?;
    let mid = mid.reshape((count, rank, height, width))?.transpose(0, 1)?;
    let inner = inner.t()?.contiguous()?.reshape((count, inputs, 1, 1))?;
    Ok((inner, mid.contiguous()?))
}
