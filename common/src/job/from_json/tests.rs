use super::super::tests::{MINIMAL, with as with_line, yaml};
use super::super::{Format, LoadOptions, parse};
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
    assert_eq!(spec.images(|_| None), Some(1));
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

fn change(key: &str, value: &str) -> Change {
    Change {
        key: key.to_owned(),
        value: value.to_owned(),
    }
}

/// What is said of a job beside its values.
fn said(warnings: &[Finding]) -> Vec<(&str, &str)> {
    warnings
        .iter()
        .map(|finding| (finding.key.as_str(), finding.message.as_str()))
        .collect()
}

/// Changes one key of the job that a config became, and of the config: the same has to come out, and whatever is said of the
/// changed config alone.
fn changed_both_ways(text: &str, key: &str, value: &str) -> JobSpec {
    let changes = [change(key, value)];
    let options = LoadOptions {
        changes: &changes,
        ..LoadOptions::default()
    };
    let before = yaml(text).unwrap();
    let mut config = parse(text, Format::Yaml, Some("job.yaml"), &options).unwrap_or_else(|e| panic!("{key}: {e}"));
    let (mut job, warnings) = before.spec.changed(&changes).unwrap_or_else(|e| panic!("{key}: {e}"));
    // The places of what is not in the file.
    (job.positions, config.spec.positions) = Default::default();
    assert_eq!(job, config.spec, "{key}={value}\n{text}");
    let news = said(&config.warnings)
        .into_iter()
        .filter(|one| !said(&before.warnings).contains(one));
    for one in news {
        assert!(
            said(&warnings).contains(&one),
            "{key}={value}: {one:?} is not said: {warnings:?}"
        );
    }
    job
}

#[test]
fn keys_that_others_are_derived_from_take_effect_when_a_job_is_changed() {
    let network = |keys: &str| MINIMAL.replace("linear: 8", keys);
    let trained = |text: &str, key: &str, value: &str| {
        let job = changed_both_ways(text, key, value);
        job.process[0].trainer().unwrap().clone()
    };
    let of_network = |keys: &str, key: &str, value: &str| trained(&network(keys), key, value).network.unwrap();

    let prompts = with_line("type: sd_trainer", "      sample: {prompts: [a cat, a fox --seed 3]}");
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
    // A key that is `null` in the file was not given.
    let conv = of_network("conv: 4, conv_alpha: null", "network.conv", "8");
    assert_eq!((conv.conv, conv.conv_alpha), (Some(8), Some(8.0)));
    let conv = of_network("conv: 0", "network.conv", "8");
    assert_eq!((conv.conv, conv.conv_alpha), (Some(8), Some(8.0)));
    // What was written stays, also where it is what would be derived.
    assert_eq!(
        of_network("conv: 4, conv_alpha: 4", "network.conv", "8").conv_alpha,
        Some(4.0)
    );
    assert_eq!(
        of_network("alpha: 4, linear_alpha: 4", "network.alpha", "8").linear_alpha,
        4.0
    );

    let legacy = with_line("folder_path: images", "          caption_type: txt");
    assert_eq!(
        trained(&legacy, "datasets[0].caption_type", "cap").datasets[0].caption_ext,
        "cap"
    );
    let controls = with_line("folder_path: images", "          control_path_1: a");
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
fn the_number_format_of_a_model_that_draws_is_the_one_that_was_set() {
    let drawing = |process: &str, model: &str| {
        format!(
            "job: generate\nconfig:\n  name: a\n  process:\n    - type: to_folder\n      output_folder: out\n{process}      model: \
             {{name_or_path: m{model}}}\n      generate: {{prompts: [a cat]}}\n"
        )
    };
    let redrawing = |process: &str, model: &str| {
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
            for text in [drawing(process, model), redrawing(process, model)] {
                for key in ["model.dtype", "dtype"] {
                    let job = changed_both_ways(&text, key, "float32");
                    assert_eq!(formats(&job), [super::super::dtype::DType::F32; 2], "{key}\n{text}");
                }
                changed_both_ways(&text, "dtype", "null");
            }
        }
    }
}

#[test]
fn other_keys_are_changed_as_in_the_config() {
    let text = with_line(
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
        changed_both_ways(&text, key, value);
    }
}

#[test]
fn a_change_without_effect_is_said_also_where_it_was_said_before() {
    let text = with_line(
        "type: sd_trainer",
        "      sample: {prompts: [a cat], samples: [{prompt: a fox}]}",
    );
    let spec = yaml(&text).unwrap().spec;
    let changed = changed_both_ways(&text, "sample.prompts[0]", "a dog");
    assert_eq!(changed.process[0].trainer().unwrap().sample.samples[0].prompt, "a fox");
    let (_, warnings) = spec.changed(&[change("sample.prompts[0]", "a dog")]).unwrap();
    assert_eq!(
        said(&warnings),
        [(
            "config.process[0].sample.prompts",
            "`samples` is given, so `prompts` is not used"
        )]
    );
    let (_, warnings) = spec.changed(&[change("train.steps", "7")]).unwrap();
    assert_eq!(warnings, [], "it was said when the job was read");
    let (_, warnings) = spec
        .changed(&[change("model.is_xl", "true"), change("model.arch", "sd1")])
        .unwrap();
    assert_eq!(
        said(&warnings),
        [("config.process[0].model.is_xl", "`arch: sd1` wins over `is_xl`")]
    );
}

#[test]
fn a_job_that_came_from_no_file_is_changed_by_its_values() {
    let text = MINIMAL.replace("linear: 8", "conv: 4, conv_alpha: 4, rank: 4, alpha: 2");
    let mut spec = yaml(&text).unwrap().spec;
    spec.positions.clear();
    let (same, _) = spec.changed(&[]).unwrap();
    assert_eq!(same, spec);
    let changes = [
        change("network.conv", "8"),
        change("network.rank", "16"),
        change("network.alpha", "4"),
    ];
    let (changed, warnings) = spec.changed(&changes).unwrap();
    let network = changed.process[0].trainer().unwrap().network.clone().unwrap();
    assert_eq!(
        (network.conv_alpha, network.linear, network.linear_alpha),
        (Some(8.0), 16, 4.0)
    );
    assert_eq!(warnings, []);
}
