//! Identifies single files by the names and shapes of their tensors.
//!
//! The names are those of the families' published checkpoints: the first releases of Stable Diffusion (`ldm`), Stability's
//! `generative-models` (SDXL, SD 3), Black Forest Labs' `flux`, Wan-Video's `Wan2.1`, Lightricks' LTX, and what diffusers
//! writes.

use super::family::{Family, ModelFileKind};
use super::inventory::TensorShapes;
use crate::job::arch::ArchName;
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::Bound;

/// Prefixes of the denoiser's tensors in whole checkpoints, and in files of some trainers.
const PREFIXES: [&str; 4] = ["model.diffusion_model.", "diffusion_model.", "model.model.", "net."];

const SD2: Family = Family::of("Stable Diffusion 2.x", ArchName::Sd2);
const SD1: Family = Family::of("Stable Diffusion 1.x", ArchName::Sd1);

/// The tensors of a denoiser without their common prefix.
struct Names<'a> {
    prefix: &'a str,
    shapes: BTreeMap<&'a str, &'a [u64]>,
}

impl<'a> Names<'a> {
    fn of(weights: &'a TensorShapes) -> Self {
        let begins = |prefix: &&&str| weights.shapes.keys().any(|name| name.starts_with(**prefix));
        let prefix = PREFIXES.iter().find(begins).copied().unwrap_or_default();
        let shapes = weights
            .shapes
            .iter()
            .filter_map(|(name, shape)| Some((name.strip_prefix(prefix)?, shape.as_slice())));
        Self {
            prefix,
            shapes: shapes.collect(),
        }
    }

    /// The first tensor whose name has this prefix.
    fn first(&self, prefix: &str) -> Option<&'a str> {
        let from = (Bound::Included(prefix), Bound::Unbounded);
        let (name, _) = self.shapes.range::<str, _>(from).next()?;
        name.starts_with(prefix).then_some(*name)
    }

    fn has(&self, prefix: &str) -> bool {
        self.first(prefix).is_some()
    }

    fn dim(&self, name: &str, axis: usize) -> Option<u64> {
        self.shapes.get(name)?.get(axis).copied()
    }

    /// The first tensor whose name has this suffix, with one of its dimensions.
    fn ending(&self, end: &str, axis: usize) -> Option<(&'a str, u64)> {
        let found = self.shapes.iter().find(|(name, _)| name.ends_with(end))?;
        Some((found.0, *found.1.get(axis)?))
    }

    fn quoted(&self, name: &str) -> String {
        format!("`{}{name}`", self.prefix)
    }
}

/// Identifies a weights file.
pub(super) fn of_file(file: &str, weights: &TensorShapes) -> ModelFileKind {
    if let Some((what, name)) = adapter(weights) {
        return ModelFileKind::Other {
            what: what.to_owned(),
            evidence: format!("{file} has `{name}`"),
        };
    }
    let names = Names::of(weights);
    let found = unet(&names, weights).or_else(|| transformer(&names));
    if let Some((family, why)) = found {
        let missing = match family.arch {
            Some(arch @ (ArchName::Sd1 | ArchName::Sd2 | ArchName::Sdxl)) => missing_components(arch, weights),
            _ => Vec::new(),
        };
        return ModelFileKind::Model {
            family,
            evidence: format!("{file} has {why}"),
            missing,
        };
    }
    if let Some((family, kind)) = weights.architecture.as_deref().and_then(gguf_family) {
        let evidence = format!("{file} says `general.architecture: {kind}`");
        return match family {
            Some(family) => ModelFileKind::Model {
                family,
                evidence,
                missing: Vec::new(),
            },
            None => ModelFileKind::Other {
                what: "a language model".to_owned(),
                evidence,
            },
        };
    }
    if let Some((what, name)) = single_component(weights) {
        return ModelFileKind::Other {
            what: what.to_owned(),
            evidence: format!("{file} has `{name}` and no U-Net or transformer"),
        };
    }
    ModelFileKind::Unknown {
        evidence: match weights.shapes.keys().next() {
            Some(name) => format!(
                "{file} has {} tensors of no known family, such as `{name}`",
                weights.shapes.len()
            ),
            None => format!("{file} has no tensors"),
        },
    }
}

