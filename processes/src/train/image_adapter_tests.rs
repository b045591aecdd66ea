//! Whole trainings of T2I-Adapters and ControlNets: files, resuming, samples, predicted memory, and configs that do not fit.

use super::resume_exactness::check_resumption;
use super::tests::{logs, losses, run_spec, spec, stop_at, trainer};
use super::transformer_test_runs::{complete, equal, tensors};
use crate::testing::{fixtures, gap};
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::capability::DeviceRef;
use aitk_common::job::adapter::{AdapterConfig, AdapterType, T2iNetwork};
use aitk_common::job::arch::{Arch, ArchName};
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::sample::SampleItem;
use aitk_common::job::values::OneOrMany;
use aitk_common::plan::output::RunOutput;
use aitk_common::plan::parameter_counts::ParameterCounts;
use candle_core::Tensor;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A control image for each of the five images of `tests::images`.
fn control_images(folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    for i in 0..5u32 {
        let (width, height) = if i < 3 { (40, 40) } else { (50, 25) };
        let pixel = |x: u32, y: u32| image::Rgb([(y * 6) as u8, (x * 4 + i * 30) as u8, (i * 40) as u8]);
        let image = image::RgbImage::from_fn(width, height, pixel);
        image.save(folder.join(format!("p{i}.png"))).unwrap();
    }
}

pub(super) fn adapter(root: &Path, kind: AdapterType, steps: u64) -> TrainerProcess {
    let mut process = trainer(root, steps);
    let controls = root.join("controls");
    control_images(&controls);
    process.network = None;
    process.adapter = Some(AdapterConfig {
        kind,
        train: true,
        channels: vec![16, 32],
        downscale_factor: 2,
        num_res_blocks: 1,
        ..AdapterConfig::default()
    });
    process.datasets[0].control_path = OneOrMany(vec![controls.display().to_string()]);
    process
}

fn failure(process: &TrainerProcess) -> String {
    match run_spec(&spec(process.clone())).0 {
        Outcome::Failed { message, .. } => message,
        other => panic!("{other:?}"),
    }
}

fn samples(events: &[ChildEvent]) -> Vec<PathBuf> {
    let path = |event: &ChildEvent| match event {
        ChildEvent::Artifact { kind, path, .. } if kind == "sample" => Some(path.clone()),
        _ => None,
    };
    events.iter().filter_map(path).collect()
}

#[test]
fn a_t2i_adapter_resumes_exactly_and_has_the_names_of_diffusers() {
    let (whole, events) = check_resumption(&|root| {
        let mut process = adapter(root, AdapterType::T2i, 6);
        process.datasets[0].flip_x = true;
        process.train.ema_config.use_ema = true;
        process
    });
    let out = whole.path().join("out/tiny");
    let saved = tensors(&out.join("tiny.safetensors"));
    let names: Vec<&str> = saved.keys().map(String::as_str).collect();
    assert_eq!(
        names,
        [
            "adapter.body.0.resnets.0.block1.bias",
            "adapter.body.0.resnets.0.block1.weight",
            "adapter.body.0.resnets.0.block2.bias",
            "adapter.body.0.resnets.0.block2.weight",
            "adapter.body.1.in_conv.bias",
            "adapter.body.1.in_conv.weight",
            "adapter.body.1.resnets.0.block1.bias",
            "adapter.body.1.resnets.0.block1.weight",
            "adapter.body.1.resnets.0.block2.bias",
            "adapter.body.1.resnets.0.block2.weight",
            "adapter.conv_in.bias",
            "adapter.conv_in.weight",
        ]
    );
    assert!(out.join("tiny_000000004.safetensors").is_file());
    let made = |event: &ChildEvent| matches!(event, ChildEvent::Artifact { kind, .. } if kind == "adapter");
    assert_eq!(events.iter().filter(|event| made(event)).count(), 2);
    assert!(logs(&events).contains("made anew"), "{}", logs(&events));
}

