//! Selects the files of a repository that make up the model.

use super::parts::RepositoryParts;
use aitk_common::hash::ContentHash;
use aitk_common::job::limits::MAX_TEXT_FILE_BYTES;
use serde::Deserialize;
use std::collections::BTreeSet;

/// Components of a pipeline that predict the noise.
const DENOISERS: [&str; 2] = ["unet", "transformer"];
/// Components of a pipeline that we never run.
const UNUSED_COMPONENTS: [&str; 2] = ["safety_checker", "feature_extractor"];

/// A file in a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RemoteFile {
    pub(super) name: String,
    pub(super) bytes: u64,
    /// The hash, which the hub gives only for large files.
    pub(super) hash: Option<ContentHash>,
}

/// The files of a repository at one revision.
#[derive(Clone, Debug)]
pub(super) struct Listing {
    pub(super) revision: String,
    /// Whether only users who accepted its terms may download its files; everybody may list them.
    pub(super) is_gated: bool,
    pub(super) files: Vec<RemoteFile>,
}

#[derive(Deserialize)]
struct Answer {
    sha: String,
    /// `false`, or how access is granted: `"auto"`, `"manual"`.
    #[serde(default)]
    gated: serde_json::Value,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
    size: u64,
}

impl Listing {
    /// Parses the hub's answer.
    pub(super) fn parse(text: &[u8]) -> Result<Self, String> {
        let answer: Answer =
            serde_json::from_slice(text).map_err(|error| format!("the hub's answer cannot be parsed: {error}"))?;
        // The revision becomes part of a path.
        if answer.sha.len() > 64 || answer.sha.is_empty() || !answer.sha.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err("the hub names no revision".to_owned());
        }
        let file = |sibling: Sibling| {
            let bytes = sibling.lfs.as_ref().map(|lfs| lfs.size).or(sibling.size);
            let bytes = bytes.ok_or_else(|| format!("the hub gives no size for {}", sibling.rfilename))?;
            let hash = match sibling.lfs {
                Some(lfs) => Some(ContentHash::parse(&lfs.sha256).map_err(|error| error.to_string())?),
                None => None,
            };
            Ok(RemoteFile {
                name: sibling.rfilename,
                bytes,
                hash,
            })
        };
        let files = answer.siblings.into_iter().map(file).collect::<Result<_, String>>()?;
        Ok(Self {
            revision: answer.sha,
            is_gated: !matches!(answer.gated, serde_json::Value::Null | serde_json::Value::Bool(false)),
            files,
        })
    }
}

/// The file that lists the pipeline's components.
pub(super) fn index_file(listing: &Listing) -> Option<&RemoteFile> {
    listing.files.iter().find(|file| file.name == "model_index.json")
}

/// SentencePiece models, which are read where a folder has no `tokenizer.json`.
const SENTENCEPIECE_MODELS: [&str; 2] = ["tokenizer.model", "spiece.model"];

/// Refuses configs, tokenizers and lists that are too large, because they are read as a whole.
pub(super) fn check_text_size(file: &RemoteFile) -> Result<(), String> {
    let is_text = [".json", ".txt", ".model"]
        .iter()
        .any(|ending| file.name.ends_with(ending));
    if is_text && file.bytes > MAX_TEXT_FILE_BYTES {
        return Err(format!(
            "{} has {} bytes; a config or a tokenizer may have at most {MAX_TEXT_FILE_BYTES}",
            file.name, file.bytes
        ));
    }
    Ok(())
}

/// Selects the files to fetch of these parts, besides the index.
pub(super) fn pipeline_files<'a>(
    listing: &'a Listing,
    index: &[u8],
    parts: RepositoryParts,
) -> Result<Vec<&'a RemoteFile>, String> {
    let index: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(index).map_err(|error| format!("its model_index.json cannot be parsed: {error}"))?;
    let is_component_file = |file: &RemoteFile| {
        let Some((folder, name)) = file.name.split_once('/') else {
            return false;
        };
        // The config of the denoiser says which variant of a family the extras are of.
        let is_denoiser = DENOISERS.contains(&folder) && name != "config.json";
        let is_unused = UNUSED_COMPONENTS.contains(&folder) || (parts == RepositoryParts::Extras && is_denoiser);
        index.contains_key(folder) && !is_unused && !name.contains('/')
    };
    select_files(listing, is_component_file)
}

