//! ControlNet (diffusers' `ControlNetModel`; L. Zhang and others, "Adding Conditional Control to Text-to-Image Diffusion Models", 2023): a
//! copy of a U-Net's down and middle blocks, which sees a control image too. Its features are added to the U-Net's skip connections.

use super::additional::AdditionalEmbedding;
use super::blocks::{Conditioning, DownBlock, MidBlock};
use super::config::UNetConfig;
use super::residuals::{UNetInputs, UNetResiduals};
use super::time::TimeEmbedding;
use crate::checkpointing::{BlockSequence, Checkpointing};
use crate::error::{EngineError, Result};
use crate::models::config::{check_sizes, from_value};
use crate::nn::{Conv2d, add, silu};
use crate::weights::Weights;
use candle_core::Tensor;
use serde::Deserialize;
use serde_json::{Map, Value as Json, json};
use std::sync::Arc;

/// Channels of the embedding of control images: a block with stride 2 leads from each to the next.
const EMBEDDING_CHANNELS: [usize; 4] = [16, 32, 96, 256];

/// The keys of a U-Net's config that a ControlNet has too (`ControlNetModel.from_unet`).
const UNET_KEYS: [&str; 27] = [
    "encoder_hid_dim",
    "encoder_hid_dim_type",
    "addition_embed_type",
    "addition_time_embed_dim",
    "transformer_layers_per_block",
    "in_channels",
    "flip_sin_to_cos",
    "freq_shift",
    "down_block_types",
    "only_cross_attention",
    "block_out_channels",
    "layers_per_block",
    "downsample_padding",
    "mid_block_scale_factor",
    "act_fn",
    "norm_num_groups",
    "norm_eps",
    "cross_attention_dim",
    "attention_head_dim",
    "num_attention_heads",
    "use_linear_projection",
    "class_embed_type",
    "num_class_embeds",
    "upcast_attention",
    "resnet_time_scale_shift",
    "projection_class_embeddings_input_dim",
    "mid_block_type",
];

/// `config.json` of a ControlNet.
#[derive(Clone, Debug)]
pub struct ControlNetConfig {
    /// The config of the blocks.
    unet: UNetConfig,
    own: OwnKeys,
    /// The config as it is saved.
    json: Map<String, Json>,
}

/// The keys that a U-Net does not have.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
struct OwnKeys {
    conditioning_channels: usize,
    conditioning_embedding_out_channels: Vec<usize>,
    controlnet_conditioning_channel_order: String,
    global_pool_conditions: bool,
}

impl Default for OwnKeys {
    fn default() -> Self {
        Self {
            conditioning_channels: 3,
            conditioning_embedding_out_channels: EMBEDDING_CHANNELS.to_vec(),
            controlnet_conditioning_channel_order: "rgb".into(),
            global_pool_conditions: false,
        }
    }
}

impl ControlNetConfig {
    /// Reads the config of a ControlNet.
    ///
    /// # Errors
    /// A sentence with the key that is wrong or not supported.
    pub fn from_json(json: &Json) -> std::result::Result<Self, String> {
        let keys = json.as_object().cloned().ok_or("it is no JSON object")?;
        let own: OwnKeys = from_value(json.clone())?;
        let mut of_unet = keys.clone();
        // A ControlNet has no up blocks, and reads its blocks with the same checks as a U-Net.
        if let Some(types) = keys.get("down_block_types").and_then(Json::as_array) {
            let up = types.iter().rev().map(|name| match name.as_str() {
                Some("CrossAttnDownBlock2D") => json!("CrossAttnUpBlock2D"),
                _ => json!("UpBlock2D"),
            });
            of_unet.insert("up_block_types".into(), up.collect());
        }
        of_unet.remove("out_channels");
        let unet: UNetConfig = from_value(Json::Object(of_unet))?;
        let channels = own.conditioning_embedding_out_channels.iter();
        check_sizes(channels.map(|channels| ("conditioning_embedding_out_channels", *channels)))?;
        if own.conditioning_channels != 3 {
            return Err(format!(
                "`conditioning_channels` is {}, expected 3: control images have red, green and blue",
                own.conditioning_channels
            ));
        }
        if !matches!(own.controlnet_conditioning_channel_order.as_str(), "rgb" | "bgr") {
            return Err(format!(
                "`controlnet_conditioning_channel_order` is `{}`, expected `rgb` or `bgr`",
                own.controlnet_conditioning_channel_order
            ));
        }
        if own.global_pool_conditions {
            return Err("`global_pool_conditions` is not supported".into());
        }
        Ok(Self { unet, own, json: keys })
    }

