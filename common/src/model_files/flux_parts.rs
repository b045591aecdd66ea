//! Where the parts of a FLUX.1 model are. A diffusers folder has all of them. A single file has the transformer, and sometimes text
//! encoders and VAE; the other parts come from `model.te_name_or_path`, `model.vae_path` and `model.extras_name_or_path`.

use super::inventory::{Unreadable, Weights, header_of, is_weights, read_json_file};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The most weights files of a folder whose headers are read to find parts in them.
const MAX_FILES: usize = 64;
/// `scaling_factor` of the VAE of FLUX.1. The VAEs of other models with as many channels have another one.
const VAE_SCALING_FACTOR: f64 = 0.3611;

/// The paths that a config gives for parts of a model, besides `model.name_or_path`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PartPaths {
    /// `model.extras_name_or_path`: a folder with text encoders, tokenizers, VAE and scheduler.
    pub extras: Option<PathBuf>,
    /// `model.te_name_or_path`: T5, as a file or a folder.
    pub text_encoder: Option<PathBuf>,
    /// `model.vae_path`: the VAE, as a file or a folder.
    pub vae: Option<PathBuf>,
}

/// A part of a FLUX.1 model that has weights, besides the transformer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FluxPart {
    /// CLIP-L.
    Clip,
    /// T5 v1.1 XXL.
    T5,
    /// The autoencoder.
    Vae,
}

impl FluxPart {
    const ALL: [Self; 3] = [Self::Clip, Self::T5, Self::Vae];

    /// Its folder in a diffusers model.
    #[must_use]
    pub fn folder(self) -> &'static str {
        match self {
            Self::Clip => "text_encoder",
            Self::T5 => "text_encoder_2",
            Self::Vae => "vae",
        }
    }

    /// What it is, for messages.
    fn title(self) -> &'static str {
        match self {
            Self::Clip => "CLIP text encoder (folder `text_encoder`, or a file such as clip_l.safetensors)",
            Self::T5 => "T5 text encoder (folder `text_encoder_2`, or a file such as t5xxl_fp16.safetensors)",
            Self::Vae => "VAE (folder `vae`, or a file such as ae.safetensors)",
        }
    }

    /// Beginnings of the names of its tensors in a checkpoint of all parts (ComfyUI).
    fn prefixes(self) -> &'static [&'static str] {
        match self {
            Self::Clip => &["text_encoders.clip_l.transformer."],
            Self::T5 => &["text_encoders.t5xxl.transformer."],
            Self::Vae => &["vae.", "first_stage_model."],
        }
    }

    /// Beginnings of the names of tensors that only this part has: of transformers and llama.cpp, of diffusers and LDM.
    fn marks(self) -> &'static [&'static str] {
        match self {
            Self::Clip => &["text_model.encoder.layers.0.self_attn.", "encoder.layers.0.self_attn."],
            Self::T5 => &["encoder.block.0.layer.0.SelfAttention.", "enc.blk.0.attn_q."],
            Self::Vae => &[
                "encoder.down.0.",
                "encoder.down_blocks.0.",
                "decoder.up.0.",
                "decoder.up_blocks.0.",
            ],
        }
    }

    /// Beginnings of the names of tensors that similar parts of other models have: CLIP-G, UMT5, the VAE of Stable Diffusion.
    fn foreign_marks(self) -> &'static [&'static str] {
        match self {
            Self::Clip => &["text_model.encoder.layers.12."],
            Self::T5 => &["encoder.block.1.layer.0.SelfAttention.relative_attention_bias."],
            Self::Vae => &["quant_conv."],
        }
    }

    /// What a folder's config says if it is not that of this part: `config.json` of a text encoder or a VAE of another model.
    fn other_part(self, config: &Path) -> Option<String> {
        let config = read_json_file(config)?;
        let model_type = config.get("model_type").and_then(Value::as_str);
        let other_type = match self {
            Self::Clip => model_type.filter(|kind| !kind.starts_with("clip")),
            Self::T5 => model_type.filter(|kind| *kind != "t5"),
            Self::Vae => {
                let factor = config.get("scaling_factor").and_then(Value::as_f64)?;
                let is_other = (factor - VAE_SCALING_FACTOR).abs() > 1e-6;
                return is_other.then(|| format!("`scaling_factor: {factor}`, expected {VAE_SCALING_FACTOR}"));
            }
        };
        other_type.map(|kind| format!("`model_type: {kind}`"))
    }

    /// Whether a file has this part alone.
    fn is_in(self, weights: &Weights) -> bool {
        let has_any = |marks: &[&str]| marks.iter().any(|mark| has(weights, mark));
        has_any(self.marks()) && !has_any(self.foreign_marks())
    }
}

