//! Runs whole `mod` jobs from YAML.

use super::tests::{generate_job, images, run_spec, spec};
use crate::adapters::{AdapterFile, safetensors_bytes};
use crate::image_io;
use crate::testing::fixtures;
use crate::testing::single_files::{header_and_data, with_header};
use crate::weights::Index;
use aitk_common::attempt::{ChildEvent, Outcome};
use candle_core::{DType, Device, Tensor};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn rescale_job(input: &Path, output: &Path, keys: &str) -> String {
    format!(
        "job: mod\nconfig:\n  name: stronger\n  process:\n  - {{type: rescale_lora, input_path: {}, output_path: {}, {keys}}}\nmeta: \
         {{name: '[name]', version: 2}}\n",
        input.display(),
        output.display()
    )
}

fn rescaled(input: &Path, output: &Path, keys: &str) {
    let (outcome, events) = run_spec(&spec(&rescale_job(input, output, keys)));
    assert_eq!(outcome, Outcome::Completed, "{keys}");
    let is_result = |event: &ChildEvent| matches!(event, ChildEvent::Artifact { kind, path, .. } if kind == "lora" && path == output);
    assert!(events.iter().any(is_result));
}

fn failure(input: &Path, keys: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let (outcome, _) = run_spec(&spec(&rescale_job(input, &folder.path().join("out.safetensors"), keys)));
    let Outcome::Failed { message, .. } = outcome else {
        panic!("{keys}: {outcome:?}");
    };
    assert_eq!(
        std::fs::read_dir(folder.path()).unwrap().count(),
        0,
        "a failure leaves no file"
    );
    message
}

fn write(path: &Path, tensors: &[(&str, Tensor)], metadata: &[(&str, &str)]) -> PathBuf {
    let tensors = tensors
        .iter()
        .map(|(name, tensor)| ((*name).to_owned(), tensor.clone()));
    let metadata = metadata
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    std::fs::write(
        path,
        safetensors_bytes(&tensors.collect(), &metadata.collect()).unwrap(),
    )
    .unwrap();
    path.to_path_buf()
}

fn tensor(value: f32, shape: &[usize]) -> Tensor {
    Tensor::full(value, shape, &Device::Cpu).unwrap()
}

fn first_number(tensors: &BTreeMap<String, Tensor>, name: &str) -> f32 {
    tensors[name]
        .to_dtype(DType::F32)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1::<f32>()
        .unwrap()[0]
}

fn read(path: &Path) -> BTreeMap<String, Tensor> {
    candle_core::safetensors::load(path, &Device::Cpu)
        .unwrap()
        .into_iter()
        .collect()
}

#[test]
fn a_rescaled_lora_gives_the_images_of_the_lora_with_a_multiplier() {
    let dir = tempfile::tempdir().unwrap();
    let generate = |lora: &Path, multiplier: f64| {
        let out = dir.path().join("images");
        let prompts =
            format!("sampler: ddim, sample_steps: 2, width: 64, height: 64, prompts: ['a cat --d 3 --m {multiplier}']");
        let yaml = generate_job(&out, &format!(", lora_path: {}", lora.display()), &prompts);
        let (outcome, events) = run_spec(&spec(&yaml));
        assert_eq!(outcome, Outcome::Completed);
        image_io::open_rgb(&images(&events)[0].1).unwrap()
    };
    let gap = |a: &image::RgbImage, b: &image::RgbImage| {
        a.as_raw()
            .iter()
            .zip(b.as_raw())
            .map(|(a, b)| a.abs_diff(*b))
            .max()
            .unwrap()
    };
    let output = dir.path().join("stronger.safetensors");
    // With an alpha, and with peft's names, whose alpha is in the metadata.
    for (file, factor, target) in crate::testing::sampled_cases(vec![
        ("lora/ai_toolkit.safetensors", 0.5, "up_down"),
        ("lora/ai_toolkit.safetensors", 0.5, "alpha"),
        ("lora/ai_toolkit.safetensors", -0.7, "up_down"),
        ("lora/ai_toolkit.safetensors", -0.7, "alpha"),
        ("lora/diffusers.safetensors", 0.4, "up_down"),
    ]) {
        let input = fixtures().join(file);
        let keys = format!("current_weight: {factor}, target_weight: 1, scale_target: {target}, save_dtype: float32");
        rescaled(&input, &output, &keys);
        let expected = generate(&input, factor);
        let found = generate(&output, 1.0);
        assert!(
            gap(&found, &expected) <= 1,
            "{file} times {factor} ({target}): {}",
            gap(&found, &expected)
        );
        assert!(
            gap(&generate(&input, 1.0), &expected) > 2,
            "{file}: the factor has no effect"
        );
    }
}

