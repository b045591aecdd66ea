//! The sizes of the images that a job generates.

use super::image_batches::ImageBatch;
use super::json::{flag, number, text};
use super::slider::slider_sizes;
use crate::job::limits::MAX_SIDE;
use crate::job::prompt::PromptFlags;
use serde_json::Value;

/// The most prompts that are read.
const MAX_PROMPTS: usize = 10_000;

/// The size of an image, its guidance scale, and the length of its prompts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ImageSize {
    pub(super) width: f64,
    pub(super) height: f64,
    pub(super) guidance_scale: f64,
    /// Characters of the prompt.
    pub(super) characters: f64,
    /// Characters of the negative prompt, which guidance needs.
    pub(super) negative_characters: f64,
}

/// The characters of a text.
fn count(text: &str) -> f64 {
    text.chars().count() as f64
}

impl ImageSize {
    /// Characters of the longest text that is encoded for it.
    pub(super) fn longest_text(&self) -> f64 {
        match self.guidance_scale > 1.0 {
            true => self.characters.max(self.negative_characters),
            false => self.characters,
        }
    }

    pub(super) fn area(&self) -> f64 {
        self.width * self.height
    }

    /// The sizes of a section.
    fn of_section(section: &Value) -> Self {
        Self {
            width: number(section, "/width").unwrap_or(512.0),
            height: number(section, "/height").unwrap_or(512.0),
            guidance_scale: section.get("guidance_scale").and_then(Value::as_f64).unwrap_or(7.0),
            characters: 0.0,
            negative_characters: text(section, "/neg").map_or(0.0, count),
        }
    }

    /// The size with the flags of a prompt.
    fn with_flags(self, prompt: &str, multiple: f64) -> Self {
        let flags = PromptFlags::parse(prompt);
        Self {
            width: flags.width.map_or(self.width, f64::from),
            height: flags.height.map_or(self.height, f64::from),
            guidance_scale: flags.guidance_scale.unwrap_or(self.guidance_scale),
            characters: count(&flags.prompt),
            negative_characters: flags.negative_prompt.as_deref().map_or(self.negative_characters, count),
        }
        .floored(multiple)
    }

    /// Sides that are multiples of this number, at least 64.
    fn floored(self, multiple: f64) -> Self {
        let floor = |side: f64| ((side / multiple).floor() * multiple).max(64.0);
        Self {
            width: floor(self.width),
            height: floor(self.height),
            ..self
        }
    }
}

/// The sizes of the images that `generate` makes, whose sides are multiples of `multiple`.
fn image_sizes(body: &Value, multiple: f64) -> Vec<ImageSize> {
    let Some(section) = body.get("generate") else {
        return Vec::new();
    };
    let usual = ImageSize::of_section(section);
    let mut bases = vec![usual];
    if let Some(list) = section.get("size_list").and_then(Value::as_array) {
        let sizes = list.iter().filter_map(|size| {
            Some(ImageSize {
                width: size.get(0)?.as_f64()?,
                height: size.get(1)?.as_f64()?,
                ..usual
            })
        });
        let sizes: Vec<_> = sizes.collect();
        if !sizes.is_empty() {
            bases = sizes;
        }
    }
    let prompts = section.get("prompts").and_then(|prompts| {
        prompts
            .as_array()
            .or_else(|| prompts.as_object()?.values().find_map(Value::as_array))
    });
    let prompts: Vec<&str> = prompts
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .take(MAX_PROMPTS)
        .collect();
    // A prompt may get any of the sizes, and its flags replace one side or both: only the largest result matters.
    let largest =
        |size: &dyn Fn(&ImageSize) -> ImageSize| bases.iter().map(size).max_by(|a, b| a.area().total_cmp(&b.area()));
    if prompts.is_empty() {
        return largest(&|base| base.floored(multiple)).into_iter().collect();
    }
    prompts
        .into_iter()
        .filter_map(|prompt| largest(&|base| base.with_flags(prompt, multiple)))
        .collect()
}

/// As [`image_sizes`]; where the prompts are in a file, the largest of its images, if the client has `seen` it.
pub(super) fn image_sizes_with_files(body: &Value, multiple: f64, seen: &[ImageBatch]) -> Vec<ImageSize> {
    let sizes = image_sizes(body, multiple);
    let is_file = body.pointer("/generate/prompts").is_some_and(Value::is_string);
    let largest = seen.iter().max_by_key(|image| image.pixels()).filter(|_| is_file);
    let Some(largest) = largest else { return sizes };
    let side = |side: u32| f64::from(side.min(MAX_SIDE));
    let sizes = sizes.into_iter().map(|usual| {
        let size = ImageSize {
            width: side(largest.width),
            height: side(largest.height),
            ..usual
        };
        size.floored(multiple)
    });
    sizes.collect()
}

