//! The special tokens of a `tokenizer/` folder, and the tokens that were added to its vocabulary (textual inversion,
//! DreamBooth), from all files in which versions of transformers store them. The precedence of the files is that of
//! transformers 5.23, `PreTrainedTokenizerBase._from_pretrained`.

use crate::error::{EngineError, Result};
use crate::models::config;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use tokenizers::{AddedToken, Tokenizer};

const CONFIG: &str = "tokenizer_config.json";
const TOKENS_MAP: &str = "special_tokens_map.json";
const ADDED: &str = "added_tokens.json";
/// A `model_max_length` above this is ignored: no CLIP text encoder takes prompts of this length.
const MAX_PROMPT_LENGTH: u64 = 4096;
/// The roles of special tokens, in the order in which transformers adds the tokens.
const ROLES: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// The lists of special tokens without a role.
const MORE: [&str; 2] = ["additional_special_tokens", "extra_special_tokens"];

/// The tokens of roles that a folder does not set, by role: the defaults of a class of tokenizers.
pub(super) type DefaultTokens = &'static [(&'static str, &'static str)];

/// The special and added tokens of a folder.
pub(super) struct SpecialTokens {
    folder: PathBuf,
    defaults: DefaultTokens,
    settings: serde_json::Map<String, Value>,
    /// The settings that come from [`TOKENS_MAP`]; the others are those of [`CONFIG`].
    from_map: BTreeSet<String>,
    added: BTreeMap<u32, AddedToken>,
}

impl SpecialTokens {
    /// Reads the files that exist; each may be missing.
    pub(super) fn read(folder: &Path, defaults: DefaultTokens) -> Result<Self> {
        let object = |file: &str| match folder.join(file) {
            path if !path.is_file() => Ok(serde_json::Map::new()),
            path => match config::read_json(&path)? {
                Value::Object(object) => Ok(object),
                _ => Err(EngineError::model_config(path, "expected a JSON object")),
            },
        };
        let mut special = Self {
            folder: folder.to_owned(),
            defaults,
            settings: object(CONFIG)?,
            from_map: BTreeSet::new(),
            added: BTreeMap::new(),
        };
        let mut added = BTreeMap::new();
        if let Some(decoder) = special.settings.get("added_tokens_decoder").and_then(Value::as_object) {
            for (id, value) in decoder {
                let pair = id.parse().ok().zip(token(value, false));
                let (id, token) = pair.ok_or_else(|| {
                    special.config_error(
                        CONFIG,
                        format!("added_tokens_decoder: the entry `{id}` is not an id with a token"),
                    )
                })?;
                added.insert(id, token);
            }
        } else {
            let map = object(TOKENS_MAP)?;
            special.from_map = map.keys().cloned().collect();
            special.settings.extend(map);
            let names: Vec<String> = special.role_tokens().into_iter().map(|token| token.content).collect();
            for (text, id) in object(ADDED)? {
                let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
                let id = id.ok_or_else(|| special.config_error(ADDED, format!("`{text}` has no id")))?;
                let is_special = names.contains(&text);
                added.insert(id, AddedToken::from(text, is_special));
            }
        }
        special.added = added;
        Ok(special)
    }

    fn config_error(&self, file: &str, problem: String) -> EngineError {
        EngineError::model_config(self.folder.join(file), problem)
    }

