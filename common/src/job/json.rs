//! Parses JSON and JSONC text into a [`Node`].

use super::error::Finding;
use super::limits::{MAX_DEPTH, finding, too_deep};
use super::node::{Entry, Mark, Node, Value, shorten};
use jsonc_parser::ast::{ObjectPropName, Value as Ast};
use jsonc_parser::common::Ranged;
use jsonc_parser::{CollectOptions, ParseOptions, parse_to_ast};
use std::cell::Cell;
use std::collections::HashMap;

/// Parses a JSON document; with `comments` also comments and trailing commas.
///
/// # Errors
/// The first error, with its position.
pub(crate) fn parse(text: &str, comments: bool, file: Option<&str>) -> Result<Node, Finding> {
    let lines = PositionCounter::new(text);
    if let Some(offset) = find_too_deep(text) {
        return Err(finding(file, lines.mark(offset), "", too_deep()));
    }
    let options = ParseOptions {
        allow_comments: comments,
        allow_loose_object_property_names: false,
        allow_trailing_commas: comments,
        allow_missing_commas: false,
        allow_single_quoted_strings: false,
        allow_hexadecimal_numbers: false,
        allow_unary_plus_numbers: false,
        allow_bare_decimal_point_numbers: false,
        allow_non_finite_numbers: false,
        allow_extended_string_escapes: false,
    };
    let parsed = parse_to_ast(text, &CollectOptions::default(), &options).map_err(|error| {
        let kind = error.kind().to_string();
        let hint = if !comments && (kind.starts_with("Comments") || kind.starts_with("Trailing commas")) {
            "; rename the file to .jsonc to have comments and trailing commas"
        } else if text
            .get(error.range().start..)
            .is_some_and(|rest| rest.starts_with('$'))
        {
            "; write ${…} inside quotes"
        } else {
            ""
        };
        let at = lines.mark(error.range().start);
        finding(
            file,
            at,
            "",
            format!("this is not valid JSON: {}{hint}", lower_first(&kind)),
        )
    })?;
    match parsed.value {
        Some(value) => Converter { file, lines: &lines }.convert(&value, "", 0),
        None => Err(finding(file, Mark { line: 1, column: 1 }, "", "the config is empty")),
    }
}

fn lower_first(text: &str) -> String {
    let mut chars = text.chars();
    chars
        .next()
        .map_or_else(String::new, |first| first.to_lowercase().chain(chars).collect())
}

/// Returns the offset where brackets outside of strings nest too deeply. Brackets in comments count too.
fn find_too_deep(text: &str) -> Option<usize> {
    let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
    for (offset, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'[' | b'{' if !in_string => {
                depth += 1;
                // The parser stops at 512; this check is cheaper.
                if depth > 400 {
                    return Some(offset);
                }
            }
            b']' | b'}' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    None
}

/// Converts byte offsets to positions. Continues from the last offset, so increasing offsets read the text only once, however
/// long its lines are.
struct PositionCounter<'a> {
    text: &'a str,
    last: Cell<(usize, Mark)>,
}

const START: (usize, Mark) = (0, Mark { line: 1, column: 1 });

impl<'a> PositionCounter<'a> {
    fn new(text: &'a str) -> Self {
        Self {
            text,
            last: Cell::new(START),
        }
    }

    fn mark(&self, offset: usize) -> Mark {
        let (from, mut mark) = if self.last.get().0 <= offset {
            self.last.get()
        } else {
            START
        };
        for character in self.text.get(from..offset).unwrap_or("").chars() {
            if character == '\n' {
                mark = Mark {
                    line: mark.line.saturating_add(1),
                    column: 1,
                };
            } else {
                mark.column = mark.column.saturating_add(1);
            }
        }
        self.last.set((offset, mark));
        mark
    }
}

struct Converter<'a> {
    file: Option<&'a str>,
    lines: &'a PositionCounter<'a>,
}

impl Converter<'_> {
    fn convert(&self, value: &Ast<'_>, path: &str, depth: usize) -> Result<Node, Finding> {
        let mark = self.lines.mark(value.range().start);
        if depth > MAX_DEPTH {
            return Err(finding(self.file, mark, path, too_deep()));
        }
        let mut plain = None;
        let value = match value {
            Ast::NullKeyword(_) => Value::Null,
            Ast::BooleanLit(literal) => Value::Bool(literal.value),
            Ast::StringLit(literal) => Value::Text(literal.value.to_string()),
            Ast::NumberLit(literal) => {
                plain = Some(literal.value.to_owned());
                match literal.value.parse::<i64>() {
                    Ok(value) => Value::Int(value),
                    Err(_) => match literal.value.parse::<f64>() {
                        Ok(value) => Value::Float(value),
                        Err(_) => {
                            let message = format!("`{}` is not a number", shorten(literal.value));
                            return Err(finding(self.file, mark, path, message));
                        }
                    },
                }
            }
            Ast::Array(array) => Value::List(
                array
                    .elements
                    .iter()
                    .enumerate()
                    .map(|(index, element)| self.convert(element, &format!("{path}[{index}]"), depth + 1))
                    .collect::<Result<_, _>>()?,
            ),
            Ast::Object(object) => {
                let mut seen: HashMap<String, Mark> = HashMap::with_capacity(object.properties.len());
                let mut entries = Vec::with_capacity(object.properties.len());
                for property in &object.properties {
                    let key = match &property.name {
                        ObjectPropName::String(literal) => literal.value.to_string(),
                        ObjectPropName::Word(literal) => literal.value.to_owned(),
                    };
                    let at = self.lines.mark(property.range.start);
                    let path = super::schema::join(path, &shorten(&key));
                    if let Some(first) = seen.insert(key.clone(), at) {
                        let message = format!(
                            "the key `{}` is given twice in this section, first in line {}; remove one of them",
                            shorten(&key),
                            first.line
                        );
                        return Err(finding(self.file, at, &path, message));
                    }
                    let node = self.convert(&property.value, &path, depth + 1)?;
                    entries.push(Entry { key, mark: at, node });
                }
                Value::Map(entries)
            }
        };
        Ok(Node { mark, value, plain })
    }
}
