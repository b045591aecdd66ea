//! The prompts that the captions of a micro-batch are encoded as, and its negative prompts.

use super::super::context::Context;
use crate::error::{EngineError, Result};
use crate::families::Prompt;
use crate::rng::TorchGenerator;
use aitk_common::fsutil::regular;
use aitk_common::job::arch::ArchName;
use aitk_common::job::generate::prompt_lines;
use aitk_common::job::limits::MAX_TEXT_FILE_BYTES;
use aitk_common::job::negative_prompts::NegativePrompts;
use aitk_common::job::process::TrainerProcess;

/// Whether the first encoder reads the short captions and the second one the long ones (SDXL).
pub(super) fn splits_captions(process: &TrainerProcess) -> bool {
    process.train.short_and_long_captions_encoder_split && process.model.arch.name == ArchName::Sdxl
}

/// A prompt for each caption. `short`: the short captions, where each encoder has its own caption.
///
/// With `train.prompt_dropout_prob` draws `rand(1)` for each caption, with SDXL then again for each caption of the second encoder:
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

/// The negative prompts from which those of each item are drawn. Empty: there is no guidance, or it has the empty prompt.
///
/// # Errors
/// When their file cannot be read or is empty.
pub(super) fn negative_prompts(process: &TrainerProcess, cx: &Context<'_>) -> Result<Vec<String>> {
    let file = match process.negative_prompts() {
        None => return Ok(Vec::new()),
        Some(NegativePrompts::Text(text)) => return Ok(vec![text.to_owned()]),
        Some(NegativePrompts::File(file)) => file,
    };
    let path = cx.local_path(file)?;
    let expected =
        "expected a text file with one prompt per line; a negative prompt is the name of a file if it ends in `.txt`";
    let text = regular::read_text(&path, MAX_TEXT_FILE_BYTES).map_err(|error| {
        EngineError::bad_input(format!(
            "train.negative_prompt: {}: {error}: {expected}",
            path.display()
        ))
    })?;
    let lines: Vec<String> = prompt_lines(&text).into_iter().map(str::to_owned).collect();
    match lines.is_empty() {
        true => Err(EngineError::bad_input(format!(
            "train.negative_prompt: {}: there is no prompt in this file: {expected}",
            path.display()
        ))),
        false => Ok(lines),
    }
}

/// The negative prompt of each of `items`, of those of the run. Draws for each, with `max_negative_prompts` above 1, how many it has,
/// `randint(1, max + 1)`; then for each of them, if the run has several, which one, `randint(0, prompts)`.
pub(super) fn negatives(pool: &[String], items: usize, max: u32, generator: &mut TorchGenerator) -> Vec<String> {
    if pool.is_empty() {
        return Vec::new();
    }
    let mut draw = |low: i64, high: i64| match high - low {
        1 => low,
        _ => generator.randint(low, high, 1).first().copied().unwrap_or(low),
    };
    let mut of_item = |_: usize| {
        let count = draw(1, i64::from(max.max(1)) + 1);
        let prompts = (0..count).map(|_| pool[draw(0, pool.len() as i64) as usize].as_str());
        prompts.collect::<Vec<_>>().join(", ")
    };
    (0..items).map(&mut of_item).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::rng::generator_for;

    #[test]
    fn each_item_has_some_of_the_negative_prompts() {
        let mut generator = generator_for(1, "test", 0, 0);
        assert!(negatives(&[], 3, 4, &mut generator).is_empty());
        let one = ["blurry".to_owned()];
        assert_eq!(negatives(&one, 2, 1, &mut generator), ["blurry", "blurry"]);
        let pool = ["blurry".to_owned(), "dark".to_owned(), "noisy".to_owned()];
        let found = negatives(&pool, 300, 2, &mut generator);
        let count = |text: &str| found.iter().filter(|prompt| *prompt == text).count();
        // One in half of the cases, else two that may be the same.
        for text in ["blurry", "dark", "noisy"] {
            assert!((25..=75).contains(&count(text)), "{text}: {}", count(text));
            let twice = format!("{text}, {text}");
            assert!((2..=40).contains(&count(&twice)), "{twice}: {}", count(&twice));
        }
        assert!(
            found
                .iter()
                .all(|prompt| prompt.split(", ").all(|one| pool.iter().any(|text| text == one)))
        );
    }

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
        for arch in [ArchName::Sd3, ArchName::Chroma, ArchName::Zimage, ArchName::FluxKontext] {
            assert_eq!(count(&first, &dropped(arch, 1.0)), 0, "{arch}");
        }
        assert_eq!(count(&first, &dropped(ArchName::Flux, 1.0)), 400);
    }
}