    /// The config of a new ControlNet for a U-Net with this config, as `ControlNetModel.from_unet` makes it. `pixels_per_latent`: pixels of
    /// an image along each axis for each latent; with other autoencoders than those of Stable Diffusion (8) the embedding has fewer or more blocks.
    ///
    /// # Errors
    /// As [`Self::from_json`].
    pub fn of_unet(unet: &Json, pixels_per_latent: usize) -> std::result::Result<Self, String> {
        let mut keys: Map<String, Json> = UNET_KEYS
            .iter()
            .filter_map(|key| Some(((*key).to_owned(), unet.get(*key)?.clone())))
            .collect();
        let parsed: UNetConfig = from_value(unet.clone())?;
        keys.insert("cross_attention_dim".into(), parsed.context_width()?.into());
        let steps = pixels_per_latent.max(1).ilog2() as usize;
        let last = EMBEDDING_CHANNELS[EMBEDDING_CHANNELS.len() - 1];
        let channels = (0..=steps).map(|i| EMBEDDING_CHANNELS.get(i).copied().unwrap_or(last));
        keys.insert("conditioning_embedding_out_channels".into(), channels.collect());
        keys.insert("conditioning_channels".into(), 3.into());
        keys.insert("controlnet_conditioning_channel_order".into(), "rgb".into());
        keys.insert("global_pool_conditions".into(), false.into());
        keys.insert("_class_name".into(), "ControlNetModel".into());
        Self::from_json(&Json::Object(keys))
    }

    /// The config as diffusers reads it.
    #[must_use]
    pub fn json(&self) -> &Map<String, Json> {
        &self.json
    }

    /// The config of its blocks.
    #[must_use]
    pub fn unet(&self) -> &UNetConfig {
        &self.unet
    }

    /// Whether it has a feature for each skip connection of a U-Net, and reads the same sizes and pooled text.
    ///
    /// # Errors
    /// When a config is not supported.
    pub fn has_layers_of(&self, unet: &UNetConfig) -> std::result::Result<bool, String> {
        let layers = |config: &UNetConfig| -> std::result::Result<_, String> {
            let widths = config.additional_embedding()?;
            Ok((
                config.block_params()?.layers,
                widths.map(|widths| (widths.size, widths.inputs)),
            ))
        };
        Ok(layers(&self.unet)? == layers(unet)?)
    }

    /// Pixels of the control image for each latent, along each axis.
    #[must_use]
    pub fn pixels_per_latent(&self) -> usize {
        1 << self
            .own
            .conditioning_embedding_out_channels
            .len()
            .saturating_sub(1)
            .min(16)
    }
}

/// Where the weights of a ControlNet come from.
#[derive(Clone, Debug)]
pub struct ControlNetWeights {
    /// Those that a U-Net has too: `conv_in`, `time_embedding`, `add_embedding`, `down_blocks`, `mid_block`.
    pub copied: Weights,
    /// The others: the embedding of the control image, and the convolutions of the features.
    pub own: Weights,
}

/// Convolutions that make features of a control image.
#[derive(Clone, Debug)]
struct ImageEmbedding {
    conv_in: Conv2d,
    blocks: Vec<Conv2d>,
    conv_out: Conv2d,
}

