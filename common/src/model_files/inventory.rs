//! The small files of a model, read into memory.

use super::json::parse_json;
use crate::fsutil::regular;
use crate::gguf;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// The size limit of a `config.json` or `model_index.json`.
pub const SMALL_FILE_BYTES: u64 = 1 << 20;
/// The size limit of a safetensors header. Headers of known models are smaller.
const MAX_HEADER_BYTES: u64 = 64 << 20;
/// The most files of a folder that are listed, besides those in component folders.
const MAX_OTHER_FILES: usize = 4096;
/// Component folders of a model.
const COMPONENTS: [&str; 7] = [
    "scheduler",
    "text_encoder",
    "tokenizer",
    "transformer",
    "prior",
    "unet",
    "vae",
];
/// Top-level files that identify the model.
const INDEXES: [&str; 2] = ["model_index.json", "config.json"];
/// The most weights files whose headers are read.
const MAX_HEADERS: usize = 4;
/// Extensions of pickle files.
const PICKLE_EXTENSIONS: [&str; 7] = ["ckpt", "pt", "pth", "bin", "pkl", "pickle", "pt2"];

/// Names and shapes of the tensors of one weights file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorShapes {
    /// Shapes by tensor name, in PyTorch's order.
    pub shapes: BTreeMap<String, Vec<u64>>,
    /// `general.architecture` of a GGUF file.
    pub architecture: Option<String>,
}

/// The small files of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inventory {
    /// Whether it is a folder or a repository, not a single file.
    pub is_folder: bool,
    /// Paths of its files, with `/` between folders.
    pub names: Vec<String>,
    /// JSON files by path.
    pub configs: BTreeMap<String, Map<String, Value>>,
    /// Headers of weights files by path.
    pub weights: BTreeMap<String, TensorShapes>,
    /// The reason why it counts as a pickle file, or has weights only in pickle files.
    pub pickle: Option<String>,
    /// The reason why a file could not be read.
    pub problem: Option<String>,
}

/// Selects the files that identify the family: JSON files, and weights files whose headers are to be read.
#[must_use]
pub fn small_files(names: &[String]) -> (Vec<&str>, Vec<&str>) {
    let has = |name: &str| names.iter().any(|other| other == name);
    let json = [
        "model_index.json",
        "unet/config.json",
        "transformer/config.json",
        "prior/config.json",
        "config.json",
    ];
    let configs: Vec<&str> = json.into_iter().filter(|name| has(name)).collect();
    if !configs.is_empty() {
        return (configs, Vec::new());
    }
    let weights = |name: &&String| {
        let top = !name.contains('/') || name.starts_with("unet/") || name.starts_with("transformer/");
        top && is_weights(name)
    };
    let headers = names.iter().filter(weights).take(MAX_HEADERS).map(String::as_str);
    (configs, headers.collect())
}

impl Inventory {
    /// Reads the inventory of a local path. Unreadable files are left out; opening the model reports them.
    #[must_use]
    pub fn open(path: &Path) -> Self {
        if !path.is_dir() {
            return Self::of_file(path);
        }
        let mut files = Self::of_names(names_below(path));
        let (configs, headers) = small_files(&files.names);
        let (configs, headers): (Vec<String>, Vec<String>) = (owned(configs), owned(headers));
        for name in configs {
            if let Some(bytes) = read_small(&path.join(&name)) {
                files.add_config(&name, &bytes);
            }
        }
        for name in headers {
            match header_of(&path.join(&name)) {
                Ok(weights) => {
                    files.weights.insert(name, weights);
                }
                Err(Unreadable::Pickle(why)) => files.pickle = Some(format!("{name}: {why}")),
                Err(Unreadable::Other(why)) => files.problem = Some(format!("{name}: {why}")),
            }
        }
        files
    }

    fn of_file(path: &Path) -> Self {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut files = Self {
            names: vec![name.clone()],
            ..Self::default()
        };
        if let Some(extension) = pickle_extension(&name) {
            files.pickle = Some(format!("its name ends in .{extension}"));
            return files;
        }
        match header_of(path) {
            Ok(weights) => {
                files.weights.insert(name, weights);
            }
            Err(Unreadable::Pickle(why)) => files.pickle = Some(why),
            Err(Unreadable::Other(why)) => files.problem = Some(why),
        }
        files
    }

    /// Creates the inventory of a folder or repository with these files, without reading any.
    #[must_use]
    pub fn of_names(names: Vec<String>) -> Self {
        let pickle = match names.iter().any(|name| is_weights(name)) {
            true => None,
            false => {
                let first = names.iter().find(|name| pickle_extension(name).is_some());
                first.map(|name| format!("its only weights are in pickle files, such as {name}"))
            }
        };
        Self {
            is_folder: true,
            names,
            pickle,
            ..Self::default()
        }
    }