/// Suffixes of tensor names in adapters, and the kind of adapter.
const ADAPTERS: [(&str, &str); 18] = [
    (".lora_down.weight", "a LoRA"),
    (".lora_up.weight", "a LoRA"),
    (".lora_A.weight", "a LoRA"),
    (".lora_B.weight", "a LoRA"),
    (".lora_embedding_A", "a LoRA"),
    (".lora_embedding_B", "a LoRA"),
    (".lora.down.weight", "a LoRA"),
    // Early diffusers, and XLabs for FLUX.1.
    ("_lora.down.weight", "a LoRA"),
    ("_lora.up.weight", "a LoRA"),
    ("_lora1.down.weight", "a LoRA"),
    ("_lora1.up.weight", "a LoRA"),
    ("_lora2.down.weight", "a LoRA"),
    ("_lora2.up.weight", "a LoRA"),
    (".lokr_w1", "a LoKr"),
    (".lokr_w1_a", "a LoKr"),
    (".hada_w1_a", "a LoHa"),
    (".oft_blocks", "an OFT"),
    (".oft_diag", "an OFT"),
];

/// Whether the `what` of a [`super::ModelFileKind::Other`] is a kind of adapter.
#[must_use]
pub fn is_adapter(what: &str) -> bool {
    ADAPTERS.iter().any(|(_, adapter)| *adapter == what)
}

/// Identifies adapters by tensor names that no base model has.
fn adapter(weights: &TensorShapes) -> Option<(&'static str, &str)> {
    for name in weights.shapes.keys() {
        if let Some((_, what)) = ADAPTERS.iter().find(|(end, _)| name.ends_with(end)) {
            return Some((what, name));
        }
        if name.starts_with("ip_adapter.") || name.starts_with("image_proj.") {
            return Some(("an IP-Adapter", name));
        }
        if name.starts_with("control_model.") || name.starts_with("controlnet_cond_embedding.") {
            return Some(("a ControlNet", name));
        }
        if name.starts_with("adapter.body.") || name.starts_with("adapter.conv_in.") {
            return Some(("a T2I adapter", name));
        }
        if name == "emb_params" || name == "string_to_param" {
            return Some(("a textual inversion", name));
        }
    }
    None
}

/// Identifies U-Nets with tensor names of the original release (`ldm`) or of diffusers.
fn unet(names: &Names<'_>, weights: &TensorShapes) -> Option<(Family, String)> {
    let ldm = names.has("input_blocks.") && names.has("output_blocks.");
    let diffusers = names.has("down_blocks.") && names.has("up_blocks.") && names.has("time_embedding.");
    if !ldm && !diffusers {
        return None;
    }
    let temporal = names
        .shapes
        .keys()
        .find(|name| name.contains(".time_stack.") || name.contains(".time_mixer."));
    if let Some(name) = temporal {
        return Some((Family::without_arch("Stable Video Diffusion"), names.quoted(name)));
    }
    let (name, context) = names.ending("attn2.to_k.weight", 1)?;
    let depth = |level: &str| {
        let blocks = names.shapes.keys().filter_map(|name| {
            let (_, rest) = name.strip_prefix(level)?.split_once("transformer_blocks.")?;
            rest.split('.').next()?.parse::<u64>().ok()
        });
        blocks.max().map(|last| last.saturating_add(1))
    };
    let xl = names.has("label_emb.") || names.has("add_embedding.");
    let depth = depth("input_blocks.7.").or_else(|| depth("down_blocks.2."));
    let projection = names.shapes.iter().find(|(name, _)| name.ends_with(".proj_in.weight"));
    let linear = projection.is_some_and(|(_, shape)| shape.len() == 2);
    let mut family = unet_family(context, xl && context != 1024, depth, linear);
    if names.has("encoder_hid_proj.") && context == 2048 {
        family = Family::without_arch("Kolors");
    }
    let inputs = names
        .dim("input_blocks.0.0.weight", 1)
        .or_else(|| names.dim("conv_in.weight", 1));
    if let Some(variant) = input_variant(inputs) {
        family = family.with_variant(variant);
    }
    let mut why = format!("{} with a context of {context}", names.quoted(name));
    if let Some(embedder) = weights
        .shapes
        .keys()
        .find(|name| name.starts_with("conditioner.embedders.1."))
    {
        why = format!("`{embedder}`, and {why}");
    }
    if family.variant.is_some()
        && let Some(inputs) = inputs
    {
        why += &format!(" and {inputs} input channels");
    }
    Some((family, why))
}

