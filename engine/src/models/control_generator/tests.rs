//! Comparison of networks and images with `tests/reference/make_control_generators.py`, and files that are refused.

use super::{ControlGenerator, Network, depth, line, opencv};
use crate::testing::{fixtures, in_portable_mode, largest};
use crate::weights::write_tensors;
use aitk_common::job::controls::ControlType;
use candle_core::{Device, Tensor};
use image::{GrayImage, RgbImage};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

fn file(name: &str) -> PathBuf {
    fixtures().join("control_generators").join(name)
}

fn tensors(name: &str) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(file(name), &Device::Cpu).unwrap()
}

fn network(kind: ControlType) -> ControlGenerator {
    let path = match kind {
        ControlType::Line => file("teed.safetensors"),
        _ => file("depth"),
    };
    ControlGenerator::open(kind, &path, &Device::Cpu).unwrap()
}

/// Pixels [height, width, channels] of a fixture.
fn pixels(tensor: &Tensor) -> (u32, u32, Vec<u8>) {
    let (height, width) = (tensor.dims()[0] as u32, tensor.dims()[1] as u32);
    (width, height, tensor.flatten_all().unwrap().to_vec1().unwrap())
}

fn rgb(tensor: &Tensor) -> RgbImage {
    let (width, height, pixels) = pixels(tensor);
    RgbImage::from_raw(width, height, pixels).unwrap()
}

fn networks_match_the_reference() {
    let reference = tensors("networks.safetensors");
    for (name, kind) in [
        ("line", ControlType::Line),
        ("depth", ControlType::Depth),
        ("depth_trained_size", ControlType::Depth),
    ] {
        let (x, expected) = (&reference[&format!("{name}/x")], &reference[&format!("{name}/y")]);
        let found = match network(kind).network {
            Network::Line(network) => network.forward(x).unwrap(),
            Network::Depth(network) => network.forward(x).unwrap(),
            _ => unreachable!(),
        };
        assert_eq!(found.dims(), expected.dims());
        let difference = largest(&(found - expected).unwrap()) / largest(expected);
        println!("{name}: {difference:.1e}");
        assert!(difference < 2e-6, "{name}: {difference:.1e}");
    }
}

#[test]
fn networks_compute_what_the_originals_compute() {
    networks_match_the_reference();
}

/// The share of values that differ, and the largest difference.
fn differences(found: &[u8], expected: &[u8]) -> (f64, u8) {
    assert_eq!(found.len(), expected.len());
    let differences: Vec<u8> = found.iter().zip(expected).map(|(a, b)| a.abs_diff(*b)).collect();
    let share = differences.iter().filter(|d| **d > 0).count() as f64 / differences.len() as f64;
    (share, differences.into_iter().max().unwrap_or(0))
}

fn images_match_the_reference() {
    let reference = tensors("images.safetensors");
    let image = rgb(&reference["image"]);
    for (name, kind) in [("line", ControlType::Line), ("depth", ControlType::Depth)] {
        let found = match network(kind).network {
            Network::Line(network) => line::generate(&network, &image, 192, &Device::Cpu).unwrap(),
            Network::Depth(network) => depth::generate(&network, &image, &Device::Cpu).unwrap(),
            _ => unreachable!(),
        };
        let expected = rgb(&reference[name]);
        assert_eq!(found.dimensions(), expected.dimensions());
        let (share, most) = differences(found.as_raw(), expected.as_raw());
        println!("{name}: {share:.1e} of the values differ, by at most {most}");
        // Both round numbers to whole ones. Where a number is close to a half, or to the threshold of edges, either may result.
        assert!(
            share < 1e-3 && (most <= 1 || kind == ControlType::Line),
            "{name}: {share:.1e}, {most}"
        );
    }
}

#[test]
fn control_images_are_those_of_ai_toolkit() {
    images_match_the_reference();
}

#[test]
fn images_are_resized_as_by_opencv() {
    let reference = tensors("opencv.safetensors");
    for i in 0..3 {
        let of = |method: &str, key: &str| pixels(&reference[&format!("{method}/{i}/{key}")]);
        let ((width, height, x), (new_width, new_height, y)) = (of("lanczos4", "x"), of("lanczos4", "y"));
        let image = RgbImage::from_raw(width, height, x).unwrap();
        let found = opencv::resize_lanczos4(&image, (new_width, new_height));
        let (share, most) = differences(found.as_raw(), &y);
        assert_eq!(most, 0, "lanczos4 {i}: {share:.1e}");
        let ((width, height, x), (new_width, new_height, y)) = (of("linear", "x"), of("linear", "y"));
        let image = GrayImage::from_raw(width, height, x).unwrap();
        let found = opencv::resize_linear(&image, (new_width, new_height));
        let (share, most) = differences(found.as_raw(), &y);
        assert_eq!(most, 0, "linear {i}: {share:.1e}");
    }
}

