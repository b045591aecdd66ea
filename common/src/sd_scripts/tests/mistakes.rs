//! Bad input: each mistake is one error on one line, which names the file, the line, the option, and what to do.

use super::support::{base, folder, import_in};
use crate::sd_scripts::{Script, Source, SourceFormat, import};

fn errors(text: &str) -> Vec<String> {
    let folder = folder();
    let errors = import_in(folder.path(), text, None).expect_err(text);
    errors.iter().map(ToString::to_string).collect()
}

#[test]
fn mistakes_of_training_configs_are_named() {
    let sd = base(Script::TrainNetwork);
    let unet_only = "network_train_unet_only = true\n";
    for (more, expected) in [
        (
            "netwrok_dim = 8",
            "config.toml:7:1: netwrok_dim: sd-scripts has no such option; did you mean `network_dim`?",
        ),
        ("zzzzzzzz = 1", "docs/sd-scripts.md lists the options"),
        (
            "b = 1",
            "b: sd-scripts has no such option; docs/sd-scripts.md lists the options",
        ),
        ("vaee = 1", "did you mean `vae`?"),
        (
            "[[datasets]]\n[[datasets.subsets]]\nimage_dir = \"cats\"",
            "config.toml:7:3: datasets: sd-scripts has no such option; it belongs into a data set config of its own",
        ),
        (
            "network_dim = \"8\"",
            "network_dim: expected a whole number, found \"8\"",
        ),
        ("cache_latents = 1", "cache_latents: expected true or false, found 1"),
        ("mixed_precision = \"fp8\"", "expected no, fp16, bf16"),
        ("learning_rate = inf", "expected a finite number"),
        ("learning_rate = 2026-01-01", "no option is a date"),
        ("seed = 99999999999999999999", "this number is too large"),
        (
            "[a]\nlearning_rate = 1e-4\n[b]\nlearning_rate = 1e-5",
            "this option is set twice, also in line 8",
        ),
        ("[a]\nseed = [1]", "seed: expected one value, found a list"),
        (
            "text_encoder_lr = 0.5\nunet_lr = 1\noptimizer_type = \"Prodigy\"",
            "text_encoder_lr: Prodigy finds one learning rate for all parts",
        ),
        (
            "learning_rate = 1\nnetwork_train_unet_only = true\noptimizer_type = \"Prodigy\"\nnetwork_args = [\"loraplus_lr_ratio=4\"]",
            "network_args: loraplus_lr_ratio: Prodigy finds one learning rate for all parts: remove it",
        ),
        (
            "optimizer_type = \"AdamW\"\nlr_scheduler = \"adafactor\"",
            "aitk has no adafactor",
        ),
        (
            "optimizer_type = \"SGDNesterov\"",
            "aitk has no optimizer `SGDNesterov`",
        ),
        ("optimizer_args = [\"weight_decay\"]", "expected name=value"),
        (
            "optimizer_args = [\"nesterov=True\"]",
            "optimizer_args: becomes `train.optimizer_params.nesterov`, which is refused: no such parameter",
        ),
        ("optimizer_type = \"Prodigy\"", "reads a rate below 0.1 as 1"),
        (
            "use_8bit_adam = true\noptimizer_type = \"AdamW\"",
            "use_8bit_adam: contradicts optimizer_type",
        ),
        ("lr_warmup_steps = 10", "lr_scheduler constant has no warm-up"),
        ("lr_scheduler = \"inverse_sqrt\"", "aitk has no inverse_sqrt"),
        (
            "lr_scheduler = \"polynomial\"\nlearning_rate = 1e-8",
            "lr_scheduler: polynomial falls to 1e-7, and needs a higher learning_rate",
        ),
        (
            "lr_scheduler_type = \"OneCycleLR\"",
            "aitk has no `OneCycleLR`; it has CosineAnnealingLR",
        ),
        (
            "lr_scheduler_type = \"StepLR\"",
            "StepLR needs step_size in lr_scheduler_args",
        ),
        (
            "lr_scheduler_args = [\"T_max=7\"]",
            "only lr_scheduler_type has arguments",
        ),
        (
            "network_args = [\"conv_dimm=4\"]",
            "`conv_dimm` is not an argument of a network; did you mean `conv_dim`?",
        ),
        (
            "network_args = [\"down_lr_weight=sinus\"]",
            "down_lr_weight: expected 12 numbers with commas between them, or cosine,",
        ),
        (
            "network_args = [\"up_lr_weight=1,a\"]",
            "up_lr_weight: expected numbers from 0, found \"a\"",
        ),
        (
            "network_args = [\"block_dims=1,2\"]",
            "network_args: block_dims: expected 25 whole numbers from 0 with commas between them, found 2",
        ),
        (
            "network_args = [\"block_dims=1,-2,3\"]",
            "block_dims: expected 25 whole numbers from 0 with commas between them, item 2 is not one",
        ),
        ("dim_from_weights = true", "dim_from_weights: needs network_weights"),
        (
            "dim_from_weights = true\nnetwork_weights = \"none.safetensors\"",
            "network_weights: `none.safetensors` is needed to read its ranks",
        ),
        (
            "enable_bucket = true\nmax_bucket_reso = 256",
            "max_bucket_reso: contradicts the resolution 512,512",
        ),
        (
            "enable_bucket = true\nmax_bucket_reso = 4294967232\nmax_train_epochs = 1\ntrain_batch_size = 2",
            "max_bucket_reso: expected at most 16384, found 4294967232",
        ),
        (
            "validation_split = 0.5\ncaption_extension = \"a/b\"",
            "caption_extension: becomes `datasets[0].caption_ext`, which is refused",
        ),
        ("full_bf16 = true", "contradicts mixed_precision no"),
        ("fp8_base = true", "fp8_base: contradicts mixed_precision no"),
        ("clip_skip = 20", "clip_skip: expected a number from 1 to 12, found 20"),
        (
            "max_token_length = 100",
            "max_token_length: expected 75, 150 or 225, found 100",
        ),
        ("adaptive_noise_scale = 0.1", "adaptive_noise_scale: needs noise_offset"),
        ("loss_type = \"huber\"", "huber_schedule = \"constant\""),
        (
            "sample_every_n_steps = 10",
            "config.toml:7:1: sample_every_n_steps: samples are asked for, but no prompts are given",
        ),
        (
            "optimizer_type = \"Adafactor\"\nfused_backward_pass = true\ngradient_accumulation_steps = 2",
            "config.toml:8:1: fused_backward_pass: contradicts gradient_accumulation_steps",
        ),
        (
            "sample_every_n_steps = 10\nsample_prompts = \"none.txt\"",
            "none.txt cannot be read",
        ),
        ("dataset_config = \"none.toml\"", "none.toml cannot be read"),
        (
            "network_train_unet_only = true\nnetwork_train_text_encoder_only = true",
            "contradicts network_train_unet_only",
        ),
        ("train_batch_size = 0", "expected a whole number from 1, found 0"),
        ("caption_dropout_rate = 2", "expected a chance from 0 to 1"),
        (
            "cache_latents = true\nrandom_crop = true\nenable_bucket = true",
            "random_crop: contradicts cache_latents",
        ),
    ] {
        let found = errors(&format!("{sd}{more}\n"));
        assert_eq!(found.len(), 1, "{more}: {found:#?}");
        assert!(
            found[0].contains(expected) && found[0].lines().count() == 1,
            "{more}: {}",
            found[0]
        );
    }
    for (script, more, expected) in [
        (Script::FluxTrainNetwork, "network_dim = 16", "must be network_dim (16)"),
        (
            Script::SdxlTrainNetwork,
            "cache_text_encoder_outputs = true",
            "contradicts the training of the text encoder",
        ),
        (
            Script::FluxTrainNetwork,
            "cache_text_encoder_outputs = true\nshuffle_caption = true",
            "needs fixed captions",
        ),
        (
            Script::SdxlTrainNetwork,
            "cache_text_encoder_outputs = true\nshuffle_caption = true\nnetwork_train_unet_only = true",
            "needs fixed captions",
        ),
        (
            Script::Sd3TrainNetwork,
            "weighting_scheme = \"mode\"",
            "aitk has no mode",
        ),
        (
            Script::FluxTrainNetwork,
            "network_args = [\"train_single_block_indices=40\"]",
            "expected blocks from 0 to 37",
        ),
        // sd-scripts skips layers of rank 0.
        (
            Script::FluxTrainNetwork,
            "network_args = [\"single_mod_dim=0\"]",
            "network_args: single_mod_dim: 0 gives these layers no LoRA",
        ),
        (
            Script::Sd3TrainNetwork,
            "network_args = [\"x_mod_dim=0\"]",
            "`network.network_kwargs.ignore_if_contains`",
        ),
    ] {
        let found = errors(&format!("{}{more}\n", base(script)));
        assert_eq!(found.len(), 1, "{more}: {found:#?}");
        assert!(found[0].contains(expected), "{more}: {}", found[0]);
    }
    let flux = base(Script::FluxTrainNetwork);
    let found = errors(&flux.replace("\"raw\"", "\"additive\""));
    assert!(found[0].contains("only raw is supported"), "{found:?}");
    let found = errors(&format!(
        "{}timestep_sampling = \"shift\"\ndiscrete_flow_shift = 0\n",
        flux.replace("timestep_sampling = \"sigmoid\"\n", "")
    ));
    assert!(found[0].contains("expected a number above 0"), "{found:?}");
    let found = errors(&format!(
        "{}timestep_sampling = \"sigma\"\nweighting_scheme = \"mode\"\n",
        flux.replace("timestep_sampling = \"sigmoid\"\n", "")
    ));
    assert!(found[0].contains("aitk draws no such timesteps"), "{found:?}");
    for missing in [
        "pretrained_model_name_or_path",
        "train_data_dir",
        "output_dir",
        "resolution",
    ] {
        let text: String = sd
            .lines()
            .filter(|line| !line.starts_with(missing))
            .map(|line| format!("{line}\n"))
            .collect();
        let folder = folder();
        let found = import_in(folder.path(), &text, Some(Script::TrainNetwork)).unwrap_err();
        assert!(found.len() == 1 && found[0].key == missing, "{missing}: {found:?}");
    }
    for text in [
        "",
        "a = ",
        "a == 1",
        "[a",
        "a = 1\na = 2",
        "\u{0}",
        "= 1",
        "[[a]]\nb = 1",
    ] {
        let found = errors(text);
        assert!(
            found.len() == 1 && found[0].starts_with("config.toml"),
            "{text}: {found:?}"
        );
    }
    assert!(
        errors(&format!("{sd}{unet_only}train_data_dir = 1\n"))[0].contains("not valid TOML"),
        "a key twice"
    );
}

