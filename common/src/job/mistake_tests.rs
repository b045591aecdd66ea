//! Common mistakes in configs, with the line, the key and the message of the expected error.

use super::tests::{MINIMAL, load_yaml, with_line_after};

/// (what, config, line, key, part of the message)
fn mistakes() -> Vec<(&'static str, String, u32, &'static str, &'static str)> {
    vec![
        (
            "tab",
            "job: extension\nconfig:\n\tname: x\n".into(),
            3,
            "",
            "tab in the indentation",
        ),
        (
            "tab deep",
            with_line_after("type: sd_trainer", "\t  device: cpu"),
            6,
            "",
            "tab in the indentation",
        ),
        (
            "push without a repository",
            with_line_after("training_folder: output", "      save: {push_to_hub: true}"),
            7,
            "config.process[0].save.push_to_hub",
            "needs `save.hf_repo_id`",
        ),
        (
            "push to a path",
            with_line_after(
                "training_folder: output",
                "      save: {push_to_hub: true, hf_repo_id: ../cat}",
            ),
            7,
            "config.process[0].save.hf_repo_id",
            "expected USER/NAME",
        ),
        (
            "duplicate",
            with_line_after("steps: 10", "        steps: 20"),
            14,
            "config.process[0].train.steps",
            "given twice",
        ),
        (
            "text for number",
            MINIMAL.replace("10", "ten"),
            13,
            "config.process[0].train.steps",
            "expected a whole number",
        ),
        (
            "quoted number",
            MINIMAL.replace("10", "'10'"),
            13,
            "config.process[0].train.steps",
            "without quotes",
        ),
        (
            "negative",
            MINIMAL.replace("10", "-1"),
            13,
            "config.process[0].train.steps",
            "whole number from 0",
        ),
        (
            "too large",
            MINIMAL.replace("linear: 8", "linear: 5000000000"),
            9,
            "config.process[0].network.linear",
            "whole number from 0 to 4294967295",
        ),
        (
            "fraction",
            MINIMAL.replace("10", "1.5"),
            13,
            "config.process[0].train.steps",
            "whole number",
        ),
        (
            "list for map",
            MINIMAL.replace("{type: lora, linear: 8}", "[1]"),
            9,
            "config.process[0].network",
            "a map",
        ),
        (
            "a LoRA below a full fine-tune",
            MINIMAL.replace(
                "      network: {type: lora, linear: 8}",
                "        lora_path: a.safetensors",
            ),
            9,
            "config.process[0].model.lora_path",
            "needs a `network`",
        ),
        (
            "infinite",
            with_line_after("steps: 10", "        lr: .inf"),
            14,
            "config.process[0].train.lr",
            "finite",
        ),
        (
            "near miss",
            with_line_after("steps: 10", "        batch_sise: 2"),
            14,
            "config.process[0].train.batch_sise",
            "did you mean `batch_size`",
        ),
        (
            "near miss of rare",
            with_line_after("steps: 10", "        train_turboo: true"),
            14,
            "config.process[0].train.train_turboo",
            "`train_turbo`",
        ),
        (
            "optimizer",
            with_line_after("steps: 10", "        optimizer: adamww"),
            14,
            "config.process[0].train.optimizer",
            "Did you mean `adamw`",
        ),
        (
            "None",
            MINIMAL.replace("10", "None"),
            13,
            "config.process[0].train.steps",
            "found the text \"None\", which YAML writes as null",
        ),
        (
            "arch",
            with_line_after("name_or_path: base", "        arch: sd17"),
            9,
            "config.process[0].model.arch",
            "Known: sd1, sd2",
        ),
        (
            "no type",
            MINIMAL.replace("type: sd_trainer", "kind: sd_trainer"),
            5,
            "config.process[0]",
            "needs the key `type`",
        ),
        (
            "unknown type",
            MINIMAL.replace("sd_trainer", "sd_trainr"),
            5,
            "config.process[0].type",
            "Did you mean `sd_trainer`",
        ),
        (
            "wrong job",
            MINIMAL.replace("job: extension", "job: generate"),
            5,
            "config.process[0].type",
            "`job: extension`",
        ),
        (
            "no job",
            MINIMAL.replace("job: extension\n", ""),
            1,
            "job",
            "needs the key `job`",
        ),
        (
            "no config",
            "job: extension\n".into(),
            1,
            "config",
            "needs the key `config`",
        ),
        (
            "no name",
            MINIMAL.replace("  name: cat\n", ""),
            2,
            "config.name",
            "needs a `name`",
        ),
        (
            "no model",
            MINIMAL.replace("        name_or_path: base\n", "        dtype: bf16\n"),
            7,
            "config.process[0].model.name_or_path",
            "needs the key",
        ),
        (
            "no process",
            "job: extension\nconfig: {name: x, process: []}\n".into(),
            2,
            "config.process",
            "at least one",
        ),
        (
            "no data",
            MINIMAL.replace("      datasets:\n        - folder_path: images\n", ""),
            5,
            "config.process[0].datasets",
            "at least one data set",
        ),
        (
            "folder",
            MINIMAL.replace("name: cat", "name: a/b"),
            3,
            "config.name",
            "cannot name a folder",
        ),
        (
            "truth",
            MINIMAL.replace("name: cat", "name: yes"),
            3,
            "config.name",
            "`yes`, which YAML 1.1 reads as the truth value true; put it in quotes",
        ),
        (
            "variable",
            MINIMAL.replace("images", "${NOWHERE}/x"),
            11,
            "config.process[0].datasets[0].folder_path",
            "`NOWHERE` is not set",
        ),
        (
            "flag",
            with_line_after("type: sd_trainer", "      sample: {prompts: ['a cat --w wide']}"),
            6,
            "config.process[0].sample.prompts[0]",
            "`--w` expects a whole number",
        ),
        (
            "unclosed quote",
            MINIMAL.replace("name: cat", "name: \"cat"),
            0,
            "",
            "not valid YAML",
        ),
        (
            "tab below empty lines",
            MINIMAL.replace("      network:", "\n\n\t      network:"),
            11,
            "",
            "tab in the indentation",
        ),
        (
            "no colon",
            MINIMAL.replace("training_folder: output", "training_folder output"),
            6,
            "",
            "line 6 has no colon after its key",
        ),
        (
            "no colon after the first key",
            MINIMAL.replace("name: cat", "name cat"),
            4,
            "",
            "line 3 has no colon after its key",
        ),
        (
            "open bracket",
            with_line_after("folder_path: images", "          resolution: [512, 768"),
            12,
            "",
            "the bracket `[` is not closed in this line",
        ),
        (
            "open brace",
            MINIMAL.replace("linear: 8}", "linear: 8 # it's {one"),
            9,
            "",
            "the bracket `{` is not closed in this line",
        ),
        (
            "error between brackets",
            MINIMAL.replace(
                "lora, linear: 8}",
                "lora,\n        linear: 8 alpha: 2,\n        conv: 4}",
            ),
            10,
            "",
            "a comma, or the closing bracket, is missing before this place",
        ),
        (
            "dash without a space",
            format!("{MINIMAL}      sample:\n        prompts:\n          - a cat\n          -a dog\n        seed: 1\n"),
            17,
            "",
            "a dash that begins an item needs a space after it",
        ),
        (
            "colon without a space",
            MINIMAL.replace("steps: 10", "steps:10"),
            12,
            "config.process[0].train",
            "YAML needs a space after a colon",
        ),
        (
            "colon in a prompt",
            with_line_after(
                "type: sd_trainer",
                "      sample:\n        prompts:\n          - a cat: big",
            ),
            8,
            "config.process[0].sample.prompts[0]",
            "put a text with a colon in quotes",
        ),
        (
            "backslash",
            MINIMAL.replace("base", "\"C:\\models\""),
            8,
            "",
            "a backslash begins an escape",
        ),
        (
            "text after a bracket",
            with_line_after(
                "type: sd_trainer",
                "      sample:\n        prompts:\n          - [trigger] in a park",
            ),
            8,
            "",
            "a value that begins with a bracket ends with it",
        ),
        (
            "text that begins with a star",
            with_line_after(
                "type: sd_trainer",
                "      sample:\n        prompts:\n          - *cat* on a bench",
            ),
            8,
            "",
            "text that begins with `*` needs quotes",
        ),
        (
            "text that begins with an at sign",
            with_line_after("type: sd_trainer", "      sample:\n        prompts:\n          - @cat"),
            8,
            "",
            "text that begins with `@` needs quotes",
        ),
        (
            "text after a quote",
            with_line_after(
                "type: sd_trainer",
                "      sample:\n        prompts:\n          - 'it's a cat'",
            ),
            8,
            "",
            "the text goes on after its closing quote",
        ),
        (
            "two documents",
            format!("{MINIMAL}---\njob: x\n"),
            14,
            "",
            "second document",
        ),
        (
            "python tag",
            MINIMAL.replace("images", "!!python/object:os.system x"),
            11,
            "config.process[0].datasets[0].folder_path",
            "no meaning",
        ),
        ("empty", String::new(), 1, "", "empty"),
        ("scalar", "hello".into(), 1, "", "expected a map"),
        (
            "poi",
            with_line_after("- folder_path", "          poi: {x: 1}"),
            12,
            "config.process[0].datasets[0].poi",
            "was removed",
        ),
        (
            "dataset type",
            with_line_after("- folder_path", "          type: video"),
            12,
            "config.process[0].datasets[0].type",
            "not a known dataset type",
        ),
        (
            "two accumulations",
            with_line_after(
                "steps: 10",
                "        gradient_accumulation: 2\n        gradient_accumulation_steps: 2",
            ),
            15,
            "config.process[0].train.gradient_accumulation_steps",
            "together",
        ),
        (
            "cluster",
            format!("{MINIMAL}cluster: {{device: tpu}}\n"),
            14,
            "cluster.device",
            "Known: cuda, metal, cpu",
        ),
        ("recursive alias", "a: &a [*a]\n".into(), 0, "", ""),
        (
            "huge image",
            with_line_after(
                "type: sd_trainer",
                "      sample: {width: 1000000, samples: [{prompt: a}]}",
            ),
            6,
            "config.process[0].sample.width",
            "expected at most 16384, found 1000000",
        ),
        (
            "huge sample",
            with_line_after(
                "type: sd_trainer",
                "      sample:\n        samples:\n          - prompt: a\n            height: 16385",
            ),
            9,
            "config.process[0].sample.samples[0].height",
            "expected at most 16384, found 16385",
        ),
        (
            "huge flag",
            with_line_after("type: sd_trainer", "      sample: {prompts: ['a cat --w 4000000000']}"),
            6,
            "config.process[0].sample.prompts[0]",
            "`--w` expects at most 16384, found 4000000000",
        ),
        (
            "huge rank",
            MINIMAL.replace("linear: 8", "linear: 2147483648"),
            9,
            "config.process[0].network.linear",
            "expected at most 16384, found 2147483648",
        ),
        (
            "huge older rank",
            MINIMAL.replace("linear: 8", "rank: 2147483648, conv: 4"),
            9,
            "config.process[0].network.rank",
            "expected at most 16384",
        ),
        (
            "huge rank of convolutions",
            MINIMAL.replace("linear: 8", "linear: 8, conv: 20000"),
            9,
            "config.process[0].network.conv",
            "expected at most 16384",
        ),
        (
            "dropout of a LoKr",
            MINIMAL.replace("type: lora, linear: 8", "type: lokr, dropout: 0.1"),
            9,
            "config.process[0].network.dropout",
            "`type: lokr` is trained without it",
        ),
        (
            "outputs of a LoKr that are dropped",
            MINIMAL.replace(
                "type: lora, linear: 8",
                "type: lokr, network_kwargs: {output_dropout: 0.1}",
            ),
            9,
            "config.process[0].network.network_kwargs.output_dropout",
            "called `rank_dropout`",
        ),
        (
            "decomposition of a DoRA",
            MINIMAL.replace(
                "type: lora, linear: 8",
                "type: dora, conv: 4, network_kwargs: {use_cp: true}",
            ),
            9,
            "config.process[0].network.network_kwargs.use_cp",
            "`type: dora` has no such decomposition",
        ),
        (
            "dropout of whole differences",
            MINIMAL.replace(
                "type: lora, linear: 8",
                "type: fullrank, network_kwargs: {module_dropout: 0.1}",
            ),
            9,
            "config.process[0].network.network_kwargs.module_dropout",
            "`type: fullrank` is trained without it",
        ),
        (
            "factor of a LoKr",
            MINIMAL.replace("type: lora, linear: 8", "type: lokr, lokr_factor: '0'"),
            9,
            "config.process[0].network.lokr_factor",
            "expected -1",
        ),
        (
            "a key without underscores",
            with_line_after("steps: 10", "        gradientcheckpointing: true"),
            14,
            "config.process[0].train.gradientcheckpointing",
            "did you mean `gradient_checkpointing`?",
        ),
        (
            "a key in camel case",
            with_line_after("steps: 10", "        gradientAccumulationSteps: 2"),
            14,
            "config.process[0].train.gradientAccumulationSteps",
            "did you mean `gradient_accumulation_steps`?",
        ),
        (
            "a folder with NUL",
            MINIMAL.replace("training_folder: output", "training_folder: \"out\\0put\""),
            6,
            "config.process[0].training_folder",
            "without the character NUL",
        ),
        (
            "an infinite number in the metadata",
            format!("{MINIMAL}meta:\n  a: 1\n  b:\n    c: [1, .inf]\n"),
            17,
            "meta.b.c[1]",
            "numbers must be finite here",
        ),
        (
            "resolutions as text",
            with_line_after("- folder_path", "          resolution: 512,768"),
            12,
            "config.process[0].datasets[0].resolution",
            "expected a whole number from 0, or a list of such numbers, found the text \"512,768\"",
        ),
        (
            "no resolution",
            with_line_after("- folder_path", "          resolution: [512, 0]"),
            12,
            "config.process[0].datasets[0].resolution",
            "expected resolutions of at least 1, found 0",
        ),
        (
            "huge resolution",
            with_line_after("- folder_path", "          resolution: [512, 20000]"),
            12,
            "config.process[0].datasets[0].resolution",
            "expected at most 16384, found 20000",
        ),
        (
            "huge batch",
            with_line_after("steps: 10", "        batch_size: 4294967295"),
            14,
            "config.process[0].train.batch_size",
            "expected at most 65536",
        ),
        (
            "huge table",
            with_line_after("steps: 10", "        num_train_timesteps: 4294967295"),
            14,
            "config.process[0].train.num_train_timesteps",
            "expected at most 1000000",
        ),
        (
            "merge of list",
            "job: extension\nconfig: {<<: [1]}\n".into(),
            2,
            "config",
            "merges maps",
        ),
    ]
}

