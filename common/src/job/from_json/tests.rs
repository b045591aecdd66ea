use super::super::tests::{MINIMAL, yaml};
use super::*;
use serde_json::json;

fn minimal() -> Json {
    serde_json::to_value(yaml(MINIMAL).unwrap().spec).unwrap()
}

fn refusal(json: &Json) -> String {
    JobSpec::from_json(&json.to_string()).unwrap_err().to_string()
}

/// The minimal job with another value at a place of its JSON.
fn with(pointer: &str, value: Json) -> Json {
    let mut json = minimal();
    *json.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer}")) = value;
    json
}

#[test]
fn a_job_that_was_read_is_read_again() {
    let spec = yaml(MINIMAL).unwrap().spec;
    assert_eq!(JobSpec::from_json(&minimal().to_string()).unwrap(), spec);
    // Seldom used keys, times, sizes, and a free map that has a key like one of ours.
    let text = format!(
        "{MINIMAL}\n        do_signal_amplification: false\nmeta: {{rare: {{a: 1}}, kind: x}}\ncluster:\n  after: [a]\n  not_before: \
         2026-11-22T02:00:00.123Z\n  time_limit: 1h30m\n  memory_budget: 12GiB\n  labels: {{zone: x}}\n  memory_profile: balanced\n"
    );
    yaml(&text).unwrap();
}

#[test]
fn keys_that_are_left_out_have_their_defaults_and_unknown_ones_are_ignored() {
    let json = json!({
        "job": "generate", "name": "a", "meta": {}, "config": {}, "cluster": {}, "newer": [1],
        "process": [{"type": "to_folder", "kind": {"generate": {
            "output_folder": "out", "model": {"name_or_path": "org/model", "of_a_newer_client": true},
            "generate": {"prompts": ["a cat"]}
        }}}]
    });
    let spec = JobSpec::from_json(&json.to_string()).unwrap();
    assert_eq!(spec.pictures(|_| None), Some(1));
}

#[test]
fn what_reading_refuses_is_refused_in_json_too_with_its_place() {
    let train = "/process/0/kind/train";
    for (pointer, value, said) in [
        (
            "/name".to_owned(),
            json!("../x"),
            "config.name: `../x` cannot name a folder",
        ),
        ("/name".to_owned(), json!("/etc/cron.d/x"), "a '/' has no place here"),
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
        let error = refusal(&with(&pointer, value));
        assert!(error.contains(said), "{pointer}: {error}");
    }
}

#[test]
fn values_that_reading_never_gives_are_refused_with_their_key() {
    let train = "/process/0/kind/train";
    for (pointer, value, key) in [
        // `name_or_path` and the like would be normalised by the reader.
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
        let error = refusal(&with(&pointer, value));
        assert!(
            error.contains(key) && error.contains("that no config gives this key"),
            "{pointer}: {error}"
        );
    }
    let mut hidden = minimal();
    hidden["process"][0]["kind"]["train"]["rare"] = json!({"steps": 5});
    assert!(
        refusal(&hidden).contains("config.process[0].rare"),
        "{}",
        refusal(&hidden)
    );
    let mut other_kind = minimal();
    let body = other_kind["process"][0]["kind"]["train"].take();
    other_kind["process"][0]["kind"] = json!({"generate": body});
    JobSpec::from_json(&other_kind.to_string()).unwrap_err();
    for part in [json!({"from": 0, "to": 1}), json!({"from": 3, "to": 3})] {
        let mut cut = minimal();
        cut["part"] = part;
        assert!(refusal(&cut).contains("part"), "{}", refusal(&cut));
    }
    let mut file = minimal();
    file["file"] = json!("a\u{1b}[2Jb");
    assert!(refusal(&file).contains("`file`"));
}

#[test]
fn what_is_no_job_says_so() {
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
fn depth_and_number_of_values_are_bounded() {
    let mut deep = json!(1);
    for _ in 0..MAX_JSON_DEPTH {
        deep = json!([deep]);
    }
    assert!(refusal(&with("/meta", json!({"a": deep}))).contains("inside each other"));
    let many = json!(vec![0; MAX_VALUES]);
    assert!(refusal(&with("/process/0/kind/train/datasets/0/resolution", many)).contains("more than 250000 values"));
    let train = "/process/0/kind/train";
    let data = minimal()["process"][0]["kind"]["train"]["datasets"][0].clone();
    for (pointer, value, said) in [
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
        let error = refusal(&with(&pointer, value));
        assert!(error.contains(said), "{pointer}: {error}");
    }
    let mut keys = minimal();
    for number in 0..2_000 {
        keys["process"][0]["kind"]["train"]["train"][format!("k{number}")] = json!(1);
    }
    JobSpec::from_json(&keys.to_string()).unwrap();
}

#[test]
fn a_job_is_changed_as_its_config_would_be() {
    let change = |key: &str, value: &str| Change {
        key: key.to_owned(),
        value: value.to_owned(),
    };
    let spec = yaml(MINIMAL).unwrap().spec;
    let (same, warnings) = spec.changed(&[]).unwrap();
    assert_eq!((same, warnings), (spec.clone(), Vec::new()));

    let text = format!("{MINIMAL}\ncluster:\n  time_limit: 1h30m\n  not_before: 2026-11-22T02:00:00.123Z\n");
    let spec = yaml(&text).unwrap().spec;
    let part = JobSpec {
        part: Some(super::super::spec::Part { from: 0, to: 1 }),
        ..spec.clone()
    };
    let changes = [
        change("config.name", "another"),
        change("train.steps", "7"),
        change("cluster.time_limit", "10m"),
        // An abbreviation, as a config may have it.
        change("train.dtype", "fp32"),
    ];
    let (changed, _) = part.changed(&changes).unwrap();
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

    for (key, value, said) in [
        ("train.stepz", "1", "did you mean `steps`?"),
        ("train.steps", "many", "train.steps: expected"),
        ("config.name", "../up", "cannot name a folder"),
        ("datasets[7].folder_path", "x", "no `[7]` in a list"),
    ] {
        let error = spec.changed(&[change(key, value)]).unwrap_err().to_string();
        assert!(error.contains(said), "{key}: {error}");
    }
}
