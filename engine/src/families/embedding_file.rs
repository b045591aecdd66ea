//! Files of textual inversions: a word, and its vectors in each text encoder.
//!
//! `emb_params` (ai-toolkit, AUTOMATIC1111, sd-scripts), or the only tensor of a file (diffusers), is for a model with one text encoder;
//! `clip_l` and `clip_g` are for SDXL.

use crate::error::{EngineError, Result};
use crate::weights::Index;
use aitk_common::job::limits::MAX_EMBEDDING_VECTORS;
use candle_core::{DType, Device, Tensor};
use std::path::Path;

/// The name of the vectors for one text encoder.
const NAME: &str = "emb_params";
/// Their names for the two of SDXL.
const NAMES_OF_TWO: [&str; 2] = ["clip_l", "clip_g"];
/// The most features of a vector.
const MAX_WIDTH: usize = 1 << 16;
/// The most characters of a word.
const MAX_WORD_CHARS: usize = 100;

/// The names of the vectors in a file for this many text encoders.
#[must_use]
pub fn embedding_names(encoders: usize) -> &'static [&'static str] {
    match encoders {
        2 => &NAMES_OF_TWO,
        _ => std::slice::from_ref(&NAME),
    }
}

/// A word that a textual inversion learned.
#[derive(Clone, Debug)]
pub struct LearnedEmbedding {
    /// How prompts write it.
    pub trigger: String,
    /// Its vectors in each text encoder, [vectors, width] in float32 on the CPU.
    pub vectors: Vec<Tensor>,
    /// The steps that it was trained for, if the file says so.
    pub step: Option<u64>,
}

/// Whether a prompt can have a word of this name.
fn can_be_written(name: &str) -> bool {
    !name.is_empty() && name.chars().count() <= MAX_WORD_CHARS && !name.contains(char::is_control)
}

