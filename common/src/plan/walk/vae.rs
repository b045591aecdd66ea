//! The steps of the autoencoder, as `engine/src/models/vae`.

use super::block_sequence::BlockSequence;
use super::build::{Builder, LayerSizes};
use super::layers::Layer;
use super::meter::MetaTensor;
use super::norm::Norm;
use super::tape::Walk;
use super::tensors::AttentionOptions;
use super::unet::{Resnet, downsample, norm, norm_silu};
use crate::plan::shapes::VaeShapes;
use std::rc::Rc;

struct Middle {
    resnets: [Resnet; 2],
    attention: Option<(Norm, [Layer; 4])>,
}

impl Middle {
    fn new(b: &mut Builder, name: &str, channels: f64, has_attention: bool) -> Self {
        let attention = has_attention.then(|| {
            let name = format!("{name}.attentions.0");
            let layers = ["to_q", "to_k", "to_v", "to_out.0"]
                .map(|part| b.layer(&format!("{name}.{part}"), LayerSizes::linear(channels, channels, true)));
            (b.norm(&format!("{name}.group_norm"), channels), layers)
        });
        Self {
            resnets: [0, 1].map(|i| Resnet::new(b, &format!("{name}.resnets.{i}"), channels, channels, None)),
            attention,
        }
    }

    fn forward(&self, walk: &Walk, x: &MetaTensor) -> MetaTensor {
        let mut x = self.resnets[0].forward(walk, x, None);
        if let Some((group_norm, [to_q, to_k, to_v, to_out])) = &self.attention {
            let [batch, channels, height, width] = x.dims;
            let h = walk.rearranged(&norm(walk, *group_norm, &x), [batch, height * width, channels, 1.0]);
            let (q, k, v) = (walk.linear(to_q, &h), walk.linear(to_k, &h), walk.linear(to_v, &h));
            let attended = walk.linear(
                to_out,
                &walk.attention(
                    &q,
                    &k,
                    &v,
                    AttentionOptions {
                        heads: 1.0,
                        ..Default::default()
                    },
                ),
            );
            let sum = walk.add(&walk.rearranged(&attended, x.dims), &x);
            drop((h, q, k, v, attended));
            x = sum;
        }
        self.resnets[1].forward(walk, &x, None)
    }
}

/// The encoder or the decoder.
struct Coder {
    conv_in: Layer,
    middle: Middle,
    blocks: Vec<(Vec<Resnet>, Option<Layer>)>,
    norm_out: Norm,
    conv_out: Layer,
}

/// The autoencoder.
pub(in crate::plan) struct Vae {
    encoder: Coder,
    decoder: Rc<Coder>,
    shapes: VaeShapes,
}

