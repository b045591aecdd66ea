//! Named benchmarks: parts of models at full size with random weights.
//!
//! The FLOPs of each follow from its shapes. They were counted with PyTorch's `FlopCounterMode` on the same operations
//! (`tests/reference/bench/engine.py --flops`); a multiply-add counts as two.

mod flux;
mod operations;
pub mod random_model;
mod sd;
mod sd3;
mod text_models;

use crate::adapters::{Dora, Loha, Lokr, Lora};
use crate::device::Compute;
use crate::device::allocator::FreedMemory;
use crate::error::Result;
use crate::families::{sd1, sdxl};
use aitk_common::job::QType;
use operations::Iteration;
use std::time::{Duration, Instant};
use text_models::Stored;

/// The smallest number of timed runs.
pub const MIN_RUNS: usize = 3;
const MAX_RUNS: usize = 1000;

/// A benchmark.
pub struct Benchmark {
    /// The name, which users give on the command line.
    pub name: &'static str,
    /// A description for people.
    pub about: &'static str,
    /// Floating-point operations of one run; 0 if it is limited by memory bandwidth.
    pub flops: u64,
    /// Creates weights and inputs and returns the run.
    make: fn(&Compute) -> Result<Iteration>,
}

/// The result of a measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measurement {
    /// Median time of one run.
    pub seconds: f64,
    /// How many runs were timed.
    pub runs: usize,
}

const LINEAR_ONE_ROW: &str = "four layers of 3072 to 12288, one row, the weights stored as named";

