//! Whether everything of a model is there, and not cut off.

use super::{Inventory, Unreadable, header_of};
use std::path::Path;

/// Folders of a Stable Diffusion 1.x model in diffusers' layout that hold a `config.json` and weights.
const PARTS: [&str; 3] = ["unet", "vae", "text_encoder"];

/// Files that a Stable Diffusion 1.x model in diffusers' layout needs and this folder or repository does not have. Nothing for
/// a single file.
#[must_use]
pub fn lacking(files: &Inventory) -> Vec<String> {
    if !files.is_folder {
        return Vec::new();
    }
    let has = |name: &str| files.names.iter().any(|other| other == name);
    let mut lacking = Vec::new();
    for part in PARTS {
        let config = format!("{part}/config.json");
        if !has(&config) {
            lacking.push(config);
        }
        if weights_of(files, part).is_empty() {
            lacking.push(format!("{part}/*.safetensors"));
        }
    }
    if !has("tokenizer/tokenizer.json") {
        let needed = ["tokenizer/vocab.json", "tokenizer/merges.txt"];
        lacking.extend(needed.into_iter().filter(|name| !has(name)).map(str::to_owned));
    }
    lacking
}

/// The first file of a model of this machine that is damaged, and how: a config that is no JSON, weights that are cut off.
#[must_use]
pub fn damaged(path: &Path, files: &Inventory) -> Option<String> {
    let says = |name: &str| {
        let why = match header_of(&path.join(name)) {
            Ok(_) => return None,
            Err(Unreadable::Pickle(why) | Unreadable::Other(why)) => why,
        };
        Some(format!("{name}: {why}"))
    };
    if !files.is_folder {
        return files.problem.clone();
    }
    PARTS.iter().find_map(|part| {
        let config = format!("{part}/config.json");
        let text = std::fs::read(path.join(&config)).ok()?;
        match serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(&text) {
            Err(error) => Some(format!("{config} is no JSON object: {error}")),
            Ok(_) => used(&weights_of(files, part)).iter().copied().find_map(says),
        }
    })
}

/// Weights files of a part, safetensors or GGUF.
fn weights_of<'a>(files: &'a Inventory, part: &str) -> Vec<&'a str> {
    let below = |name: &&str| {
        let inside = name.strip_prefix(part).and_then(|rest| rest.strip_prefix('/'));
        inside.is_some_and(|name| name.ends_with(".safetensors") || name.ends_with(".gguf"))
    };
    files.names.iter().map(String::as_str).filter(below).collect()
}

/// Those of them that are read: where there is a file in full precision, no variant of it.
fn used<'b, 'a>(weights: &'b [&'a str]) -> &'b [&'a str] {
    let whole = |name: &&str| {
        ["diffusion_pytorch_model.safetensors", "model.safetensors"]
            .iter()
            .any(|stem| name.rsplit('/').next() == Some(stem))
    };
    match weights.iter().position(whole) {
        Some(at) => &weights[at..=at],
        None => weights,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_may_be_gguf_and_a_variant_that_is_not_read_may_be_broken() {
        let names = [
            "unet/config.json",
            "unet/unet-q4_0.gguf",
            "vae/config.json",
            "vae/diffusion_pytorch_model.fp16.safetensors",
            "text_encoder/config.json",
            "text_encoder/model.safetensors",
            "text_encoder/model.fp16.safetensors",
            "tokenizer/tokenizer.json",
        ];
        let mut files = Inventory::of_names(names.map(str::to_owned).to_vec());
        assert!(lacking(&files).is_empty());
        let read = |part: &str| used(&weights_of(&files, part)).to_vec();
        assert_eq!(read("text_encoder"), ["text_encoder/model.safetensors"]);
        assert_eq!(read("vae"), ["vae/diffusion_pytorch_model.fp16.safetensors"]);
        files.names.retain(|name| !name.ends_with(".gguf"));
        assert_eq!(lacking(&files), ["unet/*.safetensors"]);
    }
}
