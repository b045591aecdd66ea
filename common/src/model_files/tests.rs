//! Identifies each family from a small header with tensor names of its published checkpoint.

use super::*;
use crate::job::arch::ArchName;
use std::path::Path;

fn header(tensors: &[(&str, &[u64])]) -> Vec<u8> {
    let entries: Vec<String> = tensors
        .iter()
        .map(|(name, shape)| format!(r#""{name}":{{"dtype":"F16","shape":{shape:?},"data_offsets":[0,0]}}"#))
        .collect();
    let text = format!(r#"{{"__metadata__":{{"format":"pt"}},{}}}"#, entries.join(","));
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

fn write(path: &Path, bytes: impl AsRef<[u8]>) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, bytes).unwrap();
}

fn of_header(tensors: &[(&str, &[u64])]) -> ModelFileKind {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("m.safetensors");
    write(&file, header(tensors));
    identify(&Inventory::open(&file))
}

fn named(identity: &ModelFileKind) -> String {
    match identity {
        ModelFileKind::Model { family, .. } => match family.arch {
            Some(arch) => format!(
                "{arch}{}",
                family.variant.map_or(String::new(), |kind| format!("+{kind}"))
            ),
            None => family.name.to_owned(),
        },
        ModelFileKind::Other { what, .. } => what.clone(),
        ModelFileKind::Pickle { .. } => "pickle".to_owned(),
        ModelFileKind::Unknown { .. } => "unknown".to_owned(),
    }
}

/// Identifies a file with these tensors.
fn identified(tensors: &[(&str, &[u64])]) -> String {
    named(&of_header(tensors))
}

/// Identifies a U-Net in `ldm` layout with this cross-attention dimension, these input channels, and more tensors.
fn ldm(context: u64, channels: u64, more: &[(&str, &[u64])]) -> String {
    let to_k = "model.diffusion_model.input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight";
    let (width, first) = ([640, context], [320, channels, 3, 3]);
    let mut tensors: Vec<(&str, &[u64])> = vec![
        ("model.diffusion_model.input_blocks.0.0.weight", &first),
        (to_k, &width),
        (
            "model.diffusion_model.output_blocks.0.0.out_layers.3.weight",
            &[1280, 1280, 3, 3],
        ),
    ];
    tensors.extend_from_slice(more);
    identified(&tensors)
}

#[test]
fn u_nets_are_identified_by_their_cross_attention_dimension() {
    assert_eq!(ldm(768, 4, &[]), "sd1");
    assert_eq!(ldm(768, 9, &[]), "sd1+inpainting");
    assert_eq!(ldm(768, 8, &[]), "sd1+InstructPix2Pix");
    // A small custom model.
    assert_eq!(ldm(32, 4, &[]), "sd1");
    let linear = |shape: &'static [u64]| ("model.diffusion_model.input_blocks.1.1.proj_in.weight", shape);
    assert_eq!(ldm(32, 4, &[linear(&[8, 8])]), "sd2");
    assert_eq!(ldm(32, 4, &[linear(&[8, 8, 1, 1])]), "sd1");
    assert_eq!(ldm(768, 4, &[linear(&[320, 320])]), "sd1");
    assert_eq!(ldm(1024, 4, &[]), "sd2");
    assert_eq!(ldm(1024, 5, &[]), "sd2+depth to image");
    let adm = ("model.diffusion_model.label_emb.0.0.weight", &[1280, 2816][..]);
    let last = |n: u64| format!("model.diffusion_model.input_blocks.7.1.transformer_blocks.{n}.norm1.weight");
    let xl = |n: u64| ldm(2048, 4, &[adm, (&last(n), &[1280])]);
    assert_eq!(xl(9), "sdxl");
    assert_eq!(xl(3), "ssd");
    assert_eq!(xl(1), "vega");
    assert_eq!(ldm(40, 4, &[adm, (&last(1), &[16])]), "sdxl");
    assert_eq!(ldm(2048, 9, &[adm, (&last(9), &[1280])]), "sdxl+inpainting");
    assert_eq!(
        ldm(
            1280,
            4,
            &[("model.diffusion_model.label_emb.0.0.weight", &[1536, 2560])]
        ),
        "sdxl+refiner"
    );
    let diffusers = |context: u64| {
        identified(&[
            ("conv_in.weight", &[320, 4, 3, 3]),
            (
                "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k.weight",
                &[640, context],
            ),
            ("time_embedding.linear_1.weight", &[1280, 320]),
            ("up_blocks.0.resnets.0.conv1.weight", &[1280, 1280, 3, 3]),
        ])
    };
    assert_eq!([768, 1024, 2048].map(diffusers), ["sd1", "sd2", "sdxl"]);
}

#[test]
fn transformers_are_identified_by_unique_tensor_names() {
    let one = |name: &str, shape: &[u64]| identified(&[(name, shape)]);
    assert_eq!(
        one(
            "model.diffusion_model.joint_blocks.0.context_block.attn.qkv.weight",
            &[4608, 1536]
        ),
        "sd3"
    );
    assert_eq!(
        identified(&[
            ("transformer_blocks.0.attn.add_q_proj.weight", &[1536, 1536]),
            ("context_embedder.weight", &[1536, 4096]),
        ]),
        "sd3"
    );
    let flux = |channels: u64| {
        identified(&[
            ("double_blocks.0.img_attn.qkv.weight", &[9216, 3072]),
            ("img_in.weight", &[3072, channels]),
        ])
    };
    assert_eq!(
        [64, 384, 128, 196].map(flux),
        ["flux", "flux+Fill", "flux+control", "flex2"]
    );
    assert_eq!(
        one(
            "model.diffusion_model.double_blocks.0.img_attn.norm.key_norm.scale",
            &[128]
        ),
        "flux"
    );
    assert_eq!(
        identified(&[
            ("single_transformer_blocks.0.attn.to_q.weight", &[3072, 3072]),
            ("transformer_blocks.0.attn.to_q.weight", &[3072, 3072]),
        ]),
        "flux"
    );
    assert_eq!(
        identified(&[
            ("double_blocks.0.img_attn.qkv.weight", &[1, 1]),
            ("distilled_guidance_layer.in_proj.weight", &[5120, 64]),
        ]),
        "chroma"
    );
    assert_eq!(
        identified(&[
            ("double_blocks.0.img_attn.qkv.weight", &[1, 1]),
            ("double_stream_modulation_img.lin.weight", &[1, 1]),
        ]),
        "flux2"
    );
    assert_eq!(
        identified(&[
            ("double_blocks.0.img_attn.qkv.weight", &[1, 1]),
            ("txt_in.individual_token_refiner.blocks.0.norm1.weight", &[1]),
        ]),
        "HunyuanVideo"
    );
    assert_eq!(one("cap_embedder.1.weight", &[3840, 2560]), "zimage");
    assert_eq!(
        one("model.diffusion_model.cap_embedder.1.weight", &[2304, 2304]),
        "lumina2"
    );
    let with = |other: &str| identified(&[("cap_embedder.1.weight", &[2304, 2304]), (other, &[1, 2304])]);
    assert_eq!(
        ["cap_pad_token", "siglip_embedder.1.weight"].map(with),
        ["zimage", "lumina2+Omni"]
    );
    assert_eq!(
        one("time_caption_embed.timestep_embedder.linear_1.bias", &[1024]),
        "omnigen2"
    );
    let wan = |channels: u64, image: bool| {
        let mut tensors: Vec<(&str, &[u64])> = vec![
            ("blocks.0.self_attn.q.weight", &[5120, 5120]),
            ("head.modulation", &[1, 2, 5120]),
        ];
        let patch = [5120, channels, 1, 2, 2];
        tensors.push(("patch_embedding.weight", &patch));
        if image {
            tensors.push(("img_emb.proj.0.weight", &[1280]));
        }
        identified(&tensors)
    };
    assert_eq!(
        [wan(16, false), wan(36, true), wan(36, false), wan(48, false)],
        ["wan21", "wan21_i2v", "wan22_14b_i2v", "wan22_5b"]
    );
    assert_eq!(
        one("model.diffusion_model.audio_adaln_single.linear.weight", &[1, 1]),
        "ltx2"
    );
    assert_eq!(
        identified(&[
            ("patchify_proj.weight", &[2048, 128]),
            ("adaln_single.linear.weight", &[1, 1])
        ]),
        "LTX-Video"
    );
    assert_eq!(one("t_block.1.weight", &[6912, 1152]), "pixart");
    assert_eq!(
        identified(&[
            ("txt_norm.weight", &[3584]),
            ("transformer_blocks.0.attn.add_q_proj.weight", &[3072, 3072])
        ]),
        "qwen_image"
    );
    assert_eq!(one("double_layers.0.attn.w1q.weight", &[3072, 3072]), "auraflow");
    assert_eq!(
        one("double_stream_blocks.0.block.attn1.to_q.weight", &[1, 1]),
        "hidream"
    );
    assert_eq!(
        identified(&[
            ("net.blocks.0.mlp.layer1.weight", &[1, 1]),
            ("net.llm_adapter.in.weight", &[1, 1])
        ]),
        "anima"
    );
    assert_eq!(one("genre_embedder.weight", &[1, 1]), "ACE-Step 1");
}

#[test]
fn adapters_and_components_are_not_base_models() {
    let one = |name: &str| identified(&[(name, &[4, 4])]);
    for name in [
        "lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight",
        "transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight",
        "diffusion_model.blocks.0.self_attn.q.lora_B.weight",
        "double_blocks.0.processor.qkv_lora1.down.weight",
        "double_blocks.0.processor.proj_lora2.up.weight",
        "single_blocks.0.processor.proj_lora.down.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
    ] {
        assert_eq!(one(name), "a LoRA", "{name}");
    }
    assert_eq!(one("lora_unet_x.lokr_w1"), "a LoKr");
    assert_eq!(one("lora_unet_x.oft_blocks"), "an OFT");
    assert_eq!(one("first_stage_model.encoder.conv_in.weight"), "a VAE");
    assert_eq!(one("decoder.up_blocks.0.resnets.0.conv1.weight"), "a VAE");
    assert_eq!(one("text_model.encoder.layers.0.mlp.fc1.weight"), "a text encoder");
    assert_eq!(
        one("encoder.block.0.layer.0.SelfAttention.q.weight"),
        "a T5 text encoder"
    );
    assert_eq!(one("model.layers.0.self_attn.q_proj.weight"), "a language model");
    assert_eq!(one("control_model.input_hint_block.0.weight"), "a ControlNet");
    assert_eq!(one("adapter.body.0.resnets.0.block1.bias"), "a T2I adapter");
    assert_eq!(one("emb_params"), "a textual inversion");
    assert_eq!(one("something.else"), "unknown");
}

/// Identifies a folder with only these JSON files.
fn folder(files: &[(&str, &str)]) -> ModelFileKind {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        write(&folder.path().join(name), text);
    }
    identify(&Inventory::open(folder.path()))
}

#[test]
fn folders_are_identified_by_their_pipeline() {
    let class = |class: &str| {
        named(&folder(&[(
            "model_index.json",
            &format!(r#"{{"_class_name":"{class}"}}"#),
        )]))
    };
    for (pipeline, expected) in [
        ("StableDiffusionPipeline", "sd1"),
        ("StableDiffusionImg2ImgPipeline", "sd1"),
        ("StableDiffusionInpaintPipeline", "sd1+inpainting"),
        ("StableDiffusionXLPipeline", "sdxl"),
        ("StableDiffusion3Pipeline", "sd3"),
        ("FluxPipeline", "flux"),
        ("FluxKontextPipeline", "flux_kontext"),
        ("FluxFillPipeline", "flux+Fill"),
        ("Flux2Pipeline", "flux2"),
        ("ChromaPipeline", "chroma"),
        ("ZImagePipeline", "zimage"),
        ("WanPipeline", "wan21"),
        ("WanImageToVideoPipeline", "wan21_i2v"),
        ("LTX2Pipeline", "ltx2"),
        ("LTXPipeline", "LTX-Video"),
        ("QwenImagePipeline", "qwen_image"),
        ("QwenImageEditPlusPipeline", "qwen_image_edit_plus"),
        ("PixArtSigmaPipeline", "pixart_sigma"),
        ("AuraFlowPipeline", "auraflow"),
        ("Lumina2Pipeline", "lumina2"),
        ("HiDreamImagePipeline", "hidream"),
        ("OmniGen2Pipeline", "omnigen2"),
        ("CogView4Pipeline", "cogview4"),
        ("HunyuanVideoPipeline", "HunyuanVideo"),
        ("SomethingNewPipeline", "a SomethingNewPipeline model"),
    ] {
        assert_eq!(class(pipeline), expected, "{pipeline}");
    }
    let unet = |class: &str, config: &str| {
        let index = format!(r#"{{"_class_name":"{class}"}}"#);
        named(&folder(&[("model_index.json", &index), ("unet/config.json", config)]))
    };
    assert_eq!(
        unet(
            "StableDiffusionPipeline",
            r#"{"cross_attention_dim":1024,"in_channels":4}"#
        ),
        "sd2"
    );
    assert_eq!(
        unet(
            "StableDiffusionPipeline",
            r#"{"cross_attention_dim":768,"in_channels":9}"#
        ),
        "sd1+inpainting"
    );
    let xl = |context: u64, depth: &str| {
        let config =
            format!(r#"{{"cross_attention_dim":{context},"transformer_layers_per_block":{depth},"in_channels":4}}"#);
        unet("StableDiffusionXLPipeline", &config)
    };
    assert_eq!(xl(2048, "[1,2,10]"), "sdxl");
    assert_eq!(xl(1280, "4"), "sdxl+refiner");
    assert_eq!(xl(2048, "[0,2,4]"), "ssd");
    assert_eq!(xl(2048, "[1,1,2]"), "vega");
    let wan =
        r#"{"_class_name":"WanPipeline","transformer":["diffusers","WanTransformer3DModel"],"transformer_2":SECOND}"#;
    let two = wan.replace("SECOND", r#"["diffusers","WanTransformer3DModel"]"#);
    let one = wan.replace("SECOND", "[null,null]");
    assert_eq!(named(&folder(&[("model_index.json", &two)])), "wan22_14b");
    assert_eq!(named(&folder(&[("model_index.json", &one)])), "wan21");
}

#[test]
fn folders_without_an_index_are_identified_by_their_components() {
    let one = |file: &str, text: &str| named(&folder(&[(file, text)]));
    assert_eq!(
        one("config.json", r#"{"_class_name":"FluxTransformer2DModel"}"#),
        "flux"
    );
    assert_eq!(
        one("transformer/config.json", r#"{"_class_name":"WanTransformer3DModel"}"#),
        "wan21"
    );
    assert_eq!(one("config.json", r#"{"_class_name":"AutoencoderKL"}"#), "a VAE");
    assert_eq!(
        one("config.json", r#"{"architectures":["Qwen2ForCausalLM"]}"#),
        "a language model"
    );
    assert_eq!(
        one("config.json", r#"{"architectures":["CLIPTextModel"]}"#),
        "a text encoder"
    );
    assert_eq!(
        one("config.json", r#"{"_class_name":"ControlNetModel"}"#),
        "a ControlNet"
    );
    let unet = folder(&[(
        "unet/config.json",
        r#"{"_class_name":"UNet2DConditionModel","cross_attention_dim":768}"#,
    )]);
    assert!(
        check_supported("m", ArchName::Sd1, &unet)
            .unwrap_err()
            .to_string()
            .contains("no model_index.json")
    );
    assert_eq!(one("model_index.json", "{}"), "unknown");
    assert_eq!(one("readme.txt", "hello"), "unknown");
}

#[test]
fn pickles_are_identified_by_extension_and_first_bytes() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    let identified = |name: &str, bytes: &[u8]| {
        write(&at(name), bytes);
        named(&identify(&Inventory::open(&at(name))))
    };
    for name in ["a.ckpt", "a.pt", "a.PTH", "a.bin"] {
        assert_eq!(identified(name, b"x"), "pickle", "{name}");
    }
    assert_eq!(identified("zip.safetensors", b"PK\x03\x04rest of a zip file"), "pickle");
    assert_eq!(identified("plain.safetensors", b"\x80\x02}q\x00(X\x05\0\0\0"), "pickle");
    // The length of a header of 0x0280 bytes also begins with 0x80, 0x02.
    let mut long = [("cap_embedder.1.weight".to_owned(), vec![3840_u64])];
    while header(&long.iter().map(|(n, s)| (n.as_str(), s.as_slice())).collect::<Vec<_>>()).len() < 0x280 + 8 {
        let name = &mut long[0].0;
        name.push('x');
    }
    let bytes = header(&long.iter().map(|(n, s)| (n.as_str(), s.as_slice())).collect::<Vec<_>>());
    assert_eq!(bytes[..2], [0x80, 0x02]);
    assert_eq!(identified("long.safetensors", &bytes), "unknown");
    for bytes in [
        &b"version https://git-lfs.github.com/spec/v1"[..],
        b"<!DOCTYPE html><html>",
        b"",
        b"\xff\xff",
    ] {
        assert_eq!(identified("other.safetensors", bytes), "unknown");
    }
    write(&at("folder/unet/diffusion_pytorch_model.bin"), b"x");
    write(
        &at("folder/model_index.json"),
        r#"{"_class_name":"StableDiffusionPipeline"}"#,
    );
    let identity = identify(&Inventory::open(&at("folder")));
    let error = check_supported("folder", ArchName::Sd1, &identity)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("pickle") && error.contains("diffusion_pytorch_model.bin"),
        "{error}"
    );
}

#[test]
fn an_unsupported_model_error_names_the_finding_the_evidence_and_what_is_supported() {
    let flux = of_header(&[("double_blocks.0.img_attn.qkv.weight", &[9216, 3072])]);
    let text = check_supported("models/a.safetensors", ArchName::Sd1, &flux)
        .unwrap_err()
        .to_string();
    assert_eq!(
        text,
        "models/a.safetensors is FLUX.1: m.safetensors has `double_blocks.0.img_attn.qkv.weight`, without `guidance_in`, as \
         schnell has it, and `model.arch` of the config is `sd1`; set `arch: flux`"
    );
    let auraflow = folder(&[("model_index.json", r#"{"_class_name":"AuraFlowPipeline"}"#)]);
    let text = check_supported("c", ArchName::Sd1, &auraflow).unwrap_err().to_string();
    assert_eq!(
        text,
        "c is AuraFlow: model_index.json names AuraFlowPipeline, and `model.arch` of the config is `sd1`; this release runs Stable \
         Diffusion 1.x (`arch: sd1`), Stable Diffusion 2.x (`arch: sd2`), Stable Diffusion XL (`arch: sdxl`), Stable Diffusion \
         3.5 (`arch: sd3`), FLUX.1 (`arch: flux`), FLUX.1 Kontext (`arch: flux_kontext`), Chroma (`arch: chroma`), \
         Z-Image (`arch: zimage`)"
    );
    let text = check_supported("m", ArchName::Auraflow, &auraflow)
        .unwrap_err()
        .to_string();
    assert!(!text.contains("model.arch"), "{text}");
    let sd1 = folder(&[("model_index.json", r#"{"_class_name":"StableDiffusionPipeline"}"#)]);
    assert_eq!(check_supported("m", ArchName::Sd1, &sd1), Ok(()));
    let text = check_supported("m", ArchName::Sdxl, &sd1).unwrap_err().to_string();
    assert!(text.ends_with("set `arch: sd1`"), "{text}");
    let unet = of_header(&[
        ("input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight", &[320, 768]),
        ("output_blocks.0.0.weight", &[1]),
    ]);
    let text = check_supported("m", ArchName::Sd1, &unet).unwrap_err().to_string();
    assert!(text.contains("text encoder") && text.contains("VAE"), "{text}");
    let xl = of_header(&[
        (
            "model.diffusion_model.input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight",
            &[640, 2048],
        ),
        ("model.diffusion_model.output_blocks.0.0.weight", &[1]),
        ("model.diffusion_model.label_emb.0.0.weight", &[1280, 2816]),
        (
            "conditioner.embedders.0.transformer.text_model.final_layer_norm.weight",
            &[768],
        ),
    ]);
    let text = check_supported("m", ArchName::Sdxl, &xl).unwrap_err().to_string();
    assert!(
        !text.contains("first text encoder") && text.contains("no second text encoder"),
        "{text}"
    );
    assert!(text.contains("no VAE"), "{text}");
    let nothing = folder(&[("readme.txt", "hello")]);
    let text = check_supported("m", ArchName::Sd1, &nothing).unwrap_err().to_string();
    assert!(
        text.starts_with("m is not a known model: it has no model_index.json"),
        "{text}"
    );
}
