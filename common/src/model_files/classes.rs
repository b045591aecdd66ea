//! Identifies folders and repositories by the class names in their JSON files.
//!
//! Class names are those of diffusers' pipelines and models (`_class_name`), of transformers (`architectures`) and of the
//! authors' repositories.

use super::family::{Family, ModelFileKind};
use super::inventory::Inventory;
use super::keys;
use crate::job::arch::ArchName;
use serde_json::Value;

/// Prefixes of pipeline class names. A longer prefix comes before its own prefixes.
const PIPELINES: &[(&str, Family)] = &[
    ("StableDiffusionXL", Family::of("Stable Diffusion XL", ArchName::Sdxl)),
    ("StableDiffusion3", Family::of("Stable Diffusion 3", ArchName::Sd3)),
    ("StableDiffusion", Family::of("Stable Diffusion 1.x", ArchName::Sd1)),
    ("StableVideoDiffusion", Family::without_arch("Stable Video Diffusion")),
    ("StableCascade", Family::without_arch("Stable Cascade")),
    ("StableAudio", Family::without_arch("Stable Audio")),
    ("Wuerstchen", Family::without_arch("Würstchen")),
    (
        "LatentConsistencyModel",
        Family::without_arch("a latent consistency model"),
    ),
    ("FluxKontext", Family::of("FLUX.1 Kontext", ArchName::FluxKontext)),
    ("FluxFill", Family::of("FLUX.1", ArchName::Flux).with_variant("Fill")),
    (
        "FluxControl",
        Family::of("FLUX.1", ArchName::Flux).with_variant("control"),
    ),
    ("FluxPrior", Family::without_arch("FLUX.1 Redux")),
    ("Flux2Klein", Family::of("FLUX.2 Klein", ArchName::Flux2Klein4b)),
    ("Flux2", Family::of("FLUX.2", ArchName::Flux2)),
    ("Flux", Family::of("FLUX.1", ArchName::Flux)),
    ("Flex2", Family::of("Flex.2", ArchName::Flex2)),
    (
        "ChromaRadiance",
        Family::of("Chroma Radiance", ArchName::ChromaRadiance),
    ),
    ("Chroma", Family::of("Chroma", ArchName::Chroma)),
    ("ZImage", Family::of("Z-Image", ArchName::Zimage)),
    (
        "WanImageToVideo",
        Family::of("Wan 2.1 image to video", ArchName::Wan21I2v),
    ),
    ("Wan", Family::of("Wan 2.1", ArchName::Wan21)),
    ("LTX2", Family::of("LTX-2", ArchName::Ltx2)),
    ("LTX", Family::without_arch("LTX-Video")),
    (
        "QwenImageEditPlus",
        Family::of("Qwen-Image Edit Plus", ArchName::QwenImageEditPlus),
    ),
    ("QwenImageEdit", Family::of("Qwen-Image Edit", ArchName::QwenImageEdit)),
    ("QwenImage", Family::of("Qwen-Image", ArchName::QwenImage)),
    ("PixArtSigma", Family::of("PixArt-Sigma", ArchName::PixartSigma)),
    ("PixArt", Family::of("PixArt", ArchName::Pixart)),
    ("AuraFlow", Family::of("AuraFlow", ArchName::Auraflow)),
    ("Lumina2", Family::of("Lumina Image 2", ArchName::Lumina2)),
    ("Lumina", Family::without_arch("Lumina-Next")),
    ("HiDream", Family::of("HiDream I1", ArchName::Hidream)),
    ("OmniGen2", Family::of("OmniGen2", ArchName::Omnigen2)),
    ("OmniGen", Family::without_arch("OmniGen")),
    ("CogView4", Family::of("CogView4", ArchName::Cogview4)),
    ("CogView3", Family::without_arch("CogView3")),
    ("CogVideoX", Family::without_arch("CogVideoX")),
    ("HunyuanVideo", Family::without_arch("HunyuanVideo")),
    ("HunyuanImage", Family::without_arch("HunyuanImage")),
    ("HunyuanDiT", Family::without_arch("Hunyuan-DiT")),
    ("Kolors", Family::without_arch("Kolors")),
    ("Kandinsky", Family::without_arch("Kandinsky")),
    ("Mochi", Family::without_arch("Mochi")),
    ("Sana", Family::without_arch("Sana")),
    ("Allegro", Family::without_arch("Allegro")),
    ("AnimateDiff", Family::without_arch("AnimateDiff")),
    ("ErnieImage", Family::of("ERNIE-Image", ArchName::ErnieImage)),
    ("ACEStep", Family::of("ACE-Step", ArchName::AceStep15)),
    ("AceStep", Family::of("ACE-Step", ArchName::AceStep15)),
    ("Cosmos", Family::without_arch("Cosmos")),
];

