//! The special tokens of a `tokenizer/` folder, and those that were added to its vocabulary (textual inversion,
//! DreamBooth), from all the files in which transformers keeps or kept them. Which file wins is decided as in
//! transformers 5.23, `PreTrainedTokenizerBase._from_pretrained`.

use crate::error::{EngineError, Result};
use crate::models::config;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tokenizers::{AddedToken, Tokenizer};

const CONFIG: &str = "tokenizer_config.json";
const MAP: &str = "special_tokens_map.json";
const ADDED: &str = "added_tokens.json";
/// Longer prompts than any text encoder of CLIP's kind takes.
const LONGEST: u64 = 4096;
/// Tokens with a role of their own, in the order in which transformers adds them.
const NAMED: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// What a folder says of its tokens.
pub(super) struct Special {
    folder: PathBuf,
    settings: serde_json::Map<String, Value>,
    added: BTreeMap<u32, AddedToken>,
}

impl Special {
    /// Reads what there is; every file may be missing.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let object = |file: &str| match folder.join(file) {
            path if !path.is_file() => Ok(serde_json::Map::new()),
            path => match config::read_json(&path)? {
                Value::Object(object) => Ok(object),
                _ => Err(EngineError::model_config(path, "it is not a JSON object")),
            },
        };
        let mut special = Self {
            folder: folder.to_owned(),
            settings: object(CONFIG)?,
            added: BTreeMap::new(),
        };
        let mut added = BTreeMap::new();
        if let Some(decoder) = special.settings.get("added_tokens_decoder").and_then(Value::as_object) {
            for (id, value) in decoder {
                let pair = id.parse().ok().zip(token(value, false));
                let (id, token) = pair.ok_or_else(|| {
                    special.wrong(CONFIG, format!("added_tokens_decoder: `{id}` is no id with a token"))
                })?;
                added.insert(id, token);
            }
        } else {
            special.settings.extend(object(MAP)?);
            let names: Vec<String> = special.named().into_iter().map(|token| token.content).collect();
            for (text, id) in object(ADDED)? {
                let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
                let id = id.ok_or_else(|| special.wrong(ADDED, format!("`{text}` has no id")))?;
                let is_special = names.contains(&text);
                added.insert(id, AddedToken::from(text, is_special));
            }
        }
        special.added = added;
        Ok(special)
    }

    fn wrong(&self, file: &str, problem: String) -> EngineError {
        EngineError::model_config(self.folder.join(file), problem)
    }

    /// The tokens with a role, CLIP's own where the folder names none.
    fn named(&self) -> Vec<AddedToken> {
        let named = NAMED.into_iter().filter_map(|key| self.role(key));
        let more = ["additional_special_tokens", "extra_special_tokens"];
        let more = more
            .into_iter()
            .filter_map(|key| self.settings.get(key)?.as_array())
            .flatten()
            .filter_map(|value| token(value, true));
        named.chain(more).collect()
    }

    fn role(&self, key: &str) -> Option<AddedToken> {
        let default = match key {
            "bos_token" => Some("<|startoftext|>"),
            "eos_token" | "unk_token" | "pad_token" => Some("<|endoftext|>"),
            _ => None,
        };
        let given = self.settings.get(key).and_then(|value| token(value, true));
        given.or_else(|| default.map(|text| AddedToken::from(text, true)))
    }

    /// Gives all of them to a tokenizer.
    ///
    /// # Errors
    /// When an added token does not get the id that it had: then the files do not belong together.
    pub(super) fn give_to(&self, tokenizer: &mut Tokenizer) -> Result<()> {
        let named = self.named();
        let known = tokenizer.get_added_tokens_decoder();
        let fresh = |token: &&AddedToken| !known.values().any(|there| there.content == token.content);
        for token in self.added.values().filter(fresh) {
            let mut token = token.clone();
            token.special |= named.iter().any(|named| named.content == token.content);
            tokenizer.add_tokens(&[token]);
        }
        let known = tokenizer.get_added_tokens_decoder();
        let fresh = |token: &&AddedToken| !known.values().any(|there| there.content == token.content);
        for token in named.iter().filter(fresh) {
            tokenizer.add_special_tokens(std::slice::from_ref(token));
        }
        for (id, token) in &self.added {
            let got = tokenizer.token_to_id(&token.content);
            if got != Some(*id) {
                let got = got.map_or("none".to_owned(), |id| id.to_string());
                let text = &token.content;
                return Err(self.wrong(
                    if self.settings.contains_key("added_tokens_decoder") {
                        CONFIG
                    } else {
                        ADDED
                    },
                    format!(
                        "the added token `{text}` should have the id {id} and gets {got}: this file and the vocabulary \
                         do not belong together"
                    ),
                ));
            }
        }
        Ok(())
    }

    /// The id of the token with this role.
    ///
    /// # Errors
    /// When the tokenizer does not have it.
    pub(super) fn id(&self, key: &str, tokenizer: &Tokenizer) -> Result<u32> {
        let text = self.role(key).map(|token| token.content).unwrap_or_default();
        let id = tokenizer.token_to_id(&text);
        id.ok_or_else(|| self.wrong(CONFIG, format!("{key} `{text}` is not in the vocabulary")))
    }

    /// How many ids a prompt becomes: what the folder says, as far as its text encoder has positions. CLIP has 77; early
    /// SD 2 folders give a huge number.
    pub(super) fn max_length(&self) -> usize {
        let length = self.settings.get("model_max_length").and_then(Value::as_u64);
        length.filter(|length| *length <= LONGEST).unwrap_or(77).max(2) as usize
    }
}

/// A token as text, or with its flags.
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
