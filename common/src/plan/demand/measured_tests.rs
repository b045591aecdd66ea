//! Predictions for CPUs beside measurements of real runs (docs/memory-measurements.md), also of weights that are quantised.

use super::test_helpers::{GIB, generation_gib, lora};
use super::*;
use crate::capability::DeviceKind;
use crate::plan::parameter_counts::CompactWeights;
use crate::plan::profile::MemoryProfile;
use serde_json::json;

/// Measured values from docs/memory-measurements.md.
#[test]
fn generation_memory_is_predicted_within_the_measured_range() {
    let unet = json!({"quantize": true, "quantize_te": false, "qtype": "int8"});
    let nf4 = json!({"quantize": true, "quantize_te": false, "qtype": "nf4"});
    let text = json!({"quantize_te": true, "qtype_te": "int8"});
    let both = json!({"quantize": true, "qtype": "int8", "qtype_te": "int8"});
    // Half of the channels in its U-Net.
    let half = Some(ParameterCounts {
        denoiser: 219_789_284,
        text: 123_060_480,
        vae: 83_653_863,
        ..ParameterCounts::default()
    });
    let (whole, balanced, poor, extreme) = (0, 1, 2, 3);
    let plain = json!({});
    for (model, counts, side, profile, taken) in [
        (&unet, None, 256, balanced, 1.42),
        (&nf4, None, 256, balanced, 0.95),
        (&both, None, 256, whole, 2.02),
        (&text, None, 256, extreme, 0.37),
        (&unet, half, 192, balanced, 0.54),
        (&both, half, 192, whole, 1.11),
        (&both, half, 192, extreme, 0.55),
        (&text, half, 192, whole, 1.71),
        (&text, half, 192, extreme, 0.27),
        (&plain, None, 256, whole, 4.63),
        (&plain, None, 256, balanced, 3.73),
        (&plain, None, 512, poor, 2.50),
        (&plain, None, 384, extreme, 0.50),
        (&plain, half, 320, whole, 2.18),
        (&plain, half, 192, extreme, 0.16),
        (&plain, half, 1024, extreme, 0.84),
    ] {
        let predicted = generation_gib(model, side, counts)[profile];
        let over = predicted / taken - 1.0;
        assert!(
            (-0.05..0.10).contains(&over) || (predicted - taken).abs() < 0.025,
            "{model}, {side}, {profile}: {predicted:.2} predicted, {taken} measured"
        );
    }
    // `quantize_te` defaults to `quantize`.
    let said = json!({"quantize": true, "quantize_te": true, "qtype": "int8", "qtype_te": "int8"});
    assert_eq!(generation_gib(&both, 256, None), generation_gib(&said, 256, None));
}

#[test]
fn weights_quantised_in_their_file_stay_quantised() {
    let half = |denoiser_stored: CompactWeights| {
        Some(ParameterCounts {
            denoiser: 219_789_284,
            text: 123_060_480,
            vae: 83_653_863,
            denoiser_stored,
            ..ParameterCounts::default()
        })
    };
    // Linear layers in q8_0, convolutions in 16 bits.
    let stored = CompactWeights {
        quantised: 72_304_640,
        bytes: 76_823_680,
        halves: 147_262_720,
    };
    let (none, int8) = (
        json!({}),
        json!({"quantize": true, "quantize_te": false, "qtype": "int8"}),
    );
    let dense = generation_gib(&none, 192, half(CompactWeights::default()));
    let gguf = generation_gib(&none, 192, half(stored));
    let packed = generation_gib(&int8, 192, half(stored));
    // A weight of 4 bytes takes 17 / 16 or 2 bytes.
    assert!((0.4..0.6).contains(&(dense[0] - gguf[0])), "{dense:?} {gguf:?}");
    // Quantised layers stay in memory when others are streamed.
    assert!((0.05..0.12).contains(&(gguf[3] - dense[3])), "{dense:?} {gguf:?}");
    // `quantize` applies to the weights that are not quantised in the file.
    assert!(packed[0] < gguf[0] && packed[3] > gguf[3], "{gguf:?} {packed:?}");
}

/// Its table is dense in memory, and all of its layers are quantised.
#[test]
fn the_table_of_a_quantised_text_encoder_is_none_of_its_layers() {
    // Qwen3 4B as it is loaded for Z-Image: without its last layer. In q4_k, 256 weights have 144 bytes.
    let (table, norms) = (151_936 * 2560, 35 * (2 * 2560 + 2 * 128));
    let layers: u64 = 35 * 2560 * (2 * 4096 + 2 * 1024 + 3 * 9728);
    let gib = |text_stored: CompactWeights| {
        let counts = ParameterCounts {
            denoiser: 6_154_908_736,
            text: table + layers + norms,
            text_stored,
            ..ParameterCounts::default()
        };
        let job = json!({"process": [{"kind": {"generate": {"model": {"arch": "zimage"},
            "generate": {"width": 512, "height": 512, "prompts": ["a"]}}}}]});
        let need = Demand::of_job(&job, Some(counts), &[]).unwrap().memory.unwrap();
        need.under(MemoryProfile::CpuOnly, DeviceKind::Cpu) as f64 / GIB
    };
    let q4_k = CompactWeights {
        quantised: layers,
        bytes: layers / 256 * 144,
        halves: 0,
    };
    let saved = gib(CompactWeights::default()) - gib(q4_k);
    // With the allocator's share and the margin of a prediction on a CPU.
    let expected = layers as f64 * (4.0 - 144.0 / 256.0) * 1.065 * 1.025 / GIB;
    assert!((saved / expected - 1.0).abs() < 0.02, "{saved} {expected}");
}

