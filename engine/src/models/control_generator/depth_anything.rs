//! Depth Anything V2 (L. Yang and others, arXiv:2406.09414): DINOv2 with the neck and the head of DPT (R. Ranftl and others,
//! arXiv:2103.13413).
//!
//! The layers, the names of their tensors and the keys of the config are those of `DepthAnythingForDepthEstimation` of transformers 5.23. It
//! computes in float32.

use super::dinov2::{Dinov2, Dinov2Config};
use crate::error::{EngineError, Result};
use crate::models::config::{self, check_sizes};
use crate::nn::{Conv2d, Interpolation, Linear, add, interpolate, to_image};
use crate::weights::{Index, Weights};
use candle_core::{DType, Device, Tensor};
use serde::Deserialize;
use std::path::Path;

/// The tensor that tells a file of this network from others.
pub(super) const FIRST_TENSOR: &str = "backbone.embeddings.patch_embeddings.projection.weight";

/// `config.json`.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
struct DepthAnythingConfig {
    backbone_config: Dinov2Config,
    patch_size: usize,
    reassemble_hidden_size: usize,
    reassemble_factors: Vec<f64>,
    neck_hidden_sizes: Vec<usize>,
    fusion_hidden_size: usize,
    head_in_index: i64,
    head_hidden_size: usize,
    depth_estimation_type: String,
    max_depth: f64,
}

impl Default for DepthAnythingConfig {
    /// Those of transformers' `DepthAnythingConfig`.
    fn default() -> Self {
        Self {
            backbone_config: Dinov2Config::default(),
            patch_size: 14,
            reassemble_hidden_size: 384,
            reassemble_factors: vec![4.0, 2.0, 1.0, 0.5],
            neck_hidden_sizes: vec![48, 96, 192, 384],
            fusion_hidden_size: 64,
            head_in_index: -1,
            head_hidden_size: 32,
            depth_estimation_type: "relative".into(),
            max_depth: 1.0,
        }
    }
}

impl DepthAnythingConfig {
    /// Reads `config.json` in the folder of the weights.
    fn read(path: &Path) -> Result<Self> {
        let config: Self = config::read(path)?;
        let wrong = |message: String| Err(EngineError::model_config(path, message));
        let sizes = [
            ("patch_size", config.patch_size),
            ("reassemble_hidden_size", config.reassemble_hidden_size),
            ("fusion_hidden_size", config.fusion_hidden_size),
            ("head_hidden_size", config.head_hidden_size),
        ];
        let of_neck = config.neck_hidden_sizes.iter().map(|size| ("neck_hidden_sizes", *size));
        if let Err(message) = check_sizes(sizes.into_iter().chain(of_neck)) {
            return wrong(message);
        }
        let backbone = &config.backbone_config;
        let stages = backbone.outputs().len();
        let expected = [
            (
                config.neck_hidden_sizes.len() == stages && config.reassemble_factors.len() == stages,
                format!(
                    "expected {stages} `neck_hidden_sizes` and `reassemble_factors`, one for each of `out_indices`"
                ),
            ),
            (
                config.patch_size == backbone.patch_size && config.reassemble_hidden_size == backbone.hidden_size,
                "expected the `patch_size` of `backbone_config`, and its `hidden_size` as `reassemble_hidden_size`"
                    .into(),
            ),
            (
                config.depth_estimation_type == "relative",
                format!(
                    "`depth_estimation_type` is `{}`; expected `relative`",
                    config.depth_estimation_type
                ),
            ),
            (
                config.head_in_index == -1 || usize::try_from(config.head_in_index) == Ok(stages.saturating_sub(1)),
                format!("`head_in_index` is {}; expected -1, the last", config.head_in_index),
            ),
            (
                config.max_depth.is_finite(),
                format!("`max_depth` is {}; expected a finite number", config.max_depth),
            ),
        ];
        match expected.into_iter().find(|(holds, _)| !holds) {
            Some((_, message)) => wrong(message),
            None => Ok(config),
        }
    }
}

/// Changes the size of the features of a layer of the backbone.
#[derive(Clone, Debug)]
enum Resize {
    /// A transposed convolution whose kernel is as large as its stride: each pixel becomes a square of this side.
    Enlarge { linear: Linear, side: usize },
    /// Stays.
    Keep,
    /// A convolution with this stride.
    Reduce(Conv2d),
}

/// The features of a layer of the backbone as an image.
#[derive(Clone, Debug)]
struct Reassemble {
    projection: Conv2d,
    resize: Resize,
    conv: Conv2d,
}

