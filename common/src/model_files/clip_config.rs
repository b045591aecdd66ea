//! The config of a CLIP text encoder, which may be part of the config of a whole CLIP model.

use serde_json::{Value, json};

/// The config of a CLIP text encoder. If a CLIP model was saved whole (`CLIPModel`), it is `text_config` there, without the keys that
/// have the values of transformers' class, which are filled in. The config of a text encoder alone is returned as it is.
#[must_use]
pub fn clip_text_config(mut config: Value) -> Value {
    let Some(Value::Object(mut text)) = config.get_mut("text_config").map(Value::take) else {
        return config;
    };
    for (key, value) in [
        ("hidden_size", json!(512)),
        ("intermediate_size", json!(2048)),
        ("num_hidden_layers", json!(12)),
        ("num_attention_heads", json!(8)),
        ("projection_dim", json!(512)),
        ("vocab_size", json!(49408)),
        ("max_position_embeddings", json!(77)),
        ("hidden_act", json!("quick_gelu")),
        ("layer_norm_eps", json!(1e-5)),
        ("eos_token_id", json!(49407)),
    ] {
        text.entry(key).or_insert(value);
    }
    Value::Object(text)
}

#[cfg(test)]
mod tests {
    use super::clip_text_config;
    use serde_json::json;

    #[test]
    fn the_text_encoder_of_a_whole_model_has_the_defaults_of_its_class() {
        let alone = json!({"model_type": "clip_text_model", "hidden_size": 768});
        assert_eq!(clip_text_config(alone.clone()), alone);
        let whole = json!({
            "model_type": "clip", "projection_dim": 768,
            "text_config": {"model_type": "clip_text_model", "hidden_size": 768, "num_attention_heads": 12},
            "vision_config": {"hidden_size": 1024},
        });
        let text = clip_text_config(whole);
        let numbers = [
            "hidden_size",
            "num_attention_heads",
            "intermediate_size",
            "projection_dim",
        ]
        .map(|key| text[key].as_u64());
        assert_eq!(numbers, [768, 12, 2048, 512].map(Some));
        assert_eq!(text["model_type"], "clip_text_model");
    }
}
