//! Losses of image pairs: comparison with the numbers that `tests/reference/make_image_pairs.py` prints. They are also those of
//! ai-toolkit's `get_guidance_loss` for the same tensors.

use crate::autograd::gradients;
use crate::rng::TorchGenerator;
use crate::training::{NoiseDraw, PairedBatch, paired_noise, paired_strength};
use aitk_common::job::dataset::GuidanceType;
use candle_core::{Device, Tensor, Var};

const SHAPE: (usize, usize, usize, usize) = (2, 4, 5, 6);

/// What the model is trained to predict.
#[derive(Clone, Copy, PartialEq)]
enum Target {
    Noise,
    Velocity,
}

/// Four numbers: the loss; the sum of the absolute values of its gradient with respect to the prediction for the images; one element of that
/// gradient; the same sum for the pairs.
fn numbers(guidance: GuidanceType, target: Target, is_masked: bool) -> [f64; 4] {
    let mut generator = TorchGenerator::manual_seed(17);
    let mut randn = || Tensor::from_vec(generator.randn(240), SHAPE, &Device::Cpu).unwrap();
    let [x, y, noise, images, pairs, base] = std::array::from_fn(|_| randn());
    let mask = Tensor::from_vec(generator.rand(60), (2, 1, 5, 6), &Device::Cpu).unwrap();
    let [images, pairs] = [images, pairs].map(|tensor| Var::from_tensor(&tensor).unwrap());
    let noise_draw = NoiseDraw {
        timesteps: vec![300.0, 812.0],
        noise: vec![noise],
        input_noise: Vec::new(),
        has_stepped: false,
    };
    let latents = [vec![x], vec![y]];
    let draws = paired_noise(guidance, &latents, &noise_draw).unwrap();
    let of_side = |side: usize| match target {
        Target::Noise => draws[side].noise.clone(),
        Target::Velocity => vec![(&draws[side].noise[0] - &latents[side][0]).unwrap()],
    };
    let batch = PairedBatch {
        guidance,
        targets: [of_side(0), of_side(1)],
        latents: latents.clone(),
        base: guidance.uses_base().then(|| vec![base]),
        mask: is_masked.then_some(mask),
        weight: 1.0,
    };
    let predicted_pairs = [pairs.as_tensor().clone()];
    let forward = || {
        let predicted_pairs = guidance.trains_pairs().then_some(predicted_pairs.as_slice());
        batch.loss(&[images.as_tensor().clone()], predicted_pairs)
    };
    let (value, gradients) = gradients(forward).unwrap();
    let number = |tensor: Tensor| f64::from(tensor.to_scalar::<f32>().unwrap());
    let sum = |var: &Var| match gradients.get(var.as_tensor()) {
        Some(gradient) => number(gradient.abs().unwrap().sum_all().unwrap()),
        None => 0.0,
    };
    let of_images = gradients.get(images.as_tensor()).unwrap().flatten_all().unwrap();
    [
        number(value),
        sum(&images),
        number(of_images.get(77).unwrap()),
        sum(&pairs),
    ]
}

#[test]
fn losses_of_image_pairs_match_the_reference() {
    use GuidanceType::{Direct, Polarity, Targeted, TargetedFlow, TargetedPolarity, Tnt};
    let cases = [
        (
            (Targeted, Target::Noise, false),
            [4.6433708e+00, 3.2558785e+00, 5.3515671e-03, 2.1520756e+00],
        ),
        (
            (Polarity, Target::Noise, false),
            [3.8196619e+00, 2.0913271e+00, 2.2729959e-02, 2.1520756e+00],
        ),
        (
            (TargetedPolarity, Target::Noise, false),
            [3.9415710e+00, 2.1594141e+00, 2.2374289e-02, 2.1867492e+00],
        ),
        (
            (Direct, Target::Noise, false),
            [2.1342760e+00, 2.4108777e+00, 2.5239718e-02, 2.1917070e-01],
        ),
        (
            (Tnt, Target::Noise, false),
            [1.9038004e+00, 2.0913271e+00, 2.2729959e-02, 2.1873401e-02],
        ),
        (
            (Direct, Target::Noise, true),
            [1.1680343e+00, 1.3002632e+00, 2.9257492e-03, 1.1820575e-01],
        ),
        (
            (Polarity, Target::Velocity, false),
            [5.5090898e+00, 2.4726251e+00, 1.7875447e-02, 2.6533012e+00],
        ),
        (
            (TargetedFlow, Target::Velocity, false),
            [2.9265167e+00, 2.7012115e+00, -2.8780972e-03, 0.0],
        ),
    ];
    for ((guidance, target, is_masked), expected) in cases {
        for (found, expected) in numbers(guidance, target, is_masked).into_iter().zip(expected) {
            let difference = (found - expected).abs();
            assert!(
                difference <= 1e-4 * expected.abs(),
                "{guidance}: {found}, not {expected}"
            );
        }
    }
}

#[test]
fn an_image_that_is_its_own_pair_has_a_finite_loss() {
    let mut generator = TorchGenerator::manual_seed(3);
    let mut randn = || Tensor::from_vec(generator.randn(240), SHAPE, &Device::Cpu).unwrap();
    let [x, noise, prediction, base] = std::array::from_fn(|_| randn());
    for guidance in GuidanceType::ALL.iter().copied() {
        let batch = PairedBatch {
            guidance,
            latents: [vec![x.clone()], vec![x.clone()]],
            targets: [vec![noise.clone()], vec![noise.clone()]],
            base: Some(vec![base.clone()]),
            mask: None,
            weight: 1.0,
        };
        let predicted = [prediction.clone()];
        let loss = batch.loss(&predicted, Some(predicted.as_slice())).unwrap();
        let loss = loss.to_scalar::<f32>().unwrap();
        assert!(loss.is_finite() && loss > 0.0, "{guidance}: {loss}");
    }
}

#[test]
fn pairs_have_the_strengths_of_ai_toolkit() {
    let strength = |guidance| paired_strength(guidance, 0.75);
    assert_eq!(strength(GuidanceType::Targeted), Some(-0.25));
    assert_eq!(strength(GuidanceType::Polarity), Some(-0.75));
    assert_eq!(strength(GuidanceType::TargetedPolarity), Some(0.75));
    assert_eq!(strength(GuidanceType::TargetedFlow), None);
    for guidance in GuidanceType::ALL.iter().copied() {
        assert_eq!(strength(guidance).is_some(), guidance.trains_pairs());
    }
}