/// All benchmarks. To add one, add an entry.
pub const BENCHMARKS: &[Benchmark] = &[
    benchmark(
        "text_encoder_sd15_forward",
        "SD 1.5 text encoder, 77 tokens",
        13_298_503_680,
        sd::text_encoder,
    ),
    benchmark(
        "unet_sd15_forward_32",
        "SD 1.5 U-Net, 256 x 256 pixels",
        180_106_444_800,
        |c| sd::unet_forward(c, &sd1::VARIANT, 32),
    ),
    benchmark(
        "unet_sd15_forward_64",
        "SD 1.5 U-Net, 512 x 512 pixels",
        803_273_441_280,
        |c| sd::unet_forward(c, &sd1::VARIANT, 64),
    ),
    benchmark(
        "unet_sd15_lora_step_64",
        "training step, LoRA of rank 16 on every linear layer and 1 x 1 convolution, 512 x 512",
        1_757_914_564_608,
        |c| sd::adapter_step(c, &sd1::VARIANT, &Lora, 64, false),
    ),
    benchmark(
        "unet_sd15_lora_step_64_recomputed",
        "the same training step with gradient checkpointing",
        2_432_043_569_152,
        |c| sd::adapter_step(c, &sd1::VARIANT, &Lora, 64, true),
    ),
    benchmark(
        "unet_sd15_dora_step_64",
        "the same training step with a DoRA of rank 16",
        1_779_025_414_144,
        |c| sd::adapter_step(c, &sd1::VARIANT, &Dora, 64, false),
    ),
    benchmark(
        "unet_sd15_loha_step_64",
        "the same training step with a LoHa of rank 16",
        2_631_163_904_000,
        |c| sd::adapter_step(c, &sd1::VARIANT, &Loha, 64, false),
    ),
    benchmark(
        "unet_sd15_lokr_step_64",
        "the same training step with a LoKr, its factors as square as possible, rank 16",
        2_549_758_462_976,
        |c| sd::adapter_step(c, &sd1::VARIANT, &Lokr::SQUARE, 64, false),
    ),
    benchmark(
        "unet_sd15_full_gradients_32",
        "SD 1.5 U-Net, 256 x 256 pixels, forwards and backwards with the gradients of all weights",
        537_342_853_120,
        |c| sd::full_gradients(c, 32),
    ),
    benchmark(
        "vae_sd15_encode_512",
        "SD 1.5 VAE, pixels to latents",
        1_116_658_466_816,
        |c| sd::vae(c, false),
    ),
    benchmark(
        "vae_sd15_decode_512",
        "SD 1.5 VAE, latents to pixels",
        2_514_518_933_504,
        |c| sd::vae(c, true),
    ),
    benchmark(
        "unet_sdxl_forward_64",
        "SDXL U-Net, 512 x 512 pixels",
        1_588_778_762_240,
        |c| sd::unet_forward(c, &sdxl::VARIANT, 64),
    ),
    benchmark(
        "unet_sdxl_lora_step_64_recomputed",
        "SDXL training step, LoRA of rank 16, gradient checkpointing, 512 x 512",
        4_720_519_573_504,
        |c| sd::adapter_step(c, &sdxl::VARIANT, &Lora, 64, true),
    ),
    benchmark(
        "sdxl_block_forward",
        "one SDXL transformer block, 1024 tokens, width 1280",
        73_688_678_400,
        |c| sd::sdxl_block(c, false),
    ),
    benchmark(
        "sdxl_block_step",
        "one SDXL transformer block, with all gradients",
        220_258_631_680,
        |c| sd::sdxl_block(c, true),
    ),
    benchmark(
        "flux_double_block_forward",
        "one FLUX.1 block with two streams, 512 x 512 pixels, 512 text tokens",
        377_109_872_640,
        |c| flux::double(c, false),
    ),
    benchmark(
        "flux_double_block_step",
        "one FLUX.1 block with two streams, with all gradients",
        1_131_103_125_504,
        |c| flux::double(c, true),
    ),
    benchmark(
        "flux_single_block_forward",
        "one FLUX.1 block with one stream, 512 x 512 pixels, 512 text tokens",
        376_940_003_328,
        |c| flux::single(c, false),
    ),
    benchmark(
        "flux_single_block_step",
        "one FLUX.1 block with one stream, with all gradients",
        1_130_763_386_880,
        |c| flux::single(c, true),
    ),
    benchmark(
        "sd35_block_forward",
        "one SD 3.5 medium block with the second attention, 512 x 512 pixels, 333 text tokens",
        113_991_997_440,
        |c| sd3::block(c, false),
    ),
    benchmark(
        "sd35_block_step",
        "one SD 3.5 medium block, with all gradients",
        341_905_213_440,
        |c| sd3::block(c, true),
    ),
    benchmark(
        "t5_layer_forward",
        "one layer of T5 v1.1 XXL, 512 tokens",
        201_863_462_912,
        |c| text_models::t5(c, false),
    ),
    benchmark(
        "t5_layer_step",
        "one layer of T5 v1.1 XXL, with all gradients",
        605_590_388_736,
        |c| text_models::t5(c, true),
    ),
    benchmark(
        "qwen3_layer_forward",
        "one layer of Qwen3 4B, 512 tokens",
        107_642_617_856,
        |c| text_models::qwen3(c, false),
    ),
    benchmark(
        "qwen3_layer_step",
        "one layer of Qwen3 4B, with all gradients",
        322_927_853_568,
        |c| text_models::qwen3(c, true),
    ),
    benchmark(
        "starcoder2_layer_forward",
        "one layer of StarCoder2 3B, 1024 tokens",
        209_379_655_680,
        |c| text_models::starcoder2(c, false),
    ),
    benchmark(
        "starcoder2_layer_step",
        "one layer of StarCoder2 3B, with all gradients",
        628_138_967_040,
        |c| text_models::starcoder2(c, true),
    ),
    benchmark("linear_one_row_f32", LINEAR_ONE_ROW, 0, |c| {
        text_models::one_row(c, Stored::Plain)
    }),
    benchmark("linear_one_row_bf16", LINEAR_ONE_ROW, 0, |c| {
        text_models::one_row(c, Stored::Bf16)
    }),
    benchmark("linear_one_row_int8", LINEAR_ONE_ROW, 0, |c| {
        text_models::one_row(c, Stored::Quantized(QType::Int8))
    }),
    benchmark("linear_one_row_q8_0", LINEAR_ONE_ROW, 0, |c| {
        text_models::one_row(c, Stored::Quantized(QType::Q8_0))
    }),
    benchmark("linear_one_row_q4_k", LINEAR_ONE_ROW, 0, |c| {
        text_models::one_row(c, Stored::Quantized(QType::Q4K))
    }),
    benchmark(
        "conv_320_64_step",
        "3 x 3 convolution, 320 channels, 64 x 64, with all gradients",
        22_649_241_600,
        operations::conv,
    ),
    benchmark(
        "attention_self_4096_step",
        "attention among 4096 tokens, 8 heads of 40, with all gradients",
        64_424_509_440,
        |c| operations::attention(c, 4096),
    ),
    benchmark(
        "attention_cross_4096_77_step",
        "attention of 4096 tokens to 77, 8 heads of 40, with all gradients",
        1_211_105_280,
        |c| operations::attention(c, 77),
    ),
    benchmark("adamw_step_32m", "AdamW, 32 tensors of a million numbers", 0, |c| {
        operations::adamw(c, false)
    }),
    benchmark(
        "adamw8bit_step_32m",
        "AdamW with 8-bit state, 32 tensors of a million numbers",
        0,
        |c| operations::adamw(c, true),
    ),
    benchmark(
        "safetensors_load_512mib",
        "32 tensors of 16 MiB from a file in the page cache",
        0,
        operations::load,
    ),
];

