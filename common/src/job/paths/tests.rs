use super::super::process::{GenerateProcess, Img2ImgProcess, JobKind, ProcessType, TrainerProcess};
use super::super::schema::{FieldInfo, SectionInfo, SupportLevel};
use super::super::spec::{ConfigSection, Document};
use super::super::tests::{MINIMAL, load_yaml, with_line_after};
use super::super::{caption, extract, lm_export, lm_generate, lm_trainer};
use super::*;
use std::collections::BTreeSet;

/// The text keys that are not inputs, and why none of them can reach a file outside the attempt's folder.
const NO_INPUTS: &[(&str, &[&str])] = &[
    // `naming::check_name`, `naming::check_suffix` or a list of known endings, when the job is read.
    (
        "a name or an ending that is checked",
        &[
            "config.name",
            "process.name",
            "datasets.caption_ext",
            "datasets.caption_type",
            "generate.ext",
            "sample.format",
        ],
    ),
    // `extract::check_file_name`; only the last part of `output_path` is used where an attempt has its own folder.
    ("the name of a result", &["process.filename", "process.output_path"]),
    // `Context::output_root`: replaced by the attempt's own folder.
    (
        "where results go",
        &[
            "config.training_folder",
            "process.training_folder",
            "config.log_dir",
            "process.log_dir",
            "process.output_folder",
            "process.copy_inputs_to",
            "config.output_folder",
        ],
    ),
    // No code opens or joins them; text for the model, for metadata or for messages.
    (
        "text that is never a path",
        &[
            "job.meta",
            "cluster.labels",
            "cluster.after",
            "cluster.after_any",
            "cluster.after_failed",
            "process.trigger_word",
            "datasets.trigger_word",
            "datasets.augments",
            "datasets.augmentations",
            "datasets.excluded_images",
            "datasets.keep_tokens_separator",
            "datasets.caption_separator",
            "datasets.secondary_separator",
            "datasets.caption_prefix",
            "datasets.caption_suffix",
            "datasets.default_caption",
            "datasets.replacements",
            "datasets.include",
            "datasets.exclude",
            "datasets.licenses",
            "datasets.text_column",
            "datasets.prompt_column",
            "datasets.completion_column",
            "network.only_if_contains",
            "network.ignore_if_contains",
            "datasets.diff_output_preservation_class",
            "generate.neg",
            "generate.stop",
            "fill.prefix",
            "fill.suffix",
            "generate.prompt_2",
            "generate.neg_2",
            "generate.trigger_word",
            "sample.neg",
            "sample.prompts",
            "samples.prompt",
            "samples.neg",
            "model.latent_space_version",
            "model.unconditional_lora_path",
            "model.ignore_if_contains",
            "model.only_if_contains",
            "model.quantize_kwargs",
            "model.qtype",
            "model.qtype_te",
            "network_kwargs.only_if_contains",
            "network_kwargs.ignore_if_contains",
            "network_kwargs.full_if_contains",
            "network_kwargs.target_lin_modules",
            "network_kwargs.target_conv_modules",
            "train.optimizer_params",
            "train.lr_scheduler_params",
            "train.unconditional_prompt",
            "layer_ranks.contains",
            "lr_factors.contains",
            "train.diff_output_preservation_class",
            "validation_items.prompt",
            "slider.positive_prompt",
            "slider.negative_prompt",
            "slider.target_class",
            "slider.anchor_class",
            "slider.additional_losses",
            "targets.target_class",
            "targets.positive",
            "targets.negative",
            "anchors.prompt",
            "anchors.neg_prompt",
            "slider.datasets.target_class",
            "replacements.concept",
            "replacements.replacement",
            "embedding.trigger",
            "embedding.init_words",
            "embedding.trigger_class_name",
            "datasets.controls",
            "datasets.augments",
            "datasets.augmentations",
            "datasets.poi",
            "logging.project_name",
            "logging.run_name",
            "save.hf_repo_id",
        ],
    ),
    // No code reads them.
    (
        "never read",
        &[
            "config.device",
            "process.device",
            "process.sqlite_db_path",
            "process.guidance",
            "process.lorm_extract_mode",
            "model.vae_device",
            "model.te_device",
            "model.model_kwargs",
            "model.model_paths",
            "model.compile_mode",
            "train.attention_backend",
            "slider.use_adapter",
            "slider.prompt_tensors",
            "adapter.image_dir",
        ],
    ),
    // The feature that uses them is refused at submission. Move a key up when the engine supports it.
    (
        "of unsupported features",
        &[
            "caption.extensions",
            "caption.device",
            "caption.qtype",
            "caption.caption_extension",
            "caption.caption_prompt",
            "caption.fixed_caption",
        ],
    ),
];

