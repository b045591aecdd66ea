//! Preservation: beside its captions, each step trains the adapter to leave what the model predicts for other prompts as it is.
//!
//! `diff_output_preservation`: the captions with a class in the place of their trigger word ("a photo of zorb", "a photo of a person").
//! `blank_prompt_preservation`: the empty prompt. As in ai-toolkit (`SDTrainer` in `extensions_built_in/sd_trainer/SDTrainer.py` at
//! 27a03a91) the loss is that of the captions plus `multiplier * mse(with the adapter, without it)` for the same noisy latents.

use crate::error::Result;
use aitk_common::job::process::TrainerProcess;
use candle_core::{DType, Tensor};

/// The prompts for which the base model's prediction is kept.
#[derive(Clone, Debug, PartialEq)]
enum Prompts {
    /// Each caption with this text in the place of its trigger word.
    Class(String),
    /// This text for every caption.
    One(String),
}

/// The preservation loss of a run.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Preservation {
    prompts: Prompts,
    /// Weight of the loss.
    pub(super) multiplier: f64,
}

impl Preservation {
    /// That of a config, if it has one.
    pub(super) fn of(process: &TrainerProcess) -> Option<Self> {
        let train = &process.train;
        if train.blank_prompt_preservation {
            return Some(Self {
                prompts: Prompts::One(String::new()),
                multiplier: train.blank_prompt_preservation_multiplier,
            });
        }
        let class = train.diff_output_preservation_class.clone();
        // Without captions the trigger word is the only prompt.
        let is_alone = train.unload_text_encoder && !super::options::caches_captions(process);
        train.diff_output_preservation.then_some(Self {
            prompts: if is_alone {
                Prompts::One(class)
            } else {
                Prompts::Class(class)
            },
            multiplier: train.diff_output_preservation_multiplier,
        })
    }

    /// The prompt that is kept beside a caption. `trigger`: the trigger word of the caption's data set.
    pub(super) fn prompt(&self, caption: &str, trigger: Option<&str>) -> String {
        match (&self.prompts, trigger.filter(|trigger| !trigger.is_empty())) {
            (Prompts::One(prompt), _) => prompt.clone(),
            (Prompts::Class(class), Some(trigger)) => caption.replace(trigger, class),
            (Prompts::Class(_), None) => caption.to_owned(),
        }
    }
}

/// `factor` times the mean squared difference of the predictions with and without the adapter; of several tensors, the mean of theirs.
///
/// # Errors
/// When the arithmetic fails.
pub(super) fn loss(predicted: &[Tensor], base: &[Tensor], factor: f64) -> Result<Tensor> {
    let mut total = Tensor::zeros((), DType::F32, &candle_core::Device::Cpu)?;
    for (index, (predicted, base)) in predicted.iter().zip(base).enumerate() {
        let difference = (predicted.to_dtype(DType::F32)? - base.to_dtype(DType::F32)?)?;
        let one = difference.sqr()?.mean_all()?;
        total = if index == 0 { one } else { (total + one)? };
    }
    Ok((total * (factor / predicted.len().max(1) as f64))?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use aitk_common::job::train::TrainConfig;

    fn preservation(change: impl FnOnce(&mut TrainConfig)) -> Option<Preservation> {
        let mut process = TrainerProcess::default();
        process.train.diff_output_preservation_class = "a cat".into();
        change(&mut process.train);
        Preservation::of(&process)
    }

    #[test]
    fn trigger_words_become_the_class() {
        assert_eq!(preservation(|_| ()), None);
        let class = preservation(|train| train.diff_output_preservation = true).unwrap();
        assert_eq!(class.prompt("a zorb with a zorb", Some("zorb")), "a a cat with a a cat");
        assert_eq!(class.prompt("a dog", Some("zorb")), "a dog");
        assert_eq!(class.prompt("a dog", Some("")), "a dog");
        assert_eq!(class.prompt("a zorb", None), "a zorb");
        let alone = preservation(|train| {
            train.diff_output_preservation = true;
            train.unload_text_encoder = true;
        });
        assert_eq!(alone.unwrap().prompt("", Some("zorb")), "a cat");
        let blank = preservation(|train| train.blank_prompt_preservation = true).unwrap();
        assert_eq!(blank.prompt("a zorb", Some("zorb")), "");
    }
}
