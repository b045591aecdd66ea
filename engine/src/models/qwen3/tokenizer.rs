//! Qwen3's tokenizer (transformers' `Qwen2Tokenizer`) and the text of a chat.
//!
//! A `tokenizer/` folder has `tokenizer.json`, or `vocab.json` and `merges.txt`, and files with special and added tokens. The rules
//! are NFC, Qwen's pattern, bytes to printable characters, BPE.

use super::chat_template;
use crate::error::{EngineError, Result};
use crate::models::special_tokens::{DefaultTokens, SpecialTokens};
use crate::models::tokenizer_file;
use candle_core::{Device, Tensor};
use std::path::Path;
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{SplitDelimiterBehavior, Tokenizer};

/// The pattern by which a text is split before BPE.
const PATTERN: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The tokens at the beginning and at the end of a message.
const START: &str = "<|im_start|>";
const END: &str = "<|im_end|>";
/// The tokens of roles that a folder does not set.
const DEFAULTS: DefaultTokens = &[
    ("eos_token", "<|endoftext|>"),
    ("unk_token", "<|endoftext|>"),
    ("pad_token", "<|endoftext|>"),
];

/// Converts texts to ids.
#[derive(Clone, Debug)]
pub struct Qwen3Tokenizer {
    tokenizer: Tokenizer,
    pub(super) pad: u32,
}

/// The ids of several texts.
#[derive(Clone, Debug)]
pub struct TokenIds {
    /// [b, longest] (u32), the shorter texts padded at their end.
    pub ids: Tensor,
    /// The number of tokens of each text.
    pub lengths: Vec<usize>,
}

impl Qwen3Tokenizer {
    /// Opens a `tokenizer/` folder.
    ///
    /// # Errors
    /// When a file is missing, or the files are not those of a Qwen tokenizer, or it has another chat template.
    pub fn open(folder: &Path) -> Result<Self> {
        let wrong = |file: &str, e: &dyn std::fmt::Display| EngineError::model_config(folder.join(file), e.to_string());
        let mut tokenizer = if folder.join("tokenizer.json").is_file() {
            tokenizer_file::open(&folder.join("tokenizer.json")).map_err(|e| wrong("tokenizer.json", &e))?
        } else {
            let (vocab, merges) = (folder.join("vocab.json"), folder.join("merges.txt"));
            tokenizer_file::check_vocabulary([&vocab, &merges])?;
            let bpe = BPE::from_file(&vocab.to_string_lossy(), &merges.to_string_lossy()).build();
            let bpe = bpe.map_err(|e| wrong("vocab.json and merges.txt", &e))?;
            from_vocabulary(bpe).map_err(|e| wrong("vocab.json", &e))?
        };
        chat_template::check(folder)?;
        let special = SpecialTokens::read(folder, DEFAULTS)?;
        special.add_to(&mut tokenizer)?;
        for token in [START, END] {
            if tokenizer.token_to_id(token).is_none() {
                let reason = format!("this tokenizer has no `{token}`, so it is not that of a Qwen3 model");
                return Err(wrong("tokenizer_config.json", &reason));
            }
        }
        Ok(Self {
            pad: special.id("pad_token", &tokenizer)?,
            tokenizer,
        })
    }

    /// Prompts -> the ids of a chat in which the user said the prompt and the assistant is about to answer, as Qwen3's chat
    /// template writes it with `add_generation_prompt` and `enable_thinking`. At most `length` ids for each: a longer prompt is cut
    /// at its end.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn encode_chat(&self, prompts: &[&str], length: usize) -> Result<TokenIds> {
        let mut texts = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            let chat = format!("{START}user\n{prompt}{END}\n{START}assistant\n");
            let encoding = self.tokenizer.encode(chat, false);
            let encoding = encoding.map_err(|e| EngineError::BadInput(format!("prompt `{prompt}`: {e}")))?;
            let mut ids = encoding.get_ids().to_vec();
            ids.truncate(length);
            texts.push(ids);
        }
        let lengths: Vec<usize> = texts.iter().map(Vec::len).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        for ids in &mut texts {
            ids.resize(longest, self.pad);
        }
        let ids = Tensor::from_vec(texts.concat(), (prompts.len(), longest), &Device::Cpu)?;
        Ok(TokenIds { ids, lengths })
    }
}

fn from_vocabulary(bpe: BPE) -> tokenizers::Result<Tokenizer> {
    let mut tokenizer = Tokenizer::new(bpe);
    tokenizer.with_normalizer(Some(NFC))?;
    let split = Split::new(
        SplitPattern::Regex(PATTERN.into()),
        SplitDelimiterBehavior::Isolated,
        false,
    )?;
    let bytes = ByteLevel::default().add_prefix_space(false).use_regex(false);
    tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![split.into(), bytes.into()])));
    Ok(tokenizer)
}