#[test]
fn every_mistake_is_reported_with_its_line_and_key() {
    let mut wrong = Vec::new();
    for (what, text, line, key, part) in mistakes() {
        match load_yaml(&text) {
            Ok(_) => wrong.push(format!("{what}: accepted")),
            Err(error) => {
                let first = &error.findings()[0];
                let found = first.file.as_deref() == Some("job.yaml")
                    && (line == 0 || first.line == Some(line))
                    && (key.is_empty() && line == 0 || first.key == key)
                    && first.message.contains(part);
                if !found {
                    wrong.push(format!("{what}: expected {line} {key} {part}\n   found {error}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

const EXTRACTION: &str = "job: extract\nconfig:\n  name: a\n  base_model: a\n  extract_model: b\n  output_folder: out\n  process:\n    - type: lora\n";

/// A value that cannot be read is not reported as missing, and what it would have decided is not compared with other keys.
#[test]
fn one_mistake_is_one_error() {
    for (text, expected) in [
        (
            MINIMAL.replace("name: cat", "name: [cat]"),
            "job.yaml:3:3: config.name: expected text",
        ),
        (
            "job: extension\nconfig: cat\n".to_owned(),
            "job.yaml:2:1: config: expected a map",
        ),
        (
            MINIMAL.replace("name_or_path: base", "name_or_path: {a: 1}"),
            "job.yaml:8:9: config.process[0].model.name_or_path: expected text",
        ),
        (
            MINIMAL.replace("training_folder: output", "training_folder: [output]"),
            "job.yaml:6:7: config.process[0].training_folder: expected text",
        ),
        (
            MINIMAL.replace("folder_path: images", "folder_path: []"),
            "job.yaml:11:11: config.process[0].datasets[0].folder_path: expected text",
        ),
        (
            MINIMAL
                .replace("sd_trainer", "to_folder")
                .replace("job: extension", "job: [generate]")
                .replace(
                    "training_folder: output",
                    "output_folder: output\n      generate: {prompts: [a]}",
                ),
            "job.yaml:1:1: job: expected the name of a job kind",
        ),
        (
            MINIMAL.replace("type: sd_trainer", "TYPE: sd_trainer"),
            "job.yaml:5:7: config.process[0].TYPE: `process` has no key `TYPE`; did you mean `type`?",
        ),
        (
            EXTRACTION.replace("base_model: a", "base_model: [a]"),
            "job.yaml:4:3: config.base_model: expected text",
        ),
        (
            EXTRACTION.replace("output_folder: out", "output_folder: {}"),
            "job.yaml:6:3: config.output_folder: expected text",
        ),
    ] {
        let error = load_yaml(&text).expect_err(&text);
        let findings: Vec<String> = error.findings().iter().map(ToString::to_string).collect();
        assert!(
            findings.len() == 1 && findings[0].starts_with(expected),
            "{text}{findings:#?}"
        );
    }
    let error = load_yaml(&with_line_after("name_or_path: base", "        arch: sd17")).expect_err("no arch");
    let message = &error.findings()[0].message;
    assert!(
        message.contains("flux_kontext") && !message.contains("flux2"),
        "{message}"
    );
    let error = load_yaml(&MINIMAL.replace("steps: 10", "steps: '1e-4'")).expect_err("no whole number");
    assert!(
        error.findings()[0].message.ends_with("found the text \"1e-4\""),
        "{error}"
    );
    let error = load_yaml(&MINIMAL.replace("type: sd_trainer", "name: a")).expect_err("no type");
    let message = &error.findings()[0].message;
    assert!(
        message.contains("needs the key `type`. Known: sd_trainer") && !message.contains("super_tagger"),
        "{message}"
    );
}