fn text_keys(section: &SectionInfo, found: &mut BTreeSet<(String, bool)>) {
    for field in &section.fields {
        let is_text = field.kind.contains("text") || field.kind.contains("map") || field.kind.contains("any");
        // A key without a typed field is only ever refused or ignored: `SupportReport::check_rare_key`.
        if let Some(nested) = &field.nested {
            text_keys(nested, found);
        } else if is_text && field.values.is_empty() && !field.rare {
            found.insert((format!("{}.{}", section.title, field.key), field.input.is_some()));
        }
    }
}

fn sections() -> [SectionInfo; 11] {
    [
        Document::describe(),
        ConfigSection::describe(),
        TrainerProcess::describe(),
        GenerateProcess::describe(),
        Img2ImgProcess::describe(),
        lm_trainer::LmTrainerProcess::describe(),
        lm_generate::LmGenerateProcess::describe(),
        lm_export::LmExportProcess::describe(),
        caption::CaptionProcess::describe(),
        extract::ExtractProcess::describe(),
        extract::RescaleLoraProcess::describe(),
    ]
}

/// Every key that can hold text is an input or is listed above. A new key fails this test until it is classified.
#[test]
fn every_text_key_is_an_input_or_listed_as_no_input() {
    let mut found = BTreeSet::new();
    for section in sections() {
        text_keys(&section, &mut found);
    }
    let listed: BTreeSet<String> = NO_INPUTS
        .iter()
        .flat_map(|(_, keys)| keys.iter())
        .map(|key| (*key).to_owned())
        .collect();
    let others: BTreeSet<String> = found
        .iter()
        .filter(|(_, input)| !input)
        .map(|(key, _)| key.clone())
        .collect();
    let missing: Vec<&String> = others.difference(&listed).collect();
    let stale: Vec<&String> = listed.difference(&others).collect();
    assert!(
        missing.is_empty() && stale.is_empty(),
        "unclassified keys: {missing:#?}; listed keys that do not exist: {stale:#?}"
    );
    assert!(found.iter().filter(|(_, input)| *input).count() > 25);
}

#[test]
fn a_path_that_is_no_input_and_no_repository_is_refused() {
    let text = with_line_after(
        "- folder_path: images",
        "          mask_path: /etc\n          random_triggers: ../words.txt",
    );
    let spec = load_yaml(&text.replace("name_or_path: base", "name_or_path: org/model"))
        .unwrap()
        .spec;
    let staged = |path: &str| path == "images";
    let found = spec.foreign_paths(staged);
    let messages: Vec<String> = found.iter().map(ToString::to_string).collect();
    assert_eq!(messages.len(), 2, "{messages:?}");
    assert!(
        messages[0].starts_with(
            "job.yaml:13:11: config.process[0].datasets[0].random_triggers: `../words.txt` is not an input"
        ),
        "{messages:?}"
    );
    assert!(
        messages[1].contains("mask_path: `/etc` is not an input of this job"),
        "{messages:?}"
    );
    let repositories: Vec<String> = spec.repositories(staged).map(|input| input.config_path).collect();
    assert_eq!(repositories, ["org/model"]);
    // A local model is not a repository, and a repository is not a data set.
    let local = load_yaml(MINIMAL).unwrap().spec;
    assert_eq!(local.foreign_paths(|_| false).len(), 2);
    let data = load_yaml(&MINIMAL.replace("folder_path: images", "folder_path: org/data"))
        .unwrap()
        .spec;
    assert!(
        data.foreign_paths(|path| path == "base")[0]
            .key
            .ends_with("folder_path")
    );
    assert!(data.foreign_paths(|_| true).is_empty());
}

