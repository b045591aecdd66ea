//! `token_string` and the other options of textual inversion.

use super::report::{Import, Section};
use crate::job::limits::MAX_EMBEDDING_VECTORS;
use serde_json::json;

/// Decides `embedding`.
pub(super) fn embedding(import: &mut Import<'_>) -> Section {
    let settings = import.settings;
    let vectors = import
        .whole_from("num_vectors_per_token", 1, 1)
        .min(u64::from(u32::MAX));
    let Some(token) = settings.text("token_string") else {
        import.error("token_string", "the config names no word: set it");
        return Section::new();
    };
    if settings.text("output_name").is_some_and(|name| name != token) {
        import.note(
            "output_name",
            "names the run; the files of the word are called like token_string",
        );
    }
    let init = match settings.text("init_word") {
        Some(word) => {
            // sd-scripts repeats the word until all vectors have a value.
            let repeated = vectors.min(u64::from(MAX_EMBEDDING_VECTORS)) as usize;
            vec![word; repeated.max(1)].join(" ")
        }
        None => {
            import.note(
                "token_string",
                "without init_word the vectors begin as those of `*`, in sd-scripts as the mean of all",
            );
            "*".to_owned()
        }
    };
    let mut section = Section::new();
    section.insert("trigger".into(), json!(token));
    section.insert("tokens".into(), json!(vectors));
    section.insert("init_words".into(), json!(init));
    section
}