impl Vae {
    pub(in crate::plan) fn new(b: &mut Builder, shapes: &VaeShapes) -> Self {
        let channels: Vec<f64> = shapes.channels().iter().map(|c| f64::from(*c)).collect();
        let reversed: Vec<f64> = channels.iter().rev().copied().collect();
        let latent = f64::from(shapes.latent_channels);
        let coder = |b: &mut Builder, is_encoder: bool| {
            let (name, channels) = match is_encoder {
                true => ("encoder", &channels),
                false => ("decoder", &reversed),
            };
            let (first, last) = (channels[0], channels[channels.len() - 1]);
            let count = shapes.layers + u32::from(!is_encoder);
            let mut blocks = Vec::new();
            for (i, outputs) in channels.iter().copied().enumerate() {
                let block = format!("{name}.{}_blocks.{i}", if is_encoder { "down" } else { "up" });
                let previous = channels[i.saturating_sub(1)];
                let resnets = (0..count).map(|j| {
                    let inputs = if j == 0 { previous } else { outputs };
                    Resnet::new(b, &format!("{block}.resnets.{j}"), inputs, outputs, None)
                });
                let resnets = resnets.collect();
                let sampler = (i + 1 < channels.len()).then(|| {
                    let mut sizes = LayerSizes::conv(outputs, outputs, 3.0);
                    let kind = if is_encoder { "downsamplers" } else { "upsamplers" };
                    if is_encoder {
                        (sizes.stride, sizes.padding) = (2.0, 0.0);
                    }
                    b.layer(&format!("{block}.{kind}.0.conv"), sizes)
                });
                blocks.push((resnets, sampler));
            }
            let (inputs, middle, outputs) = match is_encoder {
                true => (f64::from(shapes.in_channels), last, 2.0 * latent),
                false => (latent, first, f64::from(shapes.out_channels)),
            };
            Coder {
                conv_in: b.layer(&format!("{name}.conv_in"), LayerSizes::conv(inputs, first, 3.0)),
                middle: Middle::new(b, &format!("{name}.mid_block"), middle, shapes.mid_attention),
                blocks,
                norm_out: b.norm(&format!("{name}.conv_norm_out"), last),
                conv_out: b.layer(&format!("{name}.conv_out"), LayerSizes::conv(last, outputs, 3.0)),
            }
        };
        Self {
            encoder: coder(b, true),
            decoder: Rc::new(coder(b, false)),
            shapes: *shapes,
        }
    }

    /// Pixels per latent, along each axis.
    pub(in crate::plan) fn scale(&self) -> f64 {
        2f64.powi(self.shapes.channels().len() as i32 - 1)
    }

    /// The largest size that is processed at once, in pixels: of the image, or of a tile.
    fn tile(&self, size: [f64; 2], tiled: bool) -> [f64; 2] {
        // As `MAX_SIDE` of the engine's tiles.
        let largest = f64::from(self.shapes.sample_size).min(512.0).max(4.0 * self.scale());
        match tiled && size.iter().any(|length| *length > largest) {
            true => size.map(|length| length.min(largest)),
            false => size,
        }
    }

    /// Encodes an image of this height and width.
    pub(in crate::plan) fn encode(&self, walk: &Walk, [height, width]: [f64; 2], tiled: bool) {
        let image = walk.tensor([1.0, f64::from(self.shapes.in_channels), height, width], false);
        let [tile_height, tile_width] = self.tile([height, width], tiled);
        let part = match [tile_height, tile_width] == [height, width] {
            true => image.clone(),
            false => walk.tensor([1.0, image.dims[1], tile_height, tile_width], false),
        };
        let side = &self.encoder;
        let mut x = walk.conv(&side.conv_in, &part);
        for (resnets, down) in &side.blocks {
            for resnet in resnets {
                x = resnet.forward(walk, &x, None);
            }
            if let Some(down) = down {
                x = downsample(walk, down, &x);
            }
        }
        let x = side.middle.forward(walk, &x);
        let _moments = walk.conv(&side.conv_out, &norm_silu(walk, side.norm_out, &x));
    }

    /// Decodes an image of this height and width.
    pub(in crate::plan) fn decode(&self, walk: &Walk, [height, width]: [f64; 2], tiled: bool) {
        let [tile_height, tile_width] = self.tile([height, width], tiled);
        let is_tiled = [tile_height, tile_width] != [height, width];
        let channels = f64::from(self.shapes.out_channels);
        // Two rows of tiles, and the rows that are complete.
        let rows = is_tiled.then(|| {
            [
                walk.tensor([1.0, channels, 2.0 * tile_height, width * 4.0 / 3.0], false),
                walk.tensor([1.0, channels, height, width], false),
            ]
        });
        let scale = self.scale();
        let latent = walk.tensor(
            [
                1.0,
                f64::from(self.shapes.latent_channels),
                tile_height / scale,
                tile_width / scale,
            ],
            false,
        );
        let image = self.decode_tile(walk, &latent);
        let (image, rows) = match rows {
            Some([_, rows]) => (walk.tensor([1.0, channels, height, width], false), Some(rows)),
            None => (image, None),
        };
        // The numbers of the image, and its bytes.
        let numbers = walk.floats(image.elements());
        let bytes = walk.floats(image.elements() / 4.0);
        drop((latent, rows, numbers, bytes));
    }