impl ImageEmbedding {
    fn new(weights: &Weights, inputs: usize, channels: &[usize], outputs: usize) -> Result<Self> {
        let [first, .., last] = channels else {
            let message = "`conditioning_embedding_out_channels` needs at least two numbers";
            return Err(weights.config_error(message.into()));
        };
        let mut blocks = Vec::new();
        let names = weights.pp("blocks");
        for pair in channels.windows(2) {
            let (inputs, outputs) = (pair[0], pair[1]);
            blocks.push(Conv2d::new(&names.pp(blocks.len()), inputs, inputs, 3, 1, 1)?);
            blocks.push(Conv2d::new(&names.pp(blocks.len()), inputs, outputs, 3, 2, 1)?);
        }
        Ok(Self {
            conv_in: Conv2d::new(&weights.pp("conv_in"), inputs, *first, 3, 1, 1)?,
            blocks,
            conv_out: Conv2d::new(&weights.pp("conv_out"), *last, outputs, 3, 1, 1)?,
        })
    }

    fn forward(&self, images: &Tensor) -> candle_core::Result<Tensor> {
        let mut x = silu(&self.conv_in.forward(images)?)?;
        for block in &self.blocks {
            x = silu(&block.forward(&x)?)?;
        }
        self.conv_out.forward(&x)
    }
}

/// A ControlNet.
#[derive(Clone, Debug)]
pub struct ControlNetModel {
    config: ControlNetConfig,
    conv_in: Conv2d,
    time: TimeEmbedding,
    additional: Option<AdditionalEmbedding>,
    image: ImageEmbedding,
    down_blocks: Vec<DownBlock>,
    mid_block: Option<MidBlock>,
    /// For each skip connection of the U-Net a convolution of one pixel.
    down_convs: Vec<Arc<Conv2d>>,
    mid_conv: Arc<Conv2d>,
    /// Whether and where gradient checkpointing is used.
    pub checkpointing: Checkpointing,
}

impl ControlNetModel {
    /// Loads the model.
    ///
    /// # Errors
    /// When the config is not supported, or a tensor is missing or has another shape.
    pub fn new(weights: &ControlNetWeights, config: &ControlNetConfig) -> Result<Self> {
        let ControlNetWeights { copied, own } = weights;
        let unet = &config.unet;
        let params = unet.block_params().map_err(|message| own.config_error(message))?;
        let additional = unet
            .additional_embedding()
            .map_err(|message| own.config_error(message))?;
        let first = params.channels[0];
        let down_blocks = (0..params.channels.len())
            .map(|i| DownBlock::new(&copied.pp("down_blocks").pp(i), unet, &params, i))
            .collect::<Result<Vec<_>>>()?;
        let mut down_convs = Vec::new();
        let names = own.pp("controlnet_down_blocks");
        let last = params.channels.len() - 1;
        let mut of_skip = |channels: usize| -> Result<()> {
            let conv = Conv2d::new(&names.pp(down_convs.len()), channels, channels, 1, 1, 0)?;
            down_convs.push(Arc::new(conv));
            Ok(())
        };
        of_skip(first)?;
        for (i, channels) in params.channels.iter().enumerate() {
            // One for each layer, and one for the downsampling.
            for _ in 0..params.layers[i] + usize::from(i < last) {
                of_skip(*channels)?;
            }
        }
        let middle = params.channels[last];
        Ok(Self {
            conv_in: Conv2d::new(&copied.pp("conv_in"), unet.in_channels, first, 3, 1, 1)?,
            time: TimeEmbedding::new(&copied.pp("time_embedding"), first)?,
            additional: additional
                .map(|widths| AdditionalEmbedding::new(&copied.pp("add_embedding"), widths, 4 * first))
                .transpose()?,
            image: ImageEmbedding::new(
                &own.pp("controlnet_cond_embedding"),
                config.own.conditioning_channels,
                &config.own.conditioning_embedding_out_channels,
                first,
            )?,
            down_blocks,
            mid_block: match params.mid_block {
                true => Some(MidBlock::new(&copied.pp("mid_block"), unet, &params)?),
                false => None,
            },
            down_convs,
            mid_conv: Arc::new(Conv2d::new(&own.pp("controlnet_mid_block"), middle, middle, 1, 1, 0)?),
            config: config.clone(),
            checkpointing: Checkpointing::default(),
        })
    }

