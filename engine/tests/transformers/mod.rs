//! Random transformers: FLUX.1, Stable Diffusion 3.5, Z-Image and Chroma with T5 or Qwen3, in the engine's kernels for CPUs and in
//! portable mode.

use crate::allocator::measure;
use crate::trainings::{Random, Training, lora, name, weights};
use aitk_common::plan::image_batches::ImageBatch;
use aitk_common::plan::parameter_counts::ParameterCounts;
use aitk_common::plan::phases::PhaseBytes;
use aitk_common::plan::profile::MemoryProfile;
use aitk_common::plan::shapes::{
    LanguageKind, LanguageShapes, ModelShapes, TextShapes, TransformerKind, TransformerShapes, VaeShapes,
};
use aitk_engine::autograd::record;
use aitk_engine::checkpointing::Checkpointing;
use aitk_engine::families::{AdapterNames, Part, PartRole};
use aitk_engine::models::chroma::{ChromaConfig, ChromaTransformer2DModel};
use aitk_engine::models::flux::{FluxConditions, FluxConfig, FluxTransformer2DModel};
use aitk_engine::models::qwen3::{Qwen3Config, Qwen3Model};
use aitk_engine::models::sd3::{SD3Transformer2DModel, Sd3Conditions, Sd3Config};
use aitk_engine::models::t5::{T5Config, T5EncoderModel};
use aitk_engine::models::zimage::{ZImageConfig, ZImageTransformer2DModel};
use aitk_engine::nn::VisitLayers;
use aitk_engine::rng::TorchGenerator;
use aitk_engine::weights::{TrainableFilter, Weights};
use candle_core::{DType, Device, Tensor, Var};
use serde_json::{Value, json};

/// A random transformer and job.
pub(crate) struct Case {
    shapes: ModelShapes,
    dtype: DType,
    /// Width and height of images.
    size: [usize; 2],
    batch: usize,
    guided: bool,
    has_control: bool,
    checkpointed: bool,
    training: Training,
    /// Characters of the prompt.
    prompt: usize,
    blocks_only: bool,
    /// Tokens of a decorator that is trained, in place of `training`.
    decorator: Option<usize>,
}

/// The transformer of a case.
enum Transformer {
    Chroma(ChromaTransformer2DModel),
    Flux(FluxTransformer2DModel),
    Sd3(SD3Transformer2DModel),
    ZImage(ZImageTransformer2DModel),
}

/// Its inputs.
struct Inputs {
    latents: Tensor,
    text: Tensor,
    pooled: Option<Tensor>,
    control: Option<Tensor>,
    /// Tokens of each prompt that are used.
    lengths: Vec<usize>,
}

impl Case {
    pub(crate) fn draw(seed: u64, on_cpu: bool) -> Self {
        let kinds = [TransformerKind::Flux, TransformerKind::Sd3, TransformerKind::ZImage];
        Self::of_kinds(&kinds, seed, on_cpu)
    }

    /// A case of Chroma.
    pub(crate) fn chroma(seed: u64, on_cpu: bool) -> Self {
        Self::of_kinds(&[TransformerKind::Chroma], seed, on_cpu)
    }