#[test]
fn each_target_changes_its_own_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let layer = "lora_unet_conv_in";
    let [down, up, mid, alpha] =
        ["lora_down.weight", "lora_up.weight", "lora_mid.weight", "alpha"].map(|suffix| format!("{layer}.{suffix}"));
    let whole = "lora_unet_conv_out.diff";
    let input = write(
        &dir.path().join("in.safetensors"),
        &[
            (&down, tensor(1.0, &[2, 4, 1, 1])),
            (&up, tensor(1.0, &[8, 2, 1, 1])),
            (&mid, tensor(1.0, &[2, 2, 3, 3])),
            (&alpha, tensor(2.0, &[])),
            (whole, tensor(1.0, &[4, 8, 3, 3])),
            ("extra", tensor(5.0, &[1])),
        ],
        &[("ss_note", "kept"), ("sshs_model_hash", "old")],
    );
    let output = dir.path().join("out.safetensors");
    let keys = "current_weight: 9, target_weight: 1, save_dtype: float32";
    rescaled(&input, &output, keys);
    let found = read(&output);
    let values = [&down, &up, &mid, &alpha, whole, "extra"].map(|name| first_number(&found, name));
    assert_eq!(values, [3.0, 3.0, 1.0, 2.0, 9.0, 5.0]);
    let metadata = AdapterFile::open(&output).unwrap().metadata;
    assert_eq!(metadata["ss_note"], "kept");
    assert!(metadata["sshs_model_hash"].len() == 64 && !metadata.contains_key("name"));
    assert_eq!(found[&down].dtype(), DType::F32);

    // In place, in float16 and with this config's metadata.
    let keys = "current_weight: 1, target_weight: 9, replace_meta: true, is_v2: true";
    rescaled(&output, &output, keys);
    let found = read(&output);
    assert!((first_number(&found, &up) - 1.0).abs() < 1e-3 && found[&up].dtype() == DType::F16);
    let metadata = AdapterFile::open(&output).unwrap().metadata;
    let expected = [
        ("name", "stronger"),
        ("version", "2"),
        ("ss_base_model_version", "sd_2.1"),
        ("ss_v2", "True"),
    ];
    for (key, value) in expected {
        assert_eq!(metadata[key], value);
    }
    assert!(!metadata.contains_key("ss_note"));

    // A whole difference has no alpha.
    let message = failure(&input, "current_weight: 9, target_weight: 1, scale_target: alpha");
    assert!(message.contains("conv_out") && message.contains("up_down"), "{message}");
}

#[test]
fn an_alpha_stays_exact_and_0_means_the_rank() {
    let dir = tempfile::tempdir().unwrap();
    let layer = |alpha: f32| {
        write(
            &dir.path().join("in.safetensors"),
            &[
                ("lora_unet_conv_in.lora_down.weight", tensor(1.0, &[4, 4, 3, 3])),
                ("lora_unet_conv_in.lora_up.weight", tensor(1.0, &[8, 4, 1, 1])),
                ("lora_unet_conv_in.alpha", tensor(alpha, &[])),
            ],
            &[],
        )
    };
    let output = dir.path().join("out.safetensors");
    for (alpha, factor, dtype, expected) in [
        (0.0, 3.0, "float16", 12.0),
        (257.0, 1.0, "bfloat16", 257.0),
        (8.0, -0.5, "float16", -4.0),
        // Infinite in float16.
        (100_000.0, 2.0, "float16", 200_000.0),
    ] {
        let keys = format!("current_weight: {factor}, target_weight: 1, scale_target: alpha, save_dtype: {dtype}");
        rescaled(&layer(alpha), &output, &keys);
        assert_eq!(
            first_number(&read(&output), "lora_unet_conv_in.alpha"),
            expected,
            "{alpha} times {factor}"
        );
    }
}

