//! `unet/config.json`, and the parameters of each block.

use crate::models::config::check_sizes;
use serde::Deserialize;

/// One value for all blocks, or one per block.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(untagged)]
pub enum PerBlock<T> {
    /// The same value for all blocks.
    One(T),
    /// One value per down block.
    Each(Vec<T>),
}

impl<T: Clone> PerBlock<T> {
    /// The values that the config has.
    fn values(&self) -> &[T] {
        match self {
            Self::One(value) => std::slice::from_ref(value),
            Self::Each(values) => values,
        }
    }

    fn expand(&self, blocks: usize, key: &str) -> Result<Vec<T>, String> {
        match self {
            Self::One(value) => Ok(vec![value.clone(); blocks]),
            Self::Each(values) if values.len() == blocks => Ok(values.clone()),
            Self::Each(values) => Err(format!("`{key}` has {} values for {blocks} blocks", values.len())),
        }
    }
}

/// The largest convolution kernel.
const MAX_KERNEL: usize = 31;

/// The `addition_embed_type` of SDXL: pooled text, and sizes as sinusoids.
const TEXT_TIME: &str = "text_time";

/// `unet/config.json`. Missing keys have the values of SD 1.x. Keys of other families are read so that a model that
/// needs them is refused.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
#[expect(missing_docs, reason = "the keys are diffusers' own, documented there")]
pub struct UNetConfig {
    pub sample_size: PerBlock<usize>,
    pub in_channels: usize,
    pub out_channels: usize,
    pub center_input_sample: bool,
    pub flip_sin_to_cos: bool,
    pub freq_shift: f64,
    pub down_block_types: Vec<String>,
    pub mid_block_type: Option<String>,
    pub up_block_types: Vec<String>,
    pub only_cross_attention: PerBlock<bool>,
    pub block_out_channels: Vec<usize>,
    pub layers_per_block: PerBlock<usize>,
    pub downsample_padding: usize,
    pub mid_block_scale_factor: f64,
    pub act_fn: String,
    pub norm_num_groups: usize,
    pub norm_eps: f64,
    pub cross_attention_dim: PerBlock<usize>,
    pub transformer_layers_per_block: PerBlock<usize>,
    pub attention_head_dim: PerBlock<usize>,
    pub num_attention_heads: Option<PerBlock<usize>>,
    pub dual_cross_attention: bool,
    pub use_linear_projection: bool,
    pub class_embed_type: Option<String>,
    pub addition_embed_type: Option<String>,
    pub addition_time_embed_dim: Option<usize>,
    pub projection_class_embeddings_input_dim: Option<usize>,
    pub num_class_embeds: Option<usize>,
    pub encoder_hid_dim: Option<usize>,
    pub upcast_attention: bool,
    pub resnet_time_scale_shift: String,
    pub resnet_out_scale_factor: f64,
    pub time_embedding_type: String,
    pub time_embedding_dim: Option<usize>,
    pub time_cond_proj_dim: Option<usize>,
    pub time_embedding_act_fn: Option<String>,
    pub timestep_post_act: Option<String>,
    pub reverse_transformer_layers_per_block: Option<serde_json::Value>,
    pub encoder_hid_dim_type: Option<String>,
    pub attention_type: Option<String>,
    pub conv_in_kernel: usize,
    pub conv_out_kernel: usize,
}

