//! Tests of whole configs: valid ones, invalid ones, and their messages.

use super::*;

/// Reads a config. A valid job must also be accepted as JSON.
pub(super) fn load_yaml(text: &str) -> Result<LoadedJob, JobError> {
    let job = parse(text, Format::Yaml, Some("job.yaml"), &LoadOptions::default())?;
    assert_valid_as_json(&job);
    Ok(job)
}

pub(super) fn assert_valid_as_json(job: &LoadedJob) {
    let json = serde_json::to_string(&job.spec).unwrap();
    match JobSpec::from_json(&json) {
        Ok(again) => assert_eq!(again, job.spec),
        Err(error) => panic!("{error}\n{json}"),
    }
}

pub(super) const MINIMAL: &str = "\
job: extension
config:
  name: cat
  process:
    - type: sd_trainer
      training_folder: output
      model:
        name_or_path: base
      network: {type: lora, linear: 8}
      datasets:
        - folder_path: images
      train:
        steps: 10
";

/// The minimal config with one line after the line that contains `after`.
pub(super) fn with_line_after(after: &str, line: &str) -> String {
    assert!(MINIMAL.contains(after), "{after}");
    MINIMAL
        .lines()
        .map(|l| {
            if l.contains(after) {
                format!("{l}\n{line}\n")
            } else {
                format!("{l}\n")
            }
        })
        .collect()
}

#[test]
fn a_minimal_config_gets_every_default() {
    let job = load_yaml(MINIMAL).unwrap();
    assert_eq!(job.warnings, []);
    assert_eq!(job.spec.name, "cat");
    let trainer = job.spec.process[0].trainer().unwrap();
    assert_eq!(trainer.train.steps, 10);
    assert_eq!(trainer.train.lr, 1e-6);
    assert_eq!(trainer.save.save_every, Some(1000));
    assert_eq!(trainer.network.as_ref().unwrap().linear, 8);
    assert_eq!(trainer.network.as_ref().unwrap().linear_alpha, 1.0);
    assert_eq!(trainer.sample.width, 512);
    let support = job.spec.unsupported();
    assert_eq!(support, Support::default());
    let json = serde_json::to_string(&job.spec).unwrap();
    assert_eq!(serde_json::from_str::<JobSpec>(&json).unwrap(), job.spec);
}

#[test]
fn all_errors_are_reported_together() {
    let text = MINIMAL.replace("10", "ten").replace("linear: 8", "linear: eight");
    let error = load_yaml(&text).unwrap_err();
    assert_eq!(
        error.findings().iter().map(|f| f.line.unwrap()).collect::<Vec<_>>(),
        [9, 13]
    );
}

#[test]
fn unknown_keys_and_nulls_that_replace_a_value_are_warnings() {
    let text = with_line_after(
        "steps: 10",
        "        something_else: 1\n        lr: null\n        max_loss: null\n        batch_size: 1",
    );
    let job = load_yaml(&text).unwrap();
    let found: Vec<(&str, u32)> = job.warnings.iter().map(|f| (f.key.as_str(), f.line.unwrap())).collect();
    assert_eq!(found.len(), 2);
    assert!(found.contains(&("config.process[0].train.lr", 15)));
    assert!(found.contains(&("config.process[0].train.something_else", 14)));
    assert_eq!(job.spec.process[0].trainer().unwrap().train.lr, 1e-6);
}

