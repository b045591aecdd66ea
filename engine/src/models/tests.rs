//! Compares the components of models with diffusers and transformers.

use super::clip::{ClipTextConfig, ClipTextModel, ClipTokenizer};
use super::unet::{AdditionalConditions, UNet2DConditionModel};
use super::{config, vae};
use crate::autograd::gradients;
use crate::families::stable_diffusion::{SdConfig, SdModel, Variant, split_checkpoint};
use crate::families::{self, ItemSize, LoadOptions, Model, Prompt, sd1 as sd1_family, sd2, sdxl};
use crate::nn::VisitLayers;
use crate::testing::recipes::assemble;
use crate::testing::{fixtures, gap, in_portable_mode, largest, load_sd, names_of_tensors};
use crate::weights::{Index, Weights};
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::PartPaths;
use candle_core::{DType, Device, Tensor, Var};
use std::path::PathBuf;

fn fixture(name: &str) -> Fixture {
    let index = Index::open(fixtures().join("models").join(format!("{name}.safetensors"))).unwrap();
    Fixture { index }
}

struct Fixture {
    index: Index,
}

impl Fixture {
    fn get(&self, name: &str) -> Tensor {
        let shape = self.index.shape(name).unwrap_or_else(|| panic!("no {name}")).to_vec();
        Weights::from_index(self.index.clone(), DType::F32, &Device::Cpu)
            .get(shape, name)
            .unwrap()
    }

    fn names(&self, prefix: &str) -> Vec<String> {
        let names = self.index.tensors().filter_map(|(name, _)| name.strip_prefix(prefix));
        names.map(str::to_owned).collect()
    }

    fn weights(&self) -> Weights {
        let index = self
            .index
            .renamed(|name, shape| Some((name.strip_prefix("weights.")?.to_owned(), shape.to_vec())));
        Weights::from_index(index, DType::F32, &Device::Cpu)
    }
}

/// The largest difference, relative to the largest number.
fn error(a: &Tensor, b: &Tensor) -> f32 {
    gap(a, b) / largest(b).max(1e-6)
}

fn assert_close(what: &str, ours: &Tensor, expected: &Tensor) {
    let error = error(ours, expected);
    assert!(error < 1e-4, "{what}: relative error {error}");
}

fn tiny(part: &str) -> Weights {
    Weights::open(fixtures().join("tiny_sd").join(part), DType::F32, &Device::Cpu)
        .unwrap()
        .trainable()
}

fn tiny_config<T: serde::de::DeserializeOwned>(part: &str) -> T {
    config::read(&fixtures().join("tiny_sd").join(part).join("config.json")).unwrap()
}