/// Some trainers save masks and counters beside a LoRA.
#[test]
fn tensors_without_floats_are_copied() {
    let dir = tempfile::tempdir().unwrap();
    let input = write(
        &dir.path().join("in.safetensors"),
        &[
            ("lora_unet_conv_in.lora_down.weight", tensor(1.0, &[2, 4])),
            ("lora_unet_conv_in.lora_up.weight", tensor(1.0, &[8, 2])),
        ],
        &[],
    );
    let bytes = std::fs::read(&input).unwrap();
    let (mut header, data) = header_and_data(&bytes);
    let mut data = data.to_vec();
    let number = 16_777_217_i64.to_le_bytes();
    let both = [number, (-1_i64).to_le_bytes()].concat();
    let added: [(&str, &str, &[usize], &[u8]); 3] = [
        ("mask", "BOOL", &[3], &[1, 0, 1]),
        ("steps", "I64", &[2], &both),
        // As a float of 32 bits it would be another number.
        ("a_step", "I64", &[], &number),
    ];
    for (name, kind, shape, bytes) in added {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(
            name.to_owned(),
            json!({"dtype": kind, "shape": shape, "data_offsets": offsets}),
        );
        data.extend(bytes);
    }
    std::fs::write(&input, with_header(&header, &data)).unwrap();
    let output = dir.path().join("out.safetensors");
    rescaled(
        &input,
        &output,
        "current_weight: 4, target_weight: 1, save_dtype: float32",
    );
    let index = Index::open(&output).unwrap();
    let up = index.read("lora_unet_conv_in.lora_up.weight", DType::F32, &Device::Cpu);
    assert_eq!(up.unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap(), [2.0; 16]);
    for (name, kind, shape, bytes) in added {
        let stored = index.read_stored(name).unwrap().unwrap();
        assert_eq!(
            (
                stored.type_name.as_str(),
                stored.shape.as_slice(),
                stored.bytes.as_slice()
            ),
            (kind, shape, bytes),
            "{name}"
        );
    }
}

/// The alpha of `lokr_full_rank: true`, which is ai-toolkit's default, as float32 and as float16 hold it.
#[test]
fn a_lokr_of_two_whole_matrices_is_rescaled_whatever_its_alpha() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("out.safetensors");
    for alpha in [9_999_999_999.0, f32::INFINITY] {
        let input = write(
            &dir.path().join("in.safetensors"),
            &[
                ("lora_unet_conv_in.lokr_w1", tensor(1.0, &[2, 2])),
                ("lora_unet_conv_in.lokr_w2", tensor(1.0, &[4, 2, 3, 3])),
                ("lora_unet_conv_in.alpha", tensor(alpha, &[])),
            ],
            &[],
        );
        rescaled(&input, &output, "current_weight: 3, target_weight: 1");
        let found = read(&output);
        let values =
            ["lokr_w1", "lokr_w2", "alpha"].map(|suffix| first_number(&found, &format!("lora_unet_conv_in.{suffix}")));
        assert_eq!(values, [1.0, 3.0, alpha]);
    }
}

#[test]
fn the_alphas_of_peft_stay_where_the_metadata_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let input = fixtures().join("lora/diffusers.safetensors");
    let output = dir.path().join("out.safetensors");
    rescaled(
        &input,
        &output,
        "current_weight: 1, target_weight: 2, replace_meta: true",
    );
    let [before, after] = [&input, &output].map(|path| AdapterFile::open(path).unwrap().metadata);
    let key = "lora_adapter_metadata";
    assert!(before[key].contains("lora_alpha"));
    assert_eq!(after[key], before[key]);
    assert_eq!(after["name"], "stronger");
}