#[test]
fn variables_and_job_names_are_replaced() {
    let text = "\
# ${UNSET_IN_A_COMMENT}
job: extension
config:
  name: cat
  process:
    - type: sd_trainer
      name: '[name]_v2'
      training_folder: ${OUT}/x
      trigger_word: \"${NUMBER}\"
      model: {name_or_path: base}
      network: {type: lora}
      datasets: [{folder_path: 'data/[name]'}]
      train:
        steps: ${NUMBER}
";
    let env = |name: &str| match name {
        "OUT" => Some("/data".to_owned()),
        "NUMBER" => Some("42".to_owned()),
        _ => None,
    };
    let options = LoadOptions {
        env: &env,
        ..LoadOptions::default()
    };
    let job = parse(text, Format::Yaml, None, &options).unwrap();
    let trainer = job.spec.process[0].trainer().unwrap();
    assert_eq!(trainer.training_folder.as_deref(), Some("/data/x"));
    assert_eq!(trainer.train.steps, 42);
    assert_eq!(trainer.trigger_word.as_deref(), Some("42"));
    assert_eq!(trainer.name.as_deref(), Some("cat_v2"));
    assert_eq!(trainer.datasets[0].folder_path.as_deref(), Some("data/cat"));
    assert!(job.text.contains("${OUT}"), "the text is stored unexpanded");
    let options = LoadOptions {
        env: &env,
        name_override: Some("dog"),
        ..LoadOptions::default()
    };
    let job = parse(text, Format::Yaml, None, &options).unwrap();
    assert_eq!(job.spec.name, "cat");
    assert_eq!(job.spec.process[0].name(), Some("dog_v2"));
    let job = parse(
        &text.replace("name: cat", "name: '[name]'"),
        Format::Yaml,
        None,
        &options,
    )
    .unwrap();
    assert_eq!(job.spec.name, "dog");
}

#[test]
fn yaml_accepts_variables_anywhere() {
    let env = |name: &str| match name {
        "DIR" => Some("/data/my cats, all".to_owned()),
        "SIZE" => Some("64".to_owned()),
        "KEY" => Some("steps".to_owned()),
        _ => None,
    };
    let options = LoadOptions {
        env: &env,
        ..LoadOptions::default()
    };
    let text = MINIMAL
        .replace(
            "        - folder_path: images\n",
            "        - {folder_path: ${DIR}/a, resolution: [${SIZE}, 1${SIZE}]}\n",
        )
        .replace("steps: 10", "steps: ${SIZE}${SIZE} # ${NOT_SET}");
    let job = parse(&text, Format::Yaml, None, &options).unwrap();
    let trainer = job.spec.process[0].trainer().unwrap();
    let dataset = &trainer.datasets[0];
    assert_eq!(dataset.folder_path.as_deref(), Some("/data/my cats, all/a"));
    assert_eq!((dataset.resolution[0], dataset.resolution[1]), (64, 164));
    assert_eq!(trainer.train.steps, 6464);
    // An error quotes the text as written, and keys are not expanded.
    let twice = format!("{MINIMAL}${{KEY}}: 1\n${{KEY}}: 2\n");
    let error = parse(&twice, Format::Yaml, None, &options).unwrap_err();
    assert!(error.to_string().contains("`${KEY}` is given twice"), "{error}");
}

#[test]
fn only_a_quoted_value_gets_the_hint_about_quotes() {
    let wrong = |value: &str| {
        load_yaml(&MINIMAL.replace("steps: 10", &format!("steps: {value}")))
            .unwrap_err()
            .to_string()
    };
    assert!(wrong("\"10\"").contains("without quotes"));
    assert!(!wrong("08").contains("without quotes"), "{}", wrong("08"));
}

