use super::super::tests::{MINIMAL, load_yaml, with_line_after};
use super::super::{Format, LoadOptions, parse};
use super::*;
use serde_json::json;

fn minimal() -> Json {
    serde_json::to_value(load_yaml(MINIMAL).unwrap().spec).unwrap()
}

fn error_for(json: &Json) -> String {
    JobSpec::from_json(&json.to_string()).unwrap_err().to_string()
}

/// The minimal job with another value at a JSON pointer.
fn with(pointer: &str, value: Json) -> Json {
    let mut json = minimal();
    *json.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer}")) = value;
    json
}

#[test]
fn a_job_survives_the_round_trip_through_json() {
    let spec = load_yaml(MINIMAL).unwrap().spec;
    assert_eq!(JobSpec::from_json(&minimal().to_string()).unwrap(), spec);
    // Rare keys, times, sizes, and a free map with a key named `rare`.
    let text = format!(
        "{MINIMAL}\n        do_signal_amplification: false\nmeta: {{rare: {{a: 1}}, kind: x}}\ncluster:\n  after: [a]\n  not_before: \
         2026-11-22T02:00:00.123Z\n  time_limit: 1h30m\n  memory_budget: 12GiB\n  labels: {{zone: x}}\n  memory_profile: balanced\n"
    );
    load_yaml(&text).unwrap();
}

#[test]
fn missing_keys_get_their_defaults_and_unknown_keys_are_ignored() {
    let json = json!({
        "job": "generate", "name": "a", "meta": {}, "config": {}, "cluster": {}, "newer": [1],
        "process": [{"type": "to_folder", "kind": {"generate": {
            "output_folder": "out", "model": {"name_or_path": "org/model", "of_a_newer_client": true},
            "generate": {"prompts": ["a cat"]}
        }}}]
    });
    let spec = JobSpec::from_json(&json.to_string()).unwrap();
    assert_eq!(spec.image_count(|_| None), Some(1));
}

#[test]
fn json_values_that_a_config_may_not_have_are_refused_with_their_key() {
    let train = "/process/0/kind/train";
    for (pointer, value, expected) in [
        (
            "/name".to_owned(),
            json!("../x"),
            "config.name: `../x` cannot name a folder",
        ),
        ("/name".to_owned(), json!("/etc/cron.d/x"), "a '/' is not allowed here"),
        (
            format!("{train}/name"),
            json!("../../x"),
            "job.yaml:5:7: config.process[0].name: `../../x` cannot name a folder",
        ),
        (format!("{train}/train/batch_size"), json!(0), "expected at least 1"),
        (
            format!("{train}/train/batch_size"),
            json!(1_000_000),
            "expected at most 65536",
        ),
        (
            format!("{train}/train/steps"),
            json!(u64::MAX),
            "config.process[0].train.steps: expected a whole number",
        ),
        (
            format!("{train}/datasets/0/num_repeats"),
            json!(4_000_000_000_u32),
            "expected at most 1000000",
        ),
        (
            format!("{train}/datasets/0/caption_ext"),
            json!("/../../../etc/passwd"),
            "cannot end the name of a file",
        ),
        (
            format!("{train}/sample/format"),
            json!("jpg/../../x"),
            "is not a known format",
        ),
        (format!("{train}/sample/width"), json!(70_000), "expected at most 16384"),
        (
            format!("{train}/network/linear"),
            json!(0),
            "the rank must be at least 1",
        ),
        (
            format!("{train}/training_folder"),
            json!(null),
            "needs a `training_folder`",
        ),
        ("/process".to_owned(), json!([]), "needs at least one process"),
        (
            "/process/0/type".to_owned(),
            json!("to_folder"),
            "`to_folder` is a process of `job: generate`",
        ),
        ("/job".to_owned(), json!("generate"), "is a process of `job: extension`"),
        (
            "/cluster/priority".to_owned(),
            json!("high"),
            "cluster.priority: expected a whole number",
        ),
        (
            "/cluster/time_limit".to_owned(),
            json!({"secs": 1, "nanos": 5}),
            "cluster.time_limit: expected a length of time",
        ),
        (
            "/cluster/split".to_owned(),
            json!({"parts": 0}),
            "cluster.split: expected a number of parts",
        ),
    ] {
        let error = error_for(&with(&pointer, value));
        assert!(error.contains(expected), "{pointer}: {error}");
    }
}