fn has(weights: &Weights, prefix: &str) -> bool {
    let mut from = weights.shapes.range(prefix.to_owned()..);
    from.next().is_some_and(|(name, _)| name.starts_with(prefix))
}

/// The weights of a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartFiles {
    /// The file, or the folder of the part.
    pub path: PathBuf,
    /// What comes before the names of its tensors.
    pub prefix: &'static str,
    /// Its `config.json`.
    pub config: Option<PathBuf>,
}

/// Where the parts of a FLUX.1 model are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FluxParts {
    /// The transformer: a file, or a folder with `config.json`.
    pub transformer: PartFiles,
    /// CLIP.
    pub clip: PartFiles,
    /// T5.
    pub t5: PartFiles,
    /// The autoencoder.
    pub vae: PartFiles,
    /// The folder of CLIP's tokenizer; `None`: OpenAI's.
    pub clip_tokenizer: Option<PathBuf>,
    /// The folder of T5's tokenizer.
    pub t5_tokenizer: PathBuf,
    /// The folder with `scheduler/scheduler_config.json`; `None`: the published one of dev or schnell.
    pub scheduler: Option<PathBuf>,
    /// The config of another transformer that the scheduler belongs to.
    pub scheduler_transformer: Option<PathBuf>,
}

/// Finds the parts of the FLUX.1 model at `model`, a file or a folder. Reads names of files and headers of weights.
///
/// # Errors
/// A sentence that names every missing part and how to give it, or two files of which only one can be a part.
pub fn flux_parts(model: &Path, paths: &PartPaths) -> Result<FluxParts, String> {
    let search = Search::new(model, paths)?;
    let mut missing = Vec::new();
    let mut found = Vec::new();
    for part in FluxPart::ALL {
        match search.part(part)? {
            Some(files) => found.push(files),
            None => missing.push(part.title()),
        }
    }
    let t5_tokenizer = search.t5_tokenizer();
    if t5_tokenizer.is_none() {
        missing.push("tokenizer of T5 (folder `tokenizer_2` with tokenizer.json or spiece.model)");
    }
    let ([clip, t5, vae], Some(t5_tokenizer)) = (found.as_slice(), t5_tokenizer) else {
        return Err(format!(
            "{}: FLUX.1 without {}: {}",
            model.display(),
            missing.join(", without "),
            search.advice(&missing)
        ));
    };
    let transformer = model.join("transformer");
    let transformer = match model.is_dir() {
        true => PartFiles {
            config: existing(transformer.join("config.json")),
            path: transformer,
            prefix: "",
        },
        false => PartFiles {
            path: model.to_path_buf(),
            prefix: "",
            config: None,
        },
    };
    let scheduler = search
        .folders()
        .find(|folder| folder.join("scheduler/scheduler_config.json").is_file());
    Ok(FluxParts {
        transformer,
        clip: clip.clone(),
        t5: t5.clone(),
        vae: vae.clone(),
        clip_tokenizer: search.clip_tokenizer(),
        t5_tokenizer,
        scheduler: scheduler.map(Path::to_path_buf),
        scheduler_transformer: scheduler
            .filter(|folder| *folder != model)
            .and_then(|folder| existing(folder.join("transformer/config.json"))),
    })
}

