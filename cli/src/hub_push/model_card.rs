//! The README.md of an uploaded training: the model card that Hugging Face shows.

use super::files::MAX_ADAPTER_CONFIG_BYTES;
use aitk_common::fsutil::regular;
use aitk_common::hub::push::{Source, Upload};
use aitk_common::job::arch::ArchName;
use aitk_common::job::network::NetworkType;
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::prompt::{PromptFlags, replace_trigger};
use aitk_common::job::repository::is_repository;
use serde_json::json;
use std::fmt::Write as _;

/// A licence as the card names it.
struct License {
    /// Hugging Face's id.
    id: &'static str,
    /// For `other`: name and address.
    other: Option<(&'static str, &'static str)>,
}

/// The licences of base models, whose terms hold for what is trained on them. For other models the card names no licence.
fn license(base: &str) -> Option<License> {
    let known = |id| Some(License { id, other: None });
    let other = |name, link| {
        Some(License {
            id: "other",
            other: Some((name, link)),
        })
    };
    match base {
        "stable-diffusion-v1-5/stable-diffusion-v1-5"
        | "runwayml/stable-diffusion-v1-5"
        | "CompVis/stable-diffusion-v1-4" => known("creativeml-openrail-m"),
        "stabilityai/stable-diffusion-2-1"
        | "stabilityai/stable-diffusion-2-1-base"
        | "stabilityai/stable-diffusion-xl-base-1.0" => known("openrail++"),
        "black-forest-labs/FLUX.1-schnell"
        | "lodestones/Chroma1-HD"
        | "lodestones/Chroma1-Base"
        | "Tongyi-MAI/Z-Image-Turbo"
        | "Tongyi-MAI/Z-Image" => known("apache-2.0"),
        "black-forest-labs/FLUX.1-dev" | "black-forest-labs/FLUX.1-Kontext-dev" => other(
            "flux-1-dev-non-commercial-license",
            "https://huggingface.co/black-forest-labs/FLUX.1-dev/blob/main/LICENSE.md",
        ),
        "stabilityai/stable-diffusion-3.5-large" | "stabilityai/stable-diffusion-3.5-medium" => other(
            "stabilityai-ai-community",
            "https://huggingface.co/stabilityai/stable-diffusion-3.5-large/blob/main/LICENSE.md",
        ),
        _ => None,
    }
}

/// The tag of a family, as Hugging Face uses it.
fn family_tag(arch: ArchName) -> Option<&'static str> {
    match arch {
        ArchName::Sd1 | ArchName::Sd2 => Some("stable-diffusion"),
        ArchName::Sdxl => Some("stable-diffusion-xl"),
        ArchName::Sd3 => Some("sd3"),
        ArchName::Flux | ArchName::FluxKontext => Some("flux"),
        ArchName::Chroma => Some("chroma"),
        ArchName::Zimage => Some("z-image"),
        _ => None,
    }
}

