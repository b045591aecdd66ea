//! Runs whole jobs that generate images from YAML on the tiny model.

use super::*;
use crate::image_io;
use crate::testing::single_files::{RawFile, Tensors, ldm_vae, original_tensors, read_tensors, without_weights};
use crate::testing::{attempt, fixtures, in_own_folder};
use aitk_common::attempt::{AttemptSpec, ChildEvent, FailureCause, Outcome};
use aitk_common::job::{self, JobSpec, LoadOptions};
use candle_core::{Device, safetensors};
use std::path::{Path, PathBuf};

pub(super) fn spec(yaml: &str) -> AttemptSpec {
    let format = serde_json::from_value(serde_json::json!("yaml")).unwrap();
    let loaded = job::parse(yaml, format, None, &LoadOptions::default()).unwrap();
    attempt(&loaded.spec, yaml)
}

pub(super) fn generate_job(folder: &Path, model: &str, generate: &str) -> String {
    format!(
        "job: generate\nconfig:\n  name: images\n  process:\n  - type: to_folder\n    output_folder: {}\n    \
         model: {{name_or_path: {}, dtype: float32{model}}}\n    generate: {{{generate}}}\n",
        folder.display(),
        fixtures().join("tiny_sd").display()
    )
}

pub(super) fn run_spec(spec: &AttemptSpec) -> (Outcome, Vec<ChildEvent>) {
    let mut events = Vec::new();
    let outcome = run(spec, &mut events, &StopSignal::new());
    (outcome, events)
}

/// Index and path of the emitted image artifacts.
pub(super) fn images(events: &[ChildEvent]) -> Vec<(u64, PathBuf)> {
    let image = |event: &ChildEvent| match event {
        ChildEvent::Artifact {
            kind,
            path,
            index: Some(index),
            ..
        } if kind == "image" => Some((*index, path.clone())),
        _ => None,
    };
    events.iter().filter_map(image).collect()
}

fn assert_matches_diffusers(path: &Path, case: &str) {
    let tensors = safetensors::load(fixtures().join("pipelines/images.safetensors"), &Device::Cpu).unwrap();
    let theirs = tensors[case].flatten_all().unwrap().to_vec1::<u8>().unwrap();
    let ours = image_io::open_rgb(path).unwrap();
    assert_eq!(ours.as_raw().len(), theirs.len(), "{case}");
    let worst = ours.as_raw().iter().zip(&theirs).map(|(a, b)| a.abs_diff(*b)).max();
    assert!(worst <= Some(2), "{case}: differs by up to {worst:?}");
}

#[test]
fn a_job_without_training_logs_that_nothing_is_done_for_a_request() {
    let dir = tempfile::tempdir().unwrap();
    let job = generate_job(
        dir.path(),
        "",
        "prompts: [a circle], width: 64, height: 64, sample_steps: 1",
    );
    let requests = OutputRequests::new();
    requests.request(aitk_common::requested_outputs::RequestedOutputs::SAVE);
    let mut events = Vec::new();
    let outcome = run_with_requests(&spec(&job), &mut events, &StopSignal::new(), &requests);
    assert_eq!(outcome, Outcome::Completed);
    let is_warning = |event: &ChildEvent| matches!(event, ChildEvent::Log { level, message } if level == "warn" && message.contains("the request to save came"));
    assert_eq!(events.iter().filter(|event| is_warning(event)).count(), 1, "{events:?}");
}

/// With `dtype: bf16` a CPU that has the instructions multiplies numbers of bfloat16; others compute in f32, and say so.
#[test]
fn bf16_on_a_cpu_rounds_products_where_it_has_instructions_for_them() {
    let dir = tempfile::tempdir().unwrap();
    let generate = |dtype: &str| {
        let prompts = "sampler: ddim, sample_steps: 2, width: 64, height: 64, prompts: ['a cat --d 3']";
        let job = generate_job(&dir.path().join(dtype), "", prompts);
        let job = job.replace("dtype: float32", &format!("dtype: {dtype}"));
        let (outcome, events) = run_spec(&spec(&job));
        assert_eq!(outcome, Outcome::Completed, "{dtype}");
        let is_notice = |event: &ChildEvent| matches!(event, ChildEvent::Log { message, .. } if message.contains("computing in f32 on the CPU"));
        let notices = events.iter().filter(|event| is_notice(event)).count();
        (image_io::open_rgb(&images(&events)[0].1).unwrap(), notices)
    };
    let [(float32, _), (bf16, notices), (again, _)] = ["float32", "bf16", "bfloat16"].map(generate);
    assert!(bf16 == again, "a job in bf16 has the same result each time");
    let difference: u64 = float32
        .as_raw()
        .iter()
        .zip(bf16.as_raw())
        .map(|(a, b)| u64::from(a.abs_diff(*b)))
        .sum();
    if crate::device::precision::has_bf16_products() {
        let mean = difference as f64 / float32.as_raw().len() as f64;
        assert!(mean > 0.0 && mean < 3.0, "{mean}");
        assert_eq!(notices, 0);
    } else {
        assert_eq!((difference, notices), (0, 1));
    }
}