/// The side of a square of as many pixels as the images of `train.validation_config` have at most, if there are some.
pub(super) fn validation_side(body: &Value) -> Option<f64> {
    let config = body.pointer("/train/validation_config")?;
    let items = config.get("validation_items").and_then(Value::as_array)?;
    let side = number(config, "/resolution").unwrap_or(512.0);
    (!items.is_empty()).then_some(side.clamp(64.0, f64::from(MAX_SIDE)))
}

/// The sizes at which the steps of a slider sample its noisy latents; those of a whole batch side by side.
pub(super) fn slider_sampling_sizes(body: &Value, multiple: f64) -> Vec<ImageSize> {
    let Some((sizes, true)) = slider_sizes(body) else {
        return Vec::new();
    };
    let items = number(body, "/train/batch_size").unwrap_or(1.0).max(1.0);
    let size = |[width, height]: [f64; 2]| ImageSize {
        width: width * items,
        height,
        guidance_scale: 3.0,
        characters: 0.0,
        negative_characters: 0.0,
    };
    sizes.into_iter().map(|sides| size(sides).floored(multiple)).collect()
}

/// The sizes of the samples of a training, as [`image_sizes`].
pub(super) fn sample_sizes(body: &Value, multiple: f64) -> Vec<ImageSize> {
    if flag(body, "/train/disable_sampling") {
        return Vec::new();
    }
    let mut sizes = Vec::new();
    for key in ["sample", "first_sample"] {
        let Some(section) = body.get(key).filter(|section| section.is_object()) else {
            continue;
        };
        let usual = ImageSize::of_section(section);
        let samples = section.get("samples").and_then(Value::as_array);
        for sample in samples.into_iter().flatten().take(MAX_PROMPTS) {
            let side = |key: &str, usual: f64| sample.get(key).and_then(Value::as_f64).unwrap_or(usual);
            let size = ImageSize {
                width: side("width", usual.width),
                height: side("height", usual.height),
                guidance_scale: side("guidance_scale", usual.guidance_scale),
                characters: 0.0,
                negative_characters: text(sample, "/neg").map_or(usual.negative_characters, count),
            };
            let prompt = sample.get("prompt").and_then(Value::as_str).unwrap_or_default();
            sizes.push(size.with_flags(prompt, multiple));
        }
    }
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_prompt_s_flags_count_with_the_size_of_the_list_that_is_largest_then() {
        let sides = |prompts: Value| {
            let body = json!({"generate": {"size_list": [[512, 1024], [1024, 512]], "prompts": prompts}});
            let sizes = image_sizes(&body, 8.0).into_iter();
            sizes.map(|size| [size.width, size.height]).collect::<Vec<_>>()
        };
        assert_eq!(
            sides(json!(["a --w 2048", "b --h 2048", "c --w 64 --h 64"])),
            [[2048.0, 1024.0], [1024.0, 2048.0], [64.0, 64.0]]
        );
        assert_eq!(sides(json!(["a"]))[0].iter().product::<f64>(), 524_288.0);
        assert_eq!(sides(json!("prompts.txt")).len(), 1);
    }

    #[test]
    fn a_negative_prompt_counts_where_it_is_encoded() {
        let longest = |section: Value| {
            let sizes = sample_sizes(&json!({"sample": section}), 8.0);
            sizes.iter().map(ImageSize::longest_text).fold(0.0, f64::max)
        };
        let samples = |neg: Value, prompt: &str, scale: f64| {
            let usual = json!({"neg": "blurred", "guidance_scale": scale, "samples": [{"prompt": prompt, "neg": neg}]});
            longest(usual)
        };
        assert_eq!(samples(json!(null), "a", 4.0), 7.0);
        assert_eq!(samples(json!(null), "a long one", 4.0), 10.0);
        assert_eq!(samples(json!(null), "a", 1.0), 1.0);
        assert_eq!(samples(json!("dark"), "a", 4.0), 4.0);
        assert_eq!(samples(json!(null), "a --n too dark", 4.0), 8.0);
    }

    #[test]
    fn the_largest_image_of_a_file_counts_if_it_was_seen() {
        let sides = |prompts: Value, seen: &[(u32, u32)]| {
            let body = json!({"generate": {"width": 512, "height": 512, "prompts": prompts}});
            let image = |(width, height): &(u32, u32)| ImageBatch {
                process: 0,
                width: *width,
                height: *height,
                images: 1,
            };
            let seen: Vec<ImageBatch> = seen.iter().map(image).collect();
            let sizes = image_sizes_with_files(&body, 8.0, &seen).into_iter();
            sizes.map(|size| [size.width, size.height]).collect::<Vec<_>>()
        };
        let file = || json!("prompts.txt");
        assert_eq!(sides(file(), &[(2048, 512), (64, 64)]), [[2048.0, 512.0]]);
        assert_eq!(sides(file(), &[(u32::MAX, 7)]), [[f64::from(MAX_SIDE), 64.0]]);
        assert_eq!(sides(file(), &[]), [[512.0, 512.0]]);
        // What is in the job itself is known better.
        assert_eq!(sides(json!(["a"]), &[(2048, 512)]), [[512.0, 512.0]]);
    }
}
