//! OFT and BOFT in files: the outputs of a layer are rotated by blocks (Z. Qiu and others, "Controlling Text-to-Image Diffusion by
//! Orthogonal Finetuning", arXiv:2306.07280; W. Liu and others, "Parameter-Efficient Orthogonal Finetuning via Butterfly
//! Factorization", arXiv:2311.06243), as in LyCORIS and sd-scripts.
//!
//! `oft_blocks` is [blocks, size, size], or [levels, blocks, size, size] for BOFT; if `alpha` is above 0, the norm of each
//! skew-symmetric matrix Q = B - B^T is at most `alpha` times the number of outputs. Each rotation is R = (I + Q) (I - Q)^-1, and
//! I + k (R - I) at strength k. `rescale` [out, 1, ..] multiplies each output, at every strength.

use super::file_layer::{FileLayer, RoleTensors, Site};
use super::handle::AdapterHandle;
use super::keys::TensorRole;
use super::names::NamedLayers;
use super::stored_matrix::with_alpha;
use super::weight_adapter::WeightAdapter;
use crate::nn::{BaseLayer, LayerAdapter, forward_layer};
use crate::weights::Weight;
use candle_core::{DType, Device, Result, Tensor};
use nalgebra::DMatrix;
use std::any::Any;
use std::sync::Arc;

/// The tensors of one layer, float32 on the CPU.
#[derive(Clone, Debug)]
struct OftTensors {
    /// [levels, blocks, size, size].
    blocks: Tensor,
    is_butterfly: bool,
    /// [out].
    rescale: Option<Tensor>,
    constraint: f64,
}

/// Reads the tensors of a layer. `None`: they are not a OFT.
pub(super) fn read_oft(found: &RoleTensors) -> Option<std::result::Result<Arc<dyn FileLayer>, String>> {
    let blocks = found.get(TensorRole::OftBlocks)?;
    let dims = blocks.dims().to_vec();
    let (is_butterfly, [levels, count, size, width]) = match dims[..] {
        [count, size, width] => (false, [1, count, size, width]),
        [levels, count, size, width] => (true, [levels, count, size, width]),
        _ => return Some(Err(format!("its `oft_blocks` {dims:?} are not square matrices"))),
    };
    let fits = size == width && size > 0 && (!is_butterfly || (size % 2 == 0 && is_permutable(levels, count, size)));
    if !fits {
        return Some(Err(format!(
            "its `oft_blocks` {dims:?} are not blocks of an OFT or BOFT"
        )));
    }
    let flat = |tensor: Tensor| tensor.flatten_all().map_err(|error| error.to_string());
    let rescale = found.get(TensorRole::Rescale).map(flat).transpose();
    let layer = rescale.and_then(|rescale| {
        if rescale
            .as_ref()
            .is_some_and(|rescale| rescale.elem_count() != count * size)
        {
            return Err("its `rescale` and `oft_blocks` have different numbers of outputs".to_owned());
        }
        let blocks = blocks.reshape((levels, count, size, size));
        Ok(OftTensors {
            blocks: blocks.map_err(|error| error.to_string())?,
            is_butterfly,
            rescale,
            constraint: found.alpha().unwrap_or(0.0),
        })
    });
    Some(layer.map(|layer| -> Arc<dyn FileLayer> { Arc::new(layer) }))
}

/// Whether the outputs can be permuted at every level of a BOFT.
fn is_permutable(levels: usize, count: usize, size: usize) -> bool {
    let period = |level: u32| 2usize.checked_pow(level).and_then(|power| power.checked_mul(size));
    let last = u32::try_from(levels).ok().and_then(|levels| levels.checked_sub(1));
    last.and_then(period)
        .is_some_and(|period| (count * size).is_multiple_of(period))
}

impl OftTensors {
    /// The rotations less the identity, [levels, blocks, size, size].
    fn rotations(&self) -> Result<Vec<Tensor>> {
        let (levels, count, size, _) = self.blocks.dims4()?;
        let skew = (&self.blocks - self.blocks.transpose(2, 3)?)?;
        let norm = skew.sqr()?.sum_all()?.to_scalar::<f32>()?.sqrt();
        let largest = self.constraint * (count * size) as f64;
        let skew = match self.constraint > 0.0 && f64::from(norm) > largest {
            true => (skew * (largest / f64::from(norm)))?,
            false => skew,
        };
        let mut rotations = Vec::with_capacity(levels);
        for level in 0..levels {
            let matrices = skew.get(level)?.flatten_from(1)?.to_vec2::<f32>()?;
            let mut numbers = Vec::with_capacity(count * size * size);
            for matrix in matrices {
                let q = DMatrix::from_row_iterator(size, size, matrix.into_iter().map(f64::from));
                let identity = DMatrix::<f64>::identity(size, size);
                // I - Q of a skew-symmetric Q has an inverse; numbers that are not finite have none.
                let Some(inverse) = (&identity - &q).try_inverse() else {
                    candle_core::bail!("its `oft_blocks` have numbers that are not finite");
                };
                let rotation = (&identity + &q) * inverse - identity;
                numbers.extend(rotation.transpose().iter().map(|number| *number as f32));
            }
            rotations.push(Tensor::from_vec(numbers, (count, size, size), &Device::Cpu)?);
        }
        Ok(rotations)
    }
}