/// Identifies a U-Net's family by its cross-attention dimension, by whether it has size conditioning (`label_emb`), by the
/// number of transformer blocks of its third level, and by whether the projections of its transformers are linear layers.
pub(super) fn unet_family(context: u64, xl: bool, depth: Option<u64>, linear: bool) -> Family {
    let sdxl = Family::of("Stable Diffusion XL", ArchName::Sdxl);
    match (context, xl) {
        (1024, false) => SD2,
        (1280, _) => sdxl.with_variant("refiner"),
        (2048, _) => match depth {
            Some(4) => Family::of("SSD-1B", ArchName::Ssd),
            Some(2) => Family::of("Segmind Vega", ArchName::Vega),
            _ => sdxl,
        },
        // Custom models of other sizes; loading checks that they match their config.
        (_, true) => sdxl,
        (768, false) => SD1,
        (_, false) if linear => SD2,
        _ => SD1,
    }
}

/// The number of transformer blocks of the third level, as `transformer_layers_per_block` has it.
pub(super) fn deepest_level(value: &Value) -> u64 {
    match value {
        Value::Array(levels) => levels.last().map_or(1, deepest_level),
        other => other.as_u64().unwrap_or(1),
    }
}

/// The variant of a U-Net with extra input channels.
pub(super) fn input_variant(channels: Option<u64>) -> Option<&'static str> {
    match channels? {
        5 => Some("depth to image"),
        7 => Some("upscaler"),
        8 => Some("InstructPix2Pix"),
        9 => Some("inpainting"),
        _ => None,
    }
}

/// The required components that a single file of a Stable Diffusion family lacks.
fn missing_components(arch: ArchName, weights: &TensorShapes) -> Vec<&'static str> {
    let has = |prefix: &str| weights.shapes.keys().any(|name| name.starts_with(prefix));
    let vae = ("first_stage_model.", "VAE (`first_stage_model.…`)");
    let parts: &[(&str, &str)] = match arch {
        ArchName::Sdxl => &[
            (
                "conditioner.embedders.0.",
                "first text encoder (`conditioner.embedders.0.…`)",
            ),
            (
                "conditioner.embedders.1.",
                "second text encoder (`conditioner.embedders.1.…`)",
            ),
            vae,
        ],
        _ => &[("cond_stage_model.", "text encoder (`cond_stage_model.…`)"), vae],
    };
    parts
        .iter()
        .filter(|(prefix, _)| !has(prefix))
        .map(|(_, what)| *what)
        .collect()
}

