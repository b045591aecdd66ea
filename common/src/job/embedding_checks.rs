//! What an `embedding` changes for the rest of a training, and checks of it against the other keys.

use super::arch::ArchName;
use super::process::TrainerProcess;
use super::process_type::ProcessType;
use super::schema::ReadContext;

impl TrainerProcess {
    /// Whether the model's own weights are trained: a full fine-tune, without a network, an embedding, an adapter or a decorator.
    #[must_use]
    pub fn trains_whole_model(&self) -> bool {
        self.network.is_none() && self.embedding.is_none() && !self.trains_beside_model()
    }

    /// The learning rate.
    #[must_use]
    pub fn learning_rate(&self) -> f64 {
        let of_embedding = self.train.embedding_lr.filter(|_| self.embedding.is_some());
        let of_adapter = self.train.adapter_lr.filter(|_| self.adapter.is_some());
        of_embedding.or(of_adapter).unwrap_or(self.train.lr)
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
            if self.kind == ProcessType::TextualInversionTrainer {
                cx.missing_at(
                    "embedding",
                    "missing: this type of process trains a word, and without one it would train the whole model; add \
                     `embedding: {trigger: WORD}`, or use `type: sd_trainer`",
                );
            }
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

#[cfg(test)]
mod tests {
    use crate::job::{Format, LoadOptions, parse};

    /// The errors of a process with these lines.
    fn errors(lines: &str) -> String {
        let text = format!(
            "job: extension\nconfig:\n  name: a\n  process:\n    - type: textual_inversion_trainer\n      training_folder: out\n      \
             datasets: [{{folder_path: cats}}]\n      model: {{name_or_path: models/sd, arch: sd15}}\n{lines}"
        );
        let read = parse(&text, Format::Yaml, Some("a.yaml"), &LoadOptions::default());
        read.err().map_or_else(String::new, |error| error.to_string())
    }

    #[test]
    fn a_textual_inversion_needs_an_embedding() {
        for lines in ["", "      embedding: null\n"] {
            let found = errors(lines);
            assert!(
                found.contains("config.process[0].embedding") && found.contains("add `embedding: {trigger: WORD}`"),
                "{lines}: {found}"
            );
        }
        assert_eq!(errors("      embedding: {trigger: vorx}\n"), "");
        let wrong = errors("      embedding: {trigger: two words}\n");
        assert!(
            wrong.contains("expected one word") && !wrong.contains("missing"),
            "{wrong}"
        );
    }

    #[test]
    fn a_textual_inversion_trains_its_word_without_the_u_net() {
        let off = "      train: {train_unet: false}\n";
        assert_eq!(errors(&format!("      embedding: {{trigger: vorx}}\n{off}")), "");
        let text = "job: extension\nconfig:\n  name: a\n  process:\n    - type: sd_trainer\n      training_folder: out\n      datasets: \
                    [{folder_path: cats}]\n      model: {name_or_path: models/sd, arch: sd15}\n      network: {type: lora}\n";
        let read = parse(
            &format!("{text}{off}"),
            Format::Yaml,
            Some("a.yaml"),
            &LoadOptions::default(),
        );
        let found = read.unwrap_err().to_string();
        assert!(
            found.contains("config.process[0].train.train_unet") && found.contains("there is nothing to train"),
            "{found}"
        );
    }
}
