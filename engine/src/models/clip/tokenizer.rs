//! CLIP's tokenizer.
//!
//! A `tokenizer/` folder has `tokenizer.json` (transformers 5), or `vocab.json` and `merges.txt` (earlier), and files
//! with special and added tokens (`special_tokens.rs`). The rules are those of transformers' `CLIPTokenizer`: NFC, each white
//! space to one blank, lower case, split by CLIP's pattern, bytes to printable characters, BPE with `</w>` at the end
//! of a word.

use super::learned_words::{self, Piece, Word};
use crate::error::{EngineError, Result};
use crate::models::special_tokens::{DefaultTokens, SpecialTokens};
use crate::models::tokenizer_file;
use candle_core::{Device, Tensor};
use serde_json::{Value, json};
use std::ops::Range;
use std::path::Path;
use tokenizers::models::bpe::{BPE, BpeBuilder, Vocab};
use tokenizers::normalizers::{Lowercase, NFC, Replace, Sequence, replace::ReplacePattern};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence as PreSequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior, Tokenizer};

const PATTERN: &str = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+";

/// The tokens at the start and at the end of a prompt.
const START: &str = "<|startoftext|>";
const END: &str = "<|endoftext|>";
/// The tokens of roles that a folder does not set.
const DEFAULTS: DefaultTokens = &[
    ("bos_token", START),
    ("eos_token", END),
    ("unk_token", END),
    ("pad_token", END),
];

/// The merges of OpenAI's CLIP: `data/README.md` says where they come from.
const OPENAI_MERGES: &str = include_str!("../../../data/clip_merges.txt");

/// Converts prompts to ids.
#[derive(Clone, Debug)]
pub struct ClipTokenizer {
    tokenizer: Tokenizer,
    bos: u32,
    eos: u32,
    pad: u32,
    max_length: usize,
    /// Words of textual inversion.
    words: Vec<Word>,
}

impl ClipTokenizer {
    /// Opens a `tokenizer/` folder.
    ///
    /// # Errors
    /// When a file is missing, or the files are not those of a CLIP tokenizer.
    pub fn open(folder: &Path) -> Result<Self> {
        let wrong = |file: &str, e: &dyn std::fmt::Display| EngineError::model_config(folder.join(file), e.to_string());
        let mut tokenizer = if folder.join("tokenizer.json").is_file() {
            tokenizer_file::open(&folder.join("tokenizer.json")).map_err(|e| wrong("tokenizer.json", &e))?
        } else {
            let (vocab, merges) = (folder.join("vocab.json"), folder.join("merges.txt"));
            tokenizer_file::check_vocabulary([&vocab, &merges])?;
            let bpe = BPE::from_file(&vocab.to_string_lossy(), &merges.to_string_lossy());
            from_vocabulary(bpe).map_err(|e| wrong(damaged_file(&*e), &e))?
        };
        let special = SpecialTokens::read(folder, DEFAULTS)?;
        special.add_to(&mut tokenizer)?;
        Ok(Self {
            bos: special.id("bos_token", &tokenizer)?,
            eos: special.id("eos_token", &tokenizer)?,
            pad: special.id("pad_token", &tokenizer)?,
            max_length: special.max_length(),
            tokenizer,
            words: Vec::new(),
        })
    }

    /// The tokenizer of OpenAI's CLIP, which every Stable Diffusion 1.x model uses: for checkpoints without a
    /// tokenizer.
    ///
    /// # Errors
    /// When the tokenizer cannot be built.
    pub fn openai() -> Result<Self> {
        let wrong = |e: &dyn std::fmt::Display| EngineError::Internal(format!("the built-in tokenizer: {e}"));
        let vocab: Vocab = openai_vocabulary().into_iter().zip(0u32..).collect();
        let id = |name: &str| {
            vocab
                .get(name)
                .copied()
                .ok_or_else(|| wrong(&format!("it has no {name}")))
        };
        let (bos, eos) = (id(START)?, id(END)?);
        let merges = openai_merges().map(|(a, b)| (a.to_owned(), b.to_owned())).collect();
        let bpe = BPE::builder().vocab_and_merges(vocab, merges);
        let mut tokenizer = from_vocabulary(bpe).map_err(|e| wrong(&e))?;
        let special = |text: &str| AddedToken::from(text, true).normalized(false);
        let added = tokenizer.add_special_tokens([special(START), special(END)]);
        added.map_err(|e| wrong(&e))?;
        Ok(Self {
            tokenizer,
            bos,
            eos,
            pad: eos,
            max_length: 77,
            words: Vec::new(),
        })
    }

