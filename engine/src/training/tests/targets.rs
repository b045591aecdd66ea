//! `correct_pred_norm`, `loss_target` and `loss_type: stepped`: comparison with the numbers that `tests/reference/make_loss_targets.py`
//! prints.

use crate::autograd::gradients;
use crate::families::Conditioning;
use crate::rng::TorchGenerator;
use crate::samplers::{NoiseSchedule, PredictionType, SamplerParams};
use crate::training::{
    Ddpm, DrawInputs, FlowMatch, FlowTimesteps, FlowWeighting, LossInputs, LossKind, LossOptions, MicroBatch,
    NoiseDraw, NoiseOptions, Objective, SnrWeighting, loss,
};
use candle_core::{Device, Tensor, Var};

const SHAPE: (usize, usize, usize, usize) = (2, 4, 5, 6);

fn randn(generator: &mut TorchGenerator) -> Tensor {
    Tensor::from_vec(generator.randn(240), SHAPE, &Device::Cpu).unwrap()
}

fn diffusion(prediction_type: PredictionType) -> Ddpm {
    let params = serde_json::json!({
        "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000
    });
    let mut schedule = NoiseSchedule::new(&SamplerParams::from_json(&params).unwrap()).unwrap();
    schedule.prediction_type = prediction_type;
    Ddpm {
        schedule,
        noise: NoiseOptions::default(),
        weighting: SnrWeighting::default(),
    }
}

fn flow(timesteps: FlowTimesteps) -> FlowMatch {
    FlowMatch {
        timesteps,
        // It has no influence on a loss that compares with images.
        weighting: FlowWeighting::Even,
        noise: NoiseOptions::default(),
    }
}

fn shifted() -> FlowMatch {
    let params = serde_json::json!({"shift": 3.0, "num_train_timesteps": 1000});
    flow(FlowTimesteps::Shift(Box::new(
        SamplerParams::from_json(&params).unwrap(),
    )))
}

/// What differs between the cases: the options, whether the loss compares with the image before its augmentations, and whether it is
/// masked.
struct Case {
    objective: Box<dyn Objective>,
    options: LossOptions,
    timesteps: [f32; 2],
    unaugmented: bool,
    mask: bool,
}

impl Case {
    fn new(objective: impl Objective + 'static, timesteps: [f32; 2], options: LossOptions) -> Self {
        Self {
            objective: Box::new(objective),
            options,
            timesteps,
            unaugmented: false,
            mask: false,
        }
    }

    /// The loss, the sum of the absolute values of its gradient, and one element of that.
    fn numbers(&self) -> [f64; 3] {
        let mut generator = TorchGenerator::manual_seed(11);
        let [prediction, latents, noise, base, unaugmented] = std::array::from_fn(|_| randn(&mut generator));
        let mask = Tensor::from_vec(generator.rand(60), (2, 1, 5, 6), &Device::Cpu).unwrap();
        let prediction = Var::from_tensor(&prediction).unwrap();
        let noise_draw = NoiseDraw {
            timesteps: self.timesteps.to_vec(),
            noise: vec![noise],
            input_noise: Vec::new(),
            has_stepped: false,
        };
        let corrects_norm = self.options.norm_correction.is_some();
        let batch = MicroBatch {
            latents: vec![latents],
            conditioning: Conditioning::default(),
            weights: vec![1.0; 2],
            weight: 1.0,
            mask: self.mask.then_some(mask),
            loss_inputs: LossInputs {
                base: corrects_norm.then(|| vec![base]),
                corrects_norm,
                unaugmented: self.unaugmented.then(|| vec![unaugmented]),
                stepped_levels: match self.options.stepped {
                    true => self.objective.stepped_levels(&noise_draw, 0).unwrap(),
                    false => Vec::new(),
                },
                ..LossInputs::default()
            },
            noise_draw,
        };
        let predict = |_: &[Tensor], _: &Tensor, _: &Conditioning| Ok(vec![prediction.as_tensor().clone()]);
        let (value, gradients) = gradients(|| loss(&predict, &*self.objective, &self.options, &batch)).unwrap();
        let gradient = gradients.get(prediction.as_tensor()).unwrap().flatten_all().unwrap();
        let number = |tensor: Tensor| f64::from(tensor.to_scalar::<f32>().unwrap());
        [
            number(value),
            number(gradient.abs().unwrap().sum_all().unwrap()),
            number(gradient.get(77).unwrap()),
        ]
    }
}

fn assert_close(name: &str, found: [f64; 3], expected: [f64; 3]) {
    for (found, expected) in found.into_iter().zip(expected) {
        let difference = (found / expected - 1.0).abs();
        assert!(difference < 1e-4, "{name}: {found}, not {expected}");
    }
}