/// The weights of one part at this path: a file, the folder of the part, or a model's folder that has one. Its config may come from
/// the extras in `paths`.
///
/// # Errors
/// When the path has another part or none.
pub fn flux_part(part: FluxPart, path: &Path, paths: &PartPaths) -> Result<PartFiles, String> {
    let elsewhere = PartPaths {
        extras: paths.extras.clone(),
        ..PartPaths::default()
    };
    Search::new(path, &elsewhere)?.given_part(part, path)
}

fn existing(file: PathBuf) -> Option<PathBuf> {
    file.is_file().then_some(file)
}

/// Whether a weights file is in the folder.
fn has_weights(folder: &Path) -> bool {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.any(|name| is_weights(&name))
}

/// The error for a folder of another family as `model.extras_name_or_path`. `found`: what the config in `folder` has.
fn wrong_extras(part: FluxPart, extras: &Path, folder: &Path, found: &str) -> String {
    let index = read_json_file(&extras.join("model_index.json"));
    let class = index.as_ref().and_then(|index| index.get("_class_name")?.as_str());
    format!(
        "{}: this is not FLUX.1's {}: its config.json has {found}{}. Set `model.extras_name_or_path` to a folder or repository of FLUX.1",
        folder.display(),
        part.title(),
        class.map_or(String::new(), |class| format!(
            ", and {} is a model for {class}",
            extras.display()
        ))
    )
}

/// Where parts may be.
struct Search<'a> {
    model: &'a Path,
    paths: &'a PartPaths,
    /// The header of a model that is one file.
    checkpoint: Option<Weights>,
    /// Weights files directly in the folder of the extras, with their headers.
    extra_files: Vec<(PathBuf, Weights)>,
}

impl<'a> Search<'a> {
    fn new(model: &'a Path, paths: &'a PartPaths) -> Result<Self, String> {
        for path in [&paths.extras, &paths.text_encoder, &paths.vae].into_iter().flatten() {
            if !path.exists() {
                return Err(format!("{}: no such file or folder", path.display()));
            }
        }
        let mut extra_files = Vec::new();
        if let Some(extras) = &paths.extras {
            if !extras.is_dir() {
                return Err(format!(
                    "{}: `extras_name_or_path` is a folder: that of a FLUX.1 model in diffusers' layout, or one with the files of text \
                     encoders and VAE",
                    extras.display()
                ));
            }
            let entries = std::fs::read_dir(extras).map_err(|error| format!("{}: {error}", extras.display()))?;
            let names = entries
                .flatten()
                .map(|entry| entry.file_name().to_string_lossy().into_owned());
            let mut names: Vec<String> = names.filter(|name| is_weights(name)).collect();
            names.sort();
            for name in names.into_iter().take(MAX_FILES) {
                let path = extras.join(name);
                // A damaged file among them is reported only if its part is missing.
                if let Ok(weights) = header_of(&path) {
                    extra_files.push((path, weights));
                }
            }
        }
        Ok(Self {
            model,
            paths,
            checkpoint: if model.is_dir() { None } else { header_of(model).ok() },
            extra_files,
        })
    }

    /// Folders in diffusers' layout.
    fn folders(&self) -> impl Iterator<Item = &Path> {
        let model = Some(self.model).filter(|model| model.is_dir());
        model.into_iter().chain(self.paths.extras.as_deref())
    }

    /// The path that the config gives for this part alone.
    fn given(&self, part: FluxPart) -> Option<&Path> {
        match part {
            FluxPart::Clip => None,
            FluxPart::T5 => self.paths.text_encoder.as_deref(),
            FluxPart::Vae => self.paths.vae.as_deref(),
        }
    }

    /// The config of the part in a folder in diffusers' layout.
    fn config(&self, part: FluxPart) -> Option<PathBuf> {
        self.folders()
            .find_map(|folder| existing(folder.join(part.folder()).join("config.json")))
    }