/// As in ai-toolkit, it changes the U-Net alone.
#[test]
fn an_inference_lora_has_its_full_strength_in_every_image_and_changes_no_text_encoder() {
    let dir = tempfile::tempdir().unwrap();
    let lora = fixtures().join("pipelines/lora.safetensors");
    let of_unet = dir.path().join("unet.safetensors");
    let mut tensors = safetensors::load(&lora, &Device::Cpu).unwrap();
    let count = tensors.len();
    tensors.retain(|name, _| name.starts_with("unet."));
    assert!(!tensors.is_empty() && tensors.len() < count);
    safetensors::save(&tensors, &of_unet).unwrap();
    let generate = |name: &str, model: &str, flags: &str| {
        let out = dir.path().join(name);
        let prompts = format!("sampler: ddim, sample_steps: 2, width: 64, height: 64, prompts: ['a cat --d 3{flags}']");
        let (outcome, events) = run_spec(&spec(&generate_job(&out, model, &prompts)));
        assert_eq!(outcome, Outcome::Completed, "{name}");
        let is_warning = |event: &ChildEvent| matches!(event, ChildEvent::Log { level, message } if level == "warn" && message.contains("layers of text encoders are not used"));
        let warnings = events.iter().filter(|event| is_warning(event)).count();
        (image::open(&images(&events)[0].1).unwrap().to_rgb8(), warnings)
    };
    let key = |key: &str, path: &Path| format!(", {key}: {}", path.display());
    let plain = generate("plain", "", "");
    let whole = generate("whole", &key("lora_path", &lora), "");
    let unet = generate("unet", &key("lora_path", &of_unet), "");
    assert!(plain != whole && plain != unet && whole != unet);
    let inference = generate("inference", &key("inference_lora_path", &lora), " --m 0");
    assert!(
        inference.0 == unet.0,
        "it changed a text encoder, or had another strength"
    );
    assert_eq!([plain.1, whole.1, unet.1, inference.1], [0, 0, 0, 1]);
}

#[test]
fn a_job_generates_the_images_of_diffusers_and_honours_every_prompt_flag() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let lora = fixtures().join("pipelines/lora.safetensors");
    let prompt = "a red circle on a blue background";
    let plain = generate_job(
        &out,
        "",
        &format!(
            "sampler: euler_a, prompts: ['{prompt} --n blurry --w 65 --h 64 --d 42 --l 7.5 --s 3'], seed: 5, neg: x"
        ),
    );
    let (outcome, events) = run_spec(&spec(&plain));
    assert_eq!(outcome, Outcome::Completed);
    let generated = images(&events);
    assert_eq!(generated.len(), 1);
    assert_matches_diffusers(&generated[0].1, "size_64x64");

    let with_lora = generate_job(
        &out,
        &format!(", lora_path: {}, block_compile: true", lora.display()),
        &format!(
            "compile: true, sampler: k_euler, neg: blurry, width: 72, height: 64, sample_steps: 4, guidance_scale: 4, prompt_file: true, \
                  prompts: ['{prompt} --m 0 --seed 42 --cfg 7.5', '{prompt} --network_multiplier 0.5 --seed 11 --cfg 4 --steps 4']"
        ),
    );
    let (outcome, events) = run_spec(&spec(&with_lora));
    assert_eq!(outcome, Outcome::Completed);
    let generated = images(&events);
    assert_eq!(generated.len(), 2);
    assert_matches_diffusers(&generated[1].1, "job_lora");
    let is_compile_note =
        |event: &&ChildEvent| matches!(event, ChildEvent::Log { message, .. } if message.contains("`compile`"));
    assert_eq!(
        events.iter().filter(is_compile_note).count(),
        1,
        "one log message explains `compile`"
    );
    let prompt_text = std::fs::read_to_string(generated[1].1.with_extension("txt")).unwrap();
    assert_eq!(
        prompt_text,
        format!("{prompt} --n blurry --w 72 --h 64 --seed 11 --cfg 4 --steps 4 --m 0.5")
    );
    let name = generated[1].1.file_name().unwrap().to_str().unwrap().to_owned();
    let (time, count) = name.strip_suffix(".png").unwrap().split_once('_').unwrap();
    assert!(
        time.len() == 13 && time.parse::<u64>().is_ok() && count == "1",
        "{name}"
    );
    let files: Vec<_> = std::fs::read_dir(&out)
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(files.len(), 5, "three images and two prompt files: {files:?}");
}

