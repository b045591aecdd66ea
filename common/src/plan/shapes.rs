//! The shapes of a model's components, from its own `config.json` files.

use super::config_values::{MAX_COUNT, MAX_WIDTH, as_u32, flag, number};
pub use super::transformer_shapes::{LanguageKind, LanguageShapes, TransformerKind, TransformerShapes};
use crate::model_files::clip_text_config;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;

/// The most blocks of a U-Net or an autoencoder.
pub const MAX_BLOCKS: usize = 6;
/// The most text encoders.
pub const MAX_TEXT_ENCODERS: usize = 2;
/// The size limit of a `config.json`.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// The most layers of a block, and transformer blocks of a layer.
const MAX_LAYERS: u32 = 64;
/// The most transformer blocks of a U-Net.
const MAX_TRANSFORMER_BLOCKS: u32 = 512;
/// The shapes of a model: a U-Net or a transformer, its text encoders and its autoencoder. Missing numbers are 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelShapes {
    /// The U-Net, if there is no transformer.
    pub unet: UNetShapes,
    /// The transformer.
    #[serde(skip_serializing_if = "is_default")]
    pub transformer: TransformerShapes,
    /// The language model that encodes prompts, besides or instead of CLIP.
    #[serde(skip_serializing_if = "is_default")]
    pub language: LanguageShapes,
    /// The text encoders (CLIP). Those with a width of 0 do not exist.
    pub text: [TextShapes; MAX_TEXT_ENCODERS],
    /// The autoencoder.
    pub vae: VaeShapes,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// The shapes of a U-Net.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct UNetShapes {
    /// Channels of the latents.
    pub in_channels: u32,
    /// Channels of the prediction.
    pub out_channels: u32,
    /// The kernel of the first convolution.
    pub conv_in_kernel: u32,
    /// The kernel of the last convolution.
    pub conv_out_kernel: u32,
    /// The padding of the downsampling convolutions.
    pub downsample_padding: u32,
    /// Features of a token of the text.
    pub context: u32,
    /// Whether the projections of the transformers are linear layers instead of convolutions.
    pub linear_projection: bool,
    /// Whether attention scores are computed in float32 whatever the dtype is.
    pub upcast_attention: bool,
    /// Whether there is a middle block.
    pub mid_block: bool,
    /// Features of the additional embedding (SDXL); 0: there is none.
    pub additional: u32,
    /// The down blocks; the up blocks have the same numbers in reverse order. Those without channels do not exist.
    pub blocks: [BlockShapes; MAX_BLOCKS],
}

/// The shapes of a block of a U-Net.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct BlockShapes {
    /// Channels of the result.
    pub channels: u32,
    /// Residual blocks.
    pub layers: u32,
    /// Attention heads.
    pub heads: u32,
    /// Transformer blocks of each attention layer.
    pub transformer_layers: u32,
    /// Whether the down block has attention.
    pub down_attention: bool,
    /// Whether the up block with the same channels has attention.
    pub up_attention: bool,
}

/// The shapes of a text encoder (CLIP).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct TextShapes {
    /// Features of a token.
    pub width: u32,
    /// Features of the hidden layer of the MLP.
    pub intermediate: u32,
    /// Layers.
    pub layers: u32,
    /// Attention heads.
    pub heads: u32,
    /// Token ids.
    pub vocabulary: u32,
    /// Tokens of a prompt.
    pub positions: u32,
    /// Features of the pooled text; 0: it has no projection.
    pub projection: u32,
}

/// The shapes of an autoencoder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct VaeShapes {
    /// Channels of an image.
    pub in_channels: u32,
    /// Channels of a decoded image.
    pub out_channels: u32,
    /// Channels of the latents.
    pub latent_channels: u32,
    /// Residual blocks of a block of the encoder; the decoder has one more.
    pub layers: u32,
    /// Channels of the blocks; 0: the block does not exist.
    pub channels: [u32; MAX_BLOCKS],
    /// Whether the middle block has attention.
    pub mid_attention: bool,
    /// The side of the images that it was trained on, which is the side of a tile.
    pub sample_size: u32,
}

impl UNetShapes {
    /// The blocks that exist.
    #[must_use]
    pub fn blocks(&self) -> &[BlockShapes] {
        let count = self.blocks.iter().take_while(|block| block.channels > 0).count();
        &self.blocks[..count]
    }