    fn part(&self, part: FluxPart) -> Result<Option<PartFiles>, String> {
        if let Some(path) = self.given(part) {
            return self.given_part(part, path).map(Some);
        }
        let checkpoint = self.checkpoint.as_ref();
        let prefix = checkpoint.and_then(|weights| part.prefixes().iter().find(|prefix| has(weights, prefix)));
        if let Some(prefix) = prefix {
            return Ok(Some(PartFiles {
                path: self.model.to_path_buf(),
                prefix,
                config: self.config(part),
            }));
        }
        for model in self.folders() {
            let folder = model.join(part.folder());
            let config = existing(folder.join("config.json")).filter(|_| has_weights(&folder));
            if let Some(config) = config {
                if self.paths.extras.as_deref() == Some(model)
                    && let Some(found) = part.other_part(&config)
                {
                    return Err(wrong_extras(part, model, &folder, &found));
                }
                return Ok(Some(PartFiles {
                    path: folder,
                    prefix: "",
                    config: Some(config),
                }));
            }
        }
        let mut files = self.extra_files.iter().filter(|(_, weights)| part.is_in(weights));
        match (files.next(), files.next()) {
            (Some((one, _)), Some((other, _))) => Err(format!(
                "{} and {} are both the {}: leave one of them in the folder{}",
                one.display(),
                other.display(),
                part.title(),
                match part {
                    FluxPart::Clip => "",
                    FluxPart::T5 => ", or give one as `model.te_name_or_path`",
                    FluxPart::Vae => ", or give one as `model.vae_path`",
                }
            )),
            (Some((path, _)), None) => Ok(Some(PartFiles {
                path: path.clone(),
                prefix: "",
                config: self.config(part),
            })),
            (None, _) => Ok(None),
        }
    }

    /// The part at a path that the config gives for it: a file, the folder of the part, or a model's folder that has one.
    fn given_part(&self, part: FluxPart, path: &Path) -> Result<PartFiles, String> {
        if path.is_dir() {
            let inner = path.join(part.folder());
            let folder = if inner.is_dir() { inner } else { path.to_path_buf() };
            let config = existing(folder.join("config.json"));
            return Ok(PartFiles {
                path: folder,
                prefix: "",
                config: config.or_else(|| self.config(part)),
            });
        }
        let weights = header_of(path).map_err(|error| match error {
            Unreadable::Pickle(why) => {
                format!("{}: it is a pickle file, which is not opened: {why}", path.display())
            }
            Unreadable::Other(why) => format!("{}: {why}", path.display()),
        })?;
        let prefix = part.prefixes().iter().find(|prefix| has(&weights, prefix));
        if prefix.is_none() && !part.is_in(&weights) {
            let first = weights.shapes.keys().next();
            let architecture = weights
                .architecture
                .map(|name| format!("`general.architecture: {name}` and "));
            return Err(format!(
                "{} is no {}: it has {}{}",
                path.display(),
                part.title(),
                architecture.unwrap_or_default(),
                first.map_or("no tensors".to_owned(), |name| format!("tensors such as `{name}`"))
            ));
        }
        Ok(PartFiles {
            path: path.to_path_buf(),
            prefix: prefix.copied().unwrap_or_default(),
            config: self.config(part),
        })
    }

    /// Folders that may hold a tokenizer. Not those beside a given file: an attempt may read the paths of its config alone.
    fn tokenizer_folders(&self) -> impl Iterator<Item = &Path> {
        let all = [
            Some(self.model),
            self.paths.text_encoder.as_deref(),
            self.paths.extras.as_deref(),
        ];
        all.into_iter().flatten().filter(|path| path.is_dir())
    }

    fn clip_tokenizer(&self) -> Option<PathBuf> {
        let mut folders = self.tokenizer_folders().map(|folder| folder.join("tokenizer"));
        folders.find(|folder| {
            let has = |name: &str| folder.join(name).is_file();
            has("tokenizer.json") || has("vocab.json") && has("merges.txt")
        })
    }

    fn t5_tokenizer(&self) -> Option<PathBuf> {
        let is_tokenizer = |folder: &PathBuf| {
            let has = |name: &str| folder.join(name).is_file();
            has("tokenizer.json") || has("spiece.model")
        };
        let inner = self.tokenizer_folders().map(|folder| folder.join("tokenizer_2"));
        let mut all = inner.chain(self.tokenizer_folders().map(Path::to_path_buf));
        all.find(is_tokenizer)
    }