#[test]
fn secrets_are_not_written_into_the_job() {
    let token = "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH";
    let env = |name: &str| match name {
        "HF_TOKEN" => Some(token.to_owned()),
        "TRIGGER_TOKEN" => Some("ohwx cat".to_owned()),
        _ => None,
    };
    let options = LoadOptions {
        env: &env,
        ..LoadOptions::default()
    };
    let text = with_line_after("type: sd_trainer", "      trigger_word: ${TRIGGER_TOKEN}")
        + "meta:\n  hub: ${HF_TOKEN}\n  link: \"https://me:${HF_TOKEN}@host\"\n";
    let job = parse(&text, Format::Yaml, Some("job.yaml"), &options).unwrap();
    let json = serde_json::to_string(&job.spec).unwrap();
    assert!(!json.contains(token), "{json}");
    assert_eq!(job.spec.meta["hub"], "${HF_TOKEN}");
    assert_eq!(job.spec.meta["link"], "https://me:${HF_TOKEN}@host");
    let trainer = job.spec.process[0].trainer().unwrap();
    assert_eq!(
        trainer.trigger_word.as_deref(),
        Some("ohwx cat"),
        "a trigger is not a secret"
    );
    let keys: Vec<&str> = job.warnings.iter().map(|finding| finding.key.as_str()).collect();
    assert_eq!(keys, ["meta.hub", "meta.link"]);
    assert!(!format!("{:?}", job.warnings).contains(token));

    let written = format!("{MINIMAL}meta:\n  hub: {token}\n");
    let job = load_yaml(&written).unwrap();
    assert!(job.warnings[0].message.contains("access token"), "{:?}", job.warnings);
    assert!(!format!("{:?}", job.warnings).contains(token));
}

#[test]
fn yaml_anchors_and_merge_keys_are_resolved() {
    let text = "\
shared: &shared
  resolution: [512, 768]
  caption_ext: txt
job: extension
config:
  name: cat
  process:
    - type: sd_trainer
      training_folder: output
      model: {name_or_path: base}
      network: {type: lora}
      datasets:
        - <<: *shared
          folder_path: a
        - <<: [*shared]
          folder_path: b
          caption_ext: .cap
";
    let job = load_yaml(text).unwrap();
    assert_eq!(job.warnings.len(), 1, "only the unknown key `shared`");
    let trainer = job.spec.process[0].trainer().unwrap();
    let split = trainer.split_datasets();
    let seen: Vec<(&str, u32, &str)> = split
        .iter()
        .map(|d| (d.path().unwrap(), d.resolution[0], d.caption_ext.as_str()))
        .collect();
    assert_eq!(
        seen,
        [
            ("a", 512, ".txt"),
            ("a", 768, ".txt"),
            ("b", 512, ".cap"),
            ("b", 768, ".cap")
        ]
    );
}

#[test]
fn json_refuses_comments_and_jsonc_accepts_them() {
    let text = r#"{"job": "extension", "config": {"name": "cat", "process": [{
  "type": "sd_trainer", "training_folder": "output", "model": {"name_or_path": "base"},
  "network": {"type": "lora"}, "datasets": [{"folder_path": "x"}], "train": {"lr": 1e-4}
}]}}"#;
    let job = parse(text, Format::Json, None, &LoadOptions::default()).unwrap();
    assert_eq!(job.spec.process[0].trainer().unwrap().train.lr, 1e-4);
    let commented = text
        .replace("\"train\"", "// how\n  \"train\"")
        .replace("1e-4}", "1e-4,}");
    assert!(parse(&commented, Format::Jsonc, None, &LoadOptions::default()).is_ok());
    let error = parse(&commented, Format::Json, None, &LoadOptions::default()).unwrap_err();
    assert_eq!(error.findings()[0].line, Some(3));
    assert!(error.to_string().contains(".jsonc"), "{error}");
    let twice = text.replace("\"lr\": 1e-4", "\"lr\": 1e-4,\n   \"lr\": 2");
    let error = parse(&twice, Format::Json, None, &LoadOptions::default()).unwrap_err();
    let first = &error.findings()[0];
    assert_eq!(
        (first.line, first.column, first.key.as_str()),
        (Some(4), Some(4), "config.process[0].train.lr")
    );
    let wrong = text.replace("1e-4", "\"fast\"");
    let error = parse(&wrong, Format::Json, None, &LoadOptions::default()).unwrap_err();
    assert_eq!(
        (error.findings()[0].line, error.findings()[0].key.as_str()),
        (Some(3), "config.process[0].train.lr")
    );
}

