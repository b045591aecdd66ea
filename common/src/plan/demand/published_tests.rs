//! Predictions for GPUs beside figures that other trainers publish. `cargo test -p aitk-common published -- --nocapture` prints the
//! table of docs/memory-measurements.md.

use super::*;
use crate::capability::DeviceKind;
use crate::plan::profile::MemoryProfile;
use serde_json::json;

const GIB: f64 = 1_073_741_824.0;

/// A published LoRA training.
struct Published {
    what: &'static str,
    arch: &'static str,
    side: u32,
    /// The keys that differ from a LoRA of rank 16 in bf16, with cached text and latents, gradient checkpointing and `adamw8bit`.
    changes: Value,
    /// Published GiB.
    gib: f64,
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
    /// GiB on a GPU under a profile.
    fn predicted(&self, profile: MemoryProfile) -> f64 {
        let mut body = json!({
            "model": {"arch": self.arch}, "network": {"linear": 16},
            "train": {"steps": 1000, "batch_size": 1, "dtype": "bf16", "gradient_checkpointing": true, "optimizer": "adamw8bit",
                "cache_text_embeddings": true},
            "datasets": [{"resolution": [self.side], "cache_latents": true}]});
        merge(&mut body, &self.changes);
        let job = json!({"process": [{"type": "sd_trainer", "kind": {"train": body}}]});
        let need = Demand::of_job(&job, None, &[]).unwrap().memory.unwrap();
        need.under(profile, DeviceKind::Cuda) as f64 / GIB
    }

    /// The prediction with everything on the GPU, compared with the published figure.
    fn excess(&self) -> f64 {
        let predicted = self.predicted(MemoryProfile::FullGpu);
        let excess = predicted / self.gib - 1.0;
        println!(
            "| {} | {:.1} | {predicted:.1} | {:+.0} % | {} |",
            self.what,
            self.gib,
            100.0 * excess,
            self.source
        );
        excess
    }
}

