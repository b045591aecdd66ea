//! The prompts of a generation: from the config, from a text file, or from JSONL.

use crate::context::Context;
use crate::error::{EngineError, Result};
use crate::models::causal_lm::TextTokenizer;
use aitk_common::fsutil::regular;
use aitk_common::job::limits::MAX_TEXT_FILE_BYTES;
use aitk_common::job::lm_generate::LmGenerateConfig;
use aitk_common::job::values::TextSource;
use serde::Deserialize;

/// The most prompts of a process.
const MAX_PROMPTS: usize = 1_000_000;

/// What a completion is made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Prompt {
    pub(super) text: PromptText,
    /// `task_id` of a line of JSONL, which is copied to its results: the harness of HumanEval needs it.
    pub(super) task_id: Option<String>,
}

/// The text of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PromptText {
    /// A text to continue.
    Continue(String),
    /// A gap to fill.
    Fim { prefix: String, suffix: String },
}

impl Prompt {
    /// Its token ids.
    pub(super) fn tokens(&self, tokenizer: &TextTokenizer) -> Result<Vec<u32>> {
        match &self.text {
            PromptText::Continue(text) => tokenizer.encode(text),
            PromptText::Fim { prefix, suffix } => tokenizer.encode_fim(prefix, suffix),
        }
    }
}

/// A line of JSONL.
#[derive(Debug, Deserialize)]
struct Line {
    prompt: Option<String>,
    prefix: Option<String>,
    suffix: Option<String>,
    task_id: Option<String>,
}

/// Reads the prompts and gaps of a config, in their order.
///
/// # Errors
/// When a file cannot be read, a line of JSONL has another form, or there are none or too many.
pub(super) fn read(generate: &LmGenerateConfig, cx: &Context<'_>) -> Result<Vec<Prompt>> {
    let mut prompts = match &generate.prompts {
        TextSource::List(list) => list.iter().cloned().map(continued).collect(),
        TextSource::File(file) if file.is_empty() => Vec::new(),
        TextSource::File(file) => {
            let path = cx.local_path(file)?;
            let bytes = regular::read(&path, MAX_TEXT_FILE_BYTES).map_err(|e| EngineError::io(&path, e))?;
            let text = String::from_utf8(bytes)
                .map_err(|_| EngineError::bad_input(format!("{}: the prompts are not UTF-8", path.display())))?;
            // The name in the config: a staged file may have another one.
            let parsed = match file.to_ascii_lowercase().ends_with(".jsonl") {
                true => json_lines(&text),
                false => Ok(text_lines(&text)),
            };
            parsed.map_err(|problem| EngineError::bad_input(format!("{}: {problem}", path.display())))?
        }
    };
    prompts.extend(generate.fill.iter().map(|item| Prompt {
        text: PromptText::Fim {
            prefix: item.prefix.clone(),
            suffix: item.suffix.clone(),
        },
        task_id: None,
    }));
    match prompts.len() {
        0 => Err(EngineError::bad_input("`generate.prompts`: there is no prompt")),
        1..=MAX_PROMPTS => Ok(prompts),
        count => Err(EngineError::bad_input(format!(
            "generate: there are {count} prompts: expected at most {MAX_PROMPTS}"
        ))),
    }
}

fn continued(text: String) -> Prompt {
    Prompt {
        text: PromptText::Continue(text),
        task_id: None,
    }
}

/// A prompt for each line that is not blank. Spaces at its beginning stay: they mean something in code.
fn text_lines(text: &str) -> Vec<Prompt> {
    let text = text.trim_start_matches('\u{feff}');
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines.map(|line| continued(line.to_owned())).collect()
}

/// A prompt for each line of JSONL that is not blank.
fn json_lines(text: &str) -> std::result::Result<Vec<Prompt>, String> {
    let text = text.trim_start_matches('\u{feff}');
    let mut prompts = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let wrong = |problem: &str| format!("line {}: {problem}", number + 1);
        let line: Line = serde_json::from_str(line)
            .map_err(|error| wrong(&format!("expected a JSON object with texts: {error}")))?;
        let text = match (line.prompt, line.prefix, line.suffix) {
            (Some(prompt), None, None) => PromptText::Continue(prompt),
            (None, Some(prefix), Some(suffix)) => PromptText::Fim { prefix, suffix },
            _ => return Err(wrong("expected either `prompt`, or `prefix` and `suffix`")),
        };
        prompts.push(Prompt {
            text,
            task_id: line.task_id,
        });
    }
    Ok(prompts)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn lines_of_files_are_prompts() {
        let texts = |prompts: Vec<Prompt>| prompts.into_iter().map(|prompt| prompt.text).collect::<Vec<_>>();
        let text = |text: &str| PromptText::Continue(text.into());
        assert_eq!(
            texts(text_lines("\u{feff}def a():\r\n\n    return\n  \n")),
            [text("def a():"), text("    return")]
        );
        let lines =
            "{\"prompt\": \"a\\nb\", \"task_id\": \"t/1\", \"test\": 5}\n\n{\"prefix\": \"x\", \"suffix\": \"\"}\n";
        let prompts = json_lines(lines).unwrap();
        assert_eq!(prompts[0].task_id.as_deref(), Some("t/1"));
        assert_eq!(
            texts(prompts),
            [
                text("a\nb"),
                PromptText::Fim {
                    prefix: "x".into(),
                    suffix: String::new()
                }
            ]
        );
    }

    #[test]
    fn other_lines_are_refused_by_their_number() {
        for line in [
            "{\"prompt\": 5}",
            "{\"prefix\": \"a\"}",
            "{\"prompt\": \"a\", \"suffix\": \"b\"}",
            "[1]",
            "{",
            "{}",
        ] {
            let error = json_lines(&format!("{{\"prompt\": \"a\"}}\n\n{line}\n")).unwrap_err();
            assert!(error.starts_with("line 3: expected"), "{error}");
        }
    }
}
