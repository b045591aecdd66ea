//! The modules of a U-Net in which layers get a LoRA (`network_kwargs.target_lin_modules`, `target_conv_modules`), by their class names
//! in diffusers.

/// The classes and which of the names in a dotted path show them.
const CLASSES: [(&str, &[&str]); 11] = [
    ("UNet2DConditionModel", &[]),
    ("Transformer2DModel", &["attentions"]),
    ("BasicTransformerBlock", &["transformer_blocks"]),
    ("Attention", &["attn1", "attn2"]),
    ("FeedForward", &["ff"]),
    ("ResnetBlock2D", &["resnets"]),
    ("Downsample2D", &["downsamplers"]),
    ("Upsample2D", &["upsamplers"]),
    ("TimestepEmbedding", &["time_embedding", "add_embedding"]),
    ("UNetMidBlock2DCrossAttn", &["mid_block"]),
    ("GEGLU", &["proj"]),
];
/// What ai-toolkit searches if a config names only the other list.
const LINEAR_DEFAULT: [&str; 1] = ["Transformer2DModel"];
const CONV_DEFAULT: [&str; 3] = ["ResnetBlock2D", "Downsample2D", "Upsample2D"];

/// The class names that are known.
#[must_use]
pub fn known_classes() -> String {
    CLASSES.map(|(class, _)| format!("`{class}`")).join(", ")
}

/// Whether a class name is known.
#[must_use]
pub fn is_known(class: &str) -> bool {
    CLASSES.iter().any(|(known, _)| *known == class)
}

/// Whether a layer of this dotted path in diffusers (`down_blocks.0.attentions.0.proj_in`) is in a module of one of these classes.
/// An empty list: it is.
#[must_use]
pub fn is_in_container(classes: &[String], path: &str) -> bool {
    let shows = |class: &String| {
        let found = CLASSES.iter().find(|(known, _)| known == class);
        found.is_some_and(|(_, names)| names.is_empty() || path.split('.').any(|name| names.contains(&name)))
    };
    classes.is_empty() || classes.iter().any(shows)
}

/// The classes of the modules in which the layers of a U-Net get a LoRA, from the two lists of a config. Empty: all do. As in ai-toolkit,
/// the second list counts if convolutions get a rank, and then for every kind of layer.
#[must_use]
pub fn target_classes(linear: &[String], conv: &[String], has_conv_rank: bool) -> Vec<String> {
    if linear.is_empty() && conv.is_empty() {
        return Vec::new();
    }
    let or_default = |list: &[String], default: &[&str]| match list.is_empty() {
        true => default.iter().map(|class| (*class).to_owned()).collect(),
        false => list.to_vec(),
    };
    let mut classes = or_default(linear, &LINEAR_DEFAULT);
    if has_conv_rank {
        classes.extend(or_default(conv, &CONV_DEFAULT));
    }
    classes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The layers that `named_modules()` of diffusers' `UNet2DConditionModel` shows in modules of these classes (0.42.1).
    #[test]
    fn layers_are_found_by_the_class_of_a_module_around_them() {
        let q = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q";
        let ff = "mid_block.attentions.0.transformer_blocks.0.ff.net.0.proj";
        let project = "up_blocks.1.attentions.2.proj_out";
        let shortcut = "up_blocks.1.resnets.0.conv_shortcut";
        let down = "down_blocks.0.downsamplers.0.conv";
        let up = "up_blocks.0.upsamplers.0.conv";
        let time = "time_embedding.linear_1";
        let all = [q, ff, project, shortcut, down, up, time, "conv_in"];
        for (class, expected) in [
            ("UNet2DConditionModel", &all[..]),
            ("Transformer2DModel", &[q, ff, project]),
            ("BasicTransformerBlock", &[q, ff]),
            ("Attention", &[q]),
            ("FeedForward", &[ff]),
            ("GEGLU", &[ff]),
            ("ResnetBlock2D", &[shortcut]),
            ("Downsample2D", &[down]),
            ("Upsample2D", &[up]),
            ("TimestepEmbedding", &[time]),
            ("UNetMidBlock2DCrossAttn", &[ff]),
        ] {
            let found = all
                .into_iter()
                .filter(|path| is_in_container(&[class.to_owned()], path));
            assert_eq!(found.collect::<Vec<_>>(), expected, "{class}");
        }
        assert!(is_in_container(&[], "conv_in"));
    }

    #[test]
    fn convolution_classes_count_with_a_rank_for_convolutions() {
        let list = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(target_classes(&[], &[], true), list(&[]));
        assert_eq!(target_classes(&list(&["Attention"]), &[], false), list(&["Attention"]));
        assert_eq!(
            target_classes(&list(&["Attention"]), &list(&["Upsample2D"]), true),
            list(&["Attention", "Upsample2D"])
        );
        let default = ["Transformer2DModel", "ResnetBlock2D", "Downsample2D", "Upsample2D"];
        assert_eq!(
            target_classes(&list(&["Transformer2DModel"]), &[], true),
            list(&default)
        );
        assert_eq!(
            target_classes(&[], &list(&["Upsample2D"]), false),
            list(&["Transformer2DModel"])
        );
    }
}
