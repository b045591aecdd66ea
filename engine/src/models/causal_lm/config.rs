//! What a decoder consists of, whichever family it belongs to.

use super::rope::RotaryPositions;
use crate::nn::Activation;

/// A family of decoders, by transformers' `model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CausalLmFamily {
    /// `gpt_bigcode`: StarCoder, SantaCoder.
    GptBigCode,
    /// `starcoder2`.
    StarCoder2,
    /// `qwen2`: Qwen2, Qwen2.5, Qwen2.5-Coder.
    Qwen2,
    /// `llama`: Llama, Code Llama and models of the same shape.
    Llama,
}

impl CausalLmFamily {
    /// Every family.
    pub const ALL: [Self; 4] = [Self::GptBigCode, Self::StarCoder2, Self::Qwen2, Self::Llama];

    /// Its `model_type` in `config.json`.
    #[must_use]
    pub fn model_type(self) -> &'static str {
        match self {
            Self::GptBigCode => "gpt_bigcode",
            Self::StarCoder2 => "starcoder2",
            Self::Qwen2 => "qwen2",
            Self::Llama => "llama",
        }
    }

    /// The beginning of the names of all tensors but those of the output layer.
    #[must_use]
    pub fn prefix(self) -> &'static str {
        match self {
            Self::GptBigCode => "transformer",
            Self::StarCoder2 | Self::Qwen2 | Self::Llama => "model",
        }
    }

    /// The names of the embedding, of the list of blocks and of the final norm below [`Self::prefix`].
    pub(super) fn outer_names(self) -> [&'static str; 3] {
        match self {
            Self::GptBigCode => ["wte", "h", "ln_f"],
            Self::StarCoder2 | Self::Qwen2 | Self::Llama => ["embed_tokens", "layers", "norm"],
        }
    }
}

/// The norms of a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Layer norm with weight and bias.
    Layer,
    /// RMS norm.
    Rms,
}

/// The feed-forward networks of a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeedForwardKind {
    /// `c_proj(activation(c_fc(x)))`.
    Plain,
    /// `down_proj(activation(gate_proj(x)) * up_proj(x))`.
    Gated,
}

/// How a decoder knows positions.
#[derive(Clone, Debug, PartialEq)]
pub enum PositionKind {
    /// A table of vectors, one for each position; there are no others.
    Learned,
    /// Queries and keys are rotated.
    Rotary(RotaryPositions),
}

/// What a decoder consists of.
#[derive(Clone, Debug, PartialEq)]
pub struct CausalLmConfig {
    /// The family.
    pub family: CausalLmFamily,
    /// The number of token ids.
    pub vocab_size: usize,
    /// Features per token.
    pub width: usize,
    /// Features of the feed-forward network's hidden layer.
    pub inner_width: usize,
    /// The number of blocks.
    pub layers: usize,
    /// Query heads per block.
    pub heads: usize,
    /// Heads of keys and values per block.
    pub kv_heads: usize,
    /// Features of a head.
    pub head_width: usize,
    /// The longest text in tokens: the length of the table of learned positions, or the context that the model was trained with.
    pub max_positions: usize,
    /// The norms.
    pub norm: NormKind,
    /// The epsilon of the norms.
    pub norm_eps: f64,
    /// The feed-forward networks.
    pub feed_forward: FeedForwardKind,
    /// The activation of the feed-forward networks.
    pub activation: Activation,
    /// How positions are known.
    pub positions: PositionKind,
    /// Whether the projections to queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the output projection of attention has a bias.
    pub attention_output_bias: bool,
    /// Whether the layers of the feed-forward networks have biases.
    pub feed_forward_bias: bool,
    /// Whether scores of attention are divided by the root of the head's width.
    pub scales_scores: bool,
    /// The sliding window of each block: a token attends to itself and the tokens before it, this many together. `None`: to all.
    pub windows: Vec<Option<usize>>,
    /// Whether the output layer is the table of embeddings.
    pub ties_embeddings: bool,
    /// The token ids that end a text.
    pub eos_token_ids: Vec<u32>,
    /// The token whose vector gets no gradient as an input (`padding_idx` of PyTorch's `nn.Embedding`).
    pub padding_id: Option<u32>,
}

impl CausalLmConfig {
    /// The features of keys, and of values, of a token.
    #[must_use]
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_width
    }

    /// Whether a token's states depend on how long its text is, besides on the tokens before it.
    #[must_use]
    pub fn depends_on_length(&self) -> bool {
        match &self.positions {
            PositionKind::Learned => false,
            PositionKind::Rotary(rotary) => rotary.depends_on_length(),
        }
    }
}
