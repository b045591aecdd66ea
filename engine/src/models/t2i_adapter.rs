//! T2I-Adapter (diffusers' `T2IAdapter`; C. Mou and others, "T2I-Adapter", 2023): a small network that makes features of a control image,
//! which are added in the down blocks of a U-Net.

use crate::error::{EngineError, Result};
use crate::models::config::{check_sizes, from_value};
use crate::models::unet::UNetConfig;
use crate::nn::{Conv2d, add};
use crate::weights::Weights;
use candle_core::Tensor;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The networks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum T2iNetwork {
    /// `FullAdapter`: each block but the first halves the size.
    FullAdapter,
    /// `FullAdapterXL`: the third block alone halves the size.
    FullAdapterXl,
    /// `LightAdapter`: narrow blocks, one more than there are channels.
    LightAdapter,
}

/// `config.json` of a T2I-Adapter. Missing keys have diffusers' defaults.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct T2iAdapterConfig {
    /// Channels of the control image.
    pub in_channels: usize,
    /// Channels of the blocks' results.
    pub channels: Vec<usize>,
    /// Residual blocks of each block.
    pub num_res_blocks: usize,
    /// Pixels of the control image along each axis that become one of the first features.
    pub downscale_factor: usize,
    /// The network.
    pub adapter_type: T2iNetwork,
}

impl Default for T2iAdapterConfig {
    fn default() -> Self {
        Self {
            in_channels: 3,
            channels: vec![320, 640, 1280, 1280],
            num_res_blocks: 2,
            downscale_factor: 8,
            adapter_type: T2iNetwork::FullAdapter,
        }
    }
}

/// The largest `downscale_factor`.
const MAX_DOWNSCALE_FACTOR: usize = 64;

/// The sizes of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BlockSizes {
    inputs: usize,
    outputs: usize,
    halves: bool,
}

impl T2iAdapterConfig {
    /// Reads a config.
    ///
    /// # Errors
    /// A sentence with the key that is wrong.
    pub fn from_json(json: &Value) -> std::result::Result<Self, String> {
        let config: Self = from_value(json.clone())?;
        let channels = config.channels.iter().map(|channels| ("channels", *channels));
        let others = [
            ("in_channels", config.in_channels),
            ("downscale_factor", config.downscale_factor),
            ("num_res_blocks", config.num_res_blocks.max(1)),
        ];
        check_sizes(channels.chain(others))?;
        if config.downscale_factor > MAX_DOWNSCALE_FACTOR {
            return Err(format!(
                "`downscale_factor` is {}, expected at most {MAX_DOWNSCALE_FACTOR}",
                config.downscale_factor
            ));
        }
        match config.channels.is_empty() {
            true => Err("`channels` is empty".into()),
            false => Ok(config),
        }
    }

    /// The blocks in their order.
    fn blocks(&self) -> Vec<BlockSizes> {
        let channels = &self.channels;
        let at = |i: usize| channels.get(i).copied().unwrap_or(0);
        let before = |i: usize| at(i.saturating_sub(1));
        let count = channels.len();
        let block = |inputs, outputs, halves| BlockSizes {
            inputs,
            outputs,
            halves,
        };
        match self.adapter_type {
            T2iNetwork::FullAdapter => (0..count).map(|i| block(before(i), at(i), i > 0)).collect(),
            T2iNetwork::FullAdapterXl => (0..count)
                .map(|i| match i {
                    1 | 2 => block(before(i), at(i), i == 2),
                    _ => block(at(i), at(i), false),
                })
                .collect(),
            T2iNetwork::LightAdapter => {
                let first = block(self.pixel_channels(), at(0), false);
                let others = (1..count).map(|i| block(before(i), at(i), true));
                let last = block(before(count), before(count), true);
                std::iter::once(first).chain(others).chain([last]).collect()
            }
        }
    }

    /// Channels of the control image whose pixels were moved into channels.
    fn pixel_channels(&self) -> usize {
        self.in_channels * self.downscale_factor * self.downscale_factor
    }

    /// Channels, height and width of the features of a control image of this height and width.
    #[must_use]
    pub fn feature_shapes(&self, (height, width): (usize, usize)) -> Vec<[usize; 3]> {
        let factor = self.downscale_factor.max(1);
        let (mut height, mut width) = (height / factor, width / factor);
        let shapes = self.blocks().into_iter().map(|block| {
            if block.halves {
                (height, width) = (height.div_ceil(2), width.div_ceil(2));
            }
            [block.outputs, height, width]
        });
        shapes.collect()
    }

