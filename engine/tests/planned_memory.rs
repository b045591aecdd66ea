//! Compares the memory that the planner predicts for GPUs with what the engine takes in portable mode: random models and
//! jobs, each phase by itself, counted by the allocator. A program of its own, because the allocator counts for the whole
//! process. `AITK_MEMORY_SEEDS=1..200` runs other seeds than the usual few.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and prints what it measured"
)]

mod allocator;
mod transformers;

use aitk_common::job::network::LOKR_FULL_RANK;
use aitk_common::plan::image_batches::ImageBatch;
use aitk_common::plan::parameter_counts::ParameterCounts;
use aitk_common::plan::phases::{cpu_phases, emulated_phases, portable_phases};
use aitk_common::plan::profile::MemoryProfile;
use aitk_common::plan::shapes::{BlockShapes, ModelShapes, TextShapes, UNetShapes, VaeShapes};
use aitk_engine::adapters::{AdapterType, Difference, Dora, Dropout, Loha, Lokr, Lora, LoraConfig, LoraNetwork};
use aitk_engine::autograd::record;
use aitk_engine::device::portable::{emulated_kernels, portable};
use aitk_engine::families::{LoraNames, Part, PartRole};
use aitk_engine::models::clip::{ClipTextConfig, ClipTextModel};
use aitk_engine::models::unet::{AdditionalConditions, PerBlock, UNet2DConditionModel, UNetConfig};
use aitk_engine::models::vae::{AutoencoderKl, SampleSize, VaeConfig};
use aitk_engine::residency::Residency;
use aitk_engine::rng::TorchGenerator;
use aitk_engine::weights::{TrainableFilter, Weights};
use allocator::measure;
use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};
use std::ops::RangeInclusive;
use std::sync::{Mutex, PoisonError};
use transformers::Predict;

/// The seeds if none are named: all of them if `AITK_ALL_CASES` is set, as by `.ci/run`, otherwise the first.
const SEEDS: RangeInclusive<u64> = 1..=4;

/// Random choices.
struct Random(TorchGenerator);

impl Random {
    fn below(&mut self, count: usize) -> usize {
        self.0.next_u64() as usize % count
    }

    fn choose<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    fn flip(&mut self) -> bool {
        self.below(2) == 0
    }
}

/// A random model and job.
struct Case {
    arch: &'static str,
    shapes: ModelShapes,
    dtype: DType,
    /// Width and height of images.
    size: [usize; 2],
    batch: usize,
    guided: bool,
    tiled: bool,
    checkpointed: bool,
    training: Training,
}

/// What a training trains.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Training {
    Lora {
        rank: usize,
        conv: Option<usize>,
        dropout: bool,
    },
    Lokr {
        /// The rank of the second matrix; `None`: it is trained whole.
        rank: Option<usize>,
        factor: i64,
    },
    /// Another type of adapter: `dora`, `loha` or `fullrank`.
    Other {
        kind: &'static str,
        rank: usize,
        conv: Option<usize>,
        dropout: bool,
    },
    Full {
        fused: bool,
    },
}

impl Training {
    /// Two types of adapters that are no LoRA, in a random form: four seeds in a row have each type twice.
    fn others(seed: u64) -> [Self; 2] {
        let r = &mut Random(TorchGenerator::manual_seed(1000 + seed));
        [seed, seed + 1].map(|number| {
            let (rank, has_conv, flag) = (1 + r.below(8), r.flip(), r.flip());
            let kind = match number % 4 {
                0 => {
                    return Self::Lokr {
                        rank: flag.then_some(2),
                        factor: r.choose(&[-1, 2, 4]),
                    };
                }
                1 => "dora",
                2 => "loha",
                _ => "fullrank",
            };
            Self::Other {
                kind,
                rank,
                conv: has_conv.then_some(2),
                dropout: flag && kind == "dora",
            }
        })
    }

    /// The section of a config.
    fn network(self) -> Value {
        match self {
            Self::Full { .. } => Value::Null,
            Self::Lora { rank, conv, dropout } => json!({
                "type": "lora", "linear": rank, "conv": conv, "dropout": if dropout { 0.5 } else { 0.0 },
            }),
            Self::Other {
                kind,
                rank,
                conv,
                dropout,
            } => json!({
                "type": kind, "linear": rank, "conv": conv, "dropout": if dropout { 0.5 } else { 0.0 },
            }),
            Self::Lokr { rank, factor } => json!({
                "type": "lokr", "linear": rank, "conv": rank, "lokr_full_rank": rank.is_none(), "lokr_factor": factor,
            }),
        }
    }
}

