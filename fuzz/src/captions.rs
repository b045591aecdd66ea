//! Captions, prompts with flags, and the sizes of buckets.

use super::scratch::with_file;
use super::unstructured::Unstructured;
use aitk_common::job::prompt::{PromptFlags, floor_size, replace_trigger};
use aitk_engine::data::{BucketPlan, CaptionRules, TagRules, build_caption, plan_bucket, plan_fixed, read_caption};
use aitk_engine::rng::TorchGenerator;
use std::path::Path;

/// The first byte selects what is tested.
pub fn run(data: &[u8]) {
    let mut input = Unstructured::new(data);
    match input.byte() % 5 {
        0 => buckets(&mut input),
        1 => prompt(&String::from_utf8_lossy(input.rest())),
        2 => file(input.rest(), ".txt"),
        3 => file(input.rest(), ".json"),
        _ => caption(&mut input),
    }
}

/// The caption file beside an image.
fn file(bytes: &[u8], extension: &str) {
    let read = |path: &Path, default: Option<&str>| read_caption(&path.with_extension("png"), extension, default);
    with_file(&format!("caption{extension}"), bytes, |path| {
        let (without, with) = (read(path, None), read(path, Some("a default")));
        match (without, with) {
            (Err(error), Err(_)) => assert!(!error.to_string().is_empty(), "an empty error message"),
            (Ok(without), Ok(with)) if without.trim().is_empty() => assert_eq!(with, "a default"),
            (Ok(without), Ok(with)) => assert_eq!(without, with),
            (without, with) => panic!("the default changes whether the file can be read: {without:?}, {with:?}"),
        }
    });
}

fn prompt(text: &str) {
    let flags = PromptFlags::parse(text);
    for side in [flags.width, flags.height].into_iter().flatten() {
        assert!(side >= 64 && side % 8 == 0, "{side} pixels");
        assert_eq!(floor_size(side), side);
    }
    let numbers = [flags.guidance_scale, flags.network_multiplier, flags.guidance_rescale];
    assert!(numbers.into_iter().flatten().all(f64::is_finite), "{flags:?}");
    let _ = replace_trigger(&flags.prompt, Some("[trigger]"));
}

fn caption(input: &mut Unstructured<'_>) {
    let word = |input: &mut Unstructured<'_>| input.flag().then(|| input.chars());
    let rules = CaptionRules {
        trigger: word(input),
        process_trigger: word(input),
        regularisation: input.flag(),
        caption_dropout: input.real(),
        tags: tags(input),
        random_triggers: (0..input.below(4)).map(|_| input.chars()).collect(),
        random_triggers_max: input.number() as u32 as usize,
        saturation: input.real(),
    };
    let seed = input.u64();
    let text = String::from_utf8_lossy(input.rest());
    let caption = || build_caption(&text, &rules, &mut TorchGenerator::manual_seed(seed));
    let once = caption();
    assert_eq!(once, caption(), "the same seed gives the same caption");
    // Each token is used once, and each placeholder is replaced by the trigger, so the caption's length is bounded.
    let longest = rules.trigger.as_deref().unwrap_or_default().len();
    let triggers: usize = rules.random_triggers.iter().map(|word| word.len() + 2).sum();
    let affixes = [&rules.tags.prefix, &rules.tags.suffix];
    let affixes: usize = affixes.into_iter().flatten().map(|affix| affix.len() + 1).sum();
    let length = text.len() + affixes;
    // Each character can become the separator.
    let separator = rules.tags.separator.as_deref().unwrap_or(",").len();
    let length = match rules.tags.secondary_separator {
        Some(_) => (4 * length + 64) * separator.max(1),
        None => length,
    };
    let bound = (length + triggers + 2) * 4 + (length + 1) * (longest + 2);
    // A short caption is repeated at most 78 times.
    let bound = if rules.saturation > 0.0 {
        78 * (bound + 66)
    } else {
        bound
    };
    assert!(once.len() <= bound + 64, "{} bytes out of {}", once.len(), text.len());
}

/// Empty texts do not come out of a config.
fn tags(input: &mut Unstructured<'_>) -> TagRules {
    let word = |input: &mut Unstructured<'_>| input.flag().then(|| input.chars()).filter(|word| !word.is_empty());
    TagRules {
        token_dropout_rate: input.real(),
        keep_tokens: input.number() as u32 as usize,
        shuffle: input.flag(),
        prefix: word(input),
        suffix: word(input),
        wildcards: input.flag(),
        separator: word(input),
        shuffle_keeps_tokens: input.flag(),
        keep_tokens_separator: word(input),
        secondary_separator: word(input),
        sd_scripts_captions: input.flag(),
    }
}

/// The side of an image: small, huge, or any number.
fn side(input: &mut Unstructured<'_>) -> u32 {
    match input.byte() % 6 {
        0 => u32::from(input.byte()),
        1 => u32::MAX,
        2 => u32::MAX >> input.below(32),
        3 => (u32::from(input.byte()) << 8) | u32::from(input.byte()),
        _ => input.u64() as u32,
    }
}

fn buckets(input: &mut Unstructured<'_>) {
    let (width, height, resolution) = (side(input), side(input), side(input));
    let divisibility = [1, 2, 8, 16, 32, 64, 0, side(input)][input.below(8)];
    assert_crop_is_inside(&plan_bucket(width, height, resolution, divisibility, input.flag()));
    assert_crop_is_inside(&plan_fixed(width, height, (resolution, side(input))));
}

/// The crop lies inside the scaled image.
fn assert_crop_is_inside(plan: &BucketPlan) {
    for (bucket, scaled, crop) in [
        (plan.bucket.0, plan.scale_to.0, plan.crop.0),
        (plan.bucket.1, plan.scale_to.1, plan.crop.1),
    ] {
        let end = crop.checked_add(bucket);
        assert!(
            end.is_some_and(|end| end <= scaled),
            "the crop is outside of the image: {plan:?}"
        );
    }
}