    fn read(config: &Value) -> Option<Self> {
        let channels = numbers(config, "block_out_channels", 0)?;
        let each = |key: &str, usual: u32| per_block(config, key, channels.len(), usual);
        let (layers, transformers) = (each("layers_per_block", 2)?, each("transformer_layers_per_block", 1)?);
        let heads = match config.get("num_attention_heads").filter(|heads| !heads.is_null()) {
            Some(_) => each("num_attention_heads", 8)?,
            None => each("attention_head_dim", 8)?,
        };
        let attention = |key: &str, i: usize| {
            let name = config.get(key).and_then(|types| types.get(i)).and_then(Value::as_str);
            name.is_some_and(|name| name.starts_with("CrossAttn"))
        };
        let mut blocks = [BlockShapes::default(); MAX_BLOCKS];
        for (i, block) in blocks.iter_mut().enumerate().take(channels.len()) {
            *block = BlockShapes {
                channels: channels[i],
                layers: layers[i],
                heads: heads[i],
                transformer_layers: transformers[i],
                down_attention: attention("down_block_types", i),
                up_attention: attention("up_block_types", channels.len() - 1 - i),
            };
        }
        let additional = match config.get("addition_embed_type").is_none_or(Value::is_null) {
            true => 0,
            false => number(config, "projection_class_embeddings_input_dim", 0)?,
        };
        Some(Self {
            in_channels: number(config, "in_channels", 4)?,
            out_channels: number(config, "out_channels", 4)?,
            conv_in_kernel: number(config, "conv_in_kernel", 3)?,
            conv_out_kernel: number(config, "conv_out_kernel", 3)?,
            downsample_padding: number(config, "downsample_padding", 1)?,
            context: per_block(config, "cross_attention_dim", 1, 768)?[0],
            linear_projection: flag(config, "use_linear_projection", false),
            upcast_attention: flag(config, "upcast_attention", false),
            mid_block: config.get("mid_block_type").is_none_or(|kind| !kind.is_null()),
            additional,
            blocks,
        })
    }

    fn is_valid(&self) -> bool {
        let blocks = self.blocks();
        let transformers = |block: &BlockShapes| {
            let layers =
                u32::from(block.down_attention) * block.layers + u32::from(block.up_attention) * (block.layers + 1);
            layers * block.transformer_layers
        };
        let in_range = |block: &BlockShapes| {
            block.channels <= MAX_WIDTH
                && (1..=MAX_LAYERS).contains(&block.layers)
                && block.transformer_layers <= MAX_LAYERS
                && (1..=MAX_WIDTH).contains(&block.heads)
        };
        !blocks.is_empty()
            && blocks.iter().all(in_range)
            && blocks.iter().map(transformers).sum::<u32>() <= MAX_TRANSFORMER_BLOCKS
            && [self.in_channels, self.out_channels, self.context]
                .iter()
                .all(|width| (1..=MAX_WIDTH).contains(width))
            && self.additional <= MAX_WIDTH
            && [self.conv_in_kernel, self.conv_out_kernel]
                .iter()
                .all(|kernel| (1..=15).contains(kernel))
            && self.downsample_padding <= 15
    }
}

impl TextShapes {
    fn read(config: Value) -> Option<Self> {
        let config = &clip_text_config(config);
        let projects = config.pointer("/architectures/0").and_then(Value::as_str);
        let projects = projects.is_some_and(|name| name.ends_with("WithProjection"));
        Some(Self {
            width: number(config, "hidden_size", 768)?,
            intermediate: number(config, "intermediate_size", 3072)?,
            layers: number(config, "num_hidden_layers", 12)?,
            heads: number(config, "num_attention_heads", 12)?,
            vocabulary: number(config, "vocab_size", 49408)?,
            positions: number(config, "max_position_embeddings", 77)?,
            projection: if projects {
                number(config, "projection_dim", 512)?
            } else {
                0
            },
        })
    }

    fn is_valid(&self) -> bool {
        let widths = [self.width, self.intermediate, self.heads, self.positions];
        self.width == 0
            || widths.iter().all(|width| (1..=MAX_WIDTH).contains(width))
                && (1..=4 * MAX_LAYERS).contains(&self.layers)
                && self.projection <= MAX_WIDTH
                && (1..=MAX_COUNT).contains(&self.vocabulary)
    }
}

impl VaeShapes {
    /// The channels of the blocks that exist.
    #[must_use]
    pub fn channels(&self) -> &[u32] {
        let count = self.channels.iter().take_while(|channels| **channels > 0).count();
        &self.channels[..count]
    }

    fn read(config: &Value) -> Option<Self> {
        let mut channels = [0; MAX_BLOCKS];
        for (to, from) in channels.iter_mut().zip(numbers(config, "block_out_channels", 0)?) {
            *to = from;
        }
        Some(Self {
            in_channels: number(config, "in_channels", 3)?,
            out_channels: number(config, "out_channels", 3)?,
            latent_channels: number(config, "latent_channels", 4)?,
            layers: number(config, "layers_per_block", 2)?,
            channels,
            mid_attention: flag(config, "mid_block_add_attention", true),
            sample_size: per_block(config, "sample_size", 1, 512)?[0],
        })
    }