#[test]
fn unsupported_keys_are_errors_or_warnings_with_their_line() {
    let text = with_line_after(
        "steps: 10",
        "        train_turbo: true\n        loss_type: mean_flow\n        optimizer: automagicexperiment\n        unet_lr: 1e-4\n        gradient_checkpointing: false\n        timestep_type: weighted\n        optimizer_params: {weight_decay: 0.01, speed: 9}",
    );
    let job = load_yaml(&text).unwrap();
    let support = job.spec.unsupported();
    let errors: Vec<(&str, u32)> = support
        .errors
        .iter()
        .map(|f| (f.key.rsplit("train.").next().unwrap(), f.line.unwrap()))
        .collect();
    assert!(errors.contains(&("train_turbo", 14)), "{support}");
    assert!(errors.contains(&("loss_type", 15)));
    assert!(errors.contains(&("optimizer", 16)));
    assert_eq!(errors.len(), 3, "{support}");
    assert!(support.has_unsupported);
    assert_eq!(support.warnings.len(), 1, "{support}");
    assert!(support.warnings[0].key.ends_with("unet_lr"));
    // Positions survive serialisation for the coordinator and the worker's child process.
    let json = serde_json::to_value(&job.spec).unwrap();
    let back: JobSpec = serde_json::from_value(json).unwrap();
    assert_eq!(back.unsupported(), support);
}

#[test]
fn unknown_optimizer_parameters_are_refused() {
    let text = with_line_after("steps: 10", "        optimizer_params: {weight_decay: 0.01, speed: 9}");
    let support = load_yaml(&text).unwrap().spec.unsupported();
    assert_eq!(support.errors.len(), 1);
    assert!(support.errors[0].message.contains("no such parameter; known: betas"));
    assert!(!support.has_unsupported);
    assert_eq!(support.errors[0].line, Some(14));
}

#[test]
fn inputs_lists_every_path_with_its_kind_and_key() {
    let text = with_line_after(
        "type: sd_trainer",
        "      sample:\n        samples:\n          - prompt: 'a --ctrl_img c.png'\n            ctrl_img_2: d.png",
    );
    let text = text.replace("linear: 8", "pretrained_lora_path: l.safetensors");
    let inputs = load_yaml(&text).unwrap().spec.inputs();
    let found: Vec<(&str, InputKind, &str)> = inputs
        .iter()
        .map(|i| (i.config_path.as_str(), i.kind, i.key.as_str()))
        .collect();
    for expected in [
        ("base", InputKind::Model, "config.process[0].model.name_or_path"),
        (
            "images",
            InputKind::Dataset,
            "config.process[0].datasets[0].folder_path",
        ),
        (
            "l.safetensors",
            InputKind::Lora,
            "config.process[0].network.pretrained_lora_path",
        ),
        (
            "c.png",
            InputKind::ControlImages,
            "config.process[0].sample.samples[0].prompt",
        ),
        (
            "d.png",
            InputKind::ControlImages,
            "config.process[0].sample.samples[0].ctrl_img_2",
        ),
    ] {
        assert!(found.contains(&expected), "{expected:?} not in {found:?}");
    }
    assert_eq!(found.len(), 5);
}

#[test]
fn configs_are_found_by_name_and_by_path() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("config")).unwrap();
    std::fs::write(dir.path().join("config/cat.yaml"), MINIMAL).unwrap();
    let options = LoadOptions {
        search_dir: Some(dir.path()),
        ..LoadOptions::default()
    };
    let absolute = dir.path().join("config/cat.yaml");
    for name in ["cat", "cat.yaml", "config/cat.yaml", absolute.to_str().unwrap()] {
        assert_eq!(load(name, &options).unwrap().path.unwrap(), absolute, "{name}");
    }
    let error = load("dog", &options).unwrap_err();
    assert!(error.to_string().contains("config/dog.yaml"), "{error}");
    std::fs::write(dir.path().join("config/cat.txt"), MINIMAL).unwrap();
    assert!(matches!(
        load("config/cat.txt", &options),
        Err(JobError::UnknownFormat { .. })
    ));
    std::fs::write(dir.path().join("config/bad.yaml"), b"job: a\nname: caf\xe9\n").unwrap();
    let error = load("bad", &options).unwrap_err();
    assert_eq!(
        (error.findings()[0].line, error.findings()[0].column),
        (Some(2), Some(10))
    );
    std::fs::write(dir.path().join(".env"), "TOKEN=abc\n").unwrap();
    assert_eq!(
        dotenv(dir.path()).unwrap().get("TOKEN").map(String::as_str),
        Some("abc")
    );
}