    fn decode_tile(&self, walk: &Walk, latent: &MetaTensor) -> MetaTensor {
        let side = &self.decoder;
        let mut x = side.through_middle(walk, latent);
        for index in 0..side.blocks.len() {
            x = side.through_block(walk, index, x);
        }
        side.to_image(walk, &x)
    }

    /// Decodes latents for a loss that compares pixels. The tiles of an image are one after another in the tape.
    pub(in crate::plan) fn decode_with_gradients(
        &self,
        walk: &Walk,
        latents: &MetaTensor,
        tiled: bool,
        checkpointed: bool,
    ) -> Option<MetaTensor> {
        let scale = self.scale();
        let [batch, _, height, width] = latents.dims;
        let size = [height * scale, width * scale];
        let [tile_height, tile_width] = self.tile(size, tiled);
        let is_tiled = [tile_height, tile_width] != size;
        // Tiles overlap by a quarter.
        let count = |whole: f64, tile: f64| {
            if is_tiled {
                (whole / (0.75 * tile)).ceil().max(1.0)
            } else {
                1.0
            }
        };
        let tile = [batch, latents.dims[1], tile_height / scale, tile_width / scale];
        let mut image: Option<MetaTensor> = None;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let tiles = (count(size[0], tile_height) * count(size[1], tile_width)).min(64.0) as usize;
        for _ in 0..tiles {
            let part = match is_tiled {
                true => walk.rearranged(latents, tile),
                false => latents.clone(),
            };
            let part = self.decode_in_blocks(walk, part, checkpointed)?;
            let whole = walk.rearranged(&part, [batch, f64::from(self.shapes.out_channels), size[0], size[1]]);
            image = Some(match (is_tiled, image) {
                (false, _) => part,
                (true, Some(image)) => walk.add(&image, &whole),
                (true, None) => whole,
            });
        }
        image
    }

    fn decode_in_blocks(&self, walk: &Walk, latents: MetaTensor, checkpointed: bool) -> Option<MetaTensor> {
        let mut sequence = BlockSequence::default();
        let x = sequence.input(latents);
        let side = Rc::clone(&self.decoder);
        let mut x = sequence.add(&[x], move |walk, inputs| side.through_middle(walk, &inputs[0]));
        for index in 0..self.decoder.blocks.len() {
            let side = Rc::clone(&self.decoder);
            x = sequence.add(&[x], move |walk, inputs| {
                side.through_block(walk, index, inputs[0].clone())
            });
        }
        let side = Rc::clone(&self.decoder);
        let image = sequence.add(&[x], move |walk, inputs| side.to_image(walk, &inputs[0]));
        sequence.run(walk, checkpointed, image)
    }
}

/// The steps of a decoder.
impl Coder {
    fn through_middle(&self, walk: &Walk, latents: &MetaTensor) -> MetaTensor {
        let first = walk.conv(&self.conv_in, latents);
        self.middle.forward(walk, &first)
    }

    fn through_block(&self, walk: &Walk, index: usize, mut x: MetaTensor) -> MetaTensor {
        let Some((resnets, up)) = self.blocks.get(index) else {
            return x;
        };
        for resnet in resnets {
            x = resnet.forward(walk, &x, None);
        }
        match up {
            Some(up) => {
                let [batch, channels, height, width] = x.dims;
                walk.conv(up, &walk.upsampled(&x, [batch, channels, 2.0 * height, 2.0 * width]))
            }
            None => x,
        }
    }

    fn to_image(&self, walk: &Walk, x: &MetaTensor) -> MetaTensor {
        walk.conv(&self.conv_out, &norm_silu(walk, self.norm_out, x))
    }
}
