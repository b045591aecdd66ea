//! Trainings with `correct_pred_norm`, `loss_target` and `loss_type: stepped`.

use super::tests::{logs, losses, run_spec, saved_lora, spec, stop_at, trainer};
use super::transformer_test_runs::flow_trainer;
use crate::testing::fixtures;
use aitk_common::attempt::Outcome;
use aitk_common::job::arch::ArchName;
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::train::{LossTarget, LossType, TimestepType};
use serde_json::json;
use std::path::Path;

fn run(process: &TrainerProcess) -> Vec<f64> {
    let (outcome, events) = run_spec(&spec(process.clone()));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    losses(&events)
}

/// The losses of a training with these changes.
fn losses_with(steps: u64, change: &dyn Fn(&mut TrainerProcess)) -> Vec<f64> {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), steps);
    change(&mut process);
    run(&process)
}

/// Images whose augmentations move and colour all of them.
fn augmented(process: &mut TrainerProcess) {
    process.datasets[0].augmentations = Some(vec![
        json!({"method": "HorizontalFlip", "params": {"p": 1}}),
        json!({"method": "HueSaturationValue", "params": {"p": 1}}),
    ]);
}

fn all_differ(a: &[f64], b: &[f64]) -> bool {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).all(|(a, b)| (a / b - 1.0).abs() > 1e-4)
}

fn all_equal(a: &[f64], b: &[f64], max: f64) -> bool {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).all(|(a, b)| (a / b - 1.0).abs() < max)
}

fn resumes_exactly(change: &dyn Fn(&mut TrainerProcess, &Path)) {
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let with_options = |root: &Path| {
        let mut process = trainer(root, 5);
        change(&mut process, root);
        process
    };
    let mut first = with_options(whole.path());
    let expected = run(&first);
    first.training_folder = Some(parts.path().join("out").display().to_string());
    let (outcome, before) = stop_at(&spec(first.clone()), 2);
    assert_eq!(outcome, Outcome::stopped());
    assert_eq!([losses(&before), run(&first)].concat(), expected);
    assert_eq!(saved_lora(parts.path()), saved_lora(whole.path()));
}

#[test]
fn the_target_is_the_image_before_its_augmentations() {
    let with = |target: LossTarget, steps: u64, is_augmented: bool| {
        losses_with(steps, &|process| {
            process.train.loss_target = target;
            if is_augmented {
                augmented(process);
            }
        })
    };
    let noise = with(LossTarget::Noise, 3, true);
    assert!(all_equal(&with(LossTarget::Source, 3, true), &noise, 1e-3));
    let unaugmented = with(LossTarget::Unaugmented, 3, true);
    assert!(all_differ(&unaugmented, &noise), "{unaugmented:?} {noise:?}");
    // Its distance is large where the noise level is low.
    assert!(
        unaugmented.iter().zip(&noise).all(|(a, b)| a > b),
        "{unaugmented:?} {noise:?}"
    );
    assert!(all_differ(&with(LossTarget::DifferentialNoise, 3, true), &noise));
    // Without augmentations all targets are the same. The checks of a job would refuse this config; this test does not run them.
    let plain = with(LossTarget::Noise, 2, false);
    assert_eq!(with(LossTarget::DifferentialNoise, 2, false), plain);
    assert!(all_equal(&with(LossTarget::Unaugmented, 2, false), &plain, 1e-3));
}

#[test]
fn a_run_with_other_targets_resumes_exactly() {
    for target in [LossTarget::Unaugmented, LossTarget::DifferentialNoise] {
        resumes_exactly(&|process, _| {
            process.train.loss_target = target;
            process.datasets[0].augments = vec!["ColorJitter".into()];
            augmented(process);
            process.datasets[0].shuffle_augmentations = true;
        });
    }
    resumes_exactly(&|process, _| process.train.correct_pred_norm = true);
}

#[test]
fn the_norm_is_that_of_the_model_without_the_adapter() {
    let with = |share: Option<f64>, change: &dyn Fn(&mut TrainerProcess)| {
        losses_with(4, &|process| {
            process.train.lr = 0.05;
            if let Some(share) = share {
                process.train.correct_pred_norm = true;
                process.train.correct_pred_norm_multiplier = share;
            }
            change(process);
        })
    };
    let plain = with(None, &|_| {});
    let corrected = with(Some(1.0), &|_| {});
    // A new adapter changes nothing, so that there is nothing to correct.
    assert!((plain[0] / corrected[0] - 1.0).abs() < 1e-4, "{plain:?} {corrected:?}");
    assert!(all_differ(&plain[1..], &corrected[1..]), "{plain:?} {corrected:?}");
    assert!(all_equal(&with(Some(0.0), &|_| {}), &plain, 1e-3));
    // In ai-toolkit too, it has no effect on regularisation sets and beside a preservation loss, and `prior_reg` none beside it.
    let preserving = |process: &mut TrainerProcess| process.train.blank_prompt_preservation = true;
    assert_eq!(with(Some(1.0), &preserving), with(None, &preserving));
    assert_eq!(
        with(Some(1.0), &|process| process.datasets[0].prior_reg = true),
        corrected
    );
}

#[test]
fn stepped_losses_are_those_of_flow_matching() {
    let with = |loss_type: LossType, timestep_type: TimestepType| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = flow_trainer(dir.path(), ArchName::Flux, &fixtures().join("tiny_flux"), 3);
        process.train.loss_type = loss_type;
        process.train.timestep_type = timestep_type;
        run(&process)
    };
    for timestep_type in [
        TimestepType::Sigmoid,
        TimestepType::Shift,
        TimestepType::LognormBlend,
        TimestepType::NextSample,
    ] {
        let (stepped, plain) = (
            with(LossType::Stepped, timestep_type),
            with(LossType::Mse, timestep_type),
        );
        assert!(stepped.iter().all(|loss| loss.is_finite()), "{stepped:?}");
        assert!(all_differ(&stepped, &plain), "{timestep_type:?}: {stepped:?} {plain:?}");
    }
}

