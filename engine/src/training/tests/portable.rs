//! Steps of a training in portable mode, in every dtype, compared with the kernels on slices.

use super::*;
use crate::autograd::gradients;
use crate::device::portable::{emulated_kernels, portable};
use crate::families::stable_diffusion::{SdModel, Variant};
use crate::families::{ItemSize, LoadOptions, sd1, sd2, sdxl};
use crate::testing::{largest, sampled_cases};

/// The loss and the gradients of one step.
type Step = (f32, Vec<Tensor>);

/// A family and its tiny model.
type Tiny = (&'static Variant, &'static str);

const SD1: Tiny = (&sd1::VARIANT, "tiny_sd");
const SD2: Tiny = (&sd2::VARIANT, "tiny_sd21");
const SDXL: Tiny = (&sdxl::VARIANT, "tiny_sdxl");

/// Five steps of gradient descent for a LoRA on all layers of the U-Net, at an odd size.
fn five_steps(dtype: DType, checkpointing: Checkpointing) -> Vec<Step> {
    five_steps_of(SD1, dtype, checkpointing)
}

fn five_steps_of((variant, folder): Tiny, dtype: DType, checkpointing: Checkpointing) -> Vec<Step> {
    let options = LoadOptions {
        dtype,
        ..LoadOptions::cpu()
    };
    let mut model = SdModel::load(variant, fixtures().join(folder), &options).unwrap();
    model.unet.checkpointing = checkpointing;
    let config = AdapterConfig {
        rank: 4,
        alpha: 8.0,
        conv_rank: Some(4),
        conv_alpha: 8.0,
        ..AdapterConfig::default()
    };
    let network = AdapterNetwork::attach(
        &config,
        &mut [unet_part(&mut model)],
        &mut TorchGenerator::manual_seed(0),
    )
    .unwrap();
    network.handle.set_training(Some("no dropout"));
    let params = network.params();
    let mut generator = TorchGenerator::manual_seed(1);
    let mut random = |shape: &[usize]| {
        let count = shape.iter().product();
        Tensor::from_vec(generator.randn(count), shape, &Device::Cpu).unwrap()
    };
    for p in &params {
        p.var.set(&(random(p.var.dims()) * 0.1).unwrap()).unwrap();
    }
    let schedule = NoiseSchedule::new(&SamplerParams::from_json(&model.scheduler_config).unwrap()).unwrap();
    let objective = ddpm(schedule, SnrWeighting::default());
    let width = model.unet.config().context_width().unwrap();
    let pooled = model.unet.config().pooled_width(6).unwrap();
    let mut step = |_| {
        let mut conditioning = Conditioning::default();
        let (latents, noise) = (random(&[2, 4, 11, 21]), random(&[2, 4, 11, 21]));
        conditioning = conditioning.with("context", random(&[2, 77, width]));
        if let Some(width) = pooled {
            conditioning = conditioning.with("pooled", random(&[2, width]));
        }
        let sizes = [ItemSize::whole(640, 352), ItemSize::whole(1001, 77)];
        let batch = MicroBatch {
            latents: vec![latents],
            noise_draw: NoiseDraw {
                timesteps: vec![417.0, 30.0],
                noise: vec![noise],
                input_noise: Vec::new(),
                has_stepped: false,
            },
            conditioning: model.with_sizes(conditioning, &sizes).unwrap(),
            weights: vec![1.0, 0.5],
            weight: 1.0,
            loss_inputs: LossInputs::default(),
            mask: None,
        };
        let (loss, found) = gradients(|| loss_of(&model, &objective, &LossOptions::default(), &batch)).unwrap();
        let of = |p: &crate::optim::Param| found.get(p.var.as_tensor()).unwrap().clone();
        let found: Vec<_> = params.iter().map(of).collect();
        for (p, gradient) in params.iter().zip(&found) {
            p.var
                .set(&(p.var.as_tensor() - (gradient * 0.05).unwrap()).unwrap())
                .unwrap();
        }
        (loss.to_scalar().unwrap(), found)
    };
    (0..5).map(&mut step).collect()
}

fn norm(t: &Tensor) -> f32 {
    t.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap().sqrt()
}

/// The largest relative error of a loss, and of a component of a gradient as a fraction of its tensor's largest one.
fn largest_errors(ours: &[Step], expected: &[Step]) -> (f32, f32) {
    let (mut of_loss, mut of_gradient) = (0f32, 0f32);
    for ((loss, found), (expected_loss, expected)) in ours.iter().zip(expected) {
        of_loss = of_loss.max((loss / expected_loss - 1.0).abs());
        for (a, b) in found.iter().zip(expected) {
            of_gradient = of_gradient.max(gap(a, b) / largest(b));
        }
    }
    (of_loss, of_gradient)
}