    fn of_kinds(kinds: &[TransformerKind], seed: u64, on_cpu: bool) -> Self {
        let r = &mut Random(TorchGenerator::manual_seed(1000 + seed));
        let kind = r.choose(kinds);
        let head_width = r.choose(&[32, 64]);
        let heads = r.choose(&[4, 8]);
        let blocks = 1 + r.below(3) as u32;
        let context = r.choose(&[256, 512]);
        let is_qwen3 = kind == TransformerKind::ZImage;
        let has_approximator = kind == TransformerKind::Chroma;
        let transformer = TransformerShapes {
            kind,
            in_channels: 16,
            patch: 2,
            blocks: blocks + u32::from(kind == TransformerKind::Sd3),
            single_blocks: match kind {
                TransformerKind::Sd3 => 0,
                TransformerKind::ZImage => 1,
                _ => 1 + r.below(3) as u32,
            },
            dual_blocks: if kind == TransformerKind::Sd3 {
                r.below(3) as u32
            } else {
                0
            },
            heads,
            head_width,
            context,
            pooled: if is_qwen3 || has_approximator { 0 } else { 64 },
            guidance: kind == TransformerKind::Flux && r.flip(),
            qk_norm: kind != TransformerKind::Sd3 || r.flip(),
            positions: if kind == TransformerKind::Sd3 { 32 } else { 0 },
            approximator_layers: if has_approximator { 2 } else { 0 },
            approximator_width: if has_approximator { 320 } else { 0 },
            short_prompts: false,
        };
        let transformer = TransformerShapes {
            short_prompts: kind == TransformerKind::Flux && !transformer.guidance,
            ..transformer
        };
        let language_heads = r.choose(&[8, 16]);
        let language = LanguageShapes {
            kind: if is_qwen3 {
                LanguageKind::Qwen3
            } else {
                LanguageKind::T5
            },
            width: context,
            heads: language_heads,
            kv_heads: if is_qwen3 { 2 } else { language_heads },
            head_width: 32,
            intermediate: r.choose(&[640, 1280]),
            layers: 2 + r.below(2) as u32,
            vocabulary: 500,
            ..LanguageShapes::default()
        };
        let clip = TextShapes {
            width: 64,
            intermediate: 256,
            layers: 2,
            heads: 2,
            vocabulary: 500,
            positions: 77,
            projection: if kind == TransformerKind::Sd3 { 32 } else { 0 },
        };
        let none = TextShapes::default();
        let training = match r.below(3) {
            0 => Training::Full { fused: r.flip() },
            _ => Training::Lora {
                rank: r.choose(&[4, 16, 64]),
                conv: None,
                dropout: r.below(4) == 0,
            },
        };
        Self {
            shapes: ModelShapes {
                transformer,
                language,
                text: match kind {
                    TransformerKind::Flux => [clip, none],
                    TransformerKind::Sd3 => [clip; 2],
                    _ => [none; 2],
                },
                vae: VaeShapes {
                    in_channels: 3,
                    out_channels: 3,
                    latent_channels: 16,
                    layers: 1,
                    channels: [32, 32, 32, 32, 0, 0],
                    mid_attention: true,
                    sample_size: 64,
                },
                ..ModelShapes::default()
            },
            dtype: match on_cpu {
                true => DType::F32,
                false => r.choose(&[DType::F32, DType::F16, DType::BF16]),
            },
            size: [64 * (3 + r.below(5)), 64 * (3 + r.below(5))],
            batch: 1 + r.below(2),
            guided: r.flip(),
            has_control: kind == TransformerKind::Flux && r.below(3) == 0,
            checkpointed: r.flip(),
            training,
            prompt: r.choose(&[800, 1000, 1800]),
            blocks_only: r.below(4) > 0,
            decorator: None,
        }
    }

    /// A FLUX.1 whose training is that of a decorator.
    pub(crate) fn decorator(seed: u64, on_cpu: bool) -> Self {
        Self {
            has_control: false,
            training: Training::Lora {
                rank: 4,
                conv: None,
                dropout: false,
            },
            decorator: Some(4 + 100 * (seed as usize % 2)),
            ..Self::of_kinds(&[TransformerKind::Flux], seed, on_cpu)
        }
    }

    /// The same case with another training.
    pub(crate) fn training(self, training: Training) -> Self {
        Self { training, ..self }
    }

    pub(crate) fn describe(&self) -> String {
        format!(
            "{:?} in {:?}, {:?} x {}, {:?}, checkpointed {}, blocks only {}, decorator {:?}",
            self.shapes.transformer.kind,
            self.dtype,
            self.size,
            self.batch,
            self.training,
            self.checkpointed,
            self.blocks_only,
            self.decorator
        )
    }

    fn trained_dtype(&self) -> DType {
        match self.training {
            // Weights are trained in bfloat16 too.
            Training::Full { .. } if self.dtype == DType::F16 => DType::F32,
            _ => self.dtype,
        }
    }