/// FLUX.1 Kontext: the control image of each prompt changes the result, and the flag is in the saved prompt.
#[test]
fn a_job_generates_from_control_images() {
    let dir = tempfile::tempdir().unwrap();
    let control = |name: &str, (width, height): (u32, u32)| {
        let path = dir.path().join(name);
        let pixel = |x, y| image::Rgb([(5 * x) as u8, (7 * y) as u8, 90]);
        image::RgbImage::from_fn(width, height, pixel).save(&path).unwrap();
        path.display().to_string()
    };
    let (square, wide) = (control("square.png", (40, 40)), control("wide.png", (70, 33)));
    let job = |folder: &str, arch: &str, prompts: &[String]| {
        let generate = format!(
            "sampler: flowmatch, sample_steps: 1, width: 90, height: 64, prompt_file: true, seed: 3, prompts: {}",
            serde_json::to_string(prompts).unwrap()
        );
        let yaml = generate_job(&dir.path().join(folder), &format!(", arch: {arch}"), &generate);
        spec(&yaml.replace("tiny_sd", "tiny_flux"))
    };
    let prompts = [&square, &wide].map(|path| format!("a cat --d 1 --ctrl_img {path}"));
    let (outcome, events) = run_spec(&job("out", "flux_kontext", &prompts));
    assert_eq!(outcome, Outcome::Completed);
    let generated: Vec<PathBuf> = images(&events).into_iter().map(|(_, path)| path).collect();
    let [first, second] = [0, 1].map(|i| image_io::open_rgb(&generated[i]).unwrap());
    assert_eq!(first.dimensions(), (80, 64), "rounded down to multiples of 16");
    assert!(first != second, "the control image has no effect");
    let text = std::fs::read_to_string(generated[1].with_extension("txt")).unwrap();
    assert!(text.ends_with(&format!("--ctrl_img {wide}")), "{text}");

    // Prompts of a file are read when the process runs.
    let file = dir.path().join("prompts.txt");
    std::fs::write(&file, format!("a dog --ctrl_img {square}\na cat\n")).unwrap();
    let from_file = |arch: &str| {
        let yaml = generate_job(
            &dir.path().join(arch),
            &format!(", arch: {arch}"),
            &format!(
                "sampler: flowmatch, sample_steps: 1, width: 32, height: 32, prompts: {}",
                file.display()
            ),
        );
        run_spec(&spec(&yaml.replace("tiny_sd", "tiny_flux"))).0
    };
    for (arch, expected) in [("flux_kontext", "\"a cat\""), ("flux", "takes no control image")] {
        let Outcome::Failed { message, .. } = from_file(arch) else {
            panic!("{arch} runs");
        };
        assert!(
            message.contains(expected) && message.contains("--ctrl_img"),
            "{message}"
        );
    }
    let missing = format!("a cat --ctrl_img {}/none.png", dir.path().display());
    let (outcome, _) = run_spec(&job("missing", "flux_kontext", &[missing]));
    assert!(
        matches!(&outcome, Outcome::Failed { message, .. } if message.contains("none.png: no such file")),
        "{outcome:?}"
    );
}

/// Stops the run once this many images were emitted.
struct StopAfter {
    images: usize,
    signal: StopSignal,
    events: Vec<ChildEvent>,
}

