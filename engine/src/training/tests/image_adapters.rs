//! Ten steps of training a T2I-Adapter and a ControlNet alone, as a loop of PyTorch does (`tests/reference/make_image_adapters.py`).

use super::*;
use crate::families::{Conditioning, Model};
use crate::image_adapters::test_weights::{fill, new_adapter, noise, pixels, report};
use crate::optim::Param;
use aitk_common::job::adapter::{AdapterConfig, AdapterType};

/// Compares the losses of each step, and the norms of the trained weights after the last.
fn compare(kind: AdapterType, checkpointing: Checkpointing) {
    let name = kind.name();
    let report = &report()["trainings"][name];
    let mut model = tiny_sd();
    let config = AdapterConfig {
        kind,
        train: true,
        channels: vec![16, 32],
        downscale_factor: 2,
        ..AdapterConfig::default()
    };
    let adapter = new_adapter(&config, &model);
    match kind {
        AdapterType::T2i => fill(&*adapter, |_| true),
        // Those that are random in a new one. The others are those of the U-Net, or zero.
        _ => fill(&*adapter, |name| {
            name.starts_with("controlnet_cond_embedding.") && !name.contains(".conv_out.")
        }),
    }
    let params: Vec<Param> = adapter
        .trained()
        .iter()
        .map(|(name, var)| Param {
            name: name.clone(),
            var: var.clone(),
        })
        .collect();
    model.set_image_adapter(adapter).unwrap();
    model.set_checkpointing(checkpointing);
    let mut trainer = Trainer::new(TrainerOptions {
        params: params.clone(),
        optimizer: Box::new(Adam::new(params.clone(), AdamParams::new(true)).unwrap()),
        schedule: constant(1e-3),
        max_grad_norm: None,
        ema: None,
        fused_backward: false,
    });
    let schedule = NoiseSchedule::new(&SamplerParams::from_json(&model.scheduler_config).unwrap()).unwrap();
    let objective = ddpm(schedule, SnrWeighting::default());
    for step in 0..10usize {
        let of_step = |what: &str, dims: &[usize], scale: f32| noise(&format!("{name}/{what}/{step}"), dims, scale);
        let forward = || {
            let conditioning = Conditioning::default().with("context", of_step("context", &[2, 77, 32], 1.0));
            let images = pixels(&format!("{name}/image/{step}"), &[2, 3, 16, 16]);
            let batch = MicroBatch {
                latents: vec![of_step("latents", &[2, 4, 8, 8], 1.5)],
                noise_draw: NoiseDraw {
                    timesteps: [(173 * step + 19) % 1000, (397 * step + 600) % 1000]
                        .map(|t| t as f32)
                        .to_vec(),
                    noise: vec![of_step("noise", &[2, 4, 8, 8], 1.5)],
                    input_noise: Vec::new(),
                    has_stepped: false,
                },
                conditioning: model.with_adapter_images(conditioning, &images, 1.0)?,
                weights: vec![1.0; 2],
                weight: 1.0,
                loss_inputs: LossInputs::default(),
                mask: None,
            };
            loss_of(&model, &objective, &LossOptions::default(), &batch)
        };
        trainer.accumulate(forward).unwrap();
        let done = trainer.finish_step(step as u64, true).unwrap();
        let want = report["losses"][step].as_f64().unwrap();
        let difference = (done.loss / want - 1.0).abs();
        println!("{name}, step {step}: {} differs by {difference:.1e}", done.loss);
        assert!(
            difference < 1e-4,
            "{name}, step {step}: {} instead of {want}",
            done.loss
        );
    }
    for param in &params {
        let squares = param
            .var
            .as_detached_tensor()
            .to_dtype(DType::F64)
            .unwrap()
            .sqr()
            .unwrap();
        let norm = squares.sum_all().unwrap().to_scalar::<f64>().unwrap().sqrt();
        let want = report["norms"][&param.name].as_f64().unwrap();
        let difference = (norm - want).abs() / want.max(1e-3);
        assert!(
            difference < 1e-3,
            "{name}: {} has the norm {norm} instead of {want}",
            param.name
        );
    }
    assert_eq!(params.len(), report["norms"].as_object().unwrap().len());
}

#[test]
fn a_t2i_adapter_is_trained_as_in_the_reference() {
    compare(AdapterType::T2i, Checkpointing::Off);
    compare(AdapterType::T2i, Checkpointing::each_block(true));
}

#[test]
fn a_controlnet_is_trained_as_in_the_reference() {
    compare(AdapterType::ControlNet, Checkpointing::Off);
}

in_portable_mode! {
    a_t2i_adapter_is_trained_as_in_the_reference,
    a_controlnet_is_trained_as_in_the_reference,
}
