//! Benchmarks of Stable Diffusion at full size.

use super::operations::{Iteration, forward_and_backward, normal, normal_f32};
use crate::adapters::{AdapterConfig, AdapterNetwork, AdapterType};
use crate::autograd::gradients;
use crate::checkpointing::Checkpointing;
use crate::device::Compute;
use crate::error::{EngineError, Result};
use crate::families::stable_diffusion::{SdConfig, Variant};
use crate::families::{AdapterNames, Conditioning, Part, PartRole};
use crate::models::clip::{ClipTextConfig, ClipTextModel};
use crate::models::unet::{AdditionalConditions, Transformer2d, TransformerSizes, UNet2DConditionModel, UNetConfig};
use crate::models::vae::{AutoencoderKl, VaeConfig};
use crate::optim::{Adam, AdamParams, Grads, Optimizer};
use crate::rng::TorchGenerator;
use crate::samplers::{NoiseSchedule, SamplerParams};
use crate::training::{
    Ddpm, LossInputs, LossOptions, MicroBatch, NoiseDraw, NoiseOptions, SnrWeighting, loss, optim_error,
};
use crate::weights::Weights;
use candle_core::Tensor;

/// New random weights without gradients.
fn frozen(compute: &Compute) -> Weights {
    trainable(compute).frozen()
}

/// New random weights with gradients.
fn trainable(compute: &Compute) -> Weights {
    Weights::init(1, &compute.device).in_dtype(compute.dtype)
}

pub(super) fn text_encoder(compute: &Compute) -> Result<Iteration> {
    let model = ClipTextModel::new(&frozen(compute), &ClipTextConfig::default())?;
    let ids = Tensor::full(320u32, (1, 77), &compute.device)?;
    Ok(Box::new(move || {
        model.forward(&ids)?;
        Ok(())
    }))
}

fn unet(compute: &Compute, variant: &'static Variant) -> Result<UNet2DConditionModel> {
    UNet2DConditionModel::new(&frozen(compute), &SdConfig::defaults(variant)?.unet)
}

/// The inputs of a U-Net besides sample and timestep, for one item.
fn conditioning(compute: &Compute, unet: &UNet2DConditionModel) -> Result<Conditioning> {
    let config_error = EngineError::Internal;
    let width = unet.config().context_width().map_err(config_error)?;
    let conditioning = Conditioning::default().with("context", normal(compute, &[1, 77, width])?);
    Ok(match unet.config().pooled_width(6).map_err(config_error)? {
        None => conditioning,
        Some(width) => conditioning.with("pooled", normal(compute, &[1, width])?).with(
            "time_ids",
            Tensor::new(&[[512f32, 512.0, 0.0, 0.0, 512.0, 512.0]], &compute.device)?,
        ),
    })
}

fn predict(unet: &UNet2DConditionModel, x: &Tensor, t: &Tensor, conditioning: &Conditioning) -> Result<Tensor> {
    let context = conditioning.get("context")?.to_dtype(x.dtype())?;
    let pooled = conditioning.get("pooled").ok();
    let conditions = match pooled {
        None => None,
        Some(pooled) => Some(AdditionalConditions {
            pooled,
            time_ids: conditioning.get("time_ids")?,
        }),
    };
    unet.forward_with(x, t, &context, conditions.as_ref())
}

pub(super) fn unet_forward(compute: &Compute, variant: &'static Variant, side: usize) -> Result<Iteration> {
    let model = unet(compute, variant)?;
    let x = normal(compute, &[1, 4, side, side])?;
    let conditioning = conditioning(compute, &model)?;
    let time = Tensor::new(&[500f32], &compute.device)?;
    Ok(Box::new(move || {
        predict(&model, &x, &time, &conditioning)?;
        Ok(())
    }))
}

