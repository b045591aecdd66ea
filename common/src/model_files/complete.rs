//! Checks that a model has all of its files and that none is truncated.

use super::inventory::is_weights;
use super::json::parse_json;
use super::weights_files::{WeightsError, WeightsSelection, choose, weights_files};
use super::{Inventory, Unreadable, header_of};
use crate::fsutil::regular;
use crate::job::limits::MAX_TEXT_FILE_BYTES;
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::Path;

/// The folders of a model in diffusers' layout.
struct Layout {
    /// Folders with a `config.json` and weights of this name.
    components: &'static [(&'static str, &'static str)],
    /// Folders of tokenizers.
    tokenizers: &'static [&'static str],
}

const STABLE_DIFFUSION: Layout = Layout {
    components: &[
        ("unet", "diffusion_pytorch_model"),
        ("vae", "diffusion_pytorch_model"),
        ("text_encoder", "model"),
    ],
    tokenizers: &["tokenizer"],
};
const STABLE_DIFFUSION_XL: Layout = Layout {
    components: &[
        ("unet", "diffusion_pytorch_model"),
        ("vae", "diffusion_pytorch_model"),
        ("text_encoder", "model"),
        ("text_encoder_2", "model"),
    ],
    tokenizers: &["tokenizer", "tokenizer_2"],
};
const STABLE_DIFFUSION_3: Layout = Layout {
    components: &[
        ("transformer", "diffusion_pytorch_model"),
        ("vae", "diffusion_pytorch_model"),
        ("text_encoder", "model"),
        ("text_encoder_2", "model"),
        ("text_encoder_3", "model"),
    ],
    tokenizers: &["tokenizer", "tokenizer_2", "tokenizer_3"],
};
/// Without T5, whose tokens are zeros then.
const STABLE_DIFFUSION_3_WITHOUT_T5: Layout = Layout {
    components: &[
        ("transformer", "diffusion_pytorch_model"),
        ("vae", "diffusion_pytorch_model"),
        ("text_encoder", "model"),
        ("text_encoder_2", "model"),
    ],
    tokenizers: &["tokenizer", "tokenizer_2"],
};
const FLUX: Layout = Layout {
    components: &[
        ("transformer", "diffusion_pytorch_model"),
        ("vae", "diffusion_pytorch_model"),
        ("text_encoder", "model"),
        ("text_encoder_2", "model"),
    ],
    tokenizers: &["tokenizer", "tokenizer_2"],
};
/// Z-Image, and Chroma.
const ONE_TEXT_ENCODER: Layout = Layout {
    components: &[
        ("transformer", "diffusion_pytorch_model"),
        ("vae", "diffusion_pytorch_model"),
        ("text_encoder", "model"),
    ],
    tokenizers: &["tokenizer"],
};

/// The files that a tokenizer consists of: one of these sets.
const TOKENIZER_FILES: [&[&str]; 3] = [&["tokenizer.json"], &["spiece.model"], &["vocab.json", "merges.txt"]];
/// The scheduler config, which the engine reads.
const SCHEDULER: &str = "scheduler/scheduler_config.json";

/// The layout of this model, by the class of its pipeline.
fn layout(files: &Inventory) -> Layout {
    let class = files.text("model_index.json", "_class_name");
    let class = class.or_else(|| files.text("transformer/config.json", "_class_name"));
    let class = class.unwrap_or_default();
    match class {
        class if class.starts_with("StableDiffusionXL") => STABLE_DIFFUSION_XL,
        class if class.starts_with("StableDiffusion3") => match has_t5(files) {
            true => STABLE_DIFFUSION_3,
            false => STABLE_DIFFUSION_3_WITHOUT_T5,
        },
        class if class.starts_with("Flux") => FLUX,
        class if class.starts_with("ZImage") || class.starts_with("Chroma") => ONE_TEXT_ENCODER,
        _ => STABLE_DIFFUSION,
    }
}

/// Whether a model of Stable Diffusion 3 has its third text encoder: files of it, and no `null` in the list of parts.
fn has_t5(files: &Inventory) -> bool {
    let class = files
        .configs
        .get("model_index.json")
        .and_then(|index| index.get("text_encoder_3"));
    let left_out = class
        .and_then(Value::as_array)
        .is_some_and(|class| class.iter().all(Value::is_null));
    !left_out && files.names.iter().any(|name| name.starts_with("text_encoder_3/"))
}

