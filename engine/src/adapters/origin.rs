//! Which family of models a LoRA file was made for, for messages.

use super::file_layer::AdapterModule;
use std::collections::BTreeMap;

/// The family that a LoRA was made for, and what shows it. `None`: nothing does.
pub(super) fn origin(metadata: &BTreeMap<String, String>, modules: &[AdapterModule]) -> Option<String> {
    let keys = ["modelspec.architecture", "ss_base_model_version"];
    let said = keys.iter().find_map(|key| Some((key, metadata.get(*key)?)));
    if let Some((key, said)) = said {
        return Some(format!("{} (its `{key}`)", said.chars().take(60).collect::<String>()));
    }
    let has = |part: &str| modules.iter().any(|module| module.stem.contains(part));
    let has_transformer = modules.iter().any(|module| module.stem.starts_with("transformer."));
    for (part, family) in [
        ("double_blocks", "FLUX.1 or a model like it"),
        ("single_transformer_blocks", "FLUX.1 or a model like it"),
        ("joint_blocks", "Stable Diffusion 3"),
        ("lora_te3", "Stable Diffusion 3"),
        ("cross_attn", "Wan or a model like it"),
        ("lora_te2_", "Stable Diffusion XL"),
        ("text_encoder_2.", "Stable Diffusion XL"),
    ] {
        // Stable Diffusion 3 has a second text encoder too, and a transformer instead of a U-Net.
        let is_second_text = part.contains("te2") || part.contains("encoder_2");
        if has(part) && !(is_second_text && has_transformer) {
            return Some(format!(
                "{family} (it has layers called `{}`)",
                part.trim_end_matches(['.', '_'])
            ));
        }
    }
    // The width of a token, in the joint attention of diffusers' names.
    let token = modules.iter().find_map(|module| {
        let is_joint = module.stem.contains("add_q_proj") || module.stem.contains("add_k_proj");
        is_joint.then(|| module.tensors.inputs())
    });
    match token {
        Some(1536) => return Some("Stable Diffusion 3 or 3.5 medium (its tokens have 1536 features)".into()),
        Some(3072) => return Some("FLUX.1 (its tokens have 3072 features)".into()),
        Some(2432) => return Some("Stable Diffusion 3.5 large (its tokens have 2432 features)".into()),
        _ => {}
    }
    // U-Nets have a second attention too, and no joint attention.
    if has("attn2")
        && ["add_q_proj", "add_k_proj", "ff_context", "norm1_context"]
            .iter()
            .any(|part| has(part))
    {
        return Some("Stable Diffusion 3.5 medium (its joint blocks have a second attention, `attn2`)".into());
    }
    // The width of the text that the cross-attention reads.
    width_of_context(modules).or_else(|| structure(modules))
}

/// The family by the width of the text that the cross-attention of its U-Net reads.
fn width_of_context(modules: &[AdapterModule]) -> Option<String> {
    let context = modules.iter().find_map(|module| {
        let is_cross = module.stem.contains("attn2") && module.stem.ends_with("to_k");
        is_cross.then(|| module.tensors.inputs())
    })?;
    let family = match context {
        768 => "Stable Diffusion 1.x",
        1024 => "Stable Diffusion 2.x",
        2048 => "Stable Diffusion XL",
        1280 => "the refiner of Stable Diffusion XL",
        _ => return None,
    };
    Some(format!("{family} (its cross-attention reads {context} features)"))
}

/// The kind of family by the names of the layers alone, for sizes that no published model has.
fn structure(modules: &[AdapterModule]) -> Option<String> {
    for (parts, family) in [
        (
            &["down_blocks", "up_blocks", "mid_block", "input_blocks", "output_blocks"][..],
            "Stable Diffusion 1.x, 2.x or XL",
        ),
        (
            &["add_q_proj", "add_k_proj"],
            "Stable Diffusion 3 or FLUX.1, or a model like them",
        ),
        (&["self_attn.q", "self_attn_q"], "Wan or a model like it"),
        (&["adaLN_modulation", "feed_forward.w1"], "Z-Image or a model like it"),
    ] {
        let found = parts
            .iter()
            .find(|part| modules.iter().any(|module| module.stem.contains(**part)));
        if let Some(part) = found {
            return Some(format!("{family} (it has layers called `{part}`)"));
        }
    }
    None
}
