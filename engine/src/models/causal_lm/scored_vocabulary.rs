//! Tokens with scores and types: the vocabulary of a SentencePiece model.

use super::super::sentencepiece::{
    CONTROL, ModelProto, NORMAL, NormalizerSpec, Piece, TrainerSpec, UNKNOWN, UNUSED, USER_DEFINED,
};
use crate::error::{self, EngineError};
use crate::models::config;
use aitk_common::fsutil::regular;
use aitk_common::job::limits::MAX_TEXT_FILE_BYTES;
use prost::Message as _;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// The name of the file in model folders.
pub(super) const FILE_NAME: &str = "tokenizer.model";
/// What stands for a space in pieces.
pub(super) const SPACE: &str = "▁";
/// The score of an added token, which no pair of neighbours makes: as in files of llama.cpp.
const ADDED_SCORE: f32 = -1000.0;
/// The most bytes of a piece. SentencePiece trains pieces of at most 16 characters, unless it is told otherwise.
const MAX_PIECE_BYTES: usize = 1024;

/// A token; its id is its place.
#[derive(Clone, Debug)]
pub(super) struct Token {
    pub(super) text: String,
    /// Of two pairs of neighbours, that is joined whose token has the larger score.
    pub(super) score: f32,
    /// [`NORMAL`] and the other types of SentencePiece, which are those of llama.cpp.
    pub(super) kind: i32,
}

/// A SentencePiece model of a folder, with the tokens that other files of the folder add.
#[derive(Clone, Debug)]
pub(super) struct SentencePieceModel {
    /// The pieces.
    pub(super) tokens: Vec<Token>,
    /// The tokens whose ids follow.
    pub(super) extra: Vec<Token>,
    pub(super) trainer: TrainerSpec,
    pub(super) normalizer: NormalizerSpec,
    /// `tokenizer_config.json`; `null` if it is missing.
    pub(super) settings: Value,
}

impl SentencePieceModel {
    /// Reads a model. `settings`: `tokenizer_config.json`, `added`: `added_tokens.json`; `null` for a file that is missing.
    ///
    /// # Errors
    /// A sentence about the file.
    pub(super) fn read(model: &[u8], settings: Value, added: &Value) -> Result<Self, String> {
        let not_a_model = |reason: String| {
            format!("this is not a SentencePiece model ({reason}): put the tokenizer.json of the model into the folder")
        };
        let model = ModelProto::decode(model).map_err(|error| not_a_model(error.to_string()))?;
        if model.pieces.is_empty() {
            return Err(not_a_model("it has no pieces".to_owned()));
        }
        let trainer = model.trainer_spec.unwrap_or_default();
        let normalizer = model.normalizer_spec.unwrap_or_default();
        check_support(&trainer, &normalizer)?;
        let (tokens, extra) = vocabulary(model.pieces, &settings, added)?;
        Ok(Self {
            tokens,
            extra,
            trainer,
            normalizer,
            settings,
        })
    }

    /// Reads the model of a folder.
    ///
    /// # Errors
    /// When it cannot be read or used.
    pub(super) fn open(folder: &Path) -> error::Result<Self> {
        let path = folder.join(FILE_NAME);
        let model = regular::read(&path, MAX_TEXT_FILE_BYTES).map_err(|error| EngineError::io(&path, error))?;
        let read = |name: &str| match folder.join(name) {
            path if path.is_file() => config::read_json(&path),
            _ => Ok(Value::Null),
        };
        let (settings, added) = (read("tokenizer_config.json")?, read("added_tokens.json")?);
        Self::read(&model, settings, &added).map_err(|message| EngineError::model_config(&path, message))
    }

    /// All tokens, in the order of their ids.
    pub(super) fn all(&self) -> impl Iterator<Item = &Token> {
        self.tokens.iter().chain(&self.extra)
    }

    /// The token that begins texts (`bos_token`), or another one that `tokenizer_config.json` names; else that of the model, by its id. `None`:
    /// there is none.
    ///
    /// # Errors
    /// When the name is not one of its tokens.
    pub(super) fn special_token(&self, key: &str, id: i32) -> Result<Option<usize>, String> {
        let setting = self.settings.get(key);
        let name = setting.and_then(|token| token.as_str().or_else(|| token.get("content")?.as_str()));
        match name {
            Some(name) => match self.all().position(|token| token.text == name) {
                Some(id) => Ok(Some(id)),
                None => Err(format!(
                    "`{key}` of tokenizer_config.json is `{name}`, which it does not have"
                )),
            },
            None => Ok(usize::try_from(id).ok().filter(|id| *id < self.tokens.len())),
        }
    }

    /// Whether a space is put before a text.
    pub(super) fn has_prefix(&self) -> bool {
        let setting = self.settings.get("add_prefix_space").and_then(Value::as_bool);
        setting.unwrap_or(self.normalizer.add_dummy_prefix.unwrap_or(true))
    }
}

