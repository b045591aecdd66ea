//! Captions: where they are read from, and how they are changed for training.

use super::caption_tags::{TagRules, change_tags, shuffle};
use crate::error::{EngineError, Result};
use crate::rng::TorchGenerator;
use aitk_common::fsutil::regular;
use aitk_common::job::limits::MAX_CAPTION_BYTES;
use aitk_common::job::naming;
use std::path::{Path, PathBuf};

/// How every caption of a data set is changed before training.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CaptionRules {
    /// The trigger word of the data set, or else of the process.
    pub trigger: Option<String>,
    /// The process's trigger word, which is the whole caption after caption dropout.
    pub process_trigger: Option<String>,
    /// The captions belong to a regularisation set: no trigger word is added, also not after caption dropout.
    pub regularisation: bool,
    /// Probability of an empty caption.
    pub caption_dropout: f64,
    /// How the tags are changed.
    pub tags: TagRules,
    /// Random triggers, which are appended to the caption.
    pub random_triggers: Vec<String>,
    /// How many triggers are appended: none, one, or above 1 a random number from 0 to this.
    pub random_triggers_max: usize,
    /// Probability to repeat a short caption until it fills the text encoder. Not in regularisation sets.
    pub saturation: f64,
}

/// Captions of fewer words are repeated; the number of tokens of CLIP.
const SATURATED_WORDS: usize = 77;

impl CaptionRules {
    /// The trigger word of these captions, if they have one.
    #[must_use]
    pub fn trigger_word(&self) -> Option<&str> {
        self.trigger.as_deref().or(self.process_trigger.as_deref())
    }
}

/// The path of an image's caption file: the image's path with another suffix.
pub(super) fn caption_path(image: &Path, extension: &str) -> PathBuf {
    let mut name = image.file_stem().unwrap_or_default().to_os_string();
    name.push(extension);
    image.with_file_name(name)
}

/// Reads the caption file next to an image: the whole file, not trimmed, or `caption` of a `.json` file. A blank or
/// missing file gives `default`.
///
/// # Errors
/// When the file cannot be read, is not UTF-8, or is JSON without a caption.
pub fn read_caption(image: &Path, extension: &str, default: Option<&str>) -> Result<String> {
    naming::check_suffix(extension).map_err(|why| EngineError::bad_input(format!("datasets: caption_ext: {why}")))?;
    let path = caption_path(image, extension);
    let fallback = || default.unwrap_or_default().to_owned();
    let bytes = match regular::read(&path, MAX_CAPTION_BYTES) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(fallback()),
        Err(e) => return Err(EngineError::io(&path, e)),
    };
    let text = String::from_utf8(bytes).map_err(|e| {
        EngineError::bad_input(format!(
            "{}: this caption is not UTF-8 (byte {} of the file); save it again as UTF-8",
            path.display(),
            e.utf8_error().valid_up_to() + 1
        ))
    })?;
    let text = text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text);
    let text = if extension.ends_with(".json") && !text.trim().is_empty() {
        parse_json_caption(&path, &text)?
    } else {
        text
    };
    if text.trim().is_empty() && default.is_some() {
        Ok(fallback())
    } else {
        Ok(text)
    }
}

/// Reads the caption of a pair of images as ai-toolkit does: the first caption file that exists beside `images`. Newlines separate tags
/// too, and empty tags are left out. `None`: no file exists. A blank file is an empty caption.
///
/// # Errors
/// As [`read_caption`].
pub(super) fn read_pair_caption(images: &[&Path], extension: &str) -> Result<Option<String>> {
    for image in images {
        if !caption_path(image, extension).exists() {
            continue;
        }
        let text = read_caption(image, extension, None)?;
        let tags = text
            .split([',', '\n', '\r'])
            .map(str::trim)
            .filter(|tag| !tag.is_empty());
        return Ok(Some(tags.collect::<Vec<_>>().join(", ")));
    }
    Ok(None)
}

/// Reads the caption of `{"caption": …}`, as ai-toolkit reads JSON caption files.
fn parse_json_caption(path: &Path, text: &str) -> Result<String> {
    let error = |what: String| EngineError::bad_input(format!("{}: {what}", path.display()));
    let value: serde_json::Value = serde_json::from_str(text).map_err(|e| error(format!("not valid JSON: {e}")))?;
    let caption = value.get("caption").and_then(serde_json::Value::as_str);
    caption
        .map(str::to_owned)
        .ok_or_else(|| error("expected a JSON object with a text `caption`".into()))
}

/// Whether caption dropout removes a caption. Draws `rand(1)` if the rule is on.
#[must_use]
pub fn drops_caption(rules: &CaptionRules, generator: &mut TorchGenerator) -> bool {
    rules.caption_dropout > 0.0 && f64::from(generator.rand(1)[0]) < rules.caption_dropout
}

/// What a caption is after caption dropout: the process's trigger word, or empty.
#[must_use]
pub fn dropped_caption(rules: &CaptionRules) -> String {
    let trigger = rules.process_trigger.clone().filter(|_| !rules.regularisation);
    trigger.unwrap_or_default()
}

/// Changes one caption for training, in ai-toolkit's order: dropout, tags, trigger, random triggers, shuffling again.
///
/// Draws these random numbers, in this order and only where the rule is on: caption dropout `rand(1)`; those of the tags
/// ([`change_tags`]); number of random triggers `randint(0, max + 1)`, which ones `randperm(triggers)`, or a single one
/// `randint(0, triggers)`; shuffling again `randperm(tags)`; repeating it `rand(1)`.
#[must_use]
pub fn build_caption(raw: &str, rules: &CaptionRules, generator: &mut TorchGenerator) -> String {
    let caption = match drops_caption(rules, generator) {
        true => dropped_caption(rules),
        false => changed_caption(raw, rules, generator),
    };
    let saturates = rules.saturation > 0.0 && !rules.regularisation;
    if saturates && f64::from(generator.rand(1)[0]) < rules.saturation {
        let words = caption.split(' ').count();
        if words < SATURATED_WORDS {
            return vec![caption; SATURATED_WORDS / words + 1].join(", ");
        }
    }
    caption
}

/// The caption without caption dropout and repetition.
fn changed_caption(raw: &str, rules: &CaptionRules, generator: &mut TorchGenerator) -> String {
    let mut caption = change_tags(raw, &rules.tags, generator);
    let trigger = rules.trigger.as_deref().unwrap_or_default();
    for placeholder in ["[trigger]", "[name]"] {
        caption = caption.replace(placeholder, trigger);
    }
    if !trigger.is_empty() && !rules.regularisation && !caption.contains(trigger) {
        caption = format!("{trigger} {caption}");
    }

    let has_random_triggers = !rules.random_triggers.is_empty() && rules.random_triggers_max > 0;
    if has_random_triggers {
        let count = rules.random_triggers.len();
        let indices: Vec<usize> = if rules.random_triggers_max > 1 {
            let number = generator.randint(0, rules.random_triggers_max as i64 + 1, 1)[0];
            generator
                .randperm(count)
                .into_iter()
                .take(usize::try_from(number).unwrap_or(0))
                .map(|i| i as usize)
                .collect()
        } else {
            vec![generator.randint(0, count as i64, 1)[0] as usize]
        };
        for index in indices {
            caption = format!("{caption}, {}", rules.random_triggers[index]);
        }
    }
    // The trigger words get a random place among the tags.
    if rules.tags.shuffles_again(has_random_triggers) {
        let tokens: Vec<&str> = caption.split(',').collect();
        caption = shuffle(&tokens, generator).join(", ");
    }
    caption
}