/// Selects the files of a repository that is a single component, such as a VAE: all its files are at the top level. Without a config it has
/// one safetensors file, whose tensors say what it is.
pub(super) fn component_files(listing: &Listing) -> Result<Vec<&RemoteFile>, String> {
    let is_weights = |file: &&RemoteFile| file.name.ends_with(".safetensors") && !file.name.contains('/');
    let has_config = listing.files.iter().any(|file| file.name == "config.json");
    if !has_config && listing.files.iter().filter(is_weights).count() != 1 {
        return Err("it has neither model_index.json nor config.json, nor a single safetensors file".to_owned());
    }
    select_files(listing, |file| !file.name.contains('/'))
}

/// Selects those files that `belongs` accepts and that we read; of several variants, the plain one.
fn select_files(listing: &Listing, belongs: impl Fn(&RemoteFile) -> bool) -> Result<Vec<&RemoteFile>, String> {
    let names: BTreeSet<&str> = listing.files.iter().map(|file| file.name.as_str()).collect();
    let selected: Vec<&RemoteFile> = listing
        .files
        .iter()
        .filter(|file| {
            let kind = [".safetensors", ".json", ".txt"]
                .iter()
                .any(|ending| file.name.ends_with(ending));
            belongs(file)
                && (kind || is_only_gguf(&names, &file.name) || is_only_tokenizer(&names, &file.name))
                && !plain_version(&file.name).is_some_and(|plain| has_plain_version(&names, &plain))
        })
        .collect();
    selected.iter().try_for_each(|file| check_text_size(file))?;
    let weights = [".safetensors", ".gguf"];
    if !selected
        .iter()
        .any(|file| weights.iter().any(|ending| file.name.ends_with(ending)))
    {
        let has_several = names.iter().filter(|name| name.ends_with(".gguf")).count() > 1;
        return Err(match has_several {
            true => "it has several GGUF files, and nothing says which to take: download one and give its path",
            false => "it has no safetensors or GGUF file; models in pickle files (.bin, .ckpt) are refused",
        }
        .to_owned());
    }
    Ok(selected)
}

/// Returns whether this is the only GGUF file of a component without safetensors; with several, the choice would be
/// ambiguous.
fn is_only_gguf(names: &BTreeSet<&str>, name: &str) -> bool {
    let folder = |name: &str| {
        name.rsplit_once('/')
            .map_or(String::new(), |(folder, _)| folder.to_owned())
    };
    let beside = |ending: &str| {
        let same = |other: &&&str| other.ends_with(ending) && folder(other) == folder(name);
        names.iter().filter(same).count()
    };
    name.ends_with(".gguf") && beside(".gguf") == 1 && beside(".safetensors") == 0
}

/// Returns whether this is a SentencePiece model in a folder without `tokenizer.json`.
fn is_only_tokenizer(names: &BTreeSet<&str>, name: &str) -> bool {
    let (folder, file) = match name.rfind('/') {
        Some(at) => name.split_at(at + 1),
        None => ("", name),
    };
    SENTENCEPIECE_MODELS.contains(&file) && !names.contains(format!("{folder}tokenizer.json").as_str())
}

/// `unet/diffusion_pytorch_model.fp16.safetensors` -> `unet/diffusion_pytorch_model.safetensors`, for any variant.
fn plain_version(name: &str) -> Option<String> {
    let stem = name
        .strip_suffix(".safetensors")
        .or_else(|| name.strip_suffix(".safetensors.index.json"))?;
    let (plain, _variant) = stem.rsplit_once('.')?;
    Some(plain.to_owned())
}

