//! The sizes of the images that a job generates.

use super::json::{flag, number};
use crate::job::prompt::PromptFlags;
use serde_json::Value;

/// The most prompts that are read.
const MAX_PROMPTS: usize = 10_000;

/// The size of an image, and whether it is generated with guidance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ImageSize {
    pub(super) width: f64,
    pub(super) height: f64,
    pub(super) guided: bool,
}

impl ImageSize {
    pub(super) fn area(&self) -> f64 {
        self.width * self.height
    }

    /// The sizes of a section.
    fn of_section(section: &Value) -> Self {
        Self {
            width: number(section, "/width").unwrap_or(512.0),
            height: number(section, "/height").unwrap_or(512.0),
            guided: section.get("guidance_scale").and_then(Value::as_f64).unwrap_or(7.0) > 1.0,
        }
    }

    /// The size with the flags of a prompt.
    fn with_flags(self, prompt: &str) -> Self {
        let flags = PromptFlags::parse(prompt);
        Self {
            width: flags.width.map_or(self.width, f64::from),
            height: flags.height.map_or(self.height, f64::from),
            guided: flags.guidance_scale.map_or(self.guided, |scale| scale > 1.0),
        }
        .floored()
    }

    /// Multiples of 8, at least 64.
    fn floored(self) -> Self {
        let floor = |side: f64| ((side / 8.0).floor() * 8.0).max(64.0);
        Self {
            width: floor(self.width),
            height: floor(self.height),
            ..self
        }
    }
}

/// The sizes of the images that `generate` makes.
pub(super) fn image_sizes(body: &Value) -> Vec<ImageSize> {
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
    // Only the largest base matters, for each prompt.
    let Some(base) = bases.into_iter().max_by(|a, b| a.area().total_cmp(&b.area())) else {
        return Vec::new();
    };
    if prompts.is_empty() {
        return vec![base.floored()];
    }
    prompts.into_iter().map(|prompt| base.with_flags(prompt)).collect()
}

/// The sizes of the samples of a training.
pub(super) fn sample_sizes(body: &Value) -> Vec<ImageSize> {
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
                guided: side("guidance_scale", if usual.guided { 7.0 } else { 1.0 }) > 1.0,
            };
            sizes.push(size.with_flags(sample.get("prompt").and_then(Value::as_str).unwrap_or_default()));
        }
    }
    sizes
}