    fn is_valid(&self) -> bool {
        let channels = self.channels();
        let ends = [self.in_channels, self.out_channels, self.latent_channels];
        !channels.is_empty()
            && channels.iter().all(|width| *width <= MAX_WIDTH)
            && ends.iter().all(|width| (1..=MAX_WIDTH).contains(width))
            && (1..=MAX_LAYERS).contains(&self.layers)
            && self.sample_size <= MAX_COUNT
    }
}

impl ModelShapes {
    /// Reads the configs of a diffusers folder. `None`: a config is missing, or describes another kind of model.
    #[must_use]
    pub fn read(folder: &Path) -> Option<Self> {
        let config = |part: &str| read_config(&folder.join(part));
        let vae = VaeShapes::read(&config("vae")?)?;
        if let Some(transformer) = config("transformer") {
            let mut transformer = TransformerShapes::read(&transformer)?;
            transformer.short_prompts = is_schnell(&transformer, folder);
            return Self::with_transformer(folder, transformer, vae)?.checked();
        }
        let mut text = [TextShapes::default(); MAX_TEXT_ENCODERS];
        text[0] = TextShapes::read(config("text_encoder")?)?;
        if let Some(second) = config("text_encoder_2") {
            text[1] = TextShapes::read(second)?;
        }
        Self {
            unet: UNetShapes::read(&config("unet")?)?,
            text,
            vae,
            ..Self::default()
        }
        .checked()
    }

    /// Reads the configs of the text encoders that belong to a transformer.
    fn with_transformer(folder: &Path, transformer: TransformerShapes, vae: VaeShapes) -> Option<Self> {
        let config = |part: &str| read_config(&folder.join(part));
        let clip = |part: &str| TextShapes::read(config(part)?);
        let mut text = [TextShapes::default(); MAX_TEXT_ENCODERS];
        let language = match transformer.kind {
            TransformerKind::None => return None,
            TransformerKind::Flux => {
                text[0] = clip("text_encoder")?;
                LanguageShapes::read_t5(&config("text_encoder_2")?)?
            }
            TransformerKind::Sd3 => {
                text = [clip("text_encoder")?, clip("text_encoder_2")?];
                let index = folder.join("model_index.json");
                let index = crate::fsutil::regular::read_text(&index, MAX_CONFIG_BYTES).ok();
                let index: Value = index
                    .and_then(|text| serde_json::from_str(&text).ok())
                    .unwrap_or_default();
                let class = index.get("text_encoder_3").and_then(Value::as_array);
                let is_left_out = class.is_some_and(|class| class.iter().all(Value::is_null));
                match config("text_encoder_3").filter(|_| !is_left_out) {
                    Some(t5) => LanguageShapes::read_t5(&t5)?,
                    None => LanguageShapes::default(),
                }
            }
            TransformerKind::Chroma => LanguageShapes::read_t5(&config("text_encoder")?)?,
            TransformerKind::ZImage => LanguageShapes::read_qwen3(&config("text_encoder")?)?,
        };
        Some(Self {
            transformer,
            language,
            text,
            vae,
            ..Self::default()
        })
    }

    /// Whether the model has a transformer instead of a U-Net.
    #[must_use]
    pub fn has_transformer(&self) -> bool {
        self.transformer.kind != TransformerKind::None
    }

    /// The shapes, if all numbers are within the limits of known models. Every walk over checked shapes takes a bounded time.
    #[must_use]
    pub fn checked(self) -> Option<Self> {
        let denoiser = match self.has_transformer() {
            true => self.transformer.is_valid() && self.language.is_valid(),
            false => self.unet.is_valid() && self.text[0].width > 0,
        };
        (denoiser && self.text.iter().all(TextShapes::is_valid) && self.vae.is_valid()).then_some(self)
    }

    /// The same shapes without blocks and channels that follow a missing one, which do not exist.
    #[must_use]
    pub fn without_gaps(mut self) -> Self {
        if self.has_transformer() {
            self.unet = UNetShapes::default();
        }
        let (blocks, channels) = (self.unet.blocks().len(), self.vae.channels().len());
        self.unet.blocks[blocks..].fill(BlockShapes::default());
        self.vae.channels[channels..].fill(0);
        for text in self.text.iter_mut().filter(|text| text.width == 0) {
            *text = TextShapes::default();
        }
        self
    }

    /// The text encoders that exist.
    pub fn text_encoders(&self) -> impl Iterator<Item = &TextShapes> {
        self.text.iter().filter(|text| text.width > 0)
    }

