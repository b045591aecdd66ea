//! What gradient checkpointing saves: one training step of a full-size SD 1.5 U-Net (random weights, float32, a LoRA of
//! rank 16 on every linear layer and 1x1 convolution, batch 1), and the most memory the process had at once.
//!
//!     cargo run --release -p aitk-engine --example checkpointing -- resident
//!     cargo run --release -p aitk-engine --example checkpointing -- 1          # every step of the stack for itself
//!     cargo run --release -p aitk-engine --example checkpointing -- 3 96      # three together; 768 x 768 pixels
//!
//! Peak memory is of the whole process, so one run measures one way. Linux only.

use aitk_engine::adapters::{Component, LoraConfig, LoraNetwork};
use aitk_engine::models::sd::SdConfig;
use aitk_engine::models::unet::UNet2DConditionModel;
use aitk_engine::nn::VisitLayers;
use aitk_engine::residency::Residency;
use aitk_engine::rng::TorchGenerator;
use aitk_engine::samplers::{NoiseSchedule, SamplerParams};
use aitk_engine::training::{LossOptions, MicroBatch, loss};
use aitk_engine::weights::Weights;
use candle_core::{DType, Device, Tensor};
use std::error::Error;
use std::io::Write as _;
use std::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let residency = match words.first().map(String::as_str) {
        None | Some("resident") => Residency::Resident,
        Some(steps) => Residency::Recomputed { steps: steps.parse()? },
    };
    let side: usize = words.get(1).map_or(Ok(64), |w| w.parse())?;

    let config = SdConfig::default();
    let mut unet = UNet2DConditionModel::new(&Weights::init(1, &Device::Cpu).frozen(), &config.unet)?;
    unet.residency = residency;
    let lora = LoraConfig {
        rank: 16,
        alpha: 16.0,
        conv_rank: None,
        conv_alpha: 1.0,
        dropout: 0.0,
        only_if_contains: vec![],
        ignore_if_contains: vec![],
    };
    let mut random = TorchGenerator::manual_seed(2);
    let network = LoraNetwork::attach(
        &lora,
        &mut [(Component::Unet, &mut unet as &mut dyn VisitLayers)],
        &mut random,
    )?;
    let mut normal = |shape: &[usize]| Tensor::from_vec(random.randn(shape.iter().product()), shape, &Device::Cpu);
    let batch = MicroBatch {
        latents: normal(&[1, 4, side, side])?,
        noise: normal(&[1, 4, side, side])?,
        timesteps: vec![500],
        context: normal(&[1, 77, 768])?,
        weights: vec![1.0],
        mask: None,
    };
    let schedule = NoiseSchedule::new(&SamplerParams::from_json(&config.scheduler)?)?;
    network.handle.set_training(Some(""));
    let before = memory("VmRSS")?;
    let begun = Instant::now();
    let loss = loss(&unet, &schedule, &LossOptions::default(), &batch, DType::F32)?;
    let forward = begun.elapsed().as_secs_f64();
    let kept = memory("VmRSS")?;
    let grads = loss.backward()?;
    let seconds = begun.elapsed().as_secs_f64();
    let mut square = 0f64;
    for p in network.params() {
        let grad = grads.get(p.var.as_tensor()).ok_or("a parameter without a gradient")?;
        square += f64::from(grad.sqr()?.sum_all()?.to_scalar::<f32>()?);
    }
    let gib = |kib: u64| kib as f64 / (1 << 20) as f64;
    writeln!(
        std::io::stdout(),
        "{residency:?}, {px}x{px} pixels: loss {:.9}, gradient norm {:.9}\n\
         forward {forward:.1} s, with backward {seconds:.1} s\n\
         weights {:.2} GiB, after the forward pass {:.2} GiB, peak {:.2} GiB: activations take {:.2} GiB",
        loss.to_scalar::<f32>()?,
        square.sqrt(),
        gib(before),
        gib(kept),
        gib(memory("VmHWM")?),
        gib(memory("VmHWM")?.saturating_sub(before)),
        px = side * 8,
    )?;
    Ok(())
}

/// A line of `/proc/self/status`, in KiB.
fn memory(key: &str) -> Result<u64, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number
        .ok_or("the system does not say how much memory is used")?
        .parse()?)
}