/// Checks that the model has nothing that a `tokenizer.json` cannot express.
fn check_support(trainer: &TrainerSpec, normalizer: &NormalizerSpec) -> Result<(), String> {
    for (is_set, what) in [
        (
            trainer.treat_whitespace_as_suffix.unwrap_or(false),
            "`treat_whitespace_as_suffix`",
        ),
        (
            !normalizer.escape_whitespaces.unwrap_or(true),
            "`escape_whitespaces: false`",
        ),
    ] {
        if is_set {
            return Err(format!("this SentencePiece model has {what}, which is not supported"));
        }
    }
    Ok(())
}

/// The pieces, and the tokens that follow them.
fn vocabulary(pieces: Vec<Piece>, settings: &Value, added: &Value) -> Result<(Vec<Token>, Vec<Token>), String> {
    let mut tokens = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let kind = piece.kind.unwrap_or(NORMAL);
        if kind == UNUSED {
            return Err(format!(
                "its piece `{}` is marked as unused, which is not supported",
                piece.piece
            ));
        }
        tokens.push(Token {
            text: piece.piece,
            score: piece.score,
            kind,
        });
    }
    let mut extra: BTreeMap<usize, Token> = BTreeMap::new();
    for (id, text, is_special) in added_tokens(settings, added) {
        let kind = if is_special { CONTROL } else { USER_DEFINED };
        match tokens.get_mut(id) {
            // Files may give another name to a piece.
            Some(token) if token.text != text => {
                token.text = text;
                if token.kind != UNKNOWN {
                    token.kind = kind;
                }
            }
            Some(_) => {}
            None => {
                let score = ADDED_SCORE;
                extra.insert(id, Token { text, score, kind });
            }
        }
    }
    if let Some((index, (id, token))) = extra
        .iter()
        .enumerate()
        .find(|(index, (id, _))| **id != tokens.len() + index)
    {
        return Err(format!(
            "the added token `{}` has the id {id}, and the next one after the model's is {}",
            token.text,
            tokens.len() + index
        ));
    }
    let extra: Vec<Token> = extra.into_values().collect();
    check_tokens(tokens.iter().chain(&extra))?;
    Ok((tokens, extra))
}

/// Checks the texts of tokens, in the order of their ids: no two are the same.
///
/// # Errors
/// A sentence about the token.
pub(super) fn check_tokens<'a>(tokens: impl Iterator<Item = &'a Token>) -> Result<(), String> {
    let mut names = HashMap::new();
    for (id, token) in tokens.enumerate() {
        if token.text.len() > MAX_PIECE_BYTES {
            return Err(format!(
                "its token {id} has {} bytes: expected at most {MAX_PIECE_BYTES}",
                token.text.len()
            ));
        }
        if token.kind == USER_DEFINED && token.text.contains(SPACE) {
            return Err(format!(
                "its token `{}` is user-defined and has a space, which is not supported",
                token.text
            ));
        }
        if let Some(other) = names.insert(token.text.as_str(), id) {
            return Err(format!("its tokens {other} and {id} are both `{}`", token.text));
        }
    }
    Ok(())
}

/// The tokens that other files of the folder name: id, text, and whether it is special.
fn added_tokens(settings: &Value, added: &Value) -> Vec<(usize, String, bool)> {
    let mut found: BTreeMap<usize, (String, bool)> = BTreeMap::new();
    for (text, id) in added.as_object().into_iter().flatten() {
        if let Some(id) = id.as_u64().and_then(|id| usize::try_from(id).ok()) {
            found.insert(id, (text.clone(), true));
        }
    }
    let decoder = settings.get("added_tokens_decoder").and_then(Value::as_object);
    for (id, token) in decoder.into_iter().flatten() {
        if let (Ok(id), Some(text)) = (id.parse::<usize>(), token.get("content").and_then(Value::as_str)) {
            let is_special = token.get("special").and_then(Value::as_bool).unwrap_or(false);
            found.insert(id, (text.to_owned(), is_special));
        }
    }
    let tokens = found.into_iter();
    tokens.map(|(id, (text, is_special))| (id, text, is_special)).collect()
}

/// The pairs that make a piece, first those of the piece with the largest score: SentencePiece joins the neighbours that make it.
pub(super) fn merges(tokens: &[Token]) -> Vec<[&str; 2]> {
    let normal = || tokens.iter().filter(|token| token.kind == NORMAL);
    let known: HashMap<&str, usize> = normal()
        .enumerate()
        .map(|(place, token)| (token.text.as_str(), place))
        .collect();
    let mut merges = Vec::new();
    for token in normal() {
        let first = merges.len();
        for (at, _) in token.text.char_indices().skip(1) {
            let (left, right) = token.text.split_at(at);
            if let (Some(of_left), Some(of_right)) = (known.get(left), known.get(right)) {
                merges.push((token.score, [left, right], [*of_left, *of_right]));
            }
        }
        merges[first..].sort_by_key(|(_, _, places)| *places);
    }
    merges.sort_by(|(score, [left, right], _), (other, [other_left, other_right], _)| {
        let by_score = other.total_cmp(score);
        let by_length =
            || (characters(other_left), characters(other_right)).cmp(&(characters(left), characters(right)));
        by_score.then_with(by_length)
    });
    merges.into_iter().map(|(_, pair, _)| pair).collect()
}

fn characters(text: &str) -> usize {
    text.chars().count()
}
