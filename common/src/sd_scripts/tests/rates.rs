//! Learning rates of whole models, and those that Adafactor chooses.

use super::support::{base, folder, import_in, job};
use crate::job::lr_factor::LrFactor;
use crate::job::train::TrainConfig;
use crate::sd_scripts::Script;

fn train(script: Script, lines: &str) -> (TrainConfig, Vec<String>) {
    let folder = folder();
    let imported = import_in(folder.path(), &format!("{}{lines}\n", base(script)), Some(script)).unwrap();
    let notes = imported.notes.iter().map(ToString::to_string).collect();
    (job(&imported.yaml).process[0].trainer().unwrap().train.clone(), notes)
}

#[test]
fn text_encoders_of_whole_models_have_rates_of_their_own() {
    let factors = |script: Script, lines: &str| {
        let (train, _) = train(script, &format!("learning_rate = 1e-5\n{lines}"));
        let of = |factor: &LrFactor| format!("{} {:.3}", factor.contains, factor.factor);
        let all: Vec<String> = train.lr_factors.iter().map(of).collect();
        (train.train_text_encoder, all.join(", "))
    };
    let text = "train_text_encoder = true";
    for (script, lines, expected) in [
        (
            Script::TrainDb,
            "learning_rate_te = 5e-6",
            (true, "text_encoder. 0.500"),
        ),
        (Script::TrainDb, "", (true, "")),
        (Script::TrainDb, "learning_rate_te = 0", (false, "")),
        (Script::FineTune, "learning_rate_te = 5e-6", (false, "")),
        (
            Script::SdxlTrain,
            "train_text_encoder = true\nlearning_rate_te1 = 2e-6\nlearning_rate_te2 = 0",
            (true, "text_encoder. 0.200, text_encoder_2. 0.000"),
        ),
        (Script::SdxlTrain, text, (true, "")),
        (Script::SdxlTrain, "learning_rate_te1 = 2e-6", (false, "")),
    ] {
        let (trained, found) = factors(script, lines);
        assert_eq!((trained, found.as_str()), expected, "{script:?} {lines}");
    }
}

/// `get_block_lr_weight` of networks/lora.py warns, too.
#[test]
fn too_many_or_too_few_weights_of_blocks_are_noted() {
    for (argument, says) in [
        (
            "down_lr_weight=0.5,1",
            Some("down_lr_weight: expected 12 numbers, found 2; as in sd-scripts, 1 is taken"),
        ),
        (
            "mid_lr_weight=0.5,2",
            Some("mid_lr_weight: expected 1 number, found 2; as in sd-scripts, the rest is ignored"),
        ),
        ("up_lr_weight=sine+0.5", None),
        ("up_lr_weight=1,1,1,1,1,1,1,1,1,1,1,0.5", None),
    ] {
        let (_, notes) = train(Script::TrainNetwork, &format!("network_args = [\"{argument}\"]"));
        let found = notes.iter().find(|note| note.contains("as in sd-scripts, "));
        match says {
            Some(says) => assert!(found.is_some_and(|note| note.contains(says)), "{notes:?}"),
            None => assert_eq!(found, None, "{argument}"),
        }
    }
}

/// sd-scripts caches T5 and trains the other text encoders (`get_models_for_text_encoding` of flux_train_network.py and sd3_train_network.py).
#[test]
fn text_of_trained_text_encoders_is_not_cached() {
    for script in [Script::FluxTrainNetwork, Script::Sd3TrainNetwork] {
        let (found, notes) = train(script, "cache_text_encoder_outputs = true");
        assert!(found.train_text_encoder && !found.cache_text_embeddings);
        assert!(notes.iter().any(|note| note.contains("caches T5 alone")), "{notes:?}");
        let (found, notes) = train(
            script,
            "cache_text_encoder_outputs = true\nnetwork_train_unet_only = true",
        );
        assert!(
            found.cache_text_embeddings && !notes.iter().any(|note| note.contains("T5 alone")),
            "{notes:?}"
        );
    }
}

