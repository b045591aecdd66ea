//! The names of Qwen3's tensors in GGUF files, which are those of llama.cpp (`blk.0.attn_q.weight`).

use crate::weights::Index;

/// The tensors of a layer: llama.cpp's name, and that of transformers.
const LAYER: [(&str, &str); 11] = [
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
];

/// The tensors under the names of transformers. Those that have them already, and unknown ones, keep their names.
pub(crate) fn with_transformers_names(index: Index) -> Index {
    if !index.tensors().any(|(name, _)| name.starts_with("blk.")) {
        return index;
    }
    index.renamed(|name, shape| {
        let name = renamed(name).unwrap_or_else(|| name.to_owned());
        Some((name, shape.to_vec()))
    })
}

fn renamed(name: &str) -> Option<String> {
    match name {
        "token_embd.weight" => return Some("model.embed_tokens.weight".to_owned()),
        "output_norm.weight" => return Some("model.norm.weight".to_owned()),
        _ => {}
    }
    let (number, inner) = name.strip_prefix("blk.")?.split_once('.')?;
    let (layer, kind) = inner.rsplit_once('.')?;
    let (_, layer) = LAYER.iter().find(|(gguf, _)| *gguf == layer)?;
    Some(format!("model.layers.{number}.{layer}.{kind}"))
}

#[cfg(test)]
mod tests {
    use super::renamed;

    #[test]
    fn every_tensor_of_a_layer_has_its_name() {
        let name = |gguf: &str| renamed(gguf).unwrap_or_default();
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