/// Identifies transformers.
fn transformer(names: &Names<'_>) -> Option<(Family, String)> {
    let quoted = |name: &str| names.quoted(name);
    let found = |family: Family, prefix: &str| Some((family, quoted(names.first(prefix).unwrap_or(prefix))));
    let wide =
        |family: Family, name: &str, width: u64| Some((family, format!("{} with a width of {width}", quoted(name))));

    if names.has("joint_blocks.0.") {
        return found(Family::of("Stable Diffusion 3", ArchName::Sd3), "joint_blocks.0.");
    }
    if names.has("txt_in.individual_token_refiner.") {
        return found(Family::without_arch("HunyuanVideo"), "txt_in.individual_token_refiner.");
    }
    if names.has("double_stream_modulation_img.") {
        return found(Family::of("FLUX.2", ArchName::Flux2), "double_stream_modulation_img.");
    }
    if names.has("double_blocks.0.") {
        if names.has("nerf_blocks.") {
            return found(Family::of("Chroma Radiance", ArchName::ChromaRadiance), "nerf_blocks.");
        }
        if names.has("distilled_guidance_layer.") {
            return found(Family::of("Chroma", ArchName::Chroma), "distilled_guidance_layer.");
        }
        let flux = Family::of("FLUX.1", ArchName::Flux);
        let kind = match names.dim("img_in.weight", 1) {
            Some(384) => flux.with_variant("Fill"),
            Some(128) => flux.with_variant("control"),
            Some(196) => Family::of("Flex.2", ArchName::Flex2),
            _ => flux,
        };
        let guidance = match names.has("guidance_in.") {
            true => "as dev has it",
            false => "without `guidance_in`, as schnell has it",
        };
        let (family, name) = found(kind, "double_blocks.0.img_attn")?;
        return Some((family, format!("{name}, {guidance}")));
    }
    if names.has("single_transformer_blocks.0.") && names.has("transformer_blocks.0.") {
        if names.has("double_stream_modulation") {
            return found(Family::of("FLUX.2", ArchName::Flux2), "double_stream_modulation");
        }
        if names.has("distilled_guidance_layer.") {
            return found(Family::of("Chroma", ArchName::Chroma), "distilled_guidance_layer.");
        }
        return found(Family::of("FLUX.1", ArchName::Flux), "single_transformer_blocks.0.");
    }
    if let Some(side) = names.dim("cap_embedder.1.weight", 0) {
        // Lumina Image 2 has the same blocks, and no padding tokens.
        let family = match side {
            3840 => Family::of("Z-Image", ArchName::Zimage),
            _ if names.has("cap_pad_token") => Family::of("Z-Image", ArchName::Zimage),
            _ => Family::of("Lumina Image 2", ArchName::Lumina2),
        };
        let family = match names.has("siglip_embedder.") {
            true => family.with_variant("Omni"),
            false => family,
        };
        return wide(family, "cap_embedder.1.weight", side);
    }
    if names.has("time_caption_embed.") {
        return found(Family::of("OmniGen2", ArchName::Omnigen2), "time_caption_embed.");
    }
    if names.has("head.modulation") && names.has("blocks.0.self_attn.")
        || names.has("condition_embedder.text_embedder.")
    {
        return wan(names);
    }
    if names.has("audio_adaln_single.") || names.has("transformer_blocks.0.audio_attn1.") {
        let name = names
            .first("audio_adaln_single.")
            .or_else(|| names.first("transformer_blocks.0.audio_attn1."));
        return Some((Family::of("LTX-2", ArchName::Ltx2), quoted(name.unwrap_or_default())));
    }
    if names.has("txt_norm.") && names.has("transformer_blocks.0.") {
        return found(Family::of("Qwen-Image", ArchName::QwenImage), "txt_norm.");
    }
    if names.has("t_block.1.") {
        return found(Family::of("PixArt", ArchName::Pixart), "t_block.1.");
    }
    if names.has("patchify_proj.") || names.has("adaln_single.") {
        return match names.has("patchify_proj.") || names.has("transformer_blocks.27.") && names.has("proj_in.") {
            true => found(Family::without_arch("LTX-Video"), "adaln_single."),
            false => found(Family::of("PixArt", ArchName::Pixart), "adaln_single."),
        };
    }
    if names.has("double_stream_blocks.0.") {
        return found(Family::of("HiDream I1", ArchName::Hidream), "double_stream_blocks.0.");
    }
    if names.has("double_layers.0.") || names.has("joint_transformer_blocks.0.") {
        let name = names
            .first("double_layers.0.")
            .or_else(|| names.first("joint_transformer_blocks.0."));
        return Some((
            Family::of("AuraFlow", ArchName::Auraflow),
            quoted(name.unwrap_or_default()),
        ));
    }
    if names.has("blocks.0.mlp.layer1.") {
        return match names.has("llm_adapter.") {
            true => found(Family::of("Anima", ArchName::Anima), "llm_adapter."),
            false => found(Family::without_arch("Cosmos"), "blocks.0.mlp.layer1."),
        };
    }
    // Stable Diffusion 3 in diffusers' layout: joint blocks for text and image, and no single blocks.
    if names.has("transformer_blocks.0.attn.add_q_proj.") && names.has("context_embedder.") {
        return found(
            Family::of("Stable Diffusion 3", ArchName::Sd3),
            "transformer_blocks.0.attn.add_q_proj.",
        );
    }
    let rest = [
        ("genre_embedder.", Family::without_arch("ACE-Step 1")),
        ("lyric_encoder.", Family::of("ACE-Step 1.5", ArchName::AceStep15)),
        ("mlp_t5.", Family::without_arch("Hunyuan-DiT")),
        ("clip_txt_mapper.", Family::without_arch("Stable Cascade")),
        ("t5_yproj.", Family::without_arch("Mochi")),
    ];
    rest.into_iter()
        .find(|(prefix, _)| names.has(prefix))
        .and_then(|(prefix, family)| found(family, prefix))
}