    /// Channels of the features, and the pixels of the control image along each axis for each value of a feature.
    fn feature_scales(&self) -> Vec<(usize, usize)> {
        let mut pixels = self.downscale_factor;
        let scales = self.blocks().into_iter().map(|block| {
            if block.halves {
                pixels = pixels.saturating_mul(2);
            }
            (block.outputs, pixels)
        });
        scales.collect()
    }

    /// Checks that the features fit the U-Net of a model whose latents have `pixels_per_latent` pixels along each axis.
    ///
    /// # Errors
    /// A sentence with what does not fit.
    pub fn check_unet(&self, unet: &UNetConfig, pixels_per_latent: usize) -> std::result::Result<(), String> {
        let (found, expected) = (self.feature_scales(), unet_scales(unet, pixels_per_latent)?);
        if found.len() > expected.len() {
            return Err(format!(
                "it gives {} features, and the U-Net has places for {}: one for each of its down blocks, and one for its middle block",
                found.len(),
                expected.len()
            ));
        }
        match found
            .iter()
            .zip(&expected)
            .enumerate()
            .find(|(_, (found, expected))| found != expected)
        {
            None => Ok(()),
            Some((number, ((channels, pixels), (of_unet, pixels_of_unet)))) => Err(format!(
                "its feature {number} has {channels} channels for each {pixels} x {pixels} pixels of the control image, and the U-Net adds \
                 {of_unet} channels for each {pixels_of_unet} x {pixels_of_unet} pixels there"
            )),
        }
    }

    /// What to set so that [`Self::check_unet`] finds no error, in the words of the keys.
    #[must_use]
    pub fn advice(&self, unet: &UNetConfig, pixels_per_latent: usize) -> String {
        let places = unet_scales(unet, pixels_per_latent).unwrap_or_default();
        // No network halves the size before its first feature. Its last feature is that of the middle block at most.
        let factor = places.first().map_or(self.downscale_factor, |(_, pixels)| *pixels);
        let blocks = self.channels.len().min(places.len().saturating_sub(1));
        let channels: Vec<usize> = places.iter().take(blocks).map(|(channels, _)| *channels).collect();
        for (factor, channels) in [
            (factor, &self.channels),
            (self.downscale_factor, &channels),
            (factor, &channels),
        ] {
            let fitting = Self {
                downscale_factor: factor,
                channels: channels.clone(),
                ..self.clone()
            };
            if channels.is_empty() || fitting.check_unet(unet, pixels_per_latent).is_err() {
                continue;
            }
            let factor = (factor != self.downscale_factor).then(|| format!("`downscale_factor: {factor}`"));
            let channels = (*channels != self.channels).then(|| format!("`channels: {channels:?}`"));
            let keys: Vec<String> = channels.into_iter().chain(factor).collect();
            return format!("set {}", keys.join(" and "));
        }
        format!(
            "check `channels`, `downscale_factor` and `adapter_type` (a latent has {pixels_per_latent} pixels along each axis)"
        )
    }
}

/// Where a U-Net adds features: channels, and pixels of the image along each axis for each value.
fn unet_scales(unet: &UNetConfig, pixels_per_latent: usize) -> std::result::Result<Vec<(usize, usize)>, String> {
    // A size that can be halved as often as needed.
    let latents = 1usize << 10;
    let places = unet.adapter_places(latents)?.into_iter();
    Ok(places
        .map(|(channels, side)| (channels, pixels_per_latent * (latents / side.max(1))))
        .collect())
}

/// A residual block: convolution, ReLU, convolution, plus the input.
#[derive(Clone, Debug)]
struct Resnet {
    block1: Conv2d,
    block2: Conv2d,
}

impl Resnet {
    /// `kernel`: of the second convolution.
    fn new(weights: &Weights, channels: usize, kernel: usize) -> Result<Self> {
        Ok(Self {
            block1: Conv2d::new(&weights.pp("block1"), channels, channels, 3, 1, 1)?,
            block2: Conv2d::new(&weights.pp("block2"), channels, channels, kernel, 1, kernel / 2)?,
        })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        add(&self.block2.forward(&self.block1.forward(x)?.relu()?)?, x)
    }
}

#[derive(Clone, Debug)]
struct Block {
    halves: bool,
    in_conv: Option<Conv2d>,
    resnets: Vec<Resnet>,
    out_conv: Option<Conv2d>,
}