    /// How to give what is missing.
    fn advice(&self, missing: &[&str]) -> String {
        let only_t5 = missing == [FluxPart::T5.title()];
        let only_vae = missing == [FluxPart::Vae.title()];
        let extras = "set `model.extras_name_or_path` to a folder or repository of FLUX.1 that has it";
        let single = match () {
            () if only_t5 => ", or `model.te_name_or_path` to its file or folder",
            () if only_vae => ", or `model.vae_path` to its file or folder",
            () => ", in diffusers' layout or as files side by side",
        };
        format!("{extras}{single}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A safetensors file with tensors of these names.
    fn write(path: &Path, names: &[&str]) {
        let entries: Vec<String> = names
            .iter()
            .enumerate()
            .map(|(at, name)| {
                format!(
                    r#""{name}":{{"dtype":"U8","shape":[1],"data_offsets":[{at},{}]}}"#,
                    at + 1
                )
            })
            .collect();
        let header = format!("{{{}}}", entries.join(","));
        let length = (header.len() as u64).to_le_bytes();
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, [&length[..], header.as_bytes(), &vec![0; names.len()]].concat()).unwrap();
    }

    const TRANSFORMER: &str = "double_blocks.0.img_attn.qkv.weight";
    const CLIP: &str = "text_model.encoder.layers.0.self_attn.q_proj.weight";
    const T5: &str = "encoder.block.0.layer.0.SelfAttention.q.weight";
    const VAE: &str = "encoder.down.0.block.0.conv1.weight";

    #[test]
    fn parts_are_found_by_their_tensors_and_missing_ones_are_named() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        let model = at("models/flux1-dev.safetensors");
        write(&model, &[TRANSFORMER]);
        let none = flux_parts(&model, &PartPaths::default()).unwrap_err();
        for part in [
            "CLIP",
            "T5 text encoder",
            "VAE",
            "tokenizer of T5",
            "extras_name_or_path",
        ] {
            assert!(none.contains(part), "{none}");
        }
        let mut paths = PartPaths {
            extras: Some(at("extras")),
            ..PartPaths::default()
        };
        assert!(flux_parts(&model, &paths).unwrap_err().contains("no such file"));
        write(&at("extras/b.safetensors"), &[CLIP]);
        write(&at("extras/c.safetensors"), &[T5]);
        write(&at("extras/a.safetensors"), &[VAE]);
        write(&at("extras/d.safetensors"), &["other"]);
        std::fs::write(at("extras/spiece.model"), "x").unwrap();
        std::fs::write(at("extras/broken.safetensors"), "x").unwrap();
        let found = flux_parts(&model, &paths).unwrap();
        let named = |files: &PartFiles| files.path.file_name().unwrap().to_string_lossy().into_owned();
        assert_eq!(
            [&found.clip, &found.t5, &found.vae].map(named),
            ["b.safetensors", "c.safetensors", "a.safetensors"]
        );
        assert_eq!((found.t5_tokenizer, found.scheduler), (at("extras"), None));
        // Two of one kind are ambiguous, unless one is given.
        write(&at("extras/t5_fp8.safetensors"), &["enc.blk.0.attn_q.weight"]);
        let two = flux_parts(&model, &paths).unwrap_err();
        assert!(
            two.contains("c.safetensors") && two.contains("te_name_or_path"),
            "{two}"
        );
        paths.text_encoder = Some(at("extras/t5_fp8.safetensors"));
        assert_eq!(named(&flux_parts(&model, &paths).unwrap().t5), "t5_fp8.safetensors");
        paths.text_encoder = Some(at("extras/a.safetensors"));
        let other = flux_parts(&model, &paths).unwrap_err();
        assert!(other.contains("is no T5") && other.contains(VAE), "{other}");
    }