    /// The shapes of a model of the same family whose U-Net has this fraction of its parameters: fewer or more channels.
    #[must_use]
    pub(super) fn scaled(mut self, [unet, text, vae]: [f64; 3]) -> Self {
        let scale = |n: &mut u32, fraction: f64| {
            if *n > 0 {
                #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
                let scaled = (f64::from(*n) * fraction.sqrt())
                    .round()
                    .clamp(1.0, f64::from(MAX_WIDTH)) as u32;
                *n = scaled;
            }
        };
        for block in &mut self.unet.blocks {
            scale(&mut block.channels, unet);
        }
        self.transformer = self.transformer.scaled(unet);
        self.language = self.language.scaled(text);
        for encoder in &mut self.text {
            scale(&mut encoder.width, text);
            scale(&mut encoder.intermediate, text);
        }
        for channels in &mut self.vae.channels {
            scale(channels, vae);
        }
        self
    }
}

fn read_config(folder: &Path) -> Option<Value> {
    read_json(&folder.join("config.json"))
}

/// Whether the model is FLUX.1-schnell or one like it, as `engine/src/families/flux/load.rs`: it has no guidance embedding, and its
/// scheduler does not shift timesteps by the size of the image.
fn is_schnell(transformer: &TransformerShapes, folder: &Path) -> bool {
    let shifts = || {
        let scheduler = read_json(&folder.join("scheduler").join("scheduler_config.json"))?;
        scheduler.get("use_dynamic_shifting")?.as_bool()
    };
    transformer.kind == TransformerKind::Flux && !transformer.guidance && shifts() != Some(true)
}

fn read_json(file: &Path) -> Option<Value> {
    let text = crate::fsutil::regular::read_text(file, MAX_CONFIG_BYTES).ok()?;
    serde_json::from_str(&text).ok()
}

/// A list of 1 to [`MAX_BLOCKS`] whole numbers above `above`.
fn numbers(config: &Value, key: &str, above: u32) -> Option<Vec<u32>> {
    let list = config.get(key)?.as_array()?;
    if list.is_empty() || list.len() > MAX_BLOCKS {
        return None;
    }
    list.iter().map(|n| as_u32(n).filter(|n| *n > above)).collect()
}

/// A whole number for each block, or one for all.
fn per_block(config: &Value, key: &str, blocks: usize, usual: u32) -> Option<Vec<u32>> {
    match config.get(key) {
        Some(Value::Array(list)) if list.len() >= blocks => list.iter().take(blocks).map(as_u32).collect(),
        Some(Value::Array(_)) => None,
        _ => Some(vec![number(config, key, usual)?; blocks]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn hostile_configs_are_refused() {
        let unet = |key: &str, value: Value| {
            let mut config =
                json!({"block_out_channels": [320, 640], "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"]});
            config[key] = value;
            UNetShapes::read(&config).filter(UNetShapes::is_valid)
        };
        assert!(unet("layers_per_block", json!(2)).is_some());
        for (key, value) in [
            ("block_out_channels", json!([])),
            ("block_out_channels", json!([0])),
            ("block_out_channels", json!(vec![8; 7])),
            ("block_out_channels", json!([4_000_000_000_u64, 5_000_000_000_u64])),
            ("layers_per_block", json!(4_294_967_295_u32)),
            ("layers_per_block", json!([1])),
            ("transformer_layers_per_block", json!(1000)),
            ("attention_head_dim", json!(0)),
            ("conv_in_kernel", json!(-3)),
            ("cross_attention_dim", json!("wide")),
        ] {
            assert_eq!(unet(key, value.clone()), None, "{key}: {value}");
        }
    }

    /// Models without a guidance embedding that are made from FLUX.1-dev keep its scheduler.
    #[test]
    fn schnell_is_known_by_its_scheduler() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("scheduler")).unwrap();
        let is_schnell = |class: &str, guidance: bool, scheduler: &str| {
            std::fs::write(folder.path().join("scheduler/scheduler_config.json"), scheduler).unwrap();
            let config = json!({"_class_name": class, "guidance_embeds": guidance});
            is_schnell(&TransformerShapes::read(&config).unwrap(), folder.path())
        };
        let (flux, shifts) = ("FluxTransformer2DModel", r#"{"use_dynamic_shifting": true}"#);
        assert!(is_schnell(flux, false, r#"{"use_dynamic_shifting": false}"#));
        assert!(is_schnell(flux, false, "{}"));
        assert!(is_schnell(flux, false, "no JSON"));
        assert!(!is_schnell(flux, false, shifts));
        assert!(!is_schnell(flux, true, "{}"));
        assert!(!is_schnell("ChromaTransformer2DModel", false, "{}"));
    }
}