    fn arch(&self) -> &'static str {
        match self.shapes.transformer.kind {
            TransformerKind::Flux if self.has_control => "flux_kontext",
            TransformerKind::Flux => "flux",
            TransformerKind::Sd3 => "sd3",
            TransformerKind::Chroma => "chroma",
            _ => "zimage",
        }
    }

    fn model_section(&self, dtype: DType) -> Value {
        json!({"arch": self.arch(), "name_or_path": "model", "dtype": name(dtype)})
    }

    fn generation(&self) -> Value {
        let (prompt, scale) = ("a".repeat(self.prompt), if self.guided { 7 } else { 0 });
        let generate =
            json!({"width": self.size[0], "height": self.size[1], "guidance_scale": scale, "prompts": [prompt]});
        json!({"kind": {"generate": {"model": self.model_section(self.dtype), "generate": generate}}})
    }

    fn trainer(&self) -> Value {
        let mut network = self.training.network();
        if let Some(network) = network.as_object_mut() {
            network.insert("transformer_only".to_owned(), self.blocks_only.into());
        }
        let decorator = self.decorator.map(|tokens| json!({"num_tokens": tokens}));
        json!({"kind": {"train": {
            "model": self.model_section(self.trained_dtype()),
            "network": if decorator.is_some() { Value::Null } else { network },
            "decorator": decorator,
            "train": {
                "dtype": name(self.trained_dtype()), "gradient_checkpointing": self.checkpointed, "optimizer": "adamw",
            },
        }}})
    }

    /// What is predicted of a process.
    fn predicted(&self, process: &Value, profile: MemoryProfile, predict: Predict) -> PhaseBytes {
        let counts = ParameterCounts {
            denoiser: 1,
            text: 1,
            vae: 1,
            shapes: Some(self.shapes.checked().unwrap()),
            ..ParameterCounts::default()
        };
        let images = ImageBatch {
            process: 0,
            width: self.size[0] as u32,
            height: self.size[1] as u32,
            images: self.batch as u32,
        };
        predict(process, Some(counts), &[images], profile).unwrap()
    }

    fn transformer(&self, weights: &Weights) -> Transformer {
        let t = &self.shapes.transformer;
        let (heads, head) = (t.heads as usize, t.head_width as usize);
        match t.kind {
            TransformerKind::Chroma => {
                let config = ChromaConfig {
                    num_layers: t.blocks as usize,
                    num_single_layers: t.single_blocks as usize,
                    attention_head_dim: head,
                    num_attention_heads: heads,
                    joint_attention_dim: t.context as usize,
                    axes_dims_rope: vec![head / 4, head / 4, head / 2],
                    approximator_hidden_dim: t.approximator_width as usize,
                    approximator_layers: t.approximator_layers as usize,
                    ..ChromaConfig::default()
                };
                Transformer::Chroma(ChromaTransformer2DModel::new(weights, &config).unwrap())
            }
            TransformerKind::Flux => {
                let config = FluxConfig {
                    in_channels: 64,
                    num_layers: t.blocks as usize,
                    num_single_layers: t.single_blocks as usize,
                    attention_head_dim: head,
                    num_attention_heads: heads,
                    joint_attention_dim: t.context as usize,
                    pooled_projection_dim: t.pooled as usize,
                    guidance_embeds: t.guidance,
                    axes_dims_rope: vec![head / 4, head / 4, head / 2],
                    ..FluxConfig::default()
                };
                Transformer::Flux(FluxTransformer2DModel::new(weights, &config).unwrap())
            }
            TransformerKind::Sd3 => {
                let config = Sd3Config {
                    num_layers: t.blocks as usize,
                    attention_head_dim: head,
                    num_attention_heads: heads,
                    joint_attention_dim: t.context as usize,
                    caption_projection_dim: heads * head,
                    pooled_projection_dim: t.pooled as usize,
                    pos_embed_max_size: t.positions as usize,
                    dual_attention_layers: (0..t.dual_blocks as usize).collect(),
                    qk_norm: t.qk_norm.then(|| "rms_norm".to_owned()),
                    ..Sd3Config::default()
                };
                Transformer::Sd3(SD3Transformer2DModel::new(weights, &config).unwrap())
            }
            _ => {
                let config = ZImageConfig {
                    dim: heads * head,
                    n_layers: t.blocks as usize,
                    n_refiner_layers: t.single_blocks as usize,
                    n_heads: heads,
                    cap_feat_dim: t.context as usize,
                    axes_dims: vec![head / 4, head / 4, head / 2],
                    axes_lens: vec![1024, 512, 512],
                    ..ZImageConfig::default()
                };
                Transformer::ZImage(ZImageTransformer2DModel::new(weights, &config).unwrap())
            }
        }
    }

    /// Tokens of a prompt with this many characters, as the planner counts them.
    fn prompt_tokens(characters: usize) -> usize {
        characters / 4 + 10
    }

    fn inputs(&self, batch: usize, prompt: usize, dtype: DType) -> Inputs {
        let t = &self.shapes.transformer;
        let zeros = |shape: &[usize]| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
        let latents = zeros(&[batch, 16, self.size[1] / 8, self.size[0] / 8]);
        let tokens = match t.kind {
            TransformerKind::Flux if !t.guidance => 256,
            TransformerKind::Sd3 => 77 + 256,
            _ => 512,
        };
        Inputs {
            control: self.has_control.then(|| latents.copy().unwrap()),
            latents,
            text: zeros(&[batch, tokens, t.context as usize]),
            pooled: (t.pooled > 0).then(|| zeros(&[batch, t.pooled as usize])),
            lengths: match t.kind {
                // With a token of the padding; another text is shorter, so that it is masked.
                TransformerKind::Chroma => (0..batch).map(|item| prompt + 1 - item.min(1)).collect(),
                _ => vec![prompt; batch],
            },
        }
    }

    /// The bytes of encoding a prompt.
    fn measure_text(&self) -> f64 {
        let l = &self.shapes.language;
        let weights = weights(self.dtype);
        let ids = |tokens: usize| Tensor::ones((1, tokens), DType::U32, &Device::Cpu).unwrap();
        if l.kind == LanguageKind::Qwen3 {
            let config = Qwen3Config {
                vocab_size: l.vocabulary as usize,
                hidden_size: l.width as usize,
                intermediate_size: l.intermediate as usize,
                num_hidden_layers: l.layers as usize,
                num_attention_heads: l.heads as usize,
                num_key_value_heads: l.kv_heads as usize,
                head_dim: l.head_width as usize,
                ..Qwen3Config::default()
            };
            let model = Qwen3Model::new(&weights, &config, 1).unwrap();
            let ids = ids(Self::prompt_tokens(self.prompt));
            return measure(|| model.forward(&ids, None).unwrap());
        }
        let config = T5Config {
            vocab_size: l.vocabulary as usize,
            d_model: l.width as usize,
            d_kv: l.head_width as usize,
            d_ff: l.intermediate as usize,
            num_layers: l.layers as usize,
            num_heads: l.heads as usize,
            ..T5Config::default()
        };
        let model = T5EncoderModel::new(&weights, &config).unwrap();
        let is_masked = self.shapes.transformer.kind == TransformerKind::Chroma;
        let tokens = if self.shapes.transformer.guidance || is_masked {
            512
        } else {
            256
        };
        let (ids, lengths) = (ids(tokens), [Self::prompt_tokens(self.prompt)]);
        measure(|| model.forward(&ids, is_masked.then_some(&lengths[..])).unwrap())
    }

    /// The bytes of a forward and a backward pass.
    fn measure_step(&self) -> f64 {
        let dtype = self.trained_dtype();
        let weights = weights(dtype);
        let weights = match self.training {
            Training::Full { .. } => weights.training(TrainableFilter::everything()),
            _ => weights,
        };
        let fused = self.training == Training::Full { fused: true };
        let mut transformer = self.transformer(&weights);
        transformer.set_checkpointing(Checkpointing::each_block(self.checkpointed || fused));
        let network = match self.decorator {
            Some(_) => None,
            None => lora(self.training, self.blocks_only, transformer.part()),
        };
        let width = self.shapes.transformer.context as usize;
        let decorator = self
            .decorator
            .map(|tokens| Var::zeros((1, tokens, width), DType::F32, &Device::Cpu).unwrap());
        let bytes = measure(|| {
            let mut inputs = self.inputs(self.batch, CAPTION_TOKENS, dtype);
            // The noise, the noisy latents and the target.
            let drawn = [0; 3].map(|_| inputs.latents.copy().unwrap());
            let (loss, tape) = record(|| {
                if let Some(tokens) = &decorator {
                    let tokens = tokens.to_dtype(dtype)?;
                    let tokens = tokens.broadcast_as((self.batch, tokens.dim(1)?, width))?;
                    inputs.text = Tensor::cat(&[&inputs.text, &tokens], 1)?;
                }
                Ok::<_, candle_core::Error>(transformer.predict(&inputs))
            })
            .unwrap();
            if fused {
                tape.backward_each(&loss, |_, _| Ok::<_, candle_core::Error>(()))
                    .unwrap();
                return (drawn, None);
            }
            let gradients = tape.backward(&loss).unwrap();
            (drawn, Some(gradients))
        });
        drop(network);
        bytes
    }

    /// The predicted and the measured bytes of each phase.
    pub(crate) fn phases(&self, predict: Predict) -> Vec<(&'static str, f64, f64)> {
        let made = self.predicted(&self.generation(), MemoryProfile::FullGpu, predict);
        let text = self.measure_text();
        let mut found = vec![("text", made.text, text)];
        let transformer = self.transformer(&weights(self.dtype));
        // FLUX.1 has no negative prompt.
        let is_guided = self.guided && self.shapes.transformer.kind != TransformerKind::Flux;
        let batch = if is_guided { 2 } else { 1 };
        let prompt = Self::prompt_tokens(self.prompt);
        let denoise = || transformer.predict(&self.inputs(batch, prompt, self.dtype));
        found.push(("denoising", made.denoising, measure(denoise)));
        drop(transformer);
        let profile = match self.training {
            // Only `gpu_poor` and `extreme` update each parameter as soon as its gradient is complete.
            Training::Full { fused: true } => MemoryProfile::GpuPoor,
            _ => MemoryProfile::FullGpu,
        };
        let trained = self.predicted(&self.trainer(), profile, predict);
        // A step encodes its captions first. T5 with a mask takes more than the passes of a Chroma as small as these.
        found.push(("step", trained.step, self.measure_step().max(text)));
        found
    }
}