/// Writes the card of a training. `process`: its config, if the run folder has one that can be read. `files`: what is uploaded.
pub(super) fn model_card(name: &str, repo: &str, process: Option<&TrainerProcess>, files: &[Upload]) -> String {
    if let Some((folder, adapter)) = language_model(name, files) {
        return language_model_card(name, repo, folder, adapter);
    }
    let base = process
        .map(|process| process.model.name_or_path.as_str())
        .filter(|base| is_repository(base));
    let trigger = process
        .and_then(TrainerProcess::sample_trigger)
        .filter(|word| !word.trim().is_empty());
    let lora = process.is_some_and(|process| process.network.is_some());
    let mut tags = vec!["text-to-image", "aitk"];
    tags.extend(process.and_then(|process| family_tag(process.model.arch.name)));
    if lora {
        tags.extend(["lora", "diffusers", "template:sd-lora"]);
    }
    let widgets: Vec<_> = process
        .map(|process| newest_samples(process, files))
        .unwrap_or_default();

    // JSON is YAML.
    let mut card = format!("---\ntags: {}\n", json!(tags));
    if !widgets.is_empty() {
        card += "widget:\n";
        for (prompt, file) in &widgets {
            let _ = writeln!(card, "  - {}", json!({"text": prompt, "output": {"url": file}}));
        }
    }
    if let Some(base) = base {
        let _ = writeln!(card, "base_model: {}", json!(base));
    }
    if let Some(trigger) = trigger {
        let _ = writeln!(card, "instance_prompt: {}", json!(trigger));
    }
    if let Some(license) = base.and_then(license) {
        let _ = writeln!(card, "license: {}", license.id);
        if let Some((name, link)) = license.other {
            let _ = writeln!(card, "license_name: {name}\nlicense_link: {link}");
        }
    }
    let _ = writeln!(card, "---\n\n# {name}\n\nTrained with aitk.");
    if !widgets.is_empty() {
        card += "\n<Gallery />\n";
    }
    if let Some(trigger) = trigger {
        let _ = writeln!(card, "\n## Trigger word\n\n{}", code(trigger));
    }
    let _ = writeln!(
        card,
        "\n## Files\n\nThe weights are safetensors files: [download them](/{repo}/tree/main) for ComfyUI, AUTOMATIC1111 and others."
    );
    let weights = format!("{name}.safetensors");
    // diffusers leaves out the magnitudes of `dora_wd`.
    let is_plain_lora = process
        .and_then(|process| process.network.as_ref())
        .is_some_and(|network| network.kind == NetworkType::Lora && !network.network_kwargs.dora_wd);
    if let Some(base) = base.filter(|_| is_plain_lora && files.iter().any(|file| file.name == weights)) {
        let prompt = widgets
            .first()
            .map(|(prompt, _)| prompt.as_str())
            .or(trigger)
            .unwrap_or_default();
        let _ = write!(
            card,
            "\n## With diffusers\n\n```py\nfrom diffusers import AutoPipelineForText2Image\nimport torch\n\npipeline = \
             AutoPipelineForText2Image.from_pretrained({base}, torch_dtype=torch.bfloat16).to(\"cuda\")\npipeline.load_lora_weights({repo}, \
             weight_name={weights})\nimage = pipeline({prompt}).images[0]\nimage.save(\"image.png\")\n```\n",
            // Strings of JSON are strings of Python.
            base = json!(base),
            repo = json!(repo),
            weights = json!(weights),
            prompt = json!(prompt),
        );
    }
    card
}

/// The last save of a language model: its folder, and its config if it is an adapter. `None`: no such save is uploaded. The save of the end
/// has the name of the training.
fn language_model<'a>(name: &str, files: &'a [Upload]) -> Option<(&'a str, Option<&'a Upload>)> {
    let save = |file: &'a Upload| match file.name.split_once('/')? {
        (folder, "adapter_config.json") => Some((folder, Some(file))),
        (folder, "config.json") => Some((folder, None)),
        _ => None,
    };
    let saves = files.iter().filter_map(save);
    saves.max_by_key(|(folder, adapter)| (*folder == name, *folder, adapter.is_some()))
}

/// The base model that the config of an adapter names, if it is a repository.
fn base_model(config: &Upload) -> Option<String> {
    let text = match &config.source {
        Source::Text(text) => text.clone(),
        Source::File(path) => regular::read_text(path, MAX_ADAPTER_CONFIG_BYTES).ok()?,
    };
    let config: serde_json::Value = serde_json::from_str(&text).ok()?;
    let base = config.get("base_model_name_or_path")?.as_str()?;
    is_repository(base).then(|| base.to_owned())
}

fn language_model_card(name: &str, repo: &str, folder: &str, adapter: Option<&Upload>) -> String {
    // Strings of JSON are strings of Python.
    let (repo_text, folder) = (json!(repo), json!(folder));
    let (mut tags, mut library, mut base_line) = (vec!["text-generation", "aitk"], "transformers", String::new());
    let mut code = format!(
        "from transformers import AutoModelForCausalLM\n\nmodel = AutoModelForCausalLM.from_pretrained({repo_text}, subfolder={folder})\n"
    );
    if let Some(config) = adapter {
        let base = base_model(config);
        if let Some(base) = &base {
            base_line = format!("base_model: {}\n", json!(base));
        }
        tags.extend(["lora", "peft"]);
        library = "peft";
        code = format!(
            "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\nbase = \
             AutoModelForCausalLM.from_pretrained({})\nmodel = PeftModel.from_pretrained(base, {repo_text}, subfolder={folder})\n",
            json!(base.as_deref().unwrap_or("BASE_MODEL"))
        );
    }
    format!(
        "---\ntags: {}\nlibrary_name: {library}\n{base_line}---\n\n# {name}\n\nTrained with aitk.\n\n## Files\n\nEach folder is a save \
         for {library}: [download them](/{repo}/tree/main).\n\n## With {library}\n\n```py\n{code}```\n",
        json!(tags)
    )
}