#[test]
fn images_are_processed_at_the_sizes_of_the_originals() {
    let sizes: serde_json::Value = serde_json::from_slice(&std::fs::read(file("sizes.json")).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.png");
    for case in sizes.as_array().unwrap() {
        let size = |key: &str| -> (u32, u32) { serde_json::from_value(case[key].clone()).unwrap() };
        let (width, height) = size("image");
        RgbImage::new(width, height).save(&path).unwrap();
        assert_eq!(super::source_image::load(&path).unwrap().dimensions(), size("loaded"));
        assert_eq!(line::detect_size(size("loaded"), line::DETECT_SIDE), size("line"));
        assert_eq!(depth::estimation_size(size("loaded"), 518, 14), size("depth"));
    }
    // A strip would need more memory than any machine has.
    assert_eq!(line::detect_size((100_000, 10), 1024), (8192, 64));
    assert_eq!(depth::estimation_size((3700, 283), 518, 14), (4102, 308));
}

/// A folder with the tensors and the config of the tiny network of depth, changed.
fn changed_depth(
    folder: &Path,
    tensors: &dyn Fn(&mut BTreeMap<String, Tensor>),
    config: &dyn Fn(&mut serde_json::Value),
) -> String {
    let mut weights: BTreeMap<String, Tensor> = self::tensors("depth/model.safetensors").into_iter().collect();
    tensors(&mut weights);
    let path = folder.join("model.safetensors");
    write_tensors(&mut std::fs::File::create(path).unwrap(), &weights, &BTreeMap::new()).unwrap();
    let text = std::fs::read(file("depth/config.json")).unwrap();
    let mut value: serde_json::Value = serde_json::from_slice(&text).unwrap();
    config(&mut value);
    std::fs::write(folder.join("config.json"), value.to_string()).unwrap();
    let errors = [
        ControlGenerator::open(ControlType::Depth, folder, &Device::Cpu).err(),
        ControlGenerator::open_layout(ControlType::Depth, folder).err(),
    ];
    let [opened, layout] = errors.map(|error| error.map(|error| error.to_string()).unwrap_or_default());
    assert_eq!(opened, layout);
    opened
}

#[test]
fn files_of_something_else_are_refused() {
    let error = |kind: ControlType, name: &str| {
        let error = ControlGenerator::open(kind, &file(name), &Device::Cpu).unwrap_err();
        error.to_string()
    };
    let message = error(ControlType::Line, "depth");
    assert!(
        message.contains("TEED") && message.contains("model.safetensors"),
        "{message}"
    );
    assert!(error(ControlType::Depth, "teed.safetensors").contains("Depth Anything"));
    assert!(error(ControlType::Pose, "teed.safetensors").contains("`pose`"));

    let folder = tempfile::tempdir().unwrap();
    let same = |_: &mut BTreeMap<String, Tensor>| {};
    assert_eq!(changed_depth(folder.path(), &same, &|_| {}), "");
    // The names of later versions of transformers, and layers by their names.
    let renamed = |weights: &mut BTreeMap<String, Tensor>| {
        for (old, new) in [
            ("attention.query", "q_proj"),
            ("attention.key", "k_proj"),
            ("output.dense", "o_proj"),
        ] {
            let names: Vec<String> = weights.keys().filter(|name| name.contains(old)).cloned().collect();
            for name in names {
                let value = weights.remove(&name).unwrap();
                weights.insert(name.replace(old, new), value);
            }
        }
    };
    let by_name = |config: &mut serde_json::Value| {
        config["backbone_config"]
            .as_object_mut()
            .unwrap()
            .remove("out_indices")
            .unwrap();
    };
    assert_eq!(changed_depth(folder.path(), &renamed, &by_name), "");
    let removed = |weights: &mut BTreeMap<String, Tensor>| {
        weights.remove("neck.fusion_stage.layers.2.projection.bias").unwrap();
    };
    assert!(changed_depth(folder.path(), &removed, &|_| {}).contains("neck.fusion_stage.layers.2.projection.bias"));
    for (key, value, text) in [
        ("/backbone_config/hidden_size", serde_json::json!(0), "hidden_size"),
        (
            "/backbone_config/num_attention_heads",
            serde_json::json!(3),
            "not a multiple",
        ),
        (
            "/backbone_config/num_hidden_layers",
            serde_json::json!(4),
            "out_indices",
        ),
        ("/backbone_config/out_indices", serde_json::json!([]), "out_indices"),
        (
            "/backbone_config/use_swiglu_ffn",
            serde_json::json!(true),
            "use_swiglu_ffn",
        ),
        ("/backbone_config/hidden_act", serde_json::json!("cube"), "cube"),
        ("/backbone_config/image_size", serde_json::json!(13), "smaller"),
        (
            "/backbone_config/image_size",
            serde_json::json!(70),
            "position_embeddings",
        ),
        ("/neck_hidden_sizes", serde_json::json!([8]), "neck_hidden_sizes"),
        (
            "/neck_hidden_sizes",
            serde_json::json!([8, 12, 16, 1u64 << 40]),
            "neck_hidden_sizes",
        ),
        ("/reassemble_factors", serde_json::json!([4, 2, 1, 0.3]), "0.3"),
        (
            "/reassemble_factors",
            serde_json::json!([4, 2, 1, 0]),
            "reassemble_factors",
        ),
        (
            "/reassemble_hidden_size",
            serde_json::json!(16),
            "reassemble_hidden_size",
        ),
        ("/head_in_index", serde_json::json!(0), "head_in_index"),
        ("/depth_estimation_type", serde_json::json!("metric"), "metric"),
    ] {
        let change = |config: &mut serde_json::Value| *config.pointer_mut(key).unwrap() = value.clone();
        let message = changed_depth(folder.path(), &same, &change);
        assert!(message.contains(text), "{key}: {message}");
    }
    std::fs::remove_file(folder.path().join("config.json")).unwrap();
    let error = ControlGenerator::open(ControlType::Depth, folder.path(), &Device::Cpu).unwrap_err();
    assert!(error.to_string().contains("config.json"), "{error}");
}

in_portable_mode! {
    networks_match_the_reference,
    images_match_the_reference,
}
