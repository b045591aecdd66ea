//! Prints the predicted memory of jobs on a CPU with its parts, so that a change of the planner can be compared with measured jobs in
//! seconds (docs/memory-measurements.md).
//!
//! ```sh
//! cargo run --release -p aitk-common --example memory_parts -- JOB.json 384x256x2 OTHER.yaml
//! ```
//!
//! Each job file is followed by the batches of images that it reads: width x height x images. Without them the resolutions of its data
//! sets are used. A job is predicted under its `cluster.memory_profile`, or else under `cpu_only`.

use aitk_common::job::{LoadOptions, load};
use aitk_common::plan::image_batches::ImageBatch;
use aitk_common::plan::parameter_counts::ParameterCounts;
use aitk_common::plan::phases::{CpuNeed, cpu_need, cpu_phases};
use aitk_common::plan::profile::MemoryProfile;
use std::error::Error;
use std::io::{Write, stdout};
use std::path::Path;

const GIB: f64 = 1_073_741_824.0;

fn main() -> Result<(), Box<dyn Error>> {
    let mut jobs: Vec<(String, Vec<ImageBatch>)> = Vec::new();
    for argument in std::env::args().skip(1) {
        match (batch_of(&argument), jobs.last_mut()) {
            (Some(batch), Some((_, batches))) => batches.push(batch),
            _ => jobs.push((argument, Vec::new())),
        }
    }
    for (file, batches) in jobs {
        match predict(&file, &batches) {
            Ok(text) => write!(stdout(), "{file}{text}")?,
            Err(error) => writeln!(stdout(), "{file}: {error}")?,
        }
    }
    Ok(())
}

/// A batch as `WIDTHxHEIGHTxIMAGES`.
fn batch_of(text: &str) -> Option<ImageBatch> {
    let numbers: Vec<u32> = text
        .split('x')
        .map(|number| number.parse().ok())
        .collect::<Option<_>>()?;
    match *numbers.as_slice() {
        [width, height, images] => Some(ImageBatch {
            process: 0,
            width,
            height,
            images,
        }),
        _ => None,
    }
}

fn predict(file: &str, batches: &[ImageBatch]) -> Result<String, Box<dyn Error>> {
    let loaded = load(file, &LoadOptions::default())?;
    let job = serde_json::to_value(&loaded.spec)?;
    let profile = job.pointer("/cluster/memory_profile").and_then(|name| name.as_str());
    let profile = profile
        .and_then(MemoryProfile::from_name)
        .unwrap_or(MemoryProfile::CpuOnly);
    let process = job.pointer("/process/0").ok_or("it has no process")?;
    let body = process.get("kind").and_then(|kind| kind.as_object()?.values().next());
    let model = body.and_then(|body| body.pointer("/model/name_or_path")?.as_str());
    let counts = model.and_then(|path| ParameterCounts::read(Path::new(path)));
    let need = cpu_need(process, counts, batches, profile).ok_or("the planner does not know its model")?;
    let live = cpu_phases(process, counts, batches, profile).unwrap_or_default();
    let bytes = [live.text, live.encoding, live.denoising, live.decoding, live.step].map(gib);
    let [text, encoding, denoising, decoding, step] = bytes;
    Ok(described(profile, &need)
        + &format!(
            "  live tensors: text {text}, encoding {encoding}, denoising {denoising}, decoding {decoding}, step {step}\n"
        ))
}

fn gib(bytes: f64) -> String {
    format!("{:.3}", bytes / GIB)
}

/// The figures in GiB.
fn described(profile: MemoryProfile, need: &CpuNeed) -> String {
    let mut text = format!(
        ": {} GiB under {}; weights {}, quantised {}, recycled {}, small tensors {:.2}\n",
        gib(need.total),
        profile.name(),
        gib(need.weights),
        gib(need.quantised),
        gib(need.recycled),
        need.small_fraction
    );
    for phase in &need.phases {
        text.push_str(&format!(
            "  {}: {} held, {} that come and go, {} in all\n",
            phase.name,
            gib(phase.held),
            gib(phase.transient),
            gib(phase.total)
        ));
    }
    text
}