impl Default for UNetConfig {
    fn default() -> Self {
        let cross = |name: &str, plain: &str, plain_first: bool| {
            let mut types = vec![name.to_owned(); 3];
            types.insert(if plain_first { 0 } else { 3 }, plain.to_owned());
            types
        };
        Self {
            sample_size: PerBlock::One(64),
            in_channels: 4,
            out_channels: 4,
            center_input_sample: false,
            flip_sin_to_cos: true,
            freq_shift: 0.0,
            down_block_types: cross("CrossAttnDownBlock2D", "DownBlock2D", false),
            mid_block_type: Some("UNetMidBlock2DCrossAttn".into()),
            up_block_types: cross("CrossAttnUpBlock2D", "UpBlock2D", true),
            only_cross_attention: PerBlock::One(false),
            block_out_channels: vec![320, 640, 1280, 1280],
            layers_per_block: PerBlock::One(2),
            downsample_padding: 1,
            mid_block_scale_factor: 1.0,
            act_fn: "silu".into(),
            norm_num_groups: 32,
            norm_eps: 1e-5,
            cross_attention_dim: PerBlock::One(768),
            transformer_layers_per_block: PerBlock::One(1),
            attention_head_dim: PerBlock::One(8),
            num_attention_heads: None,
            dual_cross_attention: false,
            use_linear_projection: false,
            class_embed_type: None,
            addition_embed_type: None,
            addition_time_embed_dim: None,
            projection_class_embeddings_input_dim: None,
            num_class_embeds: None,
            encoder_hid_dim: None,
            upcast_attention: false,
            resnet_time_scale_shift: "default".into(),
            resnet_out_scale_factor: 1.0,
            time_embedding_type: "positional".into(),
            time_embedding_dim: None,
            time_cond_proj_dim: None,
            time_embedding_act_fn: None,
            timestep_post_act: None,
            reverse_transformer_layers_per_block: None,
            encoder_hid_dim_type: None,
            attention_type: None,
            conv_in_kernel: 3,
            conv_out_kernel: 3,
        }
    }
}

/// Widths of the additional embedding of SDXL.
#[derive(Clone, Copy, Debug)]
pub(super) struct AdditionalWidths {
    /// Sinusoids per size number.
    pub(super) size: usize,
    /// Features of the pooled text and of all size numbers together.
    pub(super) inputs: usize,
}

/// The parameters of each down block, from a checked config. Up blocks use the same lists in reverse order.
#[derive(Clone, Debug)]
pub(super) struct BlockParams {
    pub(super) channels: Vec<usize>,
    pub(super) layers: Vec<usize>,
    pub(super) heads: Vec<usize>,
    pub(super) context: Vec<usize>,
    pub(super) transformer_layers: Vec<usize>,
    pub(super) down_attention: Vec<bool>,
    pub(super) up_attention: Vec<bool>,
    pub(super) mid_block: bool,
}

impl UNetConfig {
    /// The number of features of a context token.
    ///
    /// # Errors
    /// When blocks have different numbers.
    pub fn context_width(&self) -> Result<usize, String> {
        match &self.cross_attention_dim {
            PerBlock::One(width) => Ok(*width),
            PerBlock::Each(widths) => match widths.first() {
                Some(first) if widths.iter().all(|width| width == first) => Ok(*first),
                _ => Err("`cross_attention_dim` with different values per block is not supported".into()),
            },
        }
    }

    /// The height and width of the latents that the model was trained on.
    #[must_use]
    pub fn sample_extent(&self) -> (usize, usize) {
        match &self.sample_size {
            PerBlock::One(size) => (*size, *size),
            PerBlock::Each(sizes) => {
                let first = sizes.first().copied().unwrap_or(64);
                (first, sizes.get(1).copied().unwrap_or(first))
            }
        }
    }

    /// The features of the pooled text that the model takes besides this many size numbers (SDXL). `None` if it takes
    /// none.
    ///
    /// # Errors
    /// When the config contradicts itself.
    pub fn pooled_width(&self, size_numbers: usize) -> Result<Option<usize>, String> {
        let Some(widths) = self.additional_embedding()? else {
            return Ok(None);
        };
        match widths.inputs.checked_sub(size_numbers.saturating_mul(widths.size)) {
            Some(width) if width > 0 => Ok(Some(width)),
            _ => Err(format!(
                "`projection_class_embeddings_input_dim` is {}, which leaves no pooled text besides {size_numbers} size \
                 numbers of {} features",
                widths.inputs, widths.size
            )),
        }
    }

