//! The tensor names of adapter files: which layer and which of its tensors a key names, in every known dialect.
//!
//! | dialect | example |
//! |---|---|
//! | ai-toolkit, sd-scripts | `lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight`, `lora_te_text_model_…`, `.alpha` |
//! | sd-scripts, original paths | `lora_unet_input_blocks_1_1_proj_in.lora_down.weight` |
//! | diffusers / peft | `unet.down_blocks.0.attentions.0.proj_in.lora_A.weight`, `….lora.down.weight` |
//! | bare peft | `base_model.model.down_blocks.0.attentions.0.proj_in.lora_A.weight` |
//! | peft, embedding layers | `base_model.model.model.embed_tokens.lora_embedding_A`, and `….base_layer.weight`, the table of the base model |
//! | early diffusers | `unet.….attn1.processor.to_q_lora.down.weight`, `text_encoder.….to_q_lora.down.weight` |
//! | LyCORIS | `lycoris_…`, `.lora_mid.weight`, `.lokr_w1`, `.hada_w1_a`, `.oft_blocks`, `.dora_scale`, `.diff` for layers that are kept whole, and `.w_norm` |
//! | ComfyUI, original paths | `diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight` |
//! | ai-toolkit's `full_train_in_out` | `unet_conv_in.weight`, `unet_conv_out.bias` |
//! | XLabs (FLUX.1) | `double_blocks.0.processor.qkv_lora1.down.weight`, `single_blocks.0.processor.proj_lora.up.weight` |

/// Which tensor of a layer's adapter a key names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TensorRole {
    Down,
    Up,
    Mid,
    /// `down` of an embedding layer.
    EmbeddingDown,
    /// `up` of an embedding layer.
    EmbeddingUp,
    Alpha,
    /// A scalar that LyCORIS trains; it multiplies the update.
    Scalar,
    /// The whole difference of the layer's weight, instead of two factors.
    Diff,
    LokrW1,
    LokrW1A,
    LokrW1B,
    LokrW2,
    LokrW2A,
    LokrW2B,
    LokrT2,
    HadaW1A,
    HadaW1B,
    HadaW2A,
    HadaW2B,
    HadaT1,
    HadaT2,
    /// The difference of the layer's bias.
    DiffB,
    /// The magnitude of a DoRA of ai-toolkit or peft.
    Magnitude,
    /// The magnitude of a DoRA of LyCORIS.
    DoraScale,
    /// The matrices whose rotations an OFT applies.
    OftBlocks,
    /// What an OFT multiplies each output with.
    Rescale,
    /// The weight of a layer that was trained itself.
    Whole,
    /// Its bias.
    WholeBias,
}

impl TensorRole {
    /// Whether it is a single number.
    pub(super) fn is_number(self) -> bool {
        matches!(self, Self::Alpha | Self::Scalar)
    }
}