impl FileLayer for OftTensors {
    fn kind(&self) -> &'static str {
        if self.is_butterfly { "BOFT" } else { "OFT" }
    }

    fn outputs(&self) -> usize {
        self.blocks.dims()[1] * self.blocks.dims()[2]
    }

    fn inputs(&self) -> usize {
        0
    }

    fn lacks_alpha(&self) -> bool {
        false
    }

    fn split(&self, named: &NamedLayers, _: &dyn Fn(f64) -> Option<f64>) -> Result<Vec<Arc<dyn FileLayer>>> {
        if named.is_converted() {
            candle_core::bail!(
                "an {} cannot be split onto the layers of this model that its layer consists of",
                self.kind()
            );
        }
        Ok(vec![Arc::new(self.clone())])
    }

    fn adapter(&self, site: Site<'_>) -> std::result::Result<Arc<dyn WeightAdapter>, String> {
        let outputs = site.weight.dims()[0];
        if outputs != self.outputs() {
            return Err(format!(
                "the file's {} has {} outputs, the layer has {outputs}",
                self.kind(),
                self.outputs()
            ));
        }
        let device = site.weight.device();
        let rotations = self
            .rotations()
            .and_then(|all| all.iter().map(|r| r.to_device(device)).collect());
        let rescale = self
            .rescale
            .as_ref()
            .map(|rescale| rescale.to_device(device))
            .transpose();
        Ok(Arc::new(OftLayer {
            rotations: rotations.map_err(|error: candle_core::Error| error.to_string())?,
            is_butterfly: self.is_butterfly,
            rescale: rescale.map_err(|error| error.to_string())?,
            handle: site.handle.clone(),
        }))
    }

    fn tensors(&self) -> std::result::Result<Vec<(&'static str, Tensor)>, String> {
        let blocks = match self.is_butterfly {
            true => Ok(self.blocks.clone()),
            false => self.blocks.squeeze(0),
        };
        let mut tensors = vec![("oft_blocks", blocks.map_err(|error| error.to_string())?)];
        tensors.extend(self.rescale.clone().map(|rescale| ("rescale", rescale)));
        with_alpha(tensors, Some(self.constraint), None)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The OFT of one layer.
#[derive(Debug)]
struct OftLayer {
    /// For each level the rotations less the identity, [blocks, size, size].
    rotations: Vec<Tensor>,
    is_butterfly: bool,
    /// [out].
    rescale: Option<Tensor>,
    handle: Arc<AdapterHandle>,
}

impl OftLayer {
    /// Rows of outputs [n, out], rotated at this strength.
    fn rotate(&self, outputs: &Tensor, strength: f64) -> Result<Tensor> {
        let (rows, width) = outputs.dims2()?;
        let mut outputs = outputs.clone();
        for (level, rotations) in self.rotations.iter().enumerate() {
            let (blocks, size, _) = rotations.dims3()?;
            let distance = (size / 2) << level;
            let permute = |x: &Tensor, [a, b]: [usize; 2]| {
                x.reshape((rows, width / (2 * distance), a, b))?
                    .transpose(2, 3)?
                    .contiguous()?
                    .reshape((rows, width))
            };
            let permuted = match self.is_butterfly {
                true => permute(&outputs, [2, distance])?,
                false => outputs.clone(),
            };
            // [blocks, rows, size].
            let grouped = permuted.reshape((rows, blocks, size))?.transpose(0, 1)?.contiguous()?;
            // OFT applies the transposed rotation to a column of outputs, BOFT the rotation itself.
            let rotations = match self.is_butterfly {
                true => rotations.transpose(1, 2)?.contiguous()?,
                false => rotations.clone(),
            };
            let change = (grouped.matmul(&rotations)? * strength)?;
            let rotated = (grouped + change)?
                .transpose(0, 1)?
                .contiguous()?
                .reshape((rows, width))?;
            outputs = match self.is_butterfly {
                true => permute(&rotated, [distance, 2])?,
                false => rotated,
            };
        }
        match &self.rescale {
            Some(rescale) => outputs.broadcast_mul(rescale),
            None => Ok(outputs),
        }
    }
}

impl LayerAdapter for OftLayer {
    fn apply(&self, layer: &BaseLayer<'_>, x: &Tensor, output: Tensor) -> Result<Tensor> {
        let strength = self.handle.strength();
        if strength == 0.0 {
            return Ok(output);
        }
        let product = forward_layer(layer, x, false, &[])?;
        // Channels last, in rows.
        let axis = layer.kind.channels_axis(product.rank());
        let last = product.transpose(axis, product.rank() - 1)?.contiguous()?;
        let rows = last.flatten_to(last.rank() - 2)?.to_dtype(DType::F32)?;
        let change = (self.rotate(&rows, strength)? - rows)?.reshape(last.shape())?;
        let change = change.transpose(axis, product.rank() - 1)?.contiguous()?;
        crate::nn::add(&output, &change.to_dtype(output.dtype())?)
    }
}

impl WeightAdapter for OftLayer {
    fn change(&self, weight: &Weight) -> Result<Tensor> {
        let base = weight.dense()?.detach().to_dtype(DType::F32)?;
        let columns = base.flatten_from(1)?.t()?.contiguous()?;
        let changed = (self.rotate(&columns, self.handle.strength())? - columns)?;
        changed.t()?.contiguous()?.reshape(base.shape())
    }
}