/// The samples of the last step that has some, each with its prompt.
fn newest_samples(process: &TrainerProcess, files: &[Upload]) -> Vec<(String, String)> {
    let mut samples: Vec<(u64, usize, &str)> = files.iter().filter_map(|file| sample(&file.name)).collect();
    samples.sort_unstable();
    let last = samples.last().map(|(step, ..)| *step);
    let of_last = samples.into_iter().filter(|(step, ..)| Some(*step) == last);
    of_last
        .filter_map(|(_, index, file)| {
            // Flags of the prompt can name files of this machine.
            let prompt = PromptFlags::parse(&process.sample.samples.get(index)?.prompt).prompt;
            Some((replace_trigger(&prompt, process.sample_trigger()), file.to_owned()))
        })
        .collect()
}

/// Step and index in the name of a sample: `samples/1724085406830__000000500_0.jpg`.
fn sample(file: &str) -> Option<(u64, usize, &str)> {
    let name = file.strip_prefix("samples/")?;
    let (stem, _) = name.rsplit_once('.')?;
    let (_, numbers) = stem.split_once("__")?;
    let (step, index) = numbers.split_once('_')?;
    Some((step.parse().ok()?, index.parse().ok()?, file))
}

/// Text as code of Markdown, on one line.
fn code(text: &str) -> String {
    let shown: String = text
        .chars()
        .map(|c| if c.is_control() || c == '`' { ' ' } else { c })
        .collect();
    format!("`{}`", shown.trim())
}

#[cfg(test)]
mod tests {
    use super::*;
    use aitk_common::job::{Format, LoadOptions, Process, parse};

    fn process(model: &str, trigger: &str) -> TrainerProcess {
        let text = format!(
            "job: extension\nconfig:\n  name: cat\n  process:\n  - type: sd_trainer\n    training_folder: out\n    trigger_word: {trigger}\n    \
             network: {{type: lora, linear: 4}}\n    datasets: [{{folder_path: data}}]\n    model: {{name_or_path: {model}, arch: flux}}\n    \
             sample: {{prompts: ['[trigger] at \"home\" --seed 3 --ctrl_img /home/ada/secret.png', 'a dog --w 64']}}\n"
        );
        let loaded = parse(&text, Format::Yaml, None, &LoadOptions::default()).unwrap();
        loaded.spec.process.iter().find_map(Process::trainer).cloned().unwrap()
    }

    fn files(names: &[&str]) -> Vec<Upload> {
        let upload = |name: &&str| Upload {
            name: (*name).to_owned(),
            source: Source::Text(String::new()),
        };
        names.iter().map(upload).collect()
    }