impl LearnedEmbedding {
    /// Reads a safetensors file. The word is the `name` in its metadata if that can be a word, or else the name of the file without
    /// suffix.
    ///
    /// # Errors
    /// When it cannot be read or is not a textual inversion.
    pub fn read(path: &Path) -> Result<Self> {
        let index = Index::open(path)?;
        let tensors: Vec<(&str, &[usize])> = index.tensors().collect();
        let wrong = |why: &str| {
            EngineError::bad_input(format!(
                "{}: this is not a textual inversion: {why}; expected `{NAME}` or one tensor of [vectors, features], or for SDXL `{}` and \
                 `{}`",
                path.display(),
                NAMES_OF_TWO[0],
                NAMES_OF_TWO[1]
            ))
        };
        let names: Vec<&str> = match tensors.as_slice() {
            [(only, _)] => vec![*only],
            all if NAMES_OF_TWO
                .iter()
                .all(|name| all.iter().any(|(other, _)| other == name)) =>
            {
                NAMES_OF_TWO.to_vec()
            }
            all if all.iter().any(|(name, _)| *name == NAME) => vec![NAME],
            all => return Err(wrong(&format!("it has {} tensors", all.len()))),
        };
        let mut vectors = Vec::new();
        for name in names {
            let (count, width) = match index.shape(name).unwrap_or_default() {
                [width] => (1, *width),
                [count, width] => (*count, *width),
                other => return Err(wrong(&format!("`{name}` has the shape {other:?}"))),
            };
            if count == 0 || count > MAX_EMBEDDING_VECTORS as usize || width == 0 || width > MAX_WIDTH {
                return Err(wrong(&format!("`{name}` has {count} vectors of {width} numbers")));
            }
            let tensor = index.read(name, DType::F32, &Device::Cpu)?.reshape((count, width))?;
            let sum = tensor.abs()?.sum_all()?.to_scalar::<f32>()?;
            if !sum.is_finite() {
                return Err(wrong(&format!("`{name}` has numbers that are not finite")));
            }
            vectors.push(tensor);
        }
        let metadata = index.metadata();
        let value = |key: &str| {
            let found = metadata.iter().find(|(name, _)| name == key).map(|(_, value)| value);
            // ai-toolkit writes JSON, other programs write plain text.
            found.map(|value| serde_json::from_str(value).unwrap_or_else(|_| value.trim_matches('"').to_owned()))
        };
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let named =
            value("name").filter(|name| name != "null" && !name.contains(char::is_whitespace) && can_be_written(name));
        let trigger = match named {
            Some(name) => name,
            None if can_be_written(&stem) => stem,
            None => {
                return Err(EngineError::bad_input(format!(
                    "{}: the name of the file is the word that prompts use, and this one has control characters, or more than \
                     {MAX_WORD_CHARS} characters: rename the file",
                    path.display()
                )));
            }
        };
        Ok(Self {
            trigger,
            vectors,
            step: value("step").and_then(|step| step.parse().ok()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::write_tensors;
    use std::collections::BTreeMap;

    fn file(folder: &Path, tensors: &[(&str, &[usize])], metadata: &[(&str, &str)]) -> std::path::PathBuf {
        let path = folder.join("my-word.safetensors");
        let tensors = tensors.iter().map(|(name, shape)| {
            (
                (*name).to_owned(),
                Tensor::ones(*shape, DType::F32, &Device::Cpu).unwrap(),
            )
        });
        let metadata = metadata
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        let mut out = std::fs::File::create(&path).unwrap();
        write_tensors(&mut out, &tensors.collect(), &metadata.collect::<BTreeMap<_, _>>()).unwrap();
        path
    }

    #[test]
    fn files_of_every_program_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let read = |tensors: &[(&str, &[usize])], metadata: &[(&str, &str)]| {
            let word = LearnedEmbedding::read(&file(dir.path(), tensors, metadata)).unwrap();
            let shapes: Vec<Vec<usize>> = word.vectors.iter().map(|tensor| tensor.dims().to_vec()).collect();
            (word.trigger, shapes, word.step)
        };
        let ours = [("name", "\"zorb\""), ("step", "500")];
        assert_eq!(
            read(&[("emb_params", &[3, 8])], &ours),
            ("zorb".into(), vec![vec![3, 8]], Some(500))
        );
        assert_eq!(
            read(&[("<cat-toy>", &[8])], &[]),
            ("my-word".into(), vec![vec![1, 8]], None)
        );
        assert_eq!(
            read(&[("clip_g", &[2, 12]), ("clip_l", &[2, 8])], &[("name", "two words")]),
            ("my-word".into(), vec![vec![2, 8], vec![2, 12]], None)
        );
    }

    #[test]
    fn names_that_no_prompt_can_have_are_replaced_by_the_files() {
        let dir = tempfile::tempdir().unwrap();
        let trigger = |name: &str| {
            let path = file(dir.path(), &[("emb_params", &[2, 8])], &[("name", name)]);
            LearnedEmbedding::read(&path).unwrap().trigger
        };
        let long = "x".repeat(101);
        for name in [
            "null",
            "\"null\"",
            "",
            "a\nb",
            "a\u{7}b",
            "\"a\\nb\"",
            "\u{85}",
            long.as_str(),
        ] {
            assert_eq!(trigger(name), "my-word", "{name:?}");
        }
        assert_eq!(trigger(&long[1..]), long[1..]);
        assert_eq!(trigger("\"\\u00c4\\u00f6\""), "Äö");
        let path = file(dir.path(), &[("emb_params", &[2, 8])], &[]);
        let renamed = path.with_file_name(format!("{long}.safetensors"));
        std::fs::rename(&path, &renamed).unwrap();
        let error = LearnedEmbedding::read(&renamed).unwrap_err().to_string();
        assert!(error.contains("rename the file") && error.contains(&long), "{error}");
    }

    #[test]
    fn other_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        for (tensors, why) in [
            (&[("a", &[2usize, 3][..]), ("b", &[2, 3])][..], "2 tensors"),
            (&[("a", &[2, 3, 4])], "the shape [2, 3, 4]"),
            (&[("a", &[200, 3])], "200 vectors"),
            (&[("emb_params", &[0, 3])], "0 vectors"),
        ] {
            let error = LearnedEmbedding::read(&file(dir.path(), tensors, &[]))
                .unwrap_err()
                .to_string();
            assert!(error.contains(why) && error.contains("my-word"), "{error}");
        }
    }
}