#[test]
fn losses_of_other_targets_match_the_reference() {
    let corrected = |share: f64| LossOptions {
        norm_correction: Some(share),
        ..LossOptions::default()
    };
    let source = |noisy_multiplier: f64| LossOptions {
        source: true,
        noisy_multiplier,
        // It has no influence.
        kind: LossKind::Mae,
        ..LossOptions::default()
    };
    let stepped = || LossOptions {
        stepped: true,
        ..LossOptions::default()
    };
    let epsilon = || diffusion(PredictionType::Epsilon);
    let even = || flow(FlowTimesteps::Linear);
    let cases = [
        (
            "correct_pred_norm",
            Case::new(epsilon(), [300.0, 812.0], corrected(1.0)),
            [1.9954069, 2.2711011, -5.6914226e-03],
        ),
        (
            "correct_pred_norm in part",
            Case {
                mask: true,
                ..Case::new(
                    epsilon(),
                    [300.0, 812.0],
                    LossOptions {
                        kind: LossKind::Mae,
                        target_noise_multiplier: 1.1,
                        ..corrected(0.4)
                    },
                )
            },
            [0.67832673, 0.56500865, -3.7493214e-03],
        ),
        (
            "source",
            Case::new(epsilon(), [300.0, 812.0], source(0.9)),
            [1.9530037, 2.2769793, -7.1137943e-03],
        ),
        (
            "unaugmented",
            Case {
                unaugmented: true,
                mask: true,
                ..Case::new(epsilon(), [300.0, 812.0], source(1.0))
            },
            [1.8134107, 1.6266855, 5.5799659e-04],
        ),
        (
            "source of flow matching",
            Case::new(
                FlowMatch {
                    weighting: FlowWeighting::Bell,
                    ..even()
                },
                [300.0, 812.0],
                source(0.9),
            ),
            [3.0872021, 2.8698210, -7.8681843e-03],
        ),
        (
            "unaugmented of flow matching",
            Case {
                unaugmented: true,
                ..Case::new(even(), [300.0, 812.0], source(1.0))
            },
            [11.059440, 4.9454031, 1.6825595e-02],
        ),
        (
            "stepped",
            Case::new(even(), [730.0, 31.0], stepped()),
            [0.40675639, 0.38071714, -2.3351190e-03],
        ),
        (
            "stepped, shifted",
            Case::new(shifted(), table_entries(), stepped()),
            [2.1711750, 2.0332639, -1.2196331e-02],
        ),
    ];
    for (name, case, expected) in cases {
        assert_close(name, case.numbers(), expected);
    }
}

/// The entries 100 and 970 of the shifted table, which are 964.362 and 90.0563 in diffusers.
fn table_entries() -> [f32; 2] {
    let FlowTimesteps::Shift(params) = shifted().timesteps else {
        panic!("no shifted table");
    };
    let table = crate::training::flow_timesteps::shifted(&params, 1000, 0).unwrap();
    assert!((table[100] - 964.36206).abs() < 1e-3, "{}", table[100]);
    assert!((table[970] - 90.05628).abs() < 1e-3, "{}", table[970]);
    [table[100], table[970]]
}

#[test]
fn without_options_the_loss_of_the_image_is_that_of_the_noise() {
    for (objective, timesteps) in [
        (
            Box::new(diffusion(PredictionType::Epsilon)) as Box<dyn Objective>,
            [120.0, 940.0],
        ),
        (Box::new(flow(FlowTimesteps::Linear)), [120.0, 940.0]),
    ] {
        let mut case = Case {
            objective,
            ..Case::new(flow(FlowTimesteps::Linear), timesteps, LossOptions::default())
        };
        let of_noise = case.numbers();
        case.options.source = true;
        assert_close("source", case.numbers(), of_noise);
    }
}

#[test]
fn models_that_predict_the_velocity_of_diffusion_have_no_source() {
    let x = Tensor::ones(SHAPE, candle_core::DType::F32, &Device::Cpu).unwrap();
    let noise_draw = NoiseDraw {
        timesteps: vec![3.0, 4.0],
        noise: vec![x.clone()],
        input_noise: Vec::new(),
        has_stepped: false,
    };
    assert!(
        diffusion(PredictionType::VPrediction)
            .predict_x0_and_weights(&x, &x, &noise_draw)
            .is_err()
    );
    assert!(
        diffusion(PredictionType::Epsilon)
            .stepped_levels(&noise_draw, 0)
            .is_err()
    );
    // The last entries of a table step to its end, those of a sampler to no noise at all.
    let noise_draw = NoiseDraw {
        timesteps: vec![1000.0, 7.5],
        ..noise_draw
    };
    assert_eq!(
        flow(FlowTimesteps::Sigmoid(1.0))
            .stepped_levels(&noise_draw, 0)
            .unwrap(),
        [0.95, 0.001]
    );
    let noise_draw = NoiseDraw {
        timesteps: table_entries().to_vec(),
        ..noise_draw
    };
    let levels = shifted().stepped_levels(&noise_draw, 0).unwrap();
    assert!((levels[0] - 0.9445676).abs() < 1e-6 && levels[1] == 0.0, "{levels:?}");
}

#[test]
fn half_of_what_augmentations_change_is_noise() {
    let mut generator = TorchGenerator::manual_seed(11);
    let [_, latents, _, _, unaugmented] = std::array::from_fn(|_| randn(&mut generator));
    let (latents, unaugmented) = ([latents], [unaugmented]);
    let options = NoiseOptions {
        dynamic_offset: true,
        multiplier: 1.1,
        signal_correction: Some(0.3),
        ..NoiseOptions::default()
    };
    let inputs = DrawInputs {
        unaugmented: Some(&unaugmented),
        ..DrawInputs::new(&latents)
    };
    let mut generator = TorchGenerator::manual_seed(12);
    let noise = crate::training::random::draw_noise(&options, &mut generator, &inputs).unwrap();
    let flat = noise[0].flatten_all().unwrap();
    let values = flat.to_vec1::<f32>().unwrap();
    assert_close(
        "noise",
        [values[0], values[77], values[239]].map(f64::from),
        [-0.930442, -1.407682, -0.629924],
    );
    let sum = values.iter().map(|value| f64::from(value.abs())).sum::<f64>();
    assert!((sum / 277.3522 - 1.0).abs() < 1e-5, "{sum}");
}