    #[test]
    fn a_checkpoint_may_have_its_own_parts() {
        let root = tempfile::tempdir().unwrap();
        let model = root.path().join("flux1-dev-fp8.safetensors");
        let prefixed = |prefix: &str, name: &str| format!("{prefix}{name}");
        let names = [
            prefixed("model.diffusion_model.", TRANSFORMER),
            prefixed("text_encoders.clip_l.transformer.", CLIP),
            prefixed("text_encoders.t5xxl.transformer.", T5),
            prefixed("vae.", VAE),
        ];
        write(&model, &names.each_ref().map(String::as_str));
        let missing = flux_parts(&model, &PartPaths::default()).unwrap_err();
        assert!(
            !missing.contains("CLIP") && missing.contains("tokenizer of T5"),
            "{missing}"
        );
        let extras = root.path().join("extras");
        std::fs::create_dir_all(extras.join("tokenizer_2")).unwrap();
        std::fs::write(extras.join("tokenizer_2/tokenizer.json"), "{}").unwrap();
        let paths = PartPaths {
            extras: Some(extras),
            ..PartPaths::default()
        };
        let found = flux_parts(&model, &paths).unwrap();
        assert_eq!(
            [found.clip.prefix, found.t5.prefix, found.vae.prefix],
            [
                "text_encoders.clip_l.transformer.",
                "text_encoders.t5xxl.transformer.",
                "vae."
            ]
        );
        assert!([found.clip, found.t5, found.vae].iter().all(|part| part.path == model));
    }

    #[test]
    fn extras_of_another_family_are_refused_with_the_part_and_its_folder() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        let model = at("flux1-dev.safetensors");
        write(&model, &[TRANSFORMER]);
        let config = |part: &str, json: &str| {
            write(&at(&format!("sd35/{part}/model.safetensors")), &["x"]);
            std::fs::write(at(&format!("sd35/{part}/config.json")), json).unwrap();
        };
        let clip = r#"{"model_type": "clip_text_model"}"#;
        config("text_encoder", clip);
        config("text_encoder_2", clip);
        config("vae", r#"{"scaling_factor": 1.5305}"#);
        std::fs::write(
            at("sd35/model_index.json"),
            r#"{"_class_name": "StableDiffusion3Pipeline"}"#,
        )
        .unwrap();
        let mut paths = PartPaths {
            extras: Some(at("sd35")),
            ..PartPaths::default()
        };
        let error = flux_parts(&model, &paths).unwrap_err();
        for text in [
            "sd35/text_encoder_2",
            "T5 text encoder",
            "clip_text_model",
            "StableDiffusion3Pipeline",
            "`model.extras_name_or_path`",
        ] {
            assert!(error.contains(text), "\"{text}\" is not in: {error}");
        }
        // With another T5, the VAE is still the wrong one.
        write(&at("t5.safetensors"), &[T5]);
        paths.text_encoder = Some(at("t5.safetensors"));
        let error = flux_parts(&model, &paths).unwrap_err();
        assert!(error.contains("sd35/vae") && error.contains("1.5305"), "{error}");
    }

    #[test]
    fn a_folder_without_its_second_text_encoder_says_how_to_give_one() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        for part in ["transformer", "vae", "text_encoder"] {
            write(&at(&format!("{part}/model.safetensors")), &["x"]);
            std::fs::write(at(&format!("{part}/config.json")), "{}").unwrap();
        }
        std::fs::create_dir(at("tokenizer_2")).unwrap();
        std::fs::write(at("tokenizer_2/spiece.model"), "x").unwrap();
        let missing = flux_parts(root.path(), &PartPaths::default()).unwrap_err();
        assert!(
            missing.contains("without T5 text encoder (folder `text_encoder_2`")
                && missing.contains("`model.te_name_or_path`"),
            "{missing}"
        );
        write(&at("t5xxl_fp16.safetensors"), &[T5]);
        let paths = PartPaths {
            text_encoder: Some(at("t5xxl_fp16.safetensors")),
            ..PartPaths::default()
        };
        let found = flux_parts(root.path(), &paths).unwrap();
        assert_eq!(found.transformer.config, Some(at("transformer/config.json")));
        assert_eq!(found.t5.config, None);
    }
}
