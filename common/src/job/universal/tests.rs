//! Tests of the translation of universal training configs into jobs, and of the lines that errors and warnings name.

use crate::job::change::Change;
use crate::job::lm_trainer::LmTrainerProcess;
use crate::job::{Format, LoadOptions, LoadedJob, ProcessKind, parse};

/// A config with all sections, as such configs have them.
const WHOLE: &str = include_str!("../testdata/universal.yaml");

fn read(text: &str) -> Result<LoadedJob, String> {
    parse(text, Format::Yaml, Some("u.yaml"), &LoadOptions::default()).map_err(|error| error.to_string())
}

fn process(job: &LoadedJob) -> LmTrainerProcess {
    match &job.spec.process[0].kind {
        ProcessKind::LmTrain(process) => (**process).clone(),
        other => panic!("{other:?}"),
    }
}

/// The shortest config, with more lines in its sections.
fn short(model: &str, optimization: &str, training: &str) -> String {
    format!(
        "model:\n  pretrained_model: m\n{model}dataset:\n  train_path: d.json\noptimization:\n  batch_size: 2\n{optimization}training:\n  seed: \
         1\n{training}"
    )
}

#[test]
fn values_may_be_left_to_the_machine() {
    let text = WHOLE
        .replace("context_window: 512", "context_window: auto")
        .replace("batch_size: 1", "batch_size: auto")
        .replace("gradient_checkpointing: true", "gradient_checkpointing: auto");
    let read = process(&read(&text).unwrap());
    let train = read.train;
    let left = (
        read.context.fixed(),
        train.batch_size.fixed(),
        train.gradient_checkpointing.fixed(),
    );
    assert_eq!((left, train.gradient_accumulation), ((None, None, None), 16));
}

#[test]
fn every_section_has_its_counterpart() {
    let job = read(WHOLE).unwrap();
    assert_eq!(job.spec.unsupported().errors, []);
    assert_eq!(
        (job.spec.name.as_str(), job.spec.cluster.device.map(|kind| kind.name())),
        ("the-block", Some("cpu"))
    );
    let read = process(&job);
    assert_eq!(read.training_folder.as_deref(), Some("models"));
    assert_eq!((read.training_seed, read.context.fixed()), (Some(42), Some(512)));
    assert_eq!(read.model.name_or_path, "bigcode/starcoder2-3b");
    assert_eq!(
        (read.model.dtype.name(), read.model.quantize, read.model.qtype.as_str()),
        ("float16", true, "int8")
    );
    let network = read.network.unwrap();
    assert_eq!((network.linear, network.alpha()), (96, 192.0));
    assert_eq!(network.only_if_contains.0, ["q_proj", "v_proj"]);
    assert_eq!(read.datasets[0].path, "data/train.json");
    let validation = read.validation.unwrap();
    assert_eq!(
        (validation.path.as_deref(), validation.every),
        (Some("data/val.json"), 91)
    );
    let train = read.train;
    assert_eq!(
        (train.batch_size.fixed(), train.gradient_accumulation, train.lr),
        (Some(1), 16, 1.2e-3)
    );
    assert_eq!((train.epochs, train.steps, train.warmup_steps), (Some(3), None, 1000));
    assert_eq!(
        (train.max_grad_norm, train.gradient_checkpointing.fixed()),
        (0.3, Some(true))
    );
    assert_eq!(train.optimizer_params["weight_decay"], 0.08);
    assert_eq!(
        (read.save.save_every, read.save.max_step_saves_to_keep),
        (Some(728), 10)
    );
    assert_eq!(read.logging.every(), 45);
    // One warning lists all keys of PyTorch. Every other key with a different effect has a warning at its own line.
    let warnings: Vec<String> = job.warnings.iter().map(ToString::to_string).collect();
    let torch: Vec<&String> = warnings.iter().filter(|text| text.contains("about PyTorch")).collect();
    assert_eq!(torch.len(), 1, "{warnings:?}");
    for key in [
        "`model.name`",
        "`quantization.bnb_4bit_quant_type`",
        "`model.trust_remote_code`",
        "`model.device_map`",
        "`inference.top_p`",
        "`output.save_optimizer`",
    ] {
        assert!(torch[0].contains(key), "{torch:?}");
    }
    for key in ["target_window", "test_path", "max_steps", "warmup_ratio", "patience"] {
        let count = warnings
            .iter()
            .filter(|text| text.contains(&format!(".{key}:")) && text.contains("u.yaml:"))
            .count();
        assert_eq!(count, 1, "{key}: {warnings:?}");
    }
    // The job is the same after the queue's JSON.
    let text = serde_json::to_string(&job.spec).unwrap();
    assert_eq!(crate::job::JobSpec::from_json(&text).unwrap().process, job.spec.process);
}