/// Lists the files that a model in diffusers' layout needs and this folder or repository lacks. Empty for
/// a single file.
#[must_use]
pub fn missing_files(files: &Inventory) -> Vec<String> {
    if !files.is_folder {
        return Vec::new();
    }
    let has = |name: &str| files.names.iter().any(|other| other == name);
    let mut missing = Vec::new();
    let layout = layout(files);
    for &(part, stem) in layout.components {
        let config = format!("{part}/config.json");
        if !has(&config) {
            missing.push(config);
        }
        let names = names_in(files, part);
        if choose(&names) == WeightsSelection::None {
            // Among several files with other names it is unclear which are the weights.
            let stem = if names.iter().any(|name| is_weights(name)) {
                stem
            } else {
                "*"
            };
            missing.push(format!("{part}/{stem}.safetensors"));
        }
    }
    if !has(SCHEDULER) {
        missing.push(SCHEDULER.to_owned());
    }
    for folder in layout.tokenizers {
        let lacking = |names: &&[&str]| -> Vec<String> {
            let paths = names.iter().map(|name| format!("{folder}/{name}"));
            paths.filter(|path| !has(path)).collect()
        };
        let mut all = TOKENIZER_FILES.iter().map(lacking);
        if all.clone().any(|lacking| lacking.is_empty()) {
            continue;
        }
        missing.extend(all.next_back().unwrap_or_default());
    }
    missing
}

/// Finds the first damaged file of a local model and describes the damage: a config that is not JSON, truncated weights. Checks
/// only the files that the engine opens.
#[must_use]
pub fn damaged_file(path: &Path, files: &Inventory) -> Option<String> {
    if !files.is_folder {
        return files.problem.clone();
    }
    let component = layout(files).components.iter().find_map(|(part, _)| {
        let config = format!("{part}/config.json");
        damaged_json(path, &config, Value::is_object).or_else(|| damaged_weights(path, part))
    });
    component.or_else(|| damaged_json(path, SCHEDULER, |_| true))
}

/// Describes the damage of a JSON file. Missing files are reported by [`missing_files`].
fn damaged_json(path: &Path, name: &str, is_valid: impl Fn(&Value) -> bool) -> Option<String> {
    match regular::read_text(&path.join(name), MAX_TEXT_FILE_BYTES) {
        Ok(text) => match parse_json(&text) {
            Ok(json) if is_valid(&json) => None,
            Ok(_) => Some(format!("{name} is not a JSON object")),
            Err(error) => Some(format!("{name} is not a JSON object: {error}")),
        },
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => Some(format!("{name}: {error}")),
    }
}

