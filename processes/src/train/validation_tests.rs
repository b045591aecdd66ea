//! The loss on fixed images, against diffusers (`tests/reference/make_validation.py`), and what it leaves alone.

use super::super::step_recorder::VALIDATION_METRIC;
use super::tests::{logs, losses, run_spec, saved_lora, spec, trainer};
use super::transformer_test_runs::{complete, flow_trainer};
use crate::testing::{fixtures, in_own_folder, in_portable_mode, sampled_cases};
use crate::{EventSink, StopSignal, run};
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::job::arch::{Arch, ArchName};
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::validation::{ValidationConfig, ValidationItem};
use aitk_common::step_metrics;
use serde_json::Value;
use std::fs::File;
use std::path::Path;

fn report() -> Value {
    let text = std::fs::read(fixtures().join("train/validation.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

fn config(report: &Value, every: u64) -> ValidationConfig {
    let prompts = report["prompts"].as_object().unwrap();
    let item = |(name, prompt): (&String, &Value)| ValidationItem {
        image_path: fixtures().join("replay/data").join(name).display().to_string(),
        prompt: prompt.as_str().unwrap().to_owned(),
        ..ValidationItem::default()
    };
    ValidationConfig {
        validation_items: prompts.iter().map(item).collect(),
        resolution: 96,
        validate_every_n_steps: every,
        validation_sigmas: serde_json::from_value(report["levels"].clone()).unwrap(),
        ..ValidationConfig::default()
    }
}

/// The steps at which it was measured, with the losses, as the events and as `metrics.jsonl` have them.
fn measured(root: &Path, events: &[ChildEvent]) -> Vec<(u64, f64)> {
    let of_event = |event: &ChildEvent| match event {
        ChildEvent::Metrics { step, values } => Some((*step, *values.get("val/loss")?)),
        _ => None,
    };
    let shown: Vec<(u64, f64)> = events.iter().filter_map(of_event).collect();
    let file = File::open(root.join("out/tiny").join(step_metrics::METRICS_FILE)).unwrap();
    let lines = step_metrics::read(file).unwrap();
    let written = lines
        .iter()
        .filter_map(|line| Some((line.step, *line.values.get("val/loss")?)));
    assert_eq!(written.collect::<Vec<_>>(), shown);
    shown
}

#[test]
fn the_loss_is_that_of_diffusers() {
    let report = report();
    for (arch, folder) in sampled_cases(vec![
        (ArchName::Flux, "tiny_flux"),
        (ArchName::Sd1, "tiny_sd"),
        (ArchName::Sd2, "tiny_sd21"),
    ]) {
        let dir = tempfile::tempdir().unwrap();
        let mut process = match arch {
            ArchName::Flux => flow_trainer(dir.path(), arch, &fixtures().join(folder), 1),
            _ => trainer(dir.path(), 1),
        };
        process.model.arch = Arch::from(arch);
        process.model.name_or_path = fixtures().join(folder).display().to_string();
        // Without a change of the weights.
        process.train.lr = 0.0;
        process.train.validation_config = Some(config(&report, 1));
        let events = complete(process);
        let expected = report[folder].as_f64().unwrap();
        let [(1, got)] = measured(dir.path(), &events)[..] else {
            panic!("{folder}: {:?}", measured(dir.path(), &events));
        };
        assert!((got - expected).abs() < 1e-4 * expected, "{folder}: {got} {expected}");
    }
}

in_portable_mode! {
    the_loss_is_that_of_diffusers,
}

/// `tiny_sd35` has positions for 256 x 256 pixels.
#[test]
fn an_image_beyond_the_positions_of_the_model_is_refused_before_the_training() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("large.png");
    image::RgbImage::new(512, 512).save(&image).unwrap();
    let mut process = flow_trainer(dir.path(), ArchName::Sd3, &fixtures().join("tiny_sd35"), 1);
    process.train.validation_config = Some(ValidationConfig {
        validation_items: vec![ValidationItem {
            image_path: image.display().to_string(),
            ..ValidationItem::default()
        }],
        resolution: 512,
        validation_sigmas: vec![0.5],
        ..ValidationConfig::default()
    });
    let (outcome, events) = run_spec(&spec(process));
    let message = match outcome {
        Outcome::Failed { message, .. } => message,
        other => panic!("{other:?}: {}", logs(&events)),
    };
    assert!(
        message.contains("validation_items[0]") && message.contains("512 x 512 pixels is too large"),
        "{message}"
    );
    assert!(losses(&events).is_empty());
}

/// The weights and the losses are those of a run without it: with a LoRA of the text encoder too, with dropout, with encoded prompts,
/// and of a whole model.
#[test]
fn the_training_does_not_depend_on_it() {
    let report = report();
    let variants: [fn(&mut TrainerProcess); 3] = [
        |process| process.train.cache_text_embeddings = true,
        |process| {
            process.train.train_text_encoder = true;
            process.network.as_mut().unwrap().dropout = Some(0.2);
        },
        |process| process.network = None,
    ];
    for (number, change) in sampled_cases(variants.iter().enumerate().collect()) {
        let train = |validates: bool| {
            let dir = tempfile::tempdir().unwrap();
            let mut process = trainer(dir.path(), 5);
            process.datasets[0].shuffle_tokens = false;
            process.logging.log_every = Some(3);
            change(&mut process);
            process.train.validation_config = validates.then(|| ValidationConfig {
                resolution: 32,
                ..config(&report, 2)
            });
            let events = complete(process);
            let validated = measured(dir.path(), &events);
            let saved = saved_lora(dir.path());
            (validated, saved, losses(&events).last().copied())
        };
        let (validated, with, loss) = train(true);
        let (none, without, plain_loss) = train(false);
        assert!(with == without && loss == plain_loss, "{number}");
        assert!(none.is_empty());
        let steps: Vec<u64> = validated.iter().map(|(step, _)| *step).collect();
        assert_eq!(steps, [1, 2, 4, 5], "{number}");
        assert!(validated[0].1 != validated[3].1, "{number}: {validated:?}");
    }
}

#[test]
fn a_missing_image_is_an_error_before_the_model_is_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 2);
    let mut fixed = config(&report(), 2);
    fixed.validation_items[1].image_path = dir.path().join("none.png").display().to_string();
    process.train.validation_config = Some(fixed);
    let (outcome, events) = run_spec(&spec(process));
    let text = format!("{outcome:?} {}", logs(&events));
    assert!(outcome != Outcome::Completed && text.contains("none.png"), "{text}");
    assert!(!format!("{events:?}").contains("loading model"), "{events:?}");
}