#[test]
fn mistakes_of_data_set_configs_are_named() {
    let folder = folder();
    let text = base(Script::TrainNetwork).replace("train_data_dir = \"images\"", "dataset_config = \"data.toml\"");
    for (dataset, expected) in [
        (
            "[[datasets]]\n[[datasets.subsets]]\nimage_dirr = \"cats\"",
            "data.toml:3:1: image_dirr: sd-scripts has no such option; did you mean `image_dir`?",
        ),
        (
            "[[datasets]]\n[[datasets.subsets]]\nnum_repeats = 2",
            "this subset names no folder",
        ),
        (
            "[[datasets]]\nresolution = \"a\"\n[[datasets.subsets]]\nimage_dir = \"cats\"",
            "resolution: expected a side, or width and height, found \"a\"",
        ),
        (
            "[[datasets]]\n[[datasets.subsets]]\nimage_dir = \"cats\"\n[[datasets]]\nenable_bucket = true\n[[datasets.subsets]]\nimage_dir = \"more_cats\"",
            "data.toml:5:1: enable_bucket: aitk has buckets for all data sets or for none",
        ),
        ("[general]\nbatch_size = 1", "there is no [[datasets.subsets]]"),
        ("[datasets]\nresolution = 512", "write [[datasets]]"),
        ("[dataset]\nresolution = 512", "has [general] and [[datasets]] only"),
        (
            "[[datasets]]\n[[datasets.subsets]]\nimage_dir = \"cats\"\ncolor_aug = true",
            "data.toml:4:1: color_aug: use `datasets[].augmentations`",
        ),
        (
            "[[datasets]]\n[[datasets.subsets]]\nimage_dir = \"cats\"\nconditioning_data_dir = \"masks\"",
            "needs masked_loss",
        ),
        (
            "[[datasets]]\n[[datasets.subsets]]\nmetadata_file = \"a.json\"",
            "image_dir: this subset names no folder",
        ),
        (
            "[general]\nimage_dir = \"cats\"\n[[datasets]]\n[[datasets.subsets]]\nimage_dir = \"cats\"",
            "image_dir: sd-scripts has no such option",
        ),
    ] {
        std::fs::write(folder.path().join("data.toml"), dataset).unwrap();
        let found = import_in(folder.path(), &text, None).expect_err(dataset);
        assert!(found[0].to_string().contains(expected), "{dataset}: {found:?}");
    }
}