impl EventSink for StopAfter {
    fn emit(&mut self, event: ChildEvent) {
        self.events.push(event);
        if images(&self.events).len() >= self.images {
            self.signal.stop();
        }
    }
}

#[test]
fn a_new_attempt_generates_only_the_missing_images_with_the_same_seeds() {
    let dir = tempfile::tempdir().unwrap();
    let job = |folder: &str| {
        generate_job(
            &dir.path().join(folder),
            "",
            "sampler: ddim, sample_steps: 2, prompts: [a cat, a dog, zorb], num_repeats: 2, shuffle: true, \
             size_list: [[64, 64], [72, 64]], ext: webp, guidance_scale: 1",
        )
    };
    let whole = spec(&job("whole"));
    let (outcome, events) = run_spec(&whole);
    assert_eq!(outcome, Outcome::Completed);
    let expected = images(&events);
    assert_eq!(expected.iter().map(|(i, _)| *i).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);

    let broken = spec(&job("broken"));
    let signal = StopSignal::new();
    let mut sink = StopAfter {
        images: 2,
        signal: signal.clone(),
        events: Vec::new(),
    };
    assert_eq!(run(&broken, &mut sink, &signal), Outcome::stopped());
    let first = images(&sink.events);
    assert_eq!(first.len(), 2);
    let (outcome, events) = run_spec(&broken);
    assert_eq!(outcome, Outcome::Completed);
    let second = images(&events);
    assert_eq!(
        second[..2],
        first[..],
        "finished images are emitted again but not generated again"
    );
    for ((index, ours), (_, theirs)) in second.iter().zip(&expected) {
        assert_eq!(
            std::fs::read(ours).unwrap(),
            std::fs::read(theirs).unwrap(),
            "image {index}"
        );
    }
    // The same job again after it was complete: all images are generated anew.
    let (_, events) = run_spec(&broken);
    assert_ne!(images(&events)[0].1, first[0].1);
    assert_eq!(std::fs::read_dir(dir.path().join("broken")).unwrap().count(), 12);
}

#[test]
fn parts_of_a_job_generate_the_images_of_the_whole_job() {
    let dir = tempfile::tempdir().unwrap();
    let job = |folder: &str| {
        let generate = "sampler: ddim, sample_steps: 1, prompts: [a cat, a dog --seed 3, zorb], num_repeats: 2, shuffle: true, \
                        size_list: [[64, 64], [72, 64]], guidance_scale: 1";
        spec(&generate_job(&dir.path().join(folder), "", generate))
    };
    let (outcome, events) = run_spec(&job("whole"));
    assert_eq!(outcome, Outcome::Completed);
    let expected = images(&events);
    assert_eq!(expected.len(), 6);
    let run_part = |from: u64, to: u64, generated: Vec<u64>| {
        let mut spec = job(&format!("part{from}"));
        spec.job["part"] = serde_json::json!({"from": from, "to": to});
        spec.generated = generated;
        run_spec(&spec)
    };
    // An earlier attempt generated image 3 of the second part: it is not generated again.
    for (from, to, generated, expected_indices) in [(0, 2, vec![], vec![0, 1]), (2, 6, vec![3], vec![2, 4, 5])] {
        let (outcome, events) = run_part(from, to, generated);
        assert_eq!(outcome, Outcome::Completed);
        let ours = images(&events);
        assert_eq!(
            ours.iter().map(|(index, _)| *index).collect::<Vec<_>>(),
            expected_indices
        );
        for (index, path) in &ours {
            let whole = &expected[*index as usize].1;
            assert_eq!(
                std::fs::read(path).unwrap(),
                std::fs::read(whole).unwrap(),
                "image {index}"
            );
            let count = |path: &Path| path.to_str().unwrap().rsplit_once('_').unwrap().1.to_owned();
            assert_eq!(count(path), count(whole));
        }
        let reported = events.iter().rev().find_map(|event| match event {
            ChildEvent::Progress { done, total, .. } => Some((*done, *total)),
            _ => None,
        });
        assert_eq!(reported, Some((to - from, to - from)));
    }
    let (outcome, _) = run_part(4, 7, Vec::new());
    let Outcome::Failed { cause, message } = outcome else {
        panic!("{outcome:?}")
    };
    assert_eq!(cause, FailureCause::BadInput);
    assert!(message.contains("the job generates 6"), "{message}");
}