    /// The file that a setting comes from.
    fn file_of(&self, key: &str) -> &'static str {
        match self.from_map.contains(key) {
            true => TOKENS_MAP,
            false => CONFIG,
        }
    }

    /// The file that the added tokens come from.
    fn file_of_added(&self) -> &'static str {
        match self.settings.contains_key("added_tokens_decoder") {
            true => CONFIG,
            false => ADDED,
        }
    }

    /// The file that names a special token.
    fn file_of_special(&self, token: &AddedToken) -> &'static str {
        let names_it = |key: &&str| self.role(key).is_some_and(|role| role.content == token.content);
        self.file_of(ROLES.into_iter().find(names_it).unwrap_or(MORE[0]))
    }

    /// The special tokens, with the defaults for roles that the folder does not set.
    fn role_tokens(&self) -> Vec<AddedToken> {
        let named = ROLES.into_iter().filter_map(|key| self.role(key));
        let more = MORE
            .into_iter()
            .filter_map(|key| self.settings.get(key)?.as_array())
            .flatten()
            .filter_map(|value| token(value, true));
        named.chain(more).collect()
    }

    fn role(&self, key: &str) -> Option<AddedToken> {
        let default = self.defaults.iter().find(|(role, _)| *role == key);
        let token = self.settings.get(key).and_then(|value| token(value, true));
        token.or_else(|| default.map(|(_, text)| AddedToken::from(*text, true)))
    }

    /// Adds all tokens to a tokenizer.
    ///
    /// # Errors
    /// When an added token gets another id than the files say: then the vocabulary is that of another model.
    pub(super) fn add_to(&self, tokenizer: &mut Tokenizer) -> Result<()> {
        let named = self.role_tokens();
        let wrong = |file: &str, token: &AddedToken, error: &dyn std::error::Error| {
            let text = &token.content;
            self.config_error(file, format!("the token `{text}` cannot be added: {error}"))
        };
        let known = tokenizer.get_added_tokens_decoder();
        let is_new = |token: &&AddedToken| !known.values().any(|there| there.content == token.content);
        for token in self.added.values().filter(is_new) {
            let mut token = token.clone();
            token.special |= named.iter().any(|named| named.content == token.content);
            let result = tokenizer.add_tokens([token.clone()]);
            result.map_err(|e| wrong(self.file_of_added(), &token, &*e))?;
        }
        let known = tokenizer.get_added_tokens_decoder();
        let is_new = |token: &&AddedToken| !known.values().any(|there| there.content == token.content);
        for token in named.iter().filter(is_new) {
            let result = tokenizer.add_special_tokens([token.clone()]);
            result.map_err(|e| wrong(self.file_of_special(token), token, &*e))?;
        }
        for (id, token) in &self.added {
            let got = tokenizer.token_to_id(&token.content);
            if got != Some(*id) {
                let got = got.map_or("none".to_owned(), |id| id.to_string());
                let text = &token.content;
                return Err(self.config_error(
                    self.file_of_added(),
                    format!(
                        "the added token `{text}` should have the id {id}, but gets {got}: this file and the vocabulary \
                         belong to different models"
                    ),
                ));
            }
        }
        Ok(())
    }

    /// The id of the token with this role.
    ///
    /// # Errors
    /// When the vocabulary does not contain the token.
    pub(super) fn id(&self, key: &str, tokenizer: &Tokenizer) -> Result<u32> {
        let text = self.role(key).map(|token| token.content).unwrap_or_default();
        let id = tokenizer.token_to_id(&text);
        id.ok_or_else(|| self.config_error(self.file_of(key), format!("{key} `{text}` is not in the vocabulary")))
    }

    /// The number of ids per prompt according to the folder. 77 if the folder has no usable number: early SD 2 folders
    /// have a huge one.
    pub(super) fn max_length(&self) -> usize {
        let length = self.settings.get("model_max_length").and_then(Value::as_u64);
        length
            .filter(|length| *length <= MAX_PROMPT_LENGTH)
            .unwrap_or(77)
            .max(2) as usize
    }
}

/// Parses a token: a string, or an object with flags.
fn token(value: &Value, special: bool) -> Option<AddedToken> {
    if let Some(text) = value.as_str() {
        return Some(AddedToken::from(text, special));
    }
    let content = value.get("content")?.as_str()?;
    let flag = |key: &str| value.get(key).and_then(Value::as_bool);
    let special = special || flag("special").unwrap_or(false);
    let mut token = AddedToken::from(content, special);
    token.normalized = flag("normalized").unwrap_or(token.normalized);
    token.lstrip = flag("lstrip").unwrap_or(false);
    token.rstrip = flag("rstrip").unwrap_or(false);
    token.single_word = flag("single_word").unwrap_or(false);
    Some(token)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tokenizers::models::bpe::BPE;

    #[test]
    fn errors_name_the_file_that_a_token_comes_from() {
        let error = |files: &[(&str, &str)]| {
            let folder = tempfile::tempdir().unwrap();
            for (name, text) in files {
                std::fs::write(folder.path().join(name), text).unwrap();
            }
            let special = SpecialTokens::read(folder.path(), &[("bos_token", "<usual>")]).unwrap();
            let tokenizer = Tokenizer::new(BPE::default());
            special.id("bos_token", &tokenizer).unwrap_err().to_string()
        };
        let token = r#"{"bos_token": "<none>"}"#;
        let other = r#"{"bos_token": "<other>"}"#;
        for (files, file, text) in [
            (&[(CONFIG, token)][..], CONFIG, "<none>"),
            (&[(TOKENS_MAP, token)][..], TOKENS_MAP, "<none>"),
            // The map has precedence, where the config does not list the added tokens.
            (&[(CONFIG, other), (TOKENS_MAP, token)][..], TOKENS_MAP, "<none>"),
            (
                &[
                    (CONFIG, r#"{"bos_token": "<none>", "added_tokens_decoder": {}}"#),
                    (TOKENS_MAP, other),
                ][..],
                CONFIG,
                "<none>",
            ),
            (&[][..], CONFIG, "<usual>"),
        ] {
            let error = error(files);
            assert!(
                error.contains(file) && error.contains(&format!("bos_token `{text}` is not in the vocabulary")),
                "{error}"
            );
        }
    }
}
