//! Random models with a U-Net, and the memory of their phases.

use crate::allocator::measure;
use crate::trainings::{Random, Training, lora, name, weights};
use crate::transformers::Predict;
use aitk_common::plan::image_batches::ImageBatch;
use aitk_common::plan::parameter_counts::ParameterCounts;
use aitk_common::plan::profile::MemoryProfile;
use aitk_common::plan::shapes::{BlockShapes, ModelShapes, TextShapes, UNetShapes, VaeShapes};
use aitk_engine::autograd::record;
use aitk_engine::checkpointing::Checkpointing;
use aitk_engine::families::{AdapterNames, Part, PartRole};
use aitk_engine::models::clip::{ClipTextConfig, ClipTextModel};
use aitk_engine::models::unet::{AdditionalConditions, PerBlock, UNet2DConditionModel, UNetConfig};
use aitk_engine::models::vae::{AutoencoderKl, SampleSize, VaeConfig};
use aitk_engine::rng::TorchGenerator;
use aitk_engine::weights::TrainableFilter;
use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};

/// A random model and job.
pub(crate) struct Case {
    pub(crate) arch: &'static str,
    shapes: ModelShapes,
    pub(crate) dtype: DType,
    /// Width and height of images.
    size: [usize; 2],
    batch: usize,
    guided: bool,
    tiled: bool,
    pub(crate) checkpointed: bool,
    pub(crate) training: Training,
}

impl Case {
    pub(crate) fn draw(seed: u64) -> Self {
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

/// The predicted and the measured bytes of each phase.
pub(crate) fn phases(case: &Case, predict: Predict) -> Vec<(&'static str, f64, f64)> {
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
    unet.checkpointing = Checkpointing::each_block(case.checkpointed || fused);
    let part = Part {
        id: "unet",
        role: PartRole::Denoiser,
        lora_prefix: "lora_unet",
        lora_names: AdapterNames::Kohya,
        block_lists: &[],
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
