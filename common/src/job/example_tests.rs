//! Realistic configs: all parse, and the unsupported ones report why.

use super::*;

fn load_text(name: &str, text: &str) -> LoadedJob {
    let env = |name: &str| (name == "AITK_OUTPUT").then(|| "output".to_owned());
    let options = LoadOptions {
        env: &env,
        ..LoadOptions::default()
    };
    let format = Format::from_name(name.rsplit('.').next().unwrap()).unwrap();
    let job = parse(text, format, Some(name), &options).unwrap_or_else(|error| panic!("{error}"));
    super::tests::assert_valid_as_json(&job);
    job
}

macro_rules! load_file {
    ($name:literal) => {
        load_text($name, include_str!(concat!("testdata/", $name)))
    };
}

/// The keys of the errors, without `config.process[N].`.
fn refused(job: &LoadedJob) -> Vec<String> {
    let support = job.spec.unsupported();
    let short = |key: &str| match key
        .strip_prefix("config.process[")
        .and_then(|rest| rest.split_once("]."))
    {
        Some((_, key)) => key.to_owned(),
        None => key.to_owned(),
    };
    for finding in support.errors.iter().chain(&support.warnings) {
        assert!(finding.line.is_some() && finding.file.is_some(), "{finding}");
    }
    support.errors.iter().map(|finding| short(&finding.key)).collect()
}

fn warned(job: &LoadedJob) -> Vec<String> {
    let warnings = job.spec.unsupported().warnings;
    warnings
        .iter()
        .map(|finding| finding.key.rsplit('.').next().unwrap().to_owned())
        .collect()
}

#[test]
fn shipped_examples_are_supported() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../config/examples");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|end| end != "yaml") {
            continue;
        }
        count += 1;
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(&path).unwrap();
        let job = load_text(&name, &text);
        assert_eq!(job.warnings, [], "{name}");
        assert_eq!(job.spec.unsupported(), Support::default(), "{name}");
        // The commented-out keys are valid too.
        let uncommented = uncomment(&text);
        assert_ne!(uncommented, text);
        let job = load_text(&name, &uncommented);
        assert_eq!(job.warnings, [], "{name}");
        assert_eq!(job.spec.unsupported(), Support::default(), "{name}");
    }
    assert!(count >= 24, "{count}");
}

/// Turns comments that hold a key (`# lr_scheduler: cosine`) into that key.
fn uncomment(text: &str) -> String {
    let line = |line: &str| {
        let body = line.trim_start().strip_prefix("# ").unwrap_or("");
        let key = body.trim_start().split(':').next().unwrap_or("");
        let is_key = !key.is_empty() && key.len() < body.trim_start().len() && !key.contains(' ');
        let column = line.find('#').unwrap_or(0);
        let known = ["cluster", "priority", "device", "memory_profile", "labels", "retries"];
        if is_key && column > 0 || known.contains(&key) {
            format!("{}{body}\n", &line[..column])
        } else {
            format!("{line}\n")
        }
    };
    text.lines().map(line).collect()
}

#[test]
fn the_default_job_of_the_web_ui_is_read() {
    let job = load_file!("ui_default_job.json");
    assert_eq!(job.warnings, [], "parses unmodified, nothing to say");
    let trainer = job.spec.process[0].trainer().unwrap();
    assert_eq!(trainer.model.arch.name, arch::ArchName::Flux);
    assert_eq!(*trainer.network.as_ref().unwrap().lokr_factor, -1);
    assert_eq!(trainer.model.qtype, "");
    assert_eq!(job.spec.meta["name"], "my_ui_lora");
    assert_eq!(trainer.split_datasets().len(), 3);
    let requests = trainer.sample.requests(trainer.trigger_word.as_deref());
    assert_eq!((requests[1].seed, requests[1].network_multiplier), (Some(43), 0.8));
    assert_eq!(requests[1].prompt, "[trigger] riding a bicycle");
    assert_eq!(refused(&job), [""; 0]);
    assert_eq!(warned(&job), ["use_ui_logger"]);
}