#[test]
fn json_values_that_no_config_produces_are_refused_with_their_key() {
    let train = "/process/0/kind/train";
    for (pointer, value, key) in [
        // The reader would normalise these values.
        (
            format!("{train}/trigger_word"),
            json!(""),
            "config.process[0].trigger_word",
        ),
        (
            format!("{train}/sample/format"),
            json!(".JPG"),
            "config.process[0].sample.format",
        ),
        (
            format!("{train}/model/dtype"),
            json!("bfloat16"),
            "config.process[0].model.dtype",
        ),
        (
            format!("{train}/network/conv"),
            json!(0),
            "config.process[0].network.conv",
        ),
        (
            "/config/process".to_owned(),
            minimal()["process"].clone(),
            "config.process",
        ),
        ("/config/name".to_owned(), json!("other"), "config.name"),
    ] {
        let error = error_for(&with(&pointer, value));
        assert!(
            error.contains(key) && error.contains("that no config can produce"),
            "{pointer}: {error}"
        );
    }
    let mut hidden = minimal();
    hidden["process"][0]["kind"]["train"]["rare"] = json!({"steps": 5});
    assert!(
        error_for(&hidden).contains("config.process[0].rare"),
        "{}",
        error_for(&hidden)
    );
    let mut other_kind = minimal();
    let body = other_kind["process"][0]["kind"]["train"].take();
    other_kind["process"][0]["kind"] = json!({"generate": body});
    JobSpec::from_json(&other_kind.to_string()).unwrap_err();
    for part in [json!({"from": 0, "to": 1}), json!({"from": 3, "to": 3})] {
        let mut cut = minimal();
        cut["part"] = part;
        assert!(error_for(&cut).contains("part"), "{}", error_for(&cut));
    }
    let mut file = minimal();
    file["file"] = json!("a\u{1b}[2Jb");
    assert!(error_for(&file).contains("`file`"));
}

#[test]
fn json_that_is_not_a_job_is_an_error() {
    for text in [
        "",
        "[]",
        "1",
        "{}",
        r#"{"job":"x"}"#,
        r#"{"job":"extension","name":"a","process":[]}"#,
        "{\"name\":",
    ] {
        let error = JobSpec::from_json(text).unwrap_err().to_string();
        assert!(!error.is_empty() && error.len() < 2_000, "{text}: {error}");
    }
}

#[test]
fn depth_and_number_of_values_are_limited() {
    let mut deep = json!(1);
    for _ in 0..MAX_JSON_DEPTH {
        deep = json!([deep]);
    }
    assert!(error_for(&with("/meta", json!({"a": deep}))).contains("inside each other"));
    let many = json!(vec![0; MAX_VALUES]);
    assert!(error_for(&with("/process/0/kind/train/datasets/0/resolution", many)).contains("more than 250000 values"));
    let train = "/process/0/kind/train";
    let data = minimal()["process"][0]["kind"]["train"]["datasets"][0].clone();
    for (pointer, value, expected) in [
        (
            format!("{train}/datasets"),
            json!(vec![data; 1_001]),
            "at most 1000 items",
        ),
        (
            format!("{train}/datasets/0/resolution"),
            json!(vec![64; 65]),
            "at most 64 items",
        ),
        (
            format!("{train}/sample/samples"),
            json!(vec![json!({}); 10_001]),
            "at most 10000 items",
        ),
        (
            "/process".to_owned(),
            json!(vec![minimal()["process"][0].clone(); 101]),
            "at most 100 items",
        ),
    ] {
        let error = error_for(&with(&pointer, value));
        assert!(error.contains(expected), "{pointer}: {error}");
    }
    let mut keys = minimal();
    for number in 0..2_000 {
        keys["process"][0]["kind"]["train"]["train"][format!("k{number}")] = json!(1);
    }
    JobSpec::from_json(&keys.to_string()).unwrap();
}