#[test]
fn the_message_is_the_same_whether_the_path_exists_or_not() {
    let (here, absent) = (not_an_input_message("/etc/passwd"), not_an_input_message("/etc/absent"));
    assert_eq!(here.replace("/etc/passwd", ""), absent.replace("/etc/absent", ""));
    assert!(not_an_input_message(&"x".repeat(5_000)).len() < 500);
    assert!(!not_an_input_message("a\n\u{1b}b").contains(['\n', '\u{1b}']));
}

/// Paths that only matter together with another key, and what this release does with that key.
fn paths_with(section: &SectionInfo, found: &mut BTreeSet<String>) {
    fn has_input(field: &FieldInfo) -> bool {
        let mut below = field.nested.iter().flat_map(|nested| &nested.fields);
        field.input.is_some() || below.any(has_input)
    }
    for field in &section.fields {
        if let Some(nested) = &field.nested {
            paths_with(nested, found);
        }
        let SupportLevel::DependsOn(other) = field.status else {
            continue;
        };
        if !has_input(field) {
            continue;
        }
        let status = match other.split_once(": ") {
            Some(("type", name)) => ProcessType::from_name(name).map(ProcessType::status),
            Some(("job", name)) => JobKind::from_name(name).map(JobKind::status),
            _ => {
                let other = section.fields.iter().find(|field| field.key == other);
                other.map(|field| field.status)
            }
        };
        let name = format!("{}.{}", section.title, field.key);
        assert!(
            matches!(status, Some(SupportLevel::Refused(_) | SupportLevel::Ignored(_))),
            "`{other}` works now: `SupportLevel::opens_paths` must say when the path in `{name}` is opened"
        );
        found.insert(name);
    }
}

#[test]
fn a_path_that_is_never_opened_is_not_an_input() {
    let mut found = BTreeSet::new();
    for section in sections() {
        paths_with(&section, &mut found);
    }
    assert!(found.contains("slider.adapter_img_dir"), "{found:?}");

    let listed = |text: &str| {
        let spec = load_yaml(text).unwrap().spec;
        assert!(spec.unsupported().is_ok(), "{text}");
        let inputs = spec.inputs().into_iter().map(|input| input.config_path);
        let mut inputs: Vec<String> = inputs.collect();
        inputs.retain(|path| path != "base");
        let foreign = spec.foreign_paths(|path| path == "base" || inputs.iter().any(|input| input == path));
        assert_eq!(foreign, [], "{text}");
        inputs
    };
    let negative = with_line_after("steps: 10", "        negative_prompt: 'blurry, low quality'");
    assert_eq!(listed(&negative), ["images"]);
    let guided = with_line_after(
        "steps: 10",
        "        do_cfg: true\n        negative_prompt: 'blurry, low quality'",
    );
    assert_eq!(listed(&guided), ["images"]);
    let lines = guided.replace("'blurry, low quality'", "bad.txt");
    assert_eq!(listed(&lines), ["bad.txt", "images"]);
    assert_eq!(listed(&lines.replace("do_cfg: true", "do_cfg: false")), ["images"]);
    let validated = with_line_after(
        "steps: 10",
        "        validation_config: {validation_items: [{image_path: v.png}]}",
    );
    assert_eq!(listed(&validated), ["v.png", "images"]);
    let set = |keys: &str| with_line_after("folder_path: images", &format!("          {keys}"));
    assert_eq!(listed(&set("mask_path: masks")), ["images", "masks"]);
    assert_eq!(listed(&set("mask_path: masks\n          alpha_mask: true")), ["images"]);
    assert_eq!(listed(&set("dataset_path: others")), ["others"]);
    let img2img = "job: extension\nconfig:\n  name: a\n  process:\n    - type: batch_img2img\n      output_folder: out\n      model: \
                   {name_or_path: base}\n      datasets: [{folder_path: d, mask_path: m, random_triggers: w.txt}]\n";
    assert_eq!(listed(img2img), ["d"]);
}