/// A key split into layer and tensor by its suffix.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ParsedKey<'a> {
    /// A tensor of a supported type of adapter: the key without its suffix, and the tensor's role.
    Adapter(&'a str, TensorRole),
    /// The weight of a layer as the base model has it, which peft saves beside the LoRA of an embedding layer: the key without its suffix.
    BaseWeight(&'a str),
    /// A tensor of an unsupported network type, by the type's name.
    OtherNetwork(&'static str),
    /// Not a key of a known network type.
    Unknown,
}

const SUFFIXES: [(&str, TensorRole); 47] = [
    (".lora_down.weight", TensorRole::Down),
    (".lora_up.weight", TensorRole::Up),
    (".lora_mid.weight", TensorRole::Mid),
    (".lora_A.default.weight", TensorRole::Down),
    (".lora_B.default.weight", TensorRole::Up),
    (".lora_A.default_0.weight", TensorRole::Down),
    (".lora_B.default_0.weight", TensorRole::Up),
    (".lora_A.weight", TensorRole::Down),
    (".lora_B.weight", TensorRole::Up),
    (".lora_embedding_A", TensorRole::EmbeddingDown),
    (".lora_embedding_B", TensorRole::EmbeddingUp),
    (".lora_A", TensorRole::Down),
    (".lora_B", TensorRole::Up),
    (".lora_linear_layer.down.weight", TensorRole::Down),
    (".lora_linear_layer.up.weight", TensorRole::Up),
    (".lora.down.weight", TensorRole::Down),
    (".lora.up.weight", TensorRole::Up),
    ("_lora.down.weight", TensorRole::Down),
    ("_lora.up.weight", TensorRole::Up),
    (".lora_magnitude_vector.alpha", TensorRole::Alpha),
    (".lora.alpha", TensorRole::Alpha),
    (".alpha", TensorRole::Alpha),
    (".scalar", TensorRole::Scalar),
    (".diff", TensorRole::Diff),
    (".lokr_w1", TensorRole::LokrW1),
    (".lokr_w1_a", TensorRole::LokrW1A),
    (".lokr_w1_b", TensorRole::LokrW1B),
    (".lokr_w2", TensorRole::LokrW2),
    (".lokr_w2_a", TensorRole::LokrW2A),
    (".lokr_w2_b", TensorRole::LokrW2B),
    (".lokr_t2", TensorRole::LokrT2),
    (".hada_w1_a", TensorRole::HadaW1A),
    (".hada_w1_b", TensorRole::HadaW1B),
    (".hada_w2_a", TensorRole::HadaW2A),
    (".hada_w2_b", TensorRole::HadaW2B),
    (".hada_t1", TensorRole::HadaT1),
    (".hada_t2", TensorRole::HadaT2),
    (".diff_b", TensorRole::DiffB),
    // LyCORIS' differences of norms.
    (".w_norm", TensorRole::Diff),
    (".b_norm", TensorRole::DiffB),
    (".lora_magnitude_vector.default.weight", TensorRole::Magnitude),
    (".lora_magnitude_vector.weight", TensorRole::Magnitude),
    (".lora_magnitude_vector", TensorRole::Magnitude),
    (".magnitude", TensorRole::Magnitude),
    (".dora_scale", TensorRole::DoraScale),
    (".oft_blocks", TensorRole::OftBlocks),
    (".rescale", TensorRole::Rescale),
];

/// A text in the keys of types of adapters that are not read, and the type. A longer text comes before one that is in it.
const OTHER_NETWORKS: [(&str, &str); 18] = [
    (".lora_B.bias", "LoRA with biases"),
    (".lora_E", "AdaLoRA, whose singular values lie between both matrices"),
    (".hada_", "a LoHa of another form"),
    (".lokr_", "a LoKr of another form"),
    (".oft_R", "an OFT of peft, which rotates the inputs of a layer"),
    (".oft_", "an OFT of another form"),
    (".boft_", "a BOFT of peft, whose blocks are arranged in another way"),
    (".a1.weight", "GLoRA"),
    (".glora_", "GLoRA"),
    (".on_input", "IA3"),
    (".ia3_", "IA3"),
    (".lambda_layer", "T-LoRA"),
    (".vera_lambda_", "VeRA"),
    (".randlora_", "RandLoRA"),
    (".fourierft_", "FourierFT"),
    (".hra_", "HRA"),
    (".miss_", "MiSS"),
    (".shira_", "SHiRA"),
];

/// The layers that ai-toolkit saves themselves (`full_train_in_out`).
const WHOLE_LAYERS: [&str; 2] = ["unet_conv_in", "unet_conv_out"];

/// Splits a key into layer and tensor.
pub(super) fn parse_key(key: &str) -> ParsedKey<'_> {
    for (suffix, role) in SUFFIXES {
        if let Some(stem) = key.strip_suffix(suffix) {
            return ParsedKey::Adapter(stem, role);
        }
    }
    if let Some(stem) = key.strip_suffix(".base_layer.weight") {
        return ParsedKey::BaseWeight(stem);
    }
    for (suffix, role) in [(".weight", TensorRole::Whole), (".bias", TensorRole::WholeBias)] {
        if let Some(stem) = key.strip_suffix(suffix).filter(|stem| WHOLE_LAYERS.contains(stem)) {
            return ParsedKey::Adapter(stem, role);
        }
    }
    // XLabs numbers the image's and the text's LoRA of a double block: the number belongs to the layer's name.
    for (suffix, role) in [(".down.weight", TensorRole::Down), (".up.weight", TensorRole::Up)] {
        if let Some(stem) = key.strip_suffix(suffix)
            && (stem.ends_with("_lora1") || stem.ends_with("_lora2"))
        {
            return ParsedKey::Adapter(stem, role);
        }
    }
    match OTHER_NETWORKS.iter().find(|(marker, _)| key.contains(marker)) {
        Some((_, name)) => ParsedKey::OtherNetwork(name),
        None => ParsedKey::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_parsed_by_their_suffix() {
        assert_eq!(
            parse_key("a.b.lora_A.weight"),
            ParsedKey::Adapter("a.b", TensorRole::Down)
        );
        assert_eq!(
            parse_key("a.to_q_lora.up.weight"),
            ParsedKey::Adapter("a.to_q", TensorRole::Up)
        );
        assert_eq!(
            parse_key("a.processor.qkv_lora2.down.weight"),
            ParsedKey::Adapter("a.processor.qkv_lora2", TensorRole::Down)
        );
        assert_eq!(
            parse_key("a.wte.lora_embedding_B"),
            ParsedKey::Adapter("a.wte", TensorRole::EmbeddingUp)
        );
        assert_eq!(parse_key("a.wte.base_layer.weight"), ParsedKey::BaseWeight("a.wte"));
        assert_eq!(parse_key("a.alpha"), ParsedKey::Adapter("a", TensorRole::Alpha));
        assert_eq!(parse_key("a.lokr_w2_b"), ParsedKey::Adapter("a", TensorRole::LokrW2B));
        assert_eq!(parse_key("a.hada_w1_a"), ParsedKey::Adapter("a", TensorRole::HadaW1A));
        assert_eq!(
            parse_key("a.oft_R.weight"),
            ParsedKey::OtherNetwork("an OFT of peft, which rotates the inputs of a layer")
        );
        assert_eq!(
            parse_key("a.oft_diag"),
            ParsedKey::OtherNetwork("an OFT of another form")
        );
        // The keys of LyCORIS and sd-scripts.
        assert_eq!(
            parse_key("a.oft_blocks"),
            ParsedKey::Adapter("a", TensorRole::OftBlocks)
        );
        assert_eq!(parse_key("a.diff"), ParsedKey::Adapter("a", TensorRole::Diff));
        assert_eq!(parse_key("a.diff_b"), ParsedKey::Adapter("a", TensorRole::DiffB));
        assert_eq!(parse_key("a.w_norm"), ParsedKey::Adapter("a", TensorRole::Diff));
        assert_eq!(parse_key("a.b_norm"), ParsedKey::Adapter("a", TensorRole::DiffB));
        assert_eq!(parse_key("conv.weight"), ParsedKey::Unknown);
        assert_eq!(
            parse_key("unet_conv_in.bias"),
            ParsedKey::Adapter("unet_conv_in", TensorRole::WholeBias)
        );
    }
}