#[test]
fn mistakes_of_data_sets_in_json_are_named_with_their_lines() {
    let folder = folder();
    let text = base(Script::TrainNetwork).replace("train_data_dir = \"images\"", "dataset_config = \"data.json\"");
    for (dataset, expected) in [
        (
            "{\"datasets\": [{\n  \"subsets\": [{\n    \"image_dirr\": \"cats\"}]}]}",
            "data.json:3:5: image_dirr: sd-scripts has no such option; did you mean `image_dir`?",
        ),
        (
            "{\"datasets\": [{\n  \"subsets\": [{\"image_dir\": \"cats\",\n    \"color_aug\": true}]}]}",
            "data.json:3:5: color_aug: use `datasets[].augmentations`",
        ),
        (
            "{\"datasets\": [\n  {\"batch_size\": 1e999}]}",
            "data.json:2:18: batch_size: expected a finite number",
        ),
        (
            "{\"general\": {},\n \"general\": {}}",
            "data.json:2:2: general: the key `general` is given twice",
        ),
        ("{\"datasets\": ", "data.json:1:14: this is not valid JSON"),
        ("[]", "data.json: expected a JSON object"),
    ] {
        std::fs::write(folder.path().join("data.json"), dataset).unwrap();
        let found = import_in(folder.path(), &text, None).expect_err(dataset);
        assert!(found[0].to_string().starts_with(expected), "{dataset}: {found:?}");
    }
    let deep = format!("{{\"datasets\": {}1{}}}", "[".repeat(40), "]".repeat(40));
    std::fs::write(folder.path().join("data.json"), deep).unwrap();
    let found = import_in(folder.path(), &text, None).expect_err("deep");
    assert!(found[0].to_string().contains("inside each other"), "{found:?}");
}

