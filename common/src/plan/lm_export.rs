//! Predicts the memory of exporting a language model (`lm_export`), from the shapes of the model.
//!
//! The weights stay in their files: one tensor at a time is in memory, in float32, with what is made of it
//! (`processes/src/lm_export`, `kernels/src/weights/gguf_write.rs`).

use super::device_factors::{CPU_LANGUAGE, Need, Phase};
use super::json::text;
use super::need::MemoryNeed;
use super::parameter_counts::ParameterCounts;
use super::shapes::LanguageShapes;
use serde_json::Value;

/// Bytes of a number in memory: float32.
const NUMBER: f64 = 4.0;
/// Numbers of a tensor of a GGUF file that are converted at a time.
const CHUNK: f64 = (16 << 20) as f64;
/// Bytes of a number of such a chunk: its copy in float32, and what becomes of it. 16-bit floats exist as numbers and as bytes, blocks twice.
const CHUNK_NUMBER: f64 = 8.0;
/// Bytes of a token and its merge in the metadata of a GGUF file: two texts and a number.
const TOKEN: f64 = 150.0;
/// The rank of a LoRA, whose file the planner does not know.
const ASSUMED_RANK: f64 = 16.0;

/// The memory of a process of type `lm_export`. `None`: the model is not known.
pub(super) fn memory(body: &Value, counts: Option<ParameterCounts>) -> Option<MemoryNeed> {
    let shapes = counts?.decoder?;
    let is_gguf = text(body, "/save/format") != Some("hf");
    let loras = lora_count(body);
    let table = f64::from(shapes.vocabulary) * f64::from(shapes.width);
    let layer = largest_layer(&shapes);
    let chunk = |numbers: f64| match is_gguf {
        true => CHUNK_NUMBER * numbers.min(CHUNK),
        false => 0.0,
    };
    // Of a folder, the magnitudes of a tensor are a second one, for its largest number. The 16-bit tensor that is written is smaller.
    let table_tensors = if is_gguf { 1.0 } else { 2.0 };
    // Of a layer of a GGUF file, the order of the rows may change, which makes a copy. With a LoRA there are the weight, its scaled change and
    // the sum, or before the sum the change.
    let layer_tensors = if loras > 0.0 { 3.0 } else { 2.0 };
    let transient = (table_tensors * NUMBER * table + chunk(table)).max(layer_tensors * NUMBER * layer + chunk(layer));
    let metadata = if is_gguf {
        TOKEN * f64::from(shapes.vocabulary)
    } else {
        0.0
    };
    let lora = loras * lora_bytes(&shapes);
    let need = Need {
        weights: 0.0,
        quantised: 0.0,
        phases: vec![Phase {
            name: "exporting",
            held: metadata + lora,
            transient,
        }],
        recycled: 0.0,
        small_fraction: 0.0,
        returns_freed_memory: true,
        has_several_images: false,
    };
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let bytes = need.bytes(&CPU_LANGUAGE).clamp(0.0, 1e18) as u64;
    Some(MemoryNeed::new([[0; 4]; 2], [bytes; 4]))
}

/// Numbers of the largest weight of a block.
fn largest_layer(shapes: &LanguageShapes) -> f64 {
    let [queries, keys_and_values] = attention_widths(shapes);
    f64::from(shapes.width) * f64::from(shapes.intermediate).max(queries + keys_and_values)
}

/// Features of the queries, and of the keys and values together.
fn attention_widths(shapes: &LanguageShapes) -> [f64; 2] {
    let [heads, kv_heads] =
        [shapes.heads, shapes.kv_heads].map(|heads| f64::from(heads) * f64::from(shapes.head_width));
    [heads, 2.0 * kv_heads]
}

/// How many LoRAs the config names for its model.
pub(super) fn lora_count(body: &Value) -> f64 {
    let first = body.pointer("/model/lora_path").is_some_and(Value::is_string);
    let others = body
        .pointer("/model/loras")
        .and_then(Value::as_array)
        .map_or(0, Vec::len);
    (usize::from(first) + others) as f64
}

/// Bytes of a LoRA of all layers of the blocks, in float32.
pub(super) fn lora_bytes(shapes: &LanguageShapes) -> f64 {
    let (width, inner) = (f64::from(shapes.width), f64::from(shapes.intermediate));
    let [queries, keys_and_values] = attention_widths(shapes);
    let feed_forward_layers = if shapes.gated { 3.0 } else { 2.0 };
    // Queries and output, keys and values, feed-forward.
    let sides = 2.0 * (width + queries) + 2.0 * width + keys_and_values + feed_forward_layers * (width + inner);
    NUMBER * f64::from(shapes.layers) * ASSUMED_RANK * sides
}

#[cfg(test)]
mod tests {
    use super::memory;
    use crate::capability::DeviceKind;
    use crate::plan::parameter_counts::ParameterCounts;
    use crate::plan::profile::MemoryProfile;
    use crate::plan::shapes::{LanguageKind, LanguageShapes};
    use serde_json::{Value, json};

    fn gib(vocabulary: u32, width: u32, body: &Value) -> f64 {
        let counts = ParameterCounts {
            decoder: Some(LanguageShapes {
                kind: LanguageKind::Decoder,
                width,
                heads: width / 64,
                kv_heads: 2,
                head_width: 64,
                intermediate: 4 * width,
                layers: 24,
                vocabulary,
                ..LanguageShapes::default()
            }),
            ..ParameterCounts::default()
        };
        let need = memory(body, Some(counts)).unwrap();
        need.under(MemoryProfile::CpuOnly, DeviceKind::Cpu) as f64 / f64::from(1 << 30)
    }

    #[test]
    fn one_tensor_is_in_memory_with_what_is_made_of_it() {
        let gguf = json!({"save": {"format": "gguf"}, "model": {"lora_path": null}});
        let folder = json!({"save": {"format": "hf"}, "model": {"lora_path": null}});
        // The table alone has 0.19 GiB. Exports of such a model took 0.34 to 0.40 GiB.
        let small = gib(49_152, 1024, &gguf);
        assert!((0.38..0.45).contains(&small), "{small}");
        let small = gib(49_152, 1024, &folder);
        assert!((0.40..0.50).contains(&small), "{small}");
        // A tensor with fewer numbers than are converted at a time makes a smaller chunk.
        let tiny = gib(1000, 64, &gguf);
        assert!(tiny < 0.07, "{tiny}");
        // The table of StarCoder2-3B has 0.56 GiB.
        let large = gib(49_152, 3072, &gguf);
        assert!((0.75..0.95).contains(&large), "{large}");
    }

    #[test]
    fn a_lora_makes_copies_of_a_layer() {
        let body = |lora: Value| json!({"save": {"format": "gguf"}, "model": {"lora_path": lora}});
        let (plain, merged) = (gib(256, 3072, &body(Value::Null)), gib(256, 3072, &body(json!("lora"))));
        // A copy of 0.14 GiB, and the LoRA.
        assert!((0.14..0.35).contains(&(merged - plain)), "{plain} {merged}");
        assert_eq!(memory(&body(Value::Null), None), None);
        // Others are in memory too.
        let several = json!({"save": {"format": "gguf"}, "model": {"lora_path": "lora", "loras": [{"path": "b"}, {"path": "c"}]}});
        let two_more = gib(256, 3072, &several) - merged;
        assert!((0.13..0.17).contains(&two_more), "76 million bytes each: {two_more}");
    }
}