    /// Adds the content of a JSON file. Anything but an object is left out and noted in `problem`.
    pub fn add_config(&mut self, name: &str, bytes: &[u8]) {
        let Ok(text) = str::from_utf8(bytes) else {
            self.problem = Some(format!("{name} is not UTF-8 text"));
            return;
        };
        match parse_json(text) {
            Ok(Value::Object(map)) => {
                self.configs.insert(name.to_owned(), map);
            }
            Ok(_) => self.problem = Some(format!("{name} is not a JSON object")),
            Err(error) => self.problem = Some(format!("{name} is not valid JSON: {error}")),
        }
    }

    /// The string under a key of a JSON file.
    pub(super) fn text(&self, file: &str, key: &str) -> Option<&str> {
        self.configs.get(file)?.get(key)?.as_str()
    }
}

fn owned(names: Vec<&str>) -> Vec<String> {
    names.into_iter().map(str::to_owned).collect()
}

/// Whether the name is that of a readable weights file.
pub(super) fn is_weights(name: &str) -> bool {
    (name.ends_with(".safetensors") || name.ends_with(".gguf")) && !is_hidden(name)
}

/// Whether a file name begins with a dot. macOS writes `._NAME` files with metadata on some file systems.
pub(super) fn is_hidden(name: &str) -> bool {
    name.rsplit('/').next().is_some_and(|last| last.starts_with('.'))
}

/// The extension of a name, if it is that of a pickle file.
pub(super) fn pickle_extension(name: &str) -> Option<&'static str> {
    let extension = Path::new(name).extension()?.to_str()?.to_ascii_lowercase();
    PICKLE_EXTENSIONS.into_iter().find(|pickle| *pickle == extension)
}

/// Lists the files of a folder and of its direct subfolders, sorted. Files of component folders are always included, other files
/// up to a limit.
fn names_below(folder: &Path) -> Vec<String> {
    let listed = |folder: &Path, max: usize| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut names: Vec<String> = names.filter(|name| !is_hidden(name)).take(max).collect();
        names.sort();
        names
    };
    let files_in = |part: &str, max: usize| {
        let subfolder = folder.join(part);
        let files = listed(&subfolder, max)
            .into_iter()
            .filter(|name| subfolder.join(name).is_file());
        files.map(|name| format!("{part}/{name}")).collect::<Vec<_>>()
    };
    let mut names: BTreeSet<String> = INDEXES
        .into_iter()
        .filter(|name| folder.join(name).is_file())
        .map(str::to_owned)
        .collect();
    for part in COMPONENTS {
        names.extend(files_in(part, usize::MAX));
    }
    let max = names.len() + MAX_OTHER_FILES;
    let beside = listed(folder, MAX_OTHER_FILES).into_iter();
    let (files, others): (Vec<_>, Vec<_>) = beside.partition(|name| folder.join(name).is_file());
    names.extend(files);
    for name in others.iter().filter(|name| !COMPONENTS.contains(&name.as_str())) {
        names.extend(files_in(name, max.saturating_sub(names.len())));
    }
    names.into_iter().collect()
}

fn read_small(path: &Path) -> Option<Vec<u8>> {
    regular::read(path, SMALL_FILE_BYTES).ok()
}

/// The object in a small JSON file. `None` if there is no such file.
pub(super) fn read_json_file(path: &Path) -> Option<Map<String, Value>> {
    let text = String::from_utf8(read_small(path)?).ok()?;
    match parse_json(&text).ok()? {
        Value::Object(map) => Some(map),
        _ => None,
    }
}

/// The reason why the header of a weights file cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// The file is a pickle file.
    Pickle(String),
    /// The file is damaged or has another format.
    Other(String),
}