/// Denoiser class names, which identify a folder without `model_index.json`.
const DENOISERS: &[(&str, Family)] = &[
    ("SD3Transformer2DModel", Family::of("Stable Diffusion 3", ArchName::Sd3)),
    ("FluxTransformer2DModel", Family::of("FLUX.1", ArchName::Flux)),
    ("Flux2Transformer2DModel", Family::of("FLUX.2", ArchName::Flux2)),
    ("ChromaTransformer2DModel", Family::of("Chroma", ArchName::Chroma)),
    ("ZImageTransformer2DModel", Family::of("Z-Image", ArchName::Zimage)),
    ("WanTransformer3DModel", Family::of("Wan 2.1", ArchName::Wan21)),
    ("LTX2VideoTransformer3DModel", Family::of("LTX-2", ArchName::Ltx2)),
    ("LTXVideoTransformer3DModel", Family::without_arch("LTX-Video")),
    (
        "QwenImageTransformer2DModel",
        Family::of("Qwen-Image", ArchName::QwenImage),
    ),
    ("PixArtTransformer2DModel", Family::of("PixArt", ArchName::Pixart)),
    ("AuraFlowTransformer2DModel", Family::of("AuraFlow", ArchName::Auraflow)),
    (
        "Lumina2Transformer2DModel",
        Family::of("Lumina Image 2", ArchName::Lumina2),
    ),
    (
        "HiDreamImageTransformer2DModel",
        Family::of("HiDream I1", ArchName::Hidream),
    ),
    ("OmniGen2Transformer2DModel", Family::of("OmniGen2", ArchName::Omnigen2)),
    ("CogView4Transformer2DModel", Family::of("CogView4", ArchName::Cogview4)),
    ("HunyuanVideoTransformer3DModel", Family::without_arch("HunyuanVideo")),
    ("SanaTransformer2DModel", Family::without_arch("Sana")),
    ("CogVideoXTransformer3DModel", Family::without_arch("CogVideoX")),
    ("MochiTransformer3DModel", Family::without_arch("Mochi")),
    ("WanModel", Family::of("Wan 2.1", ArchName::Wan21)),
];

/// Prefixes of class names of models that are not base models.
const OTHER_MODELS: &[(&str, &str)] = &[
    ("ControlNet", "a ControlNet"),
    ("T2IAdapter", "a T2I adapter"),
    ("MotionAdapter", "a motion module"),
    ("Autoencoder", "a VAE"),
    ("AsymmetricAutoencoder", "a VAE"),
    ("CLIPText", "a text encoder"),
    ("T5Encoder", "a text encoder"),
    ("UMT5Encoder", "a text encoder"),
    ("CLIPModel", "a CLIP model"),
    ("CLIPVision", "an image encoder"),
];

const INDEX: &str = "model_index.json";
const UNET: &str = "unet/config.json";
const TRANSFORMER: &str = "transformer/config.json";

/// Identifies a folder by its JSON files. None if they name no class.
pub(super) fn of_folder(files: &Inventory) -> Option<ModelFileKind> {
    if !files.is_folder {
        return None;
    }
    if let Some(class) = files.text(INDEX, "_class_name") {
        let evidence = format!("{INDEX} names {class}");
        let family = PIPELINES.iter().find(|(prefix, _)| class.starts_with(prefix));
        return Some(match family {
            Some((_, family)) => refine(*family, files, evidence),
            None => ModelFileKind::Other {
                what: format!("a {class} model"),
                evidence,
            },
        });
    }
    for file in [UNET, TRANSFORMER, "prior/config.json", "config.json"] {
        let Some(config) = files.configs.get(file) else {
            continue;
        };
        if let Some(class) = files.text(file, "_class_name") {
            if let Some((_, family)) = DENOISERS.iter().find(|(name, _)| *name == class) {
                return Some(refine(*family, files, format!("{file} names {class}")));
            }
            if class.starts_with("UNet2DCondition") {
                return Some(unet_without_index(files, file));
            }
            let part = OTHER_MODELS.iter().find(|(prefix, _)| class.starts_with(prefix));
            return Some(ModelFileKind::Other {
                what: part.map_or_else(|| format!("a {class}"), |(_, what)| (*what).to_owned()),
                evidence: format!("{file} names {class}"),
            });
        }
        let class = config
            .get("architectures")
            .and_then(|list| list.get(0))
            .and_then(Value::as_str);
        if let Some(class) = class {
            let part = OTHER_MODELS.iter().find(|(prefix, _)| class.starts_with(prefix));
            let language = class.ends_with("ForCausalLM") || class.ends_with("ForConditionalGeneration");
            let what = match part {
                Some((_, what)) => (*what).to_owned(),
                None if language => "a language model".to_owned(),
                None => format!("a {class}"),
            };
            return Some(ModelFileKind::Other {
                what,
                evidence: format!("{file} names {class}"),
            });
        }
    }
    None
}

