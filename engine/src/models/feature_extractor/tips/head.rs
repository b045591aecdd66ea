//! A DPT head (R. Ranftl and others, 2021) of TIPSv2: depth, normals of surfaces, or classes of objects at each pixel.

use super::super::channels::weights_error;
use super::encoder::{Encoded, TAKEN};
use super::fusion::Fusion;
use super::scale::Scale;
use crate::checkpointing::{BlockSequence, Checkpointing};
use crate::error::Result;
use crate::nn::{Conv2d, Interpolation, interpolate};
use crate::weights::{Index, Weights};
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;

/// The depth of the first and of the last bin, in metres. The first is added to the number of each bin, too.
const DEPTHS: [f64; 2] = [1e-3, 10.0];

/// The least length by which a normal is divided.
const LEAST_LENGTH: f64 = 1e-12;

/// What a head finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Task {
    Depth,
    Normals,
    Segmentation,
}

impl Task {
    /// The name of the head in files, and of its last layer in it.
    fn name(self) -> &'static str {
        match self {
            Self::Depth => "depth_head",
            Self::Normals => "normals_head",
            Self::Segmentation => "segmentation_head",
        }
    }
}

/// What turns the image of all scales into the result.
#[derive(Clone, Debug)]
struct Output {
    task: Task,
    project: Conv2d,
    /// Of single pixels; a linear layer in the file.
    last: Conv2d,
}

/// A head.
#[derive(Clone, Debug)]
pub(super) struct Head {
    scales: Vec<Arc<Scale>>,
    fusions: Vec<Arc<Fusion>>,
    output: Arc<Output>,
}

impl Head {
    /// Reads a head. `width`: features of a token.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape than its neighbours need.
    pub(super) fn new(index: &Index, task: Task, width: usize, (dtype, device): (DType, &Device)) -> Result<Self> {
        let prefix = task.name();
        let weights = Weights::from_index(index.clone(), dtype, device).pp(prefix);
        let name = format!("{prefix}.{prefix}.weight");
        let (outputs, channels) = match index.shape(&name) {
            None => return Err(index.missing_error(&name)),
            Some([outputs, channels]) if *outputs > 0 && *channels > 0 => (*outputs, *channels),
            Some(found) => {
                return Err(weights_error(
                    index,
                    format!("tensor `{name}` has shape {found:?}: expected two sizes, none of them 0"),
                ));
            }
        };
        if (task == Task::Depth && outputs < 2) || (task == Task::Normals && outputs != 3) {
            return Err(weights_error(
                index,
                format!(
                    "tensor `{name}` makes {outputs} numbers: expected at least 2 depths, or 3 coordinates of normals"
                ),
            ));
        }
        let scales = (0..TAKEN).map(|i| Scale::new((index, prefix), &weights, i, (width, channels)).map(Arc::new));
        let fusions =
            (0..TAKEN).map(|i| Fusion::new(&weights.pp("fusion_blocks").pp(i), channels, i > 0).map(Arc::new));
        let of_last = weights.pp(prefix);
        let last = Conv2d {
            weight: of_last
                .get((outputs, channels), "weight")?
                .reshape((outputs, channels, 1, 1))?
                .into(),
            bias: Some(of_last.get(outputs, "bias")?),
            stride: 1,
            padding: 0,
            adapters: Vec::new(),
        };
        Ok(Self {
            scales: scales.collect::<Result<_>>()?,
            fusions: fusions.collect::<Result<_>>()?,
            output: Arc::new(Output {
                task,
                project: Conv2d::new(&weights.pp("project"), channels, channels, 3, 1, 1)?,
                last,
            }),
        })
    }

    /// What the head finds at each pixel of the scaled images: [b, 1, 3 or classes, height, width], float32.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub(super) fn forward(&self, encoded: &Encoded, checkpointing: Checkpointing) -> candle_core::Result<Tensor> {
        let mut sequence = BlockSequence::new();
        let mut scales = Vec::with_capacity(TAKEN);
        let (grid, size) = (encoded.grid, encoded.size);
        for (i, (scale, taken)) in self.scales.iter().zip(&encoded.taken).enumerate() {
            let inputs = [
                sequence.input(taken.class.clone()),
                sequence.input(taken.patches.clone()),
            ];
            let scale = Arc::clone(scale);
            scales.push(sequence.add(format!("scale {i}"), inputs, move |[class, patches]| {
                scale.forward(class, patches, grid)
            }));
        }
        let mut sum = None;
        for (i, (fusion, scale)) in self.fusions.iter().zip(scales.into_iter().rev()).enumerate() {
            let (fusion, name) = (Arc::clone(fusion), format!("fusion block {i}"));
            sum = Some(match sum {
                None => sequence.add(name, [scale], move |[scale]| fusion.forward(scale, None)),
                Some(sum) => sequence.add(name, [sum, scale], move |[sum, scale]| fusion.forward(sum, Some(scale))),
            });
        }
        let Some(sum) = sum else {
            candle_core::bail!("a DPT head has no scales");
        };
        let output = Arc::clone(&self.output);
        let result = sequence.add("output", [sum], move |[x]| output.forward(x, size));
        sequence.run(checkpointing, result)
    }
}

impl Output {
    fn forward(&self, x: &Tensor, size: (usize, usize)) -> candle_core::Result<Tensor> {
        let x = self.project.forward(x)?;
        let x = match self.task {
            Task::Depth => x.relu()?,
            Task::Normals | Task::Segmentation => x,
        };
        let x = self.last.forward(&x)?.to_dtype(DType::F32)?;
        let x = match self.task {
            Task::Depth => depths(&x)?,
            // The square of the least length keeps the derivative finite where all three are zero.
            Task::Normals => {
                let squares = (x.sqr()?.sum_keepdim(1)? + LEAST_LENGTH * LEAST_LENGTH)?;
                x.broadcast_div(&squares.sqrt()?)?
            }
            Task::Segmentation => x,
        };
        interpolate(&x, size, Interpolation::Bilinear)
    }
}

/// The mean depth of bins [b, bins, h, w] of even distances, weighted with their numbers: [b, 1, h, w].
fn depths(x: &Tensor) -> candle_core::Result<Tensor> {
    let bins = x.dim(1)?;
    let [first, last] = DEPTHS;
    let depth = |i: usize| (first + (last - first) * i as f64 / (bins - 1).max(1) as f64) as f32;
    let depths: Vec<f32> = (0..bins).map(depth).collect();
    let depths = Tensor::from_vec(depths, (1, bins, 1, 1), x.device())?;
    let shares = (x.relu()? + first)?;
    let sums = shares.broadcast_mul(&depths)?.sum_keepdim(1)?;
    sums.broadcast_div(&shares.sum_keepdim(1)?)
}
