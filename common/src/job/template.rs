//! Templating of a parsed document: `${VAR}` and `[name]` in text. Keys and comments are left alone.

use super::error::Finding;
use super::limits::{MAX_EXPANDED, NODE_COST, finding, too_large};
use super::node::{Node, Value, shorten};
use super::scalar::resolve;
use super::schema::join;

/// Looks a variable up.
pub type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Replaces every `${VAR}` in every text. An unquoted YAML scalar that is nothing but one variable gets the
/// type that its value would have had in the file.
///
/// # Errors
/// The first variable that is not set.
pub fn expand_variables(node: &mut Node, env: Env<'_>, file: Option<&str>) -> Result<(), Finding> {
    let mut spent = 0;
    walk(node, "", &mut |node, path| {
        let Value::Text(text) = &node.value else { return Ok(()) };
        spent += NODE_COST + text.len();
        if !text.contains("${") {
            return Ok(());
        }
        let expanded = expand(text, env).map_err(|name| {
            let message = match name {
                Some(name) => format!(
                    "the variable `{}` is not set; set it in the environment or in .env",
                    shorten(&name)
                ),
                None => "`${}` needs a name between its braces".to_owned(),
            };
            finding(file, node.mark, path, message)
        })?;
        spent += expanded.len();
        if spent > MAX_EXPANDED {
            return Err(finding(file, node.mark, path, too_large()));
        }
        let whole = node.plain.is_some() && text.starts_with("${") && text.find('}') == Some(text.len() - 1);
        if whole {
            node.value = resolve(&expanded);
            node.plain = Some(expanded);
        } else {
            node.value = Value::Text(expanded);
            node.plain = None;
        }
        Ok(())
    })
}

/// The text with every variable replaced, or the name of one that is not set (`None`: `${}`).
fn expand(text: &str, env: Env<'_>) -> Result<String, Option<String>> {
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
        out.push_str(&env(name).ok_or_else(|| Some(name.to_owned()))?);
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
/// When the config grows beyond all bounds.
pub fn fill_name(node: &mut Node, name: &str, file: Option<&str>) -> Result<(), Finding> {
    let mut spent = 0;
    walk(node, "", &mut |node, path| {
        if let Value::Text(text) = &node.value {
            let count = text.matches("[name]").count();
            spent += NODE_COST + text.len() + count * name.len();
            if spent > MAX_EXPANDED {
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

type Visit<'a> = &'a mut dyn FnMut(&mut Node, &str) -> Result<(), Finding>;

fn walk(node: &mut Node, path: &str, f: Visit<'_>) -> Result<(), Finding> {
    match &mut node.value {
        Value::List(items) => items
            .iter_mut()
            .enumerate()
            .try_for_each(|(index, item)| walk(item, &format!("{path}[{index}]"), f)),
        Value::Map(entries) => entries
            .iter_mut()
            .try_for_each(|entry| walk(&mut entry.node, &join(path, &entry.key), f)),
        _ => f(node, path),
    }
}