#[test]
fn a_prediction_with_guidance_of_scale_1_is_rescaled() {
    let with = |is_guided: bool, rescale: Option<f64>| {
        losses_with(2, &|process| {
            process.train.do_cfg = is_guided;
            process.train.cfg_rescale = rescale;
        })
    };
    let plain = with(false, None);
    assert_eq!(with(true, None), plain);
    assert!(all_differ(&with(true, Some(8.0)), &plain));
}

#[test]
fn guidance_has_the_negative_prompts_of_the_config() {
    let guided = |root: &Path, negative: &str, steps: u64| {
        let mut process = trainer(root, steps);
        process.train.do_cfg = true;
        process.train.cfg_scale = 3.0;
        process.train.negative_prompt = Some(negative.to_owned());
        process
    };
    let with = |negative: &str| {
        let dir = tempfile::tempdir().unwrap();
        run(&guided(dir.path(), negative, 2))
    };
    let in_file = |lines: &str| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("negative.txt");
        std::fs::write(&path, lines).unwrap();
        run(&guided(dir.path(), &path.display().to_string(), 2))
    };
    let (empty, negative) = (with(""), with("a green square"));
    assert_ne!(negative, empty);
    assert_eq!(in_file("\n a green square\n"), negative);
    assert_ne!(in_file("a green square\na blue circle\na dog\n"), negative);

    // Several are drawn anew in each step, and the same again after a stop.
    resumes_exactly(&|process, root| {
        let path = root.join("negative.txt");
        std::fs::write(&path, "a green square\na blue circle\na dog\n").unwrap();
        process.train.do_cfg = true;
        process.train.cfg_scale = 3.0;
        process.train.negative_prompt = Some(path.display().to_string());
        process.train.max_negative_prompts = 3;
    });
    let dir = tempfile::tempdir().unwrap();
    for (name, lines) in [("empty.txt", Some("\n")), ("missing.txt", None)] {
        let path = dir.path().join(name);
        if let Some(lines) = lines {
            std::fs::write(&path, lines).unwrap();
        }
        match run_spec(&spec(guided(dir.path(), &path.display().to_string(), 1))).0 {
            Outcome::Failed { message, .. } => assert!(
                message.contains("train.negative_prompt: ") && message.contains("one prompt per line"),
                "{message}"
            ),
            other => panic!("{other:?}"),
        }
    }
}

/// As in ai-toolkit.
#[test]
fn beside_a_preservation_loss_the_target_is_the_noise_and_nothing_diverges() {
    let with = |change: &dyn Fn(&mut TrainerProcess)| {
        losses_with(3, &|process| {
            process.train.lr = 0.05;
            change(process);
        })
    };
    let options: [fn(&mut TrainerProcess); 2] = [
        |process| process.train.do_prior_divergence = true,
        |process| process.datasets[0].prior_reg = true,
    ];
    let [plain, preserving] = [false, true].map(|on| with(&|process| process.train.blank_prompt_preservation = on));
    for option in options {
        assert_ne!(with(&option), plain);
        let both = with(&|process| {
            process.train.blank_prompt_preservation = true;
            option(process);
        });
        assert_eq!(both, preserving);
    }
}

/// As in ai-toolkit.
#[test]
fn the_target_of_masked_batches_is_not_amplified_where_the_rest_is_kept() {
    let with = |is_masked: bool, amplifies: bool| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = flow_trainer(dir.path(), ArchName::Flux, &fixtures().join("tiny_flux"), 2);
        process.train.inverted_mask_prior = true;
        process.train.do_signal_amplification = amplifies;
        if is_masked {
            let masks = dir.path().join("masks");
            std::fs::create_dir(&masks).unwrap();
            for entry in std::fs::read_dir(dir.path().join("data")).unwrap() {
                let path = entry.unwrap().path();
                if let Ok((width, height)) = image::image_dimensions(&path) {
                    let mask = image::GrayImage::from_fn(width, height, |x, _| image::Luma([(x * 5) as u8]));
                    mask.save(masks.join(path.file_name().unwrap())).unwrap();
                }
            }
            process.datasets[0].mask_path = Some(masks.display().to_string());
        }
        run(&process)
    };
    assert_eq!(with(true, true), with(true, false));
    assert!(all_differ(&with(false, true), &with(false, false)));
}

#[test]
fn what_the_model_cannot_learn_is_refused() {
    let message = |change: &dyn Fn(&mut TrainerProcess)| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = trainer(dir.path(), 1);
        process.model.is_v_pred = true;
        change(&mut process);
        match run_spec(&spec(process)).0 {
            Outcome::Failed { message, .. } => message,
            other => panic!("{other:?}"),
        }
    };
    let corrected = message(&|process| process.train.correct_pred_norm = true);
    assert!(
        corrected.contains("train.correct_pred_norm") && corrected.contains("v_prediction"),
        "{corrected}"
    );
    let source = message(&|process| process.train.loss_target = LossTarget::Source);
    assert!(source.contains("train.loss_target: `source`"), "{source}");
    let full = message(&|process| {
        process.train.correct_pred_norm = true;
        process.network = None;
    });
    assert!(full.contains("need a `network`"), "{full}");
    let flow = message(&|process| process.train.loss_type = LossType::MeanFlow);
    assert!(flow.contains("`mean_flow` adapter"), "{flow}");
}