#[test]
fn an_unknown_option_hides_no_refused_one() {
    let sd = base(Script::TrainNetwork);
    let found = errors(&format!(
        "{sd}netwrok_dim = 8\ncache_latents = 1\nweighted_captions = true\n"
    ));
    assert_eq!(found.len(), 3, "{found:#?}");
    for (found, option) in found.iter().zip(["netwrok_dim", "cache_latents", "weighted_captions"]) {
        assert!(found.contains(&format!(": {option}: ")), "{found}");
    }
}

#[test]
fn large_and_deep_files_are_refused() {
    assert!(errors(&"#".repeat(2 << 20))[0].contains("larger than 1 MiB"));
    let deep = format!("a = {}1{}", "[".repeat(50_000), "]".repeat(50_000));
    assert_eq!(errors(&deep).len(), 1);
    let deep = format!("a = {}1{}", "[".repeat(40), "]".repeat(40));
    assert!(errors(&deep)[0].contains("inside each other"), "{:?}", errors(&deep));
    let many = format!("a = [{}1]", "1,".repeat(60_000));
    assert!(errors(&many)[0].contains("more than 50000 values"));
}

#[test]
fn mistakes_of_presets_are_named() {
    let folder = folder();
    let text = std::fs::read_to_string(folder.path().join("gui_sd15_locon.json")).unwrap();
    let errors = |text: &str| {
        let source = Source {
            text,
            format: SourceFormat::GuiPreset,
            file: "preset.json",
            directory: folder.path(),
            dataset_config: None,
            script: None,
        };
        import(source)
            .expect_err(text)
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
    };
    for (from, to, expected) in [
        (
            "\"Kohya LoCon\"",
            "\"LyCORIS/BOFT\"",
            "`LyCORIS/BOFT` is not a type that aitk trains",
        ),
        (
            "\"LoRA_type\": \"Kohya LoCon\",",
            "",
            "only presets of the tabs for LoRAs",
        ),
        (
            "\"color_aug\": false",
            "\"color_aug\": true",
            "preset.json:12:3: color_aug: use `datasets[].augmentations`",
        ),
        (
            "\"epoch\": 2",
            "\"epochs\": 2",
            "the kohya GUI has no such field; did you mean `epoch`?",
        ),
        (
            "\"network_dim\": 16",
            "\"network_dim\": \"many\"",
            "network_dim: expected a whole number, found \"many\"",
        ),
        (
            "--loss_type l1",
            "--los_type l1",
            "preset.json:3:3: los_type: sd-scripts has no such option; did you mean `loss_type`?",
        ),
        (
            "\"train_data_dir\": \"images\"",
            "\"train_data_dir\": \"nothing\"",
            "cannot be read as a folder",
        ),
        (
            "\"clip_skip\": \"1\"",
            "\"clip_skip\": 20",
            "clip_skip: expected a number from 1 to 12, found 20",
        ),
        (
            "\"sdxl\": false",
            "\"anima_checkbox\": true",
            "no models of this family",
        ),
    ] {
        assert!(text.contains(from), "{from}");
        let found = errors(&text.replace(from, to));
        assert!(found.iter().any(|error| error.contains(expected)), "{to}: {found:?}");
    }
    assert!(errors("[]")[0].contains("expected a JSON object"));
    assert!(errors("{")[0].contains("not valid JSON"));
}