/// Refines a pipeline's family with the configs of its components.
fn refine(family: Family, files: &Inventory, evidence: String) -> ModelFileKind {
    let unet = |key: &str| files.configs.get(UNET).and_then(|config| config.get(key));
    let number = |key: &str| unet(key).and_then(Value::as_u64);
    let mut evidence = evidence;
    let mut family = family;
    match family.arch {
        Some(ArchName::Sd1 | ArchName::Sdxl) => {
            let xl = family.arch == Some(ArchName::Sdxl);
            let class = files.text(INDEX, "_class_name").unwrap_or_default().to_owned();
            if let Some(context) = number("cross_attention_dim") {
                let depth = unet("transformer_layers_per_block").map(keys::deepest_level);
                let known = keys::unet_family(
                    context,
                    xl || unet("addition_embed_type").is_some_and(Value::is_string),
                    depth,
                    unet("use_linear_projection").and_then(Value::as_bool).unwrap_or(false),
                );
                family = known;
                evidence = format!("{evidence}, and {UNET} a context of {context}");
            }
            if let Some(variant) = class_variant(&class).or_else(|| keys::input_variant(number("in_channels"))) {
                family = family.with_variant(variant);
            }
        }
        Some(ArchName::Wan21 | ArchName::Wan21I2v) => {
            let i2v = family.arch == Some(ArchName::Wan21I2v);
            let index = files.configs.get(INDEX);
            let second = index
                .and_then(|index| index.get("transformer_2"))
                .and_then(Value::as_array);
            let experts = second.is_some_and(|pair| pair.iter().any(Value::is_string));
            let expands = index
                .and_then(|index| index.get("expand_timesteps"))
                .and_then(Value::as_bool);
            if experts {
                family = match i2v {
                    true => Family::of("Wan 2.2 14B image to video", ArchName::Wan22_14bI2v),
                    false => Family::of("Wan 2.2 14B", ArchName::Wan22_14b),
                };
                evidence += ", with two transformers";
            } else if expands == Some(true) {
                family = Family::of("Wan 2.2 5B", ArchName::Wan22_5b);
                evidence += " with expand_timesteps";
            }
        }
        _ => {}
    }
    ModelFileKind::Model {
        family,
        evidence,
        missing: Vec::new(),
    }
}

/// The variant of a Stable Diffusion pipeline whose U-Net has extra inputs or another purpose.
fn class_variant(class: &str) -> Option<&'static str> {
    let kinds = [
        ("Inpaint", "inpainting"),
        ("InstructPix2Pix", "InstructPix2Pix"),
        ("Depth2Img", "depth to image"),
        ("LatentUpscale", "upscaler"),
        ("Upscale", "upscaler"),
        ("ImageVariation", "image variations"),
        ("UnCLIP", "unCLIP"),
        ("GLIGEN", "GLIGEN"),
    ];
    kinds
        .iter()
        .find(|(part, _)| class.contains(part))
        .map(|(_, kind)| *kind)
}

/// Identifies a U-Net in diffusers' layout without a `model_index.json`.
fn unet_without_index(files: &Inventory, file: &str) -> ModelFileKind {
    let config = files.configs.get(file);
    let get = |key: &str| config.and_then(|config| config.get(key));
    let context = get("cross_attention_dim").and_then(Value::as_u64).unwrap_or(0);
    let xl = get("addition_embed_type").is_some_and(Value::is_string);
    let family = keys::unet_family(
        context,
        xl,
        get("transformer_layers_per_block").map(keys::deepest_level),
        get("use_linear_projection").and_then(Value::as_bool).unwrap_or(false),
    );
    let variant = keys::input_variant(get("in_channels").and_then(Value::as_u64));
    ModelFileKind::Model {
        family: variant.map_or(family, |variant| family.with_variant(variant)),
        evidence: format!("{file} names a UNet2DConditionModel with a context of {context}, and there is no {INDEX}"),
        missing: vec!["model_index.json"],
    }
}