impl Reassemble {
    fn new(neck: &Weights, config: &DepthAnythingConfig, stage: usize) -> Result<Self> {
        let weights = neck.pp("reassemble_stage.layers").pp(stage);
        let (channels, factor) = (config.neck_hidden_sizes[stage], config.reassemble_factors[stage]);
        let resize = weights.pp("resize");
        let is_whole = |value: f64| (1.0..=64.0).contains(&value) && value.fract() == 0.0;
        let resize = match factor {
            1.0 => Resize::Keep,
            _ if is_whole(factor) => enlarging(&resize, channels, factor as usize)?,
            _ if is_whole(1.0 / factor) => {
                Resize::Reduce(Conv2d::new(&resize, channels, channels, 3, (1.0 / factor) as usize, 1)?)
            }
            _ => return Err(neck.config_error(format!("`reassemble_factors` has {factor}: expected such as 4 or 0.5"))),
        };
        Ok(Self {
            projection: Conv2d::new(
                &weights.pp("projection"),
                config.reassemble_hidden_size,
                channels,
                1,
                1,
                0,
            )?,
            resize,
            conv: without_bias(&neck.pp("convs").pp(stage), channels, config.fusion_hidden_size)?,
        })
    }

    /// `features` [b, patches, c], of `size` (rows and columns of patches) -> [b, fusion channels, h, w].
    fn forward(&self, features: &Tensor, (rows, columns): (usize, usize)) -> candle_core::Result<Tensor> {
        let (batch, _, channels) = features.dims3()?;
        let x = self
            .projection
            .forward(&to_image(features, &[batch, channels, rows, columns])?)?;
        let x = match &self.resize {
            Resize::Keep => x,
            Resize::Reduce(conv) => conv.forward(&x)?,
            Resize::Enlarge { linear, side } => enlarged(linear, *side, &x)?,
        };
        self.conv.forward(&x)
    }
}

fn enlarging(weights: &Weights, channels: usize, side: usize) -> Result<Resize> {
    // [in, out, side, side] -> [out * side * side, in].
    let weight = weights.get((channels, channels, side, side), "weight")?;
    let weight = weight.reshape((channels, channels * side * side))?.t()?.contiguous()?;
    let bias = weights.get(channels, "bias")?.unsqueeze(1)?;
    let bias = bias
        .broadcast_as((channels, side * side))?
        .flatten_all()?
        .contiguous()?;
    Ok(Resize::Enlarge {
        linear: Linear::from_parts(weight, Some(bias)),
        side,
    })
}

/// x [b, c, h, w] -> [b, c, h * side, w * side].
fn enlarged(linear: &Linear, side: usize, x: &Tensor) -> candle_core::Result<Tensor> {
    let (batch, channels, height, width) = x.dims4()?;
    let pixels = x.permute((0, 2, 3, 1))?.contiguous()?;
    let squares = linear
        .forward(&pixels)?
        .reshape(&[batch, height, width, channels, side, side][..])?;
    let squares = squares.permute(&[0, 3, 1, 4, 2, 5][..])?.contiguous()?;
    squares.reshape((batch, channels, height * side, width * side))
}

/// A convolution of 3 x 3 without a bias.
fn without_bias(weights: &Weights, inputs: usize, outputs: usize) -> Result<Conv2d> {
    Ok(Conv2d {
        weight: weights.get((outputs, inputs, 3, 3), "weight")?.into(),
        bias: None,
        stride: 1,
        padding: 1,
        adapters: Vec::new(),
    })
}

/// Two convolutions after activations, plus the input.
#[derive(Clone, Debug)]
struct Residual([Conv2d; 2]);

impl Residual {
    fn new(weights: &Weights, channels: usize) -> Result<Self> {
        let conv = |name: &str| Conv2d::new(&weights.pp(name), channels, channels, 3, 1, 1);
        Ok(Self([conv("convolution1")?, conv("convolution2")?]))
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let [first, second] = &self.0;
        add(&second.forward(&first.forward(&x.relu()?)?.relu()?)?, x)
    }
}

/// Adds the features of a stage to those of the stage before it, which are smaller.
#[derive(Clone, Debug)]
struct Fusion {
    projection: Conv2d,
    /// Of the features of the stage; the first stage has none to add.
    of_stage: Residual,
    of_sum: Residual,
}

impl Fusion {
    fn new(weights: &Weights, channels: usize) -> Result<Self> {
        Ok(Self {
            projection: Conv2d::new(&weights.pp("projection"), channels, channels, 1, 1, 0)?,
            of_stage: Residual::new(&weights.pp("residual_layer1"), channels)?,
            of_sum: Residual::new(&weights.pp("residual_layer2"), channels)?,
        })
    }

