//! TEED, a tiny network that finds edges (X. Soria and others, arXiv:2308.06468).
//!
//! The layers and the names of their tensors are those of the authors' code (github.com/xavysp/TEED, `ted.py`), which controlnet_aux's
//! `TEEDdetector` runs. It computes in float32.

use crate::error::Result;
use crate::nn::{Conv2d, add};
use crate::weights::{Index, Weights};
use candle_core::{DType, Device, Tensor};

/// The tensor that tells a file of this network from others.
pub(super) const FIRST_TENSOR: &str = "dblock_3.denselayer1.conv1.weight";

/// Channels of the three blocks.
const CHANNELS: [usize; 3] = [16, 32, 48];
/// Channels between the two upsamplings of the last block.
const UPSAMPLED: usize = 16;
/// Channels of the fusion of the three edge maps.
const FUSED: usize = 24;

/// A convolution that doubles the sides of an image (`ConvTranspose2d` with a stride of 2).
#[derive(Clone, Debug)]
struct Upsampling {
    /// [in, out, kernel, kernel].
    weight: Tensor,
    /// [1, out, 1, 1].
    bias: Tensor,
    padding: usize,
}

impl Upsampling {
    fn new(weights: &Weights, channels: usize, kernel: usize) -> Result<Self> {
        Ok(Self {
            weight: weights.get((channels, channels, kernel, kernel), "weight")?,
            bias: weights.get(channels, "bias")?.reshape((1, channels, 1, 1))?,
            padding: (kernel - 2) / 2,
        })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let y = x.contiguous()?.conv_transpose2d(&self.weight, self.padding, 0, 2, 1)?;
        y.broadcast_add(&self.bias)
    }
}

/// Makes an edge map in the size of the image: convolutions of one pixel, each followed by an upsampling.
#[derive(Clone, Debug)]
struct EdgeMap(Vec<(Conv2d, Upsampling)>);

impl EdgeMap {
    fn new(weights: &Weights, inputs: usize, upsamplings: usize) -> Result<Self> {
        let (kernel, mut inputs) = (1 << upsamplings, inputs);
        let step = |i: usize| {
            let outputs = if i + 1 == upsamplings { 1 } else { UPSAMPLED };
            let conv = Conv2d::new(&weights.pp(format!("features.{}", 3 * i)), inputs, outputs, 1, 1, 0)?;
            inputs = outputs;
            let upsampling = Upsampling::new(&weights.pp(format!("features.{}", 3 * i + 2)), outputs, kernel)?;
            Ok((conv, upsampling))
        };
        Ok(Self((0..upsamplings).map(step).collect::<Result<_>>()?))
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.0.iter().try_fold(x.clone(), |x, (conv, upsampling)| {
            upsampling.forward(&smish(&conv.forward(&x)?)?)
        })
    }
}

/// A convolution of groups of channels, 3 x 3.
#[derive(Clone, Debug)]
struct GroupedConv {
    /// [out, in / groups, 3, 3].
    weight: Tensor,
    /// [1, out, 1, 1].
    bias: Tensor,
    groups: usize,
}

impl GroupedConv {
    fn new(weights: &Weights, groups: usize) -> Result<Self> {
        Ok(Self {
            weight: weights.get((FUSED, 1, 3, 3), "weight")?,
            bias: weights.get(FUSED, "bias")?.reshape((1, FUSED, 1, 1))?,
            groups,
        })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let y = x.contiguous()?.conv2d(&self.weight, 1, 1, 1, self.groups)?;
        y.broadcast_add(&self.bias)
    }
}

/// The network.
#[derive(Clone, Debug)]
pub struct Teed {
    block_1: [Conv2d; 2],
    block_2: [Conv2d; 2],
    block_3: [Conv2d; 2],
    side_1: Conv2d,
    pre_dense_3: Conv2d,
    edge_maps: [EdgeMap; 3],
    fusion: [GroupedConv; 2],
}