#[test]
fn a_web_ui_job_for_sd15_is_supported() {
    let job = load_file!("ui_sd15_job.json");
    assert_eq!(refused(&job), [""; 0]);
    let trainer = job.spec.process[0].trainer().unwrap();
    assert_eq!(trainer.train.optimizer, optimizer::OptimizerName::AdamW8Bit);
    assert_eq!(trainer.model.arch.name, arch::ArchName::Sd1);
    assert_eq!(
        trainer.model.dtype,
        dtype::DType::BF16,
        "train.dtype replaces model.dtype"
    );
}

#[test]
fn samplers_must_suit_the_family() {
    let refused_with = |from: &str, to: &str| {
        let text = include_str!("../../../config/examples/generate_flux.yaml");
        assert!(text.contains(from), "{from}");
        refused(&load_text("generate_flux.yaml", &text.replace(from, to)))
    };
    for known in ["euler", "ddpm", "heun", "dpmsolver++", "dpm++_2m", "unipc"] {
        let to = format!("sampler: {known}");
        assert_eq!(refused_with("sampler: flowmatch", &to), [""; 0], "{known}");
    }
    let trained = |noise: &str| {
        let text = include_str!("../../../config/examples/train_lora_flux.yaml");
        let to = format!("noise_scheduler: {noise}");
        refused(&load_text(
            "flux.yaml",
            &text.replace("noise_scheduler: flowmatch", &to),
        ))
    };
    assert_eq!(trained("euler"), [""; 0]);
    assert_eq!(trained("unipc"), ["train.noise_scheduler"]);
    assert_eq!(
        refused_with("sampler: flowmatch", "sampler: ddim"),
        ["generate.sampler"]
    );
    assert_eq!(refused_with("arch: flux", "arch: sdxl"), ["generate.sampler"]);
    assert_eq!(
        refused_with("width: 1024", "width: 1000"),
        [""; 0],
        "it is rounded down"
    );
    let xl = include_str!("../../../config/examples/generate_sdxl.yaml");
    for other in ["flowmatch", "heun", "unipc"] {
        let text = xl.replace("sampler: euler ", &format!("sampler: {other} "));
        assert_eq!(refused(&load_text("generate_sdxl.yaml", &text)), ["generate.sampler"]);
    }
    let without = |arch: &str| {
        let text = xl.replace(
            "arch: sdxl",
            &format!("arch: {arch}\n        use_text_encoder_2: false"),
        );
        refused(&load_text("generate_sdxl.yaml", &text))
    };
    assert_eq!(without("sdxl"), ["model.use_text_encoder_2"]);
    assert_eq!(without("sd1"), [""; 0], "it has no effect there, as in ai-toolkit");
}

#[test]
fn the_text_encoders_of_chroma_and_z_image_are_not_trained() {
    for text in [
        include_str!("../../../config/examples/train_lora_chroma.yaml"),
        include_str!("../../../config/examples/train_lora_zimage.yaml"),
    ] {
        let text = text.replace("batch_size: 1", "batch_size: 1\n        train_text_encoder: true");
        assert_eq!(refused(&load_text("a.yaml", &text)), ["train.train_text_encoder"]);
    }
}

#[test]
fn a_flux_job_is_read() {
    let job = load_file!("flux_lora.yaml");
    assert_eq!(job.warnings, []);
    let trainer = job.spec.process[0].trainer().unwrap();
    assert_eq!(trainer.model.arch.name, arch::ArchName::Flux);
    assert!(trainer.model.quantizes_text_encoder(), "quantize_te follows quantize");
    let requests = trainer.sample.requests(trainer.trigger_word.as_deref());
    assert_eq!(requests[0].prompt, "st1le a lake at dawn");
    assert_eq!(
        (requests[1].seed, requests[1].width, requests[1].height),
        (Some(7), 768, 1024)
    );
    assert_eq!(refused(&job), [""; 0]);
    assert_eq!(warned(&job), [""; 0]);
    assert!(trainer.save.push_to_hub && trainer.save.hf_repo_id.is_some());
}

