//! Replaces `${VAR}` and `[name]` in the texts of a parsed document. Keys and comments are not changed.
//!
//! A variable that holds a secret is not replaced: the job is stored and shown, so it keeps the reference.

use super::error::Finding;
use super::limits::{MAX_EXPANDED, NODE_BYTES, finding, too_large};
use super::node::{Node, Value, shorten};
use super::scalar::resolve;
use super::schema::join;
use super::secret;
use std::borrow::Cow;

/// A function that looks up a variable.
pub type EnvLookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Replaces every `${VAR}` in every text. A plain YAML scalar gets the type of its expanded text. A secret stays `${VAR}` and
/// gives one of the returned warnings.
///
/// # Errors
/// The first variable that is not set.
pub fn expand_variables(node: &mut Node, env: EnvLookup<'_>, file: Option<&str>) -> Result<Vec<Finding>, Finding> {
    let mut expanded_bytes = 0;
    let mut warnings = Vec::new();
    visit_scalars(node, "", &mut |node, path| {
        let Value::Text(text) = &node.value else { return Ok(()) };
        expanded_bytes += NODE_BYTES + text.len();
        if secret::looks_like_token(text) {
            let message = "this looks like an access token; the config is stored with the job and shown, so take it \
                           out. A worker takes HF_TOKEN from its own environment";
            warnings.push(finding(file, node.mark, path, message));
        }
        if !text.contains("${") {
            return Ok(());
        }
        let mut secrets = Vec::new();
        let expanded = expand_text(text, env, &mut secrets).map_err(|name| {
            let message = match name {
                Some(name) => format!(
                    "the variable `{}` is not set; set it in the environment or in .env",
                    shorten(&name)
                ),
                None => "`${}` needs a name between its braces".to_owned(),
            };
            finding(file, node.mark, path, message)
        })?;
        expanded_bytes += expanded.len();
        if expanded_bytes > MAX_EXPANDED {
            return Err(finding(file, node.mark, path, too_large()));
        }
        for name in secrets {
            let message = format!(
                "`{0}` holds a secret, so the job keeps `${{{0}}}` instead of its value: jobs are stored and shown. \
                 No key needs it; a worker takes HF_TOKEN from its own environment",
                shorten(&name)
            );
            warnings.push(finding(file, node.mark, path, message));
        }
        if node.plain.is_some() {
            node.value = resolve(&expanded);
            node.plain = Some(expanded);
        } else {
            node.value = Value::Text(expanded);
        }
        Ok(())
    })?;
    Ok(warnings)
}

/// Returns the text with every variable replaced except `secrets`, or the name of an unset variable (`None`: `${}`).
fn expand_text(text: &str, env: EnvLookup<'_>, secrets: &mut Vec<String>) -> Result<String, Option<String>> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("${") {
        let (before, after) = rest.split_at(start);
        out.push_str(before);
        let Some(end) = after.find('}') else {
            rest = after;
            break;
        };
        let name = &after[2..end];
        if name.is_empty() {
            return Err(None);
        }
        let value = env(name).ok_or_else(|| Some(name.to_owned()))?;
        if secret::is_secret(name, &value) {
            secrets.push(name.to_owned());
            out.push_str(&after[..=end]);
        } else {
            out.push_str(&value);
        }
        if out.len() > MAX_EXPANDED {
            return Ok(out);
        }
        rest = &after[end + 1..];
    }
    out.push_str(rest);
    Ok(out)
}

/// Replaces every `[name]` in every text by the job's name.
///
/// # Errors
/// The config grows beyond [`MAX_EXPANDED`].
pub fn replace_name(node: &mut Node, name: &str, file: Option<&str>) -> Result<(), Finding> {
    let mut expanded_bytes = 0;
    visit_scalars(node, "", &mut |node, path| {
        if let Value::Text(text) = &node.value {
            let count = text.matches("[name]").count();
            expanded_bytes += NODE_BYTES + text.len() + count * name.len();
            if expanded_bytes > MAX_EXPANDED {
                return Err(finding(file, node.mark, path, too_large()));
            }
            if count > 0 {
                node.value = Value::Text(text.replace("[name]", name));
                node.plain = None;
            }
        }
        Ok(())
    })
}

/// Placeholders for `${` and `}` while YAML is parsed. ai-toolkit replaced variables in the raw text, so they may be unquoted
/// inside `[ ]` and `{ }`, where braces have a meaning in YAML. They have the same number of characters, so positions stay.
const OPEN: &str = "\u{e000}\u{e000}";
const CLOSE: &str = "\u{e001}";

/// Hides every `${NAME}` from the YAML parser; undone by [`restore_variables`].
pub(super) fn hide_variables(text: &str) -> Cow<'_, str> {
    if !text.contains("${") || text.contains(['\u{e000}', '\u{e001}']) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 64);
    let mut rest = text;
    while let Some(start) = rest.find("${") {
        let (before, after) = rest.split_at(start);
        out.push_str(before);
        let name = after[2..].split('}').next().unwrap_or_default();
        let is_closed = after.len() > name.len() + 2;
        if is_closed && !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') {
            out.push_str(OPEN);
            out.push_str(name);
            out.push_str(CLOSE);
            rest = &after[name.len() + 3..];
        } else {
            out.push_str("${");
            rest = &after[2..];
        }
    }
    out.push_str(rest);
    Cow::Owned(out)
}

/// Undoes [`hide_variables`] in a text.
pub(super) fn restore_variables_in_text(text: &mut String) {
    if text.contains(OPEN) {
        *text = text.replace(OPEN, "${").replace(CLOSE, "}");
    }
}

/// Undoes [`hide_variables`] in a parsed tree.
pub(super) fn restore_variables(node: &mut Node) {
    node.plain.iter_mut().for_each(restore_variables_in_text);
    match &mut node.value {
        Value::Text(text) => restore_variables_in_text(text),
        Value::List(items) => items.iter_mut().for_each(restore_variables),
        Value::Map(entries) => {
            for entry in entries {
                restore_variables_in_text(&mut entry.key);
                restore_variables(&mut entry.node);
            }
        }
        _ => {}
    }
}

type TextVisitor<'a> = &'a mut dyn FnMut(&mut Node, &str) -> Result<(), Finding>;

fn visit_scalars(node: &mut Node, path: &str, f: TextVisitor<'_>) -> Result<(), Finding> {
    match &mut node.value {
        Value::List(items) => items
            .iter_mut()
            .enumerate()
            .try_for_each(|(index, item)| visit_scalars(item, &format!("{path}[{index}]"), f)),
        Value::Map(entries) => entries
            .iter_mut()
            .try_for_each(|entry| visit_scalars(&mut entry.node, &join(path, &entry.key), f)),
        _ => f(node, path),
    }
}
