//! Opens a `tokenizer.json`.

use std::path::Path;
use tokenizers::Tokenizer;

/// The tokenizer of a `tokenizer.json`, without padding and truncation: those in the file are of the last text that was encoded before it
/// was saved, and callers of transformers' tokenizers set their own.
///
/// # Errors
/// When it cannot be read, or is not a tokenizer.
pub(super) fn open(path: &Path) -> Result<Tokenizer, tokenizers::Error> {
    let mut tokenizer = Tokenizer::from_file(path)?;
    forget_last_call(&mut tokenizer);
    Ok(tokenizer)
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