#[test]
fn with_changes_gives_the_same_job_as_the_changed_config() {
    let spec = load_yaml(MINIMAL).unwrap().spec;
    let (same, warnings) = spec.with_changes(&[]).unwrap();
    assert_eq!((same, warnings), (spec.clone(), Vec::new()));

    let text = format!("{MINIMAL}\ncluster:\n  time_limit: 1h30m\n  not_before: 2026-11-22T02:00:00.123Z\n");
    let spec = load_yaml(&text).unwrap().spec;
    let part = JobSpec {
        part: Some(super::super::spec::ImageRange { from: 0, to: 1 }),
        ..spec.clone()
    };
    let changes = [
        change("config.name", "another"),
        change("train.steps", "7"),
        change("cluster.time_limit", "10m"),
        // An alias, as in a config.
        change("train.dtype", "fp32"),
    ];
    let (changed, _) = part.with_changes(&changes).unwrap();
    let json = serde_json::to_value(&changed).unwrap();
    let train = &json["process"][0]["kind"]["train"]["train"];
    assert_eq!((&json["name"], &train["steps"]), (&"another".into(), &7.into()));
    assert_eq!(json["cluster"]["time_limit"]["secs"], 600);
    assert_eq!(
        (changed.part, changed.cluster.not_before),
        (None, spec.cluster.not_before)
    );
    assert!(!changed.positions.contains_key("config.name") && changed.positions.contains_key("job"));
    JobSpec::from_json(&json.to_string()).unwrap();

    for (key, value, expected) in [
        ("train.stepz", "1", "did you mean `steps`?"),
        ("train.steps", "many", "train.steps: expected"),
        ("config.name", "../up", "cannot name a folder"),
        ("datasets[7].folder_path", "x", "no `[7]` in a list"),
    ] {
        let error = spec.with_changes(&[change(key, value)]).unwrap_err().to_string();
        assert!(error.contains(expected), "{key}: {error}");
        assert!(
            error.starts_with("command line: ") && error.contains(key),
            "{key}: {error}"
        );
    }
}

#[test]
fn an_error_at_a_key_that_was_not_changed_names_the_changes() {
    let text = with_line_after("type: sd_trainer", "      trigger_word: cat");
    let text = format!("{text}        diff_output_preservation: true\n");
    let spec = load_yaml(&text).unwrap().spec;
    let changes = [change("train.steps", "7"), change("trigger_word", "''")];
    let error = spec.with_changes(&changes).unwrap_err().to_string();
    assert_eq!(
        error,
        "job.yaml:15:9: config.process[0].train.diff_output_preservation: needs a `trigger_word`; changed on the command line: \
         train.steps, trigger_word"
    );
}

fn change(key: &str, value: &str) -> Change {
    Change {
        key: key.to_owned(),
        value: value.to_owned(),
    }
}

/// The keys and messages of warnings.
fn keys_and_messages(warnings: &[Finding]) -> Vec<(&str, &str)> {
    warnings
        .iter()
        .map(|finding| (finding.key.as_str(), finding.message.as_str()))
        .collect()
}

/// Changes one key in the job and in its config. Both must give the same job, and the job must report every warning that only
/// the changed config has.
fn change_job_and_config(text: &str, key: &str, value: &str) -> JobSpec {
    let changes = [change(key, value)];
    let options = LoadOptions {
        changes: &changes,
        ..LoadOptions::default()
    };
    let before = load_yaml(text).unwrap();
    let mut config = parse(text, Format::Yaml, Some("job.yaml"), &options).unwrap_or_else(|e| panic!("{key}: {e}"));
    let (mut job, warnings) = before
        .spec
        .with_changes(&changes)
        .unwrap_or_else(|e| panic!("{key}: {e}"));
    // Positions may differ.
    (job.positions, config.spec.positions) = Default::default();
    assert_eq!(job, config.spec, "{key}={value}\n{text}");
    let news = keys_and_messages(&config.warnings)
        .into_iter()
        .filter(|one| !keys_and_messages(&before.warnings).contains(one));
    for one in news {
        assert!(
            keys_and_messages(&warnings).contains(&one),
            "{key}={value}: {one:?} is not reported: {warnings:?}"
        );
    }
    job
}

