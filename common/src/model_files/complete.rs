//! Whether everything of a model is there, and not cut off.

use super::chosen::{Choice, NoWeights, choose, weights_files};
use super::inventory::is_weights;
use super::json::parse_json;
use super::{Inventory, Unreadable, header_of};
use crate::fsutil::regular;
use crate::job::limits::MAX_TEXT_FILE_BYTES;
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::Path;

/// Folders of a Stable Diffusion 1.x model in diffusers' layout that hold a `config.json` and weights, and what these are
/// called there.
const PARTS: [(&str, &str); 3] = [
    ("unet", "diffusion_pytorch_model"),
    ("vae", "diffusion_pytorch_model"),
    ("text_encoder", "model"),
];
/// What the engine reads of its sampler.
const SCHEDULER: &str = "scheduler/scheduler_config.json";

/// Files that a Stable Diffusion 1.x model in diffusers' layout needs and this folder or repository does not have. Nothing for
/// a single file.
#[must_use]
pub fn lacking(files: &Inventory) -> Vec<String> {
    if !files.is_folder {
        return Vec::new();
    }
    let has = |name: &str| files.names.iter().any(|other| other == name);
    let mut lacking = Vec::new();
    for (part, stem) in PARTS {
        let config = format!("{part}/config.json");
        if !has(&config) {
            lacking.push(config);
        }
        let names = names_in(files, part);
        if choose(&names) == Choice::Nothing {
            // Of several files of other names nothing says which are the weights.
            let stem = if names.iter().any(|name| is_weights(name)) {
                stem
            } else {
                "*"
            };
            lacking.push(format!("{part}/{stem}.safetensors"));
        }
    }
    if !has(SCHEDULER) {
        lacking.push(SCHEDULER.to_owned());
    }
    if !has("tokenizer/tokenizer.json") {
        let needed = ["tokenizer/vocab.json", "tokenizer/merges.txt"];
        lacking.extend(needed.into_iter().filter(|name| !has(name)).map(str::to_owned));
    }
    lacking
}

/// The first file of a model of this machine that is damaged, and how: a config that is no JSON, weights that are cut off. Only
/// what the engine opens is looked at, and as it does.
#[must_use]
pub fn damaged(path: &Path, files: &Inventory) -> Option<String> {
    if !files.is_folder {
        return files.problem.clone();
    }
    let parts = PARTS.iter().find_map(|(part, _)| {
        let config = format!("{part}/config.json");
        damaged_json(path, &config, Value::is_object).or_else(|| damaged_weights(path, part))
    });
    parts.or_else(|| damaged_json(path, SCHEDULER, |_| true))
}

/// What is wrong with a JSON file. One that is not there is [`lacking`].
fn damaged_json(path: &Path, name: &str, is_one: impl Fn(&Value) -> bool) -> Option<String> {
    match regular::read_text(&path.join(name), MAX_TEXT_FILE_BYTES) {
        Ok(text) => match parse_json(&text) {
            Ok(json) if is_one(&json) => None,
            Ok(_) => Some(format!("{name} is no JSON object")),
            Err(error) => Some(format!("{name} is no JSON object: {error}")),
        },
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => Some(format!("{name}: {error}")),
    }
}

/// What is wrong with the weights of a part. Those that are not there are [`lacking`].
fn damaged_weights(path: &Path, part: &str) -> Option<String> {
    let named = |file: &Path| file.strip_prefix(path).unwrap_or(file).display().to_string();
    let files = match weights_files(&path.join(part)) {
        Ok(files) => files,
        Err(NoWeights::Io { source, .. }) if source.kind() == ErrorKind::NotFound => return None,
        Err(NoWeights::Io { path: file, source }) => return Some(format!("{}: {source}", named(&file))),
        Err(NoWeights::Wrong { path: file, reason }) => return Some(format!("{}: {reason}", named(&file))),
        Err(NoWeights::Pickle { path: file }) => {
            return Some(format!("{}: it is a pickle file, which is not opened", named(&file)));
        }
    };
    files.iter().find_map(|file| match header_of(file) {
        Ok(_) => None,
        Err(Unreadable::Pickle(why) | Unreadable::Other(why)) => Some(format!("{}: {why}", named(file))),
    })
}