/// A prediction of the planner for one form of the operations.
pub(crate) type Predict = fn(&Value, Option<ParameterCounts>, &[ImageBatch], MemoryProfile) -> Option<PhaseBytes>;

/// Tokens of a caption, as the planner counts them.
const CAPTION_TOKENS: usize = 96;

impl Transformer {
    fn predict(&self, inputs: &Inputs) -> Tensor {
        let batch = inputs.latents.dim(0).unwrap();
        let times = Tensor::full(10f32, batch, &Device::Cpu).unwrap();
        let pooled = || inputs.pooled.as_ref().unwrap();
        match self {
            Self::Chroma(chroma) => chroma
                .forward(&inputs.latents, &times, &inputs.text, &inputs.lengths)
                .unwrap(),
            Self::Flux(flux) => {
                let guidance = flux.has_guidance().then_some(&times);
                let conditions = FluxConditions {
                    text: &inputs.text,
                    text_lengths: None,
                    pooled: pooled(),
                    guidance,
                    control: inputs.control.as_ref(),
                };
                flux.forward(&inputs.latents, &times, &conditions).unwrap()
            }
            Self::Sd3(sd3) => {
                let conditions = Sd3Conditions {
                    text: &inputs.text,
                    pooled: pooled(),
                };
                sd3.forward(&inputs.latents, &times, &conditions, &[]).unwrap()
            }
            Self::ZImage(zimage) => zimage
                .forward(&inputs.latents, &times, &inputs.text, &inputs.lengths)
                .unwrap(),
        }
    }

    fn set_checkpointing(&mut self, checkpointing: Checkpointing) {
        match self {
            Self::Chroma(chroma) => chroma.checkpointing = checkpointing,
            Self::Flux(flux) => flux.checkpointing = checkpointing,
            Self::Sd3(sd3) => sd3.checkpointing = checkpointing,
            Self::ZImage(zimage) => zimage.checkpointing = checkpointing,
        }
    }

    fn part(&mut self) -> Part<'_> {
        let (blocks, layers): (&'static [&'static str], &mut dyn VisitLayers) = match self {
            Self::Chroma(chroma) => (&["transformer_blocks", "single_transformer_blocks"], chroma),
            Self::Flux(flux) => (&["transformer_blocks", "single_transformer_blocks"], flux),
            Self::Sd3(sd3) => (&["transformer_blocks"], sd3),
            Self::ZImage(zimage) => (&["layers"], zimage),
        };
        Part {
            id: "transformer",
            role: PartRole::Denoiser,
            lora_prefix: "transformer",
            lora_names: AdapterNames::Peft,
            block_lists: blocks,
            layers,
        }
    }
}
