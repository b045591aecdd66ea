//! `generate` of the processes that generate images: `to_folder` and `batch_img2img`.

use super::declare::section;
use super::limits::{MAX_FACTOR, MAX_LINES_PER_PROMPT, MAX_RANDOM_PROMPTS, MAX_REPEATS, MAX_SAMPLE_STEPS, MAX_SIDE};
use super::sampler::SamplerName;
use super::schema::{PresentKeys, ReadContext};
use super::values::{ImageSize, TextSource};

section! {
    /// What `to_folder` generates.
    pub struct GenerateConfig("generate") {
        /// Prompts, or a text file with one per line. May end in flags such as `--seed 7`.
        prompts [required]: TextSource = TextSource::default(), Works, input PromptFile;
        /// Sampler; models of flow matching take `flowmatch`, `heun`, `dpmsolver++` and `unipc`.
        sampler: SamplerName = SamplerName::Ddpm, Works;
        /// Width in pixels, floored to a multiple of 8 (of 16 for families with a transformer), at least 64.
        width: u32 = 512, Works;
        /// Height in pixels, floored to a multiple of 8 (of 16 for families with a transformer), at least 64.
        height: u32 = 512, Works;
        /// Sizes; one is picked at random for each image.
        size_list: Option<Vec<ImageSize>> = None, Works;
        /// Negative prompt.
        neg: String = String::new(), Works;
        /// Prompt of the second text encoder.
        prompt_2: Option<String> = None, Works;
        /// Negative prompt of the second text encoder.
        neg_2: Option<String> = None, Works;
        /// Seed of every image; -1 is random per image.
        seed: i64 = -1, Works;
        /// Guidance scale.
        guidance_scale: f64 = 7.0, Works;
        /// Guidance rescale.
        guidance_rescale: f64 = 0.0, Works;
        /// Steps.
        sample_steps: u32 = 20, Works;
        /// Suffix of the files, with or without the dot.
        ext: String = "png".into(), Works;
        /// Write the prompt beside the image as `.txt`.
        prompt_file: bool = false, Works;
        /// How often the list of prompts is repeated.
        num_repeats: u32 = 1, Works;
        /// Build prompts from random lines, joined by commas.
        random_prompts: bool = false, Works;
        /// Lines per random prompt.
        max_random_per_prompt: u32 = 1, Works;
        /// Number of random prompts.
        max_images: u32 = 10_000, Works;
        /// Shuffle the prompts.
        shuffle: bool = false, Works;
        /// torch.compile.
        compile: bool = false, Accepted("an optimisation; the result is the same");
    }
    finish = finish_generate;
}

/// Returns the prompts of a text file: its trimmed lines, without empty ones.
#[must_use]
pub fn prompt_lines(text: &str) -> Vec<&str> {
    numbered_prompt_lines(text).map(|(_, line)| line).collect()
}

/// As [`prompt_lines`], each with the number of its line, from 1.
pub fn numbered_prompt_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text.trim_start_matches('\u{feff}').lines().map(str::trim);
    (1..).zip(lines).filter(|(_, line)| !line.is_empty())
}

impl GenerateConfig {
    /// The number of images generated from this many prompts.
    #[must_use]
    pub fn image_count(&self, prompts: usize) -> u64 {
        let list = if self.random_prompts {
            u64::from(self.max_images)
        } else {
            prompts as u64
        };
        list.saturating_mul(u64::from(self.num_repeats.max(1)))
    }
}

fn finish_generate(generate: &mut GenerateConfig, _present: &PresentKeys, cx: &mut ReadContext) {
    generate.ext = generate.ext.trim_start_matches('.').to_ascii_lowercase();
    check_image_suffix(&generate.ext, cx);
    if generate.sample_steps == 0 {
        cx.error_at("sample_steps", "expected at least 1");
    }
    cx.check_at_most("sample_steps", generate.sample_steps, MAX_SAMPLE_STEPS);
    for (key, value) in [
        ("width", generate.width),
        ("height", generate.height),
        ("num_repeats", generate.num_repeats),
        ("max_images", generate.max_images),
        ("max_random_per_prompt", generate.max_random_per_prompt),
    ] {
        cx.check_not_zero(key, value);
    }
    cx.check_in_range("guidance_scale", generate.guidance_scale, -MAX_FACTOR..=MAX_FACTOR);
    cx.check_in_range("guidance_rescale", generate.guidance_rescale, 0.0..=1.0);
    cx.check_at_most("width", generate.width, MAX_SIDE);
    cx.check_at_most("height", generate.height, MAX_SIDE);
    cx.check_at_most("num_repeats", generate.num_repeats, MAX_REPEATS);
    cx.check_at_most("max_images", generate.max_images, MAX_RANDOM_PROMPTS);
    cx.check_at_most(
        "max_random_per_prompt",
        generate.max_random_per_prompt,
        MAX_LINES_PER_PROMPT,
    );
    for (index, ImageSize(width, height)) in generate.size_list.iter().flatten().enumerate() {
        let key = format!("size_list[{index}]");
        cx.check_not_zero(&key, *width.min(height));
        cx.check_at_most(&key, *width.max(height), MAX_SIDE);
    }
    if generate.size_list.as_ref().is_some_and(Vec::is_empty) {
        generate.size_list = None;
    }
}

section! {
    /// How `batch_img2img` changes the images of its data sets.
    pub struct Img2ImgConfig("generate") {
        /// Sampler; models of flow matching take `flowmatch`, `heun`, `dpmsolver++` and `unipc`.
        sampler: SamplerName = SamplerName::Ddpm, Works;
        /// Negative prompt.
        neg: String = String::new(), Works;
        /// Seed; -1 is random.
        seed: i64 = -1, Works;
        /// Image i uses `seed` + i.
        walk_seed: bool = false, Works;
        /// Guidance scale.
        guidance_scale: f64 = 7.0, Works;
        /// Steps of the full schedule.
        sample_steps: u32 = 20, Works;
        /// Guidance rescale.
        guidance_rescale: f64 = 0.0, Works;
        /// Suffix of the files, with or without the dot.
        ext: String = "png".into(), Works;
        /// How much of the image changes: 0 nothing, 1 everything.
        denoise_strength: f64 = 0.5, Works;
        /// Trigger word for `[trigger]` in captions.
        trigger_word: Option<String> = None, Works;
    }
    finish = finish_img2img;
}

fn finish_img2img(generate: &mut Img2ImgConfig, _present: &PresentKeys, cx: &mut ReadContext) {
    generate.ext = generate.ext.trim_start_matches('.').to_ascii_lowercase();
    check_image_suffix(&generate.ext, cx);
    if generate.sample_steps == 0 {
        cx.error_at("sample_steps", "expected at least 1");
    }
    cx.check_at_most("sample_steps", generate.sample_steps, MAX_SAMPLE_STEPS);
    cx.check_in_range("guidance_scale", generate.guidance_scale, -MAX_FACTOR..=MAX_FACTOR);
    cx.check_in_range("guidance_rescale", generate.guidance_rescale, 0.0..=1.0);
    if !(0.0..=1.0).contains(&generate.denoise_strength) {
        cx.error_at("denoise_strength", "expected a share from 0 to 1");
    }
}

fn check_image_suffix(ext: &str, cx: &mut ReadContext) {
    const KNOWN: &[&str] = &["png", "jpg", "jpeg", "webp"];
    if !KNOWN.contains(&ext) {
        cx.error_at(
            "ext",
            format!("`{ext}` is not a known image format. Known: {}", KNOWN.join(", ")),
        );
    }
}
