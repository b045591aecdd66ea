//! Runs whole `extract` jobs from YAML on tiny models and fine-tunes that the tests make of them.

use crate::adapters::AdapterFile;
use crate::image_io;
use crate::testing::{fixtures, in_own_folder, parts_of, quantised_folder, sd35_large_folder, tuned, zimage_folder};
use crate::tests::{images, run_spec, spec};
use crate::weights::Index;
use crate::{EventSink, StopSignal, run};
use aitk_common::attempt::{ChildEvent, Outcome};
use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The change of tests/reference/make_extract.py.
fn change(_: &str, number: usize, base: &Tensor) -> Tensor {
    match number % 7 {
        0 => return base.clone(),
        1 => return (base * f64::from((1.0 + 4e-6_f64) as f32)).unwrap(),
        _ => {}
    }
    let columns = (base.elem_count() / base.dims()[0]) as i64;
    let delta = (0..base.elem_count() as i64).map(|index| {
        let (row, column) = (index / columns, index % columns);
        let noise = ((index * index * 31 + index * 17 + number as i64 * 101) % 9973) as f64 / 9973.0 - 0.5;
        let smooth = ((row % 5) as f64 - 2.0) * ((column % 7) as f64 - 3.0) / 60.0;
        (0.1 * noise + smooth) as f32
    });
    (base
        + Tensor::from_iter(delta, &Device::Cpu)
            .unwrap()
            .reshape(base.shape())
            .unwrap())
    .unwrap()
}

/// A change of rank 2, of a convolution also in its inputs alone.
fn change_of_rank_two(_: &str, number: usize, base: &Tensor) -> Tensor {
    let [outputs, inputs] = [base.dims()[0], base.dims()[1]];
    let kernel = base.elem_count() / (outputs * inputs);
    let wave = |index: usize, speed: f64| (speed * (index + number) as f64).sin();
    let mut delta = Vec::with_capacity(base.elem_count());
    for out in 0..outputs {
        for input in 0..inputs {
            for k in 0..kernel {
                let one = wave(out, 1.1) * wave(input, 2.3) * wave(k, 0.9);
                let other = wave(out, 0.7) * wave(input, 1.9) * wave(k, 1.7);
                delta.push((0.04 * one + 0.03 * other) as f32);
            }
        }
    }
    (base + Tensor::from_vec(delta, base.shape(), &Device::Cpu).unwrap()).unwrap()
}

fn extract_job(base: &Path, tuned: &Path, folder: &Path, process: &str) -> String {
    format!(
        "job: extract\nconfig:\n  name: taken\n  base_model: {}\n  extract_model: {}\n  output_folder: {}\n  dtype: fp32\n  process:\n  \
         - {{{process}}}\nmeta: {{name: '[name]', creator: {{name: somebody}}}}\n",
        base.display(),
        tuned.display(),
        folder.display()
    )
}

/// The paths of the artifacts.
fn artifacts(events: &[ChildEvent]) -> Vec<PathBuf> {
    let path = |event: &ChildEvent| match event {
        ChildEvent::Artifact { kind, path, .. } if kind == "lora" => Some(path.clone()),
        _ => None,
    };
    events.iter().filter_map(path).collect()
}

/// Runs an extraction that succeeds. Returns its file.
fn extracted(base: &Path, tuned: &Path, folder: &Path, process: &str) -> PathBuf {
    let (outcome, events) = run_spec(&spec(&extract_job(base, tuned, folder, process)));
    assert_eq!(outcome, Outcome::Completed, "{process}");
    artifacts(&events).remove(0)
}

/// The message of an extraction that fails.
fn failure(base: &Path, tuned: &Path, process: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let (outcome, events) = run_spec(&spec(&extract_job(base, tuned, folder.path(), process)));
    let Outcome::Failed { message, .. } = outcome else {
        panic!("{process}: {outcome:?}");
    };
    assert_eq!(artifacts(&events), Vec::<PathBuf>::new());
    assert_eq!(
        std::fs::read_dir(folder.path()).unwrap().count(),
        0,
        "a failure leaves no file"
    );
    message
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    let flat = tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
    flat.to_vec1().unwrap()
}