#[test]
fn legacy_sdxl_keys_are_read() {
    let job = load_file!("sdxl_lora_legacy.yaml");
    let warnings: Vec<&str> = job.warnings.iter().map(|finding| finding.key.as_str()).collect();
    assert_eq!(
        warnings,
        ["config.process[0].sample.prompts[0]"],
        "an unknown prompt flag"
    );
    let trainer = job.spec.process[0].trainer().unwrap();
    let network = trainer.network.as_ref().unwrap();
    assert_eq!(
        (network.linear, network.linear_alpha, network.conv_alpha),
        (32, 16.0, Some(4.0))
    );
    assert_eq!(trainer.train.steps, 4096, "a leading zero means octal");
    assert_eq!(trainer.train.gradient_accumulation_steps, -1);
    assert_eq!(trainer.datasets[0].caption_ext, "txt", "the legacy key gets no dot");
    assert!(trainer.datasets[0].flip_x);
    let request = &trainer.sample.requests(None)[0];
    assert_eq!(
        (request.seed, request.steps, request.guidance_scale),
        (Some(3), 30, 7.5)
    );
    assert_eq!(
        (request.negative_prompt.as_str(), request.network_multiplier),
        ("ugly, blurry", 0.8)
    );
    assert_eq!(refused(&job), [""; 0]);
    assert_eq!(warned(&job), ["unet_lr", "text_encoder_lr"]);
}

#[test]
fn a_wan_job_is_read() {
    let job = load_file!("wan22_i2v.yaml");
    assert_eq!(job.warnings, []);
    let trainer = job.spec.process[0].trainer().unwrap();
    assert_eq!(trainer.model.arch.name, arch::ArchName::Wan22_14bI2v);
    assert_eq!(trainer.model.arch.tag.as_deref(), Some("14b"));
    let refused = refused(&job);
    for key in [
        "model.arch",
        "model.qtype",
        "datasets[0].num_frames",
        "sample.num_frames",
    ] {
        assert!(refused.iter().any(|found| found == key), "{key} not in {refused:?}");
    }
    let inputs = job.spec.inputs();
    for path in ["/data/clips", "/data/first.png", "/data/second.png"] {
        assert!(inputs.iter().any(|input| input.config_path == path), "{path}");
    }
}

#[test]
fn a_zimage_lokr_job_is_read() {
    let job = load_file!("zimage_lokr.jsonc");
    assert_eq!(job.warnings, []);
    let refused = refused(&job);
    assert!(
        refused.iter().any(|found| found == "datasets[0].controls"),
        "{refused:?}"
    );
    for key in ["model.arch", "network.type", "train.diff_output_preservation"] {
        assert!(!refused.iter().any(|found| found == key), "{refused:?}");
    }
    assert!(
        !refused.iter().any(|found| found.ends_with("control_path")),
        "an empty path is off"
    );
}

