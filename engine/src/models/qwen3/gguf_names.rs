//! The names of Qwen3's tensors in GGUF files, which are those of llama.cpp (`blk.0.attn_q.weight`).

use crate::models::gguf_names::GgufNames;
use crate::weights::Index;

/// The names.
const NAMES: GgufNames = GgufNames {
    blocks: ("blk.", "model.layers."),
    in_block: &[
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("attn_q_norm", "self_attn.q_norm"),
        ("attn_k_norm", "self_attn.k_norm"),
        ("attn_norm", "input_layernorm"),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
        ("ffn_norm", "post_attention_layernorm"),
    ],
    outside: &[
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ],
};

/// The tensors under the names of transformers, as [`GgufNames::with_transformers_names`].
pub(crate) fn with_transformers_names(index: Index) -> Index {
    NAMES.with_transformers_names(index)
}

#[cfg(test)]
mod tests {
    use super::NAMES;

    #[test]
    fn every_tensor_of_a_layer_has_its_name() {
        let name = |gguf: &str| NAMES.renamed(gguf).unwrap_or_default();
        assert_eq!(
            name("blk.35.attn_k_norm.weight"),
            "model.layers.35.self_attn.k_norm.weight"
        );
        assert_eq!(
            name("blk.0.ffn_norm.weight"),
            "model.layers.0.post_attention_layernorm.weight"
        );
        assert_eq!(name("output_norm.weight"), "model.norm.weight");
        assert_eq!(name("enc.blk.0.attn_q.weight"), "");
    }
}