#[test]
fn prompts_are_read_from_a_file_and_combined_at_random() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompts.txt");
    std::fs::write(&file, "a cat\n\n  a dog  \nzorb").unwrap();
    let job = generate_job(
        &dir.path().join("out"),
        "",
        "sampler: ddim, sample_steps: 1, width: 64, height: 64, guidance_scale: 1, prompts: ideas.txt, random_prompts: true, \
         max_random_per_prompt: 3, max_images: 4, prompt_file: true",
    );
    let mut attempt = spec(&job);
    attempt.inputs.insert("ideas.txt".into(), file.clone());
    let attempt = in_own_folder(attempt, &dir.path().join("root"));
    let (outcome, events) = run_spec(&attempt);
    assert_eq!(outcome, Outcome::Completed);
    let generated = images(&events);
    assert_eq!(generated.len(), 4);
    for (_, path) in &generated {
        assert!(path.starts_with(dir.path().join("root")));
        let prompt_text = std::fs::read_to_string(path.with_extension("txt")).unwrap();
        let (prompt, _) = prompt_text.split_once(" --").unwrap();
        assert!(
            prompt
                .split(", ")
                .all(|part| ["a cat", "a dog", "zorb"].contains(&part)),
            "{prompt}"
        );
    }
    std::fs::write(&file, "\n \n").unwrap();
    let (outcome, _) = run_spec(&attempt);
    assert!(
        matches!(outcome, Outcome::Failed { cause: FailureCause::BadInput, message } if message.contains("no prompt"))
    );
    for (prompt, expected) in [
        (
            "a cat --w wide",
            "ideas.txt:2: the prompt's flag `--w` expects a whole number",
        ),
        (
            "a cat --frames 9",
            "ideas.txt:2: the prompt's flag `--frames`: no video models yet",
        ),
    ] {
        std::fs::write(&file, format!("\n{prompt} --zoom in\n")).unwrap();
        let (outcome, _) = run_spec(&attempt);
        let Outcome::Failed { cause, message } = outcome else {
            panic!("{prompt}: {outcome:?}");
        };
        assert!(
            cause == FailureCause::BadInput && message.contains(expected),
            "{message}"
        );
    }
    std::fs::write(&file, "\na cat --zoom in\n").unwrap();
    let (_, events) = run_spec(&attempt);
    let expected = "ideas.txt:2: `--zoom` is not a prompt flag";
    let warns = |event: &ChildEvent| matches!(event, ChildEvent::Log { message, .. } if message.contains(expected));
    assert!(events.iter().any(warns), "{events:?}");
}

#[test]
fn invalid_jobs_fail_with_a_message_that_names_the_cause() {
    let dir = tempfile::tempdir().unwrap();
    let failure = |attempt: &AttemptSpec| match run_spec(attempt).0 {
        Outcome::Failed {
            cause: FailureCause::BadInput,
            message,
        } => message,
        other => panic!("{other:?}"),
    };
    let good = generate_job(
        &dir.path().join("out"),
        "",
        "sampler: ddim, sample_steps: 1, prompts: [a]",
    );
    let model = fixtures().join("tiny_sd").display().to_string();
    let missing = spec(&good.replace(&model, "no/such/model"));
    assert!(failure(&missing).contains("no/such/model"));
    let lora = spec(&good.replace("dtype: float32", "dtype: float32, lora_path: no.safetensors"));
    assert!(failure(&lora).contains("no.safetensors"));
    // A folder that cannot be created, because a file has its name.
    let blocked = dir.path().join("blocked");
    std::fs::write(&blocked, "file").unwrap();
    let job = generate_job(&blocked, "", "sampler: ddim, sample_steps: 1, prompts: [a]");
    assert!(matches!(run_spec(&spec(&job)).0, Outcome::Failed { .. }));
}

