//! What an `embedding` changes for the rest of a training, and checks of it against the other keys.

use super::arch::ArchName;
use super::process::TrainerProcess;
use super::schema::ReadContext;

impl TrainerProcess {
    /// Whether the model's own weights are trained: a full fine-tune, without a network or an embedding.
    #[must_use]
    pub fn trains_whole_model(&self) -> bool {
        self.network.is_none() && self.embedding.is_none()
    }

    /// The learning rate.
    #[must_use]
    pub fn learning_rate(&self) -> f64 {
        let of_embedding = self.train.embedding_lr.filter(|_| self.embedding.is_some());
        of_embedding.unwrap_or(self.train.lr)
    }

    /// What replaces `[trigger]` in the prompts of samples.
    #[must_use]
    pub fn sample_trigger(&self) -> Option<&str> {
        let embedding = self.embedding.as_ref().map(|embedding| embedding.trigger.as_str());
        embedding.or(self.trigger_word.as_deref())
    }

    /// The names of saved files begin with this: the word of an embedding, or the name of the job.
    #[must_use]
    pub fn save_stem<'a>(&'a self, job: &'a str) -> &'a str {
        self.embedding.as_ref().map_or(job, |embedding| &embedding.trigger)
    }

    /// Checks a textual inversion against the other keys.
    pub(super) fn check_embedding(&self, cx: &mut ReadContext) {
        let arch = self.model.arch.name;
        if self.embedding.is_none() {
            return;
        }
        if !matches!(arch, ArchName::Sd1 | ArchName::Sd2 | ArchName::Sdxl) {
            cx.error_at(
                "embedding",
                format!(
                    "words are trained for the CLIP text encoders of Stable Diffusion and SDXL, and this is `arch: {arch}`: remove \
                     `embedding`, and train a `network`"
                ),
            );
        }
        if self.network.is_some() {
            cx.error_at(
                "embedding",
                "cannot be used together with `network` yet: train the word first, then a LoRA",
            );
        }
        if self.slider.is_some() {
            cx.error_at("embedding", "cannot be used together with `slider`");
        }
        let train = &self.train;
        if train.train_text_encoder {
            cx.error_at(
                "train.train_text_encoder",
                "remove it: an `embedding` trains the vectors of its word, and the text encoder stays as it is",
            );
        }
        let caches = train.cache_text_embeddings || self.datasets.iter().any(|set| set.cache_text_embeddings);
        for (on, key) in [
            (train.unload_text_encoder, "train.unload_text_encoder"),
            (caches, "train.cache_text_embeddings"),
        ] {
            if on {
                cx.error_at(
                    key,
                    "cannot be used together with `embedding`: each step needs the text encoders",
                );
            }
        }
    }
}