impl Case {
    fn draw(seed: u64) -> Self {
        let r = &mut Random(TorchGenerator::manual_seed(seed));
        let arch = r.choose(&["sd1", "sd2", "sdxl"]);
        let first = 32 * (1 + r.below(2)) as u32;
        let count = 2;
        let mut blocks = [BlockShapes::default(); 6];
        for (index, block) in blocks.iter_mut().take(count).enumerate() {
            let attends = index + 1 < count || arch == "sdxl";
            *block = BlockShapes {
                channels: first * (1 + index as u32),
                layers: 1,
                heads: r.choose(&[1, 2, 4]),
                transformer_layers: if arch == "sdxl" { 1 + index as u32 } else { 1 },
                down_attention: attends,
                up_attention: attends,
            };
        }
        let width = r.choose(&[64, 128]);
        let text = TextShapes {
            width,
            intermediate: 4 * width,
            layers: 2,
            heads: 2,
            vocabulary: 1000,
            positions: 77,
            projection: 0,
        };
        let second = match arch {
            "sdxl" => TextShapes {
                projection: width,
                ..text
            },
            _ => TextShapes::default(),
        };
        let pair = r.below(2) as u32;
        let vae_first = 32 * (1 + pair);
        let training = match r.below(3) {
            0 => Training::Full { fused: r.flip() },
            _ => Training::Lora {
                rank: r.choose(&[4, 16, 64]),
                conv: r.flip().then_some(8),
                dropout: r.below(4) == 0,
            },
        };
        Self {
            arch,
            shapes: ModelShapes {
                unet: UNetShapes {
                    in_channels: 4,
                    out_channels: 4,
                    conv_in_kernel: 3,
                    conv_out_kernel: 3,
                    downsample_padding: 1,
                    context: if arch == "sdxl" { 2 * width } else { width },
                    linear_projection: arch != "sd1",
                    upcast_attention: arch == "sd2" && r.flip(),
                    mid_block: true,
                    additional: if arch == "sdxl" { width + 6 * 32 } else { 0 },
                    blocks,
                },
                text: [text, second],
                vae: VaeShapes {
                    in_channels: 3,
                    out_channels: 3,
                    latent_channels: 4,
                    layers: 1,
                    channels: [vae_first, 2 * vae_first, 2 * vae_first, 0, 0, 0],
                    mid_attention: true,
                    sample_size: 64,
                },
                ..ModelShapes::default()
            },
            dtype: r.choose(&[DType::F32, DType::F16, DType::BF16]),
            size: [32 * (2 + r.below(3)), 32 * (2 + r.below(3))],
            batch: 1 + r.below(2),
            guided: r.flip(),
            tiled: r.flip(),
            checkpointed: r.flip(),
            training,
        }
    }

    /// The dtype of a training.
    fn trained_dtype(&self) -> DType {
        match self.training {
            Training::Full { .. } => DType::F32,
            _ => self.dtype,
        }
    }

    /// The dtype of the autoencoder beside a model of this dtype.
    fn vae_dtype(&self, dtype: DType) -> DType {
        match self.arch == "sdxl" && dtype == DType::F16 {
            true => DType::F32,
            false => dtype,
        }
    }

    fn counts(&self) -> ParameterCounts {
        ParameterCounts {
            denoiser: 1,
            text: 1,
            vae: 1,
            shapes: Some(self.shapes),
            ..ParameterCounts::default()
        }
    }

    fn model_section(&self, dtype: DType) -> Value {
        json!({"arch": self.arch, "name_or_path": "model", "dtype": name(dtype)})
    }

    fn generation(&self) -> Value {
        let generate = json!({
            "width": self.size[0], "height": self.size[1], "guidance_scale": if self.guided { 7 } else { 1 }, "prompts": ["a"],
        });
        json!({"kind": {"generate": {"model": self.model_section(self.dtype), "generate": generate}}})
    }