#[test]
fn errors_are_at_the_users_lines() {
    for (text, line, message) in [
        (short("", "  learning_rate: fast\n", ""), 7, "train.lr"),
        (short("  load_in_8bit: true\n", "", ""), 3, "lora_enabled"),
        (short("  lora_rnak: 8\n", "", ""), 3, "model.lora_rnak"),
        (short("  seed: 3\n", "", ""), 9, "in `model.seed` too"),
        (short("", "", "  warmup_ratio: 0.1\n"), 9, "warmup_steps"),
        (
            short("", "", "device_backend:\n  force_device: tpu\n"),
            10,
            "expected cuda, mps, cpu",
        ),
        (short("", "", "surprise:\n  a: 1\n"), 9, "not a section"),
        (short("", "", "output:\n  - a\n"), 10, "expected a map"),
    ] {
        let error = read(&text).unwrap_err();
        assert!(
            error.contains(&format!("u.yaml:{line}")) && error.contains(message),
            "{error}"
        );
    }
    let error = read("model:\n  name: a\ntraining:\n  seed: 1\n").unwrap_err();
    assert!(
        error.contains("pretrained_model") && error.contains("train_path"),
        "{error}"
    );
}

#[test]
fn values_have_the_names_of_this_trainer() {
    let read_short = |model: &str, optimization: &str, training: &str| {
        process(&read(&short(model, optimization, training)).unwrap())
    };
    let read_model = read_short(
        "  torch_dtype: auto\n",
        "  mixed_precision: no\n  optimizer: adamw_torch\n",
        "",
    );
    assert_eq!(
        (read_model.model.dtype.name(), read_model.train.optimizer.name()),
        ("float32", "adamw")
    );
    let four = read_short(
        "  load_in_4bit: true\n  lora_enabled: true\n  lora_target_modules: all-linear\n",
        "",
        "",
    );
    assert_eq!(four.model.qtype, "nf4");
    assert!(four.network.unwrap().only_if_contains.0.is_empty());
    let warm = read_short(
        "",
        "  lr_scheduler: cosine_with_warmup\n",
        "  max_steps: 250\n  warmup_ratio: 0.05\n",
    );
    assert_eq!((warm.train.steps, warm.train.warmup_steps), (Some(250), 13));
    for (device, kind) in [
        ("mps", Some("metal")),
        ("cuda", Some("cuda")),
        ("null", None),
        ("auto", None),
    ] {
        let text = short(
            "",
            "",
            &format!("device_backend:\n  force_device: {device}\n  attention_backend: auto\n"),
        );
        let job = read(&text).unwrap();
        assert_eq!(job.spec.cluster.device.map(|kind| kind.name()), kind);
        assert_eq!(job.warnings, []);
    }
    let xformers = read(&short("", "", "device_backend:\n  attention_backend: xformers\n")).unwrap();
    assert!(
        xformers.warnings[0].to_string().contains("u.yaml:10"),
        "{:?}",
        xformers.warnings
    );
    // A warning lists the keys that have no effect because of other keys.
    let off = read(&short(
        "  lora_rank: 4\n  torch_dtype: float32\n",
        "  mixed_precision: fp16\n",
        "",
    ))
    .unwrap();
    assert_eq!(off.warnings.len(), 1, "{:?}", off.warnings);
    let text = off.warnings[0].to_string();
    assert!(
        text.contains("`model.lora_rank`, `optimization.mixed_precision`"),
        "{text}"
    );
    // `--set` takes the trainer's keys.
    let changes = [Change {
        key: "train.steps".to_owned(),
        value: "7".to_owned(),
    }];
    let options = LoadOptions {
        changes: &changes,
        ..LoadOptions::default()
    };
    let job = parse(&short("", "", ""), Format::Yaml, Some("u.yaml"), &options).unwrap();
    assert_eq!(process(&job).train.steps, Some(7));
    // A config of aitk that lacks `job` is not read as a universal config.
    assert!(read("config:\n  name: a\n").is_err());
}