/// Attacks on a worker's files, sent to the engine without earlier checks: it reads and writes only what was staged for
/// the attempt.
#[test]
fn an_attempt_with_staged_inputs_opens_no_other_files() {
    let dir = tempfile::tempdir().unwrap();
    let secret = dir.path().join("secret.txt");
    std::fs::write(&secret, "the admin's token").unwrap();
    let root = dir.path().join("attempt/output");
    let model = fixtures().join("tiny_sd").display().to_string();
    let staged = |yaml: &str| AttemptSpec {
        inputs: [("model".to_owned(), PathBuf::from(&model))].into(),
        output_root: Some(root.clone()),
        ..spec(&yaml.replace(&model, "model"))
    };
    let error_of = |yaml: &str| {
        let (outcome, events) = run_spec(&staged(yaml));
        let reported = serde_json::to_string(&(&outcome, &events)).unwrap();
        assert!(!reported.contains("the admin's token"), "{reported}");
        match outcome {
            Outcome::Failed {
                cause: FailureCause::BadInput,
                message,
            } => message,
            other => panic!("{other:?}"),
        }
    };
    let job = |prompts: &str| {
        generate_job(
            &root,
            "",
            &format!("width: 64, height: 64, sample_steps: 1, prompts: {prompts}"),
        )
    };
    let message = error_of(&job(secret.to_str().unwrap()));
    assert!(message.contains("is not an input of this job"), "{message}");
    for other in ["/nowhere/at/all", "/proc/self/environ", "/dev/zero", "../secret.txt"] {
        let other_message = error_of(&job(other));
        assert_eq!(
            other_message.replace(other, ""),
            message.replace(secret.to_str().unwrap(), ""),
            "{other}"
        );
    }
    let vae =
        generate_job(&root, &format!(", vae_path: {model}/vae"), "prompts: [a]").replace("model/vae", "other/vae");
    assert!(error_of(&vae).contains("is not an input of this job"));
    let lora = generate_job(&root, ", lora_path: /etc/hostname", "prompts: [a]");
    assert!(error_of(&lora).contains("`/etc/hostname` is not an input"));

    // Names that config validation refuses.
    let train = format!(
        "job: extension\nconfig:\n  name: n\n  process:\n  - type: sd_trainer\n    training_folder: out\n    network: {{type: lora}}\n    \
         datasets: [{{folder_path: data}}]\n    train: {{steps: 1}}\n    model: {{name_or_path: {model}}}\n"
    );
    let escaped = dir.path().join("escaped");
    for (pointer, name) in [
        ("/name", "../../escaped".to_owned()),
        ("/process/0/kind/train/name", escaped.display().to_string()),
        ("/process/0/kind/train/name", "../../escaped".to_owned()),
    ] {
        let mut hostile = staged(&train);
        *hostile.job.pointer_mut(pointer).unwrap() = name.clone().into();
        let (outcome, _) = run_spec(&hostile);
        let reported = format!("{outcome:?}");
        assert!(
            reported.contains("BadInput") && reported.contains("cannot name a folder"),
            "{reported}"
        );
        assert!(!escaped.exists(), "{name}");
    }
}

/// The keys that give parts of FLUX.1 are inputs like its model, and are opened where they were staged.
#[test]
fn flux_in_a_single_file_takes_its_parts_from_the_keys_of_the_config() {
    let dir = tempfile::tempdir().unwrap();
    let config = |keys: &str| {
        format!(
            "job: generate\nconfig:\n  name: images\n  process:\n  - type: to_folder\n    output_folder: out\n    model: \
             {{name_or_path: flux1-dev.gguf, arch: flux, dtype: float32{keys}}}\n    \
             generate: {{prompts: [a], width: 32, height: 32, sample_steps: 1, sampler: flowmatch, seed: 1}}\n"
        )
    };
    let run = |keys: &str| {
        let text = config(keys);
        let mut spec = spec(&text);
        let job: JobSpec = serde_json::from_value(spec.job.clone()).unwrap();
        assert_eq!(job.unsupported().errors.len(), 0, "{}", job.unsupported());
        spec.output_root = Some(dir.path().to_path_buf());
        let files = fixtures().join("flux_files");
        spec.inputs
            .insert("flux1-dev.gguf".into(), files.join("transformer.gguf"));
        for (name, here) in [
            ("t5.safetensors", files.join("t5_scaled_fp8.safetensors")),
            ("ae.safetensors", files.join("parts/ae.safetensors")),
            ("org/flux", fixtures().join("tiny_flux")),
        ] {
            if keys.contains(name) {
                spec.inputs.insert(name.into(), here);
            }
        }
        run_spec(&spec)
    };
    let all = ", te_name_or_path: t5.safetensors, vae_path: ae.safetensors, extras_name_or_path: org/flux";
    let (outcome, events) = run(all);
    assert_eq!(images(&events).len(), 1, "{outcome:?}");
    let quantised = |event: &ChildEvent| matches!(event, ChildEvent::Log { message, .. } if message.contains("q4_0"));
    assert!(events.iter().any(quantised));
    let (outcome, _) = run(", te_name_or_path: t5.safetensors");
    let message = format!("{outcome:?}");
    assert!(
        message.contains("without CLIP") && message.contains("extras_name_or_path"),
        "{message}"
    );
}