    /// The widths of the additional embedding. `None` if the model has none.
    ///
    /// # Errors
    /// When a key is missing.
    pub(super) fn additional_embedding(&self) -> Result<Option<AdditionalWidths>, String> {
        if self.addition_embed_type.is_none() {
            return Ok(None);
        }
        match (self.addition_time_embed_dim, self.projection_class_embeddings_input_dim) {
            (Some(size), Some(inputs)) if size > 0 && inputs > 0 => Ok(Some(AdditionalWidths { size, inputs })),
            _ => Err("`addition_embed_type: text_time` needs `addition_time_embed_dim` and \
                      `projection_class_embeddings_input_dim`"
                .into()),
        }
    }

    /// Where networks beside the U-Net add features of their own: the channels and the side of each place, for square latents with
    /// `side` pixels. One for each down block, and one for the middle block.
    ///
    /// # Errors
    /// When the config is not supported.
    pub fn adapter_places(&self, side: usize) -> Result<Vec<(usize, usize)>, String> {
        let params = self.block_params()?;
        let (mut side, last) = (side, params.channels.len() - 1);
        let mut places = Vec::new();
        for (i, (channels, attention)) in params.channels.iter().zip(&params.down_attention).enumerate() {
            let before = side;
            if i < last {
                side = side.div_ceil(2);
            }
            // Before the downsampling if the block has attention.
            places.push((*channels, if *attention { before } else { side }));
        }
        places.extend(places.last().map(|(channels, _)| (*channels, side)));
        Ok(places)
    }

    pub(super) fn block_params(&self) -> Result<BlockParams, String> {
        self.check_supported()?;
        let blocks = self.block_out_channels.len();
        if blocks == 0 || self.block_out_channels.contains(&0) {
            return Err("`block_out_channels` is empty or has a 0".into());
        }
        self.check_sizes()?;
        let attention = |types: &[String], key: &str, cross: &str, plain: &str| {
            if types.len() != blocks {
                return Err(format!("`{key}` has {} values for {blocks} blocks", types.len()));
            }
            types
                .iter()
                .map(|name| match name.as_str() {
                    name if name == cross => Ok(true),
                    name if name == plain => Ok(false),
                    name => Err(format!("`{key}`: {name} is not supported (only {cross} and {plain})")),
                })
                .collect::<Result<Vec<bool>, String>>()
        };
        let mid_block = match self.mid_block_type.as_deref() {
            Some("UNetMidBlock2DCrossAttn") => true,
            None => false,
            Some(other) => return Err(format!("mid_block_type {other} is not supported")),
        };
        // A misnomer that diffusers keeps for old configs: without `num_attention_heads`, `attention_head_dim` is the
        // number of heads.
        let heads = self.num_attention_heads.as_ref().unwrap_or(&self.attention_head_dim);
        let heads = heads.expand(blocks, "attention_head_dim")?;
        for (heads, channels) in heads.iter().zip(&self.block_out_channels) {
            if *heads == 0 || channels % heads != 0 {
                return Err(format!("{channels} channels cannot be split into {heads} heads"));
            }
        }
        Ok(BlockParams {
            channels: self.block_out_channels.clone(),
            layers: self.layers_per_block.expand(blocks, "layers_per_block")?,
            heads,
            context: self.cross_attention_dim.expand(blocks, "cross_attention_dim")?,
            transformer_layers: self
                .transformer_layers_per_block
                .expand(blocks, "transformer_layers_per_block")?,
            down_attention: attention(
                &self.down_block_types,
                "down_block_types",
                "CrossAttnDownBlock2D",
                "DownBlock2D",
            )?,
            up_attention: attention(
                &self.up_block_types,
                "up_block_types",
                "CrossAttnUpBlock2D",
                "UpBlock2D",
            )?,
            mid_block,
        })
    }

