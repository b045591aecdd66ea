//! Runs larger jobs with random weights, and compares the memory that they took with the prediction.

use super::check_jobs::CheckJobs;
use super::report::MemoryReport;
use crate::failure::{Failure, chain};
use crate::output::Ui;
use crate::views::device as device_name;
use aitk_common::capability::{Device, DeviceKind};
use aitk_common::fsutil;
use aitk_worker::bench::{RandomModelSize, write_random_parts};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// The model and the images that suit a device.
struct Sizes {
    model: RandomModelSize,
    model_name: &'static str,
    /// Width and height of images in pixels.
    side: u32,
}

impl Sizes {
    fn of(device: &Device) -> Self {
        let (model, model_name, side) = match device.id.kind {
            DeviceKind::Cpu if device.id.is_portable() => (RandomModelSize::Quarter, "a quarter of SD 1.5", 128),
            DeviceKind::Cpu => (RandomModelSize::Half, "half of SD 1.5", 384),
            DeviceKind::Cuda | DeviceKind::Metal => (RandomModelSize::Full, "SD 1.5", 512),
        };
        Self {
            model,
            model_name,
            side,
        }
    }
}

/// Measures an image, and a LoRA training with and without gradient checkpointing.
///
/// # Errors
/// When the model cannot be written.
pub(super) async fn measure(
    ui: &Ui,
    jobs: &CheckJobs,
    device: &Device,
    limit: Duration,
) -> Result<Vec<MemoryReport>, Failure> {
    let start = Instant::now();
    let name = device_name(device.id);
    let sizes = Sizes::of(device);
    let model = jobs.folder(&format!("random_{}", name.replace(':', "_")));
    copy_folder(&jobs.demo_model(), &model)?;
    let text_width = text_width(&model);
    let (folder, size) = (model.clone(), sizes.model);
    tokio::task::spawn_blocking(move || write_random_parts(&folder, size, text_width))
        .await
        .map_err(|error| Failure::failed(error.to_string()))?
        .map_err(|error| Failure::failed(chain(&error)))?;
    // The dtype that most jobs ask for, if it works.
    let dtype = ["bf16", "f16"]
        .into_iter()
        .find(|dtype| device.dtypes.iter().any(|d| d == dtype));
    let dtype = dtype.unwrap_or("f32");
    let side = sizes.side;
    let dataset = jobs.write_dataset(side)?;
    let mut reports = Vec::new();
    for (job_name, what, process) in [
        ("image", format!("image of {side} x {side}"), image(&model, dtype, side)),
        (
            "lora_checkpointed",
            format!("LoRA of rank 16, {side} x {side}, checkpointing"),
            lora(&dataset, &model, dtype, side, true),
        ),
        (
            "lora",
            format!("LoRA of rank 16, {side} x {side}"),
            lora(&dataset, &model, dtype, side, false),
        ),
    ] {
        let job = format!("{}, {dtype}: {what}", sizes.model_name);
        ui.notice(&format!("{name}: {job}"));
        let job_name = format!("memory_{job_name}_{}", name.replace(':', "_"));
        let remaining = limit.saturating_sub(start.elapsed());
        let outcome = jobs.run(&job_name, process, Value::Null, &name, remaining).await;
        let measured = outcome.map_err(|failure| failure.message).map(|outcome| {
            let gib = |name: &str| outcome.metrics.get(name).copied();
            let taken = if device.id.kind == DeviceKind::Cpu {
                gib("memory/peak_gib")
            } else {
                gib("memory/device_process_gib").or_else(|| gib("memory/device_peak_gib"))
            };
            (gib("memory/predicted_gib"), taken)
        });
        reports.push(MemoryReport::new(job, measured));
    }
    fsutil::remove(&model).map_err(|error| Failure::failed(error.to_string()))?;
    Ok(reports)
}

fn image(model: &Path, dtype: &str, side: u32) -> Value {
    json!({
        "type": "to_folder",
        "dtype": dtype,
        "model": {"name_or_path": model, "arch": "sd1"},
        "generate": {
            "sampler": "euler", "width": side, "height": side, "seed": 42, "guidance_scale": 7, "sample_steps": 2,
            "prompts": ["a blue triangle"],
        },
    })
}

fn lora(dataset: &Path, model: &Path, dtype: &str, side: u32, checkpointing: bool) -> Value {
    json!({
        "type": "sd_trainer",
        "network": {"type": "lora", "linear": 16, "linear_alpha": 16},
        "save": {"dtype": "float16", "save_every": 100},
        "datasets": [{"folder_path": dataset, "caption_ext": "txt", "resolution": side}],
        "train": {
            "batch_size": 1, "steps": 2, "optimizer": "adamw8bit", "lr": 1e-4, "noise_scheduler": "ddpm", "dtype": dtype,
            "gradient_checkpointing": checkpointing, "disable_sampling": true,
        },
        "model": {"name_or_path": model, "arch": "sd1"},
    })
}

/// The width of the demo's text encoder.
fn text_width(model: &Path) -> usize {
    let text = std::fs::read_to_string(model.join("text_encoder/config.json")).unwrap_or_default();
    let config: Value = serde_json::from_str(&text).unwrap_or_default();
    let width = config.get("hidden_size").and_then(Value::as_u64);
    width.and_then(|width| usize::try_from(width).ok()).unwrap_or(768)
}

fn copy_folder(from: &Path, to: &Path) -> Result<(), Failure> {
    let failed = |error: std::io::Error| Failure::file("copy a model to", to, &error);
    std::fs::create_dir_all(to).map_err(failed)?;
    for entry in std::fs::read_dir(from).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let target = to.join(entry.file_name());
        if entry.file_type().map_err(failed)?.is_dir() {
            copy_folder(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), target).map_err(failed)?;
        }
    }
    Ok(())
}
