//! `train.negative_prompt`: the negative prompts of a training with classifier-free guidance.

use super::process::TrainerProcess;

/// Where negative prompts come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NegativePrompts<'a> {
    /// This is the prompt.
    Text(&'a str),
    /// A text file, with one prompt per line.
    File(&'a str),
}

impl TrainerProcess {
    /// The negative prompts of a training with classifier-free guidance. `None`: the empty prompt.
    #[must_use]
    pub fn negative_prompts(&self) -> Option<NegativePrompts<'_>> {
        let text = self.train.negative_prompt.as_deref().filter(|text| !text.is_empty())?;
        if self.ignores_negative_prompts().is_some() {
            return None;
        }
        Some(match text.ends_with(".txt") {
            true => NegativePrompts::File(text),
            false => NegativePrompts::Text(text),
        })
    }

    /// Why negative prompts have no effect, if they have none.
    pub(super) fn ignores_negative_prompts(&self) -> Option<&'static str> {
        let train = &self.train;
        if self.kind.is_slider() {
            Some("has no effect on a slider, whose prompts are its own")
        } else if !train.do_cfg && !train.do_random_cfg {
            Some("has no effect without `do_cfg` or `do_random_cfg`")
        } else if self.encodes_captions_first() {
            Some(
                "has no effect, as in ai-toolkit: with `cache_text_embeddings` or `unload_text_encoder`, CFG uses the empty prompt",
            )
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::NegativePrompts;
    use crate::job::process::TrainerProcess;

    #[test]
    fn negative_prompts_are_a_text_or_the_lines_of_a_file() {
        let mut process = TrainerProcess::default();
        process.train.negative_prompt = Some("blurry, low quality".into());
        assert_eq!(process.negative_prompts(), None, "there is no guidance");
        process.train.do_random_cfg = true;
        assert_eq!(
            process.negative_prompts(),
            Some(NegativePrompts::Text("blurry, low quality"))
        );
        process.train.negative_prompt = Some("prompts/negative.txt".into());
        assert_eq!(
            process.negative_prompts(),
            Some(NegativePrompts::File("prompts/negative.txt"))
        );
        process.train.cache_text_embeddings = true;
        assert_eq!(process.negative_prompts(), None);
        process.train.cache_text_embeddings = false;
        process.train.negative_prompt = Some(String::new());
        assert_eq!(process.negative_prompts(), None);
    }
}