    /// Checks the sizes that layers are made of.
    fn check_sizes(&self) -> Result<(), String> {
        let additional = self.additional_embedding()?;
        let additional_sizes = additional.into_iter().flat_map(|widths| {
            [
                ("addition_time_embed_dim", widths.size),
                ("projection_class_embeddings_input_dim", widths.inputs),
            ]
        });
        let single = [
            ("in_channels", self.in_channels),
            ("out_channels", self.out_channels),
            ("norm_num_groups", self.norm_num_groups),
        ];
        let channels = self.block_out_channels.iter();
        let channels = channels.map(|channels| ("block_out_channels", *channels));
        // Of layers there may be none.
        let per_block = [
            ("sample_size", &self.sample_size, 0),
            ("cross_attention_dim", &self.cross_attention_dim, 0),
            ("layers_per_block", &self.layers_per_block, 1),
            ("transformer_layers_per_block", &self.transformer_layers_per_block, 1),
        ];
        let per_block = per_block
            .into_iter()
            .flat_map(|(key, sizes, least)| sizes.values().iter().map(move |size| (key, (*size).max(least))));
        check_sizes(
            single
                .into_iter()
                .chain(channels)
                .chain(per_block)
                .chain(additional_sizes),
        )?;
        // Sinusoids have half of the features, less the shift, as the divisor.
        let widths = self.block_out_channels.first().copied();
        let widths = widths.into_iter().chain(additional.map(|widths| widths.size));
        let half = widths.min().unwrap_or(0) / 2;
        if !self.freq_shift.is_finite() || self.freq_shift >= half as f64 {
            return Err(format!(
                "`freq_shift` is {}, expected less than half of the features of an embedded number, {half}",
                self.freq_shift
            ));
        }
        Ok(())
    }

    fn check_supported(&self) -> Result<(), String> {
        let other = [
            (self.center_input_sample, "center_input_sample"),
            (self.dual_cross_attention, "dual_cross_attention"),
            (self.class_embed_type.is_some(), "class_embed_type"),
            (self.num_class_embeds.is_some(), "num_class_embeds"),
            (
                self.addition_embed_type
                    .as_deref()
                    .is_some_and(|kind| kind != TEXT_TIME),
                "addition_embed_type",
            ),
            (self.encoder_hid_dim.is_some(), "encoder_hid_dim"),
            (self.time_cond_proj_dim.is_some(), "time_cond_proj_dim"),
            (self.time_embedding_dim.is_some(), "time_embedding_dim"),
            (self.time_embedding_act_fn.is_some(), "time_embedding_act_fn"),
            (self.timestep_post_act.is_some(), "timestep_post_act"),
            (
                self.reverse_transformer_layers_per_block.is_some(),
                "reverse_transformer_layers_per_block",
            ),
            (self.encoder_hid_dim_type.is_some(), "encoder_hid_dim_type"),
            (
                self.attention_type.as_deref().is_some_and(|name| name != "default"),
                "attention_type",
            ),
            (self.time_embedding_type != "positional", "time_embedding_type"),
            (self.resnet_time_scale_shift != "default", "resnet_time_scale_shift"),
            (self.resnet_out_scale_factor != 1.0, "resnet_out_scale_factor"),
            (self.mid_block_scale_factor != 1.0, "mid_block_scale_factor"),
            (!matches!(self.act_fn.as_str(), "silu" | "swish"), "act_fn"),
            (
                match &self.only_cross_attention {
                    PerBlock::One(only) => *only,
                    PerBlock::Each(only) => only.contains(&true),
                },
                "only_cross_attention",
            ),
            (
                self.conv_in_kernel.is_multiple_of(2) || self.conv_out_kernel.is_multiple_of(2),
                "an even conv kernel",
            ),
            (
                self.conv_in_kernel.max(self.conv_out_kernel) > MAX_KERNEL,
                "a conv kernel of more than 31 pixels",
            ),
            (self.downsample_padding > 1, "downsample_padding"),
        ];
        match other.iter().find(|(present, _)| *present) {
            Some((_, key)) => Err(format!(
                "this U-Net needs `{key}`, which is not supported: only models like Stable Diffusion 1.x, 2.x and XL work now"
            )),
            None => Ok(()),
        }
    }
}