fn norm(tensor: &Tensor) -> f64 {
    numbers(tensor).iter().map(|number| number * number).sum::<f64>().sqrt()
}

/// The change that the tensors of a layer make, [out, in·kh·kw], computed from their definition.
fn rebuilt(tensors: &BTreeMap<String, Tensor>, name: &str) -> Tensor {
    let get = |suffix: &str| {
        tensors
            .get(&format!("{name}.{suffix}"))
            .map(|t| t.to_dtype(DType::F64).unwrap())
    };
    if let Some(diff) = get("diff") {
        return diff.flatten_from(1).unwrap();
    }
    let (up, down) = (get("lora_up.weight").unwrap(), get("lora_down.weight").unwrap());
    let scale = numbers(&get("alpha").unwrap())[0] / down.dims()[0] as f64;
    let (up, down) = (
        (up.flatten_from(1).unwrap() * scale).unwrap(),
        down.flatten_from(1).unwrap(),
    );
    let Some(mid) = get("lora_mid.weight") else {
        return up.matmul(&down).unwrap();
    };
    let (rank, inner, height, width) = mid.dims4().unwrap();
    let by_position = mid.reshape((rank, inner, height * width)).unwrap();
    let positions = (0..height * width).map(|position| {
        let at = by_position
            .narrow(2, position, 1)
            .unwrap()
            .squeeze(2)
            .unwrap()
            .contiguous()
            .unwrap();
        up.matmul(&at).unwrap().matmul(&down).unwrap()
    });
    let positions: Vec<Tensor> = positions.collect();
    Tensor::stack(&positions, 2).unwrap().flatten_from(1).unwrap()
}

#[test]
fn ranks_and_errors_are_those_of_the_reference_formulas() {
    let base = fixtures().join("tiny_sd");
    let tuned = tuned(&base, &["unet", "text_encoder"], &change);
    let text = std::fs::read_to_string(fixtures().join("extract/layers.json")).unwrap();
    let cases: BTreeMap<String, Value> = serde_json::from_str(&text).unwrap();
    assert!(cases.len() >= 6);
    let weights = |folder: &Path| -> BTreeMap<String, Tensor> {
        let mut found = BTreeMap::new();
        for (component, prefix) in [("unet", "lora_unet_"), ("text_encoder", "lora_te_")] {
            let index = Index::open(folder.join(component)).unwrap();
            for (name, _) in index.tensors() {
                let path = name.trim_end_matches(".weight").to_owned();
                let path = match prefix == "lora_te_" && !path.starts_with("text_model.") {
                    true => format!("text_model.{path}"),
                    false => path,
                };
                let tensor = index.read(name, DType::F32, &Device::Cpu).unwrap();
                found.insert(format!("{prefix}{}", path.replace('.', "_")), tensor);
            }
        }
        found
    };
    let (before, after) = (weights(&base), weights(tuned.path()));
    let out = tempfile::tempdir().unwrap();
    for (case, expected) in &cases {
        let process = format!(
            "type: locon, filename: {case}.safetensors, mode: {}, linear: {}, conv: {}, disable_cp: {}",
            expected["mode"].as_str().unwrap(),
            expected["linear"],
            expected["conv"],
            !expected["third"].as_bool().unwrap()
        );
        let path = extracted(&base, tuned.path(), out.path(), &process);
        let tensors: BTreeMap<String, Tensor> = candle_core::safetensors::load(&path, &Device::Cpu)
            .unwrap()
            .into_iter()
            .collect();
        let mut names: Vec<&str> = tensors.keys().map(|key| key.split('.').next().unwrap()).collect();
        names.dedup();
        let layers = expected["layers"].as_object().unwrap();
        assert_eq!(
            names,
            layers.keys().map(String::as_str).collect::<Vec<_>>(),
            "{case}: the layers that differ"
        );
        assert!(layers.len() > 40);
        for (name, expected) in layers {
            let (rank, lost) = (expected[0].as_u64().unwrap(), expected[1].as_f64().unwrap());
            let found = tensors
                .get(&format!("{name}.lora_down.weight"))
                .map_or(0, |down| down.dims()[0] as u64);
            assert_eq!(found, rank, "{case}: the rank of {name}");
            let delta = (&after[name] - &before[name])
                .unwrap()
                .to_dtype(DType::F64)
                .unwrap()
                .flatten_from(1)
                .unwrap();
            let share = norm(&(&delta - rebuilt(&tensors, name)).unwrap()) / norm(&delta);
            // A layer that is kept whole, or whose rank is full, is rebuilt.
            assert!(
                (share - lost).abs() < 1e-4 * lost + 1e-5,
                "{case}: {name} loses {share}, the reference {lost}"
            );
        }
    }
}