    /// `before`: the sum of the stages before. `size`: height and width of the result; `None`: twice those of `features`.
    fn forward(
        &self,
        before: Option<&Tensor>,
        features: &Tensor,
        size: Option<(usize, usize)>,
    ) -> candle_core::Result<Tensor> {
        let sum = match before {
            None => features.clone(),
            Some(before) => {
                let (_, _, height, width) = before.dims4()?;
                let features = interpolate(features, (height, width), Interpolation::Bilinear)?;
                add(before, &self.of_stage.forward(&features)?)?
            }
        };
        let sum = self.of_sum.forward(&sum)?;
        let (_, _, height, width) = sum.dims4()?;
        let size = size.unwrap_or((2 * height, 2 * width));
        self.projection
            .forward(&interpolate(&sum, size, Interpolation::BilinearAligned)?)
    }
}

/// The network.
#[derive(Clone, Debug)]
pub struct DepthAnything {
    backbone: Dinov2,
    stages: Vec<(Reassemble, Fusion)>,
    head: [Conv2d; 3],
    patch_size: usize,
    image_size: usize,
    max_depth: f64,
}

/// The names of the published files for those that later versions of transformers give the same tensors; other names stay.
pub(super) fn current_name(name: &str) -> String {
    [
        ("attention.q_proj.", "attention.attention.query."),
        ("attention.k_proj.", "attention.attention.key."),
        ("attention.v_proj.", "attention.attention.value."),
        ("attention.o_proj.", "attention.output.dense."),
    ]
    .into_iter()
    .find_map(|(new, old)| name.contains(new).then(|| name.replace(new, old)))
    .unwrap_or_else(|| name.to_owned())
}

impl DepthAnything {
    /// Reads the network. `config`: the path of its `config.json`.
    ///
    /// # Errors
    /// When the config is not valid, or a tensor is missing or has another shape.
    pub fn new(index: &Index, config_path: &Path, device: &Device) -> Result<Self> {
        let config = DepthAnythingConfig::read(config_path)?;
        let weights = Weights::from_index(index.clone(), DType::F32, device);
        let backbone = Dinov2::new(&weights.pp("backbone"), &config.backbone_config, config_path)?;
        let (neck, channels) = (weights.pp("neck"), config.fusion_hidden_size);
        let count = config.neck_hidden_sizes.len();
        let stage = |number: usize| {
            // The fusion begins with the last stage.
            let fusion = neck.pp("fusion_stage.layers").pp(count - 1 - number);
            Ok((
                Reassemble::new(&neck, &config, number)?,
                Fusion::new(&fusion, channels)?,
            ))
        };
        let head = weights.pp("head");
        let (half, hidden) = (channels / 2, config.head_hidden_size);
        Ok(Self {
            backbone,
            stages: (0..count).map(stage).collect::<Result<_>>()?,
            head: [
                Conv2d::new(&head.pp("conv1"), channels, half, 3, 1, 1)?,
                Conv2d::new(&head.pp("conv2"), half, hidden, 3, 1, 1)?,
                Conv2d::new(&head.pp("conv3"), hidden, 1, 1, 1, 0)?,
            ],
            patch_size: config.patch_size,
            image_size: config.backbone_config.image_size,
            max_depth: config.max_depth,
        })
    }

    /// The sides of images are multiples of this.
    pub(super) fn patch_size(&self) -> usize {
        self.patch_size
    }

    /// The side of the images that it was trained on.
    pub(super) fn image_size(&self) -> usize {
        self.image_size
    }

    /// The inverse depth of each pixel of images [b, 3, height, width] with normalised pixels: [b, 1, height, width], at least 0, the nearest
    /// largest. The sides are multiples of the patch size.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let (_, _, height, width) = images.dims4()?;
        let patches = (height / self.patch_size, width / self.patch_size);
        let features = self.backbone.forward(images)?;
        let features = features.iter().zip(&self.stages);
        let features = features.map(|(features, (reassemble, _))| reassemble.forward(features, patches));
        let features: Vec<Tensor> = features.collect::<candle_core::Result<_>>()?;
        let mut fused: Option<Tensor> = None;
        for number in (0..features.len()).rev() {
            let next = number.checked_sub(1).map(|next| features[next].dims4()).transpose()?;
            let size = next.map(|(_, _, height, width)| (height, width));
            fused = Some(self.stages[number].1.forward(fused.as_ref(), &features[number], size)?);
        }
        let fused = fused.ok_or_else(|| EngineError::Internal("a network of depth without stages".into()))?;
        let [conv1, conv2, conv3] = &self.head;
        let x = conv1.forward(&fused)?;
        let x = interpolate(
            &x,
            (patches.0 * self.patch_size, patches.1 * self.patch_size),
            Interpolation::BilinearAligned,
        )?;
        Ok((conv3.forward(&conv2.forward(&x)?.relu()?)?.relu()? * self.max_depth)?)
    }
}
