//! The linear layers of Chroma's approximator in the original release. Those of the blocks have the names of FLUX.1's
//! (`models::flux::original_layers`).

use super::transformer::APPROXIMATOR;
use crate::models::original_layer::OriginalLayer;
use std::collections::HashSet;

/// The two layers of a layer of the approximator: the original name, and diffusers' name.
const LAYERS: [(&str, &str); 2] = [("in_layer", "linear_1"), ("out_layer", "linear_2")];

/// The layers of the approximator that a model with these layers (diffusers' paths) has. Empty if the model is not Chroma.
#[must_use]
pub fn original_layers(paths: &[&str]) -> Vec<OriginalLayer> {
    let known: HashSet<&str> = paths.iter().copied().collect();
    let path = |index: usize, layer: &str| format!("{APPROXIMATOR}.layers.{index}.{layer}");
    let numbers = (0..).take_while(|index| known.contains(path(*index, LAYERS[0].1).as_str()));
    let layers = numbers.flat_map(|index| {
        LAYERS.map(|(original, diffusers)| OriginalLayer {
            name: path(index, original),
            parts: vec![path(index, diffusers)],
            halves_swapped: false,
        })
    });
    layers.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_of_the_approximator_have_the_names_of_the_release() {
        let paths = [
            "distilled_guidance_layer.in_proj",
            "distilled_guidance_layer.layers.0.linear_1",
            "distilled_guidance_layer.layers.0.linear_2",
            "distilled_guidance_layer.layers.1.linear_1",
            "distilled_guidance_layer.layers.1.linear_2",
            "single_transformer_blocks.0.proj_mlp",
        ];
        let found = original_layers(&paths);
        let names: Vec<(&str, &str)> = found
            .iter()
            .map(|layer| (layer.name.as_str(), layer.parts[0].as_str()))
            .collect();
        assert_eq!(names.len(), 4);
        assert_eq!(
            names[3],
            (
                "distilled_guidance_layer.layers.1.out_layer",
                "distilled_guidance_layer.layers.1.linear_2"
            )
        );
        assert!(original_layers(&["single_transformer_blocks.0.proj_mlp"]).is_empty());
    }
}