#[test]
fn the_file_has_the_names_and_the_metadata_of_ai_toolkit() {
    let base = fixtures().join("tiny_sd");
    let tuned = tuned(&base, &["unet", "text_encoder"], &change_of_rank_two);
    let out = tempfile::tempdir().unwrap();
    let path = extracted(
        &base,
        tuned.path(),
        out.path(),
        "type: locon, linear: 3, conv: 2, dtype: fp16",
    );
    assert_eq!(path, out.path().join("taken_locon_fixed_3_2.safetensors"));
    let file = AdapterFile::open(&path).unwrap();
    assert_eq!(file.unknown, Vec::<String>::new());
    for (key, value) in [
        ("name", "taken"),
        ("creator", r#"{"name": "somebody"}"#),
        ("ss_base_model_version", "sd_1.5"),
        ("ss_output_name", "taken"),
        (
            "extraction",
            r#"{"type": "locon", "mode": "fixed", "linear": 3.0, "conv": 2.0}"#,
        ),
    ] {
        assert_eq!(file.metadata[key], value);
    }
    assert_eq!(file.metadata["sshs_model_hash"].len(), 64);
    let tensors = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    let dims = |name: &str| tensors[name].dims().to_vec();
    let conv = "lora_unet_down_blocks_0_resnets_0_conv1";
    let (down, mid) = (
        dims(&format!("{conv}.lora_down.weight")),
        dims(&format!("{conv}.lora_mid.weight")),
    );
    assert_eq!((down[0], &down[2..], &mid[..]), (2, &[1, 1][..], &[2, 2, 3, 3][..]));
    assert_eq!(dims(&format!("{conv}.lora_up.weight"))[1..], [2, 1, 1]);
    assert_eq!(dims(&format!("{conv}.alpha")), [1]);
    assert_eq!(tensors[&format!("{conv}.lora_up.weight")].dtype(), DType::F16);
    assert!(
        file.modules
            .iter()
            .any(|module| module.stem == "lora_te_text_model_encoder_layers_0_mlp_fc1")
    );
    // `conv_out` has 4 outputs: rank 2 is half of them.
    assert_eq!(file.differences, ["lora_unet_conv_out"]);

    // `lora` leaves larger convolutions out, unless `conv` says otherwise; the parts can be chosen.
    let stems = |process: &str| {
        let path = extracted(&base, tuned.path(), out.path(), process);
        let modules = AdapterFile::open(&path).unwrap().modules.into_iter();
        modules.map(|module| module.stem).collect::<Vec<String>>()
    };
    let lora = stems("type: lora, filename: a.safetensors");
    assert!(lora.iter().any(|stem| stem.ends_with("proj_in")) && !lora.iter().any(|stem| stem.ends_with("conv1")));
    assert!(stems("type: lora, conv: 2, filename: b.safetensors").contains(&conv.to_owned()));
    let unet = stems("type: lora, extract_text_encoder: false, filename: c.safetensors");
    assert!(unet.len() < lora.len() && unet.iter().all(|stem| stem.starts_with("lora_unet_")));
    let text = stems("type: lora, extract_unet: false, filename: d.safetensors");
    assert_eq!(text.len() + unet.len(), lora.len());
}

/// Generates one image with a model, and with a LoRA if it is given.
fn image(model: &Path, arch: &str, lora: Option<&Path>) -> image::RgbImage {
    let out = tempfile::tempdir().unwrap();
    let lora = lora.map_or(String::new(), |path| format!(", lora_path: {}", path.display()));
    let sampler = if matches!(arch, "flux" | "zimage" | "sd3") {
        "flowmatch"
    } else {
        "ddim"
    };
    let yaml = format!(
        "job: generate\nconfig:\n  name: images\n  process:\n  - type: to_folder\n    output_folder: {}\n    model: {{name_or_path: {}, \
         arch: {arch}, dtype: float32{lora}}}\n    generate: {{sampler: {sampler}, sample_steps: 2, width: 64, height: 64, seed: 3, \
         guidance_scale: 2, prompts: ['a red circle']}}\n",
        out.path().display(),
        model.display()
    );
    let (outcome, events) = run_spec(&spec(&yaml));
    assert_eq!(outcome, Outcome::Completed, "{arch}");
    image_io::open_rgb(&images(&events)[0].1).unwrap()
}

fn largest_gap(a: &image::RgbImage, b: &image::RgbImage) -> u8 {
    a.as_raw()
        .iter()
        .zip(b.as_raw())
        .map(|(a, b)| a.abs_diff(*b))
        .max()
        .unwrap()
}

#[test]
fn the_lora_on_the_base_model_gives_the_images_of_the_fine_tune() {
    let out = tempfile::tempdir().unwrap();
    let zimage = zimage_folder(false);
    let cases: [(PathBuf, &str, &[&str], &[&str]); 4] = [
        (
            fixtures().join("tiny_sd"),
            "sd1",
            &["unet", "text_encoder"],
            // With a third factor, with two, and with nearly everything kept whole.
            &[
                "type: locon, linear: 2, conv: 2",
                "type: locon, linear: 2, conv: 2, disable_cp: true",
                "type: locon, linear: 400, conv: 400",
            ],
        ),
        (
            fixtures().join("tiny_sdxl"),
            "sdxl",
            &["unet", "text_encoder", "text_encoder_2"],
            &["type: lora, linear: 2, conv: 2"],
        ),
        (
            fixtures().join("tiny_flux"),
            "flux",
            &["transformer", "text_encoder"],
            &["type: lora, linear: 2"],
        ),
        (
            zimage.path().to_path_buf(),
            "zimage",
            &["transformer"],
            &["type: locon, mode: ratio, linear: 0.001"],
        ),
    ];
    for (base, arch, components, processes) in cases {
        let tuned = tuned(&base, components, &change_of_rank_two);
        let expected = image(tuned.path(), arch, None);
        assert!(
            largest_gap(&expected, &image(&base, arch, None)) > 8,
            "{arch}: the fine-tune is like the base model"
        );
        for (index, process) in processes.iter().enumerate() {
            let process = format!("{process}, filename: {arch}_{index}.safetensors");
            let lora = extracted(&base, tuned.path(), out.path(), &process);
            let gap = largest_gap(&expected, &image(&base, arch, Some(&lora)));
            assert!(gap <= 2, "{arch}: {process}: the images differ by {gap}");
        }
    }
}

#[test]
fn a_fine_tuned_transformer_may_be_a_folder_without_the_other_parts() {
    let base = fixtures().join("tiny_flux");
    let tuned = tuned(&base, &["transformer"], &change_of_rank_two);
    let alone = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(tuned.path().join("transformer"), alone.path().join("transformer")).unwrap();
    let out = tempfile::tempdir().unwrap();
    let read = |tuned: &Path, name: &str| {
        let process = format!("type: lora, linear: 2, filename: {name}.safetensors");
        candle_core::safetensors::load(extracted(&base, tuned, out.path(), &process), &Device::Cpu).unwrap()
    };
    let (whole, part) = (read(tuned.path(), "whole"), read(alone.path(), "part"));
    assert_eq!(whole.len(), part.len());
    assert!(
        whole
            .keys()
            .all(|name| name.starts_with("transformer.") && !name.contains("alpha"))
    );
    for (name, tensor) in &whole {
        assert_eq!(numbers(tensor), numbers(&part[name]), "{name}");
    }
}

/// VAE, tokenizers, scheduler and T5 are never needed; text encoders only where they are extracted.
#[test]
fn parts_that_are_not_extracted_may_be_missing() {
    let out = tempfile::tempdir().unwrap();
    let process = "type: lora, linear: 2, filename: a.safetensors";
    let read = |base: &Path, tuned: &Path, keys: &str| {
        let file = extracted(base, tuned, out.path(), &format!("{process}{keys}"));
        std::fs::read(file).unwrap()
    };
    for (name, denoiser) in [("tiny_flux", "transformer"), ("tiny_sd", "unet")] {
        let base = fixtures().join(name);
        let tuned = tuned(&base, &[denoiser, "text_encoder"], &change_of_rank_two);
        let both = ["model_index.json", denoiser, "text_encoder"];
        let alone = ["model_index.json", denoiser];
        let [base_with_text, base_alone] = [&both[..], &alone[..]].map(|parts| parts_of(&base, parts));
        let [tuned_with_text, tuned_alone] = [&both[..], &alone[..]].map(|parts| parts_of(tuned.path(), parts));
        let whole = read(&base, tuned.path(), "");
        assert_eq!(read(base_with_text.path(), tuned_with_text.path(), ""), whole, "{name}");
        let without_text = read(&base, tuned.path(), ", extract_text_encoder: false");
        assert_ne!(whole, without_text, "{name}");
        // A text encoder that the fine-tune does not have is that of the base model.
        for (base, tuned, keys) in [
            (&base_alone, &tuned_alone, ", extract_text_encoder: false"),
            (&base_alone, &tuned_with_text, ", extract_text_encoder: false"),
            (&base_alone, &tuned_alone, ""),
            (&base_with_text, &tuned_alone, ""),
        ] {
            assert_eq!(read(base.path(), tuned.path(), keys), without_text, "{name}{keys}");
        }
        for (base, tuned, keys, part) in [
            (&base_alone, &tuned_with_text, "", "set `extract_text_encoder: false`"),
            (
                &base_with_text,
                &tuned_alone,
                ", extract_unet: false",
                "`extract_unet: false`",
            ),
        ] {
            let message = failure(base.path(), tuned.path(), &format!("{process}{keys}"));
            assert!(
                message.contains(part) && message.contains("`text_encoder`"),
                "{message}"
            );
        }
    }
}

#[test]
fn models_that_do_not_fit_together_are_one_clear_error() {
    let process = "type: locon";
    let (sd, flux) = (fixtures().join("tiny_sd"), fixtures().join("tiny_flux"));
    let has = |message: &str, parts: &[&str]| {
        for part in parts {
            assert!(message.contains(part), "\"{part}\" is not in: {message}");
        }
    };
    has(
        &failure(&sd, &fixtures().join("tiny_sdxl"), process),
        &[
            "different families",
            "Stable Diffusion 1.x",
            "Stable Diffusion XL",
            "tiny_sdxl",
        ],
    );
    let large = sd35_large_folder();
    has(
        &failure(&fixtures().join("tiny_sd35"), large.path(), process),
        &["do not fit together", "transformer."],
    );
    has(&failure(&sd, &sd, process), &["no layer that is extracted differs"]);
    has(
        &failure(&sd, &flux.join("missing"), process),
        &["missing", "no such model"],
    );
    has(
        &failure(&sd, &fixtures().join("pipelines/lora.safetensors"), process),
        &["a LoRA, not a base model"],
    );
    has(
        &failure(&sd, &sd, "type: lora, extract_unet: false, extract_text_encoder: false"),
        &["both false"],
    );

    // A damaged file, numbers that are not finite, quantised weights.
    let with_unet = |bytes: &dyn Fn(Vec<u8>) -> Vec<u8>| {
        let folder = tuned(&sd, &["unet"], &|_, _, base| base.clone());
        let file = folder.path().join("unet/diffusion_pytorch_model.safetensors");
        let changed = bytes(std::fs::read(&file).unwrap());
        std::fs::write(&file, changed).unwrap();
        folder
    };
    let damaged = with_unet(&|mut bytes| {
        bytes.truncate(bytes.len() / 2);
        bytes
    });
    has(
        &failure(&sd, damaged.path(), process),
        &["cut off", "diffusion_pytorch_model.safetensors"],
    );
    let nan = tuned(&sd, &["unet"], &|name, _, base| match name {
        "conv_in.weight" => (base * f64::NAN).unwrap(),
        _ => base.clone(),
    });
    has(&failure(&sd, nan.path(), process), &["`conv_in`", "not finite"]);
    let quantised = quantised_folder(
        "text_bitsandbytes.safetensors",
        ("unet_float8.safetensors", "diffusion_pytorch_model.safetensors"),
    );
    has(&failure(&sd, quantised.path(), process), &["float8", "16 or 32 bits"]);
    let large = tuned(&sd, &["unet"], &|_, _, base| (base + 1e6).unwrap());
    has(&failure(&sd, large.path(), "type: locon, dtype: fp16"), &["float32"]);
}

/// Stops the run after this many progress events.
struct StopAfter {
    left: usize,
    signal: StopSignal,
    events: Vec<ChildEvent>,
}

impl EventSink for StopAfter {
    fn emit(&mut self, event: ChildEvent) {
        if matches!(event, ChildEvent::Progress { .. }) {
            self.left = self.left.saturating_sub(1);
            if self.left == 0 {
                self.signal.stop();
            }
        }
        self.events.push(event);
    }
}

#[test]
fn an_extraction_reports_each_layer_stops_between_two_and_gives_the_same_bytes_again() {
    let base = fixtures().join("tiny_sd");
    let tuned = tuned(&base, &["unet"], &change_of_rank_two);
    let out = tempfile::tempdir().unwrap();
    let job = |folder: &str| {
        spec(&extract_job(
            &base,
            tuned.path(),
            &out.path().join(folder),
            "type: lora, filename: a.safetensors",
        ))
    };
    let signal = StopSignal::new();
    let mut sink = StopAfter {
        left: 1,
        signal: signal.clone(),
        events: Vec::new(),
    };
    assert_eq!(run(&job("stopped"), &mut sink, &signal), Outcome::stopped());
    assert!(!out.path().join("stopped/a.safetensors").exists());

    let (outcome, events) = run_spec(&job("first"));
    assert_eq!(outcome, Outcome::Completed);
    let last = events.iter().rev().find_map(|event| match event {
        ChildEvent::Progress { done, total, .. } => Some((*done, *total)),
        _ => None,
    });
    assert!(
        matches!(last, Some((done, total)) if done == total && total > 50),
        "{last:?}"
    );
    let said = |part: &str| {
        events
            .iter()
            .any(|event| matches!(event, ChildEvent::Log { message, .. } if message.contains(part)))
    };
    assert!(said("layers of rank") && said("layers are unchanged or left out"));
    run_spec(&job("second"));
    let read = |folder: &str| std::fs::read(out.path().join(folder).join("a.safetensors")).unwrap();
    assert_eq!(read("first"), read("second"));
}

#[test]
fn an_attempt_with_its_own_folder_writes_only_there() {
    let base = fixtures().join("tiny_sd");
    let tuned = tuned(&base, &["text_encoder"], &change_of_rank_two);
    let out = tempfile::tempdir().unwrap();
    let elsewhere = out.path().join("elsewhere");
    let yaml = extract_job(
        &base,
        tuned.path(),
        &elsewhere,
        "type: lora, filename: a.safetensors, linear: 2",
    );
    let second = format!(
        "  - {{type: lora, output_path: {}/b/a.safetensors, linear: 3}}\nmeta:",
        elsewhere.display()
    );
    let attempt = in_own_folder(spec(&yaml.replacen("meta:", &second, 1)), &out.path().join("own"));
    let inputs: Vec<&str> = attempt.inputs.keys().map(String::as_str).collect();
    assert_eq!(inputs.len(), 2, "{inputs:?}");
    let (outcome, events) = run_spec(&attempt);
    assert_eq!(outcome, Outcome::Completed);
    assert!(!elsewhere.exists());
    let names: Vec<String> = events
        .iter()
        .filter_map(|event| match event {
            ChildEvent::Artifact { name, .. } => Some(name.clone()),
            _ => None,
        })
        .collect();
    assert_eq!(names, ["a.safetensors", "process_1/a.safetensors"]);
    assert!(artifacts(&events).iter().all(|path| path.is_file()));
}

#[test]
fn a_result_path_that_is_a_folder_is_an_error_before_the_extraction() {
    let out = tempfile::tempdir().unwrap();
    std::fs::create_dir(out.path().join("a.safetensors")).unwrap();
    let base = fixtures().join("tiny_sd");
    let yaml = extract_job(&base, &base, out.path(), "type: lora, filename: a.safetensors");
    let (outcome, _) = run_spec(&spec(&yaml));
    assert!(
        matches!(&outcome, Outcome::Failed { message, .. } if message.contains("this is a folder")),
        "{outcome:?}"
    );
}

/// The keys of ai-toolkit's `config/examples/extract.example.yml`, with other paths.
#[test]
fn a_job_with_the_five_processes_of_ai_toolkits_example_runs() {
    let base = fixtures().join("tiny_sd");
    let tuned = tuned(&base, &["unet", "text_encoder"], &change);
    let out = tempfile::tempdir().unwrap();
    let yaml = format!(
        r#"---
job: extract
config:
  name: name_of_your_model
  base_model: "{}"
  extract_model: "{}"
  output_folder: "{}"
  is_v2: false
  dtype: fp16
  device: cpu
  process:
  - type: locon
    filename: "[name]_64_32.safetensors"
    dtype: fp16
    mode: fixed
    linear: 64
    conv: 32
  - type: locon
    output_path: "{}/absolute/output.safetensors"
    mode: ratio
    linear: 0.2
    conv: 0.2
  - type: locon
    filename: "[name]_ratio_02.safetensors"
    mode: quantile
    linear: 0.5
    conv: 0.5
  - type: lora
    filename: "[name]_4.safetensors"
    mode: fixed
    linear: 4
  - type: lora
    filename: "[name]_q05.safetensors"
    mode: quantile
    linear: 0.5
meta:
  name: "[name]"
  description: A short description of your model
  trigger_words: [put, trigger, words, here]
  version: '0.1'
  creator: {{name: Your Name, email: your@email.com, website: https://yourwebsite.com}}
"#,
        base.display(),
        tuned.path().display(),
        out.path().display(),
        out.path().display()
    );
    let (outcome, events) = run_spec(&spec(&yaml));
    assert_eq!(outcome, Outcome::Completed);
    let names = ["_64_32", "absolute/output", "_ratio_02", "_4", "_q05"].map(|name| {
        let name = if name.starts_with('_') {
            format!("name_of_your_model{name}")
        } else {
            name.to_owned()
        };
        out.path().join(format!("{name}.safetensors"))
    });
    assert_eq!(artifacts(&events), names);
    for path in names {
        let file = AdapterFile::open(&path).unwrap();
        assert_eq!(
            (file.unknown.len(), file.metadata["name"].as_str()),
            (0, "name_of_your_model")
        );
        assert_eq!(file.metadata["trigger_words"], r#"["put", "trigger", "words", "here"]"#);
    }
}
