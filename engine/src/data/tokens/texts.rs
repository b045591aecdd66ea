//! The texts of a folder as they are, to train a tokenizer on.

use super::file_list::{FileFilter, list_files};
use super::patterns::Patterns;
use crate::error::Result;
use aitk_common::fsutil::regular;
use std::path::Path;

/// Reads the text files of a folder that match `include` and not `exclude`, in the order of their paths, until they have `max` bytes together.
/// Files that are longer, or no UTF-8 text, are left out.
///
/// # Errors
/// When the folder cannot be read.
pub fn read_texts(folder: &Path, (include, exclude): (&[String], &[String]), max: u64) -> Result<Vec<String>> {
    let filter = FileFilter {
        include: Patterns::new(include),
        exclude: Patterns::new(exclude),
        endings: &[],
    };
    let mut texts = Vec::new();
    let mut bytes = 0;
    for file in list_files(folder, &filter, false)? {
        let Ok(text) = regular::read_text(&file, max) else {
            continue;
        };
        bytes += text.len() as u64;
        if bytes > max {
            break;
        }
        texts.push(text);
    }
    Ok(texts)
}
