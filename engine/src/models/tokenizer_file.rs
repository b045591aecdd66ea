//! Opens a `tokenizer.json`, and checks the files that tokenizers had before it.

use super::config;
use crate::error::{EngineError, Result};
use aitk_common::fsutil::regular;
use aitk_common::job::limits::MAX_TEXT_FILE_BYTES;
use std::path::Path;
use tokenizers::Tokenizer;

/// The tokenizer of a `tokenizer.json`, without padding and truncation: those in the file are of the last text that was encoded before it
/// was saved, and callers of transformers' tokenizers set their own.
///
/// # Errors
/// When it cannot be read, is too long, or is not a tokenizer.
pub(super) fn open(path: &Path) -> std::result::Result<Tokenizer, tokenizers::Error> {
    let mut tokenizer: Tokenizer = config::read_text(path)?.parse()?;
    forget_last_call(&mut tokenizer);
    Ok(tokenizer)
}

/// Checks that `vocab.json` and `merges.txt` are there and not too long: the library that reads them has no limit.
///
/// # Errors
/// Which file is missing or cannot be read.
pub(super) fn check_vocabulary(files: [&Path; 2]) -> Result<()> {
    for file in files {
        let (_, length) = regular::open(file).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => EngineError::model_config(file, config::INCOMPLETE),
            _ => EngineError::io(file, error),
        })?;
        if length > MAX_TEXT_FILE_BYTES {
            return Err(EngineError::model_config(
                file,
                format!("it has {length} bytes, expected at most {MAX_TEXT_FILE_BYTES}"),
            ));
        }
    }
    Ok(())
}

/// Removes padding and truncation.
pub(super) fn forget_last_call(tokenizer: &mut Tokenizer) {
    tokenizer.with_padding(None);
    // Without parameters it cannot fail.
    let _ = tokenizer.with_truncation(None);
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::models::clip::ClipTokenizer;
    use crate::models::qwen3::Qwen3Tokenizer;
    use crate::models::t5::T5Tokenizer;
    use crate::testing::{copy_folder, fixtures};
    use serde_json::{Value, json};
    use std::path::Path;

    /// The tokenizer's folder as transformers saves it after a prompt was padded to 12 and cut to 3 tokens.
    fn saved_after_a_call(folder: &Path) -> tempfile::TempDir {
        let copy = tempfile::tempdir().unwrap();
        copy_folder(folder, copy.path());
        let file = copy.path().join("tokenizer.json");
        let mut json: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        json["padding"] = json!({
            "strategy": {"Fixed": 12}, "direction": "Left", "pad_to_multiple_of": null, "pad_id": 1, "pad_type_id": 0, "pad_token": "!",
        });
        json["truncation"] = json!({"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0});
        std::fs::write(&file, json.to_string()).unwrap();
        copy
    }

    /// Compares what a tokenizer makes of a prompt before and after such a call.
    fn check(folder: &str, encode: impl Fn(&Path, &[&str]) -> Vec<Vec<u32>>) {
        let plain = fixtures().join(folder);
        let saved = saved_after_a_call(&plain);
        let prompts = ["a photo of a red house at night", "x"];
        assert_eq!(encode(&plain, &prompts), encode(saved.path(), &prompts), "{folder}");
    }

    #[test]
    fn files_that_are_too_long_are_refused_without_reading_them() {
        let folder = tempfile::tempdir().unwrap();
        let long = |name: &str| {
            let file = std::fs::File::create(folder.path().join(name)).unwrap();
            file.set_len(1 << 30).unwrap();
        };
        std::fs::write(folder.path().join("vocab.json"), "{}").unwrap();
        long("merges.txt");
        for error in [
            ClipTokenizer::open(folder.path()).unwrap_err(),
            Qwen3Tokenizer::open(folder.path()).unwrap_err(),
        ] {
            let error = error.to_string();
            assert!(
                error.contains("merges.txt") && error.contains("1073741824 bytes"),
                "{error}"
            );
        }
        long("tokenizer.json");
        for error in [
            ClipTokenizer::open(folder.path()).unwrap_err(),
            Qwen3Tokenizer::open(folder.path()).unwrap_err(),
        ] {
            let error = error.to_string();
            assert!(
                error.contains("tokenizer.json") && error.contains("more than the"),
                "{error}"
            );
        }
    }

    #[test]
    fn padding_and_truncation_of_the_file_do_not_count() {
        check("tiny_sd/tokenizer", |folder, prompts| {
            let ids = ClipTokenizer::open(folder).unwrap().encode(prompts).unwrap();
            ids.to_vec2().unwrap()
        });
        check("tiny_flux/tokenizer_2", |folder, prompts| {
            let ids = T5Tokenizer::open(folder).unwrap().encode(prompts, 24).unwrap();
            ids.to_vec2().unwrap()
        });
        check("tiny_zimage/tokenizer", |folder, prompts| {
            let ids = Qwen3Tokenizer::open(folder).unwrap().encode_chat(prompts, 40).unwrap();
            ids.ids.to_vec2().unwrap()
        });
    }
}
