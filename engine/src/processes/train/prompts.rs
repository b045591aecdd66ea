//! The prompts that the captions of a micro-batch are encoded as.

use crate::families::Prompt;
use crate::rng::TorchGenerator;
use aitk_common::job::arch::ArchName;
use aitk_common::job::process::TrainerProcess;

/// Whether the first encoder reads the short captions and the second one the long ones (SDXL).
pub(super) fn splits_captions(process: &TrainerProcess) -> bool {
    process.train.short_and_long_captions_encoder_split && process.model.arch.name == ArchName::Sdxl
}

/// A prompt for each caption. `short`: the short captions, where each encoder has its own caption.
///
/// With `train.prompt_dropout_prob` draws `rand(1)` for each caption, of SDXL then again for each caption of the second encoder:
/// where the number is not above it, the prompt of the encoder is empty.
pub(super) fn prompts(
    captions: &[String],
    short: Option<&[String]>,
    process: &TrainerProcess,
    generator: &mut TorchGenerator,
) -> Vec<Prompt> {
    let mut prompts: Vec<Prompt> = match short {
        Some(short) => {
            let both = short.iter().zip(captions);
            both.map(|(short, long)| Prompt {
                text: short.clone(),
                text_2: Some(long.clone()),
            })
            .collect()
        }
        None => captions.iter().map(|caption| Prompt::new(caption.as_str())).collect(),
    };
    let chance = process.train.prompt_dropout_prob;
    if !process.drops_prompts() {
        return prompts;
    }
    let mut kept = |_: &Prompt| f64::from(generator.rand(1)[0]) > chance;
    if process.model.arch.name != ArchName::Sdxl {
        for prompt in &mut prompts {
            if !kept(prompt) {
                prompt.text.clear();
            }
        }
        return prompts;
    }
    let first: Vec<bool> = prompts.iter().map(&mut kept).collect();
    let second: Vec<bool> = prompts.iter().map(&mut kept).collect();
    for (prompt, (first, second)) in prompts.iter_mut().zip(first.into_iter().zip(second)) {
        let of_second = prompt.text_2.take().unwrap_or_else(|| prompt.text.clone());
        if !first {
            prompt.text.clear();
        }
        prompt.text_2 = Some(of_second).map(|text| if second { text } else { String::new() });
    }
    prompts
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::rng::generator_for;

    fn dropped(arch: ArchName, chance: f64) -> Vec<Prompt> {
        let mut process = TrainerProcess::default();
        process.model.arch.name = arch;
        process.train.prompt_dropout_prob = chance;
        let captions = vec!["a circle".to_owned(); 400];
        prompts(&captions, None, &process, &mut generator_for(1, "test", 0, 0))
    }

    #[test]
    fn each_encoder_of_sdxl_drops_its_own_prompts() {
        let count = |of: &dyn Fn(&Prompt) -> bool, prompts: &[Prompt]| prompts.iter().filter(|p| of(p)).count();
        let first = |prompt: &Prompt| prompt.text.is_empty();
        let second = |prompt: &Prompt| prompt.text_2.as_deref() == Some("");
        let found = dropped(ArchName::Sdxl, 0.25);
        // 3 standard deviations.
        assert!((74..=126).contains(&count(&first, &found)) && (74..=126).contains(&count(&second, &found)));
        assert!((10..=42).contains(&count(&|prompt| first(prompt) && second(prompt), &found)));
        let found = dropped(ArchName::Sd1, 0.25);
        assert!((74..=126).contains(&count(&first, &found)));
        assert!(found.iter().all(|prompt| prompt.text_2.is_none()));
        for arch in [ArchName::Sd3, ArchName::Zimage, ArchName::FluxKontext] {
            assert_eq!(count(&first, &dropped(arch, 1.0)), 0, "{arch}");
        }
        assert_eq!(count(&first, &dropped(ArchName::Flux, 1.0)), 400);
    }
}