/// What only the reader of the resulting config refuses is reported at the option that it comes from.
#[test]
fn what_the_config_refuses_is_reported_at_its_option() {
    let sd = base(Script::TrainNetwork);
    for (more, expected) in [
        (
            "text_encoder_lr = -1e-5",
            "config.toml:7:1: text_encoder_lr: becomes `train.lr_factors[0].factor`, which is refused: expected",
        ),
        (
            "learning_rate = 2147483648",
            ": learning_rate: becomes `train.lr`, which is refused: ",
        ),
        (
            "network_dropout = 1",
            ": network_dropout: becomes `network.dropout`, which is refused: ",
        ),
        (
            "network_args = [\"module_dropout=1\"]",
            "config.toml:7:1: network_args: becomes `network.network_kwargs.module_dropout`, which is refused: ",
        ),
        (
            "network_args = [\"conv_dim=0.5\"]",
            "config.toml:7:1: network_args: becomes `network.conv`, which is refused: ",
        ),
        (
            "caption_extension = \"a/b\"",
            ": caption_extension: becomes `datasets[0].caption_ext`, which is refused: ",
        ),
        (
            "optimizer_args = [\"betas=0.9\"]",
            "optimizer_args: becomes `train.optimizer_params.betas`, which is refused: ",
        ),
    ] {
        let found = errors(&format!("{sd}{more}\n"));
        assert!(
            found
                .iter()
                .any(|error| error.contains(expected) && error.starts_with("config.toml:")),
            "{more}: {found:#?}"
        );
    }
    // A default that the user did not write.
    for (side, expected) in [
        (
            64,
            "resolution: 64,64 is smaller than min_bucket_reso, whose default is 256",
        ),
        (
            2048,
            "resolution: 2048,2048 is larger than max_bucket_reso, whose default is 1024",
        ),
    ] {
        let text = format!("{}enable_bucket = true\n", sd.replace("512", &side.to_string()));
        let found = errors(&text);
        assert!(found.len() == 1 && found[0].contains(expected), "{text}{found:#?}");
    }
}
