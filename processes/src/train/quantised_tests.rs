//! LoRAs on a quantised base model.

use super::tests::{logs, losses, run_spec, saved_lora, spec, stop_at, trainer};
use crate::families::{LoadOptions, Model};
use crate::testing::{fixtures, load_sd, sampled_cases};
use crate::weights::{QuantizationConfig, Weight};
use aitk_common::attempt::Outcome;
use aitk_common::capability::DeviceRef;
use aitk_common::job::QType;
use aitk_common::job::process::TrainerProcess;
use aitk_common::plan::profile::MemoryProfile;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const STEPS: u64 = 6;

fn quantised(root: &Path, qtype: &str) -> TrainerProcess {
    let mut process = trainer(root, STEPS);
    process.model.quantize = true;
    process.model.qtype = qtype.into();
    process.model.qtype_te = qtype.into();
    process
}

fn train(process: TrainerProcess) -> Vec<f64> {
    let (outcome, events) = run_spec(&spec(process));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    losses(&events)
}

#[test]
fn losses_on_a_quantised_base_are_close_to_those_on_the_full_one() {
    let whole = tempfile::tempdir().unwrap();
    let expected = train(trainer(whole.path(), STEPS));
    assert_eq!(expected.len() as u64, STEPS);
    for (qtype, bound) in sampled_cases(vec![("nf4", 0.1), ("qfloat8", 0.03), ("int8", 0.01), ("q8_0", 0.01)]) {
        let dir = tempfile::tempdir().unwrap();
        let found = train(quantised(dir.path(), qtype));
        assert_ne!(found, expected, "{qtype}");
        for (found, expected) in found.iter().zip(&expected) {
            let difference = (found / expected - 1.0).abs();
            assert!(
                difference < bound,
                "{qtype}: a loss of {found}, {expected} on the full-precision base"
            );
        }
    }
}

/// On a GPU, and so in portable mode, a profile keeps a share of the quantised layers in host memory.
#[test]
fn offloaded_quantised_layers_train_the_same() {
    for qtype in sampled_cases(vec!["q4_k", "qfloat8", "nf4", "int8"]) {
        let train = |profile: MemoryProfile| {
            let dir = tempfile::tempdir().unwrap();
            let mut spec = spec(quantised(dir.path(), qtype));
            spec.device = DeviceRef::PORTABLE_CPU;
            spec.profile = profile;
            let (outcome, events) = run_spec(&spec);
            assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
            losses(&events)
        };
        let resident = train(MemoryProfile::FullGpu);
        for profile in [MemoryProfile::GpuPoor, MemoryProfile::Extreme] {
            for (found, expected) in train(profile).iter().zip(&resident) {
                assert!(
                    (found / expected - 1.0).abs() < 1e-4,
                    "{qtype}, {profile:?}: {found}, {expected}"
                );
            }
        }
    }
}

#[test]
fn a_run_on_a_quantised_base_resumes_exactly() {
    let (uninterrupted, stopped) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    train(quantised(uninterrupted.path(), "nf4"));
    let spec = spec(quantised(stopped.path(), "nf4"));
    let (outcome, events) = stop_at(&spec, STEPS / 2);
    assert_eq!(outcome, Outcome::stopped(), "{}", logs(&events));
    assert_eq!(run_spec(&spec).0, Outcome::Completed);
    assert!(
        saved_lora(uninterrupted.path()) == saved_lora(stopped.path()),
        "the LoRAs differ"
    );
}

/// An accuracy recovery adapter is active in training and samples, and is not saved. Its layers have the type of the config, the others 8
/// bits.
#[test]
fn an_accuracy_recovery_adapter_stays_active_and_is_not_saved() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), STEPS);
    process.network.as_mut().unwrap().conv = Some(2);
    process.train.lr = 1e-2;
    train(process);
    let adapter = dir.path().join("out/tiny/tiny.safetensors").display().to_string();
    let run = |change: &dyn Fn(&mut TrainerProcess)| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = quantised(dir.path(), "nf4");
        process.train.disable_sampling = false;
        process.train.skip_first_sample = true;
        process.sample.sample_every = None;
        process.sample.width = 32;
        process.sample.height = 32;
        process.sample.sample_steps = 2;
        process.sample.format = "png".into();
        process.sample.samples = vec![aitk_common::job::sample::SampleItem {
            prompt: "a red circle".into(),
            ..Default::default()
        }];
        change(&mut process);
        let losses = train(process);
        let samples = std::fs::read_dir(dir.path().join("out/tiny/samples")).unwrap();
        let images: Vec<image::RgbImage> = samples
            .map(|file| image::open(file.unwrap().path()).unwrap().to_rgb8())
            .collect();
        assert_eq!(images.len(), 1);
        (losses, saved_lora(dir.path()), images)
    };
    // The adapter has every quantised layer, so that the training is the same as with it as an assistant LoRA. Samples are made without an
    // assistant LoRA.
    let recovered = run(&|process| process.model.accuracy_recovery_adapter = Some(adapter.clone()));
    let assisted = run(&|process| process.model.assistant_lora_path = Some(adapter.clone()));
    let plain = run(&|_| {});
    assert_eq!(recovered.0, assisted.0);
    assert_ne!(recovered.0, plain.0);
    assert_ne!(recovered.2, assisted.2);
    assert!(safetensors_data(&recovered.1) == safetensors_data(&assisted.1));
}

/// A file without its header, which has the config's hash.
fn safetensors_data(bytes: &[u8]) -> Vec<u8> {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[8 + length..].to_vec()
}

#[test]
fn layers_without_an_adapter_are_quantised_in_8_bits() {
    let adapted = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q";
    let options = LoadOptions {
        denoiser_quantization: Some(QuantizationConfig {
            qtype: QType::Nf4,
            exclude: Vec::new(),
            adapted: Some(BTreeSet::from([adapted.to_owned()])),
        }),
        ..LoadOptions::cpu()
    };
    let mut model = load_sd(fixtures().join("tiny_sd"), &options).unwrap();
    let mut kinds = BTreeMap::new();
    let unet = model.parts().pop().unwrap();
    unet.layers
        .visit_layers(&mut |path, layer| {
            if let Weight::Quantized(weight) = layer.weight() {
                kinds.insert(path.to_owned(), weight.kind());
            }
            Ok(())
        })
        .unwrap();
    assert!(kinds.len() > 20);
    for (path, kind) in kinds {
        assert_eq!(kind, if path == adapted { "nf4" } else { "int8" }, "{path}");
    }
}