/// The same of Stable Diffusion 3.5 and Z-Image. Files without one of their parts name it.
#[test]
fn other_families_in_single_files_take_their_parts_from_the_keys_of_the_config() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let write = |name: &str, tensors: &Tensors| {
        let mut file = RawFile::default();
        file.add(tensors, candle_core::DType::F32);
        file.write(&at(name));
    };
    let (sd35, zimage) = (fixtures().join("tiny_sd35"), crate::testing::zimage_folder(false));
    for (family, folder) in [("sd3", sd35.as_path()), ("zimage", zimage.path())] {
        let transformer = read_tensors(&folder.join("transformer"));
        write(
            &format!("{family}.safetensors"),
            &original_tensors(family, &transformer),
        );
    }
    write("vae.safetensors", &ldm_vae(&read_tensors(&sd35.join("vae")), 4));
    write("ae.safetensors", &ldm_vae(&read_tensors(&zimage.path().join("vae")), 4));
    write("qwen.safetensors", &read_tensors(&zimage.path().join("text_encoder")));
    let (bare_sd35, bare_zimage) = (without_weights(&sd35), without_weights(zimage.path()));
    let run = |arch: &str, keys: &[(&str, &str, &Path)]| {
        let keys_text: String = keys.iter().map(|(key, name, _)| format!(", {key}: {name}")).collect();
        let mut spec = spec(&format!(
            "job: generate\nconfig:\n  name: images\n  process:\n  - type: to_folder\n    output_folder: out\n    model: \
             {{name_or_path: {arch}.safetensors, arch: {arch}, dtype: float32{keys_text}}}\n    \
             generate: {{prompts: [a], width: 32, height: 32, sample_steps: 1, sampler: flowmatch, seed: 1}}\n"
        ));
        let job: JobSpec = serde_json::from_value(spec.job.clone()).unwrap();
        assert_eq!(job.unsupported().errors.len(), 0, "{}", job.unsupported());
        spec.output_root = Some(at("out"));
        let model = format!("{arch}.safetensors");
        spec.inputs.insert(model.clone(), at(&model));
        for (_, name, here) in keys {
            spec.inputs.insert((*name).into(), here.to_path_buf());
        }
        run_spec(&spec)
    };
    let (vae, ae, qwen) = (at("vae.safetensors"), at("ae.safetensors"), at("qwen.safetensors"));
    let of_sd3 = [
        ("te_name_or_path", "org/text", sd35.as_path()),
        ("vae_path", "vae.safetensors", vae.as_path()),
        ("extras_name_or_path", "org/sd3", bare_sd35.path()),
    ];
    let (outcome, events) = run("sd3", &of_sd3);
    assert_eq!(images(&events).len(), 1, "{outcome:?}");
    let of_zimage = [
        ("te_name_or_path", "qwen.safetensors", qwen.as_path()),
        ("extras_name_or_path", "org/zimage", bare_zimage.path()),
        ("vae_path", "ae.safetensors", ae.as_path()),
    ];
    let (outcome, events) = run("zimage", &of_zimage);
    assert_eq!(images(&events).len(), 1, "{outcome:?}");
    for (arch, keys, missing, key) in [
        ("sd3", &of_sd3[..1], "without VAE", "`model.vae_path`"),
        (
            "sd3",
            &of_sd3[1..],
            "without CLIP-L text encoder",
            "`model.te_name_or_path`",
        ),
        ("zimage", &of_zimage[..2], "without VAE", "`model.vae_path`"),
        (
            "zimage",
            &of_zimage[1..],
            "without Qwen3 text encoder",
            "`model.te_name_or_path`",
        ),
    ] {
        let message = format!("{:?}", run(arch, keys).0);
        assert!(message.contains(missing) && message.contains(key), "{arch}: {message}");
    }
}