/// The keys of a section with their defaults, as lines of a config.
fn defaults_of(section: &schema::SectionInfo, indent: &str) -> String {
    let written = |field: &&schema::FieldInfo| {
        // Leaves out defaults that are descriptions, keys set below, and nested sections.
        let is_text = field.default.contains('`') || (field.default.contains(' ') && !field.default.starts_with('['));
        let given = ["required", "off", "at most 6"].contains(&field.default.as_str());
        !field.rare && !is_text && !given && field.nested.is_none()
    };
    section
        .fields
        .iter()
        .filter(written)
        .map(|field| format!("{indent}{}: {}\n", field.key, field.default))
        .collect()
}

#[test]
fn a_config_with_every_documented_default_is_valid() {
    let keys = |section: schema::SectionInfo| defaults_of(&section, "        ");
    let text = format!(
        "job: extension\nconfig:\n  name: cat\n  process:\n    - type: sd_trainer\n      training_folder: output\n      \
         network:\n{}      train:\n{}      save:\n{}      sample:\n{}      logging:\n{}      model:\n        \
         name_or_path: base\n{}      datasets:\n      - folder_path: a\n{}",
        keys(network::NetworkConfig::describe()),
        keys(train::TrainConfig::describe()),
        keys(save::SaveConfig::describe()),
        keys(sample::SampleConfig::describe()),
        keys(logging::LoggingConfig::describe()),
        keys(model::ModelConfig::describe()),
        keys(dataset::DatasetConfig::describe()).replace("        folder_path: null\n", ""),
    );
    assert!(text.lines().count() > 250, "{}", text.lines().count());
    let job = load_yaml(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    assert_eq!(job.warnings, []);
    assert_eq!(job.spec.unsupported(), Support::default());
    let minimal = load_yaml(
        &MINIMAL
            .replace("images", "a")
            .replace("linear: 8", "linear: 4")
            .replace("steps: 10", "steps: 1000"),
    );
    assert_eq!(
        job.spec.process,
        minimal.unwrap().spec.process,
        "the documented default is the default"
    );
}

#[test]
fn invalid_scheduler_and_optimizer_parameters_are_refused() {
    for (line, part) in [
        (
            "{lr_scheduler: cosine, lr_scheduler_params: {eta_min: low}}",
            "expected a number",
        ),
        (
            "{lr_scheduler: cosine, lr_scheduler_params: {gamma: 0.1}}",
            "`cosine` has no such parameter",
        ),
        ("{optimizer_params: {betas: [0.9, 1.5]}}", "two numbers"),
        (
            "{optimizer: adam, optimizer_params: {amsgrad: true}}",
            "not supported yet",
        ),
        ("{noise_scheduler: k_euler}", "Karras"),
    ] {
        let text = MINIMAL.replace("train:\n        steps: 10", &format!("train: {line}"));
        let support = load_yaml(&text).unwrap().spec.unsupported();
        assert_eq!(support.errors.len(), 1, "{line}: {support}");
        assert!(support.errors[0].message.contains(part), "{line}: {support}");
    }
    let fine = "train: {lr_scheduler: polynomial, lr_scheduler_params: {power: 2, num_warmup_steps: 10}, optimizer_params: {betas: [0.9, 0.99], weight_decay: 1e-4}, content_or_style: style}";
    let text = MINIMAL.replace("train:\n        steps: 10", fine);
    assert_eq!(load_yaml(&text).unwrap().spec.unsupported(), Support::default());
}

#[test]
fn yaml_accepts_comments_anywhere() {
    let text = MINIMAL.replace(
        "      model:",
        "#      performance_log_every: 1000\n      # a comment\n      model:",
    );
    let text = format!("# a note: with a colon\n\n---\n{text}# the end\n");
    let job = load_yaml(&text).unwrap();
    assert_eq!(job.warnings, []);
    assert_eq!(job.spec.positions["config.process[0].model"].0, 12);
}

#[test]
fn a_missing_quote_in_a_list_of_prompts_is_reported_at_its_line() {
    let sample = "      sample:\n        prompts:\n          - \"a bear\n          - \"a fox\"\n          - \"a cat\"";
    let error = load_yaml(&with_line_after("type: sd_trainer", sample)).unwrap_err();
    let first = &error.findings()[0];
    assert!(first.message.contains("a quote is probably not closed"), "{error}");
    assert!((8..=9).contains(&first.line.unwrap()), "{error}");
}

#[test]
fn a_value_equal_to_the_effective_default_is_not_reported() {
    let text = with_line_after(
        "name_or_path: base",
        "        extras_name_or_path: base\n        quantize_te: false\n        layer_offloading: false",
    );
    assert_eq!(load_yaml(&text).unwrap().spec.unsupported(), Support::default());
}

#[test]
fn unknown_quantization_types_and_options_are_refused() {
    let model = |keys: &str| {
        let spec = load_yaml(&with_line_after("name_or_path: base", keys)).unwrap().spec;
        let errors: Vec<String> = spec.unsupported().errors.iter().map(ToString::to_string).collect();
        errors
    };
    for fine in [
        "quantize: true",
        "qtype: uint4",
        "quantize: true\n        qtype: qfloat8|adapter.safetensors",
        "quantize: true\n        qtype: QINT8\n        qtype_te: nf4",
        "quantize: true\n        quantize_kwargs: {exclude: [\"*.attn1.*\", proj_out]}",
    ] {
        assert_eq!(model(&format!("        {fine}")), [""; 0], "{fine}");
    }
    for (wrong, part) in [
        (
            "quantize: true\n        qtype: uint4",
            "`uint4` does not work yet; expected one of float8",
        ),
        (
            "quantize: true\n        quantize_te: true\n        qtype_te: qfloat8|someone/adapter",
            "accuracy recovery adapter",
        ),
        ("quantize_te: true\n        qtype_te: \"\"", "qtype_te"),
        (
            "quantize: true\n        quantize_kwargs: {exclude: 3}",
            "a list of names",
        ),
        ("quantize: true\n        quantize_kwargs: {group_size: 3}", "group_size"),
    ] {
        let errors = model(&format!("        {wrong}"));
        assert!(errors.len() == 1 && errors[0].contains(part), "{wrong}: {errors:?}");
    }
}

#[test]
fn parts_from_elsewhere_are_for_families_that_take_them() {
    let errors = |arch: &str, key: &str| {
        let line = format!("        arch: {arch}\n        {key}: other");
        let spec = load_yaml(&with_line_after("name_or_path: base", &line)).unwrap().spec;
        let errors: Vec<String> = spec.unsupported().errors.iter().map(ToString::to_string).collect();
        errors
    };
    for key in ["te_name_or_path", "extras_name_or_path"] {
        for arch in ["flux", "sd3", "chroma", "zimage"] {
            assert_eq!(errors(arch, key), [""; 0], "{arch}, {key}");
        }
        let refused = errors("sdxl", key);
        assert!(
            refused.len() == 1
                && refused[0].contains(key)
                && refused[0].contains("Stable Diffusion 3.5 and Z-Image take parts"),
            "{refused:?}"
        );
    }
}