    fn trainer(&self) -> Value {
        let network = self.training.network();
        json!({"kind": {"train": {
            "model": self.model_section(self.trained_dtype()),
            "network": network,
            "train": {
                "dtype": name(self.trained_dtype()), "gradient_checkpointing": self.checkpointed, "optimizer": "adamw",
            },
        }}})
    }

    fn images(&self) -> ImageBatch {
        ImageBatch {
            process: 0,
            width: self.size[0] as u32,
            height: self.size[1] as u32,
            images: self.batch as u32,
        }
    }

    fn unet_config(&self) -> UNetConfig {
        let shapes = &self.shapes.unet;
        let blocks: Vec<&BlockShapes> = shapes.blocks.iter().filter(|block| block.channels > 0).collect();
        let types = |attends: &mut dyn Iterator<Item = bool>, kind: &str| -> Vec<String> {
            let names = attends.map(|attends| format!("{}{kind}Block2D", if attends { "CrossAttn" } else { "" }));
            names.collect()
        };
        let each =
            |of: fn(&BlockShapes) -> u32| PerBlock::Each(blocks.iter().map(|block| of(block) as usize).collect());
        UNetConfig {
            block_out_channels: blocks.iter().map(|block| block.channels as usize).collect(),
            layers_per_block: each(|block| block.layers),
            attention_head_dim: each(|block| block.heads),
            transformer_layers_per_block: each(|block| block.transformer_layers),
            down_block_types: types(&mut blocks.iter().map(|block| block.down_attention), "Down"),
            up_block_types: types(&mut blocks.iter().rev().map(|block| block.up_attention), "Up"),
            cross_attention_dim: PerBlock::One(shapes.context as usize),
            use_linear_projection: shapes.linear_projection,
            upcast_attention: shapes.upcast_attention,
            addition_embed_type: (shapes.additional > 0).then(|| "text_time".to_owned()),
            addition_time_embed_dim: (shapes.additional > 0).then_some(32),
            projection_class_embeddings_input_dim: (shapes.additional > 0).then_some(shapes.additional as usize),
            ..UNetConfig::default()
        }
    }

    fn vae_config(&self) -> VaeConfig {
        let shapes = &self.shapes.vae;
        VaeConfig {
            block_out_channels: shapes.channels().iter().map(|channels| *channels as usize).collect(),
            layers_per_block: shapes.layers as usize,
            sample_size: SampleSize::One(shapes.sample_size as usize),
            ..VaeConfig::default()
        }
    }

    /// The inputs of the U-Net for `batch` images.
    fn inputs(&self, batch: usize, dtype: DType) -> Inputs {
        let scale = 1 << (self.shapes.vae.channels().len() - 1);
        let zeros = |shape: &[usize]| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
        let additional = self.shapes.unet.additional as usize;
        Inputs {
            sample: zeros(&[batch, 4, self.size[1] / scale, self.size[0] / scale]),
            context: zeros(&[batch, 77, self.shapes.unet.context as usize]),
            additional: (additional > 0).then(|| {
                let time_ids = Tensor::zeros((batch, 6), DType::F32, &Device::Cpu).unwrap();
                (zeros(&[batch, additional - 6 * 32]), time_ids)
            }),
        }
    }
}

/// The inputs of the U-Net.
struct Inputs {
    sample: Tensor,
    context: Tensor,
    /// The pooled text and the sizes.
    additional: Option<(Tensor, Tensor)>,
}

impl Inputs {
    fn predict(&self, unet: &UNet2DConditionModel) -> Tensor {
        let batch = self.sample.dim(0).unwrap();
        let times = Tensor::full(10f32, batch, &Device::Cpu).unwrap();
        let conditions = self.additional.as_ref();
        let conditions = conditions.map(|(pooled, time_ids)| AdditionalConditions { pooled, time_ids });
        unet.forward_with(&self.sample, &times, &self.context, conditions.as_ref())
            .unwrap()
    }
}

/// The name of a dtype in configs.
fn name(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        _ => "float32",
    }
}

fn weights(dtype: DType) -> Weights {
    Weights::init(1, &Device::Cpu).frozen().in_dtype(dtype)
}