#[test]
fn changing_a_key_also_changes_the_keys_derived_from_it() {
    let network = |keys: &str| MINIMAL.replace("linear: 8", keys);
    let trained = |text: &str, key: &str, value: &str| {
        let job = change_job_and_config(text, key, value);
        job.process[0].trainer().unwrap().clone()
    };
    let of_network = |keys: &str, key: &str, value: &str| trained(&network(keys), key, value).network.unwrap();

    let prompts = with_line_after("type: sd_trainer", "      sample: {prompts: [a cat, a fox --seed 3]}");
    let sample = trained(&prompts, "sample.prompts[0]", "a dog").sample;
    assert_eq!((sample.samples[0].prompt.as_str(), sample.samples.len()), ("a dog", 2));
    let first = prompts.replace("sample:", "first_sample:");
    let sample = trained(&first, "first_sample.prompts[1]", "a dog")
        .first_sample
        .unwrap();
    assert_eq!(sample.samples[1].prompt, "a dog");

    assert_eq!(of_network("rank: 4", "network.linear", "16").linear, 16);
    assert_eq!(of_network("rank: 4", "network.rank", "16").linear, 16);
    assert_eq!(of_network("linear: 8", "network.alpha", "8").linear_alpha, 8.0);
    let conv = of_network("conv: 4", "network.conv", "8");
    assert_eq!((conv.conv, conv.conv_alpha), (Some(8), Some(8.0)));
    // A key that is `null` in the file counts as absent.
    let conv = of_network("conv: 4, conv_alpha: null", "network.conv", "8");
    assert_eq!((conv.conv, conv.conv_alpha), (Some(8), Some(8.0)));
    let conv = of_network("conv: 0", "network.conv", "8");
    assert_eq!((conv.conv, conv.conv_alpha), (Some(8), Some(8.0)));
    // A key of the file stays, even if it equals the derived value.
    assert_eq!(
        of_network("conv: 4, conv_alpha: 4", "network.conv", "8").conv_alpha,
        Some(4.0)
    );
    assert_eq!(
        of_network("alpha: 4, linear_alpha: 4", "network.alpha", "8").linear_alpha,
        // Except where it would hide the change.
        8.0
    );

    let legacy = with_line_after("folder_path: images", "          caption_type: txt");
    assert_eq!(
        trained(&legacy, "datasets[0].caption_type", "cap").datasets[0].caption_ext,
        "cap"
    );
    let controls = with_line_after("folder_path: images", "          control_path_1: a");
    let changed = trained(&controls, "datasets[0].control_path_1", "''");
    assert!(changed.datasets[0].control_path.is_empty());
    assert_eq!(
        trained(MINIMAL, "model.is_xl", "true").model.arch.name,
        super::super::arch::ArchName::Sdxl
    );
    let inherited = MINIMAL
        .replace("      training_folder: output\n", "")
        .replace("  name: cat\n", "  name: cat\n  training_folder: output\n");
    let changed = trained(&inherited, "config.training_folder", "elsewhere");
    assert_eq!(changed.training_folder.as_deref(), Some("elsewhere"));
}

#[test]
fn changing_dtype_or_model_dtype_of_an_image_job_changes_both() {
    let generating = |process: &str, model: &str| {
        format!(
            "job: generate\nconfig:\n  name: a\n  process:\n    - type: to_folder\n      output_folder: out\n{process}      model: \
             {{name_or_path: m{model}}}\n      generate: {{prompts: [a cat]}}\n"
        )
    };
    let img2img = |process: &str, model: &str| {
        format!(
            "job: extension\nconfig:\n  name: a\n  process:\n    - type: batch_img2img\n      output_folder: \
             out\n{process}      model: {{name_or_path: m{model}}}\n      datasets: [{{folder_path: d}}]\n"
        )
    };
    let formats = |job: &JobSpec| match &job.process[0].kind {
        ProcessKind::Generate(process) => [process.dtype, process.model.dtype],
        ProcessKind::Img2Img(process) => [process.dtype, process.model.dtype],
        other => panic!("{other:?}"),
    };
    for process in ["", "      dtype: bf16\n"] {
        for model in ["", ", dtype: bf16"] {
            for text in [generating(process, model), img2img(process, model)] {
                for key in ["model.dtype", "dtype"] {
                    let job = change_job_and_config(&text, key, "float32");
                    assert_eq!(formats(&job), [super::super::dtype::DType::F32; 2], "{key}\n{text}");
                }
                change_job_and_config(&text, "dtype", "null");
            }
        }
    }
}

