//! What the denoiser is conditioned on: encoded prompts, and control images.

use super::{CAPTION_TOKENS, Job, Model};
use crate::plan::json::{flag, number, text};
use crate::plan::shapes::TransformerKind;
use crate::plan::walk::{Backend, Conditions, MetaTensor, Walk};

/// CLIP's tokens before those of T5, in Stable Diffusion 3.5.
const CLIP_TOKENS: f64 = 77.0;

impl Job<'_> {
    /// Whether images are generated from a control image (FLUX.1 Kontext).
    pub(super) fn has_control(&self) -> bool {
        text(self.body, "/model/arch").is_some_and(|arch| arch.split(':').next() == Some("flux_kontext"))
    }

    /// Tokens of a prompt for the language model.
    fn language_tokens(&self, prompt_tokens: f64) -> f64 {
        let [usual, short] = self.family.prompt_tokens;
        let transformer = &self.shapes.transformer;
        match transformer.kind {
            // Shorter prompts are not padded.
            TransformerKind::ZImage => prompt_tokens.min(usual),
            _ if transformer.short_prompts => short,
            _ => usual,
        }
    }

    /// Whether no token attends to the padding of T5.
    fn masks_padding(&self) -> bool {
        self.shapes.transformer.kind == TransformerKind::Chroma || flag(self.body, "/model/apply_t5_attn_mask")
    }

    /// Tokens of the encoded text that the transformer reads.
    fn read_tokens(&self, prompt_tokens: f64) -> f64 {
        let all = self.language_tokens(prompt_tokens);
        match self.shapes.transformer.kind {
            // Those of the prompt, and one of its padding.
            TransformerKind::Chroma => (prompt_tokens.ceil() + 1.0).min(all),
            _ => all,
        }
    }

    /// Blocks of tokens of a prompt, each of which a CLIP encoder reads on its own.
    fn token_blocks(&self) -> f64 {
        let tokens = number(self.body, "/model/max_token_length").unwrap_or(0.0);
        (tokens / 75.0).floor().max(1.0)
    }

    /// The text encoders, one prompt at a time.
    pub(super) fn text_pass(&self, model: &Model, backend: Backend, prompt_tokens: f64) -> f64 {
        let walk = Walk::new(backend);
        let encoded = model
            .language
            .as_ref()
            .map(|encoder| encoder.forward(&walk, 1.0, self.language_tokens(prompt_tokens), self.masks_padding()));
        for encoder in &model.text {
            encoder.forward(&walk, self.token_blocks(), false, self.family.penultimate);
        }
        drop(encoded);
        walk.peak()
    }

    /// The conditions of `batch` items, encoded before.
    pub(super) fn conditions(&self, walk: &Walk, batch: f64, latents: &MetaTensor, prompt_tokens: f64) -> Conditions {
        let (tokens, features) = self.context_size();
        let context = walk.tensor([batch, tokens, features, 1.0], false);
        self.with_text(walk, context, None, latents, prompt_tokens)
    }

    fn with_text(
        &self,
        walk: &Walk,
        context: MetaTensor,
        pooled: Option<MetaTensor>,
        latents: &MetaTensor,
        prompt_tokens: f64,
    ) -> Conditions {
        let [batch, ..] = context.dims();
        let features = f64::from(self.shapes.transformer.pooled);
        let [_, _, height, width] = latents.dims();
        Conditions {
            pooled: pooled.or_else(|| (features > 0.0).then(|| walk.tensor([batch, 1.0, features, 1.0], false))),
            text: context,
            prompt_tokens: self.read_tokens(prompt_tokens),
            masks_padding: self.masks_padding(),
            // As many as those of the image.
            control: self.has_control().then_some(height * width / 4.0),
            residuals: Default::default(),
        }
    }

    /// Tokens of the encoded text and their features.
    fn context_size(&self) -> (f64, f64) {
        let transformer = &self.shapes.transformer;
        let features = f64::from(transformer.context);
        match transformer.kind {
            TransformerKind::None => (
                // The blocks have one start and one end together.
                self.token_blocks() * (f64::from(self.shapes.text[0].positions) - 2.0) + 2.0,
                f64::from(self.shapes.unet.context),
            ),
            TransformerKind::Flux | TransformerKind::Chroma => (self.language_tokens(0.0), features),
            TransformerKind::Sd3 => (CLIP_TOKENS + self.language_tokens(0.0), features),
            TransformerKind::ZImage => (self.family.prompt_tokens[0], features),
        }
    }

    /// The conditions of as many items as there are latents, of which `captions` have the graph of the text encoders (CLIP). The others are
    /// those of the negative prompts of a step with guidance.
    pub(super) fn trained_conditions(
        &self,
        walk: &Walk,
        model: &Model,
        (latents, captions): (&MetaTensor, f64),
        checkpointed: bool,
    ) -> Conditions {
        let [batch, ..] = latents.dims();
        let of_language = model.language.as_ref().and_then(|encoder| {
            encoder.forward(
                walk,
                captions,
                self.language_tokens(CAPTION_TOKENS),
                self.masks_padding(),
            )
        });
        let mut of_clip: Option<MetaTensor> = None;
        let blocks = self.token_blocks();
        for encoder in &model.text {
            let Some(mut text) = encoder.forward(walk, captions * blocks, checkpointed, self.family.penultimate) else {
                continue;
            };
            if blocks > 1.0 {
                let [_, _, features, _] = text.dims();
                text = walk.rearranged(&text, [captions, self.context_size().0, features, 1.0]);
            }
            of_clip = Some(match of_clip {
                None => text,
                Some(before) => walk.cat_features(&before, &text),
            });
        }
        let (tokens, features) = self.context_size();
        let dims = [batch, tokens, features, 1.0];
        let with_negatives = |text: MetaTensor| match captions < batch {
            true => {
                let [_, tokens, features, last] = text.dims();
                let negatives = walk.tensor(text.dims(), false);
                walk.rearranged(&walk.cat_tokens(&negatives, &text), [batch, tokens, features, last])
            }
            false => text,
        };
        let whole = |text: Option<MetaTensor>| text.map_or_else(|| walk.tensor(dims, false), with_negatives);
        match self.shapes.transformer.kind {
            TransformerKind::None => self.with_text(walk, whole(of_clip), None, latents, CAPTION_TOKENS),
            TransformerKind::Flux => {
                let pooled = of_clip.map(|text| with_negatives(walk.first_token(&text)));
                self.with_text(walk, whole(of_language), pooled, latents, CAPTION_TOKENS)
            }
            _ => {
                // CLIP's tokens are padded with zeros to the features of the language model's.
                let joined = of_clip.map(|text| {
                    let wide = walk.with_features(&text, features);
                    match &of_language {
                        Some(others) => walk.cat_tokens(&wide, others),
                        None => wide,
                    }
                });
                self.with_text(walk, whole(joined), None, latents, CAPTION_TOKENS)
            }
        }
    }
}

impl Conditions {
    /// Those of the first items.
    pub(super) fn of_items(&self, walk: &Walk, items: f64) -> Self {
        Self {
            text: walk.view_of(&self.text, items),
            pooled: self.pooled.as_ref().map(|pooled| walk.view_of(pooled, items)),
            ..self.clone()
        }
    }
}
