//! llama.cpp's names of the families, and the names and the orders of rows of their tensors.

use super::super::config::{CausalLmConfig, CausalLmFamily};
use crate::models::gguf_names::GgufNames;
use crate::weights::RowOrder;

/// The names of Llama's tensors; those of Qwen2 are the same.
const LLAMA: GgufNames = GgufNames {
    blocks: ("blk.", "model.layers."),
    in_block: &[
        ("attn_norm", "input_layernorm"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("ffn_norm", "post_attention_layernorm"),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
    ],
    outside: &[
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
    ],
};

/// The names of StarCoder2's tensors.
const STARCODER2: GgufNames = GgufNames {
    blocks: ("blk.", "model.layers."),
    in_block: &[
        ("attn_norm", "input_layernorm"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("ffn_norm", "post_attention_layernorm"),
        ("ffn_up", "mlp.c_fc"),
        ("ffn_down", "mlp.c_proj"),
    ],
    outside: &[
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output_norm.bias", "model.norm.bias"),
        ("output.weight", "lm_head.weight"),
    ],
};

/// The names of StarCoder's tensors.
const STARCODER: GgufNames = GgufNames {
    blocks: ("blk.", "transformer.h."),
    in_block: &[
        ("attn_norm", "ln_1"),
        ("attn_qkv", "attn.c_attn"),
        ("attn_output", "attn.c_proj"),
        ("ffn_norm", "ln_2"),
        ("ffn_up", "mlp.c_fc"),
        ("ffn_down", "mlp.c_proj"),
    ],
    outside: &[
        ("token_embd.weight", "transformer.wte.weight"),
        ("position_embd.weight", "transformer.wpe.weight"),
        ("output_norm.weight", "transformer.ln_f.weight"),
        ("output_norm.bias", "transformer.ln_f.bias"),
        ("output.weight", "lm_head.weight"),
    ],
};

/// The name of the table by whose numbers the frequencies of rotary embeddings are divided.
pub(super) const ROPE_FACTORS: &str = "rope_freqs.weight";
/// The names of such tables of `longrope`: for texts up to the original context, and for longer ones.
pub(super) const LONGROPE_FACTORS: [&str; 2] = ["rope_factors_short.weight", "rope_factors_long.weight"];
/// The names of all tables of factors.
pub(super) const ROPE_TABLES: [&str; 3] = [ROPE_FACTORS, LONGROPE_FACTORS[0], LONGROPE_FACTORS[1]];

/// `general.architecture` of a family.
pub(super) fn architecture(family: CausalLmFamily) -> &'static str {
    match family {
        CausalLmFamily::GptBigCode => "starcoder",
        CausalLmFamily::StarCoder2 => "starcoder2",
        CausalLmFamily::Qwen2 => "qwen2",
        CausalLmFamily::Llama => "llama",
    }
}

/// The names of a family's tensors.
pub(super) fn names(family: CausalLmFamily) -> &'static GgufNames {
    match family {
        CausalLmFamily::GptBigCode => &STARCODER,
        CausalLmFamily::StarCoder2 => &STARCODER2,
        CausalLmFamily::Qwen2 | CausalLmFamily::Llama => &LLAMA,
    }
}

/// The order in which the rows of a tensor of a file are those of transformers' tensor `name`. `None`: they are the same.
///
/// llama.cpp rotates neighbouring features of a head of Llama, and transformers those of its two halves. It has queries, keys and values of
/// StarCoder one after the other, and transformers, without multi-query attention, head by head.
pub(super) fn row_order(config: &CausalLmConfig, name: &str) -> Option<RowOrder> {
    let is_of = |layer: &str| name.rsplit_once('.').is_some_and(|(path, _)| path.ends_with(layer));
    let halves = |heads: usize| {
        Some(RowOrder {
            outer: heads,
            first: config.head_width / 2,
            second: 2,
            inner: 1,
        })
    };
    match config.family {
        CausalLmFamily::Llama if is_of("self_attn.q_proj") => halves(config.heads),
        CausalLmFamily::Llama if is_of("self_attn.k_proj") => halves(config.kv_heads),
        CausalLmFamily::GptBigCode if is_of("attn.c_attn") && config.kv_heads > 1 => Some(RowOrder {
            outer: 1,
            first: 3,
            second: config.heads,
            inner: config.head_width,
        }),
        _ => None,
    }
}
