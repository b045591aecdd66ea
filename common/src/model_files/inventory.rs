//! The small files of a model, read into memory.

use super::json::parse_json;
use crate::gguf;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// A `config.json` or `model_index.json` larger than this is none.
pub const SMALL_FILE_BYTES: u64 = 1 << 20;
/// A safetensors header larger than this belongs to no model that we know.
const HEADER_BYTES: u64 = 64 << 20;
/// Files of a folder that are looked at, beside those of a model's parts.
const MOST_FILES: usize = 4096;
/// Folders of a model's parts.
const PARTS: [&str; 7] = [
    "scheduler",
    "text_encoder",
    "tokenizer",
    "transformer",
    "prior",
    "unet",
    "vae",
];
/// Files beside them that say what the model is.
const INDEXES: [&str; 2] = ["model_index.json", "config.json"];
/// Weights files whose headers are read.
const MOST_HEADERS: usize = 4;
/// Endings of files that Python opens with pickle.
const PICKLES: [&str; 7] = ["ckpt", "pt", "pth", "bin", "pkl", "pickle", "pt2"];

/// Names and shapes of the tensors of one weights file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Weights {
    /// Shapes by name, as PyTorch has them.
    pub shapes: BTreeMap<String, Vec<u64>>,
    /// `general.architecture` of a GGUF file.
    pub architecture: Option<String>,
}

/// The small files of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inventory {
    /// A folder or a repository, and not one file.
    pub is_folder: bool,
    /// Names of its files, with `/` between folders.
    pub names: Vec<String>,
    /// Its JSON files by name.
    pub configs: BTreeMap<String, Map<String, Value>>,
    /// Headers of its weights files by name.
    pub weights: BTreeMap<String, Weights>,
    /// Why it is a pickle file, or holds weights in pickle files only.
    pub pickle: Option<String>,
    /// Why nothing could be read.
    pub problem: Option<String>,
}

/// Which of these files tell the family: JSON to read whole, and weights files to read the header of.
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
    let headers = names.iter().filter(weights).take(MOST_HEADERS).map(String::as_str);
    (configs, headers.collect())
}