/// Names of the files that lie in the folder of a part.
fn names_in<'a>(files: &'a Inventory, part: &str) -> BTreeSet<&'a str> {
    let inside = |name: &'a String| name.strip_prefix(part)?.strip_prefix('/');
    let names = files.names.iter().filter_map(inside);
    names.filter(|name| !name.contains('/')).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A safetensors file of one tensor of so many bytes.
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

    /// A model of which nothing is missing.
    fn whole() -> tempfile::TempDir {
        let model = tempfile::tempdir().unwrap();
        for (part, stem) in PARTS {
            write(model.path(), &format!("{part}/config.json"), "{}");
            write(model.path(), &format!("{part}/{stem}.safetensors"), weights(9));
        }
        for name in ["model_index.json", SCHEDULER, "tokenizer/vocab.json"] {
            write(model.path(), name, "{}");
        }
        write(model.path(), "tokenizer/merges.txt", "");
        model
    }

    /// What is said of it.
    fn said(model: &Path) -> (Vec<String>, Option<String>) {
        let files = Inventory::open(model);
        (lacking(&files), damaged(model, &files))
    }

    const WHOLE: (Vec<String>, Option<String>) = (Vec::new(), None);
    const POINTER: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n";

    #[test]
    fn what_is_needed_is_what_the_engine_opens() {
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
        assert!(lacking(&files).is_empty());
        files.names.retain(|name| !name.ends_with(".gguf") && name != SCHEDULER);
        assert_eq!(lacking(&files), ["unet/*.safetensors", SCHEDULER]);
        // Two files of which none has a name that is looked for, one in a folder below, and what a Mac notes.
        for name in ["unet/a.safetensors", "unet/b.safetensors"] {
            files.names.push(name.to_owned());
        }
        assert_eq!(lacking(&files)[0], "unet/diffusion_pytorch_model.safetensors");
        files.names.retain(|name| name != "unet/b.safetensors");
        assert_eq!(lacking(&files), [SCHEDULER]);
        files.names.retain(|name| name != "unet/a.safetensors");
        for name in ["unet/deep/a.safetensors", "unet/._a.safetensors"] {
            files.names.push(name.to_owned());
        }
        assert_eq!(lacking(&files)[0], "unet/*.safetensors");
    }

    #[test]
    fn what_is_opened_has_to_be_whole() {
        let model = whole();
        let at = |name: &str| model.path().join(name);
        assert_eq!(said(model.path()), WHOLE);
        let mut cut = weights(9);
        cut.pop();
        for (part, stem) in PARTS {
            for (name, content, says) in [
                (format!("{part}/{stem}.safetensors"), &cut[..], "it is cut off"),
                (format!("{part}/{stem}.safetensors"), POINTER.as_bytes(), "git lfs pull"),
                (format!("{part}/config.json"), &b"[]"[..], "is no JSON object"),
                (format!("{part}/config.json"), &b"{"[..], "is no JSON object: "),
                (SCHEDULER.to_owned(), &b"{"[..], "is no JSON object: "),
            ] {
                let before = fs::read(at(&name)).unwrap();
                write(model.path(), &name, content);
                let (lacking, damaged) = said(model.path());
                let damaged = damaged.unwrap_or_default();
                assert!(
                    lacking.is_empty() && damaged.starts_with(&name) && damaged.contains(says),
                    "{name}: {damaged}"
                );
                write(model.path(), &name, before);
            }
        }
        // All of the shards are opened.
        let (index, shards) = (
            r#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}"#,
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        );
        fs::remove_file(at("text_encoder/model.safetensors")).unwrap();
        write(model.path(), "text_encoder/model.safetensors.index.json", index);
        write(model.path(), &format!("text_encoder/{}", shards[0]), weights(9));
        let missing = said(model.path()).1.unwrap();
        assert!(
            missing.contains("index.json: the shard") && missing.contains(shards[1]),
            "{missing}"
        );
        write(model.path(), &format!("text_encoder/{}", shards[1]), POINTER);
        let pointer = said(model.path()).1.unwrap();
        assert!(
            pointer.starts_with(&format!("text_encoder/{}: ", shards[1])),
            "{pointer}"
        );
        write(model.path(), &format!("text_encoder/{}", shards[1]), weights(9));
        assert_eq!(said(model.path()), WHOLE);
        // Of two files of which one has to be chosen, none is.
        fs::remove_file(at("unet/diffusion_pytorch_model.safetensors")).unwrap();
        write(model.path(), "unet/a.gguf", "GGUF");
        write(model.path(), "unet/b.gguf", "GGUF");
        let either = said(model.path()).1.unwrap();
        assert!(either.starts_with("unet: `a.gguf` and `b.gguf`"), "{either}");
    }

    #[test]
    fn a_file_that_is_not_opened_may_be_broken() {
        let model = whole();
        let unet = |name: &str| format!("unet/diffusion_pytorch_model{name}.safetensors");
        write(model.path(), &unet(".fp16"), &weights(9)[..20]);
        assert_eq!(said(model.path()), WHOLE);
        fs::rename(model.path().join(unet("")), model.path().join(unet(".fp16"))).unwrap();
        write(model.path(), &unet(".non_ema"), POINTER);
        write(
            model.path(),
            "unet/._diffusion_pytorch_model.fp16.safetensors",
            b"\x00\x05\x16\x07",
        );
        write(model.path(), "vae/vae-q8_0.gguf", "GGUF");
        assert_eq!(said(model.path()), WHOLE);
        // Files of other names are opened where there is one of them.
        fs::remove_file(model.path().join(unet(".fp16"))).unwrap();
        fs::rename(
            model.path().join(unet(".non_ema")),
            model.path().join("unet/mine.safetensors"),
        )
        .unwrap();
        assert!(said(model.path()).1.unwrap().starts_with("unet/mine.safetensors: "));
        write(model.path(), "unet/mine.safetensors", weights(9));
        assert_eq!(said(model.path()), WHOLE);
    }

    #[test]
    fn numbers_as_python_writes_them_are_no_damage() {
        let model = whole();
        for name in ["unet/config.json", SCHEDULER, "model_index.json"] {
            write(model.path(), name, r#"{"a": -Infinity, "b": [NaN], "c": "Infinity"}"#);
        }
        assert_eq!(said(model.path()), WHOLE);
        let files = Inventory::open(model.path());
        assert_eq!(files.problem, None);
        assert_eq!(files.configs["unet/config.json"]["c"], "Infinity");
    }

    #[test]
    fn many_other_files_hide_nothing_of_a_model() {
        let model = whole();
        for number in 0..5_000 {
            write(model.path(), &format!("images/{number}.png"), "");
            write(model.path(), &format!("{number}.txt"), "");
        }
        assert_eq!(said(model.path()), WHOLE);
    }
}