#[test]
fn five_steps_in_f32_equal_those_of_the_slice_kernels() {
    for tiny in sampled_cases(vec![SD1, SD2, SDXL]) {
        let expected = five_steps_of(tiny, DType::F32, Checkpointing::Off);
        let steps = || five_steps_of(tiny, DType::F32, Checkpointing::Off);
        for (mode, ours) in [("portable", portable(steps)), ("kernels", emulated_kernels(steps))] {
            let (of_loss, of_gradient) = largest_errors(&ours, &expected);
            let name = tiny.1;
            let (_, of_all) = overall_errors(&ours, &expected);
            println!(
                "{name}, f32, {mode}: losses differ by {of_loss:.1e}, gradients by {of_gradient:.1e}, all by {of_all:.1e}"
            );
            // Rounding alone, which depends on the CPU: up to 1.6e-4 of a component was seen, 3e-5 of all gradients together.
            assert!(
                of_loss < 1e-4 && of_gradient < 5e-4 && of_all < 1e-4,
                "{name}, {mode}: {of_loss:.1e}, {of_gradient:.1e}, {of_all:.1e}"
            );
        }
    }
}

/// The relative errors of the loss and of all gradients together, of the step where they are largest.
fn overall_errors(ours: &[Step], expected: &[Step]) -> (f32, f32) {
    let squares = |all: &mut dyn Iterator<Item = f32>| all.map(|norm| norm * norm).sum::<f32>().sqrt();
    let (mut of_loss, mut of_gradients) = (0f32, 0f32);
    for ((loss, found), (expected_loss, expected)) in ours.iter().zip(expected) {
        // NaN is not a number below a tolerance: it must not get lost in a maximum.
        let difference = squares(&mut found.iter().zip(expected).map(|(a, b)| norm(&(a - b).unwrap())));
        assert!(loss.is_finite() && difference.is_finite());
        of_loss = of_loss.max((loss / expected_loss - 1.0).abs());
        of_gradients = of_gradients.max(difference / squares(&mut expected.iter().map(norm)));
    }
    (of_loss, of_gradients)
}

#[test]
fn checkpointed_steps_equal_resident_steps_in_every_dtype() {
    // The gradients of a tensor that several blocks read are summed in another order, in the dtype of the tensor.
    for (dtype, tolerance) in sampled_cases(vec![(DType::F32, 1e-5), (DType::F16, 0.01), (DType::BF16, 0.05)]) {
        let resident = portable(|| five_steps(dtype, Checkpointing::Off));
        let checkpointed = portable(|| five_steps(dtype, Checkpointing::Segments { blocks: 2 }));
        let (of_loss, of_gradients) = overall_errors(&checkpointed, &resident);
        println!("{dtype:?}, checkpointed: losses differ by {of_loss:.1e}, gradients by {of_gradients:.1e}");
        assert!(
            of_loss < tolerance && of_gradients < tolerance,
            "{dtype:?}: {of_loss:.1e}, {of_gradients:.1e}"
        );
    }
}

#[test]
fn steps_in_half_precision_are_finite_and_close_to_f32() {
    let expected = five_steps(DType::F32, Checkpointing::Off);
    for (dtype, tolerance) in sampled_cases(vec![(DType::BF16, 0.05), (DType::F16, 0.01)]) {
        let steps = || five_steps(dtype, Checkpointing::Off);
        for (mode, ours) in [("portable", portable(steps)), ("kernels", emulated_kernels(steps))] {
            let (of_loss, of_gradients) = overall_errors(&ours, &expected);
            println!("{dtype:?}, {mode}: losses differ from f32 by {of_loss:.1e}, gradients by {of_gradients:.1e}");
            assert!(
                of_loss < tolerance && of_gradients < tolerance,
                "{dtype:?}, {mode}: {of_loss:.1e}, {of_gradients:.1e}"
            );
        }
    }
}

/// A trainer of one parameter.
fn trainer_of_one() -> Trainer {
    let one = Tensor::ones(1, DType::F32, &Device::Cpu).unwrap();
    let params = vec![crate::optim::Param {
        name: "x".into(),
        var: candle_core::Var::from_tensor(&one).unwrap(),
    }];
    Trainer::new(TrainerOptions {
        params: params.clone(),
        optimizer: Box::new(Adam::new(params, AdamParams::new(true)).unwrap()),
        schedule: constant(1e-3),
        max_grad_norm: Some(1e9),
        ema: None,
        fused_backward: true,
    })
}