#[test]
fn a_controlnet_is_saved_as_a_folder_and_resumes_exactly() {
    let with = |root: &Path| {
        let mut process = adapter(root, AdapterType::ControlNet, 6);
        process.train.gradient_checkpointing = true;
        process
    };
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let expected = losses(&complete(with(whole.path())));
    let job = spec(with(parts.path()));
    let (outcome, first) = stop_at(&job, 3);
    assert_eq!(outcome, Outcome::stopped());
    let (outcome, second) = run_spec(&job);
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&second));
    // It is not said of a run that resumes.
    assert!(
        logs(&first).contains("made anew") && !logs(&second).contains("made anew"),
        "{}",
        logs(&second)
    );
    assert_eq!([losses(&first), losses(&second)].concat(), expected);
    let folder = |root: &Path, name: &str| root.join("out/tiny").join(name);
    equal(&folder(whole.path(), "tiny"), &folder(parts.path(), "tiny"));
    for name in ["tiny", "tiny_000000004"] {
        let saved = folder(whole.path(), name);
        let config = std::fs::read_to_string(saved.join("config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_str(&config).unwrap();
        assert_eq!(config["_class_name"], "ControlNetModel");
        assert_eq!(config["block_out_channels"], serde_json::json!([16, 32]));
        assert_eq!(
            config["conditioning_embedding_out_channels"],
            serde_json::json!([16, 32])
        );
        assert!(saved.join("diffusion_pytorch_model.safetensors").is_file());
        assert!(
            std::fs::read_to_string(saved.join("aitk_meta.yaml"))
                .unwrap()
                .contains("training_info")
        );
    }
    // Every tensor learns: in the first step only the zero convolutions, and then those behind them.
    let saved = tensors(&folder(whole.path(), "tiny"));
    let unet = tensors(&fixtures().join("tiny_sd/unet"));
    let copied = saved
        .iter()
        .filter_map(|(name, tensor)| Some((name, tensor, unet.get(name)?)));
    for (name, tensor, before) in copied {
        assert!(gap(tensor, before) > 0.0, "{name} did not change");
    }
}

/// Both go on with the weights of the newest save where there is no checkpoint, and begin with those that the config names.
#[test]
fn trainings_begin_with_the_weights_of_a_save() {
    for kind in [AdapterType::T2i, AdapterType::ControlNet] {
        let dir = tempfile::tempdir().unwrap();
        let mut process = adapter(dir.path(), kind, 4);
        process.train.lr = 1e-2;
        process.save.save_every = None;
        complete(process.clone());
        let name = match kind {
            AdapterType::T2i => "tiny.safetensors",
            _ => "tiny",
        };
        let save = dir.path().join("out/tiny").join(name);
        let before = tensors(&save);
        std::fs::remove_dir_all(dir.path().join("out/tiny/.aitk")).unwrap();
        process.train.steps = 5;
        process.train.lr = 0.0;
        process.train.adapter_lr = Some(0.0);
        let events = complete(process.clone());
        assert!(
            logs(&events).contains("(step 4), with a fresh optimizer"),
            "{}",
            logs(&events)
        );
        assert!(!logs(&events).contains("made anew"), "{}", logs(&events));
        let same = |found: &BTreeMap<String, Tensor>| {
            assert!(found.keys().eq(before.keys()));
            found.iter().all(|(name, tensor)| gap(tensor, &before[name]) == 0.0)
        };
        assert!(same(&tensors(&save)));
        let copy = dir.path().join("start").join(name);
        std::fs::create_dir(dir.path().join("start")).unwrap();
        std::fs::rename(&save, &copy).unwrap();
        std::fs::remove_dir_all(dir.path().join("out")).unwrap();
        if let Some(adapter) = &mut process.adapter {
            adapter.name_or_path = Some(copy.display().to_string());
        }
        let events = complete(process);
        assert!(
            logs(&events).contains("the adapter begins as that of"),
            "{}",
            logs(&events)
        );
        assert!(same(&tensors(&save)), "{kind}");
    }
}

/// The weights of a save: a file, or that in its folder.
fn weights_of(save: &Path) -> PathBuf {
    match save.is_dir() {
        true => save.join("diffusion_pytorch_model.safetensors"),
        false => save.to_path_buf(),
    }
}

/// Replaces a number of a file by one that is not finite.
fn set_nan(path: &Path) {
    let mut saved = tensors(path);
    let first = saved.values_mut().next().unwrap();
    *first = Tensor::full(f32::NAN, first.shape(), first.device()).unwrap();
    let saved: std::collections::HashMap<String, Tensor> = saved.into_iter().collect();
    candle_core::safetensors::save(&saved, path).unwrap();
}

/// A newest save that is damaged gives way to the one before it, as that of a LoRA does. Without another one the run starts anew.
#[test]
fn damaged_saves_give_way_to_older_ones() {
    let damages: [&dyn Fn(&Path); 3] = [
        &|path| {
            let bytes = std::fs::read(path).unwrap();
            std::fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
        },
        &|path| set_nan(path),
        &|path| std::fs::remove_file(path).unwrap(),
    ];
    for kind in [AdapterType::T2i, AdapterType::ControlNet] {
        let dir = tempfile::tempdir().unwrap();
        let mut process = adapter(dir.path(), kind, 6);
        process.save.save_every = Some(2);
        process.save.max_step_saves_to_keep = 3;
        complete(process.clone());
        let folder = dir.path().join("out/tiny");
        std::fs::remove_dir_all(folder.join(".aitk")).unwrap();
        let name = |step: u64| match kind {
            AdapterType::T2i => format!("tiny_{step:09}.safetensors"),
            _ => format!("tiny_{step:09}"),
        };
        for (damage, damaged) in [(0, vec![4]), (1, vec![4]), (2, vec![4]), (0, vec![2, 4])] {
            let copy = tempfile::tempdir().unwrap();
            let run = copy.path().join("tiny");
            std::fs::create_dir(&run).unwrap();
            for step in [2, 4] {
                let (from, to) = (folder.join(name(step)), run.join(name(step)));
                match from.is_dir() {
                    true => crate::testing::copy_folder(&from, &to),
                    false => drop(std::fs::copy(from, to).unwrap()),
                }
            }
            for step in &damaged {
                damages[damage](&weights_of(&run.join(name(*step))));
            }
            // A file that was removed is no save.
            let skips = run.join(name(4)).exists();
            process.training_folder = Some(copy.path().display().to_string());
            let (outcome, events) = run_spec(&spec(process.clone()));
            let logs = logs(&events);
            assert_eq!(outcome, Outcome::Completed, "{logs}");
            let said = logs.contains("skipping a save that cannot be read");
            assert_eq!(said, skips, "{kind}, {damage}: {logs}");
            let expected = match damaged.contains(&2) {
                true => "the adapter is made anew",
                false => "(step 2), with a fresh optimizer",
            };
            assert!(logs.contains(expected), "{kind}, {damage}: {logs}");
        }
    }
}

/// Saves of a T2I-Adapter are files and those of a ControlNet are folders.
#[test]
fn a_checkpoint_of_the_other_type_is_an_error_that_names_the_saves() {
    for (kind, other, save) in [
        (AdapterType::T2i, AdapterType::ControlNet, "such as tiny.safetensors"),
        (AdapterType::ControlNet, AdapterType::T2i, "such as tiny,"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        complete(adapter(dir.path(), kind, 2));
        let error = failure(&adapter(dir.path(), other, 4));
        assert!(error.contains(save) && error.contains("are of another type"), "{error}");
    }
}

/// The check before a run and the run itself name the key and the file.
#[test]
fn an_adapter_to_start_from_that_cannot_be_used_is_an_error_at_its_key() {
    use crate::check_image_adapter;
    use aitk_common::model_files::PartPaths;
    let model = fixtures().join("tiny_sd");
    for kind in [AdapterType::T2i, AdapterType::ControlNet] {
        let dir = tempfile::tempdir().unwrap();
        let mut process = adapter(dir.path(), kind, 1);
        process.save.save_every = None;
        complete(process.clone());
        let name = match kind {
            AdapterType::T2i => "tiny.safetensors",
            _ => "tiny",
        };
        let save = dir.path().join("out/tiny").join(name);
        let check = |process: &TrainerProcess, path: &Path, with_model: bool| {
            let parts = PartPaths::default();
            let model = with_model.then_some((model.as_path(), &parts));
            check_image_adapter(process, path, model).map_err(|error| error.to_string())
        };
        for with_model in [true, false] {
            assert_eq!(check(&process, &save, with_model), Ok(()), "{kind}");
        }
        set_nan(&weights_of(&save));
        let mut from = |path: &Path, says: &str, without_model: bool| {
            process.adapter.as_mut().unwrap().name_or_path = Some(path.display().to_string());
            process.training_folder = Some(dir.path().join("other").display().to_string());
            let error = failure(&process);
            assert_eq!(check(&process, path, true).unwrap_err(), error);
            assert!(
                error.starts_with("adapter.name_or_path: ") && error.contains(says),
                "{kind}: {error}"
            );
            assert_eq!(check(&process, path, false).is_err(), without_model, "{kind}, {says}");
        };
        from(&save, "not finite", true);
        // A whole model is named as what it is, at the key of the adapter.
        from(&model, "is a whole model", true);
        let xl = adapter_of_sdxl(&dir.path().join("xl"), kind);
        from(&xl, "", false);
    }
}

/// A training for the tiny SDXL.
fn sdxl(root: &Path, kind: AdapterType, steps: u64) -> TrainerProcess {
    let mut process = adapter(root, kind, steps);
    process.model.arch = Arch::from(ArchName::Sdxl);
    process.model.name_or_path = fixtures().join("tiny_sdxl").display().to_string();
    if let Some(adapter) = &mut process.adapter {
        adapter.channels = vec![8, 16, 16, 16];
        adapter.downscale_factor = 4;
    }
    process
}

/// An adapter that was trained for the tiny SDXL.
fn adapter_of_sdxl(root: &Path, kind: AdapterType) -> PathBuf {
    complete(sdxl(root, kind, 1));
    root.join("out/tiny").join(match kind {
        AdapterType::T2i => "tiny.safetensors",
        _ => "tiny",
    })
}

#[test]
fn control_images_and_their_caches_change_nothing_but_what_they_should() {
    for kind in [AdapterType::T2i, AdapterType::ControlNet] {
        let dir = tempfile::tempdir().unwrap();
        let train = |portable: bool, change: &dyn Fn(&mut TrainerProcess)| {
            let mut process = adapter(dir.path(), kind, 4);
            process.save.save_every = None;
            change(&mut process);
            let _ = std::fs::remove_dir_all(dir.path().join("out"));
            let mut spec = spec(process);
            if portable {
                spec.device = DeviceRef::PORTABLE_CPU;
            }
            let (outcome, events) = run_spec(&spec);
            assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
            losses(&events)
        };
        let whole = train(false, &|_| {});
        assert_eq!(
            train(false, &|process| process.datasets[0].cache_latents_to_disk = false),
            whole
        );
        let cached = train(false, &|process| process.train.cache_text_embeddings = true);
        assert!(cached.iter().all(|loss| loss.is_finite()), "{kind}: {cached:?}");
        for (a, b) in train(true, &|_| {}).iter().zip(&whole) {
            assert!((a / b - 1.0).abs() < 1e-3, "{kind}: {a} and {b}");
        }
        let other = train(false, &|process| process.datasets[0].full_size_control_images = false);
        assert_ne!(other, whole, "{kind}");
    }
    // The latents of control images are neither made nor cached.
    let dir = tempfile::tempdir().unwrap();
    complete(adapter(dir.path(), AdapterType::T2i, 1));
    let cached = std::fs::read_dir(dir.path().join("data/_latent_cache"))
        .unwrap()
        .count();
    assert_eq!(cached, 5);
}

#[test]
fn samples_are_conditioned_on_control_images() {
    for kind in [AdapterType::T2i, AdapterType::ControlNet] {
        let dir = tempfile::tempdir().unwrap();
        let mut process = adapter(dir.path(), kind, 4);
        let control = |index: u32| dir.path().join(format!("controls/p{index}.png")).display().to_string();
        process.train.disable_sampling = false;
        // A new ControlNet has zero convolutions before and after its blocks.
        process.train.lr = 5e-2;
        process.save.save_every = None;
        process.sample.samples = [
            format!("a red circle --ctrl_img {}", control(0)),
            "a red circle".into(),
            format!("a red circle --a 0 --ctrl_img {}", control(0)),
            format!("a red circle --a 0 --ctrl_img {}", control(4)),
        ]
        .map(|prompt| SampleItem {
            prompt,
            ..SampleItem::default()
        })
        .to_vec();
        if let Some(adapter) = &mut process.adapter {
            adapter.test_img_path = OneOrMany(vec![control(3)]);
        }
        (process.sample.width, process.sample.height) = (64, 48);
        process.sample.sample_steps = 2;
        process.sample.format = "png".into();
        let events = complete(process.clone());
        let files = samples(&events);
        // Before the first step, and at the end.
        assert_eq!(files.len(), 8);
        let images: Vec<Vec<u8>> = files[4..]
            .iter()
            .map(|path| image::open(path).unwrap().into_rgb8().into_raw())
            .collect();
        assert_ne!(images[0], images[1], "{kind}: another control image");
        assert_ne!(images[0], images[2], "{kind}: without the adapter");
        assert_eq!(images[2], images[3], "{kind}: at strength 0 there is no adapter");
        if let Some(adapter) = &mut process.adapter {
            adapter.test_img_path = OneOrMany(Vec::new());
        }
        let error = failure(&process);
        assert!(error.contains("test_img_path"), "{error}");
    }
}

#[test]
fn adapters_of_sdxl_are_trained() {
    for kind in [AdapterType::T2i, AdapterType::ControlNet] {
        let dir = tempfile::tempdir().unwrap();
        let process = sdxl(dir.path(), kind, 2);
        let events = complete(process.clone());
        assert!(losses(&events).iter().all(|loss| loss.is_finite()));
        planned_and_saved(&process, &dir.path().join("out/tiny"));
    }
}

/// Compares the numbers that the planner counts with those that are saved.
fn planned_and_saved(process: &TrainerProcess, out: &Path) {
    let kind = process.adapter.as_ref().unwrap().kind;
    let name = match kind {
        AdapterType::T2i => "tiny.safetensors",
        _ => "tiny",
    };
    let saved: usize = tensors(&out.join(name)).values().map(Tensor::elem_count).sum();
    let counts = ParameterCounts::read(Path::new(&process.model.name_or_path));
    let planned = RunOutput::of(process, counts).save_bytes.unwrap();
    // The header is counted with 48 KiB.
    assert_eq!(planned - (48 << 10), 4 * saved as u64, "{kind}");
}

#[test]
fn the_planner_counts_the_numbers_of_an_adapter() {
    for (kind, network, channels, resnets) in [
        (AdapterType::T2i, T2iNetwork::FullAdapter, vec![16, 32], 1),
        (AdapterType::T2i, T2iNetwork::FullAdapter, vec![16, 32], 3),
        (AdapterType::T2i, T2iNetwork::LightAdapter, vec![16], 2),
        (AdapterType::ControlNet, T2iNetwork::FullAdapter, vec![16, 32], 1),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut process = adapter(dir.path(), kind, 1);
        if let Some(adapter) = &mut process.adapter {
            adapter.adapter_type = network;
            adapter.channels = channels.clone();
            adapter.num_res_blocks = resnets;
        }
        let (outcome, events) = run_spec(&spec(process.clone()));
        if network == T2iNetwork::LightAdapter {
            // Its second feature has 16 channels, and the second block of the tiny U-Net 32.
            assert!(matches!(outcome, Outcome::Failed { .. }));
            continue;
        }
        assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
        planned_and_saved(&process, &dir.path().join("out/tiny"));
    }
}

#[test]
fn what_cannot_be_trained_is_said_before_the_first_step() {
    let dir = tempfile::tempdir().unwrap();
    let base = adapter(dir.path(), AdapterType::T2i, 2);
    let refused = |change: &dyn Fn(&mut TrainerProcess)| {
        let mut process = base.clone();
        change(&mut process);
        failure(&process)
    };
    let error = refused(&|process| process.adapter.as_mut().unwrap().channels = vec![320, 640]);
    assert!(
        error.contains("feature 0") && error.contains("set `channels: [16, 32]`"),
        "{error}"
    );
    let error = refused(&|process| process.datasets[0].control_path = OneOrMany(Vec::new()));
    assert!(error.contains("control_path"), "{error}");
    let error = refused(&|process| process.train.train_text_encoder = true);
    assert!(error.contains("train_text_encoder"), "{error}");
    let error = refused(&|process| process.train.inverted_mask_prior = true);
    assert!(error.contains("need a `network`"), "{error}");
    // The same from the shapes of a model, before it is loaded.
    let check = |process: &TrainerProcess| {
        let model = fixtures().join("tiny_sd");
        super::check_settings(process, &model, &Default::default(), None).map_err(|error| error.to_string())
    };
    assert_eq!(check(&base), Ok(()));
    let mut wrong = base.clone();
    wrong.adapter.as_mut().unwrap().downscale_factor = 8;
    assert!(check(&wrong).unwrap_err().contains("downscale_factor"));
    let mut control_net = base.clone();
    control_net.adapter.as_mut().unwrap().kind = AdapterType::ControlNet;
    assert_eq!(check(&control_net), Ok(()));
}
