//! The shapes of a model.

use crate::v1;
use aitk_common::plan::shapes::{
    BlockShapes, LanguageKind, LanguageShapes, MAX_BLOCKS, MAX_TEXT_ENCODERS, ModelShapes, TextShapes, TransformerKind,
    TransformerShapes, UNetShapes, VaeShapes,
};

/// The kinds of transformers and language models, by their names on the wire.
const TRANSFORMERS: [(&str, TransformerKind); 4] = [
    ("chroma", TransformerKind::Chroma),
    ("flux", TransformerKind::Flux),
    ("sd3", TransformerKind::Sd3),
    ("zimage", TransformerKind::ZImage),
];
const LANGUAGE_MODELS: [(&str, LanguageKind); 3] = [
    ("t5", LanguageKind::T5),
    ("qwen3", LanguageKind::Qwen3),
    ("decoder", LanguageKind::Decoder),
];

/// The name of a kind; `None` for a component that does not exist.
fn name_of<K: PartialEq>(kinds: &[(&str, K)], kind: &K) -> Option<String> {
    let found = kinds.iter().find(|(_, known)| known == kind)?;
    Some(found.0.to_owned())
}

/// The kind of this name.
fn kind_of<K: Copy>(kinds: &[(&str, K)], name: &str) -> Option<K> {
    let found = kinds.iter().find(|(known, _)| *known == name)?;
    Some(found.1)
}

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
        let unet = (!shapes.has_transformer()).then(|| v1::UNetShapes {
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
        });
        let transformer = shapes.transformer;
        let transformer = name_of(&TRANSFORMERS, &transformer.kind).map(|kind| v1::TransformerShapes {
            kind,
            in_channels: transformer.in_channels,
            patch: transformer.patch,
            blocks: transformer.blocks,
            single_blocks: transformer.single_blocks,
            dual_blocks: transformer.dual_blocks,
            heads: transformer.heads,
            head_width: transformer.head_width,
            context: transformer.context,
            pooled: transformer.pooled,
            guidance: transformer.guidance,
            qk_norm: transformer.qk_norm,
            positions: transformer.positions,
            approximator_layers: transformer.approximator_layers,
            approximator_width: transformer.approximator_width,
            short_prompts: transformer.short_prompts,
        });
        let language = wire_language_shapes(&shapes.language);
        Self {
            unet,
            transformer,
            language,
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
    let v1::ModelShapes {
        unet,
        text,
        vae,
        transformer,
        language,
    } = wire?;
    let transformer = match transformer {
        Some(wire) => transformer_shapes(&wire)?,
        None => TransformerShapes::default(),
    };
    let language = match language {
        Some(wire) => language_shapes(&wire)?,
        None => LanguageShapes::default(),
    };
    let unet = match transformer.kind {
        TransformerKind::None => unet?,
        _ => v1::UNetShapes::default(),
    };
    let vae = vae?;
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
        transformer,
        language,
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

/// `None`: of another kind.
fn transformer_shapes(wire: &v1::TransformerShapes) -> Option<TransformerShapes> {
    Some(TransformerShapes {
        kind: kind_of(&TRANSFORMERS, &wire.kind)?,
        in_channels: wire.in_channels,
        patch: wire.patch,
        blocks: wire.blocks,
        single_blocks: wire.single_blocks,
        dual_blocks: wire.dual_blocks,
        heads: wire.heads,
        head_width: wire.head_width,
        context: wire.context,
        pooled: wire.pooled,
        guidance: wire.guidance,
        qk_norm: wire.qk_norm,
        positions: wire.positions,
        approximator_layers: wire.approximator_layers,
        approximator_width: wire.approximator_width,
        short_prompts: wire.short_prompts,
    })
}

/// `None`: there is no language model.
pub(super) fn wire_language_shapes(language: &LanguageShapes) -> Option<v1::LanguageShapes> {
    name_of(&LANGUAGE_MODELS, &language.kind).map(|kind| v1::LanguageShapes {
        kind,
        width: language.width,
        heads: language.heads,
        kv_heads: language.kv_heads,
        head_width: language.head_width,
        intermediate: language.intermediate,
        layers: language.layers,
        vocabulary: language.vocabulary,
        positions: language.positions,
        window: language.window,
        learned_positions: language.learned_positions,
        gated: language.gated,
        untied: language.untied,
    })
}

/// The shapes of a decoder, if they are within the limits of known models.
pub(super) fn decoder(wire: Option<v1::LanguageShapes>) -> Option<LanguageShapes> {
    language_shapes(&wire?)?.checked_decoder()
}

/// `None`: of another kind.
fn language_shapes(wire: &v1::LanguageShapes) -> Option<LanguageShapes> {
    Some(LanguageShapes {
        kind: kind_of(&LANGUAGE_MODELS, &wire.kind)?,
        width: wire.width,
        heads: wire.heads,
        kv_heads: wire.kv_heads,
        head_width: wire.head_width,
        intermediate: wire.intermediate,
        layers: wire.layers,
        vocabulary: wire.vocabulary,
        positions: wire.positions,
        window: wire.window,
        learned_positions: wire.learned_positions,
        gated: wire.gated,
        untied: wire.untied,
    })
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

    #[test]
    fn shapes_of_transformers_survive_the_wire_and_those_of_unknown_kinds_are_ignored() {
        let mut model = ModelShapes {
            transformer: TransformerShapes {
                kind: TransformerKind::Sd3,
                in_channels: 16,
                patch: 2,
                blocks: 24,
                dual_blocks: 13,
                heads: 24,
                head_width: 64,
                context: 4096,
                pooled: 2048,
                qk_norm: true,
                positions: 384,
                ..TransformerShapes::default()
            },
            language: LanguageShapes {
                kind: LanguageKind::T5,
                width: 4096,
                heads: 64,
                kv_heads: 64,
                head_width: 64,
                intermediate: 10_240,
                layers: 24,
                vocabulary: 32_128,
                ..LanguageShapes::default()
            },
            ..ModelShapes::default()
        };
        (model.vae.in_channels, model.vae.out_channels, model.vae.latent_channels) = (3, 3, 16);
        (model.vae.layers, model.vae.channels[0]) = (2, 128);
        let wire = v1::ModelShapes::from(model);
        assert_eq!(wire.unet, None);
        assert_eq!(shapes(Some(wire.clone())), Some(model));
        let mut chroma = model;
        chroma.transformer = TransformerShapes {
            kind: TransformerKind::Chroma,
            dual_blocks: 0,
            pooled: 0,
            positions: 0,
            approximator_layers: 5,
            approximator_width: 5120,
            short_prompts: true,
            ..model.transformer
        };
        assert_eq!(shapes(Some(v1::ModelShapes::from(chroma))), Some(chroma));
        let mut unknown = wire.clone();
        unknown.transformer.as_mut().unwrap().kind = "mmdit9".to_owned();
        assert_eq!(shapes(Some(unknown)), None);
        let mut absurd = wire;
        absurd.transformer.as_mut().unwrap().blocks = u32::MAX;
        assert_eq!(shapes(Some(absurd)), None);
    }
}
