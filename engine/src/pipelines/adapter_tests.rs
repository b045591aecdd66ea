//! Compares images with those of diffusers' pipelines with a T2I-Adapter and a ControlNet (`tests/reference/make_image_adapters.py`).

use super::tests::compare_case;
use crate::families::Model;
use crate::image_adapters::test_weights::{fill, new_adapter, report};
use crate::testing::{fixtures, tiny_sd};
use aitk_common::job::adapter::{AdapterConfig, AdapterType};
use candle_core::{Device, safetensors};

#[test]
fn images_with_adapters_match_diffusers() {
    let report = report();
    let path = fixtures().join("image_adapters/expected.safetensors");
    let tensors = safetensors::load(path, &Device::Cpu).unwrap();
    let cases = report["images"].as_array().unwrap();
    assert_eq!(cases.len(), 2);
    for case in cases {
        let name = case["case"].as_str().unwrap();
        let kind = AdapterType::from_name(name).unwrap();
        let mut model = tiny_sd();
        let adapter = new_adapter(
            &AdapterConfig {
                kind,
                train: true,
                channels: vec![16, 32],
                downscale_factor: 2,
                ..AdapterConfig::default()
            },
            &model,
        );
        fill(&*adapter, |_| true);
        model.set_image_adapter(adapter).unwrap();
        let (difference, count) = compare_case(case, &model, &tensors).unwrap();
        println!("{name}: differs by {difference} at most, {count} values at all");
        // Another strength is another image.
        let mut weak = case.clone();
        weak["adapter_scale"] = 0.0.into();
        assert!(compare_case(&weak, &model, &tensors).is_err(), "{name}");
    }
}