    /// The same tokenizer that pads prompts with the token `!`, as the folders of SD 2.x and of SDXL's second encoder
    /// do. There `!` is a special token: it is cut out of a prompt before the rest is split.
    ///
    /// # Errors
    /// When the vocabulary does not have this token.
    pub fn padded_with_exclamation_marks(mut self) -> Result<Self> {
        const PAD: &str = "!";
        let id = self.tokenizer.token_to_id(PAD);
        self.pad = id.ok_or_else(|| EngineError::Internal("the vocabulary has no `!`".into()))?;
        let added = AddedToken::from(PAD, true).normalized(false);
        let added = self.tokenizer.add_special_tokens([added]);
        added.map_err(|e| EngineError::Internal(format!("the built-in tokenizer: {e}")))?;
        Ok(self)
    }

    /// The names and contents of the files of a `tokenizer/` folder for [`Self::openai`]. `pad`: the token that pads
    /// prompts, if it is not the end token.
    #[must_use]
    pub fn openai_files(pad: Option<&str>) -> [(&'static str, String); 4] {
        let ids = openai_vocabulary().into_iter().zip(0u32..);
        let vocabulary: serde_json::Map<_, _> = ids.map(|(name, id)| (name, id.into())).collect();
        let pad = pad.unwrap_or(END);
        let roles = json!({"bos_token": START, "eos_token": END, "pad_token": pad, "unk_token": END});
        let mut settings = roles.clone();
        settings["add_prefix_space"] = false.into();
        settings["do_lower_case"] = true.into();
        settings["errors"] = "replace".into();
        settings["model_max_length"] = 77.into();
        settings["tokenizer_class"] = "CLIPTokenizer".into();
        [
            ("vocab.json", Value::Object(vocabulary).to_string()),
            ("merges.txt", format!("#version: 0.2\n{OPENAI_MERGES}")),
            ("special_tokens_map.json", format!("{roles:#}\n")),
            ("tokenizer_config.json", format!("{settings:#}\n")),
        ]
    }

    /// Adds a word of textual inversion, which stands for these ids.
    ///
    /// # Errors
    /// When it is a word of the vocabulary, was added before, or prompts could not tell it from one that was.
    pub fn add_embedding(&mut self, trigger: &str, ids: Range<u32>) -> Result<()> {
        if self.vocabulary_tokens(trigger)?.len() <= 1 {
            return Err(EngineError::bad_input(format!(
                "the text encoder knows the word `{trigger}` already: choose another one, or prompts could no longer use this one"
            )));
        }
        let new = Word::new(trigger, ids);
        if let Some(conflict) = self.words.iter().find_map(|known| new.conflict(known)) {
            return Err(EngineError::bad_input(conflict));
        }
        self.words.push(new);
        Ok(())
    }

    /// The ids of a prompt, not truncated and without start and end tokens.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn tokens(&self, text: &str) -> Result<Vec<u32>> {
        if self.words.is_empty() {
            return self.vocabulary_tokens(text);
        }
        let mut ids = Vec::new();
        for piece in learned_words::split(&self.words, text) {
            match piece {
                Piece::Text(text) => ids.append(&mut self.vocabulary_tokens(text)?),
                Piece::Ids(own) => ids.extend(own),
            }
        }
        Ok(ids)
    }

    fn vocabulary_tokens(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.tokenizer.encode(text, false);
        Ok(encoding
            .map_err(|e| EngineError::BadInput(format!("prompt `{text}`: {e}")))?
            .get_ids()
            .to_vec())
    }