#[test]
fn options_of_the_loss_are_checked_against_the_model_and_the_network() {
    let [sd, flux] = [
        include_str!("../../../config/examples/train_lora_sd15.yaml"),
        include_str!("../../../config/examples/train_lora_flux.yaml"),
    ];
    let errors = |text: &str, key: &str, value: &str| -> Vec<String> {
        let text = text.replacen("      train:\n", &format!("      train:\n        {key}: {value}\n"), 1);
        assert!(text.contains(key), "the example has another indentation");
        match parse(&text, Format::Yaml, Some("x.yaml"), &LoadOptions::default()) {
            Ok(job) => {
                assert_eq!(refused(&job), [""; 0], "{key}");
                Vec::new()
            }
            Err(error) => error.findings().iter().map(ToString::to_string).collect(),
        }
    };
    for key in ["t0_loss_target", "do_fft_loss", "do_signal_amplification"] {
        assert_eq!(errors(flux, key, "true"), [""; 0], "{key}");
        let found = errors(sd, key, "true");
        assert!(
            found.len() == 1 && found[0].contains(&format!("train.{key}")) && found[0].contains("sd1"),
            "{found:?}"
        );
    }
    assert_eq!(errors(sd, "standardize_latents", "true"), [""; 0]);
    assert!(errors(flux, "standardize_latents", "true")[0].contains("flux"));
    for (key, value) in [
        ("max_loss", "0"),
        ("guidance_loss_target", "[4, 2]"),
        ("guidance_loss_target", "1e9"),
        ("optimal_noise_pairing_samples", "2000"),
        ("random_noise_multiplier", "9"),
        ("prompt_saturation_chance", "1.5"),
        ("latent_multiplier", ".inf"),
        ("loss_type", "wavelet"),
    ] {
        let found = errors(sd, key, value);
        assert!(
            found.len() == 1 && found[0].contains(&format!("train.{key}")),
            "{key}: {found:?}"
        );
    }
    let both = |key: &str| errors(flux, &format!("t0_loss_target: true\n        {key}"), "true");
    for key in ["inverted_mask_prior", "do_prior_divergence"] {
        assert!(both(key)[0].contains("t0_loss_target"), "{key}");
    }
    let text = flux.replacen(
        "      train:\n",
        "      train:\n        t0_loss_target: true\n        do_guidance_loss: true\n",
        1,
    );
    let job = parse(&text, Format::Yaml, Some("x.yaml"), &LoadOptions::default()).unwrap();
    let warned: Vec<&str> = job.warnings.iter().map(|warning| warning.key.as_str()).collect();
    assert_eq!(warned, ["config.process[0].train.do_guidance_loss"]);
    assert_eq!(errors(sd, "correct_pred_norm", "true"), [""; 0]);
    assert!(errors(flux, "correct_pred_norm", "true")[0].contains("velocities"));
    assert_eq!(errors(flux, "loss_type", "stepped"), [""; 0]);
    assert!(errors(sd, "loss_type", "stepped")[0].contains("`stepped`"));
    for text in [sd, flux] {
        assert_eq!(errors(text, "loss_target", "source"), [""; 0]);
        for target in ["unaugmented", "differential_noise"] {
            let found = errors(text, "loss_target", target);
            assert!(found.len() == 1 && found[0].contains("augmentations"), "{found:?}");
        }
    }
    let images = errors(flux, "loss_target: source\n        t0_loss_target", "true");
    assert!(
        images.len() == 1 && images[0].contains("`loss_target: source`"),
        "{images:?}"
    );
    let full = include_str!("../../../config/examples/train_full_sd15.yaml");
    for key in ["inverted_mask_prior", "do_prior_divergence", "correct_pred_norm"] {
        assert!(errors(full, key, "true")[0].contains("needs a `network`"), "{key}");
    }
}

#[test]
fn a_locon_is_trained_on_unets_alone() {
    let text = include_str!("../../../config/examples/train_lora_flux.yaml");
    for (kind, expected) in [
        ("locon", &["network.type"][..]),
        ("lycoris", &["network.type"]),
        ("lokr", &[]),
    ] {
        let job = load_text("x.yaml", &text.replace("type: lora", &format!("type: {kind}")));
        assert_eq!(refused(&job), expected, "{kind}");
        let text = include_str!("../../../config/examples/train_lora_sd15.yaml");
        let job = load_text("x.yaml", &text.replace("type: lora", &format!("type: {kind}")));
        assert_eq!(refused(&job), [""; 0], "{kind}");
    }
}

