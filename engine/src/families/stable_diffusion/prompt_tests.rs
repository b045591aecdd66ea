//! Prompts of several chunks and layers that are left out, against transformers (`tests/reference/make_long_prompts.py`).

use super::text::{CONTEXT, POOLED};
use crate::families::options::{LoadOptions, PromptReading};
use crate::families::{Prompt, load_text_encoders};
use crate::testing::{fixtures, in_portable_mode};
use aitk_common::job::arch::ArchName;
use serde_json::Value;

fn numbers(value: &Value) -> Vec<f32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn assert_near(what: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (a, b)) in got.iter().zip(expected).enumerate() {
        assert!((a - b).abs() < 1e-4 * b.abs().max(1.0), "{what}, {i}: {a} {b}");
    }
}

#[test]
fn long_prompts_and_skipped_layers_match_transformers() {
    let text = std::fs::read(fixtures().join("models/long_prompts.json")).unwrap();
    let report: Value = serde_json::from_slice(&text).unwrap();
    let prompts: Vec<String> = serde_json::from_value(report["prompts"].clone()).unwrap();
    let prompts: Vec<Prompt> = prompts.into_iter().map(Prompt::new).collect();
    for case in report["cases"].as_array().unwrap() {
        let folder = case["folder"].as_str().unwrap();
        let arch = match folder {
            "tiny_sd" => ArchName::Sd1,
            "tiny_sd21" => ArchName::Sd2,
            _ => ArchName::Sdxl,
        };
        let options = LoadOptions {
            prompt_reading: PromptReading {
                clip_skip: case["clip_skip"].as_u64().unwrap() as usize - 1,
                chunks: case["blocks"].as_u64().unwrap() as usize,
                ..PromptReading::default()
            },
            ..LoadOptions::cpu()
        };
        let what = format!("{folder}, {:?}", options.prompt_reading);
        let encoders = load_text_encoders(&fixtures().join(folder), arch, &options).unwrap();
        let got = encoders.encode_prompts(&prompts).unwrap();
        let context = got.get(CONTEXT).unwrap();
        assert_eq!(serde_json::to_value(context.dims()).unwrap(), case["shape"], "{what}");
        let states = context.to_vec3::<f32>().unwrap();
        let (mut some, mut end) = (Vec::new(), Vec::new());
        for prompt in &states {
            let rows = prompt.iter().step_by(7);
            some.extend(rows.flat_map(|row| row.iter().step_by(5).copied()));
            end.extend(prompt.last().unwrap());
        }
        assert_near(&what, &some, &numbers(&case["context"]));
        assert_near(&format!("{what}, end"), &end, &numbers(&case["end"]));
        if !case["pooled"].is_null() {
            let pooled = got.get(POOLED).unwrap().flatten_all().unwrap().to_vec1().unwrap();
            assert_near(&format!("{what}, pooled"), &pooled, &numbers(&case["pooled"]));
        }
        // A prompt alone gives what it gives in a batch.
        let alone = encoders.encode_prompts(&prompts[1..2]).unwrap();
        let alone = alone.get(CONTEXT).unwrap().to_vec3::<f32>().unwrap();
        assert_near(&format!("{what}, alone"), &alone.concat().concat(), &states[1].concat());
    }
}

in_portable_mode! {
    long_prompts_and_skipped_layers_match_transformers,
}