/// Reads names and shapes of the tensors of a local safetensors or GGUF file.
///
/// # Errors
/// When it is damaged or has another format, which is named if its first bytes identify it.
pub fn header_of(path: &Path) -> Result<TensorShapes, Unreadable> {
    let failed = |error: std::io::Error| Unreadable::Other(error.to_string());
    // Checked first, because opening a pipe would block.
    let info = std::fs::metadata(path).map_err(failed)?;
    if !info.is_file() {
        return Err(Unreadable::Other("it is not a file".to_owned()));
    }
    let mut file = File::open(path).map_err(failed)?;
    let mut first = Vec::new();
    (&mut file).take(64).read_to_end(&mut first).map_err(failed)?;
    if first.starts_with(gguf::MAGIC) {
        file.seek(SeekFrom::Start(0)).map_err(failed)?;
        return TensorShapes::of_gguf(file, info.len());
    }
    let length = TensorShapes::safetensors_header_bytes(&first)?;
    file.seek(SeekFrom::Start(8)).map_err(failed)?;
    let mut header = Vec::new();
    file.take(length).read_to_end(&mut header).map_err(failed)?;
    let weights = TensorShapes::of_safetensors(&header)?;
    // The file may name any end.
    let needed = data_bytes(&header).saturating_add(8 + length);
    if info.len() < needed {
        let has = info.len();
        return Err(Unreadable::Other(format!(
            "it is cut off: it has {has} bytes and should have {needed}; copy or download it again"
        )));
    }
    if info.len() > needed {
        let more = info.len() - needed;
        return Err(Unreadable::Other(format!(
            "it has {more} extra bytes after its end at {needed}; copy or download it again"
        )));
    }
    Ok(weights)
}

/// Bytes of tensor data after a safetensors header.
fn data_bytes(header: &[u8]) -> u64 {
    let entries: Map<String, Value> = serde_json::from_slice(header).unwrap_or_default();
    let end = |entry: &Value| entry.get("data_offsets")?.get(1)?.as_u64();
    entries.values().filter_map(end).max().unwrap_or(0)
}

impl TensorShapes {
    /// Reads the length of a safetensors header: the first 8 bytes, little-endian.
    ///
    /// # Errors
    /// When the file has another format, which is named if its first bytes identify it.
    pub fn safetensors_header_bytes(first: &[u8]) -> Result<u64, Unreadable> {
        let other = |what: &str| Err(Unreadable::Other(what.to_owned()));
        if first.is_empty() {
            return other("the file is empty");
        }
        if first.starts_with(b"PK\x03\x04") {
            return Err(Unreadable::Pickle(
                "its first bytes are those of a PyTorch (zip) file".to_owned(),
            ));
        }
        if matches!(first, [0x80, 2..=5, ..]) && !matches!(first.get(8), Some(b'{')) {
            return Err(Unreadable::Pickle("its first bytes are those of a pickle".to_owned()));
        }
        if first.starts_with(b"version https://git-lfs") {
            return other("it is a Git LFS pointer, not the file itself; fetch the file with `git lfs pull`");
        }
        let text = String::from_utf8_lossy(first).trim_start().to_ascii_lowercase();
        if text.starts_with("<!doctype") || text.starts_with("<html") {
            return other("it is a web page, not the file itself; download the file again");
        }
        let length = first.first_chunk::<8>().map(|bytes| u64::from_le_bytes(*bytes));
        match (length, first.get(8)) {
            (Some(length @ 2..=MAX_HEADER_BYTES), Some(b'{')) => Ok(length),
            _ => other("it is neither safetensors nor GGUF"),
        }
    }

    /// Parses the JSON of a safetensors header.
    ///
    /// # Errors
    /// When it is truncated or not JSON.
    pub fn of_safetensors(header: &[u8]) -> Result<Self, Unreadable> {
        let entries: Map<String, Value> = serde_json::from_slice(header)
            .map_err(|_| Unreadable::Other("its safetensors header is damaged".to_owned()))?;
        let shape = |entry: &Value| {
            let sides = entry.get("shape")?.as_array()?;
            sides.iter().map(Value::as_u64).collect::<Option<Vec<u64>>>()
        };
        let shapes = entries
            .iter()
            .filter(|(name, _)| *name != "__metadata__")
            .filter_map(|(name, entry)| Some((name.clone(), shape(entry)?)));
        Ok(Self {
            shapes: shapes.collect(),
            architecture: None,
        })
    }

    /// Parses the header of a GGUF file of `length` bytes. `file` must contain at least the header.
    ///
    /// # Errors
    /// When the header is damaged or truncated.
    pub fn of_gguf(file: impl Read, length: u64) -> Result<Self, Unreadable> {
        let header = gguf::Header::read(file, length)
            .map_err(|error| Unreadable::Other(format!("its GGUF header is damaged: {error}")))?;
        Ok(Self {
            architecture: header.texts.get("general.architecture").cloned(),
            shapes: header
                .tensors
                .into_iter()
                .map(|(name, info)| (name, info.shape))
                .collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_that_announces_more_bytes_than_a_number_holds_is_cut_off() {
        let header = format!(
            r#"{{"w":{{"dtype":"U8","shape":[1],"data_offsets":[0,{}]}}}}"#,
            u64::MAX
        );
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        std::fs::write(&path, bytes).unwrap();
        let found = header_of(&path);
        assert!(
            matches!(&found, Err(Unreadable::Other(why)) if why.contains("cut off")),
            "{found:?}"
        );
    }
}