#[test]
fn files_that_cannot_be_rescaled_are_one_clear_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("in.safetensors");
    let usual = "current_weight: 2, target_weight: 1";
    let check = |input: &Path, keys: &str, parts: &[&str]| {
        let message = failure(input, keys);
        for part in parts {
            assert!(message.contains(part), "\"{part}\" is not in: {message}");
        }
    };
    check(
        &dir.path().join("none.safetensors"),
        usual,
        &["none.safetensors", "no such file"],
    );
    check(dir.path(), usual, &["this is a folder"]);
    let lora = std::fs::read(fixtures().join("lora/ai_toolkit.safetensors")).unwrap();
    std::fs::write(&path, &lora[..lora.len() / 2]).unwrap();
    check(&path, usual, &["in.safetensors", "cut off"]);
    write(&path, &[("conv.weight", tensor(1.0, &[2, 2]))], &[]);
    check(&path, usual, &["no LoRA"]);
    let pair = |value: f32| {
        write(
            &path,
            &[
                ("lora_unet_x.lora_down.weight", tensor(value, &[2, 4])),
                ("lora_unet_x.lora_up.weight", tensor(value, &[4, 2])),
            ],
            &[],
        )
    };
    check(
        &pair(1.0),
        &format!("{usual}, scale_target: alpha"),
        &["`lora_unet_x` has no alpha", "up_down"],
    );
    check(&pair(60_000.0), usual, &["lora_unet_x.lora_", "float16", "float32"]);
    check(&pair(f32::NAN), usual, &["lora_unet_x.lora_", "not finite", "damaged"]);
    // float32 is no way out of float32.
    let message = failure(&pair(3e38), "current_weight: 4, target_weight: 1, save_dtype: float32");
    assert!(
        message.contains("float32 cannot hold") && !message.contains("save_dtype"),
        "{message}"
    );
}

/// What the number format cannot hold is said: nothing is lost without a word.
#[test]
fn numbers_that_become_zero_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("out.safetensors");
    let down = |numbers: Vec<f32>| Tensor::from_vec(numbers, (2, 200), &Device::Cpu).unwrap();
    let small = |count: usize| (0..400).map(|i| if i < count { 1e-9 } else { 0.5 }).collect();
    let said = |numbers: Vec<f32>, keys: &str| {
        let input = write(
            &dir.path().join("in.safetensors"),
            &[
                ("lora_unet_x.lora_down.weight", down(numbers)),
                // Zeros stay what they are.
                ("lora_unet_x.lora_up.weight", tensor(0.0, &[4, 2])),
            ],
            &[],
        );
        let keys = format!("current_weight: 1, target_weight: 1, {keys}");
        let (outcome, events) = run_spec(&spec(&rescale_job(&input, &output, &keys)));
        assert_eq!(outcome, Outcome::Completed);
        let of_log = |event: ChildEvent| match event {
            ChildEvent::Log { level, message, .. } if message.contains("became 0") => Some((level, message)),
            _ => None,
        };
        events.into_iter().find_map(of_log)
    };
    let (level, message) = said(small(400), "save_dtype: float16").unwrap();
    assert_eq!(level, "warn");
    let expected = "400 numbers are too small for float16 and became 0, most of them in `lora_unet_x.lora_down.weight` (100.0 % of its numbers)";
    assert!(
        message.contains(expected) && message.contains("save_dtype: float32"),
        "{message}"
    );
    let (level, message) = said(small(1), "save_dtype: float16").unwrap();
    assert_eq!(level, "info", "{message}");
    for dtype in ["bfloat16", "float32"] {
        assert_eq!(said(small(400), &format!("save_dtype: {dtype}")), None);
    }
}