#[test]
fn sliders_of_ai_toolkit_are_read() {
    let slider = load_file!("slider_legacy.yaml");
    let warned: Vec<&str> = slider.warnings.iter().map(|warning| warning.key.as_str()).collect();
    assert_eq!(
        warned,
        ["config.process[0].train.max_denoising_steps"],
        "the default of other trainings"
    );
    assert_eq!(slider.spec.unsupported().errors, []);
    let trainer = slider.spec.process[0].trainer().unwrap();
    assert_eq!(
        trainer.training_folder.as_deref(),
        Some("output"),
        "inherited from the job"
    );
    assert_eq!(trainer.slider.as_ref().unwrap().targets[0].positive, "old");

    let concept = load_file!("concept_slider.yaml");
    assert_eq!(concept.warnings, []);
    assert_eq!(refused(&concept), ["model.arch"]);
}

#[test]
fn unsupported_job_kinds_and_processes_are_refused() {
    let caption = load_file!("caption.yaml");
    assert_eq!(refused(&caption), ["type"]);
    assert_eq!(caption.warnings.len(), 0);

    // Only its file format: `pt`.
    assert_eq!(
        refused(&load_file!("textual_inversion.yaml")),
        ["embedding.save_format"]
    );
}

/// Like ai-toolkit's `extract.example.yml` and `mod_lora_scale.yaml`.
#[test]
fn extractions_and_rescalings_of_ai_toolkit_are_read() {
    let extract = load_file!("extract.yaml");
    assert_eq!(extract.warnings, []);
    assert_eq!(extract.spec.unsupported(), Support::default());
    let processes: Vec<&extract::ExtractProcess> = extract
        .spec
        .process
        .iter()
        .map(|process| match &process.kind {
            ProcessKind::Extract(process) => &**process,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(processes[0].dtype, Some(dtype::DType::F16), "inherited from the job");
    assert_eq!(processes[1].dtype, Some(dtype::DType::BF16));
    let folder = extract.spec.config.output_folder.as_deref();
    let paths: Vec<String> = processes
        .iter()
        .map(|process| process.result_path("extracted", folder))
        .collect();
    assert_eq!(
        paths,
        [
            "output/extracted_64_32.safetensors",
            "/results/extracted_q.safetensors",
            "output/extracted_locon_ratio_0.5_0.5.safetensors",
            "output/extracted_4.safetensors",
            "output/extracted_lora_quantile_0.5.safetensors",
        ]
    );
    let parameters: Vec<[f64; 2]> = processes
        .iter()
        .map(|process| [false, true].map(|conv| process.parameter(conv)))
        .collect();
    assert_eq!(
        parameters,
        [[64.0, 32.0], [0.2, 0.2], [0.5, 0.5], [4.0, 0.0], [0.5, 0.0]]
    );
    assert!(processes[2].has_large_convs() && !processes[4].has_large_convs());
    let inputs: Vec<(String, String)> = extract
        .spec
        .inputs()
        .into_iter()
        .map(|input| (input.key, input.config_path))
        .collect();
    let expected = [("base_model", "base"), ("extract_model", "tuned")];
    assert_eq!(
        inputs,
        expected.map(|(key, name)| (format!("config.{key}"), format!("/models/{name}.safetensors")))
    );

    let rescale = load_file!("rescale.yaml");
    assert_eq!(rescale.warnings, []);
    assert_eq!(rescale.spec.unsupported(), Support::default());
    assert_eq!(rescale.spec.inputs()[0].config_path, "in.safetensors");
}

#[test]
fn mistakes_in_extractions_and_rescalings_are_one_error_each() {
    let errors = |text: &str| match parse(text, Format::Yaml, Some("a.yaml"), &LoadOptions::default()) {
        Ok(job) => job.spec.unsupported().errors.iter().map(ToString::to_string).collect(),
        Err(error) => error
            .findings()
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<String>>(),
    };
    let one = |text: &str, parts: &[&str]| {
        let found = errors(text);
        assert_eq!(found.len(), 1, "{text}: {found:?}");
        for part in parts {
            assert!(found[0].contains(part), "\"{part}\" is not in: {}", found[0]);
        }
    };
    let extract = include_str!("testdata/extract.yaml");
    assert_eq!(errors(extract), [""; 0]);
    for (from, to, parts) in [
        ("linear: 64", "linear: 6.5", &["a.yaml:", "linear", "whole number"][..]),
        ("linear: 64", "linear: -1", &["linear", "0 to 16384"]),
        ("linear: 0.2", "linear: 1.5", &["linear", "0 to 1"]),
        (
            "  base_model: /models/base.safetensors\n",
            "",
            &["config.base_model", "needs a `base_model`"],
        ),
        (
            "  extract_model: /models/tuned.safetensors\n",
            "",
            &["config.extract_model"],
        ),
        (
            "[name]_64_32.safetensors",
            "../x.safetensors",
            &["filename", "cannot name a file"],
        ),
        ("[name]_64_32.safetensors", "x.ckpt", &["filename", ".safetensors"]),
        ("/results/[name]_q.safetensors", "/results/..", &["output_path"]),
        (
            "/results/[name]_q.safetensors",
            "output/[name]_64_32.safetensors",
            &["output_path", "process[0] writes"],
        ),
        (
            "mode: fixed, linear: 64",
            "use_sparse_bias: true, linear: 64",
            &["use_sparse_bias", "higher rank"],
        ),
        ("mode: ratio, linear: 0.2", "mode: svd, linear: 0.2", &["mode", "svd"]),
    ] {
        assert!(extract.contains(from), "{from}");
        one(&extract.replacen(from, to, 1), parts);
    }
    let rescale = include_str!("testdata/rescale.yaml");
    assert_eq!(errors(rescale), [""; 0]);
    for (from, to, parts) in [
        (
            "current_weight: 6.0",
            "current_weight: 0",
            &["current_weight", "other than 0"][..],
        ),
        (
            "target_weight: 1.0",
            "target_weight: 0",
            &["target_weight", "other than 0"],
        ),
        (
            "output_path: out.safetensors",
            "output_path: out",
            &["output_path", ".safetensors"],
        ),
        ("scale_target: up_down", "scale_target: all", &["scale_target", "all"]),
    ] {
        assert!(rescale.contains(from), "{from}");
        one(&rescale.replacen(from, to, 1), parts);
    }
}

#[test]
fn a_full_fine_tune_with_swapped_parameters_is_supported() {
    let job = load_file!("full_finetune.yaml");
    assert_eq!(job.warnings, []);
    assert_eq!(refused(&job), [""; 0]);
    let text = include_str!("testdata/full_finetune.yaml");
    for (from, to, key) in [
        ("optimizer: adafactor", "optimizer: adamw", "train.optimizer"),
        (
            "paramiter_swapping_factor: 0.9",
            "paramiter_swapping_factor: 1.5",
            "train.paramiter_swapping_factor",
        ),
        (
            "do_paramiter_swapping: true",
            "do_paramiter_swapping: true\n        gradient_accumulation_steps: 2",
            "train.gradient_accumulation_steps",
        ),
    ] {
        assert!(text.contains(from), "{from}");
        let error = parse(&text.replacen(from, to, 1), Format::Yaml, None, &LoadOptions::default()).unwrap_err();
        let found: Vec<String> = error.findings().iter().map(ToString::to_string).collect();
        assert!(found.len() == 1 && found[0].contains(key), "{found:?}");
    }
}

#[test]
fn a_flux2_generate_job_is_read() {
    let job = load_file!("generate_flux2.yaml");
    assert_eq!(job.warnings, []);
    let ProcessKind::Generate(process) = &job.spec.process[0].kind else {
        panic!()
    };
    assert_eq!(process.generate.ext, "webp");
    assert_eq!(process.model.dtype, dtype::DType::BF16);
    let request = process.generate.request("a cat --w 100 --seed 5", Some((768, 1280)));
    assert_eq!((request.width, request.height, request.seed), (96, 1280, Some(5)));
    assert_eq!(process.generate.request("a cat", None).seed, None, "-1 is random");
    assert!(job.spec.inputs().iter().any(|input| input.config_path == "prompts.txt"));
    assert_eq!(refused(&job), ["model.arch"]);
}
