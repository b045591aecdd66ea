//! Captions (section 10.3): where they are read from, and the order in which they are changed.

use crate::error::{EngineError, Result};
use crate::rng::TorchGenerator;
use aitk_common::fsutil::regular;
use aitk_common::job::limits::MAX_CAPTION_BYTES;
use aitk_common::job::naming;
use std::path::{Path, PathBuf};

/// What is done to every caption of a data set.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CaptionRules {
    /// The data set's trigger word, else the process's.
    pub trigger: Option<String>,
    /// The process's trigger word, which comes back after caption dropout.
    pub process_trigger: Option<String>,
    /// Captions of a regularisation set: no trigger word is put in front or comes back.
    pub regularisation: bool,
    /// Chance of an empty caption.
    pub caption_dropout: f64,
    /// Chance to drop each token.
    pub token_dropout: f64,
    /// Leading tokens that are never dropped.
    pub keep_tokens: usize,
    /// Shuffle the tokens.
    pub shuffle: bool,
    /// Words to append.
    pub random_triggers: Vec<String>,
    /// Above 1: a random number of them, from 0 to this.
    pub random_triggers_max: usize,
}

/// Where the caption of an image lies.
pub(super) fn caption_file(image: &Path, extension: &str) -> PathBuf {
    let mut name = image.file_stem().unwrap_or_default().to_os_string();
    name.push(extension);
    image.with_file_name(name)
}

/// The caption file beside an image: the whole file, not trimmed, or `caption` of a `.json` file; blank or missing means
/// `default`.
///
/// # Errors
/// When it cannot be read, is not UTF-8, or is JSON without a caption.
pub fn read_caption(image: &Path, extension: &str, default: Option<&str>) -> Result<String> {
    naming::check_suffix(extension).map_err(|why| EngineError::bad_input(format!("datasets: caption_ext: {why}")))?;
    let path = caption_file(image, extension);
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
        from_json(&path, &text)?
    } else {
        text
    };
    if text.trim().is_empty() && default.is_some() {
        Ok(fallback())
    } else {
        Ok(text)
    }
}

/// The caption of `{"caption": …}`, as ai-toolkit reads caption files in JSON.
fn from_json(path: &Path, text: &str) -> Result<String> {
    let wrong = |what: String| EngineError::bad_input(format!("{}: {what}", path.display()));
    let value: serde_json::Value = serde_json::from_str(text).map_err(|e| wrong(format!("not valid JSON: {e}")))?;
    let caption = value.get("caption").and_then(serde_json::Value::as_str);
    caption
        .map(str::to_owned)
        .ok_or_else(|| wrong("expected a JSON object with a text `caption`".into()))
}

/// Fisher-Yates with one draw of `torch.randperm`.
fn shuffle<T: Clone>(items: &[T], generator: &mut TorchGenerator) -> Vec<T> {
    generator
        .randperm(items.len())
        .into_iter()
        .filter_map(|i| items.get(usize::try_from(i).ok()?).cloned())
        .collect()
}

/// One caption as it is trained, in ai-toolkit's order: dropout, tokens, trigger, random triggers.
///
/// Draws, in this order and only where the rule is on: caption dropout `rand(1)`; token dropout `rand(1)` per token
/// after the kept ones; shuffling `randperm(tokens)`; number of random triggers `randint(0, max + 1)`, which ones
/// `randperm(triggers)`, or a single one `randint(0, triggers)`; shuffling again `randperm(tokens)`.
#[must_use]
pub fn build_caption(raw: &str, rules: &CaptionRules, generator: &mut TorchGenerator) -> String {
    let mut chance = |p: f64| p > 0.0 && f64::from(generator.rand(1)[0]) < p;
    if chance(rules.caption_dropout) {
        let back = rules.process_trigger.clone().filter(|_| !rules.regularisation);
        return back.unwrap_or_default();
    }
    let mut tokens: Vec<&str> = raw.split(',').collect();
    if rules.token_dropout > 0.0 {
        let mut index = 0;
        tokens.retain(|_| {
            index += 1;
            index <= rules.keep_tokens || !chance(rules.token_dropout)
        });
    }
    if rules.shuffle {
        tokens = shuffle(&tokens, generator);
    }
    // Tokens are not trimmed, so `a, b` becomes `a,  b`, as in ai-toolkit (its quirk 18).
    let mut caption = tokens.join(", ");

    let trigger = rules.trigger.as_deref().unwrap_or_default();
    for mark in ["[trigger]", "[name]"] {
        caption = caption.replace(mark, trigger);
    }
    if !trigger.is_empty() && !rules.regularisation && !caption.contains(trigger) {
        caption = format!("{trigger} {caption}");
    }

    if !rules.random_triggers.is_empty() {
        let count = rules.random_triggers.len();
        let picked: Vec<usize> = if rules.random_triggers_max > 1 {
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
        for index in picked {
            caption = format!("{caption}, {}", rules.random_triggers[index]);
        }
        if rules.shuffle {
            let tokens: Vec<&str> = caption.split(',').collect();
            caption = shuffle(&tokens, generator).join(", ");
        }
    }
    caption
}