#[test]
fn the_tokenizer_gives_the_same_ids() {
    let text = std::fs::read_to_string(fixtures().join("models/prompts.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let prompts: Vec<&str> = json["prompts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|p| p.as_str().unwrap())
        .collect();
    let expected: Vec<Vec<u32>> = serde_json::from_value(json["ids"].clone()).unwrap();
    let folder = fixtures().join("tiny_sd/tokenizer");
    let old = tempfile::tempdir().unwrap();
    for file in ["vocab.json", "merges.txt", "tokenizer_config.json"] {
        std::fs::copy(folder.join(file), old.path().join(file)).unwrap();
    }
    for folder in [folder.as_path(), old.path()] {
        let ids = ClipTokenizer::open(folder).unwrap().encode(&prompts).unwrap();
        assert_eq!(ids.to_vec2::<u32>().unwrap(), expected);
    }
}

/// `tests/reference/make_tokenizers.py`: textual inversion, SD 2's padding, and other tokens beside the vocabulary.
#[test]
fn added_and_special_tokens_match_transformers() {
    #[derive(serde::Deserialize)]
    struct Case {
        name: String,
        vocabulary: Vec<String>,
        files: std::collections::BTreeMap<String, serde_json::Value>,
        prompts: Vec<String>,
        ids: Vec<Vec<u32>>,
    }
    let text = std::fs::read_to_string(fixtures().join("models/tokenizers.json")).unwrap();
    let cases: Vec<Case> = serde_json::from_str(&text).unwrap();
    assert!(cases.len() >= 9);
    let folder = tempfile::tempdir().unwrap();
    for case in cases {
        let folder = folder.path().join(&case.name);
        std::fs::create_dir(&folder).unwrap();
        for name in &case.vocabulary {
            std::fs::copy(fixtures().join("tiny_sd/tokenizer").join(name), folder.join(name)).unwrap();
        }
        for (name, content) in &case.files {
            std::fs::write(folder.join(name), content.to_string()).unwrap();
        }
        let prompts: Vec<&str> = case.prompts.iter().map(String::as_str).collect();
        let ids = ClipTokenizer::open(&folder).unwrap().encode(&prompts).unwrap();
        assert_eq!(ids.to_vec2::<u32>().unwrap(), case.ids, "{}", case.name);
    }
}

#[test]
fn an_added_token_of_another_vocabulary_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["vocab.json", "merges.txt"] {
        std::fs::copy(
            fixtures().join("tiny_sd/tokenizer").join(name),
            folder.path().join(name),
        )
        .unwrap();
    }
    std::fs::write(folder.path().join("added_tokens.json"), r#"{"<cat-toy>": 49408}"#).unwrap();
    let error = ClipTokenizer::open(folder.path()).unwrap_err().to_string();
    for part in ["added_tokens.json", "<cat-toy>", "49408"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_damaged_tokenizer_is_reported_with_the_damaged_file() {
    let tokenizer = fixtures().join("tiny_sd/tokenizer");
    for (damaged, content) in [
        ("merges.txt", "#version: 0.2\na b c"),
        ("merges.txt", "#version: 0.2\nqqq zzz"),
        ("vocab.json", "[1, 2]"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        for name in ["vocab.json", "merges.txt"] {
            std::fs::copy(tokenizer.join(name), folder.path().join(name)).unwrap();
        }
        std::fs::write(folder.path().join(damaged), content).unwrap();
        let error = ClipTokenizer::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains(damaged), "{content}: {error}");
    }
}

/// The ids of transformers' `CLIPTokenizer` with the vocabulary of `openai/clip-vit-large-patch14`.
#[test]
fn the_built_in_tokenizer_matches_openai() {
    let tokenizer = ClipTokenizer::openai().unwrap();
    for (text, expected) in [
        ("a photo of a cat", &[320, 1125, 539, 320, 2368][..]),
        ("", &[]),
        (
            "it's a cyberpunk-style  masterpiece, 8k (best quality:1.2)",
            &[
                585, 568, 320, 36896, 268, 1844, 12066, 267, 279, 330, 263, 949, 3027, 281, 272, 269, 273, 264,
            ],
        ),
        (
            "Ein RÖTER Würfel, 3.5 & 赤い🎨!!",
            &[
                24524, 81, 7255, 652, 86, 26132, 20304, 267, 274, 269, 276, 261, 164, 113, 97, 38850, 31953, 748,
            ],
        ),
        (
            "naïve café <|endoftext|> don't",
            &[1097, 35689, 563, 15304, 49407, 847, 713],
        ),
    ] {
        assert_eq!(tokenizer.tokens(text).unwrap(), expected, "{text}");
    }
    let ids = tokenizer
        .encode(&["a photo of a cat"])
        .unwrap()
        .to_vec2::<u32>()
        .unwrap();
    assert_eq!(ids[0].len(), 77);
    assert_eq!((ids[0][0], ids[0][6], ids[0][76]), (49406, 49407, 49407));
}

#[test]
fn the_text_encoder_matches_transformers() {
    let fixture = fixture("clip_tiny");
    let text = std::fs::read_to_string(fixtures().join("models/prompts.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let ids: Vec<Vec<u32>> = serde_json::from_value(json["ids"].clone()).unwrap();
    let ids = Tensor::new(ids, &Device::Cpu).unwrap();
    let model = ClipTextModel::new(&tiny("text_encoder"), &tiny_config("text_encoder")).unwrap();
    assert_close("last", &model.forward(&ids).unwrap(), &fixture.get("last"));
    assert_close(
        "skip 1",
        &model.forward_skipping(&ids, 1).unwrap(),
        &fixture.get("skip_1"),
    );
}

#[test]
fn the_text_encoder_matches_transformers_with_gelu_and_prefixed_names() {
    let fixture = fixture("clip_gelu");
    let config = ClipTextConfig {
        vocab_size: 100,
        hidden_size: 24,
        intermediate_size: 48,
        num_hidden_layers: 2,
        num_attention_heads: 3,
        max_position_embeddings: 20,
        hidden_act: "gelu".into(),
        ..ClipTextConfig::default()
    };
    let model = ClipTextModel::new(&fixture.weights(), &config).unwrap();
    let ids = torch_ids(&fixture);
    assert_close("last", &model.forward(&ids).unwrap(), &fixture.get("last"));
}

/// `ids` are i64 in the file, which [`Weights`] does not read.
fn torch_ids(fixture: &Fixture) -> Tensor {
    let tensors = candle_core::safetensors::load(fixture.index.path(), &Device::Cpu).unwrap();
    tensors["ids"].to_dtype(DType::U32).unwrap()
}

fn check_unet(name: &str, weights: &Weights, config: &super::unet::UNetConfig) {
    let fixture = fixture(name);
    let model = UNet2DConditionModel::new(weights, config).unwrap();
    let sample = Var::from_tensor(&fixture.get("sample")).unwrap();
    let context = Var::from_tensor(&fixture.get("context")).unwrap();
    let has_pooled = fixture.index.contains("text_embeds");
    let pooled = has_pooled.then(|| Var::from_tensor(&fixture.get("text_embeds")).unwrap());
    let time_ids = has_pooled.then(|| fixture.get("time_ids"));
    let conditions = pooled.as_ref().zip(time_ids.as_ref());
    let conditions = conditions.map(|(pooled, time_ids)| AdditionalConditions { pooled, time_ids });
    let out = model
        .forward_with(&sample, &fixture.get("timesteps"), &context, conditions.as_ref())
        .unwrap();
    assert_close(name, &out, &fixture.get("out"));
    let grads = (out * fixture.get("probe"))
        .unwrap()
        .sum_all()
        .unwrap()
        .backward()
        .unwrap();
    assert_close("d sample", grads.get(&sample).unwrap(), &fixture.get("grad_input.0"));
    assert_close("d context", grads.get(&context).unwrap(), &fixture.get("grad_input.1"));
    if let Some(pooled) = &pooled {
        assert_close("d pooled", grads.get(pooled).unwrap(), &fixture.get("grad_input.2"));
        let without = model.forward(&sample, &fixture.get("timesteps"), &context).unwrap_err();
        assert!(without.to_string().contains("needs pooled text"), "{without}");
    }
    // candle's backward pass, and that of the tape.
    let probe = fixture.get("probe");
    let loss = || {
        let out = model.forward_with(&sample, &fixture.get("timesteps"), &context, conditions.as_ref())?;
        Ok::<_, crate::error::EngineError>((out * &probe)?.sum_all()?)
    };
    let (_, taped) = gradients(loss).unwrap();
    let vars: std::collections::BTreeMap<_, _> = weights.vars().into_iter().collect();
    let checked = fixture.names("grad.");
    assert!(checked.len() > 8);
    for name in checked {
        for ours in [grads.get(&vars[&name]), taped.get(&vars[&name])] {
            let ours = ours.unwrap_or_else(|| panic!("no gradient for {name}"));
            assert_close(&name, ours, &fixture.get(&format!("grad.{name}")));
        }
    }
}

#[test]
fn the_unet_and_its_gradients_match_diffusers() {
    check_unet("unet_tiny", &tiny("unet"), &tiny_config("unet"));
}

#[test]
fn the_unet_matches_diffusers_at_odd_sizes() {
    check_unet("unet_tiny_odd", &tiny("unet"), &tiny_config("unet"));
}

#[test]
fn an_sd_2_unet_matches_diffusers() {
    let config = config::read(&fixtures().join("models/unet_sd2.json")).unwrap();
    check_unet("unet_sd2", &fixture("unet_sd2").weights().trainable(), &config);
}

#[test]
fn an_sdxl_unet_matches_diffusers() {
    let config = config::read(&fixtures().join("models/unet_sdxl.json")).unwrap();
    check_unet("unet_sdxl", &fixture("unet_sdxl").weights().trainable(), &config);
}

/// The prompts and the ids of a fixture of text encoders.
fn text_fixture(name: &str) -> (Vec<Prompt>, std::collections::HashMap<String, Tensor>) {
    let folder = fixtures().join("models");
    let text = std::fs::read_to_string(folder.join(format!("{name}.json"))).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let prompts: Vec<String> = serde_json::from_value(json["prompts"].clone()).unwrap();
    let tensors = candle_core::safetensors::load(folder.join(format!("{name}.safetensors")), &Device::Cpu).unwrap();
    (prompts.into_iter().map(Prompt::new).collect(), tensors)
}

#[test]
fn text_encoders_of_every_family_match_transformers() {
    for (variant, model, name, keys) in [
        (&sd2::VARIANT, "tiny_sd21", "sd21_text", &[("context", "last")][..]),
        (
            &sdxl::VARIANT,
            "tiny_sdxl",
            "sdxl_text",
            &[("context", "context"), ("pooled", "pooled")],
        ),
    ] {
        let (prompts, expected) = text_fixture(name);
        let model = crate::testing::tiny(variant, model);
        for (encoder, key) in model.text_encoders.iter().zip(["ids", "ids_2"]) {
            let texts: Vec<&str> = prompts.iter().map(|prompt| prompt.text.as_str()).collect();
            let ids = encoder.tokenizer.encode(&texts).unwrap().to_dtype(DType::I64).unwrap();
            let expected = expected[key].to_dtype(DType::I64).unwrap();
            assert_eq!(
                ids.to_vec2::<i64>().unwrap(),
                expected.to_vec2::<i64>().unwrap(),
                "{name} {key}"
            );
        }
        let conditioning = model.encode_prompts(&prompts).unwrap();
        for (ours, theirs) in keys {
            assert_close(name, conditioning.get(ours).unwrap(), &expected[*theirs]);
        }
    }
}

/// A single file has half of the bits of the folder.
#[test]
fn single_files_of_every_family_give_the_same_model() {
    for (variant, folder, file) in [
        (&sd2::VARIANT, "tiny_sd21", "tiny_sd21_single"),
        (&sdxl::VARIANT, "tiny_sdxl", "tiny_sdxl_single"),
    ] {
        let reference = crate::testing::tiny(variant, folder);
        let options = LoadOptions {
            config_folder: Some(fixtures().join(folder)),
            ..LoadOptions::cpu()
        };
        let scratch = tempfile::tempdir().unwrap();
        let (recipe, file) = (file, scratch.path().join(format!("{file}.safetensors")));
        assemble(recipe, folder, &file);
        families::check_identity(&file, variant.family.arch()).unwrap();
        let single = SdModel::load(variant, &file, &options).unwrap();
        let prompts = [Prompt::new("a red circle"), Prompt::new("zorb!")];
        let sizes = [ItemSize::whole(64, 32), ItemSize::whole(640, 480)];
        let conditioning = |model: &SdModel| {
            let conditioning = model.encode_prompts(&prompts).unwrap();
            model.with_sizes(conditioning, &sizes).unwrap()
        };
        let close = |what: &str, a: &Tensor, b: &Tensor| assert!(error(a, b) < 5e-3, "{what}: {}", error(a, b));
        let (ours, theirs) = (conditioning(&single), conditioning(&reference));
        close("context", ours.get("context").unwrap(), theirs.get("context").unwrap());
        let sample = [fixture("unet_tiny").get("sample").narrow(2, 0, 8).unwrap()];
        let t = Tensor::new(&[300f32, 7.0], &Device::Cpu).unwrap();
        let predict = |model: &SdModel| model.predict(&sample, &t, &theirs).unwrap().remove(0);
        close("prediction", &predict(&single), &predict(&reference));
        let decode = |model: &SdModel| model.vae.decode(&sample[0]).unwrap();
        close("decoded", &decode(&single), &decode(&reference));
    }
}

#[test]
fn the_autoencoder_and_its_gradients_match_diffusers() {
    let fixture = fixture("vae_tiny");
    let model = vae::AutoencoderKl::new(&tiny("vae"), &tiny_config("vae")).unwrap();
    assert_eq!(model.scale_factor(), 2);
    let image = Var::from_tensor(&fixture.get("image")).unwrap();
    let latent = Var::from_tensor(&fixture.get("latent")).unwrap();
    let moments = model.encode(&image).unwrap();
    assert_close("mean", &moments.mean, &fixture.get("mean"));
    assert_close("logvar", &moments.logvar, &fixture.get("logvar"));
    let both = Tensor::cat(&[&moments.mean, &moments.logvar], 1).unwrap();
    let grads = (both * fixture.get("probe_moments"))
        .unwrap()
        .sum_all()
        .unwrap()
        .backward()
        .unwrap();
    assert_close("d image", grads.get(&image).unwrap(), &fixture.get("grad_image"));
    let decoded = model.decode(&latent).unwrap();
    assert_close("decoded", &decoded, &fixture.get("decoded"));
    let grads = (decoded * fixture.get("probe_decoded"))
        .unwrap()
        .sum_all()
        .unwrap()
        .backward()
        .unwrap();
    assert_close("d latent", grads.get(&latent).unwrap(), &fixture.get("grad_latent"));
}

#[test]
fn layers_are_visited_by_their_diffusers_paths() {
    let mut model = load_sd(fixtures().join("tiny_sd"), &LoadOptions::cpu()).unwrap();
    assert_eq!(model.default_size(), (64, 64));
    let names = |model: &mut dyn VisitLayers| {
        let mut names = Vec::new();
        model
            .visit_layers(&mut |path, _| {
                names.push(format!("{path}.weight"));
                Ok(())
            })
            .unwrap();
        names
    };
    let unet = Index::open(fixtures().join("tiny_sd/unet")).unwrap();
    let found = names(&mut model.unet);
    for name in &found {
        assert!(unet.contains(name), "{name}");
    }
    let layers = unet
        .tensors()
        .filter(|(name, shape)| name.ends_with(".weight") && shape.len() > 1)
        .count();
    assert_eq!(found.len(), layers);
    let text = Index::open(fixtures().join("tiny_sd/text_encoder")).unwrap();
    let found = names(&mut model.text_encoders[0].model);
    assert_eq!(found.len(), 12);
    for name in found {
        assert!(text.contains(name.strip_prefix("text_model.").unwrap()), "{name}");
    }
}

/// Reads the lines `component name 1x2x3` of one component.
fn full_size(file: &str, part: &str) -> Index {
    let text = names_of_tensors(file);
    let prefix = if part.is_empty() {
        String::new()
    } else {
        format!("{part} ")
    };
    Index::from_shapes(text.lines().filter_map(|line| line.strip_prefix(&prefix)).map(|line| {
        let (name, shape) = line.split_once(' ').unwrap();
        let sides = shape.split('x').filter(|side| *side != "scalar");
        (name.to_owned(), sides.map(|n| n.parse().unwrap()).collect())
    }))
}

/// Builds a full-size model without its weights, and checks that it reads every tensor.
fn check_reads_all(index: Index, build: impl FnOnce(&Weights)) {
    let all: Vec<String> = index.tensors().map(|(name, _)| name.to_owned()).collect();
    assert!(all.len() > 100);
    let weights = Weights::from_index(index, DType::F32, &Device::Cpu);
    build(&weights);
    let asked = weights.requested_tensors().unwrap();
    let asked: Vec<&str> = asked.tensors().map(|(name, _)| name).collect();
    assert_eq!(asked, all);
}

/// Checks the components of a full-size model: text encoders, U-Net, VAE.
fn check_full_size(variant: &Variant, mut parts: Vec<Index>) {
    let config = SdConfig::defaults(variant).unwrap();
    let others = parts.split_off(config.text_encoders.len());
    for ((text, config), spec) in parts.into_iter().zip(&config.text_encoders).zip(variant.text_encoders) {
        check_reads_all(text, |w| match spec.class {
            "CLIPTextModel" => drop(ClipTextModel::new(w, config).unwrap()),
            _ => drop(ClipTextModel::with_projection(w, config).unwrap()),
        });
    }
    let [unet, vae]: [Index; 2] = others.try_into().unwrap();
    check_reads_all(unet, |w| drop(UNet2DConditionModel::new(w, &config.unet).unwrap()));
    check_reads_all(vae, |w| drop(vae::AutoencoderKl::new(w, &config.vae).unwrap()));
}

#[test]
fn full_size_models_have_the_names_and_shapes_of_diffusers() {
    for (variant, file) in [
        (&sd1_family::VARIANT, "full_size_names.txt.gz"),
        (&sd2::VARIANT, "full_size_names_sd21.txt.gz"),
        (&sdxl::VARIANT, "full_size_names_sdxl.txt.gz"),
    ] {
        let text = variant.text_encoders.iter().map(|spec| spec.folder);
        let parts = text.chain(["unet", "vae"]).map(|part| full_size(file, part));
        check_full_size(variant, parts.collect());
    }
}

#[test]
fn a_full_size_single_file_checkpoint_has_the_expected_names() {
    for (variant, file) in [
        (&sd1_family::VARIANT, "full_size_ldm_names.txt.gz"),
        (&sd2::VARIANT, "full_size_single_file_names_sd21.txt.gz"),
        (&sdxl::VARIANT, "full_size_single_file_names_sdxl.txt.gz"),
    ] {
        let index = full_size(file, "");
        let mut parts = split_checkpoint(&index, &SdConfig::defaults(variant).unwrap(), variant).unwrap();
        // A single file of SD 2.x has one more layer and a projection, which the model does not use.
        parts[0] = parts[0].renamed(|name, shape| {
            let unused = name.contains("encoder.layers.23.") || name.starts_with("text_projection");
            (!unused).then(|| (name.to_owned(), shape.to_vec()))
        });
        check_full_size(variant, parts);
    }
}

#[test]
fn a_single_file_checkpoint_gives_the_same_model() {
    let tiny = fixtures().join("tiny_sd");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tiny.safetensors");
    assemble("tiny_ldm", "tiny_sd", &file);
    let options = LoadOptions {
        config_folder: Some(tiny.clone()),
        ..LoadOptions::cpu()
    };
    let single = load_sd(&file, &options).unwrap();
    let reference = load_sd(&tiny, &options).unwrap();
    let ids = reference.text_encoders[0].tokenizer.encode(&["a red circle"]).unwrap();
    let close = |a: &Tensor, b: &Tensor| assert!(error(a, b) < 5e-3, "{}", error(a, b));
    let context = reference.text_encoders[0].model.forward(&ids).unwrap();
    close(&single.text_encoders[0].model.forward(&ids).unwrap(), &context);
    let sample = fixture("unet_tiny").get("sample").narrow(0, 0, 1).unwrap();
    let t = Tensor::new(&[300f32], &Device::Cpu).unwrap();
    let expected = reference.unet.forward(&sample, &t, &context).unwrap();
    close(&single.unet.forward(&sample, &t, &context).unwrap(), &expected);
    close(
        &single.vae.decode(&sample).unwrap(),
        &reference.vae.decode(&sample).unwrap(),
    );
    let image = fixture("vae_tiny").get("image");
    close(
        &single.vae.encode(&image).unwrap().mean,
        &reference.vae.encode(&image).unwrap().mean,
    );

    // Without configs it is loaded as SD 1.5, and the error names a tensor that does not match. A tokenizer beside it
    // is used.
    let error = load_sd(&file, &LoadOptions::cpu()).unwrap_err().to_string();
    assert!(error.contains("has shape") && error.contains("text_model"), "{error}");
    std::fs::create_dir(folder.path().join("tokenizer")).unwrap();
    let error = load_sd(&file, &LoadOptions::cpu()).unwrap_err().to_string();
    assert!(error.contains("vocab.json"), "{error}");
}

#[test]
fn paths_that_are_no_sd_model_are_refused_with_the_reason() {
    let refused = |path: PathBuf| {
        families::check(&path, ArchName::Sd1, &PartPaths::default())
            .unwrap_err()
            .to_string()
    };
    let folder = tempfile::tempdir().unwrap();
    assert!(refused(folder.path().join("none.safetensors")).contains("no such model"));
    assert!(refused(folder.path().to_path_buf()).contains("model_index.json"));
    std::fs::write(
        folder.path().join("model_index.json"),
        r#"{"_class_name": "StableDiffusionXLPipeline"}"#,
    )
    .unwrap();
    assert!(refused(folder.path().to_path_buf()).contains("StableDiffusionXLPipeline"));
    std::fs::write(folder.path().join("model_index.json"), "{").unwrap();
    assert!(refused(folder.path().to_path_buf()).contains("not valid JSON"));
    let pickle = folder.path().join("model.ckpt");
    std::fs::write(&pickle, "anything").unwrap();
    assert!(refused(pickle).contains("pickle"));
    let unet = fixtures().join("tiny_sd/unet/diffusion_pytorch_model.safetensors");
    assert!(refused(unet).contains("not a complete Stable Diffusion 1.x model"));
}

#[test]
fn the_config_of_a_text_encoder_may_be_part_of_that_of_a_whole_model() {
    let folder = tempfile::tempdir().unwrap();
    let (alone, whole) = (
        fixtures().join("tiny_sd/text_encoder/config.json"),
        folder.path().join("config.json"),
    );
    let text = config::read_json(&alone).unwrap();
    let value =
        serde_json::json!({"model_type": "clip", "projection_dim": 512, "text_config": text, "vision_config": {}});
    std::fs::write(&whole, value.to_string()).unwrap();
    let [alone, whole] = [alone, whole].map(|file| format!("{:?}", ClipTextConfig::read(&file).unwrap()));
    assert_eq!(alone, whole);
    assert_ne!(alone, format!("{:?}", ClipTextConfig::default()));
}

#[test]
fn a_text_encoder_with_sizes_of_no_model_is_refused() {
    type Change = fn(&mut ClipTextConfig);
    let changes: [(Change, &str); 4] = [
        (|config| config.vocab_size = usize::MAX, "`vocab_size`"),
        (|config| config.intermediate_size = 0, "`intermediate_size`"),
        (
            |config| config.max_position_embeddings = usize::MAX,
            "`max_position_embeddings`",
        ),
        (|config| config.projection_dim = usize::MAX, "`projection_dim`"),
    ];
    for (change, key) in changes {
        let mut config = tiny_config("text_encoder");
        change(&mut config);
        let error = ClipTextModel::with_projection(&tiny("text_encoder"), &config).unwrap_err();
        assert!(error.to_string().contains(key), "{error}");
    }
}

#[test]
fn a_unet_of_another_family_is_refused() {
    let text = std::fs::read_to_string(fixtures().join("tiny_sd/unet/config.json")).unwrap();
    let plain: serde_json::Value = serde_json::from_str(&text).unwrap();
    let with = |key: &str, value: serde_json::Value| {
        let mut config = plain.clone();
        config[key] = value;
        let config: super::unet::UNetConfig = serde_json::from_value(config).unwrap();
        UNet2DConditionModel::new(&tiny("unet"), &config).map(drop)
    };
    for (key, value) in [
        ("addition_embed_type", "image".into()),
        ("time_embedding_act_fn", "gelu".into()),
        ("timestep_post_act", "gelu".into()),
        ("reverse_transformer_layers_per_block", serde_json::json!([[1], [2]])),
        ("encoder_hid_dim_type", "text_proj".into()),
        ("attention_type", "gated".into()),
        ("only_cross_attention", serde_json::json!([false, true])),
    ] {
        let error = with(key, value).unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    }
    // Sizes with which products would overflow, or a table would not fit into memory.
    let large = usize::MAX / 2;
    for (key, value) in [
        ("sample_size", large.into()),
        ("in_channels", large.into()),
        ("out_channels", 0.into()),
        ("block_out_channels", serde_json::json!([large, large])),
        ("layers_per_block", usize::MAX.into()),
        ("transformer_layers_per_block", serde_json::json!([usize::MAX, 1])),
        ("cross_attention_dim", large.into()),
        ("norm_num_groups", 0.into()),
        ("downsample_padding", large.into()),
        ("freq_shift", 1e6.into()),
    ] {
        let error = with(key, value).unwrap_err().to_string();
        assert!(error.contains(&format!("`{key}`")), "{error}");
    }
    let error = with("conv_in_kernel", usize::MAX.into()).unwrap_err().to_string();
    assert!(error.contains("conv kernel"), "{error}");
    with("attention_type", "default".into()).unwrap();
    with("only_cross_attention", serde_json::json!([false, false])).unwrap();
}

in_portable_mode! {
    the_text_encoder_matches_transformers,
    the_text_encoder_matches_transformers_with_gelu_and_prefixed_names,
    the_unet_and_its_gradients_match_diffusers,
    the_unet_matches_diffusers_at_odd_sizes,
    an_sd_2_unet_matches_diffusers,
    the_autoencoder_and_its_gradients_match_diffusers,
}