/// The predicted and the measured bytes of each phase.
fn phases(case: &Case, predict: Predict) -> Vec<(&'static str, f64, f64)> {
    let mut found = Vec::new();
    // The autoencoder of `gpu_poor` is streamed, too: one layer's weight, which is little beside a tile.
    let vae_profile = match case.tiled {
        true => MemoryProfile::GpuPoor,
        false => MemoryProfile::FullGpu,
    };
    let of = |process: &Value, profile| predict(process, Some(case.counts()), &[case.images()], profile).unwrap();
    let (generation, trainer) = (case.generation(), case.trainer());
    let made = of(&generation, MemoryProfile::FullGpu);
    // Only `gpu_poor` and `extreme` update each parameter as soon as its gradient is complete.
    let trained = match case.training {
        Training::Full { fused: true } => of(&trainer, MemoryProfile::GpuPoor),
        _ => of(&trainer, MemoryProfile::FullGpu),
    };

    let text_config = |shapes: &TextShapes| ClipTextConfig {
        vocab_size: shapes.vocabulary as usize,
        hidden_size: shapes.width as usize,
        intermediate_size: shapes.intermediate as usize,
        num_hidden_layers: shapes.layers as usize,
        num_attention_heads: shapes.heads as usize,
        ..ClipTextConfig::default()
    };
    let text = ClipTextModel::new(&weights(case.dtype), &text_config(&case.shapes.text[0])).unwrap();
    let ids = Tensor::ones((1, 77), DType::U32, &Device::Cpu).unwrap();
    found.push(("text", made.text, measure(|| text.forward(&ids).unwrap())));
    drop(text);

    let unet = UNet2DConditionModel::new(&weights(case.dtype), &case.unet_config()).unwrap();
    let batch = if case.guided { 2 } else { 1 };
    let denoise = || case.inputs(batch, case.dtype).predict(&unet);
    found.push(("denoising", made.denoising, measure(denoise)));
    drop(unet);

    let vae = |dtype| {
        let vae = AutoencoderKl::new(&weights(case.vae_dtype(dtype)), &case.vae_config()).unwrap();
        vae.tiled(case.tiled)
    };
    let [width, height] = case.size;
    let decoder = vae(case.dtype);
    let decode = || {
        let latents = Tensor::zeros((1, 4, height / 4, width / 4), decoder.dtype(), &Device::Cpu).unwrap();
        let image = decoder.decode(&latents).unwrap();
        aitk_engine::image_io::from_tensor(&image).unwrap()
    };
    found.push(("decoding", of(&generation, vae_profile).decoding, measure(decode)));
    let encoder = vae(case.trained_dtype());
    let encode = || {
        let image = Tensor::zeros((1, 3, height, width), encoder.dtype(), &Device::Cpu).unwrap();
        encoder.encode(&image).unwrap()
    };
    found.push(("encoding", of(&trainer, vae_profile).encoding, measure(encode)));
    drop((decoder, encoder));

    found.push(("step", trained.step, measure_step(case)));
    found
}

/// The bytes of a forward and a backward pass.
fn measure_step(case: &Case) -> f64 {
    let dtype = case.trained_dtype();
    let weights = weights(dtype);
    let weights = match case.training {
        Training::Full { .. } => weights.training(TrainableFilter::everything()),
        _ => weights,
    };
    let mut unet = UNet2DConditionModel::new(&weights, &case.unet_config()).unwrap();
    let fused = case.training == Training::Full { fused: true };
    unet.residency = Residency::checkpointing(case.checkpointed || fused);
    let part = Part {
        id: "unet",
        role: PartRole::Denoiser,
        lora_prefix: "lora_unet",
        lora_names: LoraNames::Flattened,
        blocks: &[],
        layers: &mut unet,
    };
    let network = lora(case.training, false, part);
    let bytes = measure(|| {
        let inputs = case.inputs(case.batch, dtype);
        // The noise, the noisy latents and the target.
        let drawn = [0; 3].map(|_| inputs.sample.copy().unwrap());
        let (loss, tape) = record(|| Ok::<_, candle_core::Error>(inputs.predict(&unet))).unwrap();
        if fused {
            let take = |_, _| Ok::<_, candle_core::Error>(());
            tape.backward_each(&loss, take).unwrap();
            return (drawn, None);
        }
        let gradients = tape.backward(&loss).unwrap();
        (drawn, Some(gradients))
    });
    drop(network);
    bytes
}

