//! Configs of trainings of code models: what is read, and what is refused, with its key.

use super::*;
use crate::job::{Format, InputKind, LoadOptions, ProcessKind, parse};

fn config(lines: &str) -> String {
    format!(
        "job: extension\nconfig:\n  name: coder\n  process:\n    - type: lm_trainer\n      training_folder: out\n      model: \
         {{name_or_path: models/starcoder2}}\n      datasets: [{{path: src}}]\n{lines}"
    )
}

fn errors(lines: &str) -> String {
    match parse(&config(lines), Format::Yaml, Some("a.yaml"), &LoadOptions::default()) {
        Ok(job) => job.spec.unsupported().to_string(),
        Err(error) => error.to_string(),
    }
}

fn process(lines: &str) -> LmTrainerProcess {
    let job = parse(&config(lines), Format::Yaml, Some("a.yaml"), &LoadOptions::default()).unwrap();
    assert!(job.spec.unsupported().errors.is_empty());
    match &job.spec.process[0].kind {
        ProcessKind::LmTrain(process) => (**process).clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_config_has_its_values_and_inputs() {
    let read = process(
        "      network: {type: lora, linear: 8}\n      validation: {share: 0.1, every: 5}\n      train: {epochs: 2, lr_scheduler: wsd, \
         decay_steps: 7}\n",
    );
    assert_eq!(read.network.as_ref().unwrap().alpha(), 8.0);
    assert_eq!(
        (read.context.fixed(), read.packing, read.train.epochs),
        (Some(1024), true, Some(2))
    );
    let validation = read.validation.unwrap();
    let due: Vec<u64> = (1..=12).filter(|step| validation.is_due(*step, 12)).collect();
    assert_eq!(due, [1, 5, 10, 12]);
    let job = parse(&config(""), Format::Yaml, Some("a.yaml"), &LoadOptions::default()).unwrap();
    let inputs: Vec<_> = job
        .spec
        .inputs()
        .into_iter()
        .map(|input| (input.config_path, input.kind))
        .collect();
    assert_eq!(
        inputs,
        [
            ("models/starcoder2".to_owned(), InputKind::LanguageModel),
            ("src".to_owned(), InputKind::Dataset)
        ]
    );
    // The queue's JSON is the same job.
    let text = serde_json::to_string(&job.spec).unwrap();
    assert_eq!(crate::job::JobSpec::from_json(&text).unwrap().process, job.spec.process);
}

#[test]
fn values_may_be_left_to_the_machine() {
    let lines = "      context: auto\n      fim_rate: 0.5\n      train: {batch_size: auto, gradient_accumulation: 8, gradient_checkpointing: auto}\n";
    let read = process(lines);
    assert_eq!(
        (read.context, read.train.batch_size),
        (CountOrAuto::Auto, CountOrAuto::Auto)
    );
    assert_eq!(read.train.gradient_checkpointing.fixed(), None);
    // The queue's JSON is the same job.
    let job = parse(&config(lines), Format::Yaml, Some("a.yaml"), &LoadOptions::default()).unwrap();
    let text = serde_json::to_string(&job.spec).unwrap();
    assert!(text.contains(r#""context":"auto""#), "{text}");
    assert_eq!(crate::job::JobSpec::from_json(&text).unwrap().process, job.spec.process);
}

#[test]
fn what_has_no_effect_or_no_meaning_is_refused_at_its_key() {
    // The steps of epochs are not known yet.
    for lines in ["warmup_steps: 1000", "warmup_steps: 1001, epochs: 1"] {
        process(&format!("      train: {{{lines}}}\n"));
    }
    for (lines, key) in [
        ("      context: 1\n", "context"),
        ("      context: 100000000\n", "context"),
        ("      fim_rate: 2\n", "fim_rate"),
        ("      fim_spm_rate: 0.4\n", "fim_spm_rate"),
        ("      fim_rate: 0.5\n      context: 8\n", "fim_rate"),
        ("      validation: {every: 3}\n", "validation"),
        ("      validation: {share: 0.1, path: held}\n", "validation.share"),
        ("      validation: {share: 1}\n", "validation.share"),
        ("      train: {steps: 3, epochs: 1}\n", "train.epochs"),
        ("      train: {steps: 0}\n", "train.steps"),
        ("      train: {min_lr: 1}\n", "train.min_lr"),
        ("      train: {lr_scheduler: constant, min_lr: 1e-6}\n", "train.min_lr"),
        ("      train: {decay_steps: 3}\n", "train.decay_steps"),
        ("      train: {steps: 3, warmup_steps: 4}\n", "train.warmup_steps"),
        ("      train: {warmup_steps: 1001}\n", "train.warmup_steps"),
        (
            "      train: {lr_scheduler: wsd, decay_steps: 1001}\n",
            "train.decay_steps",
        ),
        ("      train: {batch_size: 0}\n", "train.batch_size"),
        ("      train: {batch_size: auto}\n", "train.batch_size"),
        (
            "      train: {batch_size: automatic, gradient_accumulation: 2}\n",
            "train.batch_size",
        ),
        (
            "      train: {gradient_checkpointing: 3}\n",
            "train.gradient_checkpointing",
        ),
        ("      context: long\n", "context"),
        (
            "      train: {batch_size: 65536}\n      context: 4096\n",
            "train.batch_size",
        ),
        (
            "      train: {optimizer_params: {speed: 1}}\n",
            "train.optimizer_params.speed",
        ),
        ("      network: {type: lokr}\n", "network.type"),
        ("      network: {dropout: 1}\n", "network.dropout"),
        ("      network: {linear: 0}\n", "network.linear"),
        ("      network: {linear_alpha: 0}\n", "network.linear_alpha"),
        ("      sample: {prompts: ['']}\n", "sample.prompts"),
        ("      training_seed: -3\n", "training_seed"),
    ] {
        let found = errors(lines);
        assert!(
            found.contains(&format!("config.process[0].{key}: ")),
            "{lines}: {found}"
        );
    }
    for (dataset, expected) in [
        ("path: src, licenses: [mit license]", "identifiers of SPDX"),
        (
            "path: src, licenses: mit, kind: records",
            "no effect on `kind: records`",
        ),
    ] {
        let text = config("").replace("path: src", dataset);
        let found = parse(&text, Format::Yaml, Some("a.yaml"), &LoadOptions::default()).unwrap_err();
        assert!(found.to_string().contains(expected), "{found}");
    }
    let new = config("      network: {}\n").replace("starcoder2}", "starcoder2, from_config: true}");
    let found = parse(&new, Format::Yaml, Some("a.yaml"), &LoadOptions::default()).unwrap_err();
    assert!(
        found.to_string().contains("model.from_config: a new model has nothing"),
        "{found}"
    );
    let quantised = |network: &str| {
        let text = config(network).replace("starcoder2}", "starcoder2, quantize: true, qtype: nf9}");
        match parse(&text, Format::Yaml, Some("a.yaml"), &LoadOptions::default()) {
            Ok(job) => job.spec.unsupported().to_string(),
            Err(error) => error.to_string(),
        }
    };
    assert!(quantised("").contains("model.quantize: only a frozen model"));
    assert!(quantised("      network: {}\n").contains("model.qtype: `nf9`"));
}
