//! The linear layers of Z-Image's original release and of ComfyUI's files, and the layers of diffusers' model that each of them
//! consists of (`convert_z_image_transformer_checkpoint_to_diffusers` of diffusers).

use crate::models::original_layer::OriginalLayer;

/// Layers of attention: the original name, and diffusers' names in the order of their rows.
pub(super) const ATTENTION: [(&str, &[&str]); 2] = [("qkv", &["to_q", "to_k", "to_v"]), ("out", &["to_out.0"])];
/// The beginnings of layers outside the blocks.
pub(super) const OUTER: [(&str, &str); 2] = [
    ("x_embedder", "all_x_embedder.2-1"),
    ("final_layer", "all_final_layer.2-1"),
];

/// The layers of the original release that have other names or parts than in diffusers, of a model with these layers (diffusers'
/// paths). Empty if the model is not Z-Image.
#[must_use]
pub fn original_layers(paths: &[&str]) -> Vec<OriginalLayer> {
    if !paths.contains(&"cap_embedder.1") || !paths.contains(&"all_x_embedder.2-1") {
        return Vec::new();
    }
    let layer = |name: String, parts: Vec<String>| OriginalLayer {
        name,
        parts,
        halves_swapped: false,
    };
    let mut layers = Vec::new();
    for path in paths {
        for (original, diffusers) in OUTER {
            if let Some(rest) = path.strip_prefix(diffusers) {
                layers.push(layer(format!("{original}{rest}"), vec![(*path).to_owned()]));
            }
        }
        if let Some(block) = path.strip_suffix(".attention.to_q") {
            for (original, diffusers) in ATTENTION {
                let parts = diffusers.iter().map(|part| format!("{block}.attention.{part}"));
                layers.push(layer(format!("{block}.attention.{original}"), parts.collect()));
            }
        }
    }
    layers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fused_and_renamed_layers_are_those_that_diffusers_converts() {
        let paths = [
            "all_x_embedder.2-1",
            "cap_embedder.1",
            "layers.0.attention.to_q",
            "layers.0.attention.to_k",
            "layers.0.attention.to_v",
            "layers.0.attention.to_out.0",
            "layers.0.feed_forward.w1",
            "all_final_layer.2-1.linear",
            "all_final_layer.2-1.adaLN_modulation.1",
        ];
        let found: Vec<(String, usize)> = original_layers(&paths)
            .into_iter()
            .map(|layer| (layer.name, layer.parts.len()))
            .collect();
        let expected = [
            ("x_embedder", 1),
            ("layers.0.attention.qkv", 3),
            ("layers.0.attention.out", 1),
            ("final_layer.linear", 1),
            ("final_layer.adaLN_modulation.1", 1),
        ];
        assert_eq!(found, expected.map(|(name, parts)| (name.to_owned(), parts)));
        assert!(original_layers(&["x_embedder", "layers.0.attention.to_q"]).is_empty());
    }
}