/// Describes the damage of a component's weights. Missing files are reported by [`missing_files`].
fn damaged_weights(path: &Path, part: &str) -> Option<String> {
    let named = |file: &Path| file.strip_prefix(path).unwrap_or(file).display().to_string();
    // A part that comes from elsewhere may have no folder.
    if !path.join(part).exists() {
        return None;
    }
    let files = match weights_files(&path.join(part)) {
        Ok(files) => files,
        Err(WeightsError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => return None,
        Err(WeightsError::Io { path: file, source }) => return Some(format!("{}: {source}", named(&file))),
        Err(WeightsError::Invalid { path: file, reason }) => return Some(format!("{}: {reason}", named(&file))),
        Err(WeightsError::Pickle { path: file }) => {
            return Some(format!("{}: it is a pickle file, which is not opened", named(&file)));
        }
    };
    files.iter().find_map(|file| match header_of(file) {
        Ok(_) => None,
        Err(Unreadable::Pickle(why) | Unreadable::Other(why)) => Some(format!("{}: {why}", named(file))),
    })
}

/// The names of the files directly in a component's folder.
fn names_in<'a>(files: &'a Inventory, part: &str) -> BTreeSet<&'a str> {
    let inside = |name: &'a String| name.strip_prefix(part)?.strip_prefix('/');
    let names = files.names.iter().filter_map(inside);
    names.filter(|name| !name.contains('/')).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A safetensors file with one tensor of this many bytes.
    fn weights(bytes: usize) -> Vec<u8> {
        let header = format!(r#"{{"w":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
        [
            &(header.len() as u64).to_le_bytes()[..],
            header.as_bytes(),
            &vec![7_u8; bytes],
        ]
        .concat()
    }

    fn write(model: &Path, name: &str, content: impl AsRef<[u8]>) {
        let path = model.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    /// A complete model.
    fn complete_model() -> tempfile::TempDir {
        let model = tempfile::tempdir().unwrap();
        for (part, stem) in STABLE_DIFFUSION.components {
            write(model.path(), &format!("{part}/config.json"), "{}");
            write(model.path(), &format!("{part}/{stem}.safetensors"), weights(9));
        }
        for name in ["model_index.json", SCHEDULER, "tokenizer/vocab.json"] {
            write(model.path(), name, "{}");
        }
        write(model.path(), "tokenizer/merges.txt", "");
        model
    }

    /// The missing files and the first damaged file.
    fn report(model: &Path) -> (Vec<String>, Option<String>) {
        let files = Inventory::open(model);
        (missing_files(&files), damaged_file(model, &files))
    }

    const COMPLETE: (Vec<String>, Option<String>) = (Vec::new(), None);
    const POINTER: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n";

    #[test]
    fn missing_files_are_those_that_the_engine_opens() {
        let names = [
            "unet/config.json",
            "unet/unet-q4_0.gguf",
            "vae/config.json",
            "vae/diffusion_pytorch_model.fp16.safetensors",
            "text_encoder/config.json",
            "text_encoder/model.safetensors.index.json",
            "text_encoder/model-00001-of-00002.safetensors",
            "scheduler/scheduler_config.json",
            "tokenizer/tokenizer.json",
        ];
        let mut files = Inventory::of_names(names.map(str::to_owned).to_vec());
        assert!(missing_files(&files).is_empty());
        files.names.retain(|name| !name.ends_with(".gguf") && name != SCHEDULER);
        assert_eq!(missing_files(&files), ["unet/*.safetensors", SCHEDULER]);
        // Two files with other names, one in a subfolder, and macOS metadata.
        for name in ["unet/a.safetensors", "unet/b.safetensors"] {
            files.names.push(name.to_owned());
        }
        assert_eq!(missing_files(&files)[0], "unet/diffusion_pytorch_model.safetensors");
        files.names.retain(|name| name != "unet/b.safetensors");
        assert_eq!(missing_files(&files), [SCHEDULER]);
        files.names.retain(|name| name != "unet/a.safetensors");
        for name in ["unet/deep/a.safetensors", "unet/._a.safetensors"] {
            files.names.push(name.to_owned());
        }
        assert_eq!(missing_files(&files)[0], "unet/*.safetensors");
    }

    #[test]
    fn stable_diffusion_3_may_lack_t5() {
        let model = tempfile::tempdir().unwrap();
        let index = |t5: &str| format!(r#"{{"_class_name": "StableDiffusion3Pipeline", "text_encoder_3": {t5}}}"#);
        write(
            model.path(),
            "model_index.json",
            index(r#"["transformers", "T5EncoderModel"]"#),
        );
        for (part, stem) in STABLE_DIFFUSION_3_WITHOUT_T5.components {
            write(model.path(), &format!("{part}/config.json"), "{}");
            write(model.path(), &format!("{part}/{stem}.safetensors"), weights(9));
        }
        for name in [SCHEDULER, "tokenizer/tokenizer.json", "tokenizer_2/tokenizer.json"] {
            write(model.path(), name, "{}");
        }
        assert_eq!(report(model.path()), COMPLETE);
        // A part of T5 is an incomplete model, unless the list of parts leaves it out.
        write(model.path(), "text_encoder_3/config.json", "{}");
        let missing = [
            "text_encoder_3/*.safetensors",
            "tokenizer_3/vocab.json",
            "tokenizer_3/merges.txt",
        ];
        assert_eq!(report(model.path()).0, missing);
        write(model.path(), "model_index.json", index("[null, null]"));
        assert_eq!(report(model.path()), COMPLETE);
        std::fs::remove_file(model.path().join("text_encoder_2/config.json")).unwrap();
        assert_eq!(report(model.path()).0, ["text_encoder_2/config.json"]);
    }

    #[test]
    fn a_z_image_folder_has_one_text_encoder_and_a_transformer() {
        let names = [
            "model_index.json",
            "scheduler/scheduler_config.json",
            "tokenizer/vocab.json",
            "tokenizer/merges.txt",
        ];
        let mut files = Inventory::of_names(names.map(str::to_owned).to_vec());
        let index = serde_json::Map::from_iter([("_class_name".to_owned(), "ZImagePipeline".into())]);
        files.configs.insert("model_index.json".to_owned(), index);
        assert_eq!(
            missing_files(&files),
            [
                "transformer/config.json",
                "transformer/*.safetensors",
                "vae/config.json",
                "vae/*.safetensors",
                "text_encoder/config.json",
                "text_encoder/*.safetensors",
            ]
        );
    }

    #[test]
    fn damage_of_opened_files_is_reported() {
        let model = complete_model();
        let at = |name: &str| model.path().join(name);
        assert_eq!(report(model.path()), COMPLETE);
        let mut cut = weights(9);
        cut.pop();
        for (part, stem) in STABLE_DIFFUSION.components {
            for (name, content, says) in [
                (format!("{part}/{stem}.safetensors"), &cut[..], "it is cut off"),
                (format!("{part}/{stem}.safetensors"), POINTER.as_bytes(), "git lfs pull"),
                (format!("{part}/config.json"), &b"[]"[..], "is not a JSON object"),
                (format!("{part}/config.json"), &b"{"[..], "is not a JSON object: "),
                (SCHEDULER.to_owned(), &b"{"[..], "is not a JSON object: "),
            ] {
                let before = fs::read(at(&name)).unwrap();
                write(model.path(), &name, content);
                let (missing, damaged) = report(model.path());
                let damaged = damaged.unwrap_or_default();
                assert!(
                    missing.is_empty() && damaged.starts_with(&name) && damaged.contains(says),
                    "{name}: {damaged}"
                );
                write(model.path(), &name, before);
            }
        }
        // All shards are opened.
        let (index, shards) = (
            r#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}"#,
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        );
        fs::remove_file(at("text_encoder/model.safetensors")).unwrap();
        write(model.path(), "text_encoder/model.safetensors.index.json", index);
        write(model.path(), &format!("text_encoder/{}", shards[0]), weights(9));
        let missing = report(model.path()).1.unwrap();
        assert!(
            missing.contains("index.json: the shard") && missing.contains(shards[1]),
            "{missing}"
        );
        write(model.path(), &format!("text_encoder/{}", shards[1]), POINTER);
        let pointer = report(model.path()).1.unwrap();
        assert!(
            pointer.starts_with(&format!("text_encoder/{}: ", shards[1])),
            "{pointer}"
        );
        write(model.path(), &format!("text_encoder/{}", shards[1]), weights(9));
        assert_eq!(report(model.path()), COMPLETE);
        // Two candidates are ambiguous.
        fs::remove_file(at("unet/diffusion_pytorch_model.safetensors")).unwrap();
        write(model.path(), "unet/a.gguf", "GGUF");
        write(model.path(), "unet/b.gguf", "GGUF");
        let either = report(model.path()).1.unwrap();
        assert!(either.starts_with("unet: `a.gguf` and `b.gguf`"), "{either}");
    }

    #[test]
    fn damage_of_files_that_are_not_opened_is_ignored() {
        let model = complete_model();
        let unet = |name: &str| format!("unet/diffusion_pytorch_model{name}.safetensors");
        write(model.path(), &unet(".fp16"), &weights(9)[..20]);
        assert_eq!(report(model.path()), COMPLETE);
        fs::rename(model.path().join(unet("")), model.path().join(unet(".fp16"))).unwrap();
        write(model.path(), &unet(".non_ema"), POINTER);
        write(
            model.path(),
            "unet/._diffusion_pytorch_model.fp16.safetensors",
            b"\x00\x05\x16\x07",
        );
        write(model.path(), "vae/vae-q8_0.gguf", "GGUF");
        assert_eq!(report(model.path()), COMPLETE);
        // A single file with another name is opened.
        fs::remove_file(model.path().join(unet(".fp16"))).unwrap();
        fs::rename(
            model.path().join(unet(".non_ema")),
            model.path().join("unet/mine.safetensors"),
        )
        .unwrap();
        assert!(report(model.path()).1.unwrap().starts_with("unet/mine.safetensors: "));
        write(model.path(), "unet/mine.safetensors", weights(9));
        assert_eq!(report(model.path()), COMPLETE);
    }

    #[test]
    fn pythons_non_finite_numbers_are_accepted() {
        let model = complete_model();
        for name in ["unet/config.json", SCHEDULER, "model_index.json"] {
            write(model.path(), name, r#"{"a": -Infinity, "b": [NaN], "c": "Infinity"}"#);
        }
        assert_eq!(report(model.path()), COMPLETE);
        let files = Inventory::open(model.path());
        assert_eq!(files.problem, None);
        assert_eq!(files.configs["unet/config.json"]["c"], "Infinity");
    }

    #[test]
    fn component_files_are_found_among_many_other_files() {
        let model = complete_model();
        for number in 0..5_000 {
            write(model.path(), &format!("images/{number}.png"), "");
            write(model.path(), &format!("{number}.txt"), "");
        }
        assert_eq!(report(model.path()), COMPLETE);
    }
}
