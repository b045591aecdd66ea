//! Whole jobs of Stable Diffusion 2.1 and XL: images that a job generates, a LoRA and a full fine-tune that resume exactly.

use super::tests::{logs, losses, run_spec, spec, trainer};
use crate::families::LoadOptions;
use crate::families::saved_step;
use crate::testing::{fixtures, load_sd};
use aitk_common::attempt::{AttemptSpec, Outcome};
use aitk_common::job::arch::{Arch, ArchName};
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::save::SaveFormat;
use candle_core::{Device, Tensor};
use std::collections::BTreeMap;
use std::path::Path;

const FAMILIES: [(ArchName, &str); 2] = [(ArchName::Sd2, "tiny_sd21"), (ArchName::Sdxl, "tiny_sdxl")];

fn process(root: &Path, (arch, model): (ArchName, &str), steps: u64) -> TrainerProcess {
    let mut process = trainer(root, steps);
    process.model.arch = Arch::from(arch);
    process.model.name_or_path = fixtures().join(model).display().to_string();
    process.train.train_text_encoder = true;
    process
}

fn complete(spec: &AttemptSpec) -> Vec<f64> {
    let (outcome, events) = run_spec(spec);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    losses(&events)
}

fn tensors(file: &Path) -> BTreeMap<String, Tensor> {
    let all = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
    all.into_iter().collect()
}

#[test]
fn loras_resume_exactly_and_have_the_names_of_their_family() {
    for (family, prefixes) in FAMILIES.iter().zip([&["lora_te_"][..], &["lora_te1_", "lora_te2_"]]) {
        let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut losses = complete(&spec(process(whole.path(), *family, 6)));
        assert!(losses.iter().all(|loss| loss.is_finite()));
        let first = complete(&spec(process(parts.path(), *family, 4)));
        let second = complete(&spec(process(parts.path(), *family, 6)));
        assert_eq!(losses.split_off(4), second);
        assert_eq!(losses, first);
        let lora = |root: &Path| tensors(&root.join("out/tiny/tiny.safetensors"));
        let (ours, resumed) = (lora(whole.path()), lora(parts.path()));
        for prefix in prefixes.iter().chain(&["lora_unet_"]) {
            assert!(ours.keys().any(|name| name.starts_with(prefix)), "{prefix}");
        }
        for (name, tensor) in &ours {
            assert_eq!(crate::testing::gap(tensor, &resumed[name]), 0.0, "{name}");
        }
    }
}

#[test]
fn full_fine_tunes_are_saved_in_both_formats() {
    for (arch, model) in FAMILIES {
        for format in [SaveFormat::Diffusers, SaveFormat::Safetensors] {
            let dir = tempfile::tempdir().unwrap();
            let mut process = process(dir.path(), (arch, model), 2);
            process.network = None;
            process.save.save_format = format;
            complete(&spec(process));
            let saved = match format {
                SaveFormat::Diffusers => dir.path().join("out/tiny/tiny"),
                SaveFormat::Safetensors => dir.path().join("out/tiny/tiny.safetensors"),
            };
            assert_eq!(saved_step(&saved).unwrap(), Some(2));
            let options = LoadOptions {
                config_folder: saved.is_file().then(|| fixtures().join(model)),
                ..LoadOptions::cpu()
            };
            load_sd(&saved, &options).unwrap();
        }
    }
}

#[test]
fn a_model_of_another_family_is_refused_with_both() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = process(dir.path(), FAMILIES[1], 2);
    process.model.arch = Arch::from(ArchName::Sd1);
    let (outcome, _) = run_spec(&spec(process));
    let Outcome::Failed { message, .. } = outcome else {
        panic!("{outcome:?}");
    };
    assert!(
        message.contains("is Stable Diffusion XL") && message.contains("`sd1`"),
        "{message}"
    );
}