impl Inventory {
    /// Reads what lies at a path of this machine. What cannot be read is left out: whoever opens the model says why.
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
        if let Some(ending) = pickle_ending(&name) {
            files.pickle = Some(format!("its name ends in .{ending}"));
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

    /// Of a folder or a repository with these files, of which none is read yet.
    #[must_use]
    pub fn of_names(names: Vec<String>) -> Self {
        let pickle = match names.iter().any(|name| is_weights(name)) {
            true => None,
            false => {
                let first = names.iter().find(|name| pickle_ending(name).is_some());
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

    /// Takes the content of a JSON file. One that is no object is left out.
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

    /// A text of a JSON file.
    pub(super) fn text(&self, file: &str, key: &str) -> Option<&str> {
        self.configs.get(file)?.get(key)?.as_str()
    }
}

fn owned(names: Vec<&str>) -> Vec<String> {
    names.into_iter().map(str::to_owned).collect()
}

/// Whether a file of this name holds weights that can be read.
pub(super) fn is_weights(name: &str) -> bool {
    (name.ends_with(".safetensors") || name.ends_with(".gguf")) && !is_hidden(name)
}

/// Whether a name begins with a dot. A Mac writes `._NAME` beside a file where it cannot note elsewhere what it knows of it.
pub(super) fn is_hidden(name: &str) -> bool {
    name.rsplit('/').next().is_some_and(|last| last.starts_with('.'))
}

/// The ending of a name, if Python opens such files with pickle.
pub(super) fn pickle_ending(name: &str) -> Option<&'static str> {
    let ending = Path::new(name).extension()?.to_str()?.to_ascii_lowercase();
    PICKLES.into_iter().find(|pickle| *pickle == ending)
}

/// Names of the files of a folder and of the folders in it, sorted. Those of a model's parts are among them, however many other
/// files lie beside them.
fn names_below(folder: &Path) -> Vec<String> {
    let listed = |folder: &Path, most: usize| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut names: Vec<String> = names.filter(|name| !is_hidden(name)).take(most).collect();
        names.sort();
        names
    };
    let files_in = |part: &str, most: usize| {
        let place = folder.join(part);
        let files = listed(&place, most)
            .into_iter()
            .filter(|name| place.join(name).is_file());
        files.map(|name| format!("{part}/{name}")).collect::<Vec<_>>()
    };
    let mut names: BTreeSet<String> = INDEXES
        .into_iter()
        .filter(|name| folder.join(name).is_file())
        .map(str::to_owned)
        .collect();
    for part in PARTS {
        names.extend(files_in(part, usize::MAX));
    }
    let most = names.len() + MOST_FILES;
    let beside = listed(folder, MOST_FILES).into_iter();
    let (files, others): (Vec<_>, Vec<_>) = beside.partition(|name| folder.join(name).is_file());
    names.extend(files);
    for name in others.iter().filter(|name| !PARTS.contains(&name.as_str())) {
        names.extend(files_in(name, most.saturating_sub(names.len())));
    }
    names.into_iter().collect()
}

fn read_small(path: &Path) -> Option<Vec<u8>> {
    let info = std::fs::metadata(path).ok()?;
    if !info.is_file() || info.len() > SMALL_FILE_BYTES {
        return None;
    }
    std::fs::read(path).ok()
}

/// Why a weights file has no header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// It is a pickle file.
    Pickle(String),
    /// It is damaged, or something else.
    Other(String),
}

/// Names and shapes of the tensors of a safetensors or GGUF file of this machine.
///
/// # Errors
/// When it is neither: what its first bytes are.
pub fn header_of(path: &Path) -> Result<Weights, Unreadable> {
    let failed = |error: std::io::Error| Unreadable::Other(error.to_string());
    // Opening a pipe would wait for ever.
    let info = std::fs::metadata(path).map_err(failed)?;
    if !info.is_file() {
        return Err(Unreadable::Other("it is not a file".to_owned()));
    }
    let mut file = File::open(path).map_err(failed)?;
    let mut first = Vec::new();
    (&mut file).take(64).read_to_end(&mut first).map_err(failed)?;
    if first.starts_with(gguf::MAGIC) {
        file.seek(SeekFrom::Start(0)).map_err(failed)?;
        return Weights::of_gguf(file, info.len());
    }
    let length = Weights::safetensors_header_bytes(&first)?;
    file.seek(SeekFrom::Start(8)).map_err(failed)?;
    let mut header = Vec::new();
    file.take(length).read_to_end(&mut header).map_err(failed)?;
    let weights = Weights::of_safetensors(&header)?;
    let needed = 8 + length + data_bytes(&header);
    if info.len() < needed {
        let has = info.len();
        return Err(Unreadable::Other(format!(
            "it is cut off: it has {has} bytes and should have {needed}; copy or download it again"
        )));
    }
    if info.len() > needed {
        let more = info.len() - needed;
        return Err(Unreadable::Other(format!(
            "it has {more} bytes behind its end, at {needed}; copy or download it again"
        )));
    }
    Ok(weights)
}

/// Bytes of the tensors behind a safetensors header.
fn data_bytes(header: &[u8]) -> u64 {
    let entries: Map<String, Value> = serde_json::from_slice(header).unwrap_or_default();
    let end = |entry: &Value| entry.get("data_offsets")?.get(1)?.as_u64();
    entries.values().filter_map(end).max().unwrap_or(0)
}

impl Weights {
    /// Length of a safetensors header, from the first bytes of a file: its first 8, little-endian.
    ///
    /// # Errors
    /// When these are no such bytes: what they are instead.
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
            return other("it is a Git LFS pointer, and not the file itself: fetch it with `git lfs pull`");
        }
        let text = String::from_utf8_lossy(first).trim_start().to_ascii_lowercase();
        if text.starts_with("<!doctype") || text.starts_with("<html") {
            return other("it is a web page, and not the file itself: download it again");
        }
        let length = first.first_chunk::<8>().map(|bytes| u64::from_le_bytes(*bytes));
        match (length, first.get(8)) {
            (Some(length @ 2..=HEADER_BYTES), Some(b'{')) => Ok(length),
            _ => other("it is neither safetensors nor GGUF"),
        }
    }

    /// Of the JSON of a safetensors header.
    ///
    /// # Errors
    /// When it is cut off or no JSON.
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

    /// Of a GGUF file of `length` bytes, of which `file` has at least the header.
    ///
    /// # Errors
    /// When the header is damaged or cut off.
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
