//! `embedding`: textual inversion, the training of a new word for the text encoders.

use super::declare::{choices, section};
use super::limits::MAX_EMBEDDING_VECTORS;
use super::naming;
use super::schema::{PresentKeys, ReadContext};

choices! {
    /// File format of a textual inversion.
    pub enum EmbeddingFormat("embedding format") {
        /// safetensors.
        Safetensors = "safetensors", Works;
        /// A pickle.
        Pt = "pt", Refused("pickles are not written: programs that read `.pt` embeddings read `safetensors` too");
    }
}

section! {
    /// Textual inversion: a new word for the text encoders, and nothing else of the model, is trained.
    pub struct EmbeddingConfig("embedding") {
        /// The word in prompts, and the name of the saved files.
        trigger: String = "custom_embedding".into(), Works;
        /// Number of vectors; each takes the place of one token in a prompt.
        tokens: u32 = 4, Works;
        /// Text whose tokens' vectors are the initial ones; too few are padded with those of `*`.
        init_words: String = "*".into(), Works;
        /// `safetensors` or `pt`.
        save_format: EmbeddingFormat = EmbeddingFormat::Safetensors, Works;
        /// What replaces the word in the captions of prior predictions (`train.inverted_mask_prior`, `train.do_prior_divergence`,
        /// `datasets[].prior_reg`).
        trigger_class_name: Option<String> = None, Works;
    }
    finish = finish_embedding;
}

fn finish_embedding(embedding: &mut EmbeddingConfig, _present: &PresentKeys, cx: &mut ReadContext) {
    cx.check_not_zero("tokens", embedding.tokens);
    if embedding.tokens > MAX_EMBEDDING_VECTORS {
        cx.error_at(
            "tokens",
            format!(
                "expected at most {MAX_EMBEDDING_VECTORS}: a prompt has 77 tokens, of which the text encoders use two themselves"
            ),
        );
    }
    if embedding.trigger.chars().any(char::is_whitespace) {
        cx.error_at("trigger", "expected one word, without blanks: prompts name it so");
    } else if let Err(reason) = naming::check_name(&embedding.trigger) {
        cx.error_at("trigger", format!("it names the saved files: {reason}"));
    }
}
