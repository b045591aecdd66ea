//! The names of a T5 encoder's tensors in GGUF files, which are those of llama.cpp (`enc.blk.0.attn_q.weight`).

use crate::models::gguf_names::GgufNames;
use crate::weights::Index;

/// The names.
const NAMES: GgufNames = GgufNames {
    blocks: ("enc.blk.", "encoder.block."),
    in_block: &[
        ("attn_q", "layer.0.SelfAttention.q"),
        ("attn_k", "layer.0.SelfAttention.k"),
        ("attn_v", "layer.0.SelfAttention.v"),
        ("attn_o", "layer.0.SelfAttention.o"),
        ("attn_rel_b", "layer.0.SelfAttention.relative_attention_bias"),
        ("attn_norm", "layer.0.layer_norm"),
        ("ffn_gate", "layer.1.DenseReluDense.wi_0"),
        ("ffn_up", "layer.1.DenseReluDense.wi_1"),
        ("ffn_down", "layer.1.DenseReluDense.wo"),
        ("ffn_norm", "layer.1.layer_norm"),
    ],
    outside: &[
        ("token_embd.weight", "shared.weight"),
        ("enc.output_norm.weight", "encoder.final_layer_norm.weight"),
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
    fn every_tensor_of_a_block_has_its_name() {
        let name = |gguf: &str| NAMES.renamed(gguf).unwrap_or_default();
        assert_eq!(
            name("enc.blk.23.ffn_down.weight"),
            "encoder.block.23.layer.1.DenseReluDense.wo.weight"
        );
        assert_eq!(
            name("enc.blk.0.attn_rel_b.weight"),
            "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        );
        assert_eq!(name("enc.blk.1.cross_attn_q.weight"), "");
        assert_eq!(name("dec.blk.1.attn_q.weight"), "");
    }
}