/// Returns whether the plain version exists, in one file or in shards.
fn has_plain_version(names: &BTreeSet<&str>, plain: &str) -> bool {
    [".safetensors", ".safetensors.index.json"]
        .iter()
        .any(|ending| names.contains(format!("{plain}{ending}").as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The files that are fetched of a pipeline with these files.
    fn fetched(names: &[&str]) -> Result<Vec<String>, String> {
        let file = |name: &&str| RemoteFile {
            name: (*name).to_owned(),
            bytes: 1,
            hash: None,
        };
        let listing = Listing {
            revision: "0".to_owned(),
            is_gated: false,
            files: names.iter().map(file).collect(),
        };
        let files = pipeline_files(
            &listing,
            br#"{"unet": ["diffusers", "UNet2DConditionModel"]}"#,
            RepositoryParts::All,
        )?;
        Ok(files.into_iter().map(|file| file.name.clone()).collect())
    }

    #[test]
    fn a_config_that_is_too_large_is_refused() {
        let listing = |bytes: u64| Listing {
            revision: "0a".into(),
            is_gated: false,
            files: [("unet/config.json", bytes), ("unet/m.safetensors", u64::MAX)]
                .map(|(name, bytes)| RemoteFile {
                    name: name.to_owned(),
                    bytes,
                    hash: None,
                })
                .to_vec(),
        };
        assert_eq!(
            pipeline_files(&listing(MAX_TEXT_FILE_BYTES), br#"{"unet": []}"#, RepositoryParts::All)
                .unwrap()
                .len(),
            2
        );
        let error = pipeline_files(
            &listing(MAX_TEXT_FILE_BYTES + 1),
            br#"{"unet": []}"#,
            RepositoryParts::All,
        )
        .unwrap_err();
        assert!(
            error.contains("unet/config.json") && error.contains("at most"),
            "{error}"
        );
    }

    #[test]
    fn a_repository_without_a_config_has_one_file_of_weights() {
        let weights = ["README.md", "sapiens2_1b_pretrain.safetensors"];
        assert_eq!(of_component(&weights), Ok(vec![weights[1].to_owned()]));
        for names in [
            ["a.safetensors", "b.safetensors"],
            ["README.md", "unet/a.safetensors"],
            ["README.md", "a.bin"],
        ] {
            let error = of_component(&names).unwrap_err();
            assert!(error.contains("config.json"), "{error}");
        }
    }

    fn of_component(names: &[&str]) -> Result<Vec<String>, String> {
        let file = |name: &&str| RemoteFile {
            name: (*name).to_owned(),
            bytes: 1,
            hash: None,
        };
        let listing = Listing {
            revision: "0".to_owned(),
            is_gated: false,
            files: names.iter().map(file).collect(),
        };
        let files = component_files(&listing)?;
        Ok(files.into_iter().map(|file| file.name.clone()).collect())
    }

    #[test]
    fn a_sentencepiece_model_is_fetched_where_there_is_no_other_tokenizer() {
        let (config, weights) = ("config.json", "model.safetensors");
        let of_component = |names: &[&str]| of_component(names).unwrap();
        let alone = [config, weights, "tokenizer.model"];
        assert_eq!(of_component(&alone), alone);
        let both = [config, weights, "tokenizer.json", "tokenizer.model", "other.model"];
        assert_eq!(of_component(&both), both[..3]);
    }

    #[test]
    fn a_gguf_file_is_fetched_if_it_is_the_only_weights() {
        let config = "unet/config.json";
        assert_eq!(
            fetched(&[config, "unet/m-q8_0.gguf", "vae/x.gguf"]),
            Ok(vec![config.to_owned(), "unet/m-q8_0.gguf".to_owned()])
        );
        let plain = "unet/m.safetensors";
        assert_eq!(
            fetched(&[config, "unet/m-q8_0.gguf", plain]),
            Ok(vec![config.to_owned(), plain.to_owned()])
        );
        let has_several = fetched(&[config, "unet/m-q8_0.gguf", "unet/m-q4_k.gguf"]).unwrap_err();
        assert!(has_several.contains("several GGUF files"), "{has_several}");
        let none = fetched(&[config, "unet/m.bin"]).unwrap_err();
        assert!(none.contains("no safetensors or GGUF file"), "{none}");
    }
}