/// An entry of [`BENCHMARKS`].
const fn benchmark(
    name: &'static str,
    about: &'static str,
    flops: u64,
    make: fn(&Compute) -> Result<Iteration>,
) -> Benchmark {
    Benchmark {
        name,
        about,
        flops,
        make,
    }
}

impl Benchmark {
    /// The benchmark with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        BENCHMARKS.iter().find(|benchmark| benchmark.name == name)
    }

    /// Creates weights and inputs in the dtype of `compute`, calls `ready`, runs once without timing, then measures runs for
    /// `duration`, at least [`MIN_RUNS`].
    ///
    /// # Errors
    /// When the device fails.
    pub fn measure(&self, compute: &Compute, duration: Duration, ready: impl FnOnce()) -> Result<Measurement> {
        // Like a job with enough memory.
        FreedMemory::Retain.apply();
        let mut run = (self.make)(compute)?;
        ready();
        let mut timed = || {
            let start = Instant::now();
            run()?;
            compute.device.synchronize()?;
            Ok::<Duration, crate::error::EngineError>(start.elapsed())
        };
        timed()?;
        let start = Instant::now();
        let mut times = Vec::new();
        while times.len() < MIN_RUNS || (start.elapsed() < duration && times.len() < MAX_RUNS) {
            times.push(timed()?);
        }
        times.sort_unstable();
        let median = times.get(times.len() / 2).copied().unwrap_or_default();
        Ok(Measurement {
            seconds: median.as_secs_f64(),
            runs: times.len(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};
    use std::collections::BTreeSet;

    #[test]
    fn names_of_benchmarks_are_unique() {
        let names: BTreeSet<_> = BENCHMARKS.iter().map(|benchmark| benchmark.name).collect();
        assert_eq!(names.len(), BENCHMARKS.len());
        assert!(Benchmark::named("unet_sd15_forward_64").is_some() && Benchmark::named("unet").is_none());
    }

    #[test]
    fn a_small_benchmark_is_measured() {
        let compute = Compute {
            device: Device::Cpu,
            dtype: DType::F32,
            notes: Vec::new(),
        };
        let mut ready_was_called = false;
        let benchmark = Benchmark::named("attention_cross_4096_77_step").unwrap();
        let measurement = benchmark
            .measure(&compute, Duration::ZERO, || ready_was_called = true)
            .unwrap();
        assert!(ready_was_called && measurement.seconds > 0.0 && measurement.runs >= MIN_RUNS);
    }
}