/// A training step of an adapter with rank 16 on every linear layer and 1x1 convolution.
pub(super) fn adapter_step(
    compute: &Compute,
    variant: &'static Variant,
    adapter: &dyn AdapterType,
    side: usize,
    checkpointed: bool,
) -> Result<Iteration> {
    let mut unet = unet(compute, variant)?;
    if checkpointed {
        unet.checkpointing = Checkpointing::Segments { blocks: 1 };
    }
    let config = AdapterConfig {
        rank: 16,
        alpha: 16.0,
        conv_rank: None,
        conv_alpha: 1.0,
        ..AdapterConfig::default()
    };
    let network = AdapterNetwork::attach_as(
        adapter,
        &config,
        None,
        &mut [Part {
            id: "unet",
            role: PartRole::Denoiser,
            lora_prefix: "lora_unet",
            lora_names: AdapterNames::Kohya,
            block_lists: &[],
            layers: &mut unet,
        }],
        &mut TorchGenerator::manual_seed(2),
    )?;
    network.handle.set_training(Some(""));
    let params = network.params();
    let mut optimizer = Adam::new(params.clone(), AdamParams::new(true)).map_err(optim_error)?;
    let scheduler = SdConfig::defaults(variant)?.scheduler;
    let objective = Ddpm {
        schedule: NoiseSchedule::new(&SamplerParams::from_json(&scheduler)?)?,
        noise: NoiseOptions::default(),
        weighting: SnrWeighting::default(),
    };
    let batch = MicroBatch {
        latents: vec![normal_f32(compute, &[1, 4, side, side])?],
        noise_draw: NoiseDraw {
            timesteps: vec![500.0],
            noise: vec![normal_f32(compute, &[1, 4, side, side])?],
            input_noise: Vec::new(),
            has_stepped: false,
        },
        conditioning: conditioning(compute, &unet)?,
        weights: vec![1.0],
        weight: 1.0,
        loss_inputs: LossInputs::default(),
        mask: None,
    };
    let dtype = compute.dtype;
    Ok(Box::new(move || {
        let predict = |latents: &[Tensor], timesteps: &Tensor, conditioning: &Conditioning| {
            Ok(vec![predict(
                &unet,
                &latents[0].to_dtype(dtype)?,
                timesteps,
                conditioning,
            )?])
        };
        let (_, store) = gradients(|| loss(&predict, &objective, &LossOptions::default(), &batch))?;
        let grads: Grads = params.iter().map(|p| store.get(&p.var).cloned()).collect();
        optimizer.step(&grads, 1e-4).map_err(optim_error)
    }))
}

pub(super) fn full_gradients(compute: &Compute, side: usize) -> Result<Iteration> {
    let weights = trainable(compute);
    let model = UNet2DConditionModel::new(&weights, &UNetConfig::default())?;
    let x = normal(compute, &[1, 4, side, side])?;
    let context = normal(compute, &[1, 77, 768])?;
    let time = Tensor::new(&[500f32], &compute.device)?;
    Ok(Box::new(move || {
        let all = gradients(|| Ok::<_, EngineError>(model.forward(&x, &time, &context)?.sqr()?.mean_all()?))?;
        std::hint::black_box(all);
        Ok(())
    }))
}

pub(super) fn vae(compute: &Compute, decode: bool) -> Result<Iteration> {
    let model = AutoencoderKl::new(&frozen(compute), &VaeConfig::default())?;
    let x = normal(compute, if decode { &[1, 4, 64, 64] } else { &[1, 3, 512, 512] })?;
    Ok(Box::new(move || {
        if decode {
            model.decode(&x)?;
        } else {
            model.encode(&x)?;
        }
        Ok(())
    }))
}

pub(super) fn sdxl_block(compute: &Compute, with_gradients: bool) -> Result<Iteration> {
    let weights = trainable(compute);
    let weights = if with_gradients { weights } else { weights.frozen() };
    let sizes = TransformerSizes {
        channels: 1280,
        heads: 20,
        context: 2048,
        layers: 1,
        groups: 32,
        linear: true,
        upcast_attention: false,
    };
    let model = Transformer2d::new(&weights, sizes)?;
    let x = normal(compute, &[1, 1280, 32, 32])?;
    let context = normal(compute, &[1, 77, 2048])?;
    Ok(Box::new(move || {
        if with_gradients {
            return forward_and_backward(|| model.forward(&x, &context));
        }
        model.forward(&x, &context)?;
        Ok(())
    }))
}
