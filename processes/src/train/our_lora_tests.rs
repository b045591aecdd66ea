//! The LoRAs in `tests/fixtures/our_lora`, with which diffusers generates images (`tests/reference/make_our_lora.py`),
//! are what this trainer makes.

use super::tests::{run_spec, spec, trainer};
use crate::adapters::{AdapterFile, LoraTensors};
use crate::testing::{fixtures, gap};
use aitk_common::attempt::Outcome;
use aitk_common::job::dtype::DType;
use aitk_common::job::process::TrainerProcess;
use std::path::Path;

/// Weights change by up to 0.05 in these runs. Other CPUs round differently, and AdamW amplifies that.
const TOLERANCE: f32 = 5e-4;

/// Trains, and compares with the fixture: every name, type and shape, and every number within `TOLERANCE`. With
/// `AITK_UPDATE_GOLDEN=1` the result replaces the fixture.
fn check_against_fixture(name: &str, change: impl FnOnce(&mut TrainerProcess)) {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 10);
    process.train.lr = 5e-3;
    process.save.save_every = None;
    // The tags are shuffled once, with which the fixtures were made.
    process.datasets[0].shuffle_keeps_tokens = true;
    change(&mut process);
    let mut spec = spec(process);
    spec.job["name"] = name.into();
    let (outcome, events) = run_spec(&spec);
    assert_eq!(outcome, Outcome::Completed, "{events:?}");
    let made = dir.path().join(format!("out/{name}/{name}.safetensors"));
    let path = fixtures().join(format!("our_lora/{name}.safetensors"));
    if std::env::var_os("AITK_UPDATE_GOLDEN").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::copy(&made, &path).unwrap();
    }
    let header = |path: &Path| -> serde_json::Value {
        let bytes = std::fs::read(path).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        // The hashes change with the last bit, and `software` has the version.
        let metadata = header["__metadata__"].as_object_mut().unwrap();
        for key in ["sshs_model_hash", "sshs_legacy_hash", "software"] {
            assert!(metadata.remove(key).is_some(), "{key}");
        }
        header
    };
    assert_eq!(header(&made), header(&path));
    let (made, expected) = (AdapterFile::open(&made).unwrap(), AdapterFile::open(&path).unwrap());
    let mut worst = 0f32;
    for (a, b) in made.modules.iter().zip(&expected.modules) {
        let [a, b] = [a, b].map(|module| module.tensors.as_any().downcast_ref::<LoraTensors>().unwrap());
        assert_eq!(a.alpha, b.alpha);
        for (a, b) in [(&a.down, &b.down), (&a.up, &b.up)] {
            worst = worst.max(gap(a, b));
        }
    }
    assert!(
        worst < TOLERANCE,
        "{name}: a weight differs by {worst}; has the trainer changed?"
    );
}

#[test]
fn a_lora_on_linear_layers_in_half_precision() {
    check_against_fixture("linear", |process| {
        process.network.as_mut().unwrap().linear_alpha = 2.0;
        process.save.dtype = DType::F16;
    });
}

#[test]
fn a_lora_on_the_text_encoder_too() {
    check_against_fixture("text", |process| process.train.train_text_encoder = true);
}

#[test]
fn a_lora_on_convolutions_too() {
    check_against_fixture("conv", |process| {
        let network = process.network.as_mut().unwrap();
        (network.conv, network.conv_alpha) = (Some(3), Some(1.5));
    });
}
