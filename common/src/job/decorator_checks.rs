//! What a `decorator` changes for the rest of a training, and checks of it against the other keys.

use super::arch::ArchName;
use super::process::TrainerProcess;
use super::schema::ReadContext;

impl TrainerProcess {
    /// Whether a network or tokens beside the model are trained, which stays as it is: an `adapter` or a `decorator`.
    #[must_use]
    pub fn trains_beside_model(&self) -> bool {
        self.adapter.is_some() || self.decorator.is_some()
    }

    /// Checks a decorator against the other keys.
    pub(super) fn check_decorator(&self, cx: &mut ReadContext) {
        if self.decorator.is_none() {
            return;
        }
        let arch = self.model.arch.name;
        if arch != ArchName::Flux {
            cx.error_at(
                "decorator",
                format!(
                    "decorators are trained for FLUX.1 (`arch: flux`), in ai-toolkit too, and this is `arch: {arch}`: remove `decorator`, and \
                     train a `network`"
                ),
            );
            return;
        }
        for (on, other, why) in [
            (
                self.network.is_some(),
                "network",
                "ai-toolkit saves both as the same file, so that the LoRA is lost",
            ),
            (self.embedding.is_some(), "embedding", "a decorator is trained alone"),
            (self.adapter.is_some(), "adapter", "a decorator is trained alone"),
        ] {
            if on {
                cx.error_at(
                    "decorator",
                    format!("cannot be used together with `{other}`: {why}; remove one of them"),
                );
            }
        }
        if self.slider.is_some() || self.kind.is_slider() {
            cx.error_at(
                "decorator",
                "cannot be used in a slider: remove it, or use `type: sd_trainer`",
            );
        }
        if self.train.train_text_encoder {
            cx.error_at(
                "train.train_text_encoder",
                "remove it: a `decorator` is trained alone, and the text encoder stays as it is",
            );
        }
        if self.model.apply_t5_attn_mask {
            cx.error_at(
                "model.apply_t5_attn_mask",
                "cannot be used together with `decorator`, whose tokens follow the padding that is masked: remove it",
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::job::{Format, JobSpec, LoadOptions, parse};

    fn read(arch: &str, set: &str, lines: &str) -> Result<JobSpec, String> {
        let text = format!(
            "job: extension\nconfig:\n  name: a\n  process:\n    - type: sd_trainer\n      training_folder: out\n      datasets: [{{folder_path: \
             cats{set}}}]\n      model: {{name_or_path: models/flux, arch: {arch}}}\n{lines}"
        );
        let read = parse(&text, Format::Yaml, Some("a.yaml"), &LoadOptions::default());
        read.map(|job| job.spec).map_err(|error| error.to_string())
    }

    #[test]
    fn a_decorator_is_trained_alone_and_for_flux() {
        let decorator = "      decorator: {num_tokens: 6}\n";
        let spec = read("flux", "", decorator).unwrap();
        assert!(spec.unsupported().is_ok(), "{}", spec.unsupported());
        let trainer = spec.process[0].trainer().unwrap();
        assert_eq!(trainer.decorator.as_ref().unwrap().num_tokens, 6);
        assert!(!trainer.trains_whole_model() && !trainer.saves_whole_model() && !trainer.saves_folders());
        let spec = read("flux", "", "      decorator: {}\n").unwrap();
        assert_eq!(
            spec.process[0]
                .trainer()
                .unwrap()
                .decorator
                .as_ref()
                .unwrap()
                .num_tokens,
            4
        );
        // Nothing of the transformer is trained, whatever this says.
        read("flux", "", &format!("{decorator}      train: {{train_unet: false}}\n")).unwrap();
        let with = |more: &str| format!("{decorator}      {more}\n");
        for (arch, set, lines, key) in [
            (
                "sdxl",
                "",
                decorator.to_owned(),
                "decorator: decorators are trained for FLUX.1",
            ),
            ("flux_kontext", "", decorator.to_owned(), "decorator: decorators are"),
            (
                "flux",
                "",
                with("network: {type: lora}"),
                "decorator: cannot be used together with `network`",
            ),
            (
                "flux",
                "",
                with("embedding: {trigger: vorx}"),
                "decorator: cannot be used together with `embedding`",
            ),
            (
                "flux",
                "",
                with("train: {train_text_encoder: true}"),
                "train.train_text_encoder: remove it",
            ),
            (
                "flux",
                "",
                with("train: {correct_pred_norm: true}"),
                "train.correct_pred_norm: needs a `network`",
            ),
            (
                "flux",
                ", prior_reg: true",
                decorator.to_owned(),
                "datasets[0].prior_reg: needs a `network`",
            ),
            (
                "flux",
                ", unconditional_path: dogs",
                decorator.to_owned(),
                "unconditional_path",
            ),
            (
                "flux",
                "",
                "      decorator: {num_tokens: 0}\n".to_owned(),
                "decorator.num_tokens",
            ),
            (
                "flux",
                "",
                "      decorator: {num_tokens: 513}\n".to_owned(),
                "decorator.num_tokens: expected at most 512",
            ),
        ] {
            let found = match read(arch, set, &lines) {
                Ok(spec) => spec.unsupported().to_string(),
                Err(error) => error,
            };
            assert!(found.contains("a.yaml:") && found.contains(key), "{key}: {found}");
        }
        let masked = read("flux, apply_t5_attn_mask: true", "", decorator).unwrap_err();
        assert!(
            masked.contains("model.apply_t5_attn_mask: cannot be used together"),
            "{masked}"
        );
    }
}
