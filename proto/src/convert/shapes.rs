//! The shapes of a model.

use crate::v1;
use aitk_common::plan::shapes::{
    BlockShapes, MAX_BLOCKS, MAX_TEXT_ENCODERS, ModelShapes, TextShapes, UNetShapes, VaeShapes,
};

impl From<ModelShapes> for v1::ModelShapes {
    fn from(shapes: ModelShapes) -> Self {
        let ModelShapes { unet, vae, .. } = shapes;
        let blocks = unet.blocks().iter().map(|block| v1::BlockShapes {
            channels: block.channels,
            layers: block.layers,
            heads: block.heads,
            transformer_layers: block.transformer_layers,
            down_attention: block.down_attention,
            up_attention: block.up_attention,
        });
        let text = shapes.text_encoders().map(|text| v1::TextShapes {
            width: text.width,
            intermediate: text.intermediate,
            layers: text.layers,
            heads: text.heads,
            vocabulary: text.vocabulary,
            positions: text.positions,
            projection: text.projection,
        });
        Self {
            unet: Some(v1::UNetShapes {
                in_channels: unet.in_channels,
                out_channels: unet.out_channels,
                conv_in_kernel: unet.conv_in_kernel,
                conv_out_kernel: unet.conv_out_kernel,
                downsample_padding: unet.downsample_padding,
                context: unet.context,
                linear_projection: unet.linear_projection,
                upcast_attention: unet.upcast_attention,
                mid_block: unet.mid_block,
                additional: unet.additional,
                blocks: blocks.collect(),
            }),
            text: text.collect(),
            vae: Some(v1::VaeShapes {
                in_channels: vae.in_channels,
                out_channels: vae.out_channels,
                latent_channels: vae.latent_channels,
                layers: vae.layers,
                channels: vae.channels().to_vec(),
                mid_attention: vae.mid_attention,
                sample_size: vae.sample_size,
            }),
        }
    }
}

/// The shapes, if they are those of a model that the planner can walk. Others, perhaps of a newer version, are ignored: a job
/// without shapes gets the prediction of its family.
pub(super) fn shapes(wire: Option<v1::ModelShapes>) -> Option<ModelShapes> {
    let v1::ModelShapes { unet, text, vae } = wire?;
    let (unet, vae) = (unet?, vae?);
    if unet.blocks.len() > MAX_BLOCKS || text.len() > MAX_TEXT_ENCODERS || vae.channels.len() > MAX_BLOCKS {
        return None;
    }
    let mut blocks = [BlockShapes::default(); MAX_BLOCKS];
    for (block, wire) in blocks.iter_mut().zip(unet.blocks) {
        *block = BlockShapes {
            channels: wire.channels,
            layers: wire.layers,
            heads: wire.heads,
            transformer_layers: wire.transformer_layers,
            down_attention: wire.down_attention,
            up_attention: wire.up_attention,
        };
    }
    let mut encoders = [TextShapes::default(); MAX_TEXT_ENCODERS];
    for (encoder, wire) in encoders.iter_mut().zip(text) {
        *encoder = TextShapes {
            width: wire.width,
            intermediate: wire.intermediate,
            layers: wire.layers,
            heads: wire.heads,
            vocabulary: wire.vocabulary,
            positions: wire.positions,
            projection: wire.projection,
        };
    }
    let mut channels = [0; MAX_BLOCKS];
    channels.iter_mut().zip(vae.channels).for_each(|(to, from)| *to = from);
    ModelShapes {
        unet: UNetShapes {
            in_channels: unet.in_channels,
            out_channels: unet.out_channels,
            conv_in_kernel: unet.conv_in_kernel,
            conv_out_kernel: unet.conv_out_kernel,
            downsample_padding: unet.downsample_padding,
            context: unet.context,
            linear_projection: unet.linear_projection,
            upcast_attention: unet.upcast_attention,
            mid_block: unet.mid_block,
            additional: unet.additional,
            blocks,
        },
        text: encoders,
        vae: VaeShapes {
            in_channels: vae.in_channels,
            out_channels: vae.out_channels,
            latent_channels: vae.latent_channels,
            layers: vae.layers,
            channels,
            mid_attention: vae.mid_attention,
            sample_size: vae.sample_size,
        },
    }
    .checked()
    .map(ModelShapes::without_gaps)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn shapes_survive_the_wire_and_absurd_ones_are_ignored() {
        let block = BlockShapes {
            channels: 320,
            layers: 2,
            heads: 8,
            transformer_layers: 1,
            down_attention: true,
            up_attention: true,
        };
        let mut model = ModelShapes::default();
        model.unet.blocks[0] = block;
        (model.unet.in_channels, model.unet.out_channels, model.unet.context) = (4, 4, 768);
        (model.unet.conv_in_kernel, model.unet.conv_out_kernel) = (3, 3);
        model.text[0] = TextShapes {
            width: 768,
            intermediate: 3072,
            layers: 12,
            heads: 12,
            vocabulary: 49408,
            positions: 77,
            projection: 0,
        };
        (model.vae.in_channels, model.vae.out_channels, model.vae.latent_channels) = (3, 3, 4);
        (model.vae.layers, model.vae.channels[0]) = (2, 128);
        let wire = v1::ModelShapes::from(model);
        assert_eq!(shapes(Some(wire.clone())), Some(model));
        let changed = |change: &dyn Fn(&mut v1::ModelShapes)| {
            let mut wire = wire.clone();
            change(&mut wire);
            shapes(Some(wire))
        };
        assert_eq!(changed(&|wire| wire.text[0].layers = u32::MAX), None);
        assert_eq!(changed(&|wire| wire.text.clear()), None);
        assert_eq!(
            changed(&|wire| wire.unet.as_mut().unwrap().blocks[0].transformer_layers = u32::MAX),
            None
        );
        assert_eq!(
            changed(&|wire| wire.vae.as_mut().unwrap().channels = vec![8; 1000]),
            None
        );
        assert_eq!(changed(&|wire| wire.unet = None), None);
    }
}
