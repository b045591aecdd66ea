//! Whole jobs of FLUX.1 on the tiny model with a loss of features: they resume exactly, and files for something else are refused.

use super::check_feature_extractor;
use super::resume_exactness::check_resumption;
use super::tests::{logs, losses, run_spec, spec};
use super::transformer_test_runs::{complete, flow_trainer};
use crate::device::portable::portable;
use crate::testing::{fixtures, skips_long_tests};
use aitk_common::attempt::Outcome;
use aitk_common::job::arch::ArchName;
use aitk_common::job::process::TrainerProcess;
use aitk_common::model_files::PartPaths;
use std::path::Path;

fn file(name: &str) -> String {
    let name = if name == "version8" { "version7" } else { name };
    let mut path = fixtures().join("feature_extractors").join(name);
    if !path.is_dir() {
        path.set_extension("safetensors");
    }
    path.display().to_string()
}

/// The second network of a version.
fn second(name: &str) -> Option<String> {
    match name {
        "version3" => Some(file("version10")),
        "version7" | "version8" => Some(file("version7_encoder")),
        _ => None,
    }
}

fn flux(root: &Path, name: &str) -> TrainerProcess {
    let mut process = flow_trainer(root, ArchName::Flux, &fixtures().join("tiny_flux"), 5);
    process.train.latent_feature_extractor_path = Some(file(name));
    process.train.latent_feature_extractor_second_path = second(name);
    process.train.latent_feature_extractor_partial_step = name == "version8";
    process
}

#[test]
fn trainings_with_a_loss_of_features_resume_exactly() {
    let mut all = Vec::new();
    // Version 8 has the network of version 7, and draws numbers of its own.
    let (quick, long) = (
        ["version1", "version2", "version10"],
        ["version3", "version4", "version6", "version8", "version9"],
    );
    let long: &[&str] = if skips_long_tests() { &[] } else { &long };
    for name in quick.iter().chain(long) {
        let (_, events) = check_resumption(&|root| flux(root, name));
        assert!(logs(&events).contains("features of the images"), "{}", logs(&events));
        all.push(losses(&events));
    }
    let plain = tempfile::tempdir().unwrap();
    let mut process = flux(plain.path(), "version1");
    process.train.latent_feature_loss_weight = 0.0;
    all.push(losses(&complete(process)));
    for (i, losses) in all.iter().enumerate() {
        assert!(all[..i].iter().all(|other| other[0] != losses[0]), "{all:?}");
    }
}

#[test]
fn images_that_differ_each_time_are_compared_with_what_is_trained_on() {
    let augmented = |root: &Path| {
        let mut process = flux(root, "version10");
        process.train.gradient_accumulation = 2;
        process.datasets[0].cache_latents_to_disk = false;
        process.datasets[0].flip_x = true;
        process.datasets[0].augments = vec!["ColorJitter".into()];
        process
    };
    check_resumption(&augmented);
    // As on GPUs, the images of the next micro-batch are read ahead.
    let of = |change: fn(&mut TrainerProcess)| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = flux(dir.path(), "version10");
        process.train.steps = 2;
        change(&mut process);
        losses(&portable(|| complete(process)))
    };
    let cached = of(|_| {});
    let uncached = of(|process| process.datasets[0].cache_latents_to_disk = false);
    let close = cached.iter().zip(&uncached).all(|(a, b)| (a / b - 1.0).abs() < 1e-4);
    assert!(close, "{cached:?} and {uncached:?}");
}

#[test]
fn a_network_for_something_else_is_refused_before_the_training() {
    let refused = |change: fn(&mut TrainerProcess), expected: &str| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = flux(dir.path(), "version1");
        change(&mut process);
        let (outcome, _) = run_spec(&spec(process));
        let Outcome::Failed { message, .. } = outcome else {
            panic!("{outcome:?}");
        };
        assert!(message.contains(expected), "{message}");
    };
    refused(
        |process| process.train.latent_feature_extractor_path = Some(file("features")),
        "train.latent_feature_extractor_path",
    );
    refused(
        |process| process.train.latent_feature_extractor_partial_step = true,
        "only TIPSv2",
    );
    refused(
        |process| {
            process.model.arch.name = ArchName::Sd1;
            process.model.name_or_path = fixtures().join("tiny_sd").display().to_string();
        },
        "flow matching",
    );
    let check = |name: &str, model: &str, arch: ArchName| {
        let mut process = flux(Path::new("/nowhere"), name);
        process.model.arch.name = arch;
        let (model, path) = (fixtures().join(model), file(name));
        let (parts, second) = (PartPaths::default(), second(name));
        let paths = (Path::new(&path), second.as_deref().map(Path::new));
        check_feature_extractor(&process, paths, Some((&model, &parts))).map_err(|error| error.to_string())
    };
    for name in [
        "version1",
        "version2",
        "version3",
        "version4",
        "version6",
        "version7",
        "version8",
        "version9",
        "version10",
    ] {
        check(name, "tiny_flux", ArchName::Flux).unwrap();
    }
    assert!(
        check("features", "tiny_flux", ArchName::Flux)
            .unwrap_err()
            .contains("not a feature extractor")
    );
}
