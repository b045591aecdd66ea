//! The tokens that mark a gap in a text (fill-in-the-middle), by the names that tokenizers of code models give them.

use tokenizers::Tokenizer;

/// How a kind of models marks a gap.
struct FimForm {
    /// The names of the tokens before prefix, suffix and middle.
    names: [&'static str; 2],
    middle: Option<&'static str>,
    /// The token that ends a middle, where it is not the end of a text.
    end: Option<&'static str>,
    /// Whether the parts are texts of their own: the prefix begins with one space more, if the tokenizer puts a space before texts, and the
    /// suffix follows its mark as it is.
    has_separate_parts: bool,
}

/// A form with three tokens in one text.
const fn in_one_text(prefix: &'static str, suffix: &'static str, middle: &'static str) -> FimForm {
    FimForm {
        names: [prefix, suffix],
        middle: Some(middle),
        end: None,
        has_separate_parts: false,
    }
}

/// The known forms. Of the models in order: StarCoder and StarCoder2 (R. Li and others, arXiv:2305.06161); SantaCoder; Qwen2.5-Coder (B. Hui
/// and others, arXiv:2409.12186) and CodeGemma; DeepSeek-Coder (D. Guo and others, arXiv:2401.14196); Code Llama (B. Rozière and others,
/// arXiv:2308.12950, and transformers' `CodeLlamaTokenizer`); Codestral (mistral-common's `encode_fim`).
const FORMS: [FimForm; 6] = [
    in_one_text("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    in_one_text("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    in_one_text("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    in_one_text("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    FimForm {
        names: ["▁<PRE>", "▁<SUF>"],
        middle: Some("▁<MID>"),
        end: Some("▁<EOT>"),
        has_separate_parts: true,
    },
    FimForm {
        names: ["[PREFIX]", "[SUFFIX]"],
        middle: None,
        end: None,
        has_separate_parts: true,
    },
];

/// The ids of the tokens for fill-in-the-middle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FimTokens {
    /// Before the prefix: the text before the gap.
    pub prefix: u32,
    /// Before the suffix: the text after the gap.
    pub suffix: u32,
    /// Before the middle: what fills the gap. `None`: the suffix is first in any case, and the middle follows the prefix.
    pub middle: Option<u32>,
    /// After the middle. `None`: the token that ends a text.
    pub end: Option<u32>,
    /// Whether prefix and suffix are converted to tokens each alone, and the prefix begins with one space more in a tokenizer that puts a
    /// space before texts.
    pub has_separate_parts: bool,
}

impl FimTokens {
    /// Those of a tokenizer, with the names of the tokens before prefix, suffix and middle. `None`: it has none.
    pub(super) fn find(tokenizer: &Tokenizer) -> Option<(Self, [&'static str; 3])> {
        FORMS.iter().find_map(|form| {
            let id = |name: &str| tokenizer.token_to_id(name);
            let [prefix, suffix] = form.names;
            let tokens = Self {
                prefix: id(prefix)?,
                suffix: id(suffix)?,
                middle: match form.middle {
                    Some(name) => Some(id(name)?),
                    None => None,
                },
                end: form.end.and_then(id),
                has_separate_parts: form.has_separate_parts,
            };
            Some((tokens, [prefix, suffix, form.middle.unwrap_or_default()]))
        })
    }

    /// The names of the tokens before a prefix, for messages.
    pub(super) fn known_names() -> String {
        let names = FORMS.iter().map(|form| format!("`{}`", form.names[0]));
        names.collect::<Vec<_>>().join(", ")
    }

    /// The marks and the tokens of prefix and suffix, up to where the middle begins. `is_spm`: the suffix is first.
    #[must_use]
    pub fn before_middle(self, prefix: &[u32], suffix: &[u32], is_spm: bool) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(3 + prefix.len() + suffix.len());
        match (self.middle, is_spm) {
            (None, _) => {
                tokens.push(self.suffix);
                tokens.extend_from_slice(suffix);
                tokens.push(self.prefix);
                tokens.extend_from_slice(prefix);
            }
            (Some(middle), true) => {
                tokens.extend([self.prefix, self.suffix]);
                tokens.extend_from_slice(suffix);
                tokens.push(middle);
                tokens.extend_from_slice(prefix);
            }
            (Some(middle), false) => {
                tokens.push(self.prefix);
                tokens.extend_from_slice(prefix);
                tokens.push(self.suffix);
                tokens.extend_from_slice(suffix);
                tokens.push(middle);
            }
        }
        tokens
    }

    /// How many tokens mark a gap.
    #[must_use]
    pub fn marks(self) -> usize {
        2 + usize::from(self.middle.is_some())
    }
}
