//! Compares the chat template of a tokenizer's folder with that of Qwen3, as which prompts are written. Templates are Jinja programs,
//! and are not run: what they write around a prompt is found in their string literals.

use crate::error::{EngineError, Result};
use crate::models::config;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// What comes before the answer.
const ANSWER: &str = r"<|im_start|>assistant\n";
/// What comes before an answer without thinking. Prompts are written for an answer with it.
const NO_THINKING: &str = r"<think>\n\n</think>\n\n";
/// The beginning of a system message. Prompts are written without one.
const SYSTEM: &str = r"<|im_start|>system\n";

/// Refuses the chat template of a folder that writes something else around a prompt than Qwen3's. A folder may have none.
///
/// # Errors
/// The file of the template, and what it writes.
pub(super) fn check(folder: &Path) -> Result<()> {
    let Some((file, template)) = read(folder)? else {
        return Ok(());
    };
    match difference(&template) {
        None => Ok(()),
        Some(difference) => Err(EngineError::model_config(
            file,
            format!(
                "this chat template is not that of Qwen3, the only one that is supported: {difference}; use the tokenizer of Z-Image \
                 or of Qwen3 4B"
            ),
        )),
    }
}

/// The template of a folder and its file, as transformers chooses it.
fn read(folder: &Path) -> Result<Option<(PathBuf, String)>> {
    let file = folder.join("chat_template.jinja");
    if file.is_file() {
        let text = config::read_text(&file).map_err(|error| EngineError::io(&file, error))?;
        return Ok(Some((file, text)));
    }
    let file = folder.join("tokenizer_config.json");
    if !file.is_file() {
        return Ok(None);
    }
    let settings = config::read_json(&file)?;
    let template = match settings.get("chat_template") {
        Some(Value::Array(named)) => named
            .iter()
            .find(|template| template.get("name").is_some_and(|name| name == "default"))
            .and_then(|template| template.get("template")),
        other => other,
    };
    let template = template.and_then(Value::as_str).map(str::to_owned);
    Ok(template.map(|template| (file, template)))
}

/// What a template writes that Qwen3's does not, around the message of a user that is followed by an answer with thinking.
fn difference(template: &str) -> Option<String> {
    if let Some(system) = literals(template)
        .iter()
        .find(|text| text.len() > SYSTEM.len() && text.starts_with(SYSTEM))
    {
        return Some(format!("it adds the system message `{system}`"));
    }
    // The last use of the variable is what the template ends with.
    let use_of_variable = template.rfind("add_generation_prompt");
    let block = use_of_variable.and_then(|at| template.get(..at)?.rfind("{%"));
    let end = block.and_then(|at| template.get(at..)).unwrap_or_default();
    let mut written = literals(end).into_iter();
    let first = written.next();
    if first.as_deref() != Some(ANSWER) {
        return Some(match first {
            Some(text) => format!("it begins an answer with `{text}`, expected `{ANSWER}`"),
            None => format!("it does not begin an answer with `{ANSWER}`"),
        });
    }
    let is_for_no_thinking = end.contains("enable_thinking is false") && !end.contains("else");
    let more = written.find(|text| text != NO_THINKING || !is_for_no_thinking)?;
    Some(format!("it continues an answer with `{more}`"))
}

/// The string literals in the blocks of a template, with their escapes.
fn literals(template: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut rest = template;
    while let Some(at) = rest.find('{') {
        let close = match rest.as_bytes().get(at + 1) {
            Some(b'{') => "}}",
            Some(b'%') => "%}",
            Some(b'#') => "#}",
            _ => {
                rest = &rest[at + 1..];
                continue;
            }
        };
        rest = &rest[at + 2..];
        while let Some(next) = rest.chars().next() {
            if let Some(after) = rest.strip_prefix(close) {
                rest = after;
                break;
            }
            rest = &rest[next.len_utf8()..];
            if close == "#}" || !matches!(next, '\'' | '"') {
                continue;
            }
            let mut is_escaped = false;
            let end = rest.find(|inner: char| {
                let is_end = inner == next && !is_escaped;
                is_escaped = inner == '\\' && !is_escaped;
                is_end
            });
            let Some(end) = end else {
                return found;
            };
            found.push(rest[..end].replace('\n', "\\n"));
            rest = &rest[end + 1..];
        }
    }
    found
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const MESSAGES: &str = "{# it's a chat #}{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}";
    const TOOLS: &str =
        "{%- if tools %}{{- '<|im_start|>system\\n' }}{{- \"# Tools\\n\\nYou may call functions\" }}{%- endif %}";
    const END: &str = "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n";
    const NO_THINKING: &str =
        "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}";

    #[test]
    fn only_templates_that_write_the_same_around_a_prompt_are_accepted() {
        let close = "{%- endif %}{%- endif %}";
        for same in [
            format!("{TOOLS}{MESSAGES}{END}{NO_THINKING}{close}"),
            format!("{MESSAGES}{END}{{% endif %}}"),
            // The newline itself instead of its escape.
            format!("{MESSAGES}{END}{{% endif %}}").replace("\\n", "\n"),
        ] {
            assert_eq!(difference(&same), None, "{same}");
        }
        for (other, expected) in [
            (
                format!("{{{{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}}}{MESSAGES}{END}{{% endif %}}"),
                "You are Qwen.",
            ),
            (
                format!("{MESSAGES}{END}{{% endif %}}").replace("assistant\\n", "assistant\\n<think>\\n"),
                r"`<|im_start|>assistant\n<think>\n`",
            ),
            (
                format!("{MESSAGES}{END}{{{{- '<think>\\n' }}}}{{% endif %}}"),
                r"continues an answer with `<think>\n`",
            ),
            (
                format!("{MESSAGES}{END}{NO_THINKING}{{%- else %}}{{{{- '<think>\\n' }}}}{close}"),
                "continues an answer",
            ),
            (
                "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endfor %}".to_owned(),
                "does not begin an answer",
            ),
        ] {
            let found = difference(&other).unwrap();
            assert!(found.contains(expected), "{found}");
        }
    }

    #[test]
    fn the_file_comes_before_the_key() {
        let folder = tempfile::tempdir().unwrap();
        check(folder.path()).unwrap();
        let named = serde_json::json!({"chat_template": [
            {"name": "tool_use", "template": "{{ '[INST]' }}"},
            {"name": "default", "template": format!("{MESSAGES}{END}{{% endif %}}")},
        ]});
        std::fs::write(folder.path().join("tokenizer_config.json"), named.to_string()).unwrap();
        check(folder.path()).unwrap();
        std::fs::write(folder.path().join("chat_template.jinja"), MESSAGES).unwrap();
        let error = check(folder.path()).unwrap_err().to_string();
        assert!(
            error.contains("chat_template.jinja") && error.contains("Qwen3"),
            "{error}"
        );
    }
}
