//! How a `datasets` entry changes its captions.

use super::context::Context;
use crate::data::{CaptionRules, TagRules};
use crate::error::{EngineError, Result};
use aitk_common::fsutil::regular;
use aitk_common::job::dataset::DatasetConfig;
use aitk_common::job::limits::MAX_TEXT_FILE_BYTES;
use aitk_common::job::values::TextSource;

/// Converts the keys of an entry. What its process adds is not set.
///
/// # Errors
/// When the file of random triggers cannot be read.
pub(super) fn caption_rules(dataset: &DatasetConfig, cx: &Context<'_>) -> Result<CaptionRules> {
    Ok(CaptionRules {
        trigger: dataset.trigger_word.clone(),
        caption_dropout: *dataset.caption_dropout_rate,
        tags: TagRules {
            sd_scripts_captions: dataset.sd_scripts_captions,
            prefix: dataset.caption_prefix.clone(),
            suffix: dataset.caption_suffix.clone(),
            wildcards: dataset.enable_wildcard,
            separator: dataset.caption_separator.clone(),
            token_dropout_rate: *dataset.token_dropout_rate,
            keep_tokens: dataset.keep_tokens as usize,
            shuffle: dataset.shuffle_tokens,
            shuffle_keeps_tokens: dataset.shuffle_keeps_tokens,
            keep_tokens_separator: dataset.keep_tokens_separator.clone(),
            secondary_separator: dataset.secondary_separator.clone(),
        },
        random_triggers: random_triggers(dataset, cx)?,
        random_triggers_max: dataset.random_triggers_max as usize,
        ..CaptionRules::default()
    })
}

fn random_triggers(dataset: &DatasetConfig, cx: &Context<'_>) -> Result<Vec<String>> {
    let file = match &dataset.random_triggers {
        TextSource::List(list) => return Ok(list.clone()),
        TextSource::File(file) if file.is_empty() => return Ok(Vec::new()),
        TextSource::File(file) => file,
    };
    let path = cx.local_path(file)?;
    let text = regular::read_text(&path, MAX_TEXT_FILE_BYTES).map_err(|error| {
        EngineError::bad_input(format!(
            "datasets.random_triggers: {}: {error}: expected a text file with one word or text per line",
            path.display()
        ))
    })?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    Ok(lines.map(str::to_owned).collect())
}