fn published(
    what: &'static str,
    (arch, side): (&'static str, u32),
    changes: Value,
    gib: f64,
    source: &'static str,
) -> Published {
    Published {
        what,
        arch,
        side,
        changes,
        gib,
        source,
    }
}

fn quantised(qtype: &str) -> Value {
    json!({"model": {"quantize": true, "qtype": qtype}})
}

/// FLUX.1 in 8 bits, of which sd-scripts swaps this many of 35 pairs of blocks: the share of the blocks' bytes that is offloaded.
fn swapped(blocks: f64) -> Value {
    let double = (blocks / 2.0).floor();
    let single = 2.0 * (blocks - double);
    let share = (339.8 * double + 141.6 * single) / (339.8 * 19.0 + 141.6 * 38.0);
    json!({"model": {"quantize": true, "qtype": "qfloat8", "layer_offloading": true,
        "layer_offloading_transformer_percent": share, "layer_offloading_text_encoder_percent": 0.0}})
}

const SD_SCRIPTS: &str = "sd-scripts, docs/flux_train_network.md";
const SWEEP: &str = "SimpleTuner, sweep on an H100";
const GB: f64 = 1e9 / GIB;

#[test]
fn loras_of_flux_need_what_is_published() {
    let flux = |what, side, changes, gib, source| published(what, ("flux", side), changes, gib, source);
    let rows = [
        flux(
            "FLUX.1, 512 x 768, bf16",
            627,
            json!({}),
            26.0 * GB,
            "Hugging Face, blog flux-qlora",
        ),
        flux(
            "FLUX.1, 512, nf4",
            512,
            quantised("nf4"),
            9090.0 / 1024.0,
            "SimpleTuner, docs",
        ),
        flux(
            "FLUX.1, 1024, int8",
            1024,
            quantised("int8"),
            18.0 * GB,
            "SimpleTuner, docs",
        ),
        flux(
            "FLUX.1, 1024, float8, rank 4",
            1024,
            json!({"network": {"linear": 4}, "model": {"quantize": true, "qtype": "qfloat8"}}),
            17.0 * GB,
            "kohya_ss, issue 2701",
        ),
        flux(
            "the same with 16 of 35 blocks swapped",
            1024,
            swapped(16.0),
            12.0,
            SD_SCRIPTS,
        ),
        flux("22 swapped", 1024, swapped(22.0), 10.0, SD_SCRIPTS),
        flux("28 swapped", 1024, swapped(28.0), 8.0, SD_SCRIPTS),
    ];
    for row in &rows {
        let excess = row.excess();
        assert!(excess.abs() < 0.15, "{}: {excess}", row.what);
    }
}

#[test]
fn loras_of_other_families_need_at_least_what_is_published() {
    let plain = || json!({"train": {"gradient_checkpointing": false}});
    let rows = [
        published("SD 1.5, 512, no checkpointing", ("sd1", 512), plain(), 2.87, SWEEP),
        published("SD 1.5, 512", ("sd1", 512), json!({}), 1.98, SWEEP),
        published("SDXL, 1024, no checkpointing", ("sdxl", 1024), plain(), 13.03, SWEEP),
        published("SDXL, 1024", ("sdxl", 1024), json!({}), 6.53, SWEEP),
        published("SDXL, 1024, int8", ("sdxl", 1024), quantised("int8"), 4.64, SWEEP),
        published("Z-Image, 1024", ("zimage", 1024), json!({}), 12.9, SWEEP),
        published("Z-Image, 1024, int8", ("zimage", 1024), quantised("int8"), 7.25, SWEEP),
    ];
    for row in &rows {
        let excess = row.excess();
        // The driver's context and the kernels are about 0.6 GiB.
        assert!((-0.1..0.35 + 0.6 / row.gib).contains(&excess), "{}: {excess}", row.what);
    }
}

/// The cards for which sd-scripts gives options for a LoRA of FLUX.1 in 8 bits: each has a profile that fits.
#[test]
fn a_lora_of_flux_fits_each_card_for_which_options_are_published() {
    let job = published("", ("flux", 1024), quantised("qfloat8"), 0.0, "");
    for (card, expected) in [
        (24.0, MemoryProfile::FullGpu),
        (16.0, MemoryProfile::GpuPoor),
        (12.0, MemoryProfile::GpuPoor),
        (8.0, MemoryProfile::Extreme),
    ] {
        // Free memory less the driver's share and a sixteenth, as a worker offers it.
        let budget = (card - 0.3) * 15.0 / 16.0;
        let profiles = MemoryProfile::on(false);
        let found = profiles.iter().find(|profile| job.predicted(**profile) <= budget);
        assert_eq!(found, Some(&expected), "{card} GiB");
    }
}

/// SimpleTuner's documentation gives 3.5 seconds for a step of a LoRA of FLUX.1 at 1024 on an RTX 4090.
#[test]
fn a_step_of_flux_takes_the_published_time() {
    let job = json!({"process": [{"kind": {"train": {
        "model": {"arch": "flux"}, "network": {"linear": 16},
        "train": {"steps": 1, "dtype": "bf16", "gradient_checkpointing": true}, "datasets": [{"resolution": [1024]}]}}}]});
    let units = Demand::of_job(&job, None, &[]).unwrap().passes();
    // Its matrix products in bf16.
    let rate = 160_000;
    let seconds = units
        * FamilySpeed::of("flux")
            .unwrap()
            .estimated_seconds_per_pass(DeviceKind::Cuda, rate);
    println!("{seconds:.2} s");
    assert!((seconds / 3.5 - 1.0).abs() < 0.15, "{seconds} s");
}

/// The rows of the table of docs/memory.md.
fn table_rows() -> Vec<String> {
    let lora = |arch: &str, side: u32, dtype: &str| {
        json!({"train": {
            "model": {"arch": arch}, "network": {"linear": 16},
            "train": {"dtype": dtype, "optimizer": "adamw8bit"},
            "datasets": [{"resolution": [side], "cache_latents_to_disk": true}]}})
    };
    let full = |arch: &str, dtype: &str, optimizer: &str| {
        let mut job = lora(arch, 1024, dtype);
        job["train"]["network"] = Value::Null;
        job["train"]["train"]["optimizer"] = optimizer.into();
        job
    };
    let image = |arch: &str, side: u32, dtype: &str| {
        json!({"generate": {
            "model": {"arch": arch, "dtype": dtype},
            "generate": {"width": side, "height": side, "guidance_scale": 7.0, "prompts": ["a photo of a cat"]}}})
    };
    let rows = [
        ("SD 1.5, LoRA of rank 16, 512 x 512, bf16", lora("sd1", 512, "bf16")),
        ("SD 1.5, image of 512 x 512, fp16", image("sd1", 512, "fp16")),
        ("SDXL, LoRA of rank 16, 1024 x 1024, bf16", lora("sdxl", 1024, "bf16")),
        ("SDXL, image of 1024 x 1024, bf16", image("sdxl", 1024, "bf16")),
        (
            "SDXL, the same in fp16, where its autoencoder computes in float32",
            image("sdxl", 1024, "fp16"),
        ),
        (
            "SDXL, full fine-tune (float32), `adamw8bit`, 1024 x 1024",
            full("sdxl", "float32", "adamw8bit"),
        ),
        ("SDXL, the same with `adafactor`", full("sdxl", "float32", "adafactor")),
        (
            "FLUX.1-dev, LoRA of rank 16, 1024 x 1024, bf16, `adamw8bit`",
            lora("flux", 1024, "bf16"),
        ),
        ("FLUX.1-dev, image of 1024 x 1024, bf16", image("flux", 1024, "bf16")),
        (
            "FLUX.1-dev, full fine-tune in bf16, `adafactor`, 1024 x 1024",
            full("flux", "bf16", "adafactor"),
        ),
        (
            "Stable Diffusion 3.5 large, LoRA of rank 16, 1024 x 1024, bf16, `adamw8bit`",
            lora("sd3", 1024, "bf16"),
        ),
        (
            "Stable Diffusion 3.5 large, image of 1024 x 1024, bf16",
            image("sd3", 1024, "bf16"),
        ),
        (
            "Z-Image, LoRA of rank 16, 1024 x 1024, bf16, `adamw8bit`",
            lora("zimage", 1024, "bf16"),
        ),
        ("Z-Image, image of 1024 x 1024, bf16", image("zimage", 1024, "bf16")),
    ];
    let row = |(what, kind): &(&str, Value)| {
        let job = json!({"process": [{"kind": kind}]});
        let need = Demand::of_job(&job, None, &[]).unwrap().memory.unwrap();
        let gib = MemoryProfile::on(false)
            .map(|profile| format!("{:.1}", need.under(profile, DeviceKind::Cuda) as f64 / GIB));
        format!("| {what} | {} |", gib.join(" | "))
    };
    rows.iter().map(row).collect()
}

#[test]
fn the_table_of_docs_memory_md_is_up_to_date() {
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/memory.md");
    let docs = std::fs::read_to_string(docs).unwrap();
    let rows = table_rows();
    for row in &rows {
        assert!(
            docs.contains(row.as_str()),
            "docs/memory.md needs these rows:\n{}",
            rows.join("\n")
        );
    }
}
