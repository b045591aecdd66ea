//! Adafactor that chooses its learning rate, compared with transformers.

use super::{Param, build};
use aitk_common::job::optimizer::OptimizerName;
use candle_core::{Device, Tensor, Var};
use serde_json::json;

const START: [[f32; 3]; 2] = [[1.0, -2.0, 3.0], [0.5, 0.1, -0.2]];

/// Four steps of `Adafactor(lr=None, relative_step=True, weight_decay=0.1)` of transformers, with these options.
const EXPECTED: [(bool, bool, [f32; 6]); 4] = [
    (
        true,
        true,
        [
            0.999_987_66,
            -1.999_984,
            2.999_976_2,
            0.499_982_7,
            0.099_983_506,
            -0.199_984_48,
        ],
    ),
    (
        true,
        false,
        [
            0.950_720_4,
            -1.939_443_2,
            2.905_59,
            0.432_134_93,
            0.034_956_52,
            -0.139_485_8,
        ],
    ),
    (
        false,
        false,
        [
            0.967_638,
            -1.960_183_4,
            2.937_988_5,
            0.455_411_97,
            0.057_271_153,
            -0.160_236_48,
        ],
    ),
    (
        false,
        true,
        [
            0.999_992,
            -1.999_989_6,
            2.999_984_5,
            0.499_988_77,
            0.099_989_325,
            -0.199_989_96,
        ],
    ),
];

#[test]
fn its_own_rates_are_those_of_transformers() {
    for (scale, warmup, expected) in EXPECTED {
        let var = Var::new(&START, &Device::Cpu).unwrap();
        let params =
            json!({"relative_step": true, "scale_parameter": scale, "warmup_init": warmup, "weight_decay": 0.1});
        let trained = vec![Param {
            name: "p".into(),
            var: var.clone(),
        }];
        let mut optimizer = build(OptimizerName::Adafactor, trained, params.as_object().unwrap(), 5.0).unwrap();
        for step in 1..=4 {
            let slope = Tensor::new(&[[0.1f32, -0.2, 0.3], [0.4, 0.5, -0.6]], &Device::Cpu).unwrap();
            let grad = slope.affine(f64::from(step), 0.05).unwrap();
            // The learning rate of the config has no effect.
            optimizer.step(&vec![Some(grad)], 5.0).unwrap();
        }
        let found: Vec<f32> = var.flatten_all().unwrap().to_vec1().unwrap();
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 3e-7, "{scale} {warmup}: {found} {expected}");
        }
    }
}