/// A run that is told to stop while the loss is measured measures it when it resumes, on another machine too, where the metrics of
/// earlier steps come from the checkpoint.
#[test]
fn a_loss_that_an_interruption_prevented_is_measured_on_resume() {
    /// Stops after the second step that is not finite, before the loss is measured.
    struct StopAtWarning(StopSignal, u64);
    impl EventSink for StopAtWarning {
        fn emit(&mut self, event: ChildEvent) {
            if matches!(&event, ChildEvent::Log { level, message, .. } if level == "warn" && message.contains("finite"))
            {
                self.1 += 1;
                if self.1 == 2 {
                    self.0.stop();
                }
            }
        }
    }
    let report = report();
    let [one, two] = [0; 2].map(|_| tempfile::tempdir().unwrap());
    let mut process = trainer(one.path(), 4);
    process.train.validation_config = Some(ValidationConfig {
        resolution: 32,
        ..config(&report, 1)
    });
    // No step changes the weights, so all measurements are equal.
    process.datasets[0].loss_multiplier = 1e300;
    let first = in_own_folder(spec(process.clone()), &one.path().join("out"));
    let signal = StopSignal::new();
    assert_eq!(
        run(&first, &mut StopAtWarning(signal.clone(), 0), &signal),
        Outcome::stopped()
    );
    let values = |root: &Path| -> Vec<(u64, Option<f64>)> {
        let file = std::fs::File::open(root.join("out/tiny/metrics.jsonl")).unwrap();
        let lines = step_metrics::read(file).unwrap().into_iter();
        lines
            .map(|line| (line.step, line.values.get(VALIDATION_METRIC).copied()))
            .collect()
    };
    let interrupted = values(one.path());
    assert!(interrupted.len() == 2 && interrupted[0].1.is_some() && interrupted[1].1.is_none());
    let mut other = in_own_folder(spec(process), &two.path().join("out"));
    other.resume_from = Some(one.path().join("out/tiny/.aitk/checkpoints/step_000000002"));
    for spec in [&other, &first] {
        let (_, events) = run_spec(spec);
        let is_measured = |event: &ChildEvent| matches!(event, ChildEvent::Metrics { step: 2, values } if values.get(VALIDATION_METRIC).copied() == interrupted[0].1);
        assert!(events.iter().any(is_measured), "{}", logs(&events));
    }
    for root in [one.path(), two.path()] {
        let expected = (1..=4).map(|step| (step, interrupted[0].1)).collect::<Vec<_>>();
        // The run fails after its last step, because none was finite.
        assert_eq!(values(root)[..3], expected[..3]);
    }
}

/// After the last step nothing but the final save follows, which marks a run as complete.
#[test]
fn a_run_that_is_stopped_while_it_measures_the_loss_of_its_last_step_is_not_complete() {
    struct StopInSecondMeasurement(StopSignal, u64);
    impl EventSink for StopInSecondMeasurement {
        fn emit(&mut self, event: ChildEvent) {
            self.1 += u64::from(matches!(&event, ChildEvent::Phase { name } if name == "validating"));
            if self.1 == 2 {
                self.0.stop();
            }
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let mut process = trainer(dir.path(), 3);
    process.train.validation_config = Some(ValidationConfig {
        resolution: 32,
        ..config(&report(), 0)
    });
    let spec = spec(process);
    let signal = StopSignal::new();
    let outcome = run(&spec, &mut StopInSecondMeasurement(signal.clone(), 0), &signal);
    assert_eq!(outcome, Outcome::stopped());
    let (outcome, events) = run_spec(&spec);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    let is_measured = |event: &ChildEvent| matches!(event, ChildEvent::Metrics { step: 3, values } if values.contains_key(VALIDATION_METRIC));
    assert!(events.iter().any(is_measured), "{}", logs(&events));
}
