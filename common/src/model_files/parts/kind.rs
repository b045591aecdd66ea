//! The kinds of parts, and how they are distinguished: by the names of their tensors, and by their configs.

use crate::model_files::inventory::{TensorShapes, read_json_file};
use serde_json::Value;
use std::path::Path;

/// A part of a model that has weights, besides the transformer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelPart {
    /// CLIP-L.
    ClipL,
    /// CLIP-G, OpenCLIP's ViT-bigG.
    ClipG,
    /// T5 v1.1 XXL.
    T5,
    /// Qwen3 4B.
    Qwen3,
    /// The autoencoder with 16 channels.
    Vae,
}

/// The number of layers of CLIP-L. CLIP-G has 32.
const CLIP_L_LAYERS: u64 = 12;

impl ModelPart {
    /// What it is, and a usual name of its file, for messages.
    pub(super) fn name(self) -> (&'static str, &'static str) {
        match self {
            Self::ClipL => ("CLIP-L text encoder", "clip_l.safetensors"),
            Self::ClipG => ("CLIP-G text encoder", "clip_g.safetensors"),
            Self::T5 => ("T5 text encoder", "t5xxl_fp16.safetensors"),
            Self::Qwen3 => ("Qwen3 text encoder", "qwen_3_4b.safetensors"),
            Self::Vae => ("VAE", "ae.safetensors"),
        }
    }

    /// Beginnings of the names of its tensors in a checkpoint of all parts (Stability, ComfyUI).
    pub(super) fn prefixes(self) -> &'static [&'static str] {
        match self {
            Self::ClipL => &["text_encoders.clip_l.transformer."],
            Self::ClipG => &["text_encoders.clip_g.transformer."],
            Self::T5 => &["text_encoders.t5xxl.transformer."],
            Self::Qwen3 => &["text_encoders.qwen3_4b.transformer."],
            Self::Vae => &["vae.", "first_stage_model."],
        }
    }

    /// Beginnings of the names of tensors that only this part has: of transformers and llama.cpp, of diffusers and LDM.
    fn marks(self) -> &'static [&'static str] {
        match self {
            Self::ClipL => &["text_model.encoder.layers.0.self_attn.", "encoder.layers.0.self_attn."],
            Self::ClipG => &[
                "text_model.encoder.layers.12.self_attn.",
                "encoder.layers.12.self_attn.",
            ],
            Self::T5 => &["encoder.block.0.layer.0.SelfAttention.", "enc.blk.0.attn_q."],
            Self::Qwen3 => &[
                "model.layers.0.self_attn.q_norm.",
                "layers.0.self_attn.q_norm.",
                "blk.0.attn_q_norm.",
            ],
            Self::Vae => &[
                "encoder.down.0.",
                "encoder.down_blocks.0.",
                "decoder.up.0.",
                "decoder.up_blocks.0.",
            ],
        }
    }

    /// Beginnings of the names of tensors that similar parts of other models have: the other CLIP, UMT5, language models that see,
    /// the VAE of Stable Diffusion.
    fn foreign_marks(self) -> &'static [&'static str] {
        match self {
            Self::ClipL => &["text_model.encoder.layers.12.", "encoder.layers.12."],
            Self::ClipG => &[],
            Self::T5 => &["encoder.block.1.layer.0.SelfAttention.relative_attention_bias."],
            Self::Qwen3 => &["visual.", "model.visual."],
            Self::Vae => &["quant_conv."],
        }
    }

    /// Whether a file has this part alone.
    pub(super) fn is_in(self, weights: &TensorShapes) -> bool {
        let has_any = |marks: &[&str]| marks.iter().any(|mark| has(weights, mark));
        has_any(self.marks()) && !has_any(self.foreign_marks())
    }

    /// What comes before the names of this part's tensors in a file that has it, alone or with others.
    pub(super) fn prefix_in(self, weights: &TensorShapes) -> Option<&'static str> {
        let prefix = self.prefixes().iter().copied().find(|prefix| has(weights, prefix));
        prefix.or_else(|| self.is_in(weights).then_some(""))
    }

    /// What a folder's config says if it is not that of this part: `config.json` of a text encoder or a VAE of another model.
    /// `scaling_factor`: that of the family's VAE. The VAEs of other models with as many channels have another one.
    pub(super) fn other_part(self, config: &Path, scaling_factor: f64) -> Option<String> {
        let config = read_json_file(config)?;
        let model_type = config.get("model_type").and_then(Value::as_str);
        let is_this = |kind: &&str| match self {
            Self::ClipL | Self::ClipG => kind.starts_with("clip"),
            Self::T5 => *kind == "t5",
            Self::Qwen3 => *kind == "qwen3",
            Self::Vae => true,
        };
        if self == Self::Vae {
            let factor = config.get("scaling_factor").and_then(Value::as_f64)?;
            let is_other = (factor - scaling_factor).abs() > 1e-6;
            return is_other.then(|| format!("`scaling_factor: {factor}`, expected {scaling_factor}"));
        }
        let other_type = model_type.filter(|kind| !is_this(kind));
        other_type.map(|kind| format!("`model_type: {kind}`"))
    }

    /// The text encoder that a `config.json` is of.
    pub(super) fn of_config(config: &Path) -> Option<Self> {
        let config = read_json_file(config)?;
        let layers = config.get("num_hidden_layers").and_then(Value::as_u64);
        match config.get("model_type").and_then(Value::as_str)? {
            "t5" => Some(Self::T5),
            "qwen3" => Some(Self::Qwen3),
            kind if kind.starts_with("clip") && layers.is_some_and(|layers| layers > CLIP_L_LAYERS) => {
                Some(Self::ClipG)
            }
            kind if kind.starts_with("clip") => Some(Self::ClipL),
            _ => None,
        }
    }

    /// Whether a folder has this text encoder's tokenizer directly in it.
    pub(super) fn has_tokenizer(self, folder: &Path) -> bool {
        let has = |name: &str| folder.join(name).is_file();
        let has_merges = || has("vocab.json") && has("merges.txt");
        match self {
            Self::ClipL | Self::ClipG | Self::Qwen3 => has("tokenizer.json") || has_merges(),
            Self::T5 => has("tokenizer.json") || has("spiece.model"),
            Self::Vae => false,
        }
    }

    /// For a message: the tokenizer that no file of weights has, with its files. `None` for CLIP, whose tokenizer is OpenAI's if there is
    /// none.
    pub(super) fn needed_tokenizer(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::T5 => Some(("T5", "tokenizer.json or spiece.model")),
            Self::Qwen3 => Some(("Qwen3", "tokenizer.json, or vocab.json and merges.txt")),
            Self::ClipL | Self::ClipG | Self::Vae => None,
        }
    }
}

/// Whether a tensor's name begins so.
pub(super) fn has(weights: &TensorShapes, prefix: &str) -> bool {
    let mut from = weights.shapes.range(prefix.to_owned()..);
    from.next().is_some_and(|(name, _)| name.starts_with(prefix))
}