/// The network of a training, attached to a part.
fn lora(training: Training, blocks_only: bool, part: Part<'_>) -> Option<LoraNetwork> {
    let (rank, conv_rank, dropout) = match training {
        Training::Full { .. } => return None,
        Training::Lora { rank, conv, dropout }
        | Training::Other {
            rank, conv, dropout, ..
        } => (rank, conv, dropout),
        Training::Lokr { rank, .. } => {
            let rank = rank.unwrap_or(LOKR_FULL_RANK as usize);
            (rank, Some(rank), false)
        }
    };
    let config = LoraConfig {
        rank,
        alpha: rank as f64,
        conv_rank,
        conv_alpha: 1.0,
        dropout: Dropout {
            element: if dropout { 0.5 } else { 0.0 },
            ..Dropout::default()
        },
        blocks_only,
        ..LoraConfig::default()
    };
    let adapter: Box<dyn AdapterType> = match training {
        Training::Lokr { factor, .. } => Box::new(Lokr {
            factor: usize::try_from(factor).ok(),
            old_names: false,
        }),
        Training::Other { kind: "dora", .. } => Box::new(Dora),
        Training::Other { kind: "loha", .. } => Box::new(Loha),
        Training::Other { .. } => Box::new(Difference),
        _ => Box::new(Lora),
    };
    let mut generator = TorchGenerator::manual_seed(1);
    let network = LoraNetwork::attach_as(&*adapter, &config, &mut [part], &mut generator).unwrap();
    network.handle.set_training(Some("dropout"));
    Some(network)
}

fn seeds() -> Vec<u64> {
    let Ok(named) = std::env::var("AITK_MEMORY_SEEDS") else {
        return SEEDS.take(if are_few() { 1 } else { SEEDS.count() }).collect();
    };
    let (first, last) = named.split_once("..").unwrap_or((&named, &named));
    (first.trim().parse().unwrap()..=last.trim_start_matches('=').trim().parse().unwrap()).collect()
}

/// Whether neither seeds are named nor all cases are wanted.
fn are_few() -> bool {
    ["AITK_ALL_CASES", "AITK_MEMORY_SEEDS"]
        .iter()
        .all(|name| std::env::var_os(name).is_none())
}

/// Whether a test is left out. `AITK_ALL_CASES=1`, which `.ci/run` sets, runs it.
fn is_left_out() -> bool {
    if are_few() {
        println!("left out: AITK_ALL_CASES=1 runs this test");
    }
    are_few()
}

/// Held by a test, so that nothing else allocates meanwhile.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Runs a test alone, with one thread, as the scratch memory of candle's convolutions on a CPU is that of each thread.
fn alone(test: impl FnOnce()) {
    let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    // The second test finds it built.
    let _ = rayon::ThreadPoolBuilder::new().num_threads(1).build_global();
    test();
    drop(guard);
}

/// What is predicted and what was measured, by phase.
struct Comparison {
    /// The least and the most that a prediction may be above what was measured, as fractions.
    limits: RangeInclusive<f64>,
    /// Bytes that a prediction may always differ.
    bytes: f64,
    count: usize,
    outside: Vec<String>,
}

impl Comparison {
    fn within(limits: RangeInclusive<f64>) -> Self {
        Self {
            limits,
            bytes: 0.0,
            count: 0,
            outside: Vec::new(),
        }
    }