    /// The config of the model.
    #[must_use]
    pub fn config(&self) -> &ControlNetConfig {
        &self.config
    }

    /// The features of control images [b, 3, height, width] from 0 to 1, which do not depend on latents and timestep: [b, channels, height of
    /// the latents, width of the latents].
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn embed_images(&self, images: &Tensor) -> Result<Tensor> {
        let images = match self.config.own.controlnet_conditioning_channel_order.as_str() {
            "bgr" => {
                let order = Tensor::new(&[2u32, 1, 0], images.device())?;
                images.index_select(&order, 1)?
            }
            _ => images.clone(),
        };
        Ok(self.image.forward(&images)?)
    }

    /// What is added to the U-Net's features. `embedded`: [`Self::embed_images`] of the control images.
    ///
    /// # Errors
    /// When the shapes do not match.
    pub fn forward(&self, inputs: &UNetInputs<'_>, embedded: &Tensor) -> Result<UNetResiduals> {
        let dtype = self.conv_in.weight.dtype();
        let sample = inputs.sample.to_dtype(dtype)?;
        let mut time = self.time.forward(inputs.timesteps, &self.config.unet)?;
        match (&self.additional, &inputs.conditions) {
            (Some(additional), Some(conditions)) => {
                time = (time + additional.forward(conditions, &self.config.unet)?)?;
            }
            (None, _) => {}
            (Some(_), None) => {
                return Err(EngineError::bad_input(
                    "the ControlNet is of SDXL, and this is another model: use a ControlNet of this model",
                ));
            }
        }
        let x = self.conv_in.forward(&sample)?;
        if x.dims() != embedded.dims() {
            return Err(EngineError::bad_input(format!(
                "the control image has features {:?} and the latents {:?}: the ControlNet is for another model, or the control image has \
                 another size than the image",
                embedded.dims(),
                x.dims()
            )));
        }
        let x = add(&x, embedded)?;
        let size = (x.dim(2)?, x.dim(3)?);
        let mut sequence = BlockSequence::new();
        let mut skips = vec![(sequence.input(x), size)];
        let conditioning = Conditioning {
            time: sequence.input(time),
            context: sequence.input(inputs.context.to_dtype(dtype)?),
        };
        for (i, block) in self.down_blocks.iter().enumerate() {
            block.add_blocks(
                &format!("down_blocks.{i}"),
                &mut sequence,
                &mut skips,
                conditioning,
                None,
            );
        }
        let mut middle = skips[skips.len() - 1].0;
        if let Some(block) = &self.mid_block {
            middle = block.add_blocks("mid_block", &mut sequence, middle, conditioning);
        }
        let mut results = Vec::with_capacity(skips.len() + 1);
        for (i, ((skip, _), conv)) in skips.iter().zip(&self.down_convs).enumerate() {
            let conv = Arc::clone(conv);
            let name = format!("controlnet_down_blocks.{i}");
            results.push(sequence.add(name, [*skip], move |[x]| conv.forward(x)));
        }
        let conv = Arc::clone(&self.mid_conv);
        results.push(sequence.add("controlnet_mid_block", [middle], move |[x]| conv.forward(x)));
        let mut skips = sequence.run_all(self.checkpointing, &results)?;
        let middle = skips.pop();
        Ok(UNetResiduals {
            in_blocks: Vec::new(),
            skips,
            middle,
        })
    }
}
