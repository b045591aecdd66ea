//! The names of a T5 encoder's tensors in GGUF files, which are those of llama.cpp (`enc.blk.0.attn_q.weight`).

use crate::weights::Index;

/// The tensors of a block: llama.cpp's name, and that of transformers.
const BLOCK: [(&str, &str); 10] = [
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
];

/// The tensors under the names of transformers. Those that have them already, and unknown ones, keep their names.
pub(crate) fn with_transformers_names(index: Index) -> Index {
    if !index.tensors().any(|(name, _)| name.starts_with("enc.blk.")) {
        return index;
    }
    index.renamed(|name, shape| {
        let name = renamed(name).unwrap_or_else(|| name.to_owned());
        Some((name, shape.to_vec()))
    })
}

fn renamed(name: &str) -> Option<String> {
    match name {
        "token_embd.weight" => return Some("shared.weight".to_owned()),
        "enc.output_norm.weight" => return Some("encoder.final_layer_norm.weight".to_owned()),
        _ => {}
    }
    let (number, inner) = name.strip_prefix("enc.blk.")?.split_once('.')?;
    let (layer, kind) = inner.rsplit_once('.')?;
    let (_, layer) = BLOCK.iter().find(|(gguf, _)| *gguf == layer)?;
    Some(format!("encoder.block.{number}.{layer}.{kind}"))
}

#[cfg(test)]
mod tests {
    use super::renamed;

    #[test]
    fn every_tensor_of_a_block_has_its_name() {
        let name = |gguf: &str| renamed(gguf).unwrap_or_default();
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