/// Measured values of LoRAs of Stable Diffusion 1.5 on a CPU, from docs/memory-measurements.md.
#[test]
fn lora_memory_is_predicted_within_the_measured_range() {
    let half = Some(ParameterCounts {
        denoiser: 219_789_284,
        text: 123_060_480,
        vae: 83_653_863,
        ..ParameterCounts::default()
    });
    let (whole, balanced, poor, extreme) = (0, 1, 2, 3);
    for (counts, side, rank, batch, checkpointed, optimizer, profile, taken) in [
        (None, 256, 16, 1, true, "adamw", whole, 4.63),
        (None, 512, 16, 1, true, "adamw", whole, 4.95),
        (None, 512, 16, 1, false, "adamw", whole, 5.92),
        (None, 384, 16, 1, false, "adamw", whole, 5.23),
        (None, 512, 16, 1, true, "adamw", poor, 2.35),
        (None, 512, 16, 1, true, "adamw", extreme, 0.68),
        (half, 256, 16, 2, false, "adamw", whole, 2.28),
        (half, 256, 16, 2, false, "adamw", balanced, 1.44),
        (half, 192, 64, 1, true, "adamw", extreme, 0.40),
        (half, 192, 64, 1, true, "adamw8bit", extreme, 0.27),
        (half, 192, 4, 1, true, "adamw", extreme, 0.14),
    ] {
        let mut job = lora("sd1", side, "float32", rank);
        let body = job.pointer_mut("/process/0/kind/train").unwrap();
        body["datasets"] = json!([{"resolution": [side]}]);
        let train = &mut body["train"];
        train["batch_size"] = json!(batch);
        train["gradient_checkpointing"] = json!(checkpointed);
        train["optimizer"] = json!(optimizer);
        let need = Demand::of_job(&job, counts, &[]).unwrap().memory.unwrap();
        let predicted = need.under(MemoryProfile::on(true)[profile], DeviceKind::Cpu) as f64 / GIB;
        let over = predicted / taken - 1.0;
        assert!(
            (-0.05..0.10).contains(&over) || (predicted - taken).abs() < 0.025,
            "{side}, rank {rank}, {profile}: {predicted:.2} predicted, {taken} measured"
        );
    }
}

/// Measured values of full fine-tunes of Stable Diffusion 1.5 on a CPU, from docs/memory-measurements.md.
#[test]
fn full_fine_tune_memory_is_predicted_within_the_measured_range() {
    let half = Some(ParameterCounts {
        denoiser: 219_789_284,
        text: 123_060_480,
        vae: 83_653_863,
        ..ParameterCounts::default()
    });
    let (whole, balanced, poor, extreme) = (0, 1, 2, 3);
    for (counts, optimizer, text, profile, taken) in [
        (half, "adamw", false, whole, 4.71),
        (half, "adamw8bit", false, whole, 3.40),
        (half, "adamw", false, balanced, 3.84),
        (half, "adamw8bit", false, balanced, 2.52),
        (half, "adamw", false, poor, 3.06),
        (half, "adamw8bit", false, poor, 1.76),
        (half, "adamw", false, extreme, 3.06),
        (half, "adamw8bit", false, extreme, 1.76),
        (half, "adamw", true, balanced, 6.00),
        (half, "adafactor", false, balanced, 2.47),
        (half, "adamw", true, extreme, 4.35),
        (half, "adafactor", false, extreme, 1.76),
        (None, "adamw8bit", false, whole, 10.18),
        (None, "adafactor", false, extreme, 5.53),
    ] {
        let mut job = lora("sd1", 256, "float32", 1);
        let body = job.pointer_mut("/process/0/kind/train").unwrap();
        body["datasets"] = json!([{"resolution": [256]}]);
        body["network"] = json!(null);
        body["train"]["optimizer"] = json!(optimizer);
        body["train"]["train_text_encoder"] = json!(text);
        let need = Demand::of_job(&job, counts, &[]).unwrap().memory.unwrap();
        let predicted = need.under(MemoryProfile::on(true)[profile], DeviceKind::Cpu) as f64 / GIB;
        let over = predicted / taken - 1.0;
        assert!(
            (-0.05..0.10).contains(&over) || (predicted - taken).abs() < 0.025,
            "{optimizer}, {profile}: {predicted:.2} predicted, {taken} measured"
        );
    }
}