    /// Prompts -> ids [b, 77] (u32): start, tokens (truncated), end, padding.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn encode(&self, texts: &[&str]) -> Result<Tensor> {
        let mut ids = Vec::with_capacity(texts.len() * self.max_length);
        for text in texts {
            let mut tokens = self.tokens(text)?;
            tokens.truncate(self.max_length - 2);
            let end = ids.len() + self.max_length;
            ids.push(self.bos);
            ids.append(&mut tokens);
            ids.push(self.eos);
            ids.resize(end, self.pad);
        }
        Ok(Tensor::from_vec(ids, (texts.len(), self.max_length), &Device::Cpu)?)
    }

    /// Prompts of up to `chunks` times 75 tokens -> ids [b * chunks, 77] (u32), the chunks of a prompt one after the other, each with
    /// start and end tokens, as in sd-scripts (`library/strategy_base.py`). With one chunk: [`Self::encode`].
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn encode_chunks(&self, texts: &[&str], chunks: usize) -> Result<Tensor> {
        if chunks <= 1 {
            return self.encode(texts);
        }
        let of_chunk = self.max_length - 2;
        let mut ids = Vec::with_capacity(texts.len() * chunks * self.max_length);
        for text in texts {
            let mut tokens = self.tokens(text)?;
            tokens.truncate(of_chunk * chunks);
            // As if the prompt were one long chunk: its end token is there once.
            let last = if tokens.len() == of_chunk * chunks {
                self.eos
            } else {
                self.pad
            };
            tokens.push(self.eos);
            tokens.resize(of_chunk * chunks + 1, self.pad);
            for chunk in tokens.chunks_exact(of_chunk) {
                let start = ids.len();
                ids.push(self.bos);
                ids.extend_from_slice(chunk);
                ids.push(last);
                if self.pad == self.eos {
                    continue;
                }
                // Where padding is not the end token, a chunk that is full or empty gets one.
                if ![self.eos, self.pad].contains(&ids[start + of_chunk]) {
                    ids[start + of_chunk + 1] = self.eos;
                }
                if ids[start + 1] == self.pad {
                    ids[start + 1] = self.eos;
                }
            }
        }
        Ok(Tensor::from_vec(
            ids,
            (texts.len() * chunks, self.max_length),
            &Device::Cpu,
        )?)
    }

    /// Limits the ids per prompt to the number of positions of a text encoder.
    #[must_use]
    pub fn limited_to(mut self, positions: usize) -> Self {
        self.max_length = self.max_length.min(positions).max(2);
        self
    }

    /// The number of ids per prompt, with special tokens.
    #[must_use]
    pub fn max_length(&self) -> usize {
        self.max_length
    }
}

fn openai_merges() -> impl Iterator<Item = (&'static str, &'static str)> {
    OPENAI_MERGES.lines().filter_map(|line| line.split_once(' '))
}

/// The tokens of OpenAI's CLIP in the order of their ids.
fn openai_vocabulary() -> Vec<String> {
    let alphabet = alphabet();
    let ends = alphabet.iter().map(|c| format!("{c}</w>"));
    let joined = openai_merges().map(|(a, b)| format!("{a}{b}"));
    let special = [START, END].map(str::to_owned);
    let single = alphabet.iter().map(char::to_string).chain(ends);
    single.chain(joined).chain(special).collect()
}

/// The characters for bytes in CLIP's vocabulary: printable bytes as they are, then the others as characters from
/// U+0100 on.
fn alphabet() -> Vec<char> {
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let as_is = (0..=u8::MAX).filter(printable).map(char::from);
    let others = (0..=u8::MAX).filter(|byte| !printable(byte)).count() as u32;
    as_is
        .chain((0x100..0x100 + others).filter_map(char::from_u32))
        .collect()
}

/// The file of a `tokenizer/` folder that an error is about.
fn damaged_file(error: &(dyn std::error::Error + 'static)) -> &'static str {
    use tokenizers::models::bpe::Error;
    match error.downcast_ref() {
        Some(Error::BadMerges(_) | Error::MergeTokenOutOfVocabulary(_)) => "merges.txt",
        _ => "vocab.json",
    }
}

fn from_vocabulary(bpe: BpeBuilder) -> tokenizers::Result<Tokenizer> {
    let bpe = bpe
        .unk_token("<|endoftext|>".into())
        .end_of_word_suffix("</w>".into())
        .continuing_subword_prefix(String::new())
        .build()?;
    let mut tokenizer = Tokenizer::new(bpe);
    let blanks = Replace::new(ReplacePattern::Regex(r"\s+".into()), " ")?;
    tokenizer.with_normalizer(Some(Sequence::new(vec![NFC.into(), blanks.into(), Lowercase.into()])))?;
    let split = Split::new(
        SplitPattern::Regex(PATTERN.into()),
        SplitDelimiterBehavior::Removed,
        true,
    )?;
    let bytes = ByteLevel::default().add_prefix_space(false);
    tokenizer.with_pre_tokenizer(Some(PreSequence::new(vec![split.into(), bytes.into()])));
    Ok(tokenizer)
}
