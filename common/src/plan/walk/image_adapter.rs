//! Networks beside a U-Net that condition it on images, as `engine/src/models/t2i_adapter.rs` and `models/unet/control_net.rs`.

use super::block_sequence::BlockSequence;
use super::build::{Builder, LayerSizes};
use super::layers::Layer;
use super::meter::MetaTensor;
use super::tape::Walk;
use super::tensors::Activation;
use super::unet::{Conditioning, Down, Residuals, embedded};
use crate::plan::shapes::UNetShapes;
use std::rc::Rc;

/// Channels of the embedding of control images of a ControlNet.
const EMBEDDING_CHANNELS: [f64; 4] = [16.0, 32.0, 96.0, 256.0];

/// The adapter of a job.
#[derive(Clone, Debug)]
pub(in crate::plan) enum ImageAdapterOptions {
    T2i(T2iOptions),
    ControlNet,
}

/// The keys of a T2I-Adapter.
#[derive(Clone, Debug)]
pub(in crate::plan) struct T2iOptions {
    pub(in crate::plan) channels: Vec<f64>,
    pub(in crate::plan) resnets: usize,
    pub(in crate::plan) factor: f64,
    pub(in crate::plan) network: T2iKind,
}

/// The network of a T2I-Adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::plan) enum T2iKind {
    Full,
    FullXl,
    Light,
}

/// A network beside a U-Net. It computes in float32.
pub(in crate::plan) enum ImageAdapter {
    T2i(T2i),
    ControlNet(Box<ControlNet>),
}

impl ImageAdapter {
    /// `scale`: pixels of an image for each latent, along each axis.
    pub(in crate::plan) fn new(b: &mut Builder, options: &ImageAdapterOptions, unet: &UNetShapes, scale: f64) -> Self {
        match options {
            ImageAdapterOptions::T2i(options) => Self::T2i(T2i::new(b, options)),
            ImageAdapterOptions::ControlNet => Self::ControlNet(Box::new(ControlNet::new(b, unet, scale))),
        }
    }

    /// What is added to the features of the U-Net for latents [batch, channels, height, width] and the encoded text.
    pub(in crate::plan) fn forward(
        &self,
        walk: &Walk,
        latents: &MetaTensor,
        text: &MetaTensor,
        (scale, checkpointed): (f64, bool),
    ) -> Residuals {
        // A walk has one width: numbers in float32 count as more items where the U-Net computes in 16 bits.
        let wide = |dims: [f64; 4]| [dims[0] * 4.0 / walk.backend.width, dims[1], dims[2], dims[3]];
        let [batch, _, height, width] = latents.dims;
        let images = walk.tensor(wide([batch, 3.0, height * scale, width * scale]), false);
        match self {
            Self::T2i(adapter) => adapter.forward(walk, &images),
            Self::ControlNet(net) => {
                let latents = walk.tensor(wide(latents.dims), false);
                let text = walk.tensor(wide(text.dims), false);
                net.forward(walk, [&images, &latents, &text], checkpointed)
                    .unwrap_or_default()
            }
        }
    }
}

struct Block {
    halves: bool,
    in_conv: Option<Layer>,
    resnets: Vec<[Layer; 2]>,
    out_conv: Option<Layer>,
}

/// A T2I-Adapter.
pub(in crate::plan) struct T2i {
    factor: f64,
    conv_in: Option<Layer>,
    blocks: Vec<Block>,
}

impl T2i {
    fn new(b: &mut Builder, options: &T2iOptions) -> Self {
        let channels = &options.channels;
        let at = |i: usize| channels.get(i).copied().unwrap_or(0.0);
        let before = |i: usize| at(i.saturating_sub(1));
        let (count, is_light) = (channels.len(), options.network == T2iKind::Light);
        let pixels = 3.0 * options.factor * options.factor;
        let sizes = |i: usize| match options.network {
            T2iKind::Full => (before(i), at(i), i > 0),
            T2iKind::FullXl if matches!(i, 1 | 2) => (before(i), at(i), i == 2),
            T2iKind::FullXl => (at(i), at(i), false),
            T2iKind::Light if i == 0 => (pixels, at(0), false),
            T2iKind::Light if i == count => (before(i), before(i), true),
            T2iKind::Light => (before(i), at(i), true),
        };
        let conv_in = (!is_light).then(|| b.layer("adapter.conv_in", LayerSizes::conv(pixels, at(0), 3.0)));
        let blocks = (0..count + usize::from(is_light)).map(|i| {
            let (inputs, outputs, halves) = sizes(i);
            let (width, kernel) = match is_light {
                true => ((outputs / 4.0).floor(), 3.0),
                false => (outputs, 1.0),
            };
            let name = format!("adapter.body.{i}");
            let in_conv = (is_light || inputs != outputs)
                .then(|| b.layer(&format!("{name}.in_conv"), LayerSizes::conv(inputs, width, 1.0)));
            let resnets = (0..options.resnets).map(|j| {
                let name = format!("{name}.resnets.{j}");
                [("block1", 3.0), ("block2", kernel)]
                    .map(|(part, kernel)| b.layer(&format!("{name}.{part}"), LayerSizes::conv(width, width, kernel)))
            });
            let resnets = resnets.collect();
            Block {
                halves,
                in_conv,
                resnets,
                out_conv: is_light.then(|| b.layer(&format!("{name}.out_conv"), LayerSizes::conv(width, outputs, 1.0))),
            }
        });
        let blocks = blocks.collect();
        Self {
            factor: options.factor,
            conv_in,
            blocks,
        }
    }