#[test]
fn adafactor_chooses_rates_unless_it_is_told_not_to() {
    let read = |arguments: &str| {
        let lines = format!(
            "optimizer_type = \"Adafactor\"\nlr_scheduler = \"adafactor\"\ntext_encoder_lr = 1e-6\noptimizer_args = [{arguments}]"
        );
        train(Script::TrainNetwork, &lines)
    };
    let param = |train: &TrainConfig, name: &str| train.optimizer_params.get(name).and_then(serde_json::Value::as_bool);
    for (arguments, scales, warms_up) in [
        ("", true, None),
        ("\"scale_parameter=False\"", false, None),
        ("\"relative_step=True\", \"warmup_init=True\"", true, Some(true)),
        ("\"relative_step=False\", \"warmup_init=True\"", true, Some(true)),
    ] {
        let (train, notes) = read(arguments);
        assert_eq!(param(&train, "relative_step"), Some(true), "{arguments}");
        assert_eq!(param(&train, "scale_parameter"), Some(scales), "{arguments}");
        assert_eq!(param(&train, "warmup_init"), warms_up, "{arguments}");
        assert!(train.lr_factors.is_empty());
        assert!(
            notes
                .iter()
                .any(|note| note.contains("chooses the learning rate itself")),
            "{notes:?}"
        );
    }
    let (train, _) = train(
        Script::TrainNetwork,
        "optimizer_type = \"Adafactor\"\noptimizer_args = [\"relative_step=False\"]\ntext_encoder_lr = 1e-6",
    );
    assert_eq!(param(&train, "relative_step"), None);
    assert_eq!(train.lr_factors.len(), 1);
}

/// transformers' `get_polynomial_decay_schedule_with_warmup` takes `optimizer.defaults["lr"]`, which is learning_rate, and scales all rates.
#[test]
fn a_polynomial_ends_at_a_share_of_the_rate() {
    let end = |lines: &str| {
        let (train, _) = train(Script::TrainNetwork, &format!("lr_scheduler = \"polynomial\"\n{lines}"));
        train
            .lr_scheduler_params
            .get("lr_end")
            .and_then(serde_json::Value::as_f64)
    };
    assert_eq!(end("learning_rate = 1e-4"), Some(1e-7));
    // 1e-7 / 2e-6, the default, of 1e-4.
    assert!(end("unet_lr = 1e-4").is_some_and(|end| (end - 5e-6).abs() < 1e-12));
    assert!(end("unet_lr = 1e-4\nlearning_rate = 1e-3").is_some_and(|end| (end - 1e-8).abs() < 1e-14));
}

#[test]
fn adafactor_does_not_clip_and_a_note_says_so() {
    let read = |lines: &str| {
        let (_, notes) = train(Script::TrainNetwork, lines);
        let note = notes.into_iter().find(|note| note.contains("aitk does not clip"));
        note.unwrap_or_default()
    };
    let default = read("optimizer_type = \"Adafactor\"");
    assert!(
        default.contains(": optimizer_type: ") && default.contains("a norm of 1"),
        "{default}"
    );
    let given = read("optimizer_type = \"Adafactor\"\nmax_grad_norm = 0.5");
    assert!(
        given.contains(": max_grad_norm: ") && given.contains("a norm of 0.5"),
        "{given}"
    );
    assert_eq!(read("optimizer_type = \"Adafactor\"\nmax_grad_norm = 0"), "");
    assert_eq!(read("max_grad_norm = 0.5"), "");
    // aitk does not clip, so it does not clip all gradients together either.
    for (optimizer, together) in [("AdamW", true), ("Adafactor", false)] {
        let lines = format!("optimizer_type = \"{optimizer}\"\nfused_optimizer_groups = 10");
        let (_, notes) = train(Script::SdxlTrain, &lines);
        let found = |part: &str| notes.iter().any(|note| note.contains(part));
        assert_eq!(
            (found("aitk all together"), found("aitk does not clip")),
            (together, !together),
            "{optimizer}: {notes:?}"
        );
    }
}