/// A step with a loss whose gradient is `slope`, and passes through f16.
fn step_through_f16(trainer: &mut Trainer, slope: f64, fused: bool) -> StepReport {
    let var = trainer.params()[0].var.clone();
    let loss = || {
        let half = var.as_tensor().to_dtype(DType::F16)?;
        Ok((half.to_dtype(DType::F32)? * slope)?.sum_all()?)
    };
    match fused {
        true => trainer.fused_step(0, loss).unwrap(),
        false => trainer.accumulate(loss).unwrap(),
    }
    trainer.finish_step(0, true).unwrap()
}

#[test]
fn a_scaled_loss_keeps_small_gradients_and_skips_steps_that_overflow() {
    for fused in [false, true] {
        let mut plain = trainer_of_one();
        let unscaled = step_through_f16(&mut plain, 1e-9, fused);
        assert_eq!(unscaled.grad_norm, Some(0.0), "f16 has no number below 6e-8");
        let mut trainer = trainer_of_one().with_loss_scaling();
        let norm = step_through_f16(&mut trainer, 1e-9, fused).grad_norm.unwrap();
        assert!((norm / 1e-9 - 1.0).abs() < 1e-3, "{norm}");
        // 2 * 65,536 and 2 * 32,768 exceed the largest number of f16, 65,504.
        let weight = |trainer: &Trainer| trainer.params()[0].var.to_vec1::<f32>().unwrap();
        let before = weight(&trainer);
        for _ in 0..2 {
            let report = step_through_f16(&mut trainer, 2.0, fused);
            assert_eq!((report.grad_norm, report.warning), (None, None));
            assert_eq!(weight(&trainer), before, "the step is skipped");
        }
        assert_eq!(step_through_f16(&mut trainer, 2.0, fused).grad_norm, Some(2.0));
        // The factor is part of the state.
        let (state, _) = trainer.state().unwrap();
        let state: BTreeMap<_, _> = state.into_iter().map(|(role, map)| (role.to_owned(), map)).collect();
        let mut restored = trainer_of_one().with_loss_scaling();
        restored.restore_state(state.clone(), 0).unwrap();
        assert_eq!(step_through_f16(&mut restored, 2.0, fused).grad_norm, Some(2.0));
        // Without scaling, the factor in a state is ignored.
        plain.restore_state(state, 0).unwrap();
        assert_eq!(step_through_f16(&mut plain, 2.0, fused).grad_norm, Some(2.0));
    }
}

#[test]
fn gradients_of_another_shape_are_refused() {
    let mut trainer = trainer_of_one();
    let var = trainer.params()[0].var.clone();
    trainer.accumulate(|| Ok(var.as_tensor().sum_all()?)).unwrap();
    trainer.finish_step(0, false).unwrap();
    let (state, _) = trainer.state().unwrap();
    let mut state: BTreeMap<_, _> = state.into_iter().map(|(role, map)| (role.to_owned(), map)).collect();
    trainer_of_one().restore_state(state.clone(), 0).unwrap();
    let other = Tensor::ones(2, DType::F32, &Device::Cpu).unwrap();
    state.get_mut("gradients").unwrap().insert("x".into(), other);
    let error = trainer_of_one().restore_state(state, 0).unwrap_err().to_string();
    assert!(error.contains("gradient of `x` has shape [2]"), "{error}");
}

#[test]
fn scaling_does_not_change_gradients_that_fit() {
    let gradients_with = |scaled: bool| {
        let trainer = trainer_of_one();
        let mut trainer = if scaled { trainer.with_loss_scaling() } else { trainer };
        (0..3)
            .map(|_| step_through_f16(&mut trainer, 0.375, false))
            .collect::<Vec<_>>()
    };
    assert_eq!(gradients_with(true), gradients_with(false));
}

#[test]
fn a_preservation_loss_is_added_to_a_loss_that_is_finite() {
    let step = |slopes: [f64; 2]| {
        let mut trainer = trainer_of_one();
        let var = trainer.params()[0].var.clone();
        let loss = |slope: f64| (var.as_tensor() * slope).and_then(|x| x.sum_all()).map_err(Into::into);
        trainer.accumulate(|| loss(slopes[0])).unwrap();
        trainer.accumulate_preservation(|| loss(slopes[1])).unwrap();
        trainer.finish_step(0, true).unwrap()
    };
    let report = step([2.0, 0.5]);
    assert_eq!((report.loss, report.preservation), (2.5, Some(0.5)));
    assert_eq!(report.grad_norm, Some(2.5));
    let report = step([f64::NAN, 0.5]);
    assert_eq!((report.preservation, report.grad_norm), (None, None));
    assert!(report.loss.is_nan() && report.warning.is_some());
}