    fn add(&mut self, case: &str, phases: Vec<(&'static str, f64, f64)>) {
        for (phase, predicted, measured) in phases {
            let over = predicted / measured - 1.0;
            let is_close = (predicted - measured).abs() < self.bytes || self.limits.contains(&over);
            let line = format!(
                "{case}, {phase}: {:.2} MiB predicted, {:.2} taken, {:+.1} %",
                predicted / MIB,
                measured / MIB,
                100.0 * over
            );
            println!("{line}");
            self.count += 1;
            if !is_close {
                self.outside.push(line);
            }
        }
    }

    fn finish(self) {
        let Self { count, outside, .. } = self;
        assert!(
            outside.is_empty(),
            "{} of {count} phases:\n{}",
            outside.len(),
            outside.join("\n")
        );
    }
}

#[test]
fn predictions_for_gpus_are_those_of_portable_mode() {
    alone(|| {
        let mut comparison = Comparison::within(-0.05..=0.10);
        portable(|| {
            for seed in seeds() {
                let case = Case::draw(seed);
                let (training, checkpointed) = (case.training, case.checkpointed);
                let name = format!(
                    "seed {seed}, {} in {:?}, {training:?}, checkpointed {checkpointed}",
                    case.arch, case.dtype
                );
                comparison.add(&name, phases(&case, portable_phases));
            }
        });
        comparison.finish();
    });
}

#[test]
fn predictions_for_cuda_are_those_of_emulated_kernels() {
    alone(|| {
        let mut comparison = Comparison {
            // Buffers of candle's products on a CPU.
            bytes: 0.25 * MIB,
            ..Comparison::within(-0.05..=0.10)
        };
        emulated_kernels(|| {
            // An emulated kernel is slow: two seeds if none are named.
            let most = std::env::var_os("AITK_MEMORY_SEEDS").map_or(2, |_| usize::MAX);
            for seed in seeds().into_iter().take(most) {
                let case = Case::draw(seed);
                let name = format!("seed {seed}, {} in {:?}, {:?}", case.arch, case.dtype, case.training);
                let is_half = case.dtype != DType::F32;
                // candle's products of 16-bit matrices need more on a CPU, which is most of an autoencoder.
                let is_compared = |phase: &str| !is_half || !matches!(phase, "decoding" | "encoding");
                let phases = phases(&case, emulated_phases).into_iter();
                comparison.add(&name, phases.filter(|(phase, ..)| is_compared(phase)).collect());
                let case = transformers::Case::draw(seed, false);
                comparison.add(
                    &format!("seed {seed}, {}", case.describe()),
                    case.phases(emulated_phases),
                );
            }
        });
        comparison.finish();
    });
}

#[test]
fn predictions_of_transformers_for_gpus_are_those_of_portable_mode() {
    if is_left_out() {
        return;
    }
    alone(|| {
        let mut comparison = Comparison::within(-0.05..=0.10);
        portable(|| {
            for seed in seeds() {
                let case = transformers::Case::draw(seed, false);
                comparison.add(
                    &format!("seed {seed}, {}", case.describe()),
                    case.phases(portable_phases),
                );
            }
        });
        comparison.finish();
    });
}

#[test]
fn predictions_of_transformers_for_cpus_are_what_the_kernels_take() {
    alone(|| {
        // What kernels pad, and the buffers of attention, are not predicted: up to a tenth of models that are as small as these.
        let mut comparison = Comparison::within(-0.10..=0.10);
        for seed in seeds() {
            let case = transformers::Case::draw(seed, true);
            comparison.add(&format!("seed {seed}, {}", case.describe()), case.phases(cpu_phases));
        }
        comparison.finish();
    });
}

#[test]
fn predictions_of_steps_with_other_adapters_are_what_they_take() {
    if is_left_out() {
        return;
    }
    alone(|| {
        // Of the smallest models here, what no operation shows is up to a fifteenth.
        let mut comparison = Comparison::within(-0.07..=0.10);
        portable(|| {
            for (seed, training) in seeds()
                .into_iter()
                .flat_map(|seed| Training::others(seed).map(|t| (seed, t)))
            {
                let case = Case {
                    training,
                    ..Case::draw(seed)
                };
                let step = phases(&case, portable_phases)
                    .into_iter()
                    .filter(|(phase, ..)| *phase == "step");
                let name = format!("seed {seed}, {} in {:?}, {training:?}", case.arch, case.dtype);
                comparison.add(&name, step.collect());
                let case = transformers::Case::draw(seed, false).training(training);
                let step = case
                    .phases(portable_phases)
                    .into_iter()
                    .filter(|(phase, ..)| *phase == "step");
                comparison.add(&format!("seed {seed}, {}", case.describe()), step.collect());
            }
        });
        comparison.finish();
        let mut comparison = Comparison::within(-0.10..=0.10);
        for (seed, training) in seeds()
            .into_iter()
            .flat_map(|seed| Training::others(seed).map(|t| (seed, t)))
        {
            let case = transformers::Case::draw(seed, true).training(training);
            let step = case
                .phases(cpu_phases)
                .into_iter()
                .filter(|(phase, ..)| *phase == "step");
            comparison.add(&format!("seed {seed} on a CPU, {}", case.describe()), step.collect());
        }
        comparison.finish();
    });
}

const MIB: f64 = (1 << 20) as f64;