/// Identifies the variants of Wan, with its authors' tensor names or those of diffusers.
fn wan(names: &Names<'_>) -> Option<(Family, String)> {
    let image = names.has("img_emb.")
        || names.has("blocks.0.cross_attn.k_img.")
        || names.has("condition_embedder.image_embedder.");
    let inputs = names.dim("patch_embedding.weight", 1);
    let width = names.dim("patch_embedding.weight", 0).unwrap_or(0);
    let family = match (inputs, image) {
        (Some(48), _) => Family::of("Wan 2.2 5B", ArchName::Wan22_5b),
        (_, true) => Family::of("Wan 2.1 image to video", ArchName::Wan21I2v),
        // Without Wan 2.1's image encoder, but with the image's latents concatenated to those of the video.
        (Some(36), false) => Family::of("Wan 2.2 14B image to video", ArchName::Wan22_14bI2v),
        // An expert of Wan 2.2 14B has the same tensors as Wan 2.1 14B.
        _ => Family::of("Wan 2.1 or 2.2", ArchName::Wan21),
    };
    let name = names.first("blocks.0.").unwrap_or_default();
    Some((family, format!("{} with a width of {width}", names.quoted(name))))
}

/// Identifies a family by `general.architecture` of a GGUF file. The inner None is a language model.
fn gguf_family(architecture: &str) -> Option<(Option<Family>, &str)> {
    let family = match architecture {
        "sd1" => SD1,
        "sdxl" => Family::of("Stable Diffusion XL", ArchName::Sdxl),
        "sd3" => Family::of("Stable Diffusion 3", ArchName::Sd3),
        "flux" => Family::of("FLUX.1", ArchName::Flux),
        "aura" => Family::of("AuraFlow", ArchName::Auraflow),
        "hidream" => Family::of("HiDream I1", ArchName::Hidream),
        "lumina2" => Family::of("Lumina Image 2", ArchName::Lumina2),
        "qwen_image" => Family::of("Qwen-Image", ArchName::QwenImage),
        "wan" => Family::of("Wan 2.1 or 2.2", ArchName::Wan21),
        "ltxv" => Family::without_arch("LTX-Video"),
        "hyvid" => Family::without_arch("HunyuanVideo"),
        "cosmos" => Family::without_arch("Cosmos"),
        "llama" | "qwen2" | "qwen3" | "gemma2" | "gemma3" | "phi3" | "mistral" | "starcoder2" => {
            return Some((None, architecture));
        }
        _ => return None,
    };
    Some((Some(family), architecture))
}

/// Identifies a VAE or a text encoder without a denoiser.
fn single_component(weights: &TensorShapes) -> Option<(&'static str, &str)> {
    const PREFIXES: [(&str, &str); 10] = [
        ("first_stage_model.", "a VAE"),
        ("encoder.down.0.", "a VAE"),
        ("encoder.down_blocks.", "a VAE"),
        ("decoder.up_blocks.", "a VAE"),
        ("text_model.encoder.layers.", "a text encoder"),
        ("encoder.block.0.layer.0.SelfAttention.", "a T5 text encoder"),
        ("enc.blk.0.attn_", "a T5 text encoder"),
        ("cond_stage_model.", "a text encoder"),
        ("model.layers.0.self_attn.", "a language model"),
        ("blk.0.attn_", "a language model"),
    ];
    PREFIXES.iter().find_map(|(prefix, what)| {
        let name = weights.shapes.keys().find(|name| name.starts_with(prefix))?;
        Some((*what, name.as_str()))
    })
}
