//! `decorator`: learned tokens that FLUX.1's transformer reads after those of T5.

use super::declare::section;
use super::limits::MAX_DECORATOR_TOKENS;
use super::schema::{PresentKeys, ReadContext};

section! {
    /// Tokens that the transformer of FLUX.1 reads after those of every prompt. They, and nothing else of the model, are trained.
    pub struct DecoratorConfig("decorator") {
        /// Number of tokens.
        num_tokens: u32 = 4, Works;
    }
    finish = finish_decorator;
}

fn finish_decorator(decorator: &mut DecoratorConfig, _present: &PresentKeys, cx: &mut ReadContext) {
    cx.check_not_zero("num_tokens", decorator.num_tokens);
    if decorator.num_tokens > MAX_DECORATOR_TOKENS {
        cx.error_at(
            "num_tokens",
            format!("expected at most {MAX_DECORATOR_TOKENS}: T5 reads as many tokens of a prompt"),
        );
    }
}
