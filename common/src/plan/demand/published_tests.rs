//! Predictions for GPUs beside figures that other trainers publish. `-- --nocapture` prints the table of docs/memory.md.

use super::*;
use crate::plan::profile::MemoryProfile;
use serde_json::json;

const GIB: f64 = 1_073_741_824.0;
/// GB in the publications.
const GB: f64 = 1e9;

/// A published training.
struct Published {
    what: &'static str,
    arch: &'static str,
    side: u32,
    /// The keys that differ from a LoRA of rank 16 in bf16 with cached text, latents and gradient checkpointing.
    changes: Value,
    profile: MemoryProfile,
    /// Published bytes.
    bytes: f64,
    source: &'static str,
}

fn merge(into: &mut Value, changes: &Value) {
    match (into, changes) {
        (Value::Object(into), Value::Object(changes)) => {
            for (key, value) in changes {
                merge(into.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (into, changes) => *into = changes.clone(),
    }
}

impl Published {
    fn predicted(&self) -> f64 {
        let mut body = json!({
            "model": {"arch": self.arch}, "network": {"linear": 16},
            "train": {"steps": 1000, "batch_size": 1, "dtype": "bf16", "gradient_checkpointing": true, "optimizer": "adamw8bit",
                "cache_text_embeddings": true},
            "datasets": [{"resolution": [self.side], "cache_latents": true}]});
        merge(&mut body, &self.changes);
        let job = json!({"process": [{"type": "sd_trainer", "kind": {"train": body}}]});
        let need = Demand::of_job(&job, None, &[]).unwrap().memory.unwrap();
        need.under(self.profile, false) as f64
    }
}

#[test]
fn predictions_beside_published_figures() {
    use MemoryProfile::FullGpu;
    let row = |what, arch, side, changes, profile, bytes, source| Published {
        what,
        arch,
        side,
        changes,
        profile,
        bytes,
        source,
    };
    let fp8 = |swapped: f64| {
        json!({"model": {"quantize": true, "qtype": "qfloat8", "layer_offloading": true,
        "layer_offloading_transformer_percent": swapped, "layer_offloading_text_encoder_percent": 0.0}})
    };
    let st = "SimpleTuner, sweep on an H100";
    let sd = "sd-scripts, docs/flux_train_network.md";
    let rows = [
        row(
            "SD 1.5 512, no checkpointing",
            "sd1",
            512,
            json!({"train": {"gradient_checkpointing": false}}),
            FullGpu,
            2.87 * GIB,
            st,
        ),
        row("SD 1.5 512", "sd1", 512, json!({}), FullGpu, 1.98 * GIB, st),
        row(
            "SDXL 1024, no checkpointing",
            "sdxl",
            1024,
            json!({"train": {"gradient_checkpointing": false}}),
            FullGpu,
            13.03 * GIB,
            st,
        ),
        row("SDXL 1024", "sdxl", 1024, json!({}), FullGpu, 6.53 * GIB, st),
        row(
            "SDXL 1024, int8",
            "sdxl",
            1024,
            json!({"model": {"quantize": true, "qtype": "int8"}}),
            FullGpu,
            4.64 * GIB,
            st,
        ),
        row("SD3 1024", "sd3", 1024, json!({}), FullGpu, 7.67 * GIB, st),
        row("Z-Image 1024", "zimage", 1024, json!({}), FullGpu, 12.9 * GIB, st),
        row(
            "Z-Image 1024, int8",
            "zimage",
            1024,
            json!({"model": {"quantize": true, "qtype": "int8"}}),
            FullGpu,
            7.25 * GIB,
            st,
        ),
        row(
            "FLUX 512x768",
            "flux",
            627,
            json!({}),
            FullGpu,
            26.0 * GB,
            "HF blog flux-qlora",
        ),
        row(
            "FLUX 512x768 nf4",
            "flux",
            627,
            json!({"model": {"quantize": true, "qtype": "nf4"}}),
            FullGpu,
            9.0 * GB,
            "HF blog flux-qlora",
        ),
        row(
            "FLUX 1024 fp8 rank 4",
            "flux",
            1024,
            json!({"network": {"linear": 4}, "model": {"quantize": true, "qtype": "qfloat8"}}),
            FullGpu,
            17.0 * GB,
            "KG #2701",
        ),
        row("FLUX 1024 fp8 N=16", "flux", 1024, fp8(0.425), FullGpu, 12.0 * GIB, sd),
        row("FLUX 1024 fp8 N=22", "flux", 1024, fp8(0.58), FullGpu, 10.0 * GIB, sd),
        row("FLUX 1024 fp8 N=28", "flux", 1024, fp8(0.735), FullGpu, 8.0 * GIB, sd),
        row(
            "FLUX 1024 bf16 GPU poor",
            "flux",
            1024,
            json!({}),
            MemoryProfile::GpuPoor,
            17.0 * GIB,
            "",
        ),
        row(
            "FLUX 1024 bf16 extreme",
            "flux",
            1024,
            json!({}),
            MemoryProfile::Extreme,
            8.0 * GIB,
            "",
        ),
        row(
            "SD3.5 M full 512 Prodigy",
            "sd3",
            512,
            json!({"network": null, "train": {"optimizer": "prodigy", "dtype": "bf16"}}),
            FullGpu,
            27.2 * GB,
            "SD PR 1866",
        ),
    ];
    println!("| job | published, GiB | predicted, GiB | | source |\n|---|---|---|---|---|");
    for row in &rows {
        let predicted = row.predicted();
        println!(
            "| {} | {:.2} | {:.2} | {:+.0} % | {} |",
            row.what,
            row.bytes / GIB,
            predicted / GIB,
            100.0 * (predicted / row.bytes - 1.0),
            row.source
        );
    }
}