    fn forward(&self, walk: &Walk, images: &MetaTensor) -> Residuals {
        let [batch, channels, height, width] = images.dims;
        let side = |side: f64| (side / self.factor).floor().max(1.0);
        let mut x = walk.tensor(
            [batch, channels * self.factor * self.factor, side(height), side(width)],
            false,
        );
        if let Some(conv) = &self.conv_in {
            x = walk.conv(conv, &x);
        }
        let mut features = Vec::new();
        for block in &self.blocks {
            if block.halves {
                let [batch, channels, height, width] = x.dims;
                x = walk.rearranged(&x, [batch, channels, (height / 2.0).ceil(), (width / 2.0).ceil()]);
            }
            if let Some(conv) = &block.in_conv {
                x = walk.conv(conv, &x);
            }
            for [first, second] in &block.resnets {
                let h = walk.activation(&walk.conv(first, &x), Activation::Silu);
                x = walk.add(&walk.conv(second, &h), &x);
            }
            if let Some(conv) = &block.out_conv {
                x = walk.conv(conv, &x);
            }
            features.push(x.clone());
        }
        Residuals {
            in_blocks: features,
            ..Residuals::default()
        }
    }
}

/// A ControlNet.
pub(in crate::plan) struct ControlNet {
    conv_in: Layer,
    time: [Layer; 2],
    additional: Option<[Layer; 2]>,
    image: Vec<Layer>,
    down: Down,
    skip_convs: Vec<Rc<Layer>>,
    mid_conv: Layer,
}

impl ControlNet {
    fn new(b: &mut Builder, shapes: &UNetShapes, scale: f64) -> Self {
        let blocks = shapes.blocks();
        let first = f64::from(blocks[0].channels);
        let down = Down::new(b, shapes);
        let time = 4.0 * first;
        let pair = |b: &mut Builder, name: &str, inputs: f64| {
            [("linear_1", inputs), ("linear_2", time)]
                .map(|(part, inputs)| b.layer(&format!("{name}.{part}"), LayerSizes::linear(inputs, time, true)))
        };
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let steps = scale.max(1.0).log2().floor() as usize;
        let channels: Vec<f64> = (0..=steps)
            .map(|i| EMBEDDING_CHANNELS.get(i).copied().unwrap_or(EMBEDDING_CHANNELS[3]))
            .collect();
        let mut image = vec![b.layer("image.conv_in", LayerSizes::conv(3.0, channels[0], 3.0))];
        for pair in channels.windows(2) {
            image.push(b.layer("image.same", LayerSizes::conv(pair[0], pair[0], 3.0)));
            let halving = LayerSizes {
                stride: 2.0,
                ..LayerSizes::conv(pair[0], pair[1], 3.0)
            };
            image.push(b.layer("image.halved", halving));
        }
        image.push(b.layer("image.conv_out", LayerSizes::conv(channels[steps], first, 3.0)));
        let mut of_skips = vec![first];
        for (i, block) in blocks.iter().enumerate() {
            let count = block.layers as usize + usize::from(i + 1 < blocks.len());
            of_skips.extend(std::iter::repeat_n(f64::from(block.channels), count));
        }
        let middle = f64::from(blocks[blocks.len() - 1].channels);
        let one = |b: &mut Builder, channels: f64| b.layer("skip", LayerSizes::conv(channels, channels, 1.0));
        Self {
            conv_in: b.layer("conv_in", LayerSizes::conv(f64::from(shapes.in_channels), first, 3.0)),
            time: pair(b, "time_embedding", first),
            additional: (shapes.additional > 0).then(|| pair(b, "add_embedding", f64::from(shapes.additional))),
            image,
            down,
            skip_convs: of_skips.into_iter().map(|channels| Rc::new(one(b, channels))).collect(),
            mid_conv: one(b, middle),
        }
    }

    fn forward(&self, walk: &Walk, [images, latents, text]: [&MetaTensor; 3], checkpointed: bool) -> Option<Residuals> {
        let batch = latents.dims[0];
        let mut embedded_image = images.clone();
        let last = self.image.len() - 1;
        for (i, conv) in self.image.iter().enumerate() {
            embedded_image = walk.conv(conv, &embedded_image);
            if i < last {
                embedded_image = walk.activation(&embedded_image, Activation::Silu);
            }
        }
        let mut time = embedded(walk, &self.time, batch);
        if let Some(additional) = &self.additional {
            time = walk.add(&time, &embedded(walk, additional, batch));
        }
        let first = walk.conv(&self.conv_in, latents);
        let x = walk.add(&first, &embedded_image);
        drop((first, embedded_image));
        let size = [x.dims[2], x.dims[3]];
        let mut sequence = BlockSequence::default();
        let mut skips = vec![(sequence.input(x), size)];
        let c = Conditioning {
            time: sequence.input(time),
            context: sequence.input(text.clone()),
        };
        self.down
            .add_blocks(&mut sequence, &mut skips, c, &mut std::iter::empty())?;
        let middle = self.down.add_middle(&mut sequence, skips.last()?.0, c);
        let mut results = Vec::new();
        for ((skip, _), conv) in skips.iter().zip(&self.skip_convs) {
            let conv = Rc::clone(conv);
            results.push(sequence.add(&[*skip], move |walk, inputs| walk.conv(&conv, &inputs[0])));
        }
        let conv = self.mid_conv.clone();
        results.push(sequence.add(&[middle], move |walk, inputs| walk.conv(&conv, &inputs[0])));
        let mut skips = sequence.run_all(walk, checkpointed, &results)?;
        let middle = skips.pop();
        Some(Residuals {
            in_blocks: Vec::new(),
            skips,
            middle,
        })
    }
}