impl Teed {
    /// Reads the network.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub fn new(index: &Index, device: &Device) -> Result<Self> {
        let weights = Weights::from_index(index.clone(), DType::F32, device);
        let [first, second, third] = CHANNELS;
        let conv = |name: &str, inputs: usize, outputs: usize, stride: usize, padding: usize| {
            Conv2d::new(&weights.pp(name), inputs, outputs, 3, stride, padding)
        };
        let pointwise = |name: &str, inputs: usize, outputs: usize, stride: usize| {
            Conv2d::new(&weights.pp(name).pp("conv"), inputs, outputs, 1, stride, 0)
        };
        let fusion = weights.pp("block_cat");
        Ok(Self {
            block_1: [
                conv("block_1.conv1", 3, first, 2, 1)?,
                conv("block_1.conv2", first, first, 1, 1)?,
            ],
            block_2: [
                conv("block_2.conv1", first, second, 1, 1)?,
                conv("block_2.conv2", second, second, 1, 1)?,
            ],
            block_3: [
                conv("dblock_3.denselayer1.conv1", second, third, 1, 2)?,
                conv("dblock_3.denselayer1.conv2", third, third, 1, 0)?,
            ],
            side_1: pointwise("side_1", first, second, 2)?,
            pre_dense_3: pointwise("pre_dense_3", second, third, 1)?,
            edge_maps: [
                EdgeMap::new(&weights.pp("up_block_1"), first, 1)?,
                EdgeMap::new(&weights.pp("up_block_2"), second, 1)?,
                EdgeMap::new(&weights.pp("up_block_3"), third, 2)?,
            ],
            fusion: [
                GroupedConv::new(&fusion.pp("DWconv1"), 3)?,
                GroupedConv::new(&fusion.pp("DWconv2"), FUSED)?,
            ],
        })
    }

    /// Four edge maps of images [b, 3, height, width] from 0 to 255, as one tensor [b, 4, height, width]: one of each block, and their
    /// fusion. Edges are where they are large; a sigmoid makes probabilities of them. The sides are multiples of 4.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let [conv1, conv2] = &self.block_1;
        let block_1 = smish(&conv2.forward(&smish(&conv1.forward(images)?)?)?)?;
        let [conv1, conv2] = &self.block_2;
        let block_2 = conv2.forward(&smish(&conv1.forward(&block_1)?)?)?;
        let halved = halved(&block_2)?;
        let sum = add(&halved, &self.side_1.forward(&block_1)?)?;
        let [conv1, conv2] = &self.block_3;
        let dense = conv2.forward(&smish(&conv1.forward(&smish(&sum)?)?)?)?;
        let block_3 = (add(&dense, &self.pre_dense_3.forward(&halved)?)? * 0.5)?;
        let maps = self.edge_maps.iter().zip([&block_1, &block_2, &block_3]);
        let maps = maps.map(|(map, block)| map.forward(block));
        let maps = Tensor::cat(&maps.collect::<candle_core::Result<Vec<_>>>()?, 1)?;
        let [first, second] = &self.fusion;
        let once = first.forward(&smish(&maps)?)?;
        let twice = second.forward(&smish(&once)?)?;
        let fused = smish(&(twice + once)?.sum_keepdim(1)?)?;
        Ok(Tensor::cat(&[maps, fused], 1)?)
    }
}

/// x tanh(ln(1 + sigmoid(x))) (X. Wang and others, Electronics 11 (4), 2022).
fn smish(x: &Tensor) -> candle_core::Result<Tensor> {
    let sigmoid = (x.neg()?.exp()? + 1.0)?.recip()?;
    // tanh(ln(1 + s)) = ((1 + s)^2 - 1) / ((1 + s)^2 + 1), and (1 + s)^2 - 1 = s (s + 2).
    let square = (&sigmoid * (&sigmoid + 2.0)?)?;
    x * (&square / (&square + 2.0)?)?
}

/// The largest of each 3 x 3 values around every second pixel of x [b, c, h, w], whose sides are even.
fn halved(x: &Tensor) -> candle_core::Result<Tensor> {
    // What is outside does not count, so that a copy of a value inside of the window may stand for it.
    let padded = x.pad_with_same(2, 1, 0)?.pad_with_same(3, 1, 0)?;
    padded.max_pool2d_with_stride(3, 2)
}