#[test]
fn ordinary_keys_change_as_in_the_config() {
    let text = with_line_after(
        "type: sd_trainer",
        "      sample: {prompts: [a cat], neg: dark}\n      save: {save_every: 5}\n      trigger_word: ohwx",
    );
    for (key, value) in [
        ("config.name", "another"),
        ("train.steps", "7"),
        ("train.lr", "1e-4"),
        ("train.dtype", "bf16"),
        ("train.batch_size", "null"),
        ("train.optimizer_params.weight_decay", "0.1"),
        ("network.linear", "16"),
        ("network.dropout", "0.1"),
        ("network.linear_alpha", "4"),
        ("network.conv_alpha", "4"),
        ("network.network_kwargs.only_if_contains", "attn1"),
        ("model.name_or_path", "other"),
        ("model.arch", "sd1"),
        ("model.dtype", "float32"),
        ("datasets[0].folder_path", "others"),
        ("datasets[0].caption_ext", "cap"),
        ("datasets[0].resolution", "768"),
        ("save.save_every", "null"),
        ("sample.neg", "false"),
        ("sample.prompts", "null"),
        ("trigger_word", "''"),
        ("training_folder", "elsewhere"),
        ("cluster.priority", "3"),
        ("cluster.time_limit", "1h30m"),
        ("meta.note", "a"),
    ] {
        change_job_and_config(&text, key, value);
    }
}

#[test]
fn a_change_without_effect_is_warned_about_again() {
    let text = with_line_after(
        "type: sd_trainer",
        "      sample: {prompts: [a cat], samples: [{prompt: a fox}]}",
    );
    let spec = load_yaml(&text).unwrap().spec;
    let changed = change_job_and_config(&text, "sample.prompts[0]", "a dog");
    assert_eq!(changed.process[0].trainer().unwrap().sample.samples[0].prompt, "a fox");
    let (_, warnings) = spec.with_changes(&[change("sample.prompts[0]", "a dog")]).unwrap();
    assert_eq!(
        keys_and_messages(&warnings),
        [(
            "config.process[0].sample.prompts",
            "`samples` is given, so `prompts` is not used"
        )]
    );
    let (_, warnings) = spec.with_changes(&[change("train.steps", "7")]).unwrap();
    assert_eq!(warnings, [], "already reported when the job was read");
    let (_, warnings) = spec
        .with_changes(&[change("model.is_xl", "true"), change("model.arch", "sd1")])
        .unwrap();
    assert_eq!(
        keys_and_messages(&warnings),
        [("config.process[0].model.is_xl", "`arch: sd1` wins over `is_xl`")]
    );
}

#[test]
fn a_job_without_a_file_can_be_changed() {
    let text = MINIMAL.replace("linear: 8", "conv: 4, conv_alpha: 4, rank: 4, alpha: 2");
    let mut spec = load_yaml(&text).unwrap().spec;
    spec.positions.clear();
    let (same, _) = spec.with_changes(&[]).unwrap();
    assert_eq!(same, spec);
    let changes = [
        change("network.conv", "8"),
        change("network.rank", "16"),
        change("network.alpha", "4"),
    ];
    let (changed, warnings) = spec.with_changes(&changes).unwrap();
    let network = changed.process[0].trainer().unwrap().network.clone().unwrap();
    assert_eq!(
        (network.conv_alpha, network.linear, network.linear_alpha),
        (Some(8.0), 16, 4.0)
    );
    assert_eq!(warnings, []);
}