impl Block {
    fn new(weights: &Weights, sizes: BlockSizes, config: &T2iAdapterConfig) -> Result<Self> {
        let BlockSizes {
            inputs,
            outputs,
            halves,
        } = sizes;
        let is_light = config.adapter_type == T2iNetwork::LightAdapter;
        // A light block is a quarter as wide inside.
        let (width, kernel) = if is_light { (outputs / 4, 3) } else { (outputs, 1) };
        if width == 0 {
            return Err(weights.config_error(format!(
                "a `light_adapter` needs at least 4 channels in each block, and one has {outputs}"
            )));
        }
        let conv = |name: &str, inputs, outputs| Conv2d::new(&weights.pp(name), inputs, outputs, 1, 1, 0);
        Ok(Self {
            halves,
            in_conv: (is_light || inputs != outputs)
                .then(|| conv("in_conv", inputs, width))
                .transpose()?,
            resnets: (0..config.num_res_blocks)
                .map(|i| Resnet::new(&weights.pp("resnets").pp(i), width, kernel))
                .collect::<Result<_>>()?,
            out_conv: is_light.then(|| conv("out_conv", width, outputs)).transpose()?,
        })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let mut x = match self.halves {
            true => halved(x)?,
            false => x.clone(),
        };
        if let Some(conv) = &self.in_conv {
            x = conv.forward(&x)?;
        }
        for resnet in &self.resnets {
            x = resnet.forward(&x)?;
        }
        match &self.out_conv {
            Some(conv) => conv.forward(&x),
            None => Ok(x),
        }
    }
}

/// The means of 2 x 2 pixels. At an odd edge those that there are, as PyTorch's `AvgPool2d` with `ceil_mode`: a repeated pixel has the
/// same mean.
fn halved(x: &Tensor) -> candle_core::Result<Tensor> {
    let (_, _, height, width) = x.dims4()?;
    let x = x.pad_with_same(2, 0, height % 2)?.pad_with_same(3, 0, width % 2)?;
    x.contiguous()?.avg_pool2d(2)
}

/// x [b, c, h, w] -> [b, c * factor * factor, h / factor, w / factor], as PyTorch's `PixelUnshuffle`.
fn pixel_unshuffle(x: &Tensor, factor: usize) -> candle_core::Result<Tensor> {
    let (batch, channels, height, width) = x.dims4()?;
    let (height, width) = (height / factor, width / factor);
    x.reshape(vec![batch, channels, height, factor, width, factor])?
        .permute(vec![0, 1, 3, 5, 2, 4])?
        .reshape((batch, channels * factor * factor, height, width))
}

/// A T2I-Adapter.
#[derive(Clone, Debug)]
pub struct T2iAdapter {
    config: T2iAdapterConfig,
    conv_in: Option<Conv2d>,
    body: Vec<Block>,
}

impl T2iAdapter {
    /// Loads the model.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub fn new(weights: &Weights, config: &T2iAdapterConfig) -> Result<Self> {
        let weights = weights.pp("adapter");
        let first = config.channels.first().copied().unwrap_or(0);
        let conv_in = match config.adapter_type {
            T2iNetwork::LightAdapter => None,
            _ => Some(Conv2d::new(
                &weights.pp("conv_in"),
                config.pixel_channels(),
                first,
                3,
                1,
                1,
            )?),
        };
        let body = config.blocks().into_iter().enumerate();
        let body = body.map(|(i, sizes)| Block::new(&weights.pp("body").pp(i), sizes, config));
        Ok(Self {
            config: config.clone(),
            conv_in,
            body: body.collect::<Result<_>>()?,
        })
    }

    /// The config of the model.
    #[must_use]
    pub fn config(&self) -> &T2iAdapterConfig {
        &self.config
    }

    /// The features of control images [b, 3, height, width] from 0 to 1, one for each block: [b, channels, h, w].
    ///
    /// # Errors
    /// When a side of the images is not a multiple of the downscale factor.
    pub fn forward(&self, images: &Tensor) -> Result<Vec<Tensor>> {
        let factor = self.config.downscale_factor;
        let (_, _, height, width) = images.dims4()?;
        if !height.is_multiple_of(factor) || !width.is_multiple_of(factor) {
            return Err(EngineError::bad_input(format!(
                "a control image of {width} x {height} pixels: the T2I-Adapter takes multiples of {factor}"
            )));
        }
        let mut x = pixel_unshuffle(images, factor)?;
        if let Some(conv) = &self.conv_in {
            x = conv.forward(&x)?;
        }
        let mut features = Vec::with_capacity(self.body.len());
        for block in &self.body {
            x = block.forward(&x)?;
            features.push(x.clone());
        }
        Ok(features)
    }
}