    #[test]
    fn the_card_of_a_code_model_says_how_its_last_save_is_loaded() {
        let mut lora = files(&[
            "coder_000000500/adapter_config.json",
            "coder/adapter_config.json",
            "coder/adapter_model.safetensors",
            "samples/000000500.jsonl",
        ]);
        let expected = r#"---
tags: ["text-generation","aitk","lora","peft"]
library_name: peft
base_model: "org/base"
---

# coder

Trained with aitk.

## Files

Each folder is a save for peft: [download them](/me/coder/tree/main).

## With peft

```py
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("org/base")
model = PeftModel.from_pretrained(base, "me/coder", subfolder="coder")
```
"#;
        let unnamed = expected
            .replace("base_model: \"org/base\"\n", "")
            .replace("org/base", "BASE_MODEL");
        assert_eq!(model_card("coder", "me/coder", None, &lora), unnamed);
        lora[1].source = Source::Text(r#"{"base_model_name_or_path": "org/base"}"#.to_owned());
        assert_eq!(model_card("coder", "me/coder", None, &lora), expected);
        let whole = files(&["coder_000000500/config.json", "coder_000001000/config.json"]);
        let card = model_card("coder", "me/coder", None, &whole);
        assert!(
            card.contains("AutoModelForCausalLM.from_pretrained(\"me/coder\", subfolder=\"coder_000001000\")"),
            "{card}"
        );
    }

    #[test]
    fn the_card_of_a_lora_names_base_model_licence_trigger_and_the_newest_samples() {
        let files = files(&[
            "cat.safetensors",
            "samples/1__000000500_0.jpg",
            "samples/2__000001000_0.jpg",
            "samples/2__000001000_1.jpg",
            "samples/2__000001000_7.jpg",
            "samples/odd.jpg",
        ]);
        let process = process("black-forest-labs/FLUX.1-dev", "zxc");
        let card = model_card("cat", "me/cat", Some(&process), &files);
        let expected = r#"---
tags: ["text-to-image","aitk","flux","lora","diffusers","template:sd-lora"]
widget:
  - {"text":"zxc at \"home\"","output":{"url":"samples/2__000001000_0.jpg"}}
  - {"text":"a dog","output":{"url":"samples/2__000001000_1.jpg"}}
base_model: "black-forest-labs/FLUX.1-dev"
instance_prompt: "zxc"
license: other
license_name: flux-1-dev-non-commercial-license
license_link: https://huggingface.co/black-forest-labs/FLUX.1-dev/blob/main/LICENSE.md
---

# cat

Trained with aitk.

<Gallery />

## Trigger word

`zxc`

## Files

The weights are safetensors files: [download them](/me/cat/tree/main) for ComfyUI, AUTOMATIC1111 and others.

## With diffusers

```py
from diffusers import AutoPipelineForText2Image
import torch

pipeline = AutoPipelineForText2Image.from_pretrained("black-forest-labs/FLUX.1-dev", torch_dtype=torch.bfloat16).to("cuda")
pipeline.load_lora_weights("me/cat", weight_name="cat.safetensors")
image = pipeline("zxc at \"home\"").images[0]
image.save("image.png")
```
"#;
        assert_eq!(card, expected);
    }

    #[test]
    fn the_card_of_a_textual_inversion_names_its_word() {
        let text = "job: extension\nconfig:\n  name: cat\n  process:\n  - type: textual_inversion_trainer\n    training_folder: out\n    \
                    embedding: {trigger: vorx}\n    datasets: [{folder_path: data}]\n    model: {name_or_path: a/b, arch: sd1}\n    \
                    sample: {prompts: ['[trigger] at home']}\n";
        let loaded = parse(text, Format::Yaml, None, &LoadOptions::default()).unwrap();
        let process = loaded.spec.process.iter().find_map(Process::trainer).unwrap();
        let files = files(&["vorx.safetensors", "samples/1__000000500_0.jpg"]);
        let card = model_card("cat", "me/cat", Some(process), &files);
        for part in [r#"{"text":"vorx at home""#, "instance_prompt: \"vorx\"", "`vorx`"] {
            assert!(card.contains(part), "{part} is not in {card}");
        }
    }

    #[test]
    fn a_folder_of_this_machine_is_not_named_and_without_a_config_the_card_is_short() {
        let files = files(&["cat.safetensors"]);
        let card = model_card(
            "cat",
            "me/cat",
            Some(&process("/home/ada/models/secret", "zxc")),
            &files,
        );
        assert!(
            !card.contains("ada") && !card.contains("license") && !card.contains("diffusers import"),
            "{card}"
        );
        let card = model_card("cat", "me/cat", None, &files);
        assert!(
            card.starts_with("---\ntags: [\"text-to-image\",\"aitk\"]\n---\n\n# cat\n"),
            "{card}"
        );
        // What ends the front matter of a card, or code, does not.
        let card = model_card("cat", "me/cat", Some(&process("a/b", "\"---\\nx: ` y\"")), &files);
        assert_eq!(card.matches("\n---\n").count(), 1, "{card}");
        assert!(card.contains("`--- x:   y`"), "{card}");
    }
}
